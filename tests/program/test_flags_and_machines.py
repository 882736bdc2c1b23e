"""
The command line and the machine: every setting is a flag, a mistake in one is answered before anything is
touched, and what the machine lacks is found out and said.
"""
import importlib
import math
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from functools import cache

import pytest
import torch
from helpers import ROOT, WORDS, call, checkpoint, good, losses, refusal, run, script, start, steps, tiny
from helpers import ended, write_small_text

import bigram
import gpt
from data.errors import UserError, explain
from data.flags import LIMITS, check, make_parser, parse
from data.machine import pick_device, pick_dtype
from data.screen import listed, quoted

PAIR = [(gpt, gpt.Flags), (bigram, bigram.Config)]
NOWHERE = ["--data", "/nonexistent/text.txt"]
FEW = "--max_iters 20 --eval_interval 10 --eval_iters 1 --max_new_tokens 5 --device cpu --data".split()


@cache
def parser(config):
    return make_parser(config, "", "", {})


def read(*words, config=gpt.Flags):
    """ the flags that these words give """
    return parse(parser(config), words)


def tiny_flags(name, folder):
    """ the flags of a tiny run of gpt.py or bigram.py """
    return tiny(folder) if name == "gpt" else [*FEW, str(write_small_text(folder))]


@pytest.mark.parametrize("module, config", PAIR)
def test_every_field_is_a_flag_in_both_spellings_and_help_shows_one_with_the_question(module, config):
    shown = " ".join(good("--help", main=module.main).out.split())
    for f in fields(config):
        for flag in (f"--{f.name}", f"--{f.name.replace('_', '-')}"):
            if f.type is bool:
                assert read(flag, config=config) == {f.name: True}
                assert read(flag.replace("--", "--no-"), config=config) == {f.name: False}
            else:
                assert read(flag, "7", config=config) == {f.name: f.type("7")}
                assert read(f"{flag}=7", config=config) == {f.name: f.type("7")}
        assert re.search(rf" --{f.name} \[?[A-Z]+\]? \S[^?]+\?", shown), f.name
        assert "_" not in f.name or f"--{f.name.replace('_', '-')}" not in shown


def test_help_is_in_groups_and_shows_the_values_of_the_sizes_or_the_default():
    shown = good("--help").out
    groups = ",".join(re.findall(r"^(\S.*):$", shown, re.MULTILINE))
    assert groups == "options,model,training,data,not in the video,running,using a model"
    shown = " ".join(shown.split())
    assert "--n_embd INT how many channels for each token? (a multiple of n_head) [lecture 384," in shown
    assert "[lecture 384, notebook 64, laptop 112] --" in shown and "numbers? [1337] data: --" in shown
    assert "--top_k INT choose among how many of the likeliest? (default: all) --" in shown


def test_a_switch_is_understood_as_others_type_it():
    for words in ("--compile", "--compile True", "--compile=true", "--compile=TRUE"):
        assert read(*words.split()) == {"compile": True}
    for words in ("--no-compile", "--no_compile", "--compile=False", "--compile false"):
        assert read(*words.split()) == {"compile": False}
    assert read("--resume", "--no-fused", "--seed", "3") == {"resume": True, "fused": False, "seed": 3}


def test_a_value_may_begin_with_dashes_and_stays_as_it_was_typed():
    words = ["--prompt", "--well-known, he said", "--out=--my-run_2", "--stop", "--", "--top-k=3"]
    assert read(*words) == {"prompt": "--well-known, he said", "out": "--my-run_2", "stop": "--", "top_k": 3}
    for value in ("--", "-", "-5+3=", "--no-fused", "--prompt", "-h", "--x-y=a-b", "a=b", "", "--stop=-a"):
        assert read("--stop", value) == read(f"--stop={value}") == {"stop": value}
    assert read("--no-fused", "--prompt", "--sample", "--sample") == {
        "fused": False, "prompt": "--sample", "sample": True}
    assert read("--stop=--", "--stop=x") == {"stop": "x"} and read("--stop=x", "--stop=--") == {"stop": "--"}


