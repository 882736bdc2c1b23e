"""
Nothing is lost, nothing is mixed up: what is saved, when, how a run goes on from it to the digit, and what a
file that will not do is answered with.
"""

import csv
import json
import math
import os
import pickle
import random
import re
import shutil
import subprocess
import time

import pytest
import torch
import torch.nn as nn
from helpers import call, checkpoint, ended, run, small_text, start, steps, tiny, until, write_small_text

import gpt
from data.text import UserError


def good(*args, **more):
    done = call(*args, **more)
    assert done.code == 0, done.err
    return done


def refusal(*args):
    done = call(*args)
    assert done.code == 2 and steps(done.out) == [] and "Traceback" not in done.err
    return done.err.strip().splitlines()[-1].split("error: ")[1]


def go_on(out, max_iters=30):
    return ["--resume", "--out", out, "--max_iters", max_iters, "--device", "cpu", "--max_new_tokens", "2"]


def rows(folder):
    with open(folder / "out/loss.csv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run, to look at and to copy."""
    folder = tmp_path_factory.mktemp("trained")
    good(*tiny(folder))
    return folder


@pytest.fixture
def own(trained, tmp_path):
    """The same, to change."""
    shutil.copytree(trained, tmp_path / "own")
    return tmp_path / "own"


# ---- going on


@pytest.mark.parametrize("first", [10, 7, 1])
@pytest.mark.parametrize("way", ["--fused", "--no-fused"])
def test_some_steps_and_the_rest_later_print_the_digits_of_all_at_once(tmp_path, first, way):
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    flags = ("--dropout", "0.3", "--warmup_iters", "5", "--lr_decay_iters", "20", way)
    whole = steps(good(*tiny(tmp_path / "whole", *flags)).out)
    good(*tiny(tmp_path / "parts", *flags, "--max_iters", first))
    rest = steps(good(*tiny(tmp_path / "parts", "--resume")).out)
    assert len(whole) == 3 and rest == whole[1:]
    one, two = (checkpoint(tmp_path / name / "out/last.pt") for name in ("whole", "parts"))
    assert all(torch.equal(one["model"][key], two["model"][key]) for key in one["model"])
    keep = [
        [{k: v for k, v in row.items() if k != "seconds"} for row in rows(tmp_path / name)]
        for name in ("whole", "parts")
    ]
    assert keep[0] == keep[1] and [row["step"] for row in keep[0]] == ["0", "10", "20"]


def test_going_on_needs_no_flag_but_the_folder_and_takes_others(own):
    done = good(
        "--resume",
        "--out",
        own / "out",
        "--max_iters",
        "25",
        "--learning_rate",
        "0.5",
        "--device",
        "cpu",
        "--max_new_tokens",
        "3",
    )
    saved = checkpoint(own / "out/last.pt")
    assert steps(done.out)[-1].startswith("step 25: ")
    assert saved["config"]["learning_rate"] == 0.5 and saved["config"]["eval_iters"] == 2
    assert saved["history"][-1]["learning_rate"] == 0.5 and saved["history"][0]["learning_rate"] == 3e-4


@pytest.mark.parametrize(
    "name, value, is_", [("n_layer", 3, 2), ("n_head", 4, 2), ("n_embd", 32, 16), ("block_size", 16, 8)]
)
@pytest.mark.parametrize("use", [["--resume"], ["--sample"]])
def test_a_contradicting_flag_of_shape_is_an_error_naming_both_values(trained, name, value, is_, use):
    sentence = refusal(*use, "--out", trained / "out", f"--{name}", value)
    assert f"--{name} {value} contradicts" in sentence and f"where it is {is_};" in sentence


def test_an_agreeing_flag_of_shape_is_none(own):
    good("--sample", "--out", own / "out", "--n_layer", "2", "--block_size", "8", "--max_new_tokens", "2")


def test_going_on_without_a_checkpoint_names_the_file_and_the_remedy(tmp_path):
    sentence = refusal("--resume", "--out", tmp_path / "none")
    assert f"there is no {tmp_path / 'none/last.pt'}; train first" in sentence
    assert not (tmp_path / "none").exists()


def test_going_on_from_a_step_beyond_the_end_is_an_error(trained):
    sentence = refusal("--resume", "--out", trained / "out", "--max_iters", "10")
    assert "is at step 20 already; take a larger --max_iters" in sentence


def test_going_on_with_another_text_is_an_error(own):
    other = own / "other.txt"
    other.write_text(small_text(3001), encoding="utf-8")
    sentence = refusal("--resume", "--out", own / "out", "--max_iters", "30", "--data", other)
    assert "has 3,001 characters" in sentence and "3,000" in sentence and "--init_from" in sentence


def test_a_size_beside_resume_is_an_error(trained):
    assert "--size is for a new run" in refusal("--resume", "--size", "laptop", "--out", trained / "out")


def test_best_is_no_run_to_go_on_with(own):
    (own / "out/best.pt").replace(own / "out/last.pt")
    assert "is a model, not a run to go on with" in refusal("--resume", "--out", own / "out")


# ---- another start


def test_fine_tuning_starts_from_the_weights_and_keeps_the_vocabulary(trained, tmp_path):
    text = tmp_path / "cats.txt"
    text.write_text("the cat sat on a mat " * 50, encoding="utf-8")
    done = good(
        "--init_from",
        trained / "out/best.pt",
        "--data",
        text,
        "--out",
        tmp_path / "new",
        "--max_iters",
        "0",
        "--eval_iters",
        "2",
        "--max_new_tokens",
        "2",
        "--device",
        "cpu",
    )
    before, after = checkpoint(trained / "out/best.pt"), checkpoint(tmp_path / "new/best.pt")
    assert after["chars"] == before["chars"] and len(after["chars"]) > len(set("the cat sat on a mat"))
    assert all(torch.equal(after["model"][key], before["model"][key]) for key in before["model"])
    assert [row["step"] for row in after["history"]] == [0] and len(steps(done.out)) == 1
    assert after["config"]["n_embd"] == 16
    assert after["config"]["batch_size"] == gpt.SIZES["laptop"]["batch_size"]


def test_fine_tuning_on_characters_the_model_never_saw_names_them(trained, tmp_path):
    text = tmp_path / "other.txt"
    text.write_text("the cat sat on ~ zebras 漢 " * 50, encoding="utf-8")
    sentence = refusal(*tiny(tmp_path, data=text), "--init_from", trained / "out/best.pt")
    assert f"{text} has characters the model never saw, 'bz~漢'; take them out" in sentence


def lecture_weights(path, chars, dropped=()):
    """What torch.save(model.state_dict()) leaves at the end of the lecture's script: with tril buffers."""
    torch.manual_seed(4)
    model = gpt.GPTLanguageModel(gpt.Config(n_layer=2, n_head=2, n_embd=16, block_size=8), chars)
    weights = {}
    for name, tensor in model.state_dict().items():
        if name.endswith("key.weight"):
            weights[name.replace("key.weight", "tril")] = torch.tril(torch.ones(8, 8))
        weights[name] = tensor
    torch.save(weights, path)
    return model


def test_the_weights_of_the_lectures_own_script_load(tmp_path):
    text = write_small_text(tmp_path)
    model = lecture_weights(tmp_path / "model.pt", len(set(small_text())))
    good(
        "--init_from",
        tmp_path / "model.pt",
        "--data",
        text,
        "--out",
        tmp_path / "out",
        "--max_iters",
        "0",
        "--eval_iters",
        "2",
        "--max_new_tokens",
        "2",
        "--device",
        "cpu",
    )
    loaded, tokenizer = gpt.load(tmp_path / "out/best.pt")
    assert tokenizer.chars == sorted(set(small_text()))
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)


