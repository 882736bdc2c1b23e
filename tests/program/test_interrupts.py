"""
Ctrl+C, SIGTERM and SIGHUP in every phase: the run is saved and says how to continue, it ends with the status
that a shell expects, and what it prints afterwards is what it would have printed.
"""
import os
import random
import re
import shlex
import signal
import subprocess
import threading
import time

import pytest
from helpers import LIVELY, at_batch, call, checkpoint, ended, first_lines, good, start, steps, tiny, until

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


@pytest.mark.parametrize("batch, step, number", [
    (1, 0, SIGNALS[0]), (4, 1, SIGNALS[-1]), (8, 5, SIGNALS[0]), (8, 5, SIGNALS[1]), (8, 5, SIGNALS[-1]),
    (15, 10, SIGNALS[1]), (27, 20, SIGNALS[0]), (29, 20, SIGNALS[-1])])
def test_a_signal_saves_after_the_step_and_the_rest_prints_the_same_digits(
        tmp_path, monkeypatch, heard, all_steps, batch, step, number):
    with monkeypatch.context() as patch:
        at_batch(patch, batch, lambda: send(number))
        done = call(*tiny(tmp_path, *LIVELY))
    assert done.code == 128 + number and heard == [] and "Traceback" not in done.err
    assert "\nstopping soon; a second Ctrl+C or signal stops at once\n" in done.err
    note = re.search(r"^stopped at step (\d+) and saved; to continue: (.+)$", done.err, re.MULTILINE)
    assert int(note[1]) == checkpoint(tmp_path / "out/last.pt")["step"] == step
    rest = good(*shlex.split(note[2])[2:], "--max_new_tokens", 2, "--no-taste")
    assert steps(done.out + rest.out) == all_steps


def test_a_second_signal_goes_where_it_went_before_the_run(tmp_path, monkeypatch, heard):
    at_batch(monkeypatch, 8, lambda: send(signal.SIGINT, signal.SIGTERM))
    assert call(*tiny(tmp_path)).code == 130 and heard == [signal.SIGTERM]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_that_was_ignored_stays_ignored(tmp_path, monkeypatch, all_steps, number):
    handler = signal.signal(number, signal.SIG_IGN)  # as nohup does with SIGHUP
    try:
        at_batch(monkeypatch, 8, lambda: send(number))
        assert steps(good(*tiny(tmp_path, *LIVELY)).out) == all_steps
        assert signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, handler)


@pytest.mark.parametrize("task, name, number, end", [
    ("train",  "score",  SIGNALS[0],  r"\nstep 20: .*\n$"),
    ("train",  "stream", SIGNALS[1],  r"; the best model writes:\n\n$"),
    ("sample", "stream", SIGNALS[-1], r"^\n$")])
def test_a_signal_while_the_best_model_is_used_ends_it(own, monkeypatch, heard, task, name, number, end):
    function = getattr(gpt, name)

    def watched(*args):
        send(number)
        return function(*args)

    monkeypatch.setattr(gpt, name, watched)
    done = call(*["--sample", "--out", own / "out"] if task == "sample" else tiny(own))
    assert done.code == 128 + number and heard == [] and "Traceback" not in done.err
    assert re.search(end, done.out) and checkpoint(own / "out/last.pt")["step"] == 20


def test_ctrl_c_before_the_run_begins_ends_without_a_traceback(tmp_path, monkeypatch):
    monkeypatch.setattr(gpt, "find_text", lambda *args: send(signal.SIGINT))
    done = call(*tiny(tmp_path))
    assert done.code == 130 and done.err == ""


def test_a_run_in_another_thread_has_no_handlers_and_ends_well(tmp_path, heard, all_steps):
    done = []
    thread = threading.Thread(target=lambda: done.append(good(*tiny(tmp_path, *LIVELY))))
    thread.start()
    thread.join(60)
    assert steps(done[0].out) == all_steps


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


def test_a_second_ctrl_c_ends_a_process_at_once(tmp_path):
    """ the process is held inside one step, of which the first Ctrl+C would await the end """
    code = "import gpt, time; gpt.Run.stepped = lambda *args: time.sleep(60); gpt.main()"
    process = start(*tiny(tmp_path), command=("-c", code))
    first_lines(process, "step 0:")
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    while b"stopping soon; a second Ctrl+C or signal stops at once\n" != process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    done = ended(process, 20)
    assert done.code == 130 and "Traceback" not in done.err


@pytest.mark.slow
@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_to_a_process_that_writes_ends_it(trained, number):
    process = start("--sample", "--out", trained / "out", "--max_new_tokens", 10**7)
    assert len(process.stdout.read(5)) > 0
    process.send_signal(number)
    done = ended(process)
    assert done.code == 128 + number and "Traceback" not in done.err


def test_whoever_reads_the_output_may_leave_and_the_run_is_saved(tmp_path):
    process = start(*tiny(tmp_path, "--max_iters", 100000))
    first_lines(process, "step 10:")
    process.stdout.close()
    err = process.stderr.read().decode()
    process.wait(20)
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
    good(*flags, "--resume", "--max_iters", reached + 3)