def test_a_notebook_may_give_the_flags_as_one_string():
    parser = make_parser(gpt.Flags, "gpt.py", "", {})
    assert parse(parser, "--seed 3 --prompt 'the cat'") == {"seed": 3, "prompt": "the cat"}


def test_help_is_shown_also_behind_a_switch():
    assert good("--sample", "-h").out == good("--help").out


def test_the_defaults_are_the_lectures():
    config, small = gpt.Config(), bigram.Config()
    assert [config.n_layer, config.n_head, config.n_embd, config.block_size] == [6, 6, 384, 256]
    assert [config.batch_size, config.dropout, config.max_iters, config.seed] == [64, 0.2, 5000, 1337]
    assert [config.learning_rate, config.eval_interval, config.eval_iters] == [3e-4, 500, 200]
    assert [small.batch_size, small.block_size, small.max_iters, small.learning_rate] == [32, 8, 3000, 1e-2]


SWITCH = ("a switch, so {!r} cannot follow it; name a run's folder with --out, the beginning of a text with "
          "--prompt")


@pytest.mark.parametrize("words, sentence", [
    ("--frobnicate 3", "unrecognized arguments: --frobnicate 3"),
    ("--max_iter 3", "unrecognized arguments: --max_iter 3"),
    ("--max_iters 10.5", "argument --max_iters: invalid int value: '10.5'"),
    ("--max_iters=--", "argument --max_iters: invalid value: '--'"),
    ("--max_iters --seed 5", "argument --max_iters: invalid int value: '--seed'"),
    ("--compile maybe", f"argument --compile: {SWITCH.format('maybe')}"),
    ("--resume out/last.pt", f"argument --resume: {SWITCH.format('out/last.pt')}"),
    ("--sample ROMEO:", f"argument --sample: {SWITCH.format('ROMEO:')}"),
    ("--sample=ROMEO:", f"argument --sample: {SWITCH.format('ROMEO:')}"),
    ("shakespeare.txt", "unrecognized arguments: shakespeare.txt"),
    ("resume", "unrecognized arguments: resume"),  # which once meant --no-resume
    ("no-fused", "unrecognized arguments: no-fused"),
    ("-- --seed 5", "unrecognized arguments: -- --seed=5"),
    ("--size huge", "--size huge is not one of: auto, lecture, notebook, laptop"),
    ("--dtype int8", "--dtype int8 is not one of: auto, float32, bfloat16"),
    ("--n_embd 65 --n_head 4", "n_embd 65 is not a multiple of n_head 4; use n_embd 64"),
    ("--n_embd 3 --n_head 4", "n_embd 3 is not a multiple of n_head 4; use n_embd 4")])
def test_a_misspelled_flag_or_an_impossible_value_is_one_sentence(words, sentence):
    assert refusal(*NOWHERE, *words.split()) == sentence


def test_a_flag_without_its_value_is_one_sentence():
    for flag in ("--max_iters", "--prompt"):
        assert refusal(*NOWHERE, flag) == f"argument {flag}: expected one argument"


RANGES = {  # some numbers that a flag refuses, and some that it takes
    (1, 1001): ([-3, 0, 1001], [1, 1000]),
    (1, 2**62): ([-3, 0, 2**62, 10**30], [1, 2**62 - 1]),
    (0, 2**63): ([-1, 2**63], [0, 2**63 - 1]),
    (0, math.inf): ([-1, math.inf, math.nan], [0, 7]),
    (0, 1): ([-0.1, 1, math.nan], [0, 0.999]),
}


NUMBERS = [f.name for f in fields(gpt.Flags) if f.type in (int, float)]


