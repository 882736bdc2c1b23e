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
from helpers import WORDS, call, checkpoint, good, losses, refusal, run, steps, tiny

import bigram
import gpt
from data.errors import UserError
from data.flags import LIMITS, check, make_parser, parse
from data.machine import pick_device, pick_dtype
from data.screen import listed

PAIR = [(gpt, gpt.Flags), (bigram, bigram.Config)]
NOWHERE = ["--data", "/nonexistent/text.txt"]


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
        assert re.search(rf" --{f.name} \[?[A-Z]+\]? \S[^?]+\?", shown), f.name
        assert "_" not in f.name or f"--{f.name.replace('_', '-')}" not in shown


def test_help_is_in_groups_and_shows_the_values_of_the_sizes_or_the_default():
    shown = good("--help").out
    groups = ",".join(re.findall(r"^(\S.*):$", shown, re.MULTILINE))
    assert groups == "options,model,training,data,running,using a model"
    shown = " ".join(shown.split())
    assert "--n_embd INT how many channels for each token? (a multiple of n_head) [lecture 384," in shown
    assert "[lecture 384, notebook 64, laptop 112] --" in shown and "numbers? [1337] data: --" in shown
    assert "--top_k INT choose among how many of the likeliest? (default: all) --" in shown


def test_a_switch_is_understood_as_others_type_it_and_dashes_in_a_value_stay():
    parser = make_parser(gpt.Flags, "", {})
    for words in ("--compile", "--compile True", "--compile=true", "--compile=TRUE"):
        assert parse(parser, words.split()) == {"compile": True}
    for words in ("--no-compile", "--no_compile", "--compile=False", "--compile false"):
        assert parse(parser, words.split()) == {"compile": False}
    words = ["--prompt", "a-b --n-layer", "--out=my-run_2", "--stop", "- no-fused"]
    assert list(parse(parser, words).values()) == ["a-b --n-layer", "my-run_2", "- no-fused"]


def test_the_defaults_are_the_lectures():
    config, small = gpt.Config(), bigram.Config()
    assert [config.n_layer, config.n_head, config.n_embd, config.block_size] == [6, 6, 384, 256]
    assert [config.batch_size, config.dropout, config.max_iters, config.seed] == [64, 0.2, 5000, 1337]
    assert [config.learning_rate, config.eval_interval, config.eval_iters] == [3e-4, 500, 200]
    assert [small.batch_size, small.block_size, small.max_iters, small.learning_rate] == [32, 8, 3000, 1e-2]


@pytest.mark.parametrize("words, sentence", [
    ("--frobnicate 3", "unrecognized arguments: --frobnicate 3"),
    ("--max_iter 3", "unrecognized arguments: --max_iter 3"),
    ("--max_iters 10.5", "argument --max_iters: invalid int value: '10.5'"),
    ("--max_iters", "argument --max_iters: expected one argument"),
    ("--compile maybe", "argument --compile: invalid true_or_false value: 'maybe'"),
    ("shakespeare.txt", "unrecognized arguments: shakespeare.txt"),
    ("--size huge", "--size huge is not one of: auto, lecture, notebook, laptop"),
    ("--dtype int8", "--dtype int8 is not one of: auto, float32, bfloat16"),
    ("--n_embd 65 --n_head 4", "n_embd 65 is not a multiple of n_head 4; use n_embd 64"),
    ("--n_embd 3 --n_head 4", "n_embd 3 is not a multiple of n_head 4; use n_embd 4")])
def test_a_misspelled_flag_or_an_impossible_value_is_one_sentence(words, sentence):
    assert refusal(*words.split(), *NOWHERE) == sentence


RANGES = {  # some numbers that a flag refuses, and some that it takes
    (1, 1001): ([-3, 0, 1001], [1, 1000]),
    (1, 2**62): ([-3, 0, 2**62, 10**30], [1, 2**62 - 1]),
    (0, 2**63): ([-1, 2**63], [0, 2**63 - 1]),
    (0, math.inf): ([-1, math.inf, math.nan], [0, 7]),
    (0, 1): ([-0.1, 1, math.nan], [0, 0.999]),
}


@pytest.mark.parametrize("name", sorted(f.name for f in fields(gpt.Flags) if f.type in (int, float)))
def test_a_number_out_of_range_is_answered_before_the_text_is_touched(name):
    outside, inside = RANGES[LIMITS[name]]
    for module, config in PAIR:
        if hasattr(config, name):
            for number in outside:
                sentence = refusal(f"--{name}={number}", *NOWHERE, main=module.main)
                assert re.fullmatch(rf"--{name} is \S+, but must be at least \d and below \w+", sentence)
            for number in inside:
                check(config(**{name: number}))


TRAINING = ("--max_iters=1 --data=x --learning_rate=1 --resume --size=laptop --seed=1 --batch_size=4 --decay "
            "--dropout=0 --no-fused --dtype=float32 --compile=False --no-taste --init_std=0").split()


