""" What the tests share: a small text, a tiny run, ways to start gpt.py, and how to read its output. """
import io
import itertools
import os
import random
import re
import struct
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

import gpt

if os.name != "nt":
    import fcntl
    import termios

ROOT = Path(__file__).resolve().parent.parent
TINY = ("--n_layer 2 --n_head 2 --n_embd 16 --block_size 8 --batch_size 4 --max_iters 20 --eval_interval 10 "
        "--eval_iters 2 --max_new_tokens 20 --device cpu --init_std 0.02 --dropout 0 --no-taste --no-decay "
        "--warmup_iters 0 --learning_rate 3e-4 --weight_decay 0.01 --beta2 0.999 --grad_clip 0").split()
LIVELY = "--dropout 0.3 --decay --warmup_iters 2".split()  # flags of a tiny run in which every step differs
WORDS = "the cat sat on a mat and saw that dog run home, so it ate. Why not?\n"
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": None}  # locale C
WIDE = gpt.Config(n_layer=2, n_head=4, n_embd=32, block_size=8, dropout=0.0, init_std=0.5)  # large weights


def small_text(length=3000, seed=0):
    """ words in an order of their own for each seed, all characters of WORDS among them """
    draw, words, text = random.Random(seed), WORDS.split(" "), WORDS
    while len(text) < length:
        text += draw.choice(words) + " "
    return text[:length]


def write_small_text(folder, length=3000, seed=0):
    path = Path(folder) / f"words-{seed}.txt"
    path.write_text(small_text(length, seed), encoding="utf-8", newline="\n")
    return path


def tiny(folder, *flags, data=None):
    """ the flags of a tiny run on a small text, its files in folder/out; later flags win """
    data = data or write_small_text(folder)
    return [*TINY, "--data", str(data), "--out", str(Path(folder) / "out"), *map(str, flags)]


def new_model(config, vocab_size=10, seed=1337):
    torch.manual_seed(seed)
    return gpt.GPTLanguageModel(config, vocab_size)


def call(*args, stdin="", encoding="utf-8", main=gpt.main, stdout=None):
    """ main in this process, as from a shell: exit status, standard output, standard error """
    streams = sys.stdin, sys.stdout, sys.stderr
    sys.stdin = io.TextIOWrapper(io.BytesIO(stdin if isinstance(stdin, bytes) else stdin.encode()), "utf-8")
    sys.stdout, sys.stderr = (io.TextIOWrapper(io.BytesIO(), encoding, errors, newline="\n")
                              for errors in ("strict", "backslashreplace"))
    code = 0
    written = sys.stdout, sys.stderr
    sys.stdout = stdout or sys.stdout
    try:
        main([str(arg) for arg in args])
    except SystemExit as stop:
        code = stop.code or 0
    finally:
        sys.stdin, sys.stdout, sys.stderr = streams
    for stream in written:
        stream.flush()
    out, err = (stream.buffer.getvalue().decode(encoding) for stream in written)
    return SimpleNamespace(code=code, out=out, err=err)


def good(*args, **more):
    """ a call that must succeed """
    done = call(*args, **more)
    assert done.code == 0, done.err
    return done


def refusal(*args, **more):
    """ the one sentence of a call that must be refused: status 2, no step taken, no traceback """
    done = call(*args, **more)
    assert done.code == 2 and steps(done.out) == [] and "Traceback" not in done.err, (done.code, done.err)
    usage, sentence = done.err.strip().split("\n")[-2:]
    assert usage.startswith("usage: python ")
    return sentence.split("error: ", 1)[1]


WRITING = "writing"


def at_pass(number, act):
    """
    with at_pass(...): act() in forward pass `number` of those with targets. In a tiny run 0-3 measure, 4-13
    train, 14-17 measure, 18-27 train, 28-31 measure, 32 scores the best model. WRITING: in any without them.
    """
    passes = itertools.count()

    def watch(module, args):
        if isinstance(module, gpt.GPTLanguageModel):
            found = next(passes) if len(args) == 2 else WRITING
            if found == number:
                act()

    return register_module_forward_pre_hook(watch)


def with_losses(change):
    """ with with_losses(...): the loss of each forward pass with targets is change(model, loss) """
    def replace(module, args, output):
        if isinstance(module, gpt.GPTLanguageModel) and len(args) == 2:
            logits, loss = output
            return logits, change(module, loss)

    return register_module_forward_hook(replace)