@pytest.mark.parametrize("more", [-2, 2])
def test_bare_weights_and_a_text_with_another_number_of_characters_are_an_error(tmp_path, more):
    """Without a vocabulary in the file only the text can tell it, and then it must be as large."""
    count = len(set(small_text()))
    lecture_weights(tmp_path / "model.pt", count + more)
    sentence = refusal(*tiny(tmp_path), "--init_from", tmp_path / "model.pt")
    assert str(count) in sentence and str(count + more) in sentence


def test_bare_weights_do_not_sample_and_the_error_says_how_they_may(tmp_path):
    lecture_weights(tmp_path / "model.pt", 20)
    sentence = refusal("--sample", "--init_from", tmp_path / "model.pt")
    assert "has weights and no vocabulary" in sentence


# ---- files that will not do


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch '{self.path}'",)


def foreign(kind, path):
    if kind == "evil pickle":
        path.write_bytes(pickle.dumps(Evil(path.with_name("touched")), protocol=2))
    elif kind == "evil torch file":
        torch.save({"model": Evil(path.with_name("touched"))}, path)
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "json":
        path.write_text(json.dumps({"model": 1}), encoding="utf-8")
    elif kind == "another dictionary":
        torch.save({"epoch": 3, "net": {"weight": torch.zeros(3)}}, path)
    elif kind == "a tensor":
        torch.save(torch.zeros(3), path)
    elif kind == "a folder":
        path.mkdir()