@pytest.mark.parametrize("name", NUMBERS)
def test_each_number_has_a_range(name):
    outside, inside = RANGES[LIMITS[name]]
    for config in [config for module, config in PAIR if hasattr(config, name)]:
        for number in outside:
            with pytest.raises(UserError, match=rf"^--{name} is \S+, but must be at least \d and below \w+$"):
                check(config(**{name: number}))
        for number in inside:
            others = {"n_embd": {"n_head": 1}, "n_head": {"n_embd": 1000}}.get(name, {})
            check(config(**{name: number, **others}))


def test_a_number_out_of_range_is_answered_before_the_text_is_touched():
    for main in (gpt.main, bigram.main):
        sentence = refusal("--block_size=0", *NOWHERE, main=main)
        assert sentence == f"--block_size is 0, but must be at least 1 and below {2**62}"
        assert "must be at least 0 and below inf" in refusal("--learning_rate=nan", *NOWHERE, main=main)


def test_a_model_in_a_notebook_with_impossible_settings_is_one_sentence():
    with pytest.raises(UserError, match="n_embd 65 is not a multiple of n_head 4; use n_embd 64"):
        gpt.GPTLanguageModel(gpt.Config(n_embd=65, n_head=4), 65)


TRAINING = ("--max_iters=1 --data=x --learning_rate=1 --resume --size=laptop --seed=1 --batch_size=4 --decay "
            "--dropout=0 --no-fused --dtype=float32 --compile=False --no-taste --init_std=0").split()


@pytest.mark.parametrize("task", ["--sample", "--prompt=the", "--score=x.txt", "--attention=the"])
def test_a_task_beside_a_flag_of_training_or_another_task_is_one_sentence(trained, task):
    name = task[2:].split("=")[0].replace("prompt", "sample")
    for flag in TRAINING:
        other = re.search(r"^--(?:no-)?(\w+)", flag)[1]
        with pytest.raises(UserError, match=f"^--{name} and --{other} are for different tasks; leave one"):
            gpt.pick_task(read(flag, task))
    another = "--score=b" if name == "attention" else "--attention=b"
    assert " are for different tasks; leave one" in refusal(another, task, "--out", trained / "out")


