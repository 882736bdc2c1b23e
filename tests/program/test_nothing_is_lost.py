"""
Whatever goes wrong, the work until then is in a file to continue from, each file is complete, and what gpt.py
changed in the process around it is as it was.
"""
import errno
import itertools
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from helpers import LIVELY, at_batch, call, checkpoint, contents, good, refusal, run, steps, tiny

import bigram
import data.files
import gpt

NEXT = "--resume --max_iters 30 --device cpu --max_new_tokens 2 --no-taste".split()


def failing(error):
    def fail(*args):
        raise error
    return fail


# ---- errors


@pytest.mark.parametrize("batch, step, error, sentence", [
    (2,   0, RuntimeError("a bug"),                     None),  # None: the traceback stays
    (4,   0, ZeroDivisionError("a bug"),                None),
    (9,   5, AssertionError("a bug"),                   None),
    (9,   5, RuntimeError("CUDA error: out of memory"), "out of memory; lower --batch_size first"),
    (16, 10, OSError(errno.EIO, "Input/output error"),  "cannot continue: [Errno 5] Input/output error"),
    (27, 19, RuntimeError("a bug"),                     None),
    (30, 20, MemoryError(),                             "out of memory; lower --batch_size first")])
def test_an_error_leaves_the_beginning_of_the_step_to_continue_from_to_the_digit(
        tmp_path, monkeypatch, capsys, all_steps, batch, step, error, sentence):
    with monkeypatch.context() as patch:
        at_batch(patch, batch, failing(error))
        with pytest.raises(SystemExit if sentence else type(error)) as raised:
            gpt.main(tiny(tmp_path, *LIVELY))
    out, err = capsys.readouterr()
    assert raised.value.code == 1 and sentence in err if sentence else raised.value is error
    command = re.search(rf"^stopped at step {step} and saved; to continue: (.+)$", err, re.MULTILINE)[1]
    assert checkpoint(tmp_path / "out/last.pt")["step"] == step
    rest = good(*shlex.split(command)[2:], "--max_new_tokens", 2, "--no-taste")
    assert list(dict.fromkeys(steps(out + rest.out))) == all_steps


