"""
Speed, side by side in one run: machines are noisy, so look at the ratios. No test: nothing passes or fails.

    python tests/benchmark.py                  steps, their profile, the start, generation
    python tests/benchmark.py laptop           the laptop size against a well-known recipe of the same cost
    python tests/benchmark.py texts            texts of 1, 10, 100 and 1000 MB
    python tests/benchmark.py gpu              on a GPU: the default run, and the lecture's loop against it
"""
import io
import re
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

import gpt  # noqa: E402
from data.text import find_text  # noqa: E402

RECIPE = ("--n_layer 4 --n_head 4 --n_embd 128 --block_size 64 --batch_size 12 --max_iters 2000 --dropout 0 "
          "--learning_rate 1e-3 --warmup_iters 100 --lr_decay_iters 2000 --min_lr 1e-4 --beta2 0.99 "
          "--eval_interval 250 --eval_iters 20").split()
SMALL = dict(n_layer=4, n_head=4, n_embd=128, block_size=64, batch_size=12, dropout=0.0)


def machine():
    return f"torch {torch.__version__}, " + (torch.cuda.get_device_name() if torch.cuda.is_available()
                                             else f"CPU, {torch.get_num_threads()} threads")


def shakespeare(block_size):
    name, text = find_text()
    return gpt.load_data(text, name, block_size)


