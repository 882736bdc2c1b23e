"""
The command line and the machine: every setting is a flag, a mistake in one is answered before anything is
touched, and what the machine lacks is found out and said.
"""
import math
import os
import re
import signal
import sys
from dataclasses import fields

import pytest
import torch
from helpers import call, checkpoint, good, losses, refusal, run, small_text, steps, tiny, write_small_text

import bigram
import gpt
from data.errors import UserError, explain
from data.flags import LIMITS, check, make_parser, parse, pick_device
from data.screen import listed

PAIR = [(gpt, gpt.Flags), (bigram, bigram.Config)]
NOWHERE = ["--data", "/nonexistent/text.txt"]
PARSER = make_parser(gpt.Flags, "", gpt.SIZES)


# ---- every setting is a flag


@pytest.mark.parametrize("module, config", PAIR)
def test_every_field_is_a_flag_in_both_spellings_and_help_shows_one_with_the_question(module, config):
    parser, shown = make_parser(config, "", {}), " ".join(good("--help", main=module.main).out.split())
    for f in fields(config):
        for flag in (f"--{f.name}", f"--{f.name.replace('_', '-')}"):
            if f.type is bool:
                assert parse(parser, [flag]) == {f.name: True}
                assert parse(parser, [flag.replace("--", "--no-")]) == {f.name: False}
            else:
                assert parse(parser, [flag, "7"]) == parse(parser, [f"{flag}=7"]) == {f.name: f.type("7")}
        assert re.search(rf" --{f.name} [A-Z]+ \S[^?]+\?", shown), f.name
        assert "_" not in f.name or f"--{f.name.replace('_', '-')}" not in shown


def test_help_is_in_groups_and_shows_the_values_of_the_sizes_or_the_default():
    shown = good("--help").out
    for group in ("model", "training", "data", "running", "using a model"):
        assert f"\n{group}:\n" in shown
    shown = " ".join(shown.split())
    assert "--n_embd INT how many channels for each token? (a multiple of n_head) [lecture 384," in shown
    assert "[lecture 384, notebook 64, laptop 112] --" in shown
    assert "--seed INT which random numbers? [1337] --" in shown
    assert "--top_k INT choose among how many of the likeliest? (default: all) --" in shown


def test_a_switch_is_understood_as_users_of_other_scripts_type_it():
    for words in ("--compile", "--compile True", "--compile=true", "--compile=TRUE"):
        assert parse(PARSER, words.split()) == {"compile": True}
    for words in ("--no-compile", "--no_compile", "--compile=False", "--compile false"):
        assert parse(PARSER, words.split()) == {"compile": False}


def test_dashes_inside_a_value_stay():
    words = ["--prompt", "a-b --n-layer", "--out=my-run_2", "--stop", "- no-fused", "--data", "no-fused"]
    assert parse(PARSER, words) == dict(prompt="a-b --n-layer", out="my-run_2", stop="- no-fused", data="no-fused")


def test_the_defaults_are_the_lectures():
    config = gpt.Config()
    assert [config.n_layer, config.n_head, config.n_embd, config.block_size] == [6, 6, 384, 256]
    assert [config.batch_size, config.dropout, config.max_iters, config.seed] == [64, 0.2, 5000, 1337]
    assert [config.learning_rate, config.eval_interval, config.eval_iters] == [3e-4, 500, 200]
    small = bigram.Config()
    assert [small.batch_size, small.block_size, small.max_iters, small.learning_rate] == [32, 8, 3000, 1e-2]


@pytest.mark.parametrize("words, sentence", [
    ("--frobnicate 3", "unrecognized arguments: --frobnicate 3"),
    ("--n_layers 3", "unrecognized arguments: --n_layers 3"),
    ("--max_iter 3", "unrecognized arguments: --max_iter 3"),
    ("--max_iters abc", "argument --max_iters: invalid int value: 'abc'"),
    ("--max_iters 10.5", "argument --max_iters: invalid int value: '10.5'"),
    ("--learning_rate fast", "argument --learning_rate: invalid float value: 'fast'"),
    ("--max_iters", "argument --max_iters: expected one argument"),
    ("--compile maybe", "argument --compile: invalid truth value: 'maybe'"),
    ("shakespeare.txt", "unrecognized arguments: shakespeare.txt"),
    ("--size huge", "--size huge is not one of: auto, lecture, notebook, laptop"),
    ("--dtype int8", "--dtype int8 is not one of: auto, float32, bfloat16"),
    ("--n_embd 65 --n_head 4", "n_embd 65 is not a multiple of n_head 4; take n_embd 64"),
    ("--n_embd 3 --n_head 4", "n_embd 3 is not a multiple of n_head 4; take n_embd 4")])
