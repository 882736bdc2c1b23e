"""
Whatever goes wrong, the work until then is in a file to continue from, each file is complete, and what gpt.py
changed in the process around it is as it was.
"""
import errno
import math
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from helpers import LIVELY, after_update, at_pass, call, checkpoint, contents, ended, good, run, start, steps
from helpers import tiny, until, with_losses

import bigram
import gpt

NEXT = "--resume --max_iters 30 --device cpu --max_new_tokens 2 --no-taste".split()


def failing(error):
    def fail(*args):
        raise error
    return fail


# ---- errors


@pytest.mark.parametrize("number_of_pass, step, error, sentence", [
    (9,   5, AssertionError("a bug"),                   None),  # None: the traceback stays
    (9,   5, RuntimeError("CUDA error: out of memory"), "out of memory; lower --batch_size first"),
    (16, 10, OSError(errno.EIO, "Input/output error"),  "cannot continue: [Errno 5] Input/output error"),
    (27, 19, RuntimeError("a bug"),                     None),
    (30, 20, MemoryError(),                             "out of memory; lower --batch_size first")])
def test_an_error_leaves_the_beginning_of_the_step_to_continue_from_to_the_digit(
        tmp_path, capsys, all_steps, number_of_pass, step, error, sentence):
    with at_pass(number_of_pass, failing(error)):
        with pytest.raises(SystemExit if sentence else type(error)) as raised:
            gpt.main(tiny(tmp_path, *LIVELY))
    out, err = capsys.readouterr()
    assert raised.value.code == 1 and sentence in err if sentence else raised.value is error
    command = re.search(rf"^stopped at step {step} and saved; to continue: (.+)$", err, re.MULTILINE)[1]
    assert checkpoint(tmp_path / "out/last.pt")["step"] == step
    rest = good(*shlex.split(command)[2:], "--max_new_tokens", 2, "--no-taste")
    assert list(dict.fromkeys(steps(out + rest.out))) == all_steps


@pytest.mark.parametrize("number_of_pass", [0, 3, 4])
def test_an_error_before_the_end_of_the_first_step_leaves_nothing_and_advises_nothing(
        tmp_path, capsys, number_of_pass):
    with at_pass(number_of_pass, failing(ZeroDivisionError())), pytest.raises(ZeroDivisionError):
        gpt.main(tiny(tmp_path, "--out", tmp_path / "some/new/folder"))
    err = capsys.readouterr().err
    assert "this run has no file yet, and none was saved" in err and "--resume" not in err
    assert os.listdir(tmp_path) == ["words-0.txt"]


@pytest.mark.parametrize("more", [
    ["--batch_size", 10**15], ["--batch_size", 0], ["--n_embd", 17], ["--block_size", 2900],
    ["--data", "none.txt"], ["--device", "abc"], ["--init_from", "none.pt"]])
def test_a_start_that_fails_leaves_the_earlier_run_where_it_was(own, more):
    before = contents(own / "out")
    done = call(*tiny(own, *more))
    assert done.code in (1, 2) and "Traceback" not in done.err and "--resume" not in done.err
    assert contents(own / "out") == before and not list((own / "out").glob("old-*"))
    good("--sample", "--out", own / "out", "--max_new_tokens", 2)


def test_a_run_of_no_steps_writes_its_files_at_once(tmp_path):
    good(*tiny(tmp_path, "--max_iters", 0))
    assert checkpoint(tmp_path / "out/last.pt")["step"] == checkpoint(tmp_path / "out/best.pt")["step"] == 0


@pytest.mark.parametrize("share", ["half of", "all"])
@pytest.mark.parametrize("updates, saved", [(1, None), (6, 0), (14, 10)])
def test_an_error_inside_the_update_of_the_weights_saves_nothing(tmp_path, capsys, share, updates, saved):
    count = iter(range(1, 100))

    def fail(optimizer):
        if next(count) == updates:
            for weight in optimizer.param_groups[0]["params"][::2] if share == "half of" else []:
                optimizer.state[weight]["step"] -= 1  # as if it had not come that far
            raise RuntimeError("in the middle")

    with after_update(fail), pytest.raises(RuntimeError, match="in the middle"):
        gpt.main(tiny(tmp_path))
    err = capsys.readouterr().err
    assert "and saved" not in err and "--resume" not in err
    if saved is None:
        assert not (tmp_path / "out").exists()
    else:
        assert f"step {updates - 1} could not be saved, and last.pt is as it was before: " in err
        assert checkpoint(tmp_path / "out/last.pt")["step"] == saved