@pytest.mark.parametrize(
    "kind", ["evil pickle", "evil torch file", "empty", "json", "another dictionary", "a tensor", "a folder"]
)
@pytest.mark.parametrize("use", ["sample", "resume", "init_from"])
def test_a_foreign_file_is_one_sentence_and_runs_nothing(tmp_path, kind, use):
    out = tmp_path / "out"
    out.mkdir()
    path = out / ("last.pt" if use == "resume" else "best.pt")
    foreign(kind, path)
    flags = {
        "sample": ["--sample", "--out", out],
        "resume": ["--resume", "--out", out],
        "init_from": [*tiny(tmp_path), "--init_from", path],
    }[use]
    assert f"{path} is no checkpoint of gpt.py, or it is damaged" in refusal(*flags)
    assert not (out / "touched").exists()


@pytest.mark.parametrize("share", [0.02, 0.5, 0.99])
def test_a_truncated_checkpoint_is_one_sentence_naming_it(own, share):
    content = (own / "out/last.pt").read_bytes()
    (own / "out/last.pt").write_bytes(content[: int(share * len(content))])
    assert f"{own / 'out/last.pt'} is no checkpoint of gpt.py" in refusal("--resume", "--out", own / "out")


@pytest.mark.parametrize(
    "part, other",
    [("config", None), ("chars", None), ("model", None), ("format", None), ("format", 99), ("chars", "ab")],
)
def test_a_checkpoint_that_lacks_a_part_or_is_of_another_format_is_one_sentence(own, part, other):
    state = checkpoint(own / "out/last.pt")
    state[part] = other
    if other is None:
        del state[part]
    torch.save(state, own / "out/last.pt")
    sentence = refusal("--resume", "--out", own / "out", "--max_iters", "30", "--device", "cpu")
    assert str(own / "out/last.pt") in sentence


# ---- what is in them


def test_a_checkpoint_holds_plain_types_and_all_it_takes(trained):
    last, best = checkpoint(trained / "out/last.pt"), checkpoint(trained / "out/best.pt")
    assert last["format"] == 1 and last["step"] == 20 and last["chars"] == "".join(sorted(set(small_text())))
    assert last["config"] == gpt.settings(gpt.Config(**last["config"]))
    assert set(last["model"]) == set(gpt.GPTLanguageModel(gpt.Config(**last["config"]), 1).state_dict())
    assert not any("tril" in key for key in last["model"])
    assert set(last) - set(best) == {"optimizer", "random"}


class Wrapped(nn.Module):
    def __init__(self, model):
        super().__init__()
        self._orig_mod = self.module = model

    def forward(self, *args):
        return self._orig_mod(*args)

    def __len__(self):                                          # as in torch 2.13: do not ask its truth
        raise TypeError("GPTLanguageModel does not support len()")


def test_no_prefix_of_a_wrapper_reaches_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", Wrapped)
    good(*tiny(tmp_path, "--compile"))
    for name in ("best.pt", "last.pt"):
        keys = set(checkpoint(tmp_path / "out" / name)["model"])
        assert keys == set(gpt.load(tmp_path / "out" / name, "cpu")[0].state_dict())
        assert not any("_orig_mod" in key or "module." in key for key in keys)


def test_best_is_the_lowest_validation_loss_whatever_the_training_loss(tmp_path, monkeypatch):
    measured = iter([{"train": 3.0, "val": 3.0}, {"train": 2.0, "val": 1.5}, {"train": 0.1, "val": 2.5}])
    monkeypatch.setattr(gpt, "estimate_loss", lambda *args: next(measured))
    done = good(*tiny(tmp_path))
    assert checkpoint(tmp_path / "out/best.pt")["step"] == 10
    assert checkpoint(tmp_path / "out/last.pt")["step"] == 20
    assert "best:   val loss 1.5000 at step 10; that model writes:" in done.out