def measured(*vals, eval_iters=2):
    """ with measured(...): the reports find these validation losses in turn; the training losses fall """
    found = iter([loss for i, val in enumerate(vals) for loss in [3.0 - i] * eval_iters + [val] * eval_iters])
    return with_losses(lambda model, loss: loss if model.training else torch.as_tensor(next(found, loss)))


def after_update(act):
    """ with after_update(...): act(optimizer) after each update of the weights, before the step counts """
    return register_optimizer_step_post_hook(lambda optimizer, args, kwargs: act(optimizer))


def environment(**more):
    """ without proxies and on one core; None removes a variable """
    env = {name: os.environ[name] for name in os.environ if not name.lower().endswith("_proxy")}
    env.update({"OMP_NUM_THREADS": "1", "NO_PROXY": "127.0.0.1", **more})
    return {name: value for name, value in env.items() if value is not None}


def start(*args, root=ROOT, env=None, command=("gpt.py",), **popen):
    """ gpt.py, or another command for Python, as a process of its own """
    popen = dict(bufsize=0, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE) | popen
    command = [sys.executable, *command, *map(str, args)]
    return subprocess.Popen(command, cwd=root, env=environment(**env or {}), **popen)


def ended(process, within=60, input=None):
    """ wait for a process: exit status, standard output, standard error """
    try:
        out, err = process.communicate(input, within)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"still running after {within} s: {out[-500:]!r} {err[-500:]!r}") from None
    return SimpleNamespace(code=process.returncode, out=(out or b"").decode(), err=(err or b"").decode())


def run(*args, within=60, input=None, **more):
    """ start and ended in one """
    return ended(start(*args, **more, **({} if input is None else {"stdin": subprocess.PIPE})), within, input)


def until(condition, within=30):
    """ wait for something to become true """
    limit = time.monotonic() + within
    while not condition():
        assert time.monotonic() < limit, "it never came"
        time.sleep(0.01)


def first_lines(process, begin):
    """ what a process printed down to the line that begins so """
    lines = []
    while not (lines and lines[-1].startswith(begin)):
        lines.append(process.stdout.readline().decode())
        assert lines[-1], (lines, process.stderr.read())
    return "".join(lines)


def steps(out):
    """ the lines of losses, without what follows in parentheses """
    return [line.split(" (")[0] for line in out.splitlines() if re.match(r"step \d+: ", line)]


def losses(line):
    return [float(number) for number in re.findall(r"loss (\S+?)(?:,|$)", line)]


def checkpoint(path):
    return torch.load(path, weights_only=True)


def contents(folder):
    """ what the files of a run contain, by name """
    return {path.name: path.read_bytes() for path in Path(folder).glob("[!.]*.*")}


def on_a_terminal(*args, columns=80, out=None, gone_after=None, main=gpt.main):
    """
    main in this process, on a terminal of so many columns: exit status, what the screen got. Standard output
    may be another file, `out`. gone_after: the terminal is gone as soon as it got these bytes.
    """
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))
    screen = bytearray()

    def read():
        with suppress(OSError):  # so ends a terminal without a writer
            while gone_after is None or gone_after not in screen:
                piece = os.read(ours, 65536)
                if not piece:
                    break
                screen.extend(piece)
        os.close(ours)

    reader = threading.Thread(target=read)
    reader.start()
    streams = sys.stdout, sys.stderr
    sys.stderr = open(theirs, "w", encoding="utf-8", newline="\n")
    sys.stdout = out or sys.stderr
    code = 0
    try:
        main([str(arg) for arg in args])
    except SystemExit as stop:
        code = stop.code or 0
    finally:
        terminal = sys.stderr
        sys.stdout, sys.stderr = streams
        with suppress(OSError):
            terminal.close()
        reader.join()
    return SimpleNamespace(code=code, screen=screen.decode().replace("\r\n", "\n"))


def script(name, *changes):
    """ the source of gpt.py or bigram.py, with changes: pairs of a text that is there and another """
    source = (ROOT / f"{name}.py").read_text(encoding="utf-8")
    for old, new in changes:
        assert old in source, old
        source = source.replace(old, new, 1)
    return source