@pytest.mark.parametrize("here, size", [("cuda:0", "lecture"), ("cpu", "laptop"), ("mps", "laptop")])
def test_the_size_is_that_of_the_device_or_as_asked_and_a_flag_overrides_one_value(here, size, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: here == "cuda:0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: here == "mps")
    for given, name in [({}, size), ({"n_layer": 2}, size), ({"size": "notebook", "n_layer": 2}, "notebook")]:
        flags, start = gpt.read_flags("train", given)
        assert (flags.device, start.given, start.path) == (here, given, None)
        assert gpt.settings(flags) == {**gpt.settings(gpt.Flags()), **gpt.SIZES[name], **given, "size": name}


def test_the_first_lines_say_what_is_trained_and_a_report_the_rate_where_there_is_a_schedule(tmp_path):
    shown = good(*tiny(tmp_path, "--decay", "--learning_rate", 1e-3)).out
    device, text, model, heads, size = shown.splitlines()[:5]
    assert device == f"device: cpu ({torch.get_num_threads()} threads), float32, torch {torch.__version__}"
    assert text == f"text:   {tmp_path}/words-0.txt, 3,000 characters, a vocabulary of {len(set(WORDS))}"
    assert re.fullmatch(r"model:  [\d,]+ parameters: n_layer 2, n_head 2, n_embd 16, block_size 8", model)
    assert heads == "heads:  all at once; --no-fused runs Head.forward"
    assert size == "size:   laptop, the default on cpu; or choose: --size lecture, notebook, laptop"
    assert re.findall(r"\(lr (\S+?)[,)]", shown) == ["5.0e-04", "0.0e+00"]
    reports = checkpoint(tmp_path / "out/last.pt")["reports"]
    assert [report["learning_rate"] for report in reports] == [1e-3, 5e-4, 0]
    flags = tiny(tmp_path, "--no-fused", "--size", "notebook")
    shown = good(*flags).out
    assert "(lr " not in shown and "\nheads:  one by one, Head.forward\nsize:   notebook, as asked\n" in shown
    more = tmp_path / "more"
    shown = good(*flags[:-2], "--init_from", tmp_path / "out/best.pt", "--out", more).out
    assert f"\nsize:   that of {tmp_path / 'out/best.pt'}\n" in shown


def test_auto_takes_the_fastest_device_that_is_here_and_another_is_one_sentence_with_the_choices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    for name in "abc cuda cuda:0 cuda:7 mps".split():
        for main in (gpt.main, bigram.main):
            assert refusal("--device", name, *NOWHERE, main=main) == (
                f"--device {name} does not work here with torch {torch.__version__}; use one of: cpu")
    assert pick_device("auto") == "cpu"
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert pick_device("auto") == pick_device("mps") == "mps"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device("auto") == pick_device("cuda") == pick_device(torch.device("cuda")) == "cuda:0"
    assert [pick_device(name) for name in ("cuda:1", "cpu", "mps")] == ["cuda:1", "cpu", "mps"]
    with pytest.raises(UserError, match="use one of: cuda:0, cuda:1, mps, cpu$"):
        pick_device("cuda:2")


def test_bfloat16_is_the_default_on_cuda_that_has_it_elsewhere_only_if_asked(tmp_path, monkeypatch, capsys):
    able = True
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: able)
    assert pick_dtype("auto", "cuda:0") is pick_dtype("bfloat16", "cpu") is torch.bfloat16
    assert pick_dtype("float32", "cuda:0") is pick_dtype("auto", "cpu") is pick_dtype("auto", "mps") is None
    assert capsys.readouterr().err == ""
    able = False
    assert pick_dtype("auto", "cuda:0") is None
    assert "cuda:0 has no bfloat16, so this runs in float32" in capsys.readouterr().err
    for device in ("cuda:0", "mps"):
        with pytest.raises(UserError, match=f"--dtype bfloat16 does not work on {device}; leave it out"):
            pick_dtype("bfloat16", device)
    half, full = good(*tiny(tmp_path, "--dtype", "bfloat16")).out, good(*tiny(tmp_path)).out
    assert "bfloat16, torch" in half and steps(half) != steps(full) and len(steps(half)) == 3
    for one, two in zip(steps(half), steps(full)):
        assert losses(one) == pytest.approx(losses(two), abs=0.02)  # a little


def compiler(step):
    """ a stand-in for torch.compile, whose models compute step(model, idx, targets) """
    def compiled(model):
        twin = torch.nn.Module()
        twin.forward = lambda *batch: step(model, *batch)
        return twin
    return compiled


def test_a_compiler_that_works_is_used_for_every_step_and_one_that_fails_costs_a_line_and_neither_a_digit(
        tmp_path, monkeypatch):
    def fail(*args):
        raise RuntimeError("no C compiler\nand a second line")

    shapes, plain = [], steps(good(*tiny(tmp_path, "--dropout", 0.2)).out)
    working = compiler(lambda model, idx, targets: shapes.append(tuple(idx.shape)) or model(idx, targets))
    late = compiler(lambda model, *batch: fail(model(*batch)))  # dropout has drawn random numbers by then
    for compiling, complaints in [(working, 0), (fail, 1), (late, 1)]:
        monkeypatch.setattr(torch, "compile", compiling)
        done = good(*tiny(tmp_path, "--dropout", 0.2, "--compile"))
        assert len(plain) == 3 and steps(done.out) == plain
        assert done.err.count("torch.compile does not work here (RuntimeError), so this runs") == complaints
    assert shapes == [(4, 8)] * 21  # a trial and twenty steps, of one shape


@pytest.mark.parametrize("asked, device, compiles", [(None, "cpu", False), (True, "cpu", True),
                                                     (None, "cuda:0", True), (False, "cuda:0", False)])