def test_a_later_equal_loss_does_not_become_best_and_a_resumed_run_remembers_the_best(tmp_path, monkeypatch):
    measured = iter([{"train": 3.0, "val": val} for val in (2.0, 1.5, 1.5, 1.5, 1.7)])
    monkeypatch.setattr(gpt, "estimate_loss", lambda *args: next(measured))
    good(*tiny(tmp_path))
    good(*go_on(tmp_path / "out"))
    assert checkpoint(tmp_path / "out/best.pt")["step"] == 10


def test_load_gives_a_model_ready_to_generate_and_its_tokenizer(trained):
    model, tokenizer = gpt.load(trained / "out/best.pt")
    assert not model.training and tokenizer.chars == sorted(set(small_text()))
    idx = torch.tensor([tokenizer.encode("the cat")])
    text = tokenizer.decode(model.generate(idx, 30, temperature=0)[0].tolist())
    assert text.startswith("the cat") and len(text) == 37
    with pytest.raises(UserError, match="there is no"):
        gpt.load(trained / "out/other.pt")


def test_the_record_has_a_row_for_each_report(trained):
    table = rows(trained)
    assert list(table[0]) == ["step", "train", "val", "learning_rate", "tokens", "seconds"]
    assert [int(row["step"]) for row in table] == [0, 10, 20]
    assert [int(row["tokens"]) for row in table] == [0, 10 * 4 * 8, 20 * 4 * 8]
    seconds = [float(row["seconds"]) for row in table]
    assert 0 <= seconds[0] < seconds[1] < seconds[2] < 60
    history = checkpoint(trained / "out/last.pt")["history"]
    assert [float(row["val"]) for row in table] == [row["val"] for row in history]
    assert b"\r" not in (trained / "out/loss.csv").read_bytes()


# ---- runs that meet


def test_a_second_run_moves_the_first_aside_and_says_where(tmp_path):
    flags = tiny(tmp_path, "--max_iters", "2")
    good(*flags)
    first = (tmp_path / "out/last.pt").read_bytes()
    done = good(*flags, "--seed", "5")
    second = (tmp_path / "out/last.pt").read_bytes()
    assert f"the earlier run in {tmp_path / 'out'} is now in {tmp_path / 'out/old-1'}" in done.err
    good(*flags, "--seed", "6")
    assert (tmp_path / "out/old-1/last.pt").read_bytes() == first
    assert (tmp_path / "out/old-2/last.pt").read_bytes() == second
    for name in ("old-1", "old-2"):
        files = {path.name for path in (tmp_path / "out" / name).iterdir()}
        assert {"best.pt", "last.pt", "loss.csv"} <= files


def test_a_second_run_at_once_says_so_and_touches_nothing(own):
    before = {path: path.read_bytes() for path in (own / "out").iterdir() if path.is_file()}
    lock = gpt.claim(own / "out")
    for flags in (tiny(own), ["--resume", "--out", own / "out", "--max_iters", "30"]):
        assert f"another run is writing to {own / 'out'}" in refusal(*flags)
    lock.close()
    assert {path: path.read_bytes() for path in (own / "out").iterdir() if path.is_file()} == before
    good(*tiny(own))


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    sentence = refusal(*tiny(tmp_path), "--out", tmp_path / "file/out")
    assert f"cannot write to --out {tmp_path / 'file/out'}: " in sentence


# ---- runs that fail


def test_a_loss_that_is_no_number_stops_the_run_at_that_step(tmp_path, monkeypatch):
    forward, seen = gpt.Run.forward, []

    def spoiled(self, x, y):
        logits, loss = forward(self, x, y)
        seen.append(self.step)
        return logits, loss * math.nan if self.step == 13 else loss

    monkeypatch.setattr(gpt.Run, "forward", spoiled)
    done = call(*tiny(tmp_path))
    assert done.code == 1 and "the loss is nan at step 13" in done.err and "--learning_rate" in done.err
    assert seen[-1] == 13 and len(steps(done.out)) == 2
    for name in ("best.pt", "last.pt"):
        saved = checkpoint(tmp_path / "out" / name)
        assert saved["step"] <= 10 and all(tensor.isfinite().all() for tensor in saved["model"].values())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_measured_loss_that_is_no_number_never_becomes_best(tmp_path, monkeypatch, bad):
    measured = iter([{"train": 3.0, "val": 3.0}, {"train": 2.0, "val": bad}])
    monkeypatch.setattr(gpt, "estimate_loss", lambda *args: next(measured))
    done = call(*tiny(tmp_path))
    assert done.code == 1 and f"the loss is {bad} at step 10" in done.err
    assert checkpoint(tmp_path / "out/best.pt")["step"] == checkpoint(tmp_path / "out/last.pt")["step"] == 0
    assert [row["step"] for row in rows(tmp_path)] == ["0"]