@pytest.mark.parametrize("task", ["--sample", "--prompt=the", "--score=x.txt", "--attention=the"])
def test_a_task_beside_a_flag_of_training_or_another_task_is_one_sentence(trained, task):
    name = task[2:].split("=")[0].replace("prompt", "sample")
    for flag in TRAINING:
        other = re.search(r"^--(?:no-)?(\w+)", flag)[1]
        sentence = refusal(flag, task, "--out", trained / "out")
        assert sentence.startswith(f"--{name} and --{other} are for different tasks; leave one")
    another = "--score=b" if name == "attention" else "--attention=b"
    assert " are for different tasks; leave one" in refusal(another, task, "--out", trained / "out")


@pytest.mark.parametrize("device, size", [("cuda:0", "lecture"), ("cpu", "laptop"), ("mps", "laptop")])
def test_the_size_is_that_of_the_device_or_as_asked_and_a_flag_overrides_one_value(device, size, monkeypatch):
    monkeypatch.setattr(gpt, "pick_device", lambda *args: device)
    default = f"{size}, the default on {device}; or choose: --size lecture, notebook, laptop"
    for given, name, expected in [({}, size, default), ({"size": "auto", "n_layer": 2}, size, default),
                                  ({"size": "notebook", "n_layer": 2}, "notebook", "notebook, as asked")]:
        task, flags, start, why = gpt.settle(given, 1, 0)
        assert (task, start, why) == ("train", None, expected)
        assert gpt.settings(flags) == {**gpt.settings(gpt.Flags()), **gpt.SIZES[name], **given, "size": name}


def test_the_first_lines_say_what_is_trained_and_a_report_the_rate_where_there_is_a_schedule(tmp_path):
    shown = good(*tiny(tmp_path, "--decay", "--learning_rate", 1e-3)).out
    device, text, model, size = shown.splitlines()[:4]
    assert device == f"device: cpu ({torch.get_num_threads()} threads), float32, torch {torch.__version__}"
    assert text == f"text:   {tmp_path}/words-0.txt, 3,000 characters, a vocabulary of {len(set(WORDS))}"
    assert re.fullmatch(r"model:  [\d,]+ parameters: n_layer 2, n_head 2, n_embd 16, block_size 8", model)
    assert size == "size:   laptop, the default on cpu; or choose: --size lecture, notebook, laptop"
    assert re.findall(r"\(lr (\S+?)[,)]", shown) == ["5.0e-04", "0.0e+00"]
    history = checkpoint(tmp_path / "out/last.pt")["history"]
    assert [row["learning_rate"] for row in history] == [1e-3, 5e-4, 0]
    assert "(lr " not in good(*tiny(tmp_path)).out


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
    assert pick_device("auto") == pick_device("cuda") == "cuda:0" and pick_device("auto", 1) == "cuda:1"
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
    one, two = ([losses(line) for line in steps(shown)] for shown in (plain.out, done.out))
    assert len(one) == 3 and two == [pytest.approx(row, abs=2e-4) for row in one], done.err


KERNELS = "CUDA error: no kernel image is available for execution on the device"
LACKS = [MemoryError(), torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), *map(RuntimeError, [
    "[enforce fail at alloc_cpu.cpp:118] . DefaultCPUAllocator: can't allocate memory", KERNELS,
    "CUDA error: out of memory", "DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes.",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "MPS backend out of memory (MPS allocated: 8 GB)", "Storage size calculation overflowed with sizes=[2]"])]


@pytest.mark.parametrize("error", LACKS, ids=str)
def test_a_lack_of_memory_or_kernels_is_one_sentence_with_a_remedy(trained, tmp_path, monkeypatch, error):
    def fail(*args):
        raise error

    monkeypatch.setattr(gpt.GPTLanguageModel, "forward", fail)
    monkeypatch.setattr(bigram.BigramLanguageModel, "forward", fail)
    monkeypatch.setattr(torch, "compile", lambda model: model)
    for main, args, remedy in [
            (gpt.main, tiny(tmp_path), "lower --batch_size first, then --block_size or --n_embd, or "),
            (gpt.main, tiny(tmp_path, "--compile"), "lower --batch_size first, then "),
            (gpt.main, ["--sample", "--out", trained / "out"], "use a smaller model, or --device cpu"),
            (bigram.main, ["--data", __file__], "lower --batch_size or --block_size")]:
        done = call(*args, "--device", "cpu", main=main)
        assert done.code == 1 and "Traceback" not in done.err and "torch.compile does not" not in done.err
        sentence = "this build of torch has no kernels for this GPU; install another build, or use --device "
        sentence = sentence if str(error) == KERNELS else f"out of memory; {remedy}"
        assert done.err.splitlines()[-1].split(": ", 1)[1].startswith(sentence)


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
            f"the environment has {left.split()[0]}, but torchrun did not start this process; unset {names}, "
            "or start with torchrun")


def test_main_leaves_the_process_as_it_found_it(trained, tmp_path):
    def found():
        handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        streams = sys.stdin, sys.stdout, sys.stderr
        return torch.get_rng_state().tolist(), handlers, streams, dict(os.environ), torch.is_grad_enabled()

    before = found()
    for args in (tiny(tmp_path), tiny(tmp_path, "--resume", "--max_iters", 25), ["--size", "huge"],
                 ["--sample", "--out", trained / "out"], tiny(tmp_path, "--learning_rate", 1e30)):
        call(*args)
        assert found() == before


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