@pytest.mark.parametrize("share", ["half of", "all"])
@pytest.mark.parametrize("wanted, saved", [(0, 0), (5, 0), (13, 10)])
def test_an_error_inside_the_update_of_the_weights_saves_nothing(
        tmp_path, monkeypatch, capsys, share, wanted, saved):
    update, count = torch.optim.AdamW.step, itertools.count()

    def fails(optimizer):
        if next(count) < wanted:
            return update(optimizer)
        weights = optimizer.param_groups[0]["params"]
        for weight in weights[len(weights) // 2:] if share == "half of" else []:
            weight.grad = None
        update(optimizer)
        raise RuntimeError("in the middle")

    monkeypatch.setattr(torch.optim.AdamW, "step", fails)
    with pytest.raises(RuntimeError, match="in the middle"):
        gpt.main(tiny(tmp_path))
    assert "saved" not in capsys.readouterr().err
    assert checkpoint(tmp_path / "out/last.pt")["step"] == saved


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_a_number_stops_the_run_at_that_step_and_is_not_saved(tmp_path, monkeypatch, bad):
    forward, count = gpt.Accelerated.forward, itertools.count()

    def spoiled(model, x, y):
        logits, loss = forward(model, x, y)
        return logits, loss * bad if model.training and next(count) == 13 else loss

    monkeypatch.setattr(gpt.Accelerated, "forward", spoiled)
    done = call(*tiny(tmp_path))
    assert done.code == 1 and f"the loss is {bad} at step 13; try a lower --learning_rate" in done.err
    assert next(count) == 14 and len(steps(done.out)) == 2 and "saved;" not in done.err
    assert checkpoint(tmp_path / "out/last.pt")["step"] == 10


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_measured_loss_that_is_not_a_number_never_becomes_best(tmp_path, monkeypatch, bad):
    measured = iter([{"train": 3.0, "val": 3.0}, {"train": 2.0, "val": bad}])
    monkeypatch.setattr(gpt, "estimate_loss", lambda *args: next(measured))
    done = call(*tiny(tmp_path))
    assert done.code == 1 and f"the loss is {bad} at step 10" in done.err
    assert checkpoint(tmp_path / "out/best.pt")["step"] == checkpoint(tmp_path / "out/last.pt")["step"] == 0
    assert [row.split(",")[0] for row in (tmp_path / "out/loss.csv").read_text().split()] == ["step", "0"]


def test_a_learning_rate_that_is_really_too_large_is_found_out(tmp_path):
    done = call(*tiny(tmp_path, "--learning_rate", 1e30))
    assert done.code == 1 and re.search(r"the loss is \S+ at step [12];", done.err)
    assert checkpoint(tmp_path / "out/best.pt")["step"] == 0
    done = call(*tiny(tmp_path, "--weight_decay", 1e300, "--max_iters", 1))  # the last step spoils them
    assert "are not finite at step 1" in done.err and checkpoint(tmp_path / "out/last.pt")["step"] == 0
    flags = "--learning_rate 1e30 --max_iters 50 --eval_iters 1".split()
    done = call(*flags, "--data", __file__, main=bigram.main)  # this file is a text, too
    assert done.code == 1 and "the loss is not a number at step 50; try a lower --learning" in done.err


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
@pytest.mark.parametrize("script, more", [("gpt.py", "--out={}"), ("bigram.py", "--device=cpu")])
def test_a_full_device_ends_a_script_with_one_sentence(script, more, tmp_path):
    with open("/dev/full", "wb") as full:
        flags = "--data", __file__, "--max_iters", 2, more.format(tmp_path)
        done = run(*flags, command=(script,), stdout=full)
    assert done.code == 1 and done.err == f"{script}: cannot continue: [Errno 28] No space left on device\n"


# ---- by the clock


def test_last_is_saved_by_the_clock_and_before_the_last_measurement_without_a_change_of_any_digit(
        tmp_path, monkeypatch, all_steps):
    clock, stepped, write_whole, ahead, saves = time.monotonic, gpt.Run.stepped, gpt.write_whole, [0], {}

    def slowly(*args):  # a step takes 250 seconds
        ahead[0] += 250
        stepped(*args)

    def kept(path, content):
        write_whole(path, content)
        if path.name == "last.pt":
            saves.setdefault(checkpoint(path)["step"], path.read_bytes())

    with monkeypatch.context() as patch:
        patch.setattr(time, "time", itertools.count(10**6, -3600).__next__)  # on the wall: it is set back
        patch.setattr(time, "monotonic", lambda: clock() + ahead[0])
        patch.setattr(gpt.Run, "stepped", slowly)
        patch.setattr(gpt, "write_whole", kept)
        assert steps(good(*tiny(tmp_path, *LIVELY)).out) == all_steps
    assert list(saves) == [0, 3, 6, 9, 10, 13, 16, 19, 20]
    for step in (3, 9, 16, 20):
        (tmp_path / "out/last.pt").write_bytes(saves[step])
        assert checkpoint(tmp_path / "out/last.pt")["history"][-1]["step"] == (step - 1) // 10 * 10
        assert steps(good(*tiny(tmp_path, *LIVELY, "--resume")).out) == all_steps[-(-step // 10):]


def test_saving_takes_less_than_a_twentieth_of_the_time_on_a_fast_device_with_a_slow_disk(
        trained, tmp_path, monkeypatch):
    now, spent, sizes, stepped = [0.0], [], {"best.pt": [], "last.pt": [], "loss.csv": []}, gpt.Run.stepped
    size = (trained / "out/last.pt").stat().st_size

    def write_slowly(path, content):  # 0.6 seconds for a last.pt
        spent.append(0.6 * len(content) / size)
        sizes[path.name].append(len(content))
        now[0] += spent[-1]
        path.write_bytes(content)

    def train_fast(*args):  # 8 seconds from one report to the next
        now[0] += 8
        stepped(*args)

    better = itertools.count(1000, -1)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(gpt, "write_whole", write_slowly)
    monkeypatch.setattr(gpt.Run, "stepped", train_fast)
    monkeypatch.setattr(gpt, "estimate_loss", lambda *args: {"train": 3.0, "val": next(better) / 300})
    good(*tiny(tmp_path, "--eval_interval", 1, "--max_iters", 100))
    assert sum(spent) < 0.05 * now[0]
    assert len(sizes["best.pt"]) == 101 and 3 <= len(sizes["last.pt"]) < 50
    assert max(sizes["best.pt"]) < 0.4 * max(sizes["last.pt"])  # the optimizer's state is only in last.pt


# ---- files that cannot be written


@pytest.fixture
def held(monkeypatch):
    """ held(name, times, number): os.replace fails so many times where `name` is to be replaced """
    def hold(name, times, number=errno.EACCES):
        replace, left = os.replace, iter(range(times))

        def refuse(source, target):
            if os.path.basename(target) == name and next(left, None) is not None:
                raise OSError(number, os.strerror(number))
            replace(source, target)
        monkeypatch.setattr(os, "replace", refuse)
    monkeypatch.setattr(data.files, "time", SimpleNamespace(sleep=lambda seconds: None))
    return hold


@pytest.mark.parametrize("name", ["best.pt", "last.pt", "loss.csv"])
def test_a_file_that_another_program_holds_for_a_moment_is_written(tmp_path, held, all_steps, name):
    held(name, 2)
    done = good(*tiny(tmp_path, *LIVELY))
    assert steps(done.out) == all_steps and "notice" not in done.err
    assert not list((tmp_path / "out").glob("*.part"))


def test_a_record_that_cannot_be_written_is_a_notice_and_the_training_continues(tmp_path, held, all_steps):
    held("loss.csv", 10**6)
    done = good(*tiny(tmp_path, *LIVELY))
    assert done.err.count(f"notice: cannot write loss.csv: {os.strerror(errno.EACCES)}; ") == len(all_steps)
    assert steps(done.out) == all_steps and not list((tmp_path / "out").glob("loss.csv*"))


@pytest.mark.parametrize("name, reason, remedy", [
    ("best.pt", "ENOSPC", "make room"),
    ("last.pt", "ENOSPC", "make room"),
    ("last.pt", "EDQUOT", "make room"),
    ("best.pt", "EACCES", "make it writable"),
    ("last.pt", "EROFS",  "make it writable")])
def test_a_checkpoint_that_cannot_be_written_is_one_sentence_that_fits_the_reason(
        own, tmp_path, held, name, reason, remedy):
    number, old = getattr(errno, reason), (own / "out" / name).read_bytes()
    held(name, 10**6, number)
    for flags, out in (([*NEXT, "--out", own / "out"], own / "out"), (tiny(tmp_path), tmp_path / "out")):
        done = call(*flags)
        sentence = done.err.strip().split("\n")[-1]
        assert done.code == 1 and "Traceback" not in done.err
        assert f"cannot write {out / name}: {os.strerror(number)}; {remedy}, then " in sentence
        assert sentence.endswith("continue with --resume" if (out / "last.pt").exists() else "start again")
        assert not list(out.glob("*.part"))
    assert (own / "out" / name).read_bytes() == old


def test_a_file_system_that_cannot_sync_is_no_failure_and_one_that_fails_is(own, monkeypatch):
    monkeypatch.setattr(os, "fsync", failing(OSError(errno.EINVAL, "Invalid argument")))
    assert "notice" not in good(*NEXT, "--out", own / "out").err
    monkeypatch.setattr(os, "fsync", failing(OSError(errno.ENOSPC, "No space left on device")))
    before = contents(own / "out")
    done = call(*NEXT, "--out", own / "out", "--max_iters", 40)
    assert done.code == 1 and "No space left on device; make room, then continue with --resume" in done.err
    assert contents(own / "out") == before


@pytest.mark.slow
def test_a_disk_that_is_really_full_ends_the_run_and_the_earlier_files_are_complete(own, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root can mount a small disk")
    try:
        shutil.copytree(own / "out", disk / "out")
        before = contents(disk / "out")
        with pytest.raises(OSError), open(disk / "filler", "wb", buffering=0) as filler:
            while filler.write(b"x" * 4096):
                pass
        done = call(*NEXT, "--out", disk / "out")
        assert done.code == 1 and "No space left on device; make room, then continue with" in done.err
        assert contents(disk / "out") == before
        (disk / "filler").unlink()
        good(*NEXT, "--out", disk / "out")
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize("name", ["best.pt", "last.pt", "loss.csv", "loss.png"])
def test_an_earlier_run_is_moved_aside_completely_or_not_at_all(own, monkeypatch, name):
    rename = os.rename

    def refuse(source, target):
        if os.path.basename(source) == name:
            raise OSError(errno.EACCES, "Permission denied")
        rename(source, target)

    (own / "out/loss.png").touch()
    before = contents(own / "out")
    monkeypatch.setattr(os, "rename", refuse)
    sentence = refusal(*tiny(own))
    assert f"cannot move the earlier run in {own / 'out'} aside: Permission denied; " in sentence
    assert contents(own / "out") == before and not list((own / "out").glob("old-*"))


# ---- folders and processes of others


@pytest.mark.parametrize("name", ["ENOSYS", "ENOLCK", "EOPNOTSUPP", "no module"])
def test_where_there_is_no_telling_whether_a_folder_is_in_use_the_run_goes_ahead(tmp_path, monkeypatch, name):
    if name == "no module":
        monkeypatch.setitem(sys.modules, "fcntl", None)
    else:
        error = OSError(getattr(errno, name), "Function not implemented")
        monkeypatch.setattr(pytest.importorskip("fcntl"), "flock", failing(error))
    assert "notice" not in good(*tiny(tmp_path)).err


def test_a_folder_is_free_again_after_an_error_even_while_that_is_kept(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        at_batch(patch, 9, failing(ZeroDivisionError("kept")))
        with pytest.raises(ZeroDivisionError) as kept:
            gpt.main(tiny(tmp_path))
    good(*tiny(tmp_path, "--resume"))
    assert str(kept.value) == "kept"


def test_the_callers_random_numbers_and_output_are_afterwards_as_they_were(tmp_path):
    number, before = os.fstat(1).st_ino, torch.get_rng_state()
    good(*tiny(tmp_path))
    assert torch.equal(torch.get_rng_state(), before)
    stream = SimpleNamespace(write=failing(OSError(errno.EIO, "gone")), flush=lambda: None)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(sys, "stdout", stream)
        gpt.main(tiny(tmp_path))
    assert os.fstat(1).st_ino == number and torch.equal(torch.get_rng_state(), before)
