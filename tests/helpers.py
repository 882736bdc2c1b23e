"""What the tests of the running program share: a small text, a tiny model, and three ways to run gpt.py."""

import io
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch

import gpt

ROOT = Path(__file__).resolve().parent.parent
TINY = [
    "--n_layer",
    "2",
    "--n_head",
    "2",
    "--n_embd",
    "16",
    "--block_size",
    "8",
    "--batch_size",
    "4",
    "--max_iters",
    "20",
    "--eval_interval",
    "10",
    "--eval_iters",
    "2",
    "--max_new_tokens",
    "20",
    "--device",
    "cpu",
]
WORDS = "the cat sat on a mat and saw that dog run home, so it ate. Why not?\n"


def small_text(length=3000, seed=0):
    """Words in an order of their own for each seed, all of the characters of WORDS among them."""
    draw = random.Random(seed)
    words = WORDS.split(" ")
    text = WORDS
    while len(text) < length:
        text += draw.choice(words) + " "
    return text[:length]


def write_small_text(folder, length=3000, seed=0):
    path = Path(folder) / f"words-{seed}.txt"
    path.write_text(small_text(length, seed), encoding="utf-8", newline="\n")
    return path


def tiny(folder, *flags, data=None):
    """The flags of a tiny run on a small text in the folder; later flags win."""
    data = data or write_small_text(folder)
    return [*TINY, "--data", str(data), "--out", str(Path(folder) / "out"), *map(str, flags)]


def call(*args, stdin="", plot=False, encoding="utf-8"):
    """gpt.main in this process, as from a shell: exit status, standard output, standard error."""
    streams = sys.stdin, sys.stdout, sys.stderr
    handlers = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)]
    blocked = {name: sys.modules.get(name) for name in ("matplotlib", "matplotlib.figure")}
    sys.stdin = io.TextIOWrapper(io.BytesIO(stdin.encode()), encoding="utf-8")
    sys.stdout = out = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="\n")
    sys.stderr = err = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="\n")
    if not plot:  # drawing takes longer than such a run
        sys.modules.update(dict.fromkeys(blocked))
    code, threads = 0, torch.get_num_threads()
    torch.set_num_threads(1)  # two that wait for each other cost more here
    try:
        gpt.main([str(arg) for arg in args])
    except SystemExit as stop:
        code = stop.code or 0
    finally:
        torch.set_num_threads(threads)
        sys.stdin, sys.stdout, sys.stderr = streams
        for number, handler in handlers:
            signal.signal(number, handler)
        for name, module in blocked.items():
            if module is not None:
                sys.modules[name] = module
            elif not plot:
                del sys.modules[name]
    out.flush()
    err.flush()
    return SimpleNamespace(
        code=code, out=out.buffer.getvalue().decode(encoding), err=err.buffer.getvalue().decode(encoding)
    )


def environment(folder, plot=False, **more):
    """Without proxies, on one core, and without matplotlib, which would take longer than the run."""
    env = {
        name: value
        for name, value in os.environ.items()
        if name.lower() not in ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
    }
    env.update(OMP_NUM_THREADS="1", NO_PROXY="127.0.0.1")
    if not plot:
        fake = Path(folder) / "without-matplotlib"
        fake.mkdir(exist_ok=True)
        (fake / "matplotlib.py").write_text("raise ImportError('as if not installed')\n", encoding="utf-8")
        env["PYTHONPATH"] = str(fake)
    env.update(more)
    return {name: value for name, value in env.items() if value is not None}


def start(folder, *args, root=ROOT, plot=False, env=None, **popen):
    """gpt.py as a process of its own."""
    popen = {
        "bufsize": 0,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "stdin": subprocess.DEVNULL,
        **popen,
    }
    return subprocess.Popen(
        [sys.executable, "gpt.py", *map(str, args)],
        cwd=root,
        env=environment(folder, plot, **env or {}),
        **popen,
    )


def run(folder, *args, timeout=60, root=ROOT, env=None, input=None, **more):
    process = start(
        folder, *args, root=root, env=env, **more, **({} if input is None else {"stdin": subprocess.PIPE})
    )
    try:
        out, err = process.communicate(input, timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"still running after {timeout} s: {out[-500:]!r} {err[-500:]!r}") from None
    return SimpleNamespace(code=process.returncode, out=(out or b"").decode(), err=(err or b"").decode())


def ended(process, within=20):
    """Wait for a process that was told to end: exit status, standard output, standard error."""
    try:
        out, err = process.communicate(timeout=within)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise AssertionError(f"still running {within} s after it was told to end") from None
    return SimpleNamespace(code=process.returncode, out=(out or b"").decode(), err=(err or b"").decode())


def until(condition, within=30):
    """Wait for something to become true."""
    limit = time.monotonic() + within
    while not condition():
        assert time.monotonic() < limit, "it never came"
        time.sleep(0.01)


def steps(out):
    """The lines of losses, without what stands in parentheses."""
    return [line.split(" (")[0] for line in out.splitlines() if re.match(r"step \d+: ", line)]


def checkpoint(path):
    return torch.load(path, weights_only=True)


def losses(line):
    return [float(number) for number in re.findall(r"loss (\S+?)(?:,|$)", line)]


# weights large enough to tell
WIDE = gpt.Config(n_layer=2, n_head=4, n_embd=32, block_size=8, dropout=0.0, init_std=0.5)


def wide_model(config, vocab_size=10):
    torch.manual_seed(1337)
    return gpt.GPTLanguageModel(config, vocab_size)