def test_an_error_stays_the_headline_if_the_rescue_fails_too(tmp_path, monkeypatch, capsys):
    def fail():
        monkeypatch.setattr(torch, "save", failing(RuntimeError("the device is gone")))
        raise ZeroDivisionError("the first error")

    with at_pass(9, fail), pytest.raises(ZeroDivisionError, match="the first error"):
        gpt.main(tiny(tmp_path))
    assert "notice: step 5 could not be saved, and last.pt is as it was before: the device is gone\n" in (
        capsys.readouterr().err)
    monkeypatch.undo()
    assert steps(good(*tiny(tmp_path, "--resume")).out)[-1].startswith("step 20: ")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_a_number_stops_the_run_at_that_step_and_is_not_saved(tmp_path, bad):
    passes = iter(range(100))
    with with_losses(lambda model, loss: loss * bad if next(passes) == 21 else loss):
        done = call(*tiny(tmp_path))
    assert done.code == 1 and f"the loss is {bad} at step 13; try a lower --learning_rate" in done.err
    assert next(passes) == 22 and len(steps(done.out)) == 2 and "saved;" not in done.err
    assert checkpoint(tmp_path / "out/last.pt")["step"] == 10


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_measured_loss_that_is_not_a_number_never_becomes_best(tmp_path, bad):
    passes = iter(range(100))
    with with_losses(lambda model, loss: loss * 0 + bad if next(passes) == 17 else loss):
        done = call(*tiny(tmp_path))
    assert done.code == 1 and f"the loss is {bad} at step 10" in done.err
    assert checkpoint(tmp_path / "out/best.pt")["step"] == checkpoint(tmp_path / "out/last.pt")["step"] == 0
    assert [row.split(",")[0] for row in (tmp_path / "out/loss.csv").read_text().split()] == ["step", "0"]


@pytest.mark.parametrize("flags, reason", [
    ("--learning_rate 1e30 --max_iters 20", r"the loss is \S+ at step [12];"),
    ("--learning_rate 1e30 --max_iters 1", r"the loss is \S+ at step 1;"),
    ("--weight_decay 1e300 --max_iters 1", r"(the loss is \S+|weights are not finite) at step 1;")])
def test_weights_that_are_spoiled_are_in_no_file(tmp_path, flags, reason):
    done = call(*tiny(tmp_path, *flags.split()))
    assert done.code == 1 and re.search(reason, done.err)
    for name in ("best.pt", "last.pt"):
        saved = checkpoint(tmp_path / "out" / name)
        assert saved["step"] == 0 and all(weight.abs().max() < 10 for weight in saved["model"].values())
    scored = good("--score", tmp_path / "words-0.txt", "--out", tmp_path / "out")
    assert 3 < float(re.search(r"(\S+) nats", scored.out)[1]) < 3.3


def test_a_learning_rate_that_is_too_large_ends_the_baseline_too():
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


@pytest.fixture
def clock(monkeypatch):
    """ a list whose only number is the time in seconds """
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "time", lambda: -now[0])  # on the wall, where it may be set back
    return now


@contextmanager
def saves_of(path):
    """ {step: (the bytes of the file, the time)} of a checkpoint that is written again and again """
    saves, replace = {}, os.replace

    def watch(source, target):
        replace(source, target)
        if target == path:
            saves[checkpoint(path)["step"]] = path.read_bytes(), time.monotonic()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", watch)
        yield saves


def advance(clock, seconds):
    clock[0] += seconds