def test_a_learning_rate_that_is_really_too_large_is_found_out(tmp_path):
    done = call(*tiny(tmp_path, "--learning_rate", "1e30"))
    assert done.code == 1 and re.search(r"the loss is \S+ at step [12];", done.err)
    assert checkpoint(tmp_path / "out/best.pt")["step"] == 0


def test_a_full_disk_ends_the_run_and_the_earlier_files_are_whole(own, monkeypatch):
    before = {name: (own / "out" / name).read_bytes() for name in ("best.pt", "last.pt", "loss.csv")}

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gpt.os, "fsync", full)
    done = call("--resume", "--out", own / "out", "--max_iters", "30", "--device", "cpu")
    assert done.code == 1 and "Traceback" not in done.err
    assert "cannot write" in done.err and "No space left on device; what stood there is whole" in done.err
    assert {name: (own / "out" / name).read_bytes() for name in before} == before
    assert not list((own / "out").glob("*.part"))


@pytest.mark.slow
def test_a_disk_that_is_really_full_ends_the_run_and_the_earlier_files_are_whole(own, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if (
        not shutil.which("mount")
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True
        ).returncode
    ):
        pytest.skip("a small disk can be mounted by root only")
    try:
        shutil.copytree(own / "out", disk / "out")
        before = {path.name: path.read_bytes() for path in (disk / "out").iterdir()}
        with pytest.raises(OSError):
            with open(disk / "filler", "wb", buffering=0) as filler:
                while filler.write(b"x" * 4096):
                    pass
        done = call("--resume", "--out", disk / "out", "--max_iters", "30", "--device", "cpu")
        assert done.code == 1 and "No space left on device; what stood there is whole" in done.err
        assert {path.name: path.read_bytes() for path in (disk / "out").iterdir()} == before
        (disk / "filler").unlink()
        good(*go_on(disk / "out"))
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_clock_set_back_changes_nothing(tmp_path, monkeypatch):
    clock = iter(range(10**6, 0, -3600))
    monkeypatch.setattr(time, "time", lambda: float(next(clock)))
    done = good(*tiny(tmp_path))
    assert len(steps(done.out)) == 3 and "-" not in "".join(re.findall(r", (\S+) left", done.out))
    assert all(float(row["seconds"]) >= 0 for row in rows(tmp_path))


@pytest.mark.slow
def test_a_run_that_is_killed_at_any_moment_leaves_files_that_load(tmp_path):
    flags = tiny(tmp_path, "--max_iters", "100000", "--eval_interval", "1", "--eval_iters", "1")
    draw, reached = random.Random(8), 0
    for number in range(8):
        process = start(tmp_path, *flags, *(["--resume"] if number else []), stdout=subprocess.DEVNULL)
        try:
            until(lambda: (tmp_path / "out/last.pt").exists() and (tmp_path / "out/best.pt").exists())
            saved = checkpoint(tmp_path / "out/last.pt")["step"]
            until(lambda saved=saved: checkpoint(tmp_path / "out/last.pt")["step"] > saved)
            time.sleep(draw.uniform(0, 0.3))
        finally:
            process.kill()
        assert ended(process).code == -9
        for name in ("best.pt", "last.pt"):
            gpt.read_checkpoint(tmp_path / "out" / name)
        step = checkpoint(tmp_path / "out/last.pt")["step"]
        assert step > reached
        reached = step
    good(
        "--resume",
        "--out",
        tmp_path / "out",
        "--max_iters",
        reached + 3,
        "--device",
        "cpu",
        "--max_new_tokens",
        "2",
    )


@pytest.mark.slow
def test_a_checkpoint_of_one_process_is_read_by_another(own):
    done = run(own, "--resume", "--out", own / "out", "--max_iters", "30", "--device", "cpu")
    assert done.code == 0 and [line[:8] for line in steps(done.out)] == ["step 20:", "step 30:"]
