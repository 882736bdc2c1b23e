"""
Can the tests fail? Each mutant below breaks gpt.py, bigram.py or the data folder in one place; the
default tests must notice every one of them. Not part of the default run:

    python tests/mutants.py [WORD ...]      all of them, or those with WORD in their name

A mutant is an exact replacement. One whose text no longer stands in the file is an error, so that the list
moves with the code. Prints killed or survived for each, and ends with status 1 if any survived.
"""

import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
G, B, D, T = "gpt.py", "bigram.py", "data/download.py", "data/text.py"
BOTH = (G, B)
HEAD_SCALE = "k.transpose(-2, -1) * k.shape[-1]**-0.5"

MUTANTS = [
    # attention
    ("scale by n_embd", G, HEAD_SCALE, "k.transpose(-2, -1) * C**-0.5"),
    ("no scale", G, HEAD_SCALE, "k.transpose(-2, -1)"),
    (
        "mask off by one",
        G,
        "torch.tril(torch.ones(config.block_size, config.block_size))",
        "torch.tril(torch.ones(config.block_size, config.block_size), diagonal=1)",
    ),
    ("mask dropped", G, "wei = wei.masked_fill(", "wei.masked_fill("),
    ("mask of zeros added", G, 'self.tril[:T, :T] == 0, float("-inf")', "self.tril[:T, :T] == 0, 0.0"),
    ("softmax over the wrong dimension", G, "wei = F.softmax(wei, dim=-1)", "wei = F.softmax(wei, dim=-2)"),
    ("q and k swapped, mask transposed", G, "wei = q @ k.transpose", "wei = k @ q.transpose"),
    ("value from the key layer", G, "v = self.value(x)", "v = self.key(x)"),
    ("attention dropout missing", G, "wei = self.dropout(wei)", "wei = wei"),
    ("fused path without dropout", G, "p = self.heads[0].dropout.p if self.training else 0.0", "p = 0.0"),
    ("fused path with dropout in eval", G, "dropout.p if self.training else 0.0", "dropout.p"),
    ("fused path not causal", G, "dropout_p=p, is_causal=True", "dropout_p=p, is_causal=False"),
    (
        "fused heads interleaved wrongly",
        G,
        ".view(B, T, 3, len(self.heads), -1)",
        ".view(B, T, 3, -1, len(self.heads)).transpose(3, 4)",
    ),
    ("fused heads joined wrongly", G, "out.transpose(1, 2).reshape(B, T, -1)", "out.reshape(B, T, -1)"),
    (
        "fused query and key exchanged",
        G,
        "[h.query for h in self.heads] + [h.key for",
        "[h.key for h in self.heads] + [h.query for",
    ),
    ("projection dropped", G, "self.dropout(self.proj(out))", "self.dropout(out)"),
    (
        "dropout after the projection missing",
        G,
        "return self.dropout(self.proj(out))",
        "return self.proj(out)",
    ),
    (
        "one head too few",
        G,
        "for _ in range(config.n_head)])",
        "for _ in range(max(1, config.n_head - 1))])",
    ),
    # blocks and the model
    ("residual dropped", G, "x = x + self.sa(self.ln1(x))", "x = self.sa(self.ln1(x))"),
    ("second residual dropped", G, "x = x + self.ffwd(self.ln2(x))", "x = self.ffwd(self.ln2(x))"),
    ("post-norm", G, "x = x + self.sa(self.ln1(x))", "x = self.ln1(x + self.sa(x))"),
    ("norm missing before the feed-forward", G, "self.ffwd(self.ln2(x))", "self.ffwd(x)"),
    ("one norm used twice", G, "self.ffwd(self.ln2(x))", "self.ffwd(self.ln1(x))"),
    ("final norm missing", G, "x = self.ln_f(x) ", "x = x "),
    ("GELU for ReLU", G, "nn.ReLU(),", "nn.GELU(),"),
    (
        "3x instead of 4x",
        G,
        "nn.Linear(config.n_embd, 4 * config.n_embd),\n            nn.ReLU(),\n            "
        "nn.Linear(4 * config.n_embd",
        "nn.Linear(config.n_embd, 3 * config.n_embd),\n            nn.ReLU(),\n            "
        "nn.Linear(3 * config.n_embd",
    ),
    ("feed-forward dropout missing", G, "            nn.Dropout(config.dropout),\n", ""),
    ("positions dropped", G, "x = tok_emb + pos_emb", "x = tok_emb + 0 * pos_emb"),
    (
        "positions reversed",
        G,
        "torch.arange(T, device=idx.device)",
        "torch.arange(T, device=idx.device).flip(0)",
    ),
    ("initial weights too wide", G, "mean=0.0, std=config.init_std", "mean=0.0, std=10 * config.init_std"),
    ("biases keep their start", G, "nn.init.zeros_(module.bias)", "pass"),
    (
        "reshape mixes positions",
        G,
        "targets = targets.view(B*T)\n            loss = F.cross_entropy(logits, targets)\n"
        "        return logits, loss\n\n    @torch.no_grad()\n"
        "    def generate(self, idx, max_new_tokens, temp",
        "targets = targets.t().reshape(B*T)\n            loss = F.cross_entropy(logits, targets)\n"
        "        return logits, loss\n\n    @torch.no_grad()\n"
        "    def generate(self, idx, max_new_tokens, temp",
    ),
    # data
    ("targets not shifted", BOTH, "data[at + 1]", "data[at]"),
    ("targets shifted twice", BOTH, "data[at], data[at + 1]", "data[at], data[(at + 2) % len(data)]"),
    (
        "batch start off by one",
        BOTH,
        "len(data) - config.block_size, (",
        "len(data) - config.block_size - 1, (",
    ),
    (
        "batch start beyond the end",
        BOTH,
        "len(data) - config.block_size, (",
        "len(data) - config.block_size + 1, (",
    ),
    ("split 80/20", BOTH, "n = int(0.9 * len(data))", "n = int(0.8 * len(data))"),
    ("val drawn from train", BOTH, '"val": data[n:]', '"val": data[:n]'),
    (
        "vocabulary unsorted",
        T,
        "return sorted(list(chars))",
        "return sorted(list(chars), key=lambda ch: -ord(ch))",
    ),
    ("decode by the wrong map", BOTH, "self.itos[i] for i in ids", "self.chars[-i] for i in ids"),
    ("encode_text looks up the wrong character", T, "table[ord(ch)] = i", "table[ord(ch)] = max(0, i - 1)"),
    ("text too short goes through", BOTH, "<= block_size:", "< block_size:"),
    ("byte order mark kept", T, '"utf-8-sig"', '"utf-8"'),
    ("offset of a bad byte forgotten", T, "offset += len(line)", "offset += 0"),
    # loss and training
    ("estimate in train mode", BOTH, "    model.eval()\n    for split", "    for split"),
    ("mode not restored after the estimate", BOTH, "    model.train()\n    return out", "    return out"),
    ("estimate of one split only", BOTH, "model(*batch(split))", 'model(*batch("train"))'),
    ("gradients not zeroed", G, "        optimizer.zero_grad(set_to_none=True)\n", ""),
    ("bigram's gradients not zeroed", B, "        optimizer.zero_grad(set_to_none=True)\n", ""),
    ("trained on val", G, 'xb, yb = run.batch("train")', 'xb, yb = run.batch("val")'),
    (
        "one step too many",
        G,
        "        if step == config.max_iters:\n            break ",
        "        if False:\n            break ",
    ),
    (
        "schedule off by one",
        G,
        "config.learning_rate * (step + 1) / config",
        "config.learning_rate * step / config",
    ),
    ("decay to zero and not min_lr", G, "return config.min_lr + max", "return max"),
    ("learning rate never set", G, 'group["lr"] = learning_rate(step, config)', "pass"),
    ("weight decay ignored", G, "weight_decay=config.weight_decay,", "weight_decay=0.01,"),
    (
        "gradients never clipped",
        G,
        "nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)",
        "pass",
    ),
    # writing
    (
        "greedy instead of sampled",
        G,
        "idx_next = torch.multinomial(probs, num_samples=1)",
        "idx_next = probs.argmax(-1, keepdim=True)",
    ),
    (
        "bigram greedy",
        B,
        "idx_next = torch.multinomial(probs, num_samples=1)",
        "idx_next = probs.argmax(-1, keepdim=True)",
    ),
    ("no crop", G, "idx_cond = idx[:, -self.block_size:]", "idx_cond = idx"),
    (
        "crop from the wrong end",
        G,
        "idx_cond = idx[:, -self.block_size:]",
        "idx_cond = idx[:, :self.block_size]",
    ),
    ("first instead of last position", G, "logits = logits[:, -1, :] ", "logits = logits[:, 0, :] "),
    ("temperature upside down", G, "logits / temperature", "logits * temperature"),
    ("top_k keeps one fewer", G, "logits < least", "logits <= least"),
    ("dropout while writing", G, "        self.eval()  ", "        pass  "),
    ("mode not restored after writing", G, "self.train(was_training)", "pass"),
    (
        "tokens outside the vocabulary",
        G,
        "idx.numel() == 0 or idx.min() < 0 or idx.max()",
        "idx.numel() == 0 or 0",
    ),
    # the run
    ("best kept on train loss", G, 'key=lambda row: row["val"]', 'key=lambda row: row["train"]'),
    ("resume without optimizer", G, 'optimizer.load_state_dict(self.start["optimizer"])', "pass"),
    ("resume without random state", G, 'set_random_state(self.start["random"])', "pass"),
    (
        "random state taken too late",
        G,
        "            self.random = random_state()\n            yield self.step",
        "            yield self.step\n            self.random = random_state()",
    ),
    ("file written in place", G, 'part = path.with_name(path.name + ".part")', "part = path"),
    ("a checkpoint may hold code", G, "weights_only=True", "weights_only=False"),
    ("no lock", G, "fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)", "pass"),
    ("earlier run overwritten", G, "        move_aside(out)", "        pass"),
    ("a contradicting flag ignored", G, "if name in given and given[name] != shape[name]:", "if False:"),
    ("a loss that is no number goes on", G, "if not math.isfinite(loss):", "if False:"),
    ("nan among the flags", G, "if not least <= value < below:", "if value < least or value >= below:"),
    (
        "unknown characters in a prompt",
        G,
        "    if lacking := sorted(set(text) - set(tokenizer.chars)):\n        known",
        "    if lacking := []:\n        known",
    ),
    ("exit status of an interrupt", G, "sys.exit(128 + stopped.args[0])", "sys.exit(0)"),
    ("interrupts never looked at", G, "            self.signals.check()\n", "            pass\n"),
    (
        "compile without a fall-back",
        G,
        "            stepper = model\n        model.zero_grad",
        "            raise\n        model.zero_grad",
    ),
    # the download
    ("sha256 not looked at", D, "if digest.hexdigest() != SHA256:", "if False:"),
    ("length not looked at", D, "    if size != SIZE:", "    if False:"),
    ("status not looked at", D, "        reply.raise_for_status()\n", ""),
    ("no deadline", D, "if time.monotonic() - start > DEADLINE:", "if False:"),
    ("only the first source", D, "for url in sources:", "for url in sources[:1]:"),
]