def test_a_misspelled_flag_or_an_impossible_value_is_one_sentence(words, sentence):
    assert refusal(*words.split(), *NOWHERE) == sentence


RANGES = {  # some numbers that a flag refuses, and some that it takes
    (1, 1001): ([-3, 0, 1001], [1, 1000]),
    (1, 2**62): ([-3, 0, 2**62, 10**30], [1, 2**62 - 1]),
    (0, 2**63): ([-1, 2**63], [0, 2**63 - 1]),
    (0, math.inf): ([-1, math.inf, math.nan], [0, 7]),
    (0, 1): ([-0.1, 1, math.nan], [0, 0.999]),
}


@pytest.mark.parametrize("name", [name for name in LIMITS if name != "dtype"])
def test_a_number_out_of_range_is_answered_before_the_text_is_touched(name):
    outside, inside = RANGES[LIMITS[name]]
    for module, config in PAIR:
        if hasattr(config, name):
            for number in outside:
                sentence = refusal(f"--{name}={number}", *NOWHERE, main=module.main)
                assert re.fullmatch(rf"--{name} \S+ is out of range; it takes from \d to under \w+", sentence)
            for number in inside:
                check(config(**{name: number}))


def test_every_number_among_the_settings_has_a_range():
    assert {f.name for _, config in PAIR for f in fields(config) if f.type in (int, float)} == {*LIMITS} - {"dtype"}


@pytest.mark.parametrize("name", "batch_size block_size n_embd".split())
def test_an_absurdly_large_number_is_one_sentence_too(tmp_path, name):
    done = call(*tiny(tmp_path, f"--{name}", "9" * 20))
    assert done.code in (1, 2) and len(done.err.strip().splitlines()) <= 2


# ---- tasks


@pytest.fixture(scope="module")
def out(trained):
    return trained / "out"


OF_TRAINING = ("--max_iters=10 --data=x --learning_rate=1 --resume --size=laptop --seed=1 --batch_size=4 --decay "
               "--dropout=0 --no-fused --dtype=float32 --compile=False --no-taste --init_std=0").split()


@pytest.mark.parametrize("task", ["--sample", "--prompt=the", "--score=x.txt", "--attention=the"])
def test_a_task_beside_a_flag_of_training_is_one_sentence(out, task):
    name = "sample" if "prompt" in task else task[2:].split("=")[0]
    for flag in OF_TRAINING:
        other = re.search(r"^--(?:no-)?(\w+)", flag)[1]
        sentence = f"--{name} and --{other} are for different tasks; leave one out"
        assert refusal(flag, task, "--out", out) == sentence


def test_two_tasks_at_once_are_one_sentence(out):
    for two in (["--score=x", "--sample"], ["--attention=a", "--prompt=b"], ["--score=b", "--attention=a"]):
        assert "are for different tasks; leave one out" in refusal(*two, "--out", out)


# ---- sizes and schedules


@pytest.mark.parametrize("device, size", [("cuda:0", "lecture"), ("cpu", "laptop"), ("mps", "laptop")])
def test_the_size_is_the_lectures_on_cuda_and_a_laptops_elsewhere(device, size, monkeypatch):
    monkeypatch.setattr(gpt, "pick_device", lambda *args: device)
    for given in ({}, {"size": "auto"}):
        task, flags, start, why = gpt.settle(given, 1, 0)
        assert (task, start, flags.size, flags.device) == ("train", None, size, device)
        assert gpt.settings(flags) == {**gpt.settings(gpt.Flags()), **gpt.SIZES[size], "size": size}
        assert why == f"{size}, the default on {device}; or choose: --size lecture, notebook, laptop"


def test_a_size_can_be_asked_for_and_a_flag_beside_it_overrides_that_one_value():
    _, flags, _, why = gpt.settle({"size": "notebook", "n_layer": 2, "device": "cpu"}, 1, 0)
    expected = {**gpt.settings(gpt.Flags()), **gpt.SIZES["notebook"], "n_layer": 2, "size": "notebook"}
    assert gpt.settings(flags) == expected and why == "notebook, as asked"


