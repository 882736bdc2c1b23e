"""
The command line and the machine: every setting is a flag, a mistake in one is answered before anything is
touched, and whatever the machine lacks is found out and said, not crashed into.
"""

import re
from dataclasses import fields

import pytest
import torch
from helpers import TINY, call, losses, run, steps, tiny

import bigram
import gpt
from data.text import UserError

FIELDS = [(gpt, gpt.Flags, f) for f in fields(gpt.Flags)] + [
    (bigram, bigram.Config, f) for f in fields(bigram.Config)
]
NOWHERE = ["--data", "/nonexistent/text.txt"]


def refusal(*args):
    """The sentence of a refusal: status 2, nothing on standard output, usage and one line."""
    done = call(*args)
    assert done.code == 2 and done.out == ""
    usage, sentence = done.err.strip().split("\n")
    assert usage.startswith("usage: python ")
    return sentence.split("error: ")[1]


# ---- every setting is a flag


@pytest.mark.parametrize("module, config, f", FIELDS, ids=lambda value: getattr(value, "name", ""))
def test_every_field_is_a_flag_in_both_spellings(module, config, f):
    parser = module.make_parser(config, "", getattr(module, "SIZES", {}))
    for spelling in {f"--{f.name}", f"--{f.name.replace('_', '-')}"}:
        if f.type is bool:
            assert vars(parser.parse_args([spelling])) == {f.name: True}
            assert vars(parser.parse_args([spelling.replace("--", "--no-", 1)])) == {f.name: False}
        else:
            text = f.metadata["limits"].get("among", ["7"])[-1]
            assert vars(parser.parse_args([spelling, text])) == {f.name: f.type(text)}


def test_defaults_are_the_lectures():
    config = gpt.Config()
    assert (config.n_layer, config.n_head, config.n_embd, config.block_size, config.batch_size) == (
        6,
        6,
        384,
        256,
        64,
    )
    assert (config.dropout, config.max_iters, config.learning_rate, config.seed) == (0.2, 5000, 3e-4, 1337)
    assert (config.eval_interval, config.eval_iters) == (500, 200)
    small = bigram.Config()
    assert (small.batch_size, small.block_size, small.max_iters, small.learning_rate) == (32, 8, 3000, 1e-2)


def test_help_lists_every_flag_in_groups_with_sizes():
    done = call("--help")
    assert done.code == 0 and done.err == ""
    for group in ("model", "training", "data", "running", "sampling"):
        assert f"\n{group}:\n" in done.out
    text = " ".join(done.out.split())
    for f in fields(gpt.Flags):
        assert f"--{f.name}" in text
        assert re.sub(r"\s+", " ", f.metadata["help"])[:40] in text
    assert "[lecture 384, notebook 64, laptop 112]" in text


@pytest.mark.parametrize(
    "args, what",
    [
        (["--frobnicate", "3"], "unrecognized arguments: --frobnicate 3"),
        (["--n_layers", "3"], "unrecognized arguments: --n_layers 3"),
        (["--max_iter", "3"], "unrecognized arguments: --max_iter 3"),
        (["--max", "3"], "unrecognized arguments: --max 3"),
        (["--max_iters", "abc"], "argument --max_iters/--max-iters: invalid int value: 'abc'"),
        (["--max_iters", "10.5"], "invalid int value: '10.5'"),
        (["--learning_rate", "fast"], "invalid float value: 'fast'"),
        (["--max_iters"], "expected one argument"),
        (["--size", "huge"], "invalid choice: 'huge'"),
        (["--dtype", "int8"], "invalid choice: 'int8'"),
        (["shakespeare.txt"], "unrecognized arguments: shakespeare.txt"),
    ],
)
def test_a_misspelled_flag_or_value_gets_argparses_own_answer(args, what):
    assert what in refusal(*args)