def test_cuda_compiles_unless_told_not_to_a_cpu_only_if_told(tmp_path, monkeypatch, asked, device, compiles):
    monkeypatch.setattr(torch, "compile", lambda model: model)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *args, **more: tensor)  # on any device
    flags = read(*tiny(tmp_path, "--dtype", "float32", "--max_iters", 1))
    flags = gpt.Flags(**flags | {"device": device, "compile": asked})
    done = call(main=lambda argv: gpt.train_task(flags, gpt.Start({})))
    assert ("compiling the model" in done.err) == compiles and len(steps(done.out)) == 2


@pytest.mark.slow
def test_the_real_compiler_or_its_absence_changes_no_printed_loss_much(tmp_path):
    plain, done = good(*tiny(tmp_path)), run(*tiny(tmp_path, "--compile"), within=240)
    one, two = ([losses(line) for line in steps(shown)] for shown in (plain.out, done.out))
    assert len(one) == 3 and two == [pytest.approx(row, abs=2e-4) for row in one], done.err


KERNELS = "this build of torch has no kernels for this GPU; install another build, or use --device cpu"
BUSY = "the GPU is taken by another program; wait, or choose another one with --device"
SMALLER = "out of memory; use less"
OF_80 = ("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of which "
         "1.06 GiB is free. {} Of the allocated memory 1.00 GiB is allocated by PyTorch, and 20.50 MiB is "
         "reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
         "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.")
THEIRS = "Process 4711 has 50.25 GiB memory in use. Process 12 has 20.00 GiB memory in use. "
OURS = "Including non-PyTorch memory, this process has {} memory in use."
SENTENCES = [  # what torch says, what the user reads
    ("", "out of memory; use less"),
    ("[enforce fail at alloc_cpu.cpp:118] . DefaultCPUAllocator: can't allocate memory: you tried", SMALLER),
    ("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported", SMALLER),
    ("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes.", SMALLER),
    ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", SMALLER),
    ("MPS backend out of memory (MPS allocated: 8 GB)", SMALLER),
    ("Storage size calculation overflowed with sizes=[2]", SMALLER),
    (OF_80.format(OURS.format("78.00 GiB")), SMALLER),
    (OF_80.format("Process 9 has 3.00 GiB memory in use. " + OURS.format("75.00 GiB")), SMALLER),
    (OF_80.format(THEIRS + OURS.format("7.80 GiB")),
     "out of memory; other programs hold 70 GiB of it; wait, or choose another --device"),
    (OF_80.format(THEIRS + OURS.format("500.00 MiB")),
     "out of memory; other programs hold 70 GiB of it; wait, or choose another --device"),
    ("CUDA error: no kernel image is available for execution on the device", KERNELS),
    ("CUDA error: CUDA-capable device(s) is/are busy or unavailable\nCUDA kernel errors might be", BUSY),
    ("mat1 and mat2 shapes cannot be multiplied (32x112 and 100x112)", None),
]


@pytest.mark.parametrize("message, sentence", SENTENCES)
def test_what_the_machine_lacks_is_a_sentence_with_the_remedy_that_fits(message, sentence):
    assert explain(RuntimeError(message) if message else MemoryError(), "use less") == sentence
    assert explain(torch.OutOfMemoryError(message), "use less") == sentence or not message


def test_a_lack_of_memory_is_said_with_the_remedy_of_the_task_and_a_mistake_of_ours_keeps_its_traceback(
        trained, tmp_path, monkeypatch):
    def fail(*args):
        raise error

    monkeypatch.setattr(torch.nn.functional, "embedding", fail)  # no model does without
    monkeypatch.setattr(torch, "compile", lambda model: model)
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
    for main, args, remedy in [
            (gpt.main, tiny(tmp_path), "lower --batch_size first, then --block_size or --n_embd, or "),
            (gpt.main, tiny(tmp_path, "--compile"), "lower --batch_size first, then "),
            (gpt.main, ["--sample", "--out", trained / "out"], "use a smaller model, or --device cpu"),
            (bigram.main, ["--data", __file__], "lower --batch_size or --block_size")]:
        done = call(*args, "--device", "cpu", main=main)
        assert done.code == 1 and "Traceback" not in done.err and "torch.compile does not" not in done.err
        assert done.err.splitlines()[-1].split(": ", 1)[1].startswith(f"out of memory; {remedy}")
    error = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        call(*tiny(tmp_path))