def test_the_number_of_parameters_of_the_sizes_is_as_documented():
    def count(size):
        return sum(p.numel() for p in gpt.GPTLanguageModel(gpt.Config(**gpt.SIZES[size]), 65).parameters())

    assert [count(size) for size in ("lecture", "notebook", "laptop")] == [10_788_929, 209_729, 476_961]


def test_the_first_lines_say_the_device_the_text_the_model_and_the_size(tmp_path):
    device, text, model, size = good(*tiny(tmp_path)).out.splitlines()[:4]
    assert re.fullmatch(r"device: cpu \(\d+ threads\), float32, torch \S+", device)
    assert device.endswith(torch.__version__)
    vocab_size = len(set(small_text()))
    assert text == f"text:   {tmp_path}/words-0.txt, 3,000 characters, a vocabulary of {vocab_size}"
    assert re.fullmatch(r"model:  [\d,]+ parameters: n_layer 2, n_head 2, n_embd 16, block_size 8", model)
    assert size == "size:   laptop, the default on cpu; or choose: --size lecture, notebook, laptop"


def test_a_report_names_the_rate_where_there_is_a_schedule_and_only_there(tmp_path):
    done = good(*tiny(tmp_path, "--decay", "--learning_rate", 1e-3))
    assert re.findall(r"\(lr (\S+?)[,)]", done.out) == ["5.0e-04", "0.0e+00"]
    assert [row["learning_rate"] for row in checkpoint(tmp_path / "out/last.pt")["history"]] == [1e-3, 5e-4, 0]
    assert "(lr " not in good(*tiny(tmp_path)).out


# ---- devices and numbers


