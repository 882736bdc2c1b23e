"""
What the machine has: devices, types of numbers, random numbers.
"""
from contextlib import contextmanager, nullcontext

import numpy as np
import torch

from data.errors import UserError
from data.processes import local_rank, rank, world_size
from data.screen import note


def pick_device(name):
    """ "auto" -> the fastest device that is here, a GPU of its own for each process; UserError for none """
    name = str(name)  # it may be a torch.device
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    here = [f"cuda:{i}" for i in range(gpus)]
    has_mps = torch.backends.mps.is_available() and world_size() == 1  # processes cannot share it
    here += ["mps"] if has_mps else []
    here += ["cpu"]
    if world_size() > 1 and name.startswith("cuda:"):
        raise UserError(f"--device {name} puts all {world_size()} processes on one GPU; use --device cuda, "
                        "which gives each its own")
    if name == "auto":
        name = "cuda" if gpus else here[0]
    device = f"cuda:{local_rank()}" if name == "cuda" and gpus else name
    if device not in here:
        raise UserError(f"--device {device} does not work here with torch {torch.__version__}; use one of: "
                        f"{', '.join(here)}")
    return device


def pick_dtype(name, device):
    """ the type for autocast: bfloat16, or None for float32 everywhere; UserError if the device lacks it """
    on_cuda = device.startswith("cuda")
    has_bfloat16 = device == "cpu"
    if on_cuda:
        has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    if name == "bfloat16" and not has_bfloat16:
        raise UserError(f"--dtype bfloat16 does not work on {device}; leave it out")
    if name == "auto" and on_cuda and not has_bfloat16:
        note(f"{device} has no bfloat16, so this runs in float32, more slowly")
    by_default = name == "auto" and on_cuda and has_bfloat16
    return torch.bfloat16 if name == "bfloat16" or by_default else None


@contextmanager
def torch_for_a_run(device):
    """ torch as a run needs it: gradients on, float32, `device` in use; afterwards as the caller had it """
    number_type = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    has_default_device = torch.empty(0).device.type != "cpu"
    cpu = torch.device("cpu") if has_default_device else nullcontext()
    gpu = torch.cuda.device(device) if device.startswith("cuda") else nullcontext()
    try:
        with torch.inference_mode(False), torch.enable_grad(), cpu, gpu:
            with random_numbers_kept(torch.device(device)):
                yield
    finally:
        torch.set_default_dtype(number_type)


def random_state(device):
    """ the state of the random numbers of the CPU and of the device, as plain tensors """
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    elif device.type == "mps":
        states["mps"] = torch.mps.get_rng_state()
    return states


def set_random_state(states, device):
    """ continue with the random numbers of random_state, as far as they are for this device """
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
    elif device.type == "mps" and "mps" in states:
        torch.mps.set_rng_state(states["mps"])


@contextmanager
def random_numbers_kept(device):
    """ whatever is drawn inside, the random numbers continue afterwards as if it had not been """
    states = random_state(device)
    try:
        yield
    finally:
        set_random_state(states, device)


@contextmanager
def eval_mode(model):
    """ without dropout; afterwards the model is in the mode it was in, also after an error """
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@contextmanager
def own_random_numbers(seed, step, device):
    """ inside, random numbers of this process's and this step's own; afterwards those of before continue """
    sequence = np.random.SeedSequence([seed, step, rank()])
    with random_numbers_kept(device):
        torch.manual_seed(int(sequence.generate_state(1, np.uint64)[0]))
        yield
