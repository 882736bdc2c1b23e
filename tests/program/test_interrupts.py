"""
Ctrl+C and SIGTERM, sent to real processes in every phase: the run is saved, says how to go on, ends with the
status that a shell expects, and what it prints afterwards is what it would have printed.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest
from helpers import ROOT, call, checkpoint, ended, environment, start, steps, tiny, until

import bigram
import gpt

pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals as on Unix")
STATUS = {signal.SIGINT: 130, signal.SIGTERM: 143}
INT, TERM = signal.SIGINT, signal.SIGTERM
SLOW_INT, SLOW_TERM = (pytest.param(number, marks=pytest.mark.slow) for number in STATUS)


def first_lines(process, begin):
    """Read standard output up to the line that begins so."""
    lines = []
    while not (lines and lines[-1].startswith(begin)):
        line = process.stdout.readline().decode()
        assert line, (lines, process.stderr.read())
        lines.append(line)
    return "".join(lines)


def end(process, number):
    """Send the signal; what was still printed. Status and message are the same in every phase."""
    process.send_signal(number)
    done = ended(process)
    assert done.code == STATUS[number], done.err
    assert "Traceback" not in done.err and "stopping when this step is done" in done.err
    return done


@pytest.mark.parametrize("number", [INT, SLOW_TERM])
def test_a_signal_during_training_saves_and_the_rest_prints_the_same_digits(tmp_path, number):
    flags = ("--max_iters", "500", "--eval_interval", "250", "--dropout", "0.2")
    (tmp_path / "whole").mkdir()
    whole = steps(call(*tiny(tmp_path / "whole", *flags)).out)
    process = start(tmp_path, *tiny(tmp_path, *flags))
    before = first_lines(process, "step 0:")
    time.sleep(0.15)
    done = end(process, number)
    at = int(
        re.search(
            r"stopped at step (\d+) and saved; to go on: python gpt.py --resume --out (\S+)\n", done.err
        )[1]
    )
    saved = checkpoint(tmp_path / "out/last.pt")
    assert 0 < at < 500 and saved["step"] == at
    gpt.read_checkpoint(tmp_path / "out/last.pt")
    rest = call("--resume", "--out", tmp_path / "out", "--device", "cpu", "--max_new_tokens", "3")
    assert steps(before + done.out + rest.out) == whole


@pytest.mark.parametrize("number", [SLOW_INT, TERM])
def test_a_signal_during_the_first_evaluation_saves_and_nothing_is_lost(tmp_path, number):
    process = start(tmp_path, *tiny(tmp_path, "--eval_iters", "1000000"))
    first_lines(process, "size:")
    time.sleep(0.3)
    done = end(process, number)
    assert "stopped at step 0 and saved" in done.err and steps(done.out) == []
    assert checkpoint(tmp_path / "out/last.pt")["step"] == 0
    rest = call(
        "--resume", "--out", tmp_path / "out", "--eval_iters", "2", "--device", "cpu", "--max_new_tokens", "3"
    )
    (tmp_path / "whole").mkdir()
    assert steps(rest.out) == steps(call(*tiny(tmp_path / "whole")).out)


@pytest.mark.slow
def test_a_signal_during_a_later_evaluation_goes_on_at_that_step_with_the_same_digits(tmp_path):
    flags = ("--eval_iters", "250", "--max_iters", "4", "--eval_interval", "2", "--dropout", "0.2")
    (tmp_path / "whole").mkdir()
    whole = steps(call(*tiny(tmp_path / "whole", *flags)).out)
    process = start(tmp_path, *tiny(tmp_path, *flags))
    before = first_lines(process, "step 0:")
    time.sleep(0.1)  # two steps take less, the evaluation more
    done = end(process, signal.SIGINT)
    at = int(re.search(r"stopped at step (\d+) and saved", done.err)[1])
    rest = call("--resume", "--out", tmp_path / "out", "--device", "cpu", "--max_new_tokens", "3")
    assert at in (2, 4) and len(whole) == 3 and steps(before + done.out + rest.out) == whole


@pytest.mark.parametrize("number", [SLOW_INT, SLOW_TERM])
def test_a_signal_during_the_sample_after_training_ends_it_and_the_run_is_there(tmp_path, number):
    process = start(tmp_path, *tiny(tmp_path, "--max_new_tokens", "10000000"))
    first_lines(process, "best:")
    time.sleep(0.2)
    done = end(process, number)
    assert len(done.out) > 10
    assert checkpoint(tmp_path / "out/last.pt")["step"] == 20
    gpt.load(tmp_path / "out/best.pt", "cpu")


@pytest.mark.parametrize("number", [INT, SLOW_TERM])
def test_a_signal_during_sampling_ends_it(tmp_path, number):
    assert call(*tiny(tmp_path)).code == 0
    process = start(tmp_path, "--sample", "--out", tmp_path / "out", "--max_new_tokens", "10000000")
    assert len(process.stdout.read(5)) > 0
    end(process, number)


def test_a_second_ctrl_c_ends_at_once(tmp_path):
    """The process is held inside one step, of which the first Ctrl+C would await the end."""
    code = "import gpt, time; gpt.Run.forward = lambda *args: time.sleep(60); gpt.main()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *tiny(tmp_path)],
        cwd=ROOT,
        bufsize=0,
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    first_lines(process, "step 0:")
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    assert process.stderr.readline() + process.stderr.readline() == (
        b"\nstopping when this step is done; once more stops at once\n"
    )
    assert process.poll() is None
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert ended(process).code == -signal.SIGINT and time.monotonic() - begin < 3


def test_ctrl_c_before_the_run_begins_ends_without_a_traceback(tmp_path, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(gpt, "find_text", interrupted)
    done = call(*tiny(tmp_path))
    assert done.code == 130 and done.err == ""


def test_whoever_reads_the_output_may_leave_and_the_run_is_saved(tmp_path):
    process = start(tmp_path, *tiny(tmp_path, "--max_iters", "100000"))
    first_lines(process, "step 10:")
    process.stdout.close()
    err = process.stderr.read().decode()
    process.wait(20)
    assert "Traceback" not in err and "Exception ignored" not in err
    at = int(re.search(r"stopped at step (\d+) and saved", err)[1])
    assert at >= 20 and checkpoint(tmp_path / "out/last.pt")["step"] == at


@pytest.mark.slow
def test_signals_at_random_moments_and_going_on_end_in_the_digits_of_one_run(tmp_path):
    flags = ("--max_iters", "2000", "--eval_interval", "250", "--eval_iters", "60", "--dropout", "0.2")
    (tmp_path / "whole").mkdir()
    whole = dict.fromkeys(steps(call(*tiny(tmp_path / "whole", *flags)).out))
    printed = {}
    for number in range(12):
        process = start(
            tmp_path, *tiny(tmp_path, *flags), *(["--resume"] if number else []), stderr=subprocess.DEVNULL
        )
        out = first_lines(process, "size:")
        time.sleep(0.1 + 0.07 * number)
        process.send_signal(signal.SIGINT)
        done = ended(process)
        printed.update(dict.fromkeys(steps(out + done.out)))
        if done.code == 0:
            break
        assert done.code == 130
    until(lambda: process.poll() is not None)
    if done.code:
        printed.update(dict.fromkeys(steps(call(*tiny(tmp_path, *flags), "--resume").out)))
    assert number >= 3 and list(printed) == list(whole) and len(whole) == 9


STREAMS = [
    ("gpt.py", "<&- >&-", 0),
    ("gpt.py", ">/dev/full", 1),
    ("bigram.py", ">&-", 0),
    ("bigram.py", ">/dev/full", 1),
]


@pytest.mark.skipif(sys.platform == "win32", reason="redirections of a POSIX shell")
@pytest.mark.parametrize("script, redirection, code", STREAMS)
def test_closed_streams_and_a_full_device_end_without_a_traceback(script, redirection, code, tmp_path):
    flags = tiny(tmp_path)
    if script == "bigram.py":
        flags = ["--max_iters", "2", "--eval_iters", "1", *flags[flags.index("--data") :][:2]]
    done = subprocess.run(
        f"{shlex.join([sys.executable, script, *flags])} {redirection}",
        shell=True,
        cwd=ROOT,
        env=environment(tmp_path),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert done.returncode == code and "Traceback" not in done.stderr
    assert code == 0 or f"{script}: cannot go on: [Errno 28]" in done.stderr


def test_a_bigram_whose_loss_is_no_number_says_so(tmp_path):
    flags = tiny(tmp_path)
    data = flags[flags.index("--data") :][:2]
    with pytest.raises(SystemExit, match="no number any more at step 50; lower --learning_rate"):
        bigram.main(["--learning_rate", "1e30", "--max_iters", "50", "--eval_iters", "1", *data])