def apply(folder, files, old, new):
    for name in files if isinstance(files, tuple) else (files,):
        path = folder / name
        source = path.read_text(encoding="utf-8")
        if source.count(old) != 1:
            sys.exit(f"mutants.py: this stands {source.count(old)} times in {name}, not once:\n{old}")
        path.write_text(source.replace(old, new), encoding="utf-8")


def copy(folder):
    names = shutil.ignore_patterns(".git", "out", "__pycache__", ".*_cache", ".venv")
    shutil.copytree(ROOT, folder, ignore=names, dirs_exist_ok=True)


def attack(name, files, old, new):
    """The mutant's name if the tests did not notice it."""
    with tempfile.TemporaryDirectory() as folder:
        copy(Path(folder))
        apply(Path(folder), files, old, new)
        begin = time.monotonic()
        # the pair's contract compares texts, and would notice a change in one file without a thought
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        command += ["--ignore", "tests/test_09_pair.py"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900)
    if done.returncode not in (0, 1):
        sys.exit(f"{name}: pytest ended with {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    by = next((line for line in done.stdout.splitlines() if line.startswith("FAILED")), "")[:90]
    verdict = "killed  " if done.returncode else "SURVIVED"
    print(f"{verdict} {name} ({time.monotonic() - begin:.0f} s) {by}", flush=True)
    return None if done.returncode else name


def main(words):
    chosen = [mutant for mutant in MUTANTS if all(word in mutant[0] for word in words)]
    for _, files, old, new in MUTANTS:  # all must apply before the first one runs
        with tempfile.TemporaryDirectory() as folder:
            copy(Path(folder))
            apply(Path(folder), files, old, new)
    with ThreadPoolExecutor(2) as pool:                         # two at a time
        survived = [name for name in pool.map(lambda mutant: attack(*mutant), chosen) if name]
    print(f"{len(chosen) - len(survived)} of {len(chosen)} killed")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
