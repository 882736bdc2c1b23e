"""
Speed, side by side in one quiet run: machines are noisy, so look at the ratios. No test: nothing can fail.

    python tests/benchmark.py                  all heads at once against the loop over heads
    python tests/benchmark.py laptop           the laptop size against a well-known recipe
    python tests/benchmark.py company          a run beside a busy program, by settings of its waiting threads
    python tests/benchmark.py bfloat16         the lecture and the laptop size in bfloat16 on this CPU
    python tests/benchmark.py texts            texts of 1, 10, 100 and 1000 MB
    python tests/benchmark.py gpu              on a GPU: the default run, compiled or not, the lecture's loop
"""
import io
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

import gpt  # noqa: E402
from data.text import find_text  # noqa: E402

RECIPE = ("--size notebook --n_embd 128 --block_size 64 --batch_size 12 --max_iters 2000 --warmup_iters 100 "
          "--decay --beta2 0.99 --eval_interval 250 --eval_iters 20").split()
SMALL = dict(n_layer=4, n_head=4, n_embd=128, block_size=64, batch_size=12, dropout=0.0)


def machine():
    cpu = f"CPU, {torch.get_num_threads()} threads"
    return f"torch {torch.__version__}, {torch.cuda.get_device_name() if torch.cuda.is_available() else cpu}"


