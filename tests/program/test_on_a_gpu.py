"""
The program on a GPU, CUDA or MPS. Elsewhere all is skipped; TEST_DEVICE=cpu runs what a CPU can, which shows
that these tests themselves work.
"""
import os
import re

import pytest
import torch
from helpers import ROOT, checkpoint, good, losses, run, steps, tiny

import gpt
from data.machine import pick_device, random_state



def find_device():
    """ the GPU that is here and works; in a virtual machine there may be one that does not """
    device = os.environ.get("TEST_DEVICE") or pick_device("auto")
    try:
        torch.ones(2, device=device).sum().item()
    except RuntimeError:
        return "cpu"
    return device


DEVICE = find_device()
if DEVICE == "cpu" and "TEST_DEVICE" not in os.environ:
    pytest.skip("no GPU here: the program on CUDA or MPS is not tested", allow_module_level=True)

ON_CUDA = DEVICE.startswith("cuda")
SMALL = ("--n_embd 64 --n_head 4 --block_size 32 --batch_size 8 --init_std 0.1 --learning_rate 1e-3 "
         "--grad_clip 1 --dtype float32 --no-compile --max_new_tokens 5").split()
FIRST_STEPS = "--max_iters 20 --eval_interval 10 --eval_iters 4 --max_new_tokens 50".split()
ROUNDING = 2e-3  # after twenty steps, of losses near 3


def small(folder, *flags, device=DEVICE):
    return tiny(folder, *SMALL, "--device", device, *flags)


def trained(folder, *flags, **more):
    """ the losses of a small run, one for each step """
    folder.mkdir(exist_ok=True)
    good(*small(folder, *flags, **more))
    return checkpoint(folder / "out/last.pt")["losses"]


def difference(one, two):
    assert len(one) == len(two) > 0
    return float((one - two).abs().max())


@pytest.fixture(scope="module")
def on_the_cpu(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("cpu"), device="cpu")


@pytest.fixture(scope="module")
def on_the_device(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("device"))


# ---- one computation


def test_the_default_run_begins_well(tmp_path, shakespeare):
    done = good("--out", tmp_path / "out", "--device", DEVICE, *FIRST_STEPS)
    first, second, third = [losses(line)[1] for line in steps(done.out)]
    assert abs(first - 4.2) < 0.3 and third < second < first
    assert f"device: {DEVICE}" in done.out and f"the default on {DEVICE}" in done.out
    if ON_CUDA:
        assert "the default on cuda" in done.out and "n_embd 384" in done.out and "compiling" in done.err
        has_bfloat16 = torch.cuda.get_device_properties(DEVICE).major >= 8
        assert ("bfloat16" if has_bfloat16 else "float32") in done.out.splitlines()[0]
    if ON_CUDA and os.name != "nt":
        assert "torch.compile does not work" not in done.err
    text = done.out.split("the best model writes:\n\n")[1].split("\nfiles:")[0]
    assert len(text) > 50 and set(text) <= set(shakespeare)


def test_the_losses_are_those_of_the_cpu(on_the_cpu, on_the_device):
    assert difference(on_the_cpu, on_the_device) < ROUNDING
    assert on_the_cpu[0] - on_the_cpu[-1] > 100 * ROUNDING  # they moved


def test_in_bfloat16_they_are_those_of_float32_within_its_rounding(tmp_path, on_the_device):
    if DEVICE == "mps" or (ON_CUDA and torch.cuda.get_device_properties(DEVICE).major < 8):
        pytest.skip("this device has no bfloat16")
    in_bfloat16 = trained(tmp_path, "--dtype", "bfloat16")
    assert 0 < difference(in_bfloat16, on_the_device) < 0.05  # eight bits of 3: steps of 0.02


def test_the_loops_of_the_lecture_compute_the_same(tmp_path, on_the_device):
    assert difference(trained(tmp_path, "--no-fused"), on_the_device) < ROUNDING


def test_the_compiled_model_computes_the_same(tmp_path, on_the_device):
    if DEVICE == "mps":
        pytest.skip("compiling is for CUDA")
    done = good(*small(tmp_path, "--compile"))
    if "torch.compile does not work here" in done.err:
        pytest.skip("torch.compile does not work here")
    assert difference(checkpoint(tmp_path / "out/last.pt")["losses"], on_the_device) < ROUNDING


# ---- a run that continues


