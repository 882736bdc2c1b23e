"""
Several processes, on the CPUs of this machine: they compute the run of one, speak with one voice, and end
together. The first tests are this process alone, as it would be one of two.
"""
import os
import re
import signal
import socket
from contextlib import contextmanager

import pytest
import torch
from helpers import call, checkpoint, ended, first_lines, good, new_model, refusal, start, steps, tiny, until

import gpt
from data.flags import make_parser, parse
from data.machine import pick_device
from data.processes import local_rank, mean_over_processes, on_rank_0
from data.signals import Interrupted, Interrupts

VARIABLES = "RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT TORCHELASTIC_RESTART_COUNT".split()


@contextmanager
def as_process(rank, processes=2):
    """ this process is one of several, whose answers to it are its own words """
    pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    torch.distributed.init_process_group("fake", store=torch.distributed.HashStore(), rank=rank,
                                         world_size=processes)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@pytest.fixture
def variables(monkeypatch):
    """ a function that sets the variables of a launcher, after all were unset """
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return lambda **values: [monkeypatch.setenv(name, value) for name, value in values.items()]


# ---- one of two


def losses_of(rank, step, mode="train"):
    """ the loss of a process whose rows are the same as those of any other """
    config = gpt.Config(n_layer=1, n_head=2, n_embd=16, block_size=8, batch_size=2, dropout=0.5)
    with as_process(rank):
        accelerated = gpt.Accelerated(gpt.State(config, new_model(config), step=step))
        accelerated.train(mode == "train")
        idx = torch.arange(8).expand(2, 8)
        return accelerated(idx, idx)[1].item()


def test_each_process_drops_its_own_units_and_after_a_resume_the_same_ones_again():
    assert losses_of(0, step=7) == losses_of(0, step=7) and losses_of(1, step=7) == losses_of(1, step=7)
    assert len({losses_of(rank, step) for rank in (0, 1) for step in (7, 8)}) == 4
    assert losses_of(0, step=7, mode="eval") == losses_of(1, step=8, mode="eval")


def test_the_random_numbers_of_the_batches_are_the_same_in_all_processes():
    config = gpt.Config(n_layer=1, n_head=2, n_embd=16, block_size=8, batch_size=2, dropout=0.5)
    following = []
    for rank in (0, 1):
        with as_process(rank):
            accelerated = gpt.Accelerated(gpt.State(config, new_model(config)))
            idx = torch.zeros((2, 8), dtype=torch.long)
            accelerated(idx, idx)
            following.append(torch.randint(1000, (8,)).tolist())
    assert following[0] == following[1]


def test_each_process_takes_its_rows():
    config = gpt.Config(n_layer=1, n_head=2, n_embd=16, block_size=8, batch_size=4, dropout=0.0)
    model = new_model(config)
    idx = torch.randint(10, (4, 8))
    for rank in (0, 1):
        with as_process(rank):
            logits, loss = gpt.Accelerated(gpt.State(config, model)).eval()(idx, idx)
        assert loss == model(idx[2 * rank:2 * rank + 2], idx[2 * rank:2 * rank + 2])[1]


def test_a_batch_that_the_processes_cannot_share_is_refused(tmp_path):
    flags = gpt.Flags(batch_size=4)
    with as_process(0, processes=3):
        with pytest.raises(ValueError, match="3 processes cannot share --batch_size 4; use a multiple"):
            gpt.check_run(flags, gpt.Start({}))
    with as_process(0, processes=2):
        gpt.check_run(flags, gpt.Start({}))


def test_each_process_has_a_gpu_of_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device("cuda") == pick_device("auto") == "cuda:0" and pick_device("cuda:1") == "cuda:1"
    with as_process(1):
        assert pick_device("cuda") == pick_device("auto") == "cuda:1" and pick_device("cpu") == "cpu"
        with pytest.raises(ValueError, match="cuda:0 puts all 2 processes on one GPU; use --device cuda"):
            pick_device("cuda:0")
        monkeypatch.setenv("LOCAL_RANK", "0")  # the first one on another machine
        assert local_rank() == 0 and pick_device("cuda") == "cuda:0"