def tokens_per_second(steps, device="cpu", dtype=None, compile=False, **values):
    """Of the product's own loop, without the measuring; the first steps, which warm up, do not count."""
    config = gpt.Flags(max_iters=steps, eval_interval=10**9, eval_iters=1, compile=compile, **values)
    tokenizer, data = shakespeare(config.block_size)
    data = {split: tokens.to(device) for split, tokens in data.items()}
    torch.manual_seed(config.seed)
    model = gpt.GPTLanguageModel(config, len(tokenizer.chars)).to(device)
    stepper = gpt.make_stepper(model, config, device, dtype) if compile else model
    for number in (max(2, steps // 10), steps):
        config.max_iters = number
        run = gpt.Run(model, data, config, stepper=stepper, dtype=dtype)
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            gpt.train(model, data, config, run)
    return run.tokens / run.step_seconds


def steps():
    """The heads in one go against the lecture's loop over heads, in turn, five times."""
    rates = {True: [], False: []}
    for _ in range(5):
        for fused in rates:
            rates[fused].append(tokens_per_second(60, fused=fused, **SMALL))
    for fused, name in ((True, "default"), (False, "--no-fused")):
        print(f"  {name:12} {statistics.median(rates[fused]):9,.0f} tokens/s")
    print(f"  ratio {statistics.median(a / b for a, b in zip(rates[True], rates[False])):.2f}")


def profile():
    """Where the time of a training step goes."""
    for fused in (True, False):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            tokens_per_second(20, fused=fused, **SMALL)
        times = {event.key: event.self_cpu_time_total for event in profiler.key_averages()}
        total = sum(times.values())
        products = [t for key, t in times.items() if re.search(r"::(addmm|mm|bmm)$|scaled_dot_product", key)]
        share = sum(products) / total
        print(f"  {'default' if fused else '--no-fused':12} {share:4.0%} in matrix products and attention")


def start():
    """From the command to the first line on the screen."""
    times = []
    for _ in range(3):
        begin = time.monotonic()
        with tempfile.TemporaryDirectory() as out:
            process = subprocess.Popen([sys.executable, "-u", str(ROOT / "gpt.py"), "--out", out], text=True,
                                       stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            process.stdout.readline()
            times.append(time.monotonic() - begin)
            process.kill()
            process.wait()
    begin = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    alone = time.monotonic() - begin
    print(f"  first line after {statistics.median(times):.1f} s; `import torch` alone takes {alone:.1f} s")


@torch.no_grad()
def naive(model, idx, count):
    """The lecture's own loop: the scores of all positions of the window at every step."""
    for _ in range(count):
        logits, _ = model(idx[:, -model.block_size:])
        probs = torch.softmax(logits[:, -1, :], dim=-1)
        idx = torch.cat((idx, torch.multinomial(probs, num_samples=1)), dim=1)
    return idx


def generation(device="cpu", count=30):
    """generate against the naive loop, at the lecture's size, with a full window."""
    model = gpt.GPTLanguageModel(gpt.Config(), 65).to(device).eval()
    idx = torch.randint(65, (1, 256), device=device)
    ratios, rates = [], []
    for _ in range(5):
        seconds, texts = [], []
        for write in (naive, gpt.GPTLanguageModel.generate):
            torch.manual_seed(1)
            begin = time.monotonic()
            texts.append(write(model, idx, count).tolist())
            seconds.append(time.monotonic() - begin)
        assert texts[0] == texts[1]
        ratios.append(seconds[0] / seconds[1])
        rates.append(1000 * seconds[1] / count)
    print(f"  {statistics.median(rates):.1f} ms a character; naive / ours {statistics.median(ratios):.2f}")


def whole_run(*flags):
    """Seconds and validation loss, over the whole validation text, of one `python gpt.py ...`."""
    with tempfile.TemporaryDirectory() as out:
        begin = time.monotonic()
        command = [sys.executable, str(ROOT / "gpt.py"), "--out", out, *flags]
        done = subprocess.run(command, text=True, check=True, capture_output=True)
        seconds = time.monotonic() - begin
        model, tokenizer = gpt.load(Path(out) / "best.pt")
    return seconds, validation_loss(model), done.stdout


@torch.no_grad()
def validation_loss(model):
    """Over the whole validation text, in windows of block_size side by side."""
    T = model.block_size
    device = next(model.parameters()).device
    val = shakespeare(T)[1]["val"].long().to(device)
    n = (len(val) - 1) // T
    x, y = val[:n * T].view(n, T), val[1:n * T + 1].view(n, T)
    losses = [model(x[i:i + 32], y[i:i + 32])[1].item() * len(x[i:i + 32]) for i in range(0, n, 32)]
    return sum(losses) / n


def laptop():
    results = {name: whole_run(*flags) for name, flags in
               (("recipe", RECIPE), ("laptop", ["--size", "laptop", "--device", "cpu"]))}
    for name, (seconds, loss, _) in results.items():
        print(f"  {name}: {seconds:.0f} s, val loss {loss:.4f}")
    print(f"  ratio of the times {results['laptop'][0] / results['recipe'][0]:.2f}")
    print(results["laptop"][2])


TEXTS = """
import resource, sys, time
import torch
sys.path.insert(0, {root!r})
import gpt
from data.text import TextFile
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
begin = time.monotonic()
tokenizer, data = gpt.load_data(TextFile({path!r}), "text", 64)
seconds = time.monotonic() - begin
count = len(data["train"]) + len(data["val"])
peak = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / count
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
print(f"{{count / 1e6:8,.0f}} MB {{seconds:7.2f}} s {{peak:6.1f}} bytes a character {{step:6.1f}} ms a step")
"""


def texts():
    """Reading, the vocabulary and encoding; the peak of memory above the bare program; one training step."""
    source = "".join(find_text()[1])
    with tempfile.TemporaryDirectory() as folder:
        for size in (1, 10, 100, 1000):
            path = Path(folder) / "text.txt"
            with open(path, "w", encoding="utf-8", newline="\n") as file:
                for _ in range(size):
                    file.write(source[:1_000_000])
            subprocess.run([sys.executable, "-c", TEXTS.format(root=str(ROOT), path=str(path))], check=True)


def gpu():
    """At most eight minutes: the default run, the lecture's loop against the default, generation."""
    seconds, loss, screen = whole_run()
    print(screen)
    print(f"  default run: {seconds:.0f} s, best model's val loss over the whole text {loss:.4f}")
    device = gpt.pick_device("cuda")
    dtype = gpt.pick_dtype("auto", device)
    lecture = tokens_per_second(100, device, fused=False)
    default = tokens_per_second(400, device, dtype, compile=True)
    print(f"  lecture's loop in float32 {lecture:,.0f} tokens/s, default {default:,.0f}, "
          f"ratio {default / lecture:.1f}")
    generation(device, 256)


def main():
    print(machine())
    chosen = [globals()[name] for name in sys.argv[1:]] or [steps, profile, start, generation]
    for part in chosen:
        print(f"{part.__name__}: {part.__doc__ or ''}")
        part()


if __name__ == "__main__":
    main()
