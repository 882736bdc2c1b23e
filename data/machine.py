"""
What the machine has: devices, types of numbers, random numbers.
"""
import torch

from data.errors import UserError
from data.screen import note


def pick_device(name, local_rank=0):
    """ "auto" -> the fastest device that is here; UserError for one that is not """
    here = ["mps", "cpu"] if torch.backends.mps.is_available() else ["cpu"]
    if torch.cuda.is_available():
        here = [f"cuda:{i}" for i in range(torch.cuda.device_count())] + here
    fastest = f"cuda:{local_rank}" if here[0] == "cuda:0" else here[0]  # a GPU for each process
    found = fastest if name == "auto" or name == "cuda" and "cuda" in fastest else name
    if found not in here:
        raise UserError(f"--device {name} does not work here with torch {torch.__version__}; use one of: "
                        f"{', '.join(here)}")
    return found


def pick_dtype(wanted, device):
    """ the type for autocast: bfloat16, or None for float32 everywhere; UserError if the device lacks it """
    cuda = device.startswith("cuda")
    able = device == "cpu" or cuda and torch.cuda.is_bf16_supported(including_emulation=False)
    if wanted == "bfloat16" and not able:
        raise UserError(f"--dtype bfloat16 does not work on {device}; leave it out")
    if wanted == "auto" and cuda and not able:
        note(f"{device} has no bfloat16, so this runs in float32, more slowly")
    return torch.bfloat16 if able and (wanted == "bfloat16" or wanted == "auto" and cuda) else None


def random_state(device):
    """ the state of the random numbers of the CPU and of the device, as plain tensors """
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state()
    return states


def set_random_state(states):
    torch.set_rng_state(states["cpu"])
    for kind in set(states) - {"cpu"}:
        if torch.get_device_module(kind).is_available():
            torch.get_device_module(kind).set_rng_state(states[kind])