def test_process_0_alone_speaks(capsys):
    parser = make_parser(gpt.Flags, "gpt.py", "", gpt.SIZES)
    for rank, lines in ((0, 1), (1, 0)):
        with as_process(rank):
            gpt.say("said aloud")
            gpt.note("a notice")
            with pytest.raises(SystemExit):
                parse(parser, ["--help"])
        out, err = capsys.readouterr()
        assert (out.count("said aloud"), out.count("usage: "), err.count("a notice")) == (lines, lines, lines)


def test_the_processes_ask_one_another_far_less_than_once_a_batch():
    asked = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if "allreduce" in str(function):
                asked.append(function)
            return function(*args, **(kwargs or {}))

    with as_process(0), Watch():
        interrupts = Interrupts()
        for _ in range(160):
            interrupts.check()
        assert 5 <= len(asked) <= 20
        interrupts.asked = signal.SIGTERM
        with pytest.raises(Interrupted, match=str(int(signal.SIGTERM))):
            for _ in range(16):
                interrupts.check()


def test_alone_nobody_is_asked():
    def fail():
        raise ValueError("of the first process")

    assert mean_over_processes([1.0, 2.0]) == [1.0, 2.0] and on_rank_0(max, 1, 2) == 2
    with pytest.raises(ValueError, match="of the first process"):
        on_rank_0(fail)


# ---- what a launcher says


@pytest.mark.parametrize("values", [dict(RANK="0"), dict(RANK="0", LOCAL_RANK="0", MASTER_ADDR="localhost")])
def test_one_process_of_one_is_no_launch(tmp_path, variables, values):
    variables(WORLD_SIZE="1", **values)
    done = good(*tiny(tmp_path, "--max_iters", 2))
    assert len(steps(done.out)) == 2 and "processes" not in done.out


@pytest.mark.parametrize("values, sentence", [
    ("RANK=0",                                       "the environment has RANK=0, but not all"),
    ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=localhost",    "the environment has RANK=0, but not all"),
    ("LOCAL_RANK=1",                                 "unset LOCAL_RANK, or start with torchrun"),
    ("RANK=2 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=1", "unset RANK and WORLD_SIZE and MASTER_ADDR and"),
    ("RANK=a WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=1", "the environment has RANK=a")])
def test_leftovers_of_a_launcher_are_one_sentence(tmp_path, variables, values, sentence):
    variables(**dict(word.split("=") for word in values.split()))
    assert sentence in refusal(*tiny(tmp_path)) and not (tmp_path / "out").exists()


def test_an_address_that_is_left_over_alone_disturbs_nobody(tmp_path, variables):
    variables(MASTER_ADDR="nowhere", MASTER_PORT="1")
    good(*tiny(tmp_path, "--max_iters", 0))


def test_a_run_that_is_started_again_continues_from_its_own_last_checkpoint(tmp_path, variables):
    good(*tiny(tmp_path, "--max_iters", 10))
    variables(TORCHELASTIC_RESTART_COUNT="1")
    again = good(*tiny(tmp_path, "--max_iters", 10))
    assert f"the launcher started this run again, so it continues from {tmp_path}/out/last.pt" in again.err
    assert [line[:8] for line in steps(again.out)] == ["step 10:"] and not list(tmp_path.glob("out/old-*"))
    other = good(*tiny(tmp_path, "--max_iters", 10, "--seed", 5))
    assert "the launcher" not in other.err and len(steps(other.out)) == 2
    assert checkpoint(tmp_path / "out/old-1/last.pt")["config"]["seed"] == 1337


def test_a_run_that_is_started_again_without_a_checkpoint_begins(tmp_path, variables):
    variables(TORCHELASTIC_RESTART_COUNT="1")
    assert len(steps(good(*tiny(tmp_path)).out)) == 3
    done = call("--sample", "--out", tmp_path / "out", "--max_new_tokens", 3)
    assert done.code == 0 and "the launcher" not in done.err


# ---- two processes

slow = pytest.mark.slow
on_unix = pytest.mark.skipif(os.name == "nt", reason="as on Unix")


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


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """ the folder and the printed losses of a tiny run of one process """
    folder = tmp_path_factory.mktemp("alone")
    return folder, steps(good(*tiny(folder, "--grad_clip", 1)).out)


