"""
Ctrl+C, SIGTERM and SIGHUP in every phase: the run is saved and says how to continue, it ends with the status
that a shell expects, and what it prints afterwards is what it would have printed.
"""
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest
import torch
from helpers import LIVELY, WRITING, after_update, at_pass, call, checkpoint, contents, ended, first_lines
from helpers import good, start, steps, tiny, until

import gpt

pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals as on Unix")
SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


@pytest.fixture
def heard():
    """ the signals that reach this process beside gpt.main, while it has handlers of its own """
    numbers = []

    def hear(number, frame):
        numbers.append(number)

    before = [signal.signal(number, hear) for number in SIGNALS]
    yield numbers
    assert [signal.signal(*pair) for pair in zip(SIGNALS, before)] == [hear] * len(SIGNALS)  # as they were


def send(*numbers):
    for number in numbers:
        signal.raise_signal(number)  # to this thread, and so before the next line


# ---- in this process, at a chosen moment


@pytest.mark.parametrize("number_of_pass, step, number", [
    (4, 1, SIGNALS[-1]), (8, 5, SIGNALS[0]), (8, 5, SIGNALS[1]), (8, 5, SIGNALS[-1]), (15, 10, SIGNALS[1]),
    (27, 20, SIGNALS[0]), (29, 20, SIGNALS[-1])])
def test_a_signal_saves_after_the_step_and_the_rest_prints_the_same_digits(
        tmp_path, heard, all_steps, number_of_pass, step, number):
    with at_pass(number_of_pass, lambda: send(number)):
        done = call(*tiny(tmp_path, *LIVELY))
    assert done.code == 128 + number and heard == [] and "Traceback" not in done.err
    assert "\nstopping soon; a second Ctrl+C or signal stops at once\n" in done.err
    note = re.search(r"^stopped at step (\d+) and saved; to continue: (.+)$", done.err, re.MULTILINE)
    assert int(note[1]) == checkpoint(tmp_path / "out/last.pt")["step"] == step
    rest = good(*shlex.split(note[2])[2:], "--max_new_tokens", 2, "--no-taste")
    assert steps(done.out + rest.out) == all_steps


@pytest.mark.parametrize("number_of_pass", [1, 3])
def test_a_signal_before_the_first_step_leaves_the_earlier_run_and_says_that_nothing_was_saved(
        own, heard, number_of_pass):
    before = contents(own / "out")
    with at_pass(number_of_pass, lambda: send(SIGNALS[0])):
        done = call(*tiny(own, "--seed", 5))
    assert done.code == 128 + SIGNALS[0] and heard == []
    assert "this run has no file yet, and none was saved" in done.err and "--resume" not in done.err
    assert contents(own / "out") == before


def test_a_second_signal_goes_where_it_went_before_the_run(tmp_path, heard):
    with at_pass(8, lambda: send(signal.SIGINT, signal.SIGTERM)):
        assert call(*tiny(tmp_path)).code == 130 and heard == [signal.SIGTERM]


def test_a_second_ctrl_c_does_not_wait_for_the_end_of_the_step(tmp_path):
    updates = []
    with at_pass(8, lambda: send(signal.SIGINT, signal.SIGINT)), after_update(updates.append):
        done = call(*tiny(tmp_path))
    assert done.code == 130 and len(updates) == 4 and "Traceback" not in done.err


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_that_was_ignored_stays_ignored(tmp_path, all_steps, number):
    handler = signal.signal(number, signal.SIG_IGN)  # as nohup does with SIGHUP
    try:
        with at_pass(8, lambda: send(number)):
            assert steps(good(*tiny(tmp_path, *LIVELY)).out) == all_steps
        assert signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, handler)


@pytest.mark.parametrize("task, moment, number, end", [
    ("train",  32,      SIGNALS[0],  r"\nstep 20: .*\n$"),
    ("train",  WRITING, SIGNALS[1],  r"; the best model writes:\n\n.?$"),
    ("sample", WRITING, SIGNALS[-1], r"^\n.?$")])
def test_a_signal_while_the_best_model_is_used_ends_it(own, heard, task, moment, number, end):
    with at_pass(moment, lambda: send(number)):
        done = call(*["--sample", "--out", own / "out"] if task == "sample" else tiny(own))
    assert done.code == 128 + number and heard == [] and "Traceback" not in done.err
    assert re.search(end, done.out) and checkpoint(own / "out/last.pt")["step"] == 20