@pytest.mark.parametrize(
    "name, value",
    [
        *[
            (name, value)
            for name in (
                "n_layer",
                "n_head",
                "n_embd",
                "block_size",
                "batch_size",
                "eval_interval",
                "eval_iters",
                "num_samples",
                "top_k",
            )
            for value in ("0", "-3")
        ],
        ("max_iters", "-1"),
        ("max_new_tokens", "-1"),
        ("seed", "-1"),
        ("seed", str(2**63)),
        ("warmup_iters", "-1"),
        ("dropout", "1.0"),
        ("dropout", "-0.1"),
        ("dropout", "nan"),
        ("learning_rate", "inf"),
        ("learning_rate", "nan"),
        ("learning_rate", "-1"),
        ("init_std", "nan"),
        ("weight_decay", "-0.1"),
        ("grad_clip", "-1"),
        ("beta2", "1"),
        ("min_lr", "inf"),
        ("temperature", "nan"),
        ("temperature", "-1"),
        ("temperature", "inf"),
        ("sample_seed", "-1"),
    ],
)
def test_a_number_out_of_range_is_answered_before_the_text_is_touched(name, value):
    sentence = refusal(f"--{name}", value, *NOWHERE)
    assert sentence.startswith(f"--{name} ") and "is out of range; it takes from " in sentence


@pytest.mark.parametrize(
    "name, value", [("batch_size", "9" * 20), ("block_size", "9" * 20), ("n_embd", "9" * 20)]
)
def test_an_absurdly_large_number_is_one_sentence_too(tmp_path, name, value):
    done = call(*tiny(tmp_path, f"--{name}", value))
    assert done.code in (1, 2) and len(done.err.strip().splitlines()) <= 2


def test_a_width_that_the_heads_cannot_share_is_answered_before_the_text_is_touched():
    sentence = refusal("--n_embd", "65", "--n_head", "4", *NOWHERE)
    assert sentence == "--n_embd 65 is not a multiple of --n_head 4; take --n_embd 64"
    assert "take --n_embd 4" in refusal("--n_embd", "3", "--n_head", "4", *NOWHERE)


# ---- sizes


@pytest.mark.parametrize("device, size", [("cuda:0", "lecture"), ("cpu", "laptop"), ("mps", "laptop")])
def test_the_size_is_the_lectures_on_cuda_and_a_laptops_elsewhere(device, size):
    flags, why = gpt.pick_size({}, device)
    assert gpt.settings(flags) == {**gpt.settings(gpt.Config()), **gpt.SIZES[size]}
    assert why.startswith(f"{size}, since there is ") and all(name in why for name in gpt.SIZES)


def test_a_size_can_be_asked_for_and_a_flag_beside_it_overrides_that_one_value():
    flags, why = gpt.pick_size({"size": "notebook", "n_layer": 2}, "cuda:0")
    assert why == "notebook, as asked"
    assert gpt.settings(flags) == {**gpt.settings(gpt.Config()), **gpt.SIZES["notebook"], "n_layer": 2}


def test_all_four_flags_of_shape_leave_the_rest_at_the_lectures_values():
    shape = dict(n_layer=1, n_head=2, n_embd=8, block_size=4)
    flags, why = gpt.pick_size(dict(shape), "cpu")
    assert gpt.settings(flags) == {**gpt.settings(gpt.Config()), **shape} and why.startswith("your own")
    del shape["n_layer"]
    assert gpt.pick_size(shape, "cpu")[0].max_iters == gpt.SIZES["laptop"]["max_iters"]


def test_the_number_of_parameters_of_the_sizes_is_as_documented():
    def millions(size):
        model = gpt.GPTLanguageModel(gpt.Config(**gpt.SIZES[size]), 65)
        return round(sum(p.numel() for p in model.parameters()) / 1e6, 2)

    assert (millions("lecture"), millions("notebook")) == (10.79, 0.21)