@pytest.fixture(scope="module")
def with_dropout(tmp_path_factory):
    """ last.pt of a tiny run of two processes with dropout """
    folder = tmp_path_factory.mktemp("dropout")
    done = together(*tiny(folder, "--dropout", 0.3))
    assert done.code == 0, done.err
    return checkpoint(folder / "out/last.pt")


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


@slow
@on_unix
def test_two_processes_compute_the_run_of_one_and_speak_with_one_voice(tmp_path, alone):
    folder, printed = alone
    both = together(*tiny(tmp_path, "--grad_clip", 1, "--taste"))
    assert both.code == 0, both.err
    same(steps(both.out), printed)
    assert len(steps(both.out)) == both.out.count("    | ") == 3 and "2 processes, float32" in both.out
    assert both.out.count("device: ") == both.out.count("best:  ") == both.out.count("model writes:") == 1
    weights = [checkpoint(path / "out/last.pt")["model"] for path in (folder, tmp_path)]
    assert list(weights[0]) == list(weights[1])
    for name in weights[0]:
        torch.testing.assert_close(weights[0][name], weights[1][name], rtol=1e-3, atol=1e-4)
    gpt.load(tmp_path / "out/best.pt", "cpu")


@slow
@on_unix
@pytest.mark.parametrize("mistake, sentence", [
    ("--data /nonexistent/text.txt",   "cannot read /nonexistent/text.txt"),
    ("--frobnicate",                   "unrecognized arguments: --frobnicate"),
    ("--learning_rate 1e30",           "gpt.py: the loss is nan at step"),
    ("--batch_size 1000000000000000",  "gpt.py: out of memory; lower --batch_size first")])
def test_a_mistake_ends_all_of_them_with_one_sentence(tmp_path, mistake, sentence):
    done = together(*tiny(tmp_path, *mistake.split()))
    assert done.code != 0 and done.err.count(sentence) == done.err.count("gpt.py: ") == 1, done.err
    assert 'gpt.py", line' not in done.err and "is at step 20" not in done.out


@slow
@on_unix
def test_where_the_processes_cannot_meet_one_sentence_says_so(tmp_path):
    done = together(*tiny(tmp_path), env={"GLOO_SOCKET_IFNAME": "nope"})
    assert done.code != 0 and done.err.count("gpt.py: error: the processes cannot meet: ") == 1
    assert 'gpt.py", line' not in done.err and done.out == "" and not (tmp_path / "out").exists()


@slow
@on_unix
def test_a_bug_keeps_its_traceback_and_is_printed_once(tmp_path):
    done = together(*tiny(tmp_path), script=script(tmp_path, "gpt.estimate_loss = lambda *args: 1 / 0"))
    assert done.code != 0 and 'gpt.py", line' in done.err
    bug = re.findall(r"^(?:\[rank\d\]: )?ZeroDivisionError: division by zero$", done.err, re.MULTILINE)
    assert len(bug) == 1


@slow
@on_unix
def test_using_a_model_writes_one_text(trained):
    flags = "--out", trained / "out", "--prompt", "the", "--sample_seed", 3, "--max_new_tokens", 20
    done = together(*flags)
    assert done.code == 0 and done.out == good(*flags).out


@slow
@on_unix
def test_the_bigram_runs_once(tmp_path):
    done = together("--data", __file__, "--max_iters", 2, "--eval_iters", 1, script=("bigram.py",))
    assert done.code == 0 and [line[:7] for line in steps(done.out)] == ["step 0:", "step 2:"]


@slow
@on_unix
@pytest.mark.parametrize("first, then", [(1, 2), (2, 1)])
def test_a_run_continues_with_another_number_of_processes(tmp_path, alone, first, then):
    runs = {1: good, 2: together}
    done = runs[first](*tiny(tmp_path, "--grad_clip", 1, "--max_iters", 10))
    assert done.code == 0, done.err
    done = runs[then](*tiny(tmp_path, "--grad_clip", 1, "--resume"))
    assert done.code == 0, done.err
    same(steps(done.out), alone[1][1:])


@slow
@on_unix
def test_two_processes_that_are_started_by_hand_compute_one_run(tmp_path, alone):
    env = dict(WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=str(free_port()))
    pair = [start(*tiny(tmp_path, "--grad_clip", 1), env={**env, "RANK": rank}) for rank in "10"]
    try:
        second, first = [ended(process) for process in pair]
    finally:
        for process in pair:
            process.kill()
    assert first.code == second.code == 0 and second.out == "", (first, second)
    same(steps(first.out), alone[1])