def test_ctrl_c_before_the_run_begins_ends_without_a_traceback(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "manual_seed", lambda seed: send(signal.SIGINT))  # before there is a model
    done = call(*tiny(tmp_path))
    assert done.code == 130 and "Traceback" not in done.err and not (tmp_path / "out").exists()


def test_a_run_in_another_thread_has_no_handlers_and_ends_well(tmp_path, heard, all_steps):
    done = []
    thread = threading.Thread(target=lambda: done.append(good(*tiny(tmp_path, *LIVELY))))
    thread.start()
    thread.join(60)
    assert steps(done[0].out) == all_steps


def test_whoever_reads_the_output_may_leave_and_the_run_is_saved(tmp_path, monkeypatch, capsys, all_steps):
    reader, writer = os.pipe()
    monkeypatch.setattr(sys, "stdout", open(writer, "w", encoding="utf-8"))
    with at_pass(8, lambda: os.close(reader)), pytest.raises(SystemExit) as stop:
        gpt.main(tiny(tmp_path, *LIVELY))
    with suppress(BrokenPipeError):
        sys.stdout.close()
    assert stop.value.code == 141  # what a shell says of `yes | head -1`
    err = capsys.readouterr().err
    note = re.search(r"^stopped at step (\d+) and saved; to continue: (.+)$", err, re.MULTILINE)
    assert int(note[1]) == checkpoint(tmp_path / "out/last.pt")["step"] == 10
    monkeypatch.undo()
    assert steps(good(*shlex.split(note[2])[2:], "--max_new_tokens", 2, "--no-taste").out) == all_steps[1:]


# ---- real processes, at any moment


@pytest.mark.slow
@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_to_a_process_saves_and_ends_with_the_status_of_the_signal(tmp_path, number):
    process = start(*tiny(tmp_path, "--max_iters", 100000))
    first_lines(process, "step 10:")
    process.send_signal(number)
    done = ended(process)
    assert done.code == 128 + number and "Traceback" not in done.err
    step = int(re.search(r"stopped at step (\d+) and saved", done.err)[1])
    assert checkpoint(tmp_path / "out/last.pt")["step"] == step >= 10


@pytest.mark.slow
@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_to_a_process_that_writes_ends_it(trained, number):
    process = start("--sample", "--out", trained / "out", "--max_new_tokens", 10**7)
    assert len(process.stdout.read(5)) > 0
    process.send_signal(number)
    done = ended(process)
    assert done.code == 128 + number and "Traceback" not in done.err


@pytest.mark.slow
def test_a_process_whose_reader_leaves_is_saved_and_complains_once(tmp_path):
    process = start(*tiny(tmp_path, "--max_iters", 100000))
    first_lines(process, "step 10:")
    process.stdout.close()
    err = process.stderr.read().decode()
    assert process.wait(20) == 141
    assert "Traceback" not in err and "Exception ignored" not in err
    step = int(re.search(r"stopped at step (\d+) and saved", err)[1])
    assert step >= 20 and checkpoint(tmp_path / "out/last.pt")["step"] == step


@pytest.mark.slow
def test_signals_at_random_moments_and_resuming_end_in_the_digits_of_one_run(tmp_path):
    flags = [*LIVELY, *"--max_iters 2000 --eval_interval 250 --eval_iters 60".split()]
    (tmp_path / "once").mkdir()
    all_steps = dict.fromkeys(steps(good(*tiny(tmp_path / "once", *flags)).out))
    printed = {}
    for number in range(8):
        process = start(*tiny(tmp_path, *flags), *["--resume"] * bool(number), stderr=subprocess.DEVNULL)
        out = first_lines(process, "size:")
        until((tmp_path / "out/last.pt").exists)
        time.sleep(0.1 + 0.1 * number)
        process.send_signal(SIGNALS[number % len(SIGNALS)])
        done = ended(process)
        printed.update(dict.fromkeys(steps(out + done.out)))
        if done.code == 0:
            break
        assert done.code > 128
    if done.code:
        printed.update(dict.fromkeys(steps(good(*tiny(tmp_path, *flags), "--resume").out)))
    assert number >= 3 and list(printed) == list(all_steps) and len(all_steps) == 9