@pytest.mark.parametrize("name", "abc cuda cuda:0 cuda:7 mps".split())
@pytest.mark.parametrize("main", [gpt.main, bigram.main])
def test_a_device_that_is_not_here_is_one_sentence_with_the_choices(name, main, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert refusal("--device", name, *NOWHERE, main=main) == (
        f"--device {name} does not work here with torch {torch.__version__}; take one of: cpu")


def test_auto_takes_the_fastest_device_that_is_here_and_each_process_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert pick_device("auto") == "cpu"
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert pick_device("auto") == pick_device("mps") == "mps"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device("auto") == pick_device("cuda") == "cuda:0" and pick_device("auto", 1) == "cuda:1"
    assert [pick_device(name) for name in ("cuda:1", "cpu", "mps")] == ["cuda:1", "cpu", "mps"]
    with pytest.raises(UserError, match="take one of: cuda:0, cuda:1, mps, cpu$"):
        pick_device("cuda:2")


def test_bfloat16_is_the_default_on_cuda_that_has_it_and_elsewhere_only_if_asked(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    assert gpt.pick_dtype("auto", "cuda:0") is gpt.pick_dtype("bfloat16", "cpu") is torch.bfloat16
    assert {gpt.pick_dtype(*words) for words in (("float32", "cuda:0"), ("auto", "cpu"), ("auto", "mps"))} == {None}
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    assert gpt.pick_dtype("auto", "cuda:0") is None
    assert "cuda:0 has no bfloat16, so this runs in float32" in capsys.readouterr().err
    for device in ("cuda:0", "mps"):
        with pytest.raises(UserError, match=f"--dtype bfloat16 does not work on {device}; leave it out"):
            gpt.pick_dtype("bfloat16", device)


def test_a_run_in_bfloat16_works_on_a_cpu_and_differs_a_little(tmp_path):
    half, full = good(*tiny(tmp_path, "--dtype", "bfloat16")), good(*tiny(tmp_path))
    assert "bfloat16, torch" in half.out and steps(half.out) != steps(full.out)
    one, two = ([losses(line) for line in steps(done.out)] for done in (half, full))
    assert len(one) == 3 and one == [pytest.approx(row, abs=0.02) for row in two]


# ---- torch.compile


def broken_at_once(model):
    raise RuntimeError("no C compiler\nand a second line")


def broken_at_the_first_step(model):
    def step(*args):
        model(*args)  # dropout has drawn random numbers by then
        torch.rand(100)
        raise NotImplementedError("this GPU is too old")
    return step


@pytest.mark.parametrize("broken", [broken_at_once, broken_at_the_first_step])
def test_a_compiler_that_fails_costs_one_line_and_no_digit(tmp_path, monkeypatch, broken):
    flags = tiny(tmp_path, "--dropout", 0.2)
    plain = good(*flags)
    monkeypatch.setattr(torch, "compile", broken)
    done = good(*flags, "--compile")
    assert len(steps(done.out)) == 3 and steps(done.out) == steps(plain.out)
    kind = "RuntimeError" if broken is broken_at_once else "NotImplementedError"
    assert done.err.count(f"torch.compile does not work here ({kind}), so this runs without it\n") == 1


def test_a_compiler_that_works_is_used_for_every_step_and_changes_no_digit(tmp_path, monkeypatch):
    shapes = []

    def compiled(model):
        def step(idx, targets):
            shapes.append(tuple(idx.shape))
            return model(idx, targets)
        return step

    plain = good(*tiny(tmp_path, "--dropout", 0.2))
    monkeypatch.setattr(torch, "compile", compiled)
    done = good(*tiny(tmp_path, "--dropout", 0.2, "--compile"))
    assert steps(done.out) == steps(plain.out) and "does not work" not in done.err
    assert shapes == [(4, 8)] * 21  # a trial and twenty steps, of one shape


def test_lack_of_memory_in_the_trial_is_not_the_compilers_fault(tmp_path, monkeypatch):
    def compiled(model):
        def step(*args):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return step

    monkeypatch.setattr(torch, "compile", compiled)
    done = call(*tiny(tmp_path, "--compile"))
    assert done.code == 1 and "torch.compile does not work" not in done.err
    assert "gpt.py: out of memory; lower --batch_size first" in done.err


@pytest.mark.parametrize("asked, device, compiles", [(None, "cpu", False), (True, "cpu", True),
                                                     (None, "cuda:0", True), (False, "cuda:0", False)])
def test_cuda_compiles_unless_told_not_to_and_a_cpu_if_told_to(monkeypatch, tmp_path, asked, device, compiles):
    def accelerated(model, flags, dtype, compiled):
        raise RuntimeError(f"compiled: {compiled}")

    monkeypatch.setattr(gpt, "Accelerated", accelerated)
    monkeypatch.setattr(gpt.GPTLanguageModel, "to", lambda self, device: self)
    given = dict(n_layer=1, n_embd=6, device=device, dtype="float32", compile=asked, out=str(tmp_path))
    with pytest.raises(RuntimeError, match=f"compiled: {compiles}"):
        gpt.train_and_sample(gpt.Flags(**given), None, "", given, gpt.Tokenizer("ab"), {}, {"text": ""})


@pytest.mark.slow
def test_the_real_compiler_or_its_absence_changes_no_printed_loss_much(tmp_path):
    plain, done = good(*tiny(tmp_path)), run(*tiny(tmp_path, "--compile"), within=240)
    assert done.code == 0, done.err
    one, two = ([losses(line) for line in steps(each.out)] for each in (plain, done))
    assert len(one) == 3 and two == [pytest.approx(row, abs=2e-4) for row in one]


# ---- what a machine lacks


MEMORY = [MemoryError(), torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
          RuntimeError("[enforce fail at alloc_cpu.cpp:118] . DefaultCPUAllocator: can't allocate memory"),
          RuntimeError("CUDA error: out of memory"),
          RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
          RuntimeError("MPS backend out of memory (MPS allocated: 8.00 GB)"),
          RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."),
          RuntimeError("Storage size calculation overflowed with sizes=[1000000000000, 1000000000]")]
KERNELS = RuntimeError("CUDA error: no kernel image is available for execution on the device")


@pytest.mark.parametrize("error", [*MEMORY, KERNELS], ids=str)
def test_lack_of_memory_or_kernels_is_one_sentence_and_the_remedy_is_that_of_the_task(
        tmp_path, out, monkeypatch, error):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(gpt.GPTLanguageModel, "forward", fail)
    monkeypatch.setattr(bigram.BigramLanguageModel, "forward", fail)
    kernels = "this build of torch has no kernels for this GPU; install another build, or take --device cpu"
    for main, args, remedy in [
            (gpt.main, tiny(tmp_path), "lower --batch_size first, then --block_size or --n_embd"),
            (gpt.main, ["--sample", "--out", out], "take a smaller model, or --device cpu"),
            (bigram.main, ["--data", write_small_text(tmp_path)], "lower --batch_size or --block_size")]:
        done = call(*args, "--device", "cpu", main=main)
        assert done.code == 1 and "Traceback" not in done.err
        sentence = done.err.splitlines()[-1].split(": ", 1)[1]
        assert sentence == kernels if error is KERNELS else sentence.startswith(f"out of memory; {remedy}")


def test_real_lack_of_memory_is_one_sentence(tmp_path):
    done = call(*tiny(tmp_path, "--batch_size", 10**15))
    assert done.code == 1
    assert done.err.splitlines()[-1].startswith("gpt.py: out of memory; lower --batch_size first, then ")


def test_another_error_of_the_program_is_not_taken_for_lack_of_memory(tmp_path, monkeypatch):
    def fail(self, idx, targets):
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr(gpt.Accelerated, "forward", fail)
    with pytest.raises(RuntimeError, match="a mistake of ours"):
        call(*tiny(tmp_path))
    assert explain(RuntimeError("shape '[2, 3]' is invalid"), "") is None


# ---- the environment


@pytest.mark.parametrize("leftovers", "WORLD_SIZE=2,RANK=,RANK=5 WORLD_SIZE=2,WORLD_SIZE=0,LOCAL_RANK=1".split(","))
@pytest.mark.parametrize("main", [gpt.main, bigram.main])
def test_what_a_launcher_left_in_the_environment_is_one_sentence(leftovers, main, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    pairs = [pair.split("=") for pair in leftovers.split()]
    for name, value in pairs:
        monkeypatch.setenv(name, value)
    assert refusal(*NOWHERE, main=main) == (
        f"the environment has {leftovers.split()[0]}, but torchrun did not start this process; unset "
        f"{' and '.join(name for name, _ in pairs)}, or start with torchrun")


def test_main_leaves_the_process_as_it_found_it(tmp_path, out):
    def found():
        signals = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        streams = sys.stdin, sys.stdout, sys.stderr
        return torch.get_rng_state().tolist(), signals, streams, dict(os.environ), torch.is_grad_enabled()

    torch.manual_seed(12345)
    before = found()
    for args in (tiny(tmp_path), tiny(tmp_path, "--resume", "--max_iters", 25), ["--sample", "--out", out],
                 ["--size", "huge"], tiny(tmp_path, "--learning_rate", 1e30, "--max_iters", 50)):
        call(*args)
        assert found() == before
    gpt.load(out / "best.pt", "cpu")
    assert found() == before


@pytest.mark.parametrize("module", ["gpt", "bigram"])
@pytest.mark.parametrize("said, seen", [({}, "3000"), ({"GOMP_SPINCOUNT": "77"}, "77"),
                                        ({"OMP_WAIT_POLICY": "active"}, "None")])
def test_how_long_threads_wait_is_set_before_torch_is_loaded_unless_the_environment_says_it(module, said, seen):
    code = f"""if True:
        import os, sys
        class Watch:
            def find_spec(self, name, *rest):
                if name == "torch":
                    print(os.environ.get("GOMP_SPINCOUNT"))
        sys.meta_path.insert(0, Watch())
        import {module}"""
    assert run(command=["-c", code], env={"GOMP_SPINCOUNT": None, **said}).out == f"{seen}\n"


# ---- characters in messages


def test_errors_list_twenty_characters_and_a_count_invisible_and_combining_ones_as_escapes(tmp_path, out):
    assert listed("abc") == "'abc'" and listed("漢" * 20) == f"'{'漢' * 20}'"
    assert listed("漢字" * 3510) == f"'{'漢字' * 10}' and 7,000 more"
    assert listed("\u0301\t\u200b\u00a0x\\") == r"'\u0301\t\u200b\xa0x\'"
    sentence = refusal("--prompt", "the Q\r\u0301\u202e", "--out", out)
    known = sorted(set(small_text()))
    assert sentence == (r"the prompt has characters that the model never saw: '\rQ\u0301\u202e'; it knows "
                        rf"'\n{''.join(known[1:20])}' and {len(known) - 20} more")