def test_the_first_lines_say_the_device_the_text_the_model_and_the_size(tmp_path):
    done = call(*tiny(tmp_path))
    device, text, model, size = done.out.splitlines()[:4]
    assert device.startswith("device: cpu (") and device.endswith(f"float32, torch {torch.__version__}")
    assert text.startswith("text:   ") and "3,000 characters" in text
    assert model.endswith("parameters: n_layer 2, n_head 2, n_embd 16, block_size 8")
    assert size.startswith("size:   your own, by the flags")


# ---- devices


def test_a_bogus_device_is_one_sentence_with_the_choices():
    sentence = refusal("--device", "abc", *NOWHERE)
    assert sentence == f"--device abc does not work here with torch {torch.__version__}; take one of: cpu"


@pytest.mark.parametrize("name", ["cuda", "cuda:0", "cuda:7", "mps"])
def test_a_device_that_is_not_here_is_one_sentence(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    sentence = refusal("--device", name, *NOWHERE)
    assert "does not work here" in sentence and sentence.endswith("take one of: cpu")


@pytest.mark.parametrize("module", [gpt, bigram])
def test_auto_takes_the_fastest_device_that_is_here(module, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert module.pick_device("auto") == "cpu"
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert module.pick_device("auto") == module.pick_device("mps") == "mps"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert module.pick_device("auto") == module.pick_device("cuda") == "cuda:0"
    assert module.pick_device("cuda:1") == "cuda:1" and module.pick_device("cpu") == "cpu"
    with pytest.raises(UserError, match="take one of: cuda:0, cuda:1, mps, cpu"):
        module.pick_device("cuda:2")


@pytest.fixture
def bf16(monkeypatch):
    def set_to(able):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: able)

    return set_to


def test_bfloat16_is_the_default_on_cuda_that_has_it_and_only_there(bf16, capsys):
    bf16(True)
    assert gpt.pick_dtype("auto", "cuda:0") is torch.bfloat16
    assert gpt.pick_dtype("float32", "cuda:0") is None
    assert gpt.pick_dtype("auto", "cpu") is None and gpt.pick_dtype("auto", "mps") is None
    assert gpt.pick_dtype("bfloat16", "cpu") is torch.bfloat16
    assert capsys.readouterr().err == ""


def test_without_bfloat16_the_default_is_float32_with_a_notice_and_asking_is_an_error(bf16, capsys):
    bf16(False)
    assert gpt.pick_dtype("auto", "cuda:0") is None
    assert "cuda:0 has no bfloat16, so this runs in float32" in capsys.readouterr().err
    for device in ("cuda:0", "mps"):
        with pytest.raises(UserError, match=f"--dtype bfloat16 does not work on {device}; leave it out"):
            gpt.pick_dtype("bfloat16", device)


def test_a_run_in_bfloat16_works_on_a_cpu_and_differs_a_little(tmp_path):
    half = call(*tiny(tmp_path, "--dtype", "bfloat16"))
    full = call(*tiny(tmp_path))
    assert half.code == 0 and "bfloat16, torch" in half.out
    assert len(steps(half.out)) == 3 and steps(half.out) != steps(full.out)
    assert steps(half.out)[0][:28] == steps(full.out)[0][:28]  # the first digits


# ---- torch.compile


def broken_at_once(model):
    raise RuntimeError("no C compiler\nand a second line")


def broken_later(model):
    def step(*args):
        raise NotImplementedError("this GPU is too old")

    return step


def broken_after_random_numbers(model):
    def step(*args):
        model(*args)  # dropout has drawn some by then
        torch.rand(100)
        raise ValueError("at the very end")

    return step


@pytest.mark.parametrize("broken", [broken_at_once, broken_later, broken_after_random_numbers])
def test_a_compiler_that_fails_costs_one_line_and_the_run_goes_on(tmp_path, monkeypatch, broken):
    flags = tiny(tmp_path, "--dropout", "0.2")
    plain = call(*flags)
    monkeypatch.setattr(torch, "compile", broken)
    done = call(*flags, "--compile")
    assert done.code == 0 and len(steps(done.out)) == 3 and steps(done.out) == steps(plain.out)
    lines = [line for line in done.err.splitlines() if "torch.compile does not work here" in line]
    assert len(lines) == 1 and lines[0].endswith("so this runs without it")


def test_a_compiler_that_works_is_used_for_every_step_and_changes_nothing(tmp_path, monkeypatch):
    flags, shapes = tiny(tmp_path, "--dropout", "0.2"), []

    def compiled(model):
        def step(idx, targets):
            shapes.append(tuple(idx.shape))
            return model(idx, targets)

        return step

    plain = call(*flags)
    monkeypatch.setattr(torch, "compile", compiled)
    done = call(*flags, "--compile")
    assert steps(done.out) == steps(plain.out) and "does not work" not in done.err
    assert shapes == [(4, 8)] * 21  # a trial and twenty steps, of one shape


def test_a_cpu_compiles_only_when_asked(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda model: pytest.fail("compiled on a CPU"))
    assert call(*tiny(tmp_path)).code == call(*tiny(tmp_path, "--no-compile")).code == 0


def test_cuda_compiles_unless_told_not_to(monkeypatch):
    flags = gpt.Flags(n_layer=1, n_head=1, n_embd=4, block_size=4, batch_size=2)
    model, seen = gpt.GPTLanguageModel(flags, 5), []
    monkeypatch.setattr(torch, "compile", lambda model: seen.append("compiled"))
    monkeypatch.setattr(gpt, "random_state", lambda: None)
    monkeypatch.setattr(gpt, "set_random_state", lambda state: None)
    gpt.make_stepper(model, flags, "cuda:0", None)
    assert seen == ["compiled"]
    flags.compile = False
    assert gpt.make_stepper(model, flags, "cuda:0", None) is model and seen == ["compiled"]


@pytest.mark.slow
def test_the_real_compiler_or_its_absence_changes_no_printed_loss_much(tmp_path):
    flags = [*tiny(tmp_path), "--dropout", "0"]  # a compiled dropout draws other random numbers
    plain = run(tmp_path, *flags)
    done = run(tmp_path, *flags, "--compile", timeout=240)
    assert done.code == 0, done.err
    one, two = ([losses(line) for line in steps(each.out)] for each in (plain, done))
    assert len(one) == 3 and two == [pytest.approx(row, abs=2e-4) for row in one]


# ---- memory


def test_real_lack_of_memory_is_one_sentence(tmp_path):
    done = call(*tiny(tmp_path, "--batch_size", str(10**15)))
    assert done.code == 1
    sentence = done.err.strip().splitlines()[-1]
    assert sentence.startswith("gpt.py: out of memory; lower --batch_size first, then --block_size or")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to"),
        RuntimeError(
            "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."
        ),
    ],
)
def test_memory_that_runs_out_in_the_middle_is_one_sentence_and_the_checkpoint_stays(
    tmp_path, monkeypatch, error
):
    forward, calls = gpt.Run.forward, []

    def fail(self, x, y):
        calls.append(1)
        if len(calls) == 15:
            raise error
        return forward(self, x, y)

    monkeypatch.setattr(gpt.Run, "forward", fail)
    done = call(*tiny(tmp_path))
    assert done.code == 1 and "Traceback" not in done.err
    assert "out of memory" in done.err and "--size laptop" in done.err
    assert gpt.read_checkpoint(tmp_path / "out/last.pt")[0]["step"] == 10


def test_another_error_of_the_program_is_not_taken_for_lack_of_memory(tmp_path, monkeypatch):
    def fail(self, x, y):
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr(gpt.Run, "forward", fail)
    with pytest.raises(RuntimeError, match="a mistake of ours"):
        call(*tiny(tmp_path))


def test_tiny_is_a_real_run():
    assert TINY[::2] == [
        "--" + name
        for name in (
            "n_layer n_head n_embd block_size batch_size max_iters eval_interval eval_iters max_new_tokens "
            "device"
        ).split()
    ]