def test_a_real_lack_of_memory_is_one_sentence_too(tmp_path):
    for flag in (f"--batch_size={10**15}", f"--n_embd={2**50}"):
        done = call(*tiny(tmp_path, flag))
        assert done.code == 1 and ": out of memory; lower --batch_size first" in done.err.splitlines()[-1]


@pytest.mark.parametrize("left", ["RANK=5 WORLD_SIZE=2", "WORLD_SIZE=0", "RANK=", "LOCAL_RANK=1",
                                  "RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 TORCHELASTIC_RUN_ID=x"])
def test_what_a_launcher_left_in_the_environment_is_one_sentence(left, monkeypatch):
    for pair in left.split():
        monkeypatch.setenv(*pair.split("="))
    names = " and ".join(pair.split("=")[0] for pair in left.split()[:3])
    for main in (gpt.main, bigram.main):
        assert refusal(*NOWHERE, main=main) == (
            f"the environment has {left.split()[0]}, but not all that a launcher sets (RANK, WORLD_SIZE, "
            f"MASTER_ADDR, MASTER_PORT); unset {names}, or start with torchrun")


def test_a_wrapper_that_starts_one_process_as_if_it_was_one_of_several_changes_nothing(monkeypatch):
    for pair in "RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 MASTER_ADDR=login-3 MASTER_PORT=29500".split():
        monkeypatch.setenv(*pair.split("="))
    for main in (gpt.main, bigram.main):
        assert refusal(*NOWHERE, main=main).startswith("cannot read /nonexistent/text.txt: ")


def found():
    """ what main is to leave as it is """
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    streams = sys.stdin, sys.stdout, sys.stderr
    number = torch.empty(0)
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), number.dtype, number.device
    return torch.get_rng_state().tolist(), handlers, streams, dict(os.environ), modes


def test_main_leaves_the_process_as_it_found_it(trained, tmp_path):
    before = found()
    for args in (tiny(tmp_path), tiny(tmp_path, "--resume", "--max_iters", 25), ["--size", "huge"],
                 ["--sample", "--out", trained / "out"], tiny(tmp_path, "--learning_rate", 1e30)):
        call(*args)
        assert found() == before


@pytest.fixture(scope="module")
def usual(tmp_path_factory):
    """ the folder of a text and a finished run, and what both scripts print of a tiny run """
    folder = tmp_path_factory.mktemp("usual")
    return folder, good(*tiny(folder)).out, good(*tiny_flags("bigram", folder), main=bigram.main).out


@contextmanager
def default(name, value):
    """ a default of torch, as a notebook may set it """
    before = torch.get_default_dtype() if name == "dtype" else None
    set_default = getattr(torch, f"set_default_{name}")
    set_default(value)
    try:
        yield
    finally:
        set_default(before)


CALLERS = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "float64": lambda: default("dtype", torch.float64),
    "default device": lambda: default("device", "meta"),
    "device of a block": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("caller", CALLERS)
def test_what_the_caller_has_set_for_torch_changes_no_digit_and_is_set_again_afterwards(caller, usual):
    folder, shown, shown_by_bigram = usual
    out = folder / caller
    with CALLERS[caller]():
        before = found()
        done = good(*tiny(folder), "--out", out)
        sample = good("--sample", "--out", out, "--sample_seed", 1337, "--max_new_tokens", 20)
        done_by_bigram = good(*tiny_flags("bigram", folder), main=bigram.main)
        assert found() == before
    assert done.out.split("\n")[0] == shown.split("\n")[0] and ", float32, torch" in shown.split("\n")[0]
    assert steps(done.out) == steps(shown) and done_by_bigram.out == shown_by_bigram
    assert sample.out == re.search(r"writes:\n(.*?)\nfiles:", done.out, re.DOTALL)[1]
    weights = checkpoint(out / "best.pt")["model"].values()
    assert {weight.dtype for weight in weights} == {torch.float32}


