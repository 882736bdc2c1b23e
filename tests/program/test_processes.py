"""
Several processes under torchrun, on the CPUs of this machine: they compute the run of one, speak with one
voice, and end together.
"""
import os
import re
import signal
import socket

import pytest
import torch
from helpers import checkpoint, ended, first_lines, good, start, steps, tiny, until

import gpt

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.name == "nt", reason="as on Unix")]


def launch(*args, nodes=("--standalone",), count=2, script=("gpt.py",), **popen):
    command = "-m", "torch.distributed.run", *nodes, f"--nproc_per_node={count}", *script
    return start(*args, command=command, **popen)


def together(*args, **more):
    return ended(launch(*args, **more), 120)


def numbers(lines):
    return [[float(number) for number in re.findall(r"\d+(?:\.\d+)?", line)] for line in lines]


def same(one, two):
    """ the printed losses are equal up to the order of summation """
    assert len(one) == len(two) > 0
    assert numbers(one) == [pytest.approx(row, abs=1.01e-4) for row in numbers(two)]


@pytest.fixture
def folders(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    return tmp_path / "one", tmp_path / "two"


def script(folder, *lines):
    """ gpt.py after some lines more, and each process notes its number """
    note = f"open(f'{folder}/rank-' + os.environ['RANK'], 'w').write(str(os.getpid()))"
    text = "import os, sys", "sys.path.insert(0, '.')", "import gpt", note, *lines, "gpt.main()"
    (folder / "script.py").write_text("\n".join(text), encoding="utf-8")
    return [folder / "script.py"]


def pids(folder):
    return [int((folder / f"rank-{rank}").read_text()) for rank in range(2)]


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True


def test_two_processes_compute_the_run_of_one_and_speak_with_one_voice(folders):
    one, two = folders
    flags = "--max_iters 40 --grad_clip 1 --taste".split()
    both = together(*tiny(two, *flags))
    assert both.code == 0, both.err
    same(steps(both.out), steps(good(*tiny(one, *flags)).out))
    assert len(steps(both.out)) == both.out.count("    | ") == 5 and "2 processes, float32" in both.out
    assert both.out.count("device: ") == both.out.count("best:  ") == both.out.count("model writes:") == 1
    weights = [checkpoint(folder / "out/last.pt")["model"] for folder in folders]
    assert list(weights[0]) == list(weights[1])
    for name in weights[0]:
        torch.testing.assert_close(weights[0][name], weights[1][name], rtol=1e-3, atol=1e-4)
    gpt.load(two / "out/best.pt", "cpu")


@pytest.mark.parametrize("mistake, sentence", [
    ("--batch_size 5",               "error: 2 processes cannot share --batch_size 5; use a multiple"),
    ("--data /nonexistent/text.txt", "cannot read /nonexistent/text.txt"),
    ("--n_embd 65 --n_head 4",       "n_embd 65 is not a multiple of n_head 4"),
    ("--frobnicate",                 "unrecognized arguments: --frobnicate"),
    ("--resume --out /nonexistent",  "there is no /nonexistent/last.pt")])
def test_a_mistake_ends_all_of_them_with_one_sentence(tmp_path, mistake, sentence):
    done = together(*tiny(tmp_path, *mistake.split()))
    assert done.code != 0 and done.err.count(sentence) == 1 and steps(done.out) == []
    assert 'gpt.py", line' not in done.err


def test_a_bug_keeps_its_traceback(tmp_path):
    done = together(*tiny(tmp_path), script=script(tmp_path, "gpt.estimate_loss = lambda *args: 1 / 0"))
    assert done.code != 0 and 'gpt.py", line' in done.err
    assert re.search(r"^(\[rank\d\]: )?ZeroDivisionError: division by zero$", done.err, re.MULTILINE)


def test_using_a_model_writes_one_text(trained):
    flags = "--out", trained / "out", "--prompt", "the", "--sample_seed", 3, "--max_new_tokens", 20
    done = together(*flags)
    assert done.code == 0 and done.out == good(*flags).out
    done = together("--help")
    assert done.code == 0 and done.out.count("usage: ") == 1


def test_the_bigram_runs_once(tmp_path):
    done = together("--data", __file__, "--max_iters", 2, "--eval_iters", 1, script=("bigram.py",))
    assert done.code == 0 and [line[:7] for line in steps(done.out)] == ["step 0:", "step 2:"]


@pytest.mark.parametrize("first, then", [(1, 2), (2, 1)])
def test_a_run_continues_with_another_number_of_processes(folders, first, then):
    one, two = folders
    runs = {1: good, 2: together}
    done = runs[first](*tiny(two, "--max_iters", 10))
    assert done.code == 0, done.err
    done = runs[then](*tiny(two, "--resume"))
    assert done.code == 0, done.err
    same(steps(done.out), steps(good(*tiny(one)).out)[1:])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_launcher_ends_all_with_a_checkpoint_to_continue_from(folders, number):
    one, two = folders
    flags = "--max_iters 1000 --eval_interval 500".split()
    launcher = launch(*tiny(two, *flags), script=script(two))
    before = first_lines(launcher, "step 0:")
    until(lambda: (two / "out/loss.csv").exists())
    launcher.send_signal(number)
    done = ended(launcher)
    until(lambda: all(map(gone, pids(two))))
    step = gpt.read_checkpoint(two / "out/last.pt")["step"]
    assert done.code != 0 and 0 <= step < 1000 and done.err.count(f"stopped at step {step} and saved") == 1
    rest = good(*tiny(two, *flags), "--resume")
    printed, once = dict.fromkeys(steps(before + rest.out)), steps(good(*tiny(one, *flags)).out)
    # in a thousand steps the order of summation grows to a hundredth; the losses began at 3
    assert numbers(printed) == [pytest.approx(row, abs=0.05) for row in numbers(once)]
    assert len(once) == 3 and numbers(once)[-1][1] < 2.8


@pytest.mark.parametrize("rank", [0, 1])
def test_when_one_is_killed_all_end_and_the_checkpoint_is_no_older_than_the_last_report(tmp_path, rank):
    launcher = launch(*tiny(tmp_path, "--max_iters", 1000000), script=script(tmp_path))
    out = first_lines(launcher, "step 50:")
    os.kill(pids(tmp_path)[rank], signal.SIGKILL)
    done = ended(launcher, 60)
    until(lambda: all(map(gone, pids(tmp_path))))
    reported = numbers(steps(out + done.out))[-1][0] if rank else 10  # 0 itself saves with the reports alone
    assert done.code != 0 and gpt.read_checkpoint(tmp_path / "out/last.pt")["step"] >= reported


def test_two_launchers_work_as_two_machines(folders):
    one, two = folders
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    nodes = f"--nnodes=2 --rdzv_backend=c10d --rdzv_endpoint=localhost:{port} --rdzv_id=test".split()
    launchers = [launch(*tiny(two), nodes=nodes, count=1) for _ in range(2)]
    try:
        ends = [ended(launcher, 120) for launcher in launchers]  # what the other says fits in its pipe
    finally:
        for launcher in launchers:
            launcher.kill()
    assert [done.code for done in ends] == [0, 0], ends
    same([line for done in ends for line in steps(done.out)], steps(good(*tiny(one)).out))
