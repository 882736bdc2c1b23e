"""
Ctrl+C, SIGTERM and SIGHUP in every phase: the run is saved and says how to continue, it ends with the status that a
shell expects, and what it prints afterwards is what it would have printed.
"""
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time

import pytest
from helpers import (
    ROOT,
    at_batch,
    call,
    checkpoint,
    ended,
    environment,
    first_lines,
    good,
    run,
    start,
    steps,
    tiny,
    write_small_text,
)

import gpt

pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals as on Unix")
SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
FLAGS = "--dropout 0.2 --decay --warmup_iters 2".split()


@pytest.fixture(scope="module")
def all_steps(tmp_path_factory):
    """ what the run of FLAGS prints when nothing disturbs it """
    return steps(good(*tiny(tmp_path_factory.mktemp("once"), *FLAGS)).out)


@pytest.fixture
def heard():
    """ the signals that reach this process beside gpt.main, while it has handlers of its own """
    numbers = []
    handlers = {number: signal.signal(number, lambda number, frame: numbers.append(number)) for number in SIGNALS}
    ours = {number: signal.getsignal(number) for number in SIGNALS}
    yield numbers
    assert {number: signal.getsignal(number) for number in SIGNALS} == ours  # as they were before gpt.main
    for number, handler in handlers.items():
        signal.signal(number, handler)


def send(*numbers):
    for number in numbers:
        os.kill(os.getpid(), number)


# ---- in this process, at a chosen moment


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("batch, step", [(1, 0), (4, 1), (8, 5), (15, 10), (27, 20), (29, 20)])
def test_a_signal_saves_after_the_step_and_the_rest_prints_the_same_digits(
        tmp_path, monkeypatch, heard, all_steps, number, batch, step):
    with monkeypatch.context() as patch:
        at_batch(patch, batch, lambda: send(number))
        done = call(*tiny(tmp_path, *FLAGS))
    assert done.code == 128 + number and heard == [] and "Traceback" not in done.err
    assert "\nstopping when this step is done; once more stops at once\n" in done.err
    note = re.search(r"^stopped at step (\d+) and saved; to continue: (.+)$", done.err, re.MULTILINE)
    assert int(note[1]) == checkpoint(tmp_path / "out/last.pt")["step"] == step
    rest = good(*shlex.split(note[2])[2:], "--max_new_tokens", 2, "--no-taste")
    assert steps(done.out + rest.out) == all_steps


def test_a_second_signal_goes_where_it_went_before_the_run(tmp_path, monkeypatch, heard):
    at_batch(monkeypatch, 8, lambda: send(signal.SIGINT, signal.SIGTERM))
    assert call(*tiny(tmp_path)).code == 130 and heard == [signal.SIGTERM]


def test_a_second_ctrl_c_does_not_wait_for_the_step(tmp_path, monkeypatch):
    monkeypatch.setattr(gpt.Run, "stepped", lambda *args: pytest.fail("it waited"))
    at_batch(monkeypatch, 8, lambda: send(signal.SIGINT, signal.SIGINT))
    done = call(*tiny(tmp_path), "--eval_iters", 4)  # batch 8 is the first of the training
    assert done.code == 130 and "Traceback" not in done.err


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_that_was_ignored_stays_ignored(tmp_path, monkeypatch, all_steps, number):
    handler = signal.signal(number, signal.SIG_IGN)  # as nohup does with SIGHUP
    try:
        at_batch(monkeypatch, 8, lambda: send(number))
        assert steps(good(*tiny(tmp_path, *FLAGS)).out) == all_steps
        assert signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("phase", ["the last measurement", "the last sample", "--sample"])
def test_a_signal_while_the_finished_model_is_used_ends_that(trained, tmp_path, monkeypatch, heard, number, phase):
    flags = ["--sample", "--out", trained / "out"] if phase == "--sample" else tiny(tmp_path)
    name, count = ("score", 0) if phase == "the last measurement" else ("stream", 7)
    function = getattr(gpt, name)

    def with_signal(*args):
        if not count:
            send(number)
            return function(*args)
        return (send(number) if i == count else ch for i, ch in enumerate(function(*args)))

    def characters(*args):
        for i, ch in enumerate(function(*args)):
            if i == count:
                send(number)
            yield ch

    monkeypatch.setattr(gpt, name, characters if count else with_signal)
    done = call(*flags, "--max_new_tokens", 1000)
    assert done.code == 128 + number and heard == [] and "Traceback" not in done.err
    if phase != "--sample":
        assert checkpoint(tmp_path / "out/last.pt")["step"] == 20
        gpt.load(tmp_path / "out/best.pt", "cpu")
    if count:
        assert len(done.out.splitlines()[-1]) <= count + 1


def test_ctrl_c_before_the_run_begins_ends_without_a_traceback(tmp_path, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(gpt, "find_text", interrupted)
    done = call(*tiny(tmp_path))
    assert done.code == 130 and done.err == ""


def test_a_run_in_another_thread_has_no_handlers_and_ends_well(tmp_path, heard, all_steps):
    done = []
    thread = threading.Thread(target=lambda: done.append(good(*tiny(tmp_path, *FLAGS))))
    thread.start()
    thread.join(60)
    assert steps(done[0].out) == all_steps


# ---- real processes, at any moment


@pytest.mark.parametrize("number", [pytest.param(n, marks=[pytest.mark.slow] * (n != signal.SIGINT)) for n in SIGNALS])
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
    assert process.stderr.readline() + process.stderr.readline() == (
        b"\nstopping when this step is done; once more stops at once\n")
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    done = ended(process, 20)
    assert done.code == 130 and "Traceback" not in done.err


@pytest.mark.slow
def test_under_nohup_a_run_outlives_its_terminal(tmp_path):
    code = "import signal, gpt; signal.signal(signal.SIGHUP, signal.SIG_IGN); gpt.main()"
    process = start(*tiny(tmp_path, "--max_iters", 2000), command=("-c", code))
    first_lines(process, "step 10:")
    process.send_signal(signal.SIGHUP)
    done = ended(process)
    assert done.code == 0 and "step 2000:" in done.out and "stopp" not in done.err


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
    flags = [*FLAGS, *"--max_iters 2000 --eval_interval 250 --eval_iters 60".split()]
    (tmp_path / "once").mkdir()
    all_steps = dict.fromkeys(steps(good(*tiny(tmp_path / "once", *flags)).out))
    printed = {}
    for number in range(12):
        process = start(*tiny(tmp_path, *flags), *["--resume"] * bool(number), stderr=subprocess.DEVNULL)
        out = first_lines(process, "size:")
        time.sleep(0.1 + 0.07 * number)
        process.send_signal(SIGNALS[number % len(SIGNALS)])
        done = ended(process)
        printed.update(dict.fromkeys(steps(out + done.out)))
        if done.code == 0:
            break
        assert done.code > 128
    if done.code:
        printed.update(dict.fromkeys(steps(good(*tiny(tmp_path, *flags), "--resume").out)))
    assert number >= 3 and list(printed) == list(all_steps) and len(all_steps) == 9


# ---- an end for another reason


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
@pytest.mark.parametrize("script", ["gpt.py", "bigram.py"])
def test_a_full_device_ends_a_script_with_one_sentence(script, tmp_path):
    flags = ["--data", write_small_text(tmp_path), "--max_iters", 2, "--eval_iters", 1]
    flags += ["--out", tmp_path / "out"] if script == "gpt.py" else []
    done = run(*flags, command=(script,), stdout=open("/dev/full", "wb"))
    assert done.code == 1 and f"{script}: cannot continue: [Errno 28] No space left on device\n" == done.err