@pytest.mark.parametrize("module", ["gpt", "bigram"])
def test_how_long_threads_wait_is_set_before_torch_is_loaded_unless_it_was_already(module, tmp_path):
    (tmp_path / "torch.py").write_text("import os; raise SystemExit(os.environ.get('GOMP_SPINCOUNT'))")
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}]; import {module}"
    for said, seen in [({}, "3000"), ({"GOMP_SPINCOUNT": "77"}, "77"), ({"OMP_WAIT_POLICY": "active"}, "")]:
        done = run(command=["-c", code], env={"GOMP_SPINCOUNT": None, "OMP_WAIT_POLICY": None, **said})
        assert done.err.strip() == seen


def test_errors_list_twenty_characters_and_a_count_invisible_and_combining_ones_as_escapes():
    assert listed("字" * 20) == f"'{'字' * 20}'" and listed("字" * 7020) == f"'{'字' * 20}' and 7,000 more"
    assert listed("\u0301\t\u200b\u00a0x\\") == r"'\u0301\t\u200b\xa0x\'"


# ---- the source, wherever it is


def started_as_main(source, name):
    """ main of a source text that belongs to no file: names, types and defaults come from the fields """
    def main(argv):
        sys.argv = [name, *argv]
        exec(source, {"__name__": "__main__"})
    return main


@pytest.mark.parametrize("name", ["gpt", "bigram"])
def test_a_script_runs_where_python_cannot_find_its_source(name, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", [])  # and as it is afterwards
    main = started_as_main(script(name), name)
    done = good(*tiny_flags(name, tmp_path), main=main)
    assert steps(done.out) and steps(done.out) == steps(
        good(*tiny_flags(name, tmp_path), main={"gpt": gpt, "bigram": bigram}[name].main).out)
    assert refusal("--max_iters", "abc", main=main) == "argument --max_iters: invalid int value: 'abc'"
    assert "--eval_iters INT" in good("--help", main=main).out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "bigram"])
@pytest.mark.parametrize("command", ["-m cProfile FILE", "-", "-c CODE", "-O FILE", "-W error FILE"])
def test_a_script_runs_however_python_is_started(name, command, tmp_path):
    words = [{"FILE": f"{name}.py", "CODE": f"exec(open('{name}.py').read())"}.get(word, word)
             for word in command.split()]
    with open(ROOT / f"{name}.py") if command == "-" else nullcontext(subprocess.DEVNULL) as stdin:
        done = ended(start(*tiny_flags(name, tmp_path), command=words, stdin=stdin))
    assert done.code == 0 and len(steps(done.out)) == 3 and "Traceback" not in done.err, done.err