def test_a_run_with_dropout_continues_with_its_random_numbers(tmp_path):
    dropout = "--dropout", 0.3
    once = trained(tmp_path / "once", *dropout, "--taste")  # what is written beside it moves nothing
    trained(tmp_path / "twice", *dropout, "--max_iters", 10)
    path = tmp_path / "twice/out/last.pt"
    saved = checkpoint(path)
    twice = trained(tmp_path / "twice", *dropout, "--resume")
    assert difference(once, twice) < 1e-4  # a GPU may add in another order
    # the same with other random numbers of the device: the comparison would notice
    torch.manual_seed(5)
    numbers = random_state(torch.device(DEVICE))
    if DEVICE != "cpu":
        numbers["cpu"] = saved["random"]["cpu"]  # from which the places in the text come
    torch.save({**saved, "random": numbers}, path)
    other = trained(tmp_path / "twice", *dropout, "--resume")
    assert difference(once[:10], other[:10]) < 1e-4 and difference(once, other) > 1e-3


def test_a_run_moves_to_the_cpu_and_back(tmp_path, on_the_cpu):
    trained(tmp_path, "--max_iters", 5)
    trained(tmp_path, "--max_iters", 10, "--resume", device="cpu")
    assert difference(trained(tmp_path, "--resume"), on_the_cpu) < ROUNDING


def test_a_model_writes_and_is_measured_on_both(tmp_path):
    trained(tmp_path)
    scores = []
    for device in (DEVICE, "cpu"):
        flags = "--prompt", "the", "--max_new_tokens", 20, "--device", device
        sample = good("--out", tmp_path / "out", *flags)
        assert sample.out.startswith("the") and len(sample.out) == 24
        model, tokenizer = gpt.load(tmp_path / "out/best.pt", device)
        ids = torch.tensor(tokenizer.encode("the cat sat on a mat and saw that dog run home"))
        assert model.generate(ids[None], 5, temperature=0.8, top_k=3).device == model.lm_head.weight.device
        scores.append(gpt.score(model, ids))
    assert scores[0] == pytest.approx(scores[1], abs=1e-4)


# ---- what it takes


@pytest.mark.skipif(not ON_CUDA, reason="CUDA can tell")
def test_a_step_never_waits_for_the_gpu(shakespeare):
    config = gpt.Config(n_layer=2, n_embd=96, grad_clip=1.0)
    tokenizer = gpt.Tokenizer(shakespeare)
    tokens = gpt.split_data(shakespeare, tokenizer)["train"].to(DEVICE)
    model = gpt.Accelerated(gpt.State(config, gpt.GPTLanguageModel(config, 65).to(DEVICE)), torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step():
        logits, loss = model(*gpt.get_batch(tokens, config, DEVICE))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
        optimizer.step()
        random_state(torch.device(DEVICE))
        return loss

    step()
    torch.cuda.set_sync_debug_mode("error")  # whatever waits is an error
    try:
        loss = step()
        with pytest.raises(RuntimeError, match="synchroniz"):
            loss.item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(not ON_CUDA, reason="CUDA can tell")
def test_the_default_run_takes_as_much_memory_as_the_readme_says(tmp_path, shakespeare):
    said = re.search(r"(\d+) GB of GPU memory", (ROOT / "README.md").read_text(encoding="utf-8"))
    limit = int(said[1]) if said else 4
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(DEVICE)
    good("--out", tmp_path / "out", "--device", DEVICE, *FIRST_STEPS)
    assert 0.2e9 < torch.cuda.max_memory_allocated(DEVICE) < limit * 1e9


@pytest.mark.skipif(ON_CUDA and torch.cuda.device_count() < 2, reason="two GPUs are needed")
@pytest.mark.skipif(DEVICE == "mps" or os.name == "nt", reason="a Mac has one GPU, Windows no NCCL")
def test_two_processes_on_two_gpus_compute_the_run_of_one(tmp_path, on_the_device):
    command = "-m torch.distributed.run --standalone --nproc_per_node=2 gpt.py".split()
    done = run(*small(tmp_path, device=DEVICE.split(":")[0]), command=command, within=240)
    assert done.code == 0 and f"device: {DEVICE}" in done.out and "2 processes" in done.out, done.err
    assert difference(checkpoint(tmp_path / "out/last.pt")["losses"], on_the_device) < ROUNDING