def test_last_is_saved_by_the_clock_without_a_change_of_any_digit(tmp_path, clock, all_steps):
    last = tmp_path / "out/last.pt"
    with after_update(lambda optimizer: advance(clock, 250)), saves_of(last) as saves:
        assert steps(good(*tiny(tmp_path, *LIVELY)).out) == all_steps
    assert list(saves) == [0, 4, 7, 10, 13, 16, 19, 20]  # each 600 seconds or more after the one before
    for step in (4, 16, 20):
        last.write_bytes(saves[step][0])
        assert checkpoint(last)["reports"][-1]["step"] == step // 10 * 10
        assert steps(good(*tiny(tmp_path, *LIVELY, "--resume")).out) == all_steps[-(-step // 10):]


@pytest.mark.parametrize("seconds, pause", [(0.6, 30), (0.2, 4)])
def test_where_saving_is_slow_last_is_saved_every_thirty_seconds_and_best_each_time(
        tmp_path, monkeypatch, clock, seconds, pause):
    falling = iter(range(10**6, 0, -1))
    monkeypatch.setattr(os, "fsync", lambda number: advance(clock, seconds))
    with after_update(lambda optimizer: advance(clock, 4)), saves_of(tmp_path / "out/best.pt") as best:
        with saves_of(tmp_path / "out/last.pt") as last:
            with with_losses(lambda model, loss: loss if model.training else loss * 0 + next(falling)):
                good(*tiny(tmp_path, "--eval_interval", 1, "--max_iters", 50))
    times = [at for _, at in last.values()]
    pauses = [later - earlier for earlier, later in zip(times, times[1:])]
    assert list(best) == list(range(51)) and list(last)[-1] == 50
    assert pause <= min(pauses[1:-1]) <= max(pauses) < pause + 6


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
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
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


@pytest.mark.parametrize("reason, words", [("ENOSPC", "make room"), ("EROFS", "make it writable")])
def test_ctrl_c_where_nothing_can_be_written_says_what_was_not_saved_and_keeps_its_status(
        own, held, reason, words):
    before, number = contents(own / "out"), getattr(errno, reason)

    def press():
        held("last.pt", 10**6, number)
        signal.raise_signal(signal.SIGINT)

    with at_pass(8, press):  # after the report at step 20, which was made again
        done = call(*NEXT, "--out", own / "out")
    assert done.code == 130 and "Traceback" not in done.err and "and saved" not in done.err
    assert "notice: step 25 could not be saved, and last.pt is as it was before: " in done.err
    assert f"cannot write {own / 'out/last.pt'}: {os.strerror(number)}; {words}, then continue" in done.err
    assert checkpoint(own / "out/last.pt")["step"] == 20 and before.keys() == contents(own / "out").keys()


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
    def fill():
        with pytest.raises(OSError), open(disk / "filler", "wb", buffering=0) as filler:
            while filler.write(b"x" * 4096):
                pass

    try:
        shutil.copytree(own / "out", disk / "out")
        before = contents(disk / "out")
        fill()
        done = call(*NEXT, "--out", disk / "out")
        assert done.code == 1 and "No space left on device; make room, then continue with" in done.err
        done = call(*tiny(own, "--seed", 3, "--out", disk / "out"))  # a new run, beside the earlier one
        assert done.code == 1 and "No space left on device; make room, then start again" in done.err
        assert contents(disk / "out") == before and sorted(os.listdir(disk)) == ["filler", "out"]
        (disk / "filler").unlink()
        good(*NEXT, "--out", disk / "out")
        with at_pass(8, fill), at_pass(9, lambda: signal.raise_signal(signal.SIGINT)):
            done = call(*tiny(own, "--out", disk / "new"))
        assert done.code == 130 and "notice: step 6 could not be saved, and last.pt is as it was" in done.err
        assert checkpoint(disk / "new/last.pt")["step"] == 0
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
    done = call(*tiny(own))
    assert done.code == 2 and "and saved" not in done.err
    assert f"cannot move the earlier run in {own / 'out'} aside: Permission denied; " in done.err
    assert contents(own / "out") == before and not list((own / "out").glob("old-*"))


@pytest.mark.parametrize("name", ["best.pt", "last.pt"])
@pytest.mark.parametrize("error, code, words", [
    (OSError(errno.ENOSPC, "No space left on device"), 1, "; make room, then start again"),
    (KeyboardInterrupt(), 130, "")])
def test_a_run_whose_first_file_cannot_be_written_brings_the_earlier_one_back(
        own, monkeypatch, name, error, code, words):
    before, replace = contents(own / "out"), os.replace

    def fail(source, target):
        if os.path.basename(source) == f"{name}.part":
            raise error
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail)
    for flags in (tiny(own, "--seed", 3), tiny(own, "--out", own / "new")):
        done = call(*flags)
        assert done.code == code and words in done.err and "--resume" not in done.err
    assert contents(own / "out") == before and not list((own / "out").glob("old-*"))
    assert not list((own / "new").glob("[!.]*.pt")) and "Traceback" not in done.err


# ---- folders and processes of others


@pytest.mark.parametrize("name", ["ENOSYS", "ENOLCK", "EOPNOTSUPP", "no module"])
def test_where_there_is_no_telling_whether_a_folder_is_in_use_the_run_goes_ahead(tmp_path, monkeypatch, name):
    if name == "no module":
        monkeypatch.setitem(sys.modules, "fcntl", None)
    else:
        error = OSError(getattr(errno, name), "Function not implemented")
        monkeypatch.setattr(pytest.importorskip("fcntl"), "flock", failing(error))
    assert "notice" not in good(*tiny(tmp_path)).err


def test_a_folder_is_free_again_after_an_error_even_while_that_is_kept(tmp_path):
    with at_pass(9, failing(ZeroDivisionError("kept"))), pytest.raises(ZeroDivisionError) as kept:
        gpt.main(tiny(tmp_path))
    good(*tiny(tmp_path, "--resume"))
    assert str(kept.value) == "kept"


def test_a_folder_that_was_there_before_a_start_that_fails_is_there_afterwards(tmp_path):
    (tmp_path / "out").mkdir()
    assert call(*tiny(tmp_path, "--batch_size", 10**15)).code == 1
    assert os.listdir(tmp_path / "out") == []


def test_a_folder_that_is_removed_during_the_run_is_made_again_and_the_last_model_writes(tmp_path):
    with at_pass(20, lambda: shutil.rmtree(tmp_path / "out")), with_losses(lambda model, loss: loss * 0 + 3):
        done = good(*tiny(tmp_path))  # the report at step 0 stays the best
    best, last = tmp_path / "out/best.pt", tmp_path / "out/last.pt"
    assert f"the last model writes instead of the best, since there is no {best}" in done.err
    done = good("--sample", "--out", tmp_path / "out", "--max_new_tokens", 2)
    assert f"there is no {best}, so this is the model of {last}" in done.err
    good(*tiny(tmp_path, "--resume", "--max_iters", 30))
    assert best.exists()


def test_the_callers_random_numbers_and_output_are_afterwards_as_they_were(tmp_path):
    number, before = os.fstat(1).st_ino, torch.get_rng_state()
    good(*tiny(tmp_path))
    assert torch.equal(torch.get_rng_state(), before)
    full = SimpleNamespace(write=failing(OSError(errno.ENOSPC, "full")), flush=lambda: None)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(sys, "stdout", full)
        gpt.main(tiny(tmp_path))
    assert os.fstat(1).st_ino == number and torch.equal(torch.get_rng_state(), before)


# ---- kill -9, and a cut of the power


@contextmanager
def dies_at(number):
    """ this process dies, as by kill -9, before it replaces or moves its file `number` """
    def counted(function):
        def act(*args):
            if next(count) == number:
                os._exit(9)
            return function(*args)
        return act

    count = iter(range(10**6))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", counted(os.replace))
        patch.setattr(os, "rename", counted(os.rename))
        yield


def in_a_copy_that_dies(flags, number):
    """ gpt.main in a copy of this process, which dies before it replaces or moves its file `number` """
    child = os.fork()
    if not child:
        with dies_at(number):
            call(*flags)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot be copied here")
@pytest.mark.parametrize("number", range(9))
def test_a_run_that_dies_at_any_of_its_files_continues_to_the_digit(tmp_path, all_steps, number):
    flags = tiny(tmp_path, *LIVELY)
    assert in_a_copy_that_dies(flags, number) == 9
    out = tmp_path / "out"
    complete = [path.name for path in sorted(out.glob("*.pt"))]
    for name in complete:
        gpt.load(out / name, "cpu")
    if "last.pt" not in complete:
        assert number < 2
        return
    done = good(*flags, "--resume")
    first = checkpoint(out / "last.pt")
    assert steps(done.out) == all_steps[-len(steps(done.out)):] and first["step"] == 20
    assert "not this run's" not in done.err and not list(out.glob("*.part"))
    assert checkpoint(out / "best.pt")["best"] == first["best"]


@pytest.mark.slow
def test_a_run_that_is_killed_at_any_moment_leaves_files_that_load(tmp_path):
    flags = tiny(tmp_path, "--max_iters", 100000, "--eval_interval", 1, "--eval_iters", 1)
    draw, reached, out = random.Random(8), -1, tmp_path / "out"
    for number in range(5):
        process = start(*flags, *["--resume"] * bool(number), stdout=subprocess.DEVNULL)
        try:
            until(lambda: (out / "last.pt").exists() and (out / "best.pt").exists())
            saved = checkpoint(out / "last.pt")["step"]
            until(lambda saved=saved: checkpoint(out / "last.pt")["step"] > saved)
            time.sleep(draw.uniform(0, 0.3))
        finally:
            process.kill()
        assert ended(process).code == -9
        gpt.read_checkpoint(out / "best.pt")
        assert gpt.read_checkpoint(out / "last.pt")["step"] > reached
        reached = checkpoint(out / "last.pt")["step"]
    done = good(*flags, "--resume", "--max_iters", reached + 3)
    assert "not this run's" not in done.err and not list(out.glob("last.pt.part"))