@pytest.mark.slow
def test_a_script_runs_through_a_link_in_a_folder_with_blanks_and_accents(tmp_path):
    folder = tmp_path / "mein erstes Modell é"
    folder.mkdir()
    (folder / "läuft nicht?.py").symlink_to(ROOT / "gpt.py")
    data = write_small_text(folder)
    done = run(*tiny(folder, "--out", "ö p", data=data.name), command=["läuft nicht?.py"], root=folder)
    assert done.code == 0 and len(steps(done.out)) == 3 and (folder / "ö p/last.pt").exists(), done.err
    command = re.search(r"^write:  python (.*)$", done.out, re.MULTILINE)[1]
    done = ended(subprocess.Popen(f"{sys.executable} {command} --max_new_tokens 5", shell=True, cwd=folder,
                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    assert done.code == 0 and len(done.out) == 7, done.err


OWN = {
    "gpt": ("    # model\n", "    # data\n    data:"),
    "bigram": ("    # training\n", "    # data\n    data:"),
}


@pytest.mark.parametrize("annotations", ["", "from __future__ import annotations\n"])
@pytest.mark.parametrize("name", OWN)
def test_every_field_of_a_learners_own_is_a_flag(name, annotations, tmp_path, monkeypatch):
    group, later = OWN[name]
    source = script(name, (group, f"    first: int = 3  # what comes above the groups?\n{group}"),
                    (later, f"    bare: float = 0.5\n    maybe: int | None = None  # how many?\n{later}"),
                    ("\nimport ", f"\n{annotations}import "))
    module = f"own_{name}_{bool(annotations)}"
    (tmp_path / f"{module}.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    own = importlib.import_module(module)
    words = "--first 4 --bare=-1e3 --maybe 5 --max-iters 6".split()
    given = read(*words, config=getattr(own, "Flags", own.Config))
    assert given == {"first": 4, "bare": -1000.0, "maybe": 5, "max_iters": 6}
    assert own.Config(**given).maybe == 5
    for flag, word in [("--first", "x"), ("--bare", "x"), ("--maybe", "2.5")]:
        assert refusal(flag, word, main=own.main).startswith(f"argument {flag}: invalid ")
    shown = " ".join(good("--help", main=own.main).out.split())
    assert "settings: --first INT what comes above the groups? [3]" in shown
    assert "--bare FLOAT [0.5]" in shown and "--maybe INT how many?" in shown
    done = good(*words, *tiny_flags(name, tmp_path), main=own.main)
    assert len(steps(done.out)) == 3
    if name == "gpt":
        saved = checkpoint(tmp_path / "out/best.pt")["config"]
        assert (saved["first"], saved["bare"], saved["maybe"]) == (4, -1000.0, 5)


@pytest.mark.parametrize("kernel", ["ipykernel_launcher.py", "colab_kernel_launcher.py"])
@pytest.mark.parametrize("module", [gpt, bigram])
def test_main_without_flags_in_a_notebook_is_one_sentence_that_says_how(module, kernel, monkeypatch):
    monkeypatch.setattr(sys, "argv", [f"/lib/python3/site-packages/{kernel}", "-f", "/root/kernel-5.json"])
    assert refusal(main=lambda argv: module.main()) == (
        f'in a notebook, call {module.__name__}.main([...]) with flags such as "--max_iters", 100')
    assert "--device abc does not work" in refusal("--device", "abc", main=module.main)


# ---- folders and commands


def test_a_tilde_is_the_home_folder_in_every_path(trained, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.chdir(trained)
    write_small_text(tmp_path)
    good(*tiny(tmp_path, "--out=~/run", data="~/words-0.txt"))
    assert (tmp_path / "run/best.pt").exists()
    flags = tiny(tmp_path, "--init_from", "~/run/best.pt", "--out", "~/two", data="~/words-0.txt")
    assert f"size:   that of {tmp_path}/run/best.pt" in good(*flags).out
    assert good("--score=~/words-0.txt", "--out=~/run").out.startswith(f"{tmp_path}/words-0.txt: 3,000 ")
    assert len(good("--sample", "--max_new_tokens=5", "--out", "~/two").out) == 7
    assert gpt.load("~/run/best.pt")[1].chars == sorted(set(WORDS))
    assert len(steps(good(*FEW, "~/words-0.txt", main=bigram.main).out)) == 3
    assert not list(trained.glob("~*")) and refusal("--data", "a~/b") == refusal("--data=a~/b")


def test_a_model_loads_on_a_device_that_torch_names(trained):
    for device in ("cpu", torch.device("cpu")):
        model, tokenizer = gpt.load(trained / "out/best.pt", device=device)
        assert model.lm_head.weight.device.type == "cpu" and tokenizer.chars == sorted(set(WORDS))


def test_commands_to_paste_are_quoted_for_the_shell_of_the_system(monkeypatch):
    words = ["python", "gpt.py", "--out", "my first 'run'"]
    assert quoted(words) == """python gpt.py --out 'my first '"'"'run'"'"''"""
    with monkeypatch.context() as windows:
        windows.setattr(os, "name", "nt")
        assert quoted(words) == """python gpt.py --out "my first 'run'\""""