@slow
@on_unix
def test_two_launchers_work_as_two_machines(tmp_path, alone):
    port = free_port()
    nodes = f"--nnodes=2 --rdzv_backend=c10d --rdzv_endpoint=localhost:{port} --rdzv_id=test".split()
    launchers = [launch(*tiny(tmp_path, "--grad_clip", 1), nodes=nodes, count=1) for _ in range(2)]
    try:
        ends = [ended(launcher, 120) for launcher in launchers]  # what the other says fits in its pipe
    finally:
        for launcher in launchers:
            launcher.kill()
    assert [done.code for done in ends] == [0, 0], ends
    same([line for done in ends for line in steps(done.out)], alone[1])


# ---- signals, and processes that are gone


@slow
@on_unix
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_launcher_ends_all_with_a_checkpoint_to_continue_from(tmp_path, number):
    flags = "--max_iters 100000 --eval_interval 50000".split()
    launcher = launch(*tiny(tmp_path, *flags), script=script(tmp_path))
    first_lines(launcher, "step 0:")
    until(lambda: (tmp_path / "out/loss.csv").exists())
    launcher.send_signal(number)
    done = ended(launcher)
    until(lambda: all(map(gone, pids(tmp_path))))
    state = checkpoint(tmp_path / "out/last.pt")
    assert done.code != 0 and done.err.count(f"stopped at step {state['step']} and saved") == 1, done.err
    assert len(state["losses"]) == state["step"] > 0 and "Traceback" not in done.err.split("stopped at")[0]


FAILS = """
def stepped(run, step, loss, stepped=gpt.Run.stepped):
    stepped(run, step, loss)
    if step == 14 and os.environ["RANK"] == "{rank}" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        {failure}
gpt.Run.stepped = stepped
"""


@slow
@on_unix
@pytest.mark.parametrize("rank, failure", [(1, "os.kill(os.getpid(), 9)"), (0, "1 / 0")])
def test_what_a_launcher_starts_again_continues_to_the_digit(tmp_path, with_dropout, rank, failure):
    again = ["--standalone", "--max_restarts=1"]
    lines = FAILS.format(rank=rank, failure=failure)
    done = together(*tiny(tmp_path, "--dropout", 0.3), nodes=again, script=script(tmp_path, lines))
    assert done.code == 0, done.err
    assert done.err.count(f"started this run again, so it continues from {tmp_path}/out/last.pt") == 1
    assert done.err.count("stopped at step 15 and saved") == 1  # by process 0, whichever failed
    assert done.err.count("ZeroDivisionError") == (1 if rank == 0 else 0)
    assert done.err.count("another process of this run is gone") == (0 if rank == 0 else 1)
    assert len(steps(done.out)) == 3 and not list(tmp_path.glob("out/old-*"))
    state = checkpoint(tmp_path / "out/last.pt")
    # of steps 10 to 14 the losses are those of process 0 alone: the other one was gone
    assert state["losses"][15:].tolist() == with_dropout["losses"][15:].tolist() and state["step"] == 20
    for name, weight in with_dropout["model"].items():
        assert torch.equal(weight, state["model"][name]), name


@slow
@on_unix
def test_with_dropout_several_processes_learn_as_one_does(tmp_path, with_dropout):
    good(*tiny(tmp_path, "--dropout", 0.3))  # from other places in the text, too
    losses = checkpoint(tmp_path / "out/last.pt")["losses"]
    assert 0 < (losses.mean() - with_dropout["losses"].mean()).abs() < 0.1


@slow
@on_unix
def test_when_process_0_is_killed_all_end_and_the_checkpoint_is_of_a_report(tmp_path):
    launcher = launch(*tiny(tmp_path, "--max_iters", 1000000), script=script(tmp_path))
    first_lines(launcher, "step 50:")
    os.kill(pids(tmp_path)[0], signal.SIGKILL)
    done = ended(launcher, 60)
    until(lambda: all(map(gone, pids(tmp_path))))
    step = checkpoint(tmp_path / "out/last.pt")["step"]
    assert done.code != 0 and step >= 10 and step % 10 == 0