def tokens_per_second(steps, device="cpu", dtype=None, compiled=False, size="laptop", **values):
    """ of the product's own loop, without the measuring; the first steps, which warm up, do not count """
    config = gpt.Flags(**{**gpt.SIZES[size], "eval_interval": 10**9, "eval_iters": 1, **values})
    model, splits = model_and_splits(config, device)
    for config.max_iters in (max(2, steps // 10), steps):
        state = gpt.State(config, model)
        run = gpt.Run(state)
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            gpt.train(gpt.Accelerated(state, dtype, compiled), splits, config, device, run)
    return run.progress.steps * run.progress.tokens_per_step / run.progress.seconds_training


def model_and_splits(config, device):
    _, text = find_text()
    tokenizer = gpt.Tokenizer(text)
    splits = {split: tokens.to(device) for split, tokens in gpt.split_data(text, tokenizer).items()}
    torch.manual_seed(config.seed)
    return gpt.GPTLanguageModel(config, len(tokenizer.chars)).to(device), splits


def compare(rounds, **variants):
    """ the median tokens/s of each variant, measured in turn, and the ratio of the first two """
    rates = {name: [] for name in variants}
    for _ in range(rounds):
        for name, measure in variants.items():
            rates[name].append(measure())
    for name, values in rates.items():
        print(f"  {name:12} {statistics.median(values):9,.0f} tokens/s")
    first, second = list(rates.values())[:2]
    print(f"  ratio {statistics.median(a / b for a, b in zip(first, second)):.2f}")


def steps():
    """ all heads at once against the lecture's loop over heads """
    compare(5, fused=partial(tokens_per_second, 60, **SMALL),
            loops=partial(tokens_per_second, 60, fused=False, **SMALL))


def bfloat16():
    """ bfloat16 against float32 on this CPU """
    for size, count in (("lecture", 3), ("laptop", 60)):
        print(f"  {size}:")
        compare(3, bfloat16=partial(tokens_per_second, count, dtype=torch.bfloat16, size=size),
                float32=partial(tokens_per_second, count, size=size))


def whole_run(*flags):
    """ seconds of one `python gpt.py ...` from an empty cache of the compiler, and what it printed """
    with tempfile.TemporaryDirectory() as out, tempfile.TemporaryDirectory() as cache:
        begin = time.monotonic()
        command = [sys.executable, str(ROOT / "gpt.py"), "--out", out, *flags]
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": cache}
        done = subprocess.run(command, text=True, check=True, capture_output=True, env=env)
    return time.monotonic() - begin, done.stdout


def laptop():
    """ as programs, from the command to the end of the sample; the losses are over the validation text """
    seconds = {}
    for name, flags in (("recipe", RECIPE), ("laptop", ["--size", "laptop", "--device", "cpu"])):
        seconds[name], screen = whole_run(*flags)
        print(f"  {name}: {seconds[name]:.0f} s; " + re.search(r"best: .*", screen)[0])
    print(f"  ratio of the times {seconds['laptop'] / seconds['recipe']:.2f}\n{screen}")


def company():
    """ the laptop size alone and beside one busy loop, with settings of GNU's OpenMP in the environment """
    code = "import sys; sys.path[:0] = ['tests']; import benchmark as b; print(b.tokens_per_second(150))"
    for more in ({"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "3000"}, {"GOMP_SPINCOUNT": "1000"},
                 {"OMP_WAIT_POLICY": "passive"}, {"OMP_NUM_THREADS": "1"}):
        rates = []
        for busy in (False, True):
            loop = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if busy else None
            done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env={**os.environ, **more},
                                  text=True, capture_output=True, check=True)
            rates.append(float(done.stdout))
            if loop:
                loop.kill()
                loop.wait()
        setting = "=".join(*more.items())
        print(f"  {setting:24} alone {rates[0]:7,.0f} tokens/s, beside a busy loop {rates[1]:7,.0f}")


TEXTS = """
import resource, sys, time
import torch
sys.path.insert(0, {root!r})
import gpt
from data.text import read_text
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
begin = time.monotonic()
text = read_text({path!r})
tokenizer = gpt.Tokenizer(text)
data = gpt.split_data(text, tokenizer)
seconds = time.monotonic() - begin
peak = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / len(text)
config = gpt.Config(n_layer=4, n_head=4, n_embd=96, block_size=64, batch_size=16, dropout=0.0)
model = gpt.GPTLanguageModel(config, len(tokenizer.chars))
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
times = []
for _ in range(100):
    begin = time.monotonic()
    logits, loss = model(*gpt.get_batch(data["train"], config, "cpu"))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    times.append(time.monotonic() - begin)
step = 1000 * sorted(times)[50]
print(f"{{len(text) / 1e6:8,.0f}} MB {{seconds:7.2f}} s {{peak:6.1f}} bytes a character {{step:6.1f}} ms")
"""


def texts():
    """ reading, the vocabulary and encoding; the peak of memory above the bare program; one training step """
    source = find_text()[1]
    with tempfile.TemporaryDirectory() as folder:
        for size in (1, 10, 100, 1000):
            path = Path(folder) / "text.txt"
            with open(path, "w", encoding="utf-8", newline="\n") as file:
                for _ in range(size):
                    file.write(source[:1_000_000])
            subprocess.run([sys.executable, "-c", TEXTS.format(root=str(ROOT), path=str(path))], check=True)


def gpu(lecture_steps=100, **values):
    """ the default run, compiled and not, from the command to its end; then the lecture's loop """
    config, flags = gpt.Config(**values), [f"--{name}={value}" for name, value in values.items()]
    for way in ("--compile", "--no-compile"):
        seconds, screen = whole_run(way, *flags)
        rate = int(re.findall(r"([\d,]+) tokens/s", screen)[-1].replace(",", ""))
        milliseconds = 1000 * config.batch_size * config.block_size / rate
        print(f"{screen}  {way}: {milliseconds:.1f} ms a step, {seconds:.0f} s for all of it\n")
    device = gpt.pick_device("auto")
    seconds = seconds_of_a_lecture_step(config, device, lecture_steps)
    print(f"  the lecture's loop: {1000 * seconds:.1f} ms a step, so {seconds * config.max_iters:.0f} s for "
          f"{config.max_iters} steps without the measuring")


def seconds_of_a_lecture_step(config, device, steps):
    """ head by head, float32, AdamW as it is by default, batches that are cut out of a text in memory """
    config.fused = False
    model, splits = model_and_splits(config, "cpu")
    model, tokens = model.to(device), splits["train"].long()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate)
    for step in range(steps + 5):  # the first ones warm up
        if step == 5:
            begin = time.monotonic()
        ix = torch.randint(len(tokens) - config.block_size, (config.batch_size,))
        x = torch.stack([tokens[i:i + config.block_size] for i in ix]).to(device)
        y = torch.stack([tokens[i + 1:i + config.block_size + 1] for i in ix]).to(device)
        logits, loss = model(x, y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    loss.item()  # waits until all is done
    return (time.monotonic() - begin) / steps


def main():
    print(machine())
    for part in [globals()[name] for name in sys.argv[1:]] or [steps]:
        print(f"{part.__name__}: {part.__doc__}")
        part()


if __name__ == "__main__":
    main()
