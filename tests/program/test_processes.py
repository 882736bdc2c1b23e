"""
Several processes under torchrun, on the CPUs of this machine: they compute the run of one, speak with one
voice, and end together.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch
from helpers import ROOT, call, checkpoint, ended, environment, steps, tiny, until

import gpt

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.name == "nt", reason="as on Unix")]


def launch(folder, *args, nodes=("--standalone",), count=2):
    command = [sys.executable, "-m", "torch.distributed.run", *nodes, f"--nproc_per_node={count}", "gpt.py"]
    return subprocess.Popen(
        [*command, *map(str, args)],
        cwd=ROOT,
        env=environment(folder),
        bufsize=0,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def together(folder, *args, **more):
    return ended(launch(folder, *args, **more), 120)


def alone(folder, *args):
    done = call(*args)
    assert done.code == 0, done.err
    return done


def numbers(lines):
    return [[float(number) for number in re.findall(r"\d+(?:\.\d+)?", line)] for line in lines]


def same(one, two):
    """The printed losses are equal up to the order of summation."""
    assert len(one) == len(two) > 0
    assert numbers(one) == [pytest.approx(row, abs=1.01e-4) for row in numbers(two)]


@pytest.fixture
def folders(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    return tmp_path / "one", tmp_path / "two"


def workers(launcher):
    """The process ids of the launcher's children that run gpt.py, by rank."""
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
                parent = int(file.read().rsplit(")", 1)[1].split()[1])
            if parent == launcher.pid:
                with open(f"/proc/{pid}/environ", "rb") as file:
                    values = dict(item.split(b"=", 1) for item in file.read().split(b"\0") if b"=" in item)
                if b"RANK" in values:
                    found[int(values[b"RANK"])] = int(pid)
        except OSError:
            continue
    return found


def test_two_processes_compute_the_run_of_one_and_speak_with_one_voice(folders):
    one, two = folders
    flags = ("--dropout", "0", "--max_iters", "40", "--grad_clip", "1")
    both = together(two, *tiny(two, *flags))
    assert both.code == 0, both.err
    same(steps(both.out), steps(alone(one, *tiny(one, *flags)).out))
    assert len(steps(both.out)) == 5 and both.out.count("device: ") == both.out.count("best:  ") == 1
    assert "2 processes, float32" in both.out
    weights = [checkpoint(folder / "out/last.pt")["model"] for folder in folders]
    assert set(weights[0]) == set(weights[1])
    for key in weights[0]:
        torch.testing.assert_close(weights[0][key], weights[1][key], rtol=1e-3, atol=1e-4)
    gpt.load(two / "out/best.pt", "cpu")


def test_a_batch_that_cannot_be_shared_is_one_sentence(tmp_path):
    done = together(tmp_path, *tiny(tmp_path, "--batch_size", "5"))
    sentence = "error: 2 processes cannot share --batch_size 5; take a multiple"
    assert done.code != 0 and done.err.count(sentence) == 1 and steps(done.out) == []


@pytest.mark.parametrize(
    "mistake, sentence",
    [
        (["--data", "/nonexistent/text.txt"], "cannot read /nonexistent/text.txt"),
        (["--n_embd", "65", "--n_head", "4"], "--n_embd 65 is not a multiple"),
    ],
)
def test_a_mistake_ends_all_of_them_with_one_sentence(tmp_path, mistake, sentence):
    done = together(tmp_path, *tiny(tmp_path), *mistake)
    assert done.code != 0 and done.err.count(sentence) == 1


@pytest.mark.parametrize("first, then", [(1, 2), (2, 1)])
def test_a_run_goes_on_with_another_number_of_processes(folders, first, then):
    one, two = folders
    whole = steps(alone(one, *tiny(one, "--dropout", "0")).out)
    half, rest = tiny(two, "--dropout", "0", "--max_iters", "10"), tiny(two, "--dropout", "0", "--resume")
    done = alone(two, *half) if first == 1 else together(two, *half)
    assert done.code == 0, done.err
    done = alone(two, *rest) if then == 1 else together(two, *rest)
    assert done.code == 0, done.err
    same(steps(done.out), whole[1:])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_launcher_ends_all_with_a_checkpoint_to_go_on_from(folders, number):
    one, two = folders
    flags = ("--dropout", "0", "--max_iters", "3000", "--eval_interval", "1500")
    launcher = launch(two, *tiny(two, *flags))
    lines = []
    while not (lines and lines[-1].startswith("step 0:")):
        lines.append(launcher.stdout.readline().decode())
        assert lines[-1], launcher.stderr.read()
    pids = workers(launcher)
    time.sleep(0.3)
    launcher.send_signal(number)
    done = ended(launcher, 60)
    assert done.code != 0
    until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids.values()), 10)
    step = gpt.read_checkpoint(two / "out/last.pt")[0]["step"]
    assert 0 < step < 3000 and f"stopped at step {step} and saved" in done.err
    rest = alone(two, *tiny(two, *flags), "--resume")
    whole = steps(alone(one, *tiny(one, *flags)).out)[-len(steps(rest.out)) :]
    # in thousands of steps the order of summation grows to a hundredth; the losses began at 3
    assert numbers(steps(rest.out)) == [pytest.approx(row, abs=0.05) for row in numbers(whole)]
    assert all(row[1] < 1.5 for row in numbers(whole))


@pytest.mark.parametrize("rank", [0, 1])
def test_when_one_is_killed_all_end_promptly_and_the_checkpoint_loads(tmp_path, rank):
    launcher = launch(tmp_path, *tiny(tmp_path, "--max_iters", "1000000"))
    while not launcher.stdout.readline().startswith(b"step 10:"):
        assert launcher.poll() is None
    pids = workers(launcher)
    assert sorted(pids) == [0, 1]
    os.kill(pids[rank], signal.SIGKILL)
    done = ended(launcher, 45)
    assert done.code != 0
    until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids.values()), 5)
    assert gpt.read_checkpoint(tmp_path / "out/last.pt")[0]["step"] >= 10


def test_two_launchers_work_as_two_machines(folders):
    one, two = folders
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    nodes = ("--nnodes=2", "--rdzv_backend=c10d", f"--rdzv_endpoint=localhost:{port}", "--rdzv_id=test")
    flags = tiny(two, "--dropout", "0")
    launchers = [launch(two, *flags, nodes=nodes, count=1) for _ in range(2)]
    try:
        # each is read in turn; what the other says meanwhile fits into its pipe
        ends = [ended(launcher, 120) for launcher in launchers]
    finally:
        for launcher in launchers:
            launcher.kill()
    assert [done.code for done in ends] == [0, 0], ends
    lines = [line for done in ends for line in steps(done.out)]
    same(lines, steps(alone(one, *tiny(one, "--dropout", "0")).out))
