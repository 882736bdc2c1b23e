"""
A GPT from scratch, in one file: the Transformer of the lecture "Let's build GPT: from scratch, in code, spelled out".

    python gpt.py                                train on Tiny Shakespeare, then print a sample
    python gpt.py --sample --prompt "ROMEO:"     let the best model so far go on writing
    python gpt.py --resume --max_iters 9000      go on training
    python gpt.py --help                         every flag, with its reason

Read it from the top: everything down to the line `running it` is the lecture, in the lecture's order. What a program
needs around it (checkpoints, interrupts, several GPUs, the screen) stands below that line. bigram.py comes first.
"""
import argparse
import csv
import io
import math
import os
import signal
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
from torch.nn import functional as F

from data.download import BY_HAND, MANUAL, UserError, find_text

# ---------------------------------------------------------------------------------------------------------------
# hyperparameters


def opt(default, help, group=None, **limits):
    """One field of a Config: its default, the question it answers, and the limits that `check` holds it to."""
    return field(default=default, metadata=dict(help=help, group=group, limits=limits))


@dataclass
class Config:
    """Every setting, which is also every flag of the command line. The defaults are the lecture's full model."""
    n_layer: int = opt(6, "how many blocks stand on top of each other?", "model", least=1)
    n_head: int = opt(6, "how many heads of attention has a block?", least=1)
    n_embd: int = opt(384, "how many channels carry one token? (a multiple of n_head)", least=1)
    block_size: int = opt(256, "what is the maximum context length for predictions?", least=1)
    dropout: float = opt(0.2, "what share of the activations is dropped in training?", least=0, below=1)
    init_std: float = opt(0.02, "how far do initial weights spread? (0: PyTorch's own way, as in the video)", least=0)
    fused: bool = opt(True, "compute all heads in one go? (--no-fused: the lecture's loop and random numbers)")

    batch_size: int = opt(64, "how many independent sequences will we process in parallel?", "training", least=1)
    max_iters: int = opt(5000, "how many steps of training?", least=0)
    eval_interval: int = opt(500, "after how many steps do we measure the loss again?", least=1)
    eval_iters: int = opt(200, "over how many batches of each split is the loss averaged?", least=1)
    learning_rate: float = opt(3e-4, "how large is a step?", least=0)
    warmup_iters: int = opt(0, "over how many steps does the learning rate rise from zero?", least=0)
    lr_decay_iters: int = opt(0, "by which step has it fallen to min_lr, in a straight line? (0: it stays)", least=0)
    min_lr: float = opt(0.0, "where does it fall to?", least=0)
    weight_decay: float = opt(0.01, "how strongly are weights pulled to zero? (0.01 is AdamW's default)", least=0)
    beta2: float = opt(0.999, "how long does AdamW remember squared gradients?", least=0, below=1)
    grad_clip: float = opt(0.0, "the longest gradient that is let through (0: any)", least=0)
    seed: int = opt(1337, "which random numbers?", least=0)

    data: str = opt("", "which text file? (default: input.txt, downloaded when absent)", "data")
    init_from: str = opt("", "start from the weights and vocabulary of which checkpoint? (fine-tuning)")

    size: str = opt("auto", "which set of values? (auto: lecture on CUDA, laptop elsewhere)", "running",
                    among=("auto", "lecture", "notebook", "laptop"))
    device: str = opt("auto", "where? cpu, cuda, cuda:1, mps (auto: the fastest that is here)")
    dtype: str = opt("auto", "which numbers? (auto: bfloat16 on CUDA, where supported)",
                     among=("auto", "float32", "bfloat16"))
    compile: bool = opt(None, "let torch.compile fuse the model? (default: on CUDA; it gains nothing on a CPU)")
    out: str = opt("out", "which folder takes the checkpoints, the record and the pictures?")
    resume: bool = opt(False, "go on where the run in --out stopped?")

    sample: bool = opt(False, "only write text, with the best model in --out?", "sampling")
    prompt: str = opt(None, "how does the text begin? (- reads standard input; implies --sample)")
    max_new_tokens: int = opt(500, "how many characters to write?", least=0)
    temperature: float = opt(1.0, "how daring? (0: always the likeliest character)", least=0)
    top_k: int = opt(None, "choose among how many of the likeliest characters? (default: all)", least=1)
    num_samples: int = opt(1, "how many texts?", least=1)
    sample_seed: int = opt(None, "which random numbers for the text? (default: others each time)", least=0)
    attention: str = opt(None, "draw where each head looks, for this text, into attention.png")

    @property
    def head_size(self):
        return self.n_embd // self.n_head


# ---------------------------------------------------------------------------------------------------------------
# data


class Tokenizer:
    """Characters to integers and back. `chars` is the vocabulary: the sorted characters of the text."""

    def __init__(self, chars):
        self.chars = list(chars)
        self.stoi = {ch: i for i, ch in enumerate(self.chars)}
        self.itos = {i: ch for i, ch in enumerate(self.chars)}

    def encode(self, s):
        """ string -> list of integers; KeyError for a character that the vocabulary lacks """
        return [self.stoi[ch] for ch in s]

    def decode(self, ids):
        """ list of integers -> string """
        return "".join([self.itos[i] for i in ids])


def vocabulary(text):
    """ here are all the unique characters that occur in this text (strings, or any iterable of them) """
    chars = set()
    for piece in text:
        chars.update(piece)
    return sorted(list(chars))


def encode_text(text, tokenizer):
    """
    tokenizer.encode for a whole text, as one tensor (N,) of the smallest integers that hold the vocabulary: numpy
    looks all characters of a piece up in one table, which takes nanoseconds a character and 1 byte for most texts.
    """
    dtype = next(t for t in (np.uint8, np.int16, np.int32) if len(tokenizer.chars) - 1 <= np.iinfo(t).max)
    table = np.zeros(sys.maxunicode + 1, dtype)                      # code point -> token
    table[[ord(ch) for ch in tokenizer.chars]] = np.arange(len(tokenizer.chars))
    pieces = [table[np.frombuffer(piece.encode("utf-32-le"), np.uint32)] for piece in text]
    return torch.from_numpy(np.concatenate(pieces))


def load_data(text, name, block_size, tokenizer=None):
    """ read, encode and split a text -> (tokenizer, {"train": (N,), "val": (M,)}) """
    chars = vocabulary(text)
    tokenizer = tokenizer or Tokenizer(chars)
    if lacking := sorted(set(chars) - set(tokenizer.chars)):
        raise UserError(f"{name} has characters that the checkpoint's vocabulary lacks: {''.join(lacking)!r}; "
                        "take them out, or train from the beginning")
    if not chars:
        raise UserError(f"{name} is empty; name another text with --data FILE")
    data = encode_text(text, tokenizer)
    n = int(0.9 * len(data))                                         # first 90% will be train, rest val
    if min(n, len(data) - n) <= block_size:
        raise UserError(f"{name} is too short: its {len(data):,} characters are split into {n:,} to train and "
                        f"{len(data) - n:,} to validate, and each must be longer than block_size {block_size}; "
                        f"take {10 * block_size + 1:,} characters or more, or a smaller --block_size")
    return tokenizer, {"train": data[:n], "val": data[n:]}


def get_batch(data, config, device):
    """ one batch of inputs x and targets y, both (B, T): y is x one character later """
    ix = torch.randint(len(data) - config.block_size, (config.batch_size,))     # (B,) random places to start
    at = ix[:, None] + torch.arange(config.block_size)                          # (B, 1) + (T,) -> (B, T)
    at = at.to(data.device)
    x, y = data[at], data[at + 1]
    return x.to(device).long(), y.to(device).long()


# ---------------------------------------------------------------------------------------------------------------
# loss estimate


@torch.no_grad()
def estimate_loss(model, batch, eval_iters):
    """ the loss of a split is noisy from batch to batch: its mean over eval_iters of them, batch(split) -> x, y """
    out = {}
    model.eval()
    for split in ["train", "val"]:
        losses = [model(*batch(split))[1] for _ in range(eval_iters)]
        out[split] = torch.stack(losses).mean().item()
    model.train()
    return out


# ---------------------------------------------------------------------------------------------------------------
# model


class Head(nn.Module):
    """ one head of self-attention: every position gathers from the positions up to its own """

    def __init__(self, config):
        super().__init__()
        self.key = nn.Linear(config.n_embd, config.head_size, bias=False)       # what do I contain?
        self.query = nn.Linear(config.n_embd, config.head_size, bias=False)     # what am I looking for?
        self.value = nn.Linear(config.n_embd, config.head_size, bias=False)     # what do I tell, if asked?
        tril = torch.tril(torch.ones(config.block_size, config.block_size))
        self.register_buffer("tril", tril, persistent=False)                    # not a parameter, not saved
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        # x of shape (B, T, C), C = n_embd; the result of shape (B, T, hs), hs = head_size
        B, T, C = x.shape
        k = self.key(x)                                                         # (B, T, hs)
        q = self.query(x)                                                       # (B, T, hs)
        # affinities: scaled by the head size their variance is about 1, so that softmax does not saturate
        wei = q @ k.transpose(-2, -1) * k.shape[-1]**-0.5                       # (B, T, hs) @ (B, hs, T) -> (B, T, T)
        wei = wei.masked_fill(self.tril[:T, :T] == 0, float("-inf"))            # the future stays hidden
        wei = F.softmax(wei, dim=-1)                                            # each row sums to one
        wei = self.dropout(wei)
        v = self.value(x)                                                       # (B, T, hs)
        return wei @ v                                                          # (B, T, T) @ (B, T, hs) -> (B, T, hs)


class MultiHeadAttention(nn.Module):
    """ several heads of self-attention in parallel: several conversations about different things """

    def __init__(self, config):
        super().__init__()
        self.heads = nn.ModuleList([Head(config) for _ in range(config.n_head)])
        self.proj = nn.Linear(config.n_embd, config.n_embd)                     # the way back to the residual stream
        self.dropout = nn.Dropout(config.dropout)
        self.fused = config.fused

    def forward(self, x):
        # x of shape (B, T, C)
        out = self.all_at_once(x) if self.fused else torch.cat([h(x) for h in self.heads], dim=-1)
        return self.dropout(self.proj(out))                                     # (B, T, nh * hs) -> (B, T, C)

    def all_at_once(self, x):
        """ what the loop over heads computes, from the same weights, with the heads as a batch dimension: faster """
        # x of shape (B, T, C)
        B, T, C = x.shape
        layers = [h.query for h in self.heads] + [h.key for h in self.heads] + [h.value for h in self.heads]
        weight = torch.cat([layer.weight for layer in layers])                  # (3 * nh * hs, C)
        qkv = F.linear(x, weight).view(B, T, 3, len(self.heads), -1)            # (B, T, 3, nh, hs)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)                                    # three of (B, nh, T, hs)
        p = self.heads[0].dropout.p if self.training else 0.0
        # scale by hs**-0.5, mask the future, softmax, dropout, @ v: the whole of Head.forward
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        return out.transpose(1, 2).reshape(B, T, -1)                            # (B, nh, T, hs) -> (B, T, nh * hs)


class FeedForward(nn.Module):
    """ after the communication, the computation: each position thinks about what it gathered, on its own """

    def __init__(self, config):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(config.n_embd, 4 * config.n_embd),
            nn.ReLU(),
            nn.Linear(4 * config.n_embd, config.n_embd),
            nn.Dropout(config.dropout),
        )

    def forward(self, x):
        # x of shape (B, T, C)
        return self.net(x)


class Block(nn.Module):
    """ a Transformer block: communication, then computation, each on a branch beside the residual stream """

    def __init__(self, config):
        super().__init__()
        self.sa = MultiHeadAttention(config)
        self.ffwd = FeedForward(config)
        self.ln1 = nn.LayerNorm(config.n_embd)
        self.ln2 = nn.LayerNorm(config.n_embd)

    def forward(self, x):
        # x of shape (B, T, C)
        x = x + self.sa(self.ln1(x))
        x = x + self.ffwd(self.ln2(x))
        return x


class GPTLanguageModel(nn.Module):
    """ tokens and their positions, through the blocks, to a score for every character that could come next """

    def __init__(self, config, vocab_size):
        super().__init__()
        self.block_size = config.block_size
        self.token_embedding_table = nn.Embedding(vocab_size, config.n_embd)
        self.position_embedding_table = nn.Embedding(config.block_size, config.n_embd)
        self.blocks = nn.Sequential(*[Block(config) for _ in range(config.n_layer)])
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, vocab_size)
        if config.init_std:
            for module in self.modules():
                if isinstance(module, (nn.Linear, nn.Embedding)):
                    nn.init.normal_(module.weight, mean=0.0, std=config.init_std)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, idx, targets=None):
        # idx and targets of shape (B, T), integers
        B, T = idx.shape
        tok_emb = self.token_embedding_table(idx)                               # (B, T, C): what stands there
        pos_emb = self.position_embedding_table(torch.arange(T, device=idx.device))     # (T, C): where it stands
        x = tok_emb + pos_emb                                                   # (B, T, C)
        x = self.blocks(x)                                                      # (B, T, C)
        x = self.ln_f(x)                                                        # (B, T, C)
        logits = self.lm_head(x)                                                # (B, T, vocab_size)

        if targets is None:
            loss = None
        else:
            B, T, C = logits.shape
            logits = logits.view(B*T, C)                                        # cross_entropy wants (N, C) and (N,)
            targets = targets.view(B*T)
            loss = F.cross_entropy(logits, targets)
        return logits, loss

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, each=None):
        """
        idx (B, T) of tokens -> (B, T + max_new_tokens), each new one drawn from what the model predicts. A temperature
        below 1 sharpens the distribution and 0 takes the likeliest; top_k keeps the k likeliest. `each` is called
        with every new column (B, 1) as it is drawn. ValueError for tokens outside the vocabulary and for bad settings.
        """
        if idx.numel() == 0 or idx.min() < 0 or idx.max() >= self.lm_head.out_features:
            raise ValueError(f"tokens must lie in 0..{self.lm_head.out_features - 1}, one or more in each row")
        if not 0 <= temperature < math.inf or (top_k is not None and top_k < 1):
            raise ValueError(f"temperature {temperature} must be 0 or more, and top_k {top_k} at least 1")
        was_training = self.training
        self.eval()                                                             # no dropout while writing
        try:
            for _ in range(max_new_tokens):
                idx_cond = idx[:, -self.block_size:]                            # positions beyond have no embedding
                logits, loss = self(idx_cond)
                logits = logits[:, -1, :]                                       # the last time step: (B, C)
                if top_k is not None:
                    least = torch.topk(logits, min(top_k, logits.shape[-1])).values[:, -1:]     # (B, 1)
                    logits = logits.masked_fill(logits < least, float("-inf"))
                if temperature == 0:
                    idx_next = logits.argmax(dim=-1, keepdim=True)              # (B, 1)
                else:
                    probs = F.softmax(logits / temperature, dim=-1)             # (B, C)
                    idx_next = torch.multinomial(probs, num_samples=1)          # (B, 1): drawn, not the likeliest
                idx = torch.cat((idx, idx_next), dim=1)                         # (B, T + 1)
                if each:
                    each(idx_next)
        finally:
            self.train(was_training)
        return idx


# ---------------------------------------------------------------------------------------------------------------
# training


def learning_rate(step, config):
    """ constant, unless the config has it rise over the first steps and then fall in a straight line to min_lr """
    if step < config.warmup_iters:
        return config.learning_rate * (step + 1) / config.warmup_iters
    if not config.lr_decay_iters:
        return config.learning_rate
    left = (config.lr_decay_iters - step) / max(1, config.lr_decay_iters - config.warmup_iters)
    return config.min_lr + max(0.0, left) * (config.learning_rate - config.min_lr)


def train(model, data, config, run=None):
    """
    The training loop, for any model with forward(idx, targets) -> logits, loss. data is {"train": (N,), "val": (M,)}.
    `run` watches over it: it hands out the batches, prints and saves. Returns the reports, a dictionary each.
    """
    run = run or Run(model, data, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, config.beta2),
                                  weight_decay=config.weight_decay, fused=config.fused)
    model.train()
    for step in run.turns(optimizer):                                           # 0, 1, .. max_iters
        # every once in a while evaluate the loss on train and val sets
        if step % config.eval_interval == 0 or step == config.max_iters:
            with run.precision():                                               # bfloat16, on a GPU that has it
                losses = estimate_loss(model, run.batch, config.eval_iters)
            run.report(losses)
        if step == config.max_iters:
            break                                                               # the last turn only measures
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config)

        # sample a batch of data
        xb, yb = run.batch("train")
        # evaluate the loss
        logits, loss = run.forward(xb, yb)
        run.watch(loss)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if config.grad_clip:
            nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
        optimizer.step()
    return run.history


# ---------------------------------------------------------------------------------------------------------------
# running it

SHAPE = ("n_layer", "n_head", "n_embd", "block_size")                           # what a checkpoint's weights fix
SIZES = {
    "lecture": {},
    "notebook": dict(n_layer=4, n_head=4, n_embd=64, block_size=32, dropout=0.0, batch_size=16, learning_rate=1e-3),
    "laptop": dict(n_layer=4, n_head=4, n_embd=96, block_size=64, dropout=0.0, batch_size=16, max_iters=4000,
                   eval_interval=500, eval_iters=50, learning_rate=4e-3, warmup_iters=50, lr_decay_iters=4000,
                   weight_decay=0.1, beta2=0.99, grad_clip=1.0),
}
RECORD = ("step", "train", "val", "learning_rate", "tokens", "seconds")         # the columns of loss.csv
FILES = ("best.pt", "last.pt", "loss.csv", "loss.png", "attention.png")         # what a run leaves in --out


class RunFailed(RuntimeError):
    """The run cannot go on; the text is one sentence that says why, and what is left."""


class Interrupted(Exception):
    """Ctrl+C or SIGTERM asked for the end; carries the signal's number."""


def rank():
    """Which of several processes under torchrun is this? 0 speaks and writes."""
    return int(os.environ.get("RANK", 0))


def say(text, file=None):
    if rank() == 0:
        if sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)              # the status line makes room
        print(text, file=file or sys.stdout, flush=True)


def note(text):
    say(text, sys.stderr)


class Signals:
    """The first Ctrl+C or SIGTERM is remembered, so that the run can save; a second one ends it at once."""

    def __init__(self):
        self.asked = 0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.remember)

    def remember(self, number, frame):
        self.asked = int(number)
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_DFL)

    def check(self):
        asked = self.asked
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:                            # all processes stop at the same step
            flag = torch.tensor(asked)
            torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
            asked = int(flag)
        if asked:
            raise Interrupted(asked)


class Run:
    """
    What happens around the training loop: batches, the screen, the record and the checkpoints. With `out`, a folder,
    files are written there; `extra` is what a checkpoint keeps beside the weights; `start` is one to go on from.
    """

    def __init__(self, model, data, config, out=None, extra=None, start=None, forward=None, dtype=None, signals=None):
        self.model, self.data, self.config, self.out, self.start = model, data, config, out, start
        self.extra = extra or {}
        self.forward_model = forward or model                                   # compiled, distributed: for steps only
        self.device = next(model.parameters()).device
        self.dtype = dtype
        self.signals = signals
        self.world = int(os.environ.get("WORLD_SIZE", 1))
        self.history = list(start["history"]) if start else []
        self.step = start["step"] if start else 0
        self.seconds = start["seconds"] if start else 0.0
        self.loss, self.unread, self.optimizer, self.random = math.nan, [], None, None

    # ---- what the loop calls

    def turns(self, optimizer):
        """The numbers of the turns that are left; before each, note what an exact resume would need."""
        self.optimizer = optimizer
        if self.start:
            optimizer.load_state_dict(self.start["optimizer"])
            set_random_state(self.start["random"])
            self.history = [row for row in self.history if row["step"] < self.step]     # it is measured once more
        reports = len(range(0, self.config.max_iters, self.config.eval_interval)) + 1
        self.total = 3 * self.config.max_iters + 2 * self.config.eval_iters * reports   # a step costs three forwards
        self.done = self.total * self.step // max(1, self.config.max_iters)
        self.first, self.begin, self.train_seconds, self.trained = self.done, time.monotonic(), 0.0, 0
        self.last_tick, self.next_status, self.training = self.begin, self.begin + 0.5, False
        self.write_record()
        for self.step in range(self.step, self.config.max_iters + 1):
            self.random = random_state()
            yield self.step

    def batch(self, split):
        """This process's rows of the next batch; an interrupt ends the run here, between two steps."""
        if self.signals:
            self.signals.check()
        self.show_status()
        x, y = get_batch(self.data[split], self.config, self.device)
        rows = len(x) // self.world
        mine = slice(rank() * rows, (rank() + 1) * rows)
        return x[mine], y[mine]

    def forward(self, x, y):
        with self.precision():
            return self.forward_model(x, y)

    def precision(self):
        return torch.autocast(self.device.type, self.dtype) if self.dtype else nullcontext()

    def watch(self, loss):
        """Stop at a loss that is no number. On a GPU twenty losses are read at a time: each read makes it wait."""
        self.unread.append(loss.detach())
        self.trained += self.config.batch_size * self.config.block_size
        if self.device.type == "cpu" or len(self.unread) == 20:
            losses, self.unread = torch.stack(self.unread).tolist(), []
            for step, self.loss in enumerate(losses, self.step + 1 - len(losses)):
                self.must_be_finite(step, self.loss)

    def report(self, losses):
        """Print, record and save what was measured at the top of this turn."""
        if self.world > 1:
            both = torch.tensor([losses["train"], losses["val"]], dtype=torch.float64)
            torch.distributed.all_reduce(both)
            losses = dict(zip(("train", "val"), (both / self.world).tolist()))
        self.must_be_finite(self.step, losses["train"], losses["val"])
        rate = learning_rate(self.step, self.config)
        tokens = self.step * self.config.batch_size * self.config.block_size
        row = dict(zip(RECORD, (self.step, losses["train"], losses["val"], rate, tokens, self.elapsed())))
        self.history.append(row)
        if self.best() is row:
            self.save("best.pt")
        self.save("last.pt")
        self.write_record()
        more = [f"guessing scores ln({self.extra['vocab']}) = {math.log(self.extra['vocab']):.4f}"] \
            if self.step == 0 and "vocab" in self.extra else self.speed()
        say(f"step {self.step}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f} ({', '.join(more)})")

    # ---- what it takes

    def best(self):
        return min(self.history, key=lambda row: row["val"])

    def must_be_finite(self, step, *losses):
        for loss in losses:
            if not math.isfinite(loss):
                raise RunFailed(f"the loss is {loss} at step {step}; try a lower --learning_rate or --grad_clip 1 "
                                "(the checkpoints are from before that)")

    def elapsed(self):
        return self.seconds + time.monotonic() - self.begin

    def speed(self):
        """tokens/s while training, and the time that is left"""
        left = (self.total - self.done) * (time.monotonic() - self.begin) / max(1, self.done - self.first)
        rate = f"{self.trained / self.train_seconds:,.0f} tokens/s, " if self.train_seconds else ""
        return [rate + f"{int(left) // 3600}:{int(left) // 60 % 60:02}:{int(left) % 60:02} left"]

    def show_status(self):
        now = time.monotonic()
        if self.training:
            self.train_seconds += now - self.last_tick
        self.last_tick, self.training = now, self.model.training
        self.done += 3 if self.training else 1
        if now < self.next_status:
            return
        what = f"loss {self.loss:.4f}" if self.training else "measuring the loss"
        text = f"step {self.step} of {self.config.max_iters}, {what}, {self.speed()[0]}"
        moving = sys.stderr.isatty()
        self.next_status = now + (0.2 if moving else 10)
        if rank() == 0:
            print(f"\r{text}\x1b[K" if moving else text, end="" if moving else "\n", file=sys.stderr, flush=True)

    def save(self, name):
        if not self.out or rank():
            return
        state = dict(self.extra, format=1, config=kept(self.config), step=self.step, history=self.history,
                     seconds=self.elapsed(), model=self.model.state_dict())
        if name == "last.pt":                                                   # what it takes to go on
            state.update(optimizer=self.optimizer.state_dict(), random=self.random)
        buffer = io.BytesIO()
        torch.save(state, buffer)
        write_whole(self.out / name, buffer.getbuffer())

    def write_record(self):
        if self.out and not rank():
            text = io.StringIO(newline="")
            writer = csv.DictWriter(text, RECORD)
            writer.writeheader()
            writer.writerows(self.history)
            write_whole(self.out / "loss.csv", text.getvalue().encode())


def kept(config):
    """The settings that belong to a run wherever it goes on: those of the model, the training and the data."""
    names = [f.name for f in fields(Config)]
    return {name: getattr(config, name) for name in names[:names.index("init_from")]}


def random_state():
    """Where all random numbers stand, as plain tensors."""
    return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []}


def set_random_state(state):
    torch.set_rng_state(state["cpu"])
    if len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


def write_whole(path, content):
    """Write a file so that, whatever happens on the way, either the old or the new one stands there whole."""
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise RunFailed(f"could not write {path}: {error.strerror}; an earlier {path.name} is as it was: make room, or "
                        "name another folder with --out, and go on with --resume") from None


def read_checkpoint(path):
    """A checkpoint as a dictionary, on the CPU. Also takes bare weights saved from the lecture's own script."""
    if not Path(path).exists():
        raise UserError(f"there is no {path}; train first (python gpt.py), or name the run's folder with --out")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)    # tensors and plain types: no code
        if "lm_head.weight" in checkpoint:
            checkpoint = {"format": 1, "config": {}, "chars": None, "model": checkpoint}
        weights = {k: v for k, v in checkpoint["model"].items() if not k.endswith(".tril")}
        n_embd = weights["token_embedding_table.weight"].shape[1]
        shape = dict(n_layer=sum(k.endswith("ln1.weight") for k in weights), n_embd=n_embd,
                     n_head=n_embd // weights["blocks.0.sa.heads.0.key.weight"].shape[0],
                     block_size=weights["position_embedding_table.weight"].shape[0])
        settings = {k: v for k, v in checkpoint["config"].items() if k in kept(Config())}
        config = check(Config(**{**settings, **shape}))
        vocab_size = weights["lm_head.weight"].shape[0]
        chars = checkpoint["chars"]
        if checkpoint["format"] != 1 or len(chars or range(vocab_size)) != vocab_size:
            raise ValueError("another format")
        GPTLanguageModel(config, vocab_size).load_state_dict(weights)           # every name, every shape
    except Exception as error:                                                  # damaged, or foreign, in any way
        raise UserError(f"{path} is not a checkpoint of gpt.py, or it is damaged "
                        f"({type(error).__name__}); name another, or train again") from None
    return dict(checkpoint, config=config, shape=shape, model=weights)


def load(path="out/best.pt", device="auto"):
    """The model of a checkpoint, ready to generate, and its tokenizer. UserError says what is wrong with a file."""
    checkpoint = read_checkpoint(path)
    if checkpoint["chars"] is None:
        raise UserError(f"{path} holds weights and no vocabulary; give it to --init_from, with the text it learned")
    model = GPTLanguageModel(checkpoint["config"], len(checkpoint["chars"]))
    model.load_state_dict(checkpoint["model"])
    return model.to(pick_device(device)).eval(), Tokenizer(checkpoint["chars"])


# ---- flags


def make_parser(config_class, doc, sizes):
    """A flag for every field, with both spellings (--n_layer, --n-layer), its question and its defaults."""
    parser = argparse.ArgumentParser(usage="python %(prog)s [flags]   (--help lists them)", description=doc,
                                     formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
                                     argument_default=argparse.SUPPRESS)
    for f in fields(config_class):
        if f.metadata["group"]:
            group = parser.add_argument_group(f.metadata["group"])
        values = {name: size.get(f.name, f.default) for name, size in sizes.items()}
        text = f.metadata["help"].replace("%", "%%")
        if len(set(values.values())) > 1:
            text += " [" + ", ".join(f"{name} {value}" for name, value in values.items()) + "]"
        elif f.default not in (None, "", False):
            text += f" [{'yes' if f.default is True else f.default}]"
        kind = dict(action=argparse.BooleanOptionalAction) if f.type is bool else dict(type=f.type)
        if f.type is not bool:
            kind.update(choices=f.metadata["limits"].get("among"),
                        metavar={int: "N", float: "X", str: "WORD"}[f.type] if "among" not in f.metadata["limits"] else None)
        group.add_argument(*dict.fromkeys([f"--{f.name}", f"--{f.name.replace('_', '-')}"]), help=text, **kind)
    return parser


def check(config):
    """Hold every setting to its limits; UserError names the first that is outside."""
    for f in fields(config):
        value, limits = getattr(config, f.name), f.metadata["limits"]
        if value is None or f.type not in (int, float):
            continue
        if not (limits["least"] <= value < limits.get("below", math.inf)):
            below = f" and below {limits['below']}" if "below" in limits else ""
            raise UserError(f"--{f.name} {value}: it must be a number of at least {limits['least']}{below}")
    return config


def choose_size(given, device):
    """The Config of a fresh run from the flags that were given, and a line that says which size it is and why."""
    size = given.get("size", "auto")
    others = ", ".join(f"--size {name}" for name in SIZES)
    if size != "auto":
        why = f"{size}, as asked for"
    elif all(name in given for name in SHAPE):
        size, why = "lecture", "your own: the flags give the whole shape, and what they leave out is the lecture's"
    elif device.startswith("cuda"):
        size, why = "lecture", f"lecture, since there is a GPU (to choose: {others})"
    else:
        size, why = "laptop", f"laptop, since there is no CUDA GPU (to choose: {others})"
    return check(Config(**{**SIZES[size], **given})), why


def shape_of(checkpoint, given, path):
    """The shape that a checkpoint fixes; UserError when a flag contradicts it."""
    for name, value in checkpoint["shape"].items():
        if given.get(name, value) != value:
            raise UserError(f"--{name} {given[name]} contradicts {path}, whose model has {name} {value}; "
                            "leave the flag out, or train from the beginning")
    return checkpoint["shape"]


def pick_device(name):
    """ "auto" -> the fastest device that is here; a device that does not work here is a UserError """
    here = ["cpu"] + [f"cuda:{i}" for i in range(torch.cuda.device_count()) if torch.cuda.is_available()]
    here += ["mps"] if torch.backends.mps.is_available() else []
    if name == "auto":
        return "cuda:0" if "cuda:0" in here else here[-1]
    name = "cuda:0" if name == "cuda" else name
    if name not in here:
        raise UserError(f"--device {name} does not work here, with torch {torch.__version__}; "
                        f"what does: {', '.join(here)}")
    return name


def pick_dtype(config, device):
    """The type for autocast: torch.bfloat16, or None for plain float32; UserError if what was asked cannot be had."""
    able = device == "cpu" or (device.startswith("cuda") and torch.cuda.is_bf16_supported(including_emulation=False))
    if config.dtype == "bfloat16" and not able:
        raise UserError(f"--dtype bfloat16 does not work on {device}; leave it out, or say --dtype float32")
    if config.dtype == "auto" and device.startswith("cuda") and not able:
        note(f"{device} has no bfloat16, so this runs in float32")
    wanted = config.dtype == "bfloat16" or (config.dtype == "auto" and device.startswith("cuda"))
    return torch.bfloat16 if wanted and able else None


def faster(model, config, device, dtype):
    """The model as the training steps call it: compiled where that pays, one of several under torchrun."""
    stepper = model
    if device.startswith("cuda") if config.compile is None else config.compile:
        random = random_state()
        try:                                                                    # much of it fails only when called
            note("compiling the model (about a minute; --no-compile does without)")
            stepper = torch.compile(model)
            trial = torch.zeros(config.batch_size // world(), config.block_size, dtype=torch.long, device=device)
            with torch.autocast(device.partition(":")[0], dtype) if dtype else nullcontext():
                loss = stepper(trial, trial)[1]
            loss.backward()
        except Exception as error:
            note(f"torch.compile does not work here ({type(error).__name__}), so this runs without it")
            stepper = model
        model.zero_grad(set_to_none=True)
        set_random_state(random)
    if world() > 1:
        stepper = nn.parallel.DistributedDataParallel(stepper, broadcast_buffers=False)
    return stepper


def world():
    """How many processes work on this run? (torchrun says)"""
    return int(os.environ.get("WORLD_SIZE", 1))


def claim(out):
    """Make the folder of a run, and lock it until this process ends; UserError when another run holds it."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = open(out / ".lock", "w")
    except OSError as error:
        raise UserError(f"--out {out} cannot be written: {error.strerror}; name another folder") from None
    try:
        if os.name == "nt":
            import msvcrt
            msvcrt.locking(lock.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise UserError(f"another run is writing to {out}; wait for its end, or name another folder with --out") from None
    return lock


def move_aside(out):
    """An earlier run in this folder moves to a folder of its own."""
    earlier = [out / name for name in FILES if (out / name).exists()]
    if earlier:
        number = next(n for n in range(1, sys.maxsize) if not (out / f"old-{n}").exists())
        (out / f"old-{number}").mkdir()
        for path in earlier:
            path.rename(out / f"old-{number}" / path.name)
        note(f"the earlier run in {out} is now in {out / f'old-{number}'}")


# ---- writing text, drawing pictures


def write_text(model, tokenizer, config, seed):
    """Print config.num_samples texts to stdout, each character as soon as it is drawn."""
    signals = Signals()
    prompt = sys.stdin.read() if config.prompt == "-" else config.prompt or ""
    if lacking := sorted(set(prompt) - set(tokenizer.chars)):
        raise UserError(f"the model never saw {''.join(lacking)!r}; a prompt can use {''.join(tokenizer.chars)!r}")
    device = next(model.parameters()).device
    idx = torch.tensor([tokenizer.encode(prompt) or [0]], device=device)        # (1, T); without a prompt, token 0

    def each(idx_next):
        signals.check()
        print(tokenizer.decode([idx_next.item()]), end="", flush=True)

    torch.manual_seed(seed)
    for i in range(config.num_samples):
        print("\n---\n" if i else "", tokenizer.decode(idx[0].tolist()), sep="", end="", flush=True)
        model.generate(idx, config.max_new_tokens, config.temperature, config.top_k, each)
    print(flush=True)


def figure(width, height):
    """An empty matplotlib figure, or None and one sentence where the extra is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        note('no picture: matplotlib is not installed (pip install -e ".[plot]")')
        return None
    return Figure((width, height), layout="constrained")


def draw_loss(history, vocab, path):
    """Train and val loss over the steps, what guessing scores, and the best step."""
    if not (fig := figure(7, 4)):
        return
    ax = fig.subplots()
    steps = [row["step"] for row in history]
    for split in ("train", "val"):
        ax.plot(steps, [row[split] for row in history], label=split, marker=".")
    best = min(history, key=lambda row: row["val"])
    ax.axhline(math.log(vocab), color="gray", linestyle="--", label=f"guessing: ln({vocab})")
    ax.plot(best["step"], best["val"], "k*", label=f"best val: {best['val']:.4f} at step {best['step']}")
    ax.set(xlabel="step", ylabel="loss (nats per character)")
    ax.legend()
    save_figure(fig, path)


def draw_attention(model, tokenizer, text, path):
    """One panel for each layer and head: which earlier characters (columns) each position (row) looks at."""
    if lacking := sorted(set(text) - set(tokenizer.chars)):
        raise UserError(f"the model never saw {''.join(lacking)!r}; --attention can use {''.join(tokenizer.chars)!r}")
    if not text:
        raise UserError("--attention needs one character or more")
    idx = torch.tensor([tokenizer.encode(text)[-model.block_size:]])            # (1, T)
    labels = [repr(ch)[1:-1] if ch.isspace() and ch != " " else ch.replace(" ", "␣") for ch in text][-model.block_size:]
    model, maps = model.cpu().eval(), []
    for block in model.blocks:
        block.sa.fused = False                                                  # the loop over heads, to look inside
        for head in block.sa.heads:                                             # what goes into dropout are the weights
            head.dropout.register_forward_hook(lambda module, args, output: maps.append(args[0][0]))     # (T, T)
    with torch.no_grad():
        model(idx)
    rows, columns, T = len(model.blocks), len(model.blocks[0].sa.heads), len(labels)
    side = max(2.4, 0.13 * T)
    if not (fig := figure(columns * side, rows * side)):
        return
    for i, (ax, wei) in enumerate(zip(fig.subplots(rows, columns, squeeze=False).flat, maps)):
        ax.imshow(wei, cmap="Blues", vmin=0, vmax=1)
        ax.set_title(f"layer {i // columns + 1}, head {i % columns + 1}", fontsize=8)
        ax.set_xticks(range(T), labels, fontsize=6, family="monospace")
        ax.set_yticks(range(T), labels, fontsize=6, family="monospace")
        ax.tick_params(length=0, pad=1)
    save_figure(fig, path)


def save_figure(fig, path):
    image = io.BytesIO()
    fig.savefig(image, format="png", dpi=130)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, image.getbuffer())
    note(f"drawn: {path}")


# ---- the program


def sample_or_draw(config, given):
    """--sample and --attention: use a model that is there already."""
    path = config.init_from or Path(config.out) / "best.pt"
    shape_of(read_checkpoint(path), given, path)
    model, tokenizer = load(path, config.device)
    if config.attention is not None:
        draw_attention(model, tokenizer, config.attention, Path(config.out) / "attention.png")
    else:
        seed = torch.seed() % 2**32 if config.sample_seed is None else config.sample_seed
        note(f"({path}, seed {seed})")
        write_text(model, tokenizer, config, seed)


def train_and_sample(config, why, given):
    """The run: text, model, training, a sample, and where everything is."""
    out, start = Path(config.out), None
    if config.resume or config.init_from:
        path = config.init_from or out / "last.pt"
        start = read_checkpoint(path)
        settings = asdict(start["config"]) if config.resume else asdict(config)
        config = check(replace(config, **{**{k: settings[k] for k in kept(config)}, **shape_of(start, given, path),
                                          **{k: v for k, v in given.items() if k in kept(config)}}))
        why = f"that of {path}"
        if config.resume and "optimizer" not in start:
            raise UserError(f"{path} holds a model to sample from and not a run to go on with; use --init_from {path}")
    if config.batch_size % world():
        raise UserError(f"--batch_size {config.batch_size} cannot be shared by {world()} processes; take a multiple")

    device = pick_device(f"cuda:{os.environ['LOCAL_RANK']}" if world() > 1 and config.device == "auto"
                         and torch.cuda.is_available() else config.device)
    dtype = pick_dtype(config, device)
    if world() > 1:
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo")
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    lock = claim(out) if rank() == 0 else None                                  # held until the end

    name, text = find_text(MANUAL if start and start.get("text") == MANUAL and not config.data else config.data)
    tokenizer = Tokenizer(start["chars"]) if start and start["chars"] else None
    tokenizer, data = load_data(text, name, config.block_size, tokenizer)
    length = sum(len(split) for split in data.values())
    if config.resume and length != start["length"]:
        raise UserError(f"{name} has {length:,} characters, and the run in {out} was trained on {start['text']} with "
                        f"{start['length']:,}; to go on with another text, use --init_from {out / 'best.pt'}")
    vocab = len(tokenizer.chars)

    torch.manual_seed(config.seed)
    model = GPTLanguageModel(config, vocab)
    if start:
        model.load_state_dict(start["model"])
    model = model.to(device)
    threads = f" ({torch.get_num_threads()} threads)" if device == "cpu" else ""
    say(f"device: {device}{threads}, torch {torch.__version__}, {'bfloat16' if dtype else 'float32'}, "
        f"{world()} process{'es' * (world() > 1)}")
    say(f"text:   {name}, {length:,} characters, a vocabulary of {vocab}")
    say(f"model:  {sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters: n_layer {config.n_layer}, "
        f"n_head {config.n_head}, n_embd {config.n_embd}, block_size {config.block_size}")
    say(f"size:   {why}")
    if name == MANUAL:
        note(f"notice: the text is not Shakespeare, it is {MANUAL}. {BY_HAND}")
    if config.lr_decay_iters not in (0, config.max_iters):
        note(f"notice: the learning rate falls until step {config.lr_decay_iters}, and the run has {config.max_iters} "
             f"steps; --lr_decay_iters {config.max_iters} would fit")
    if device.startswith("cuda"):
        data = {split: tokens.to(device) for split, tokens in data.items()}
    if rank() == 0 and not config.resume:
        move_aside(out)

    extra = dict(chars="".join(tokenizer.chars), text=name, length=length, vocab=vocab)
    run = Run(model, data, config, out, extra, start if config.resume else None,
              faster(model, config, device, dtype), dtype, Signals())
    try:
        train(model, data, config, run)
    except Interrupted:
        run.save("last.pt")
        note(f"stopped at step {run.step}, saved; to go on: {command(config, '--resume')}")
        raise
    if rank():
        return
    best = run.best()
    if (out / "best.pt").exists():
        model.load_state_dict(read_checkpoint(out / "best.pt")["model"])
    draw_loss(run.history, vocab, out / "loss.png")
    say(f"best:   val loss {best['val']:.4f} at step {best['step']}; the sample is drawn from that model\n")
    write_text(model, tokenizer, config, config.seed if config.sample_seed is None else config.sample_seed)
    if name == MANUAL:
        note(f"\nnotice: what was learned is {MANUAL}, not Shakespeare. {BY_HAND}")
    say(f"\nfiles:  {out / 'best.pt'} (the best model), {out / 'last.pt'} (to go on), {out / 'loss.csv'} (the record)")
    say(f"write:  {command(config, '--sample --max_new_tokens 1000')}")
    say(f"go on:  {command(config, f'--resume --max_iters {2 * config.max_iters or 1000}')}")


def command(config, flags):
    return f"python gpt.py {flags}" + (f" --out {config.out}" if config.out != "out" else "")


def main(argv=None):
    parser = make_parser(Config, __doc__, SIZES)
    given = vars(parser.parse_args(argv))
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")                                    # a console that lacks a character
    try:
        # what can be said at once is said at once: before the text, the model or the network
        device = "cpu" if given.get("device", "auto") == "cpu" else pick_device(given.get("device", "auto"))
        config, why = choose_size(given, device)
        if config.n_embd % config.n_head:
            raise UserError(f"--n_embd {config.n_embd} is not a multiple of --n_head {config.n_head}; "
                            f"try --n_embd {config.n_embd // config.n_head * config.n_head or config.n_head}")
        if config.sample or config.prompt is not None or config.attention is not None:
            sample_or_draw(config, given)
        else:
            train_and_sample(config, why, given)
    except UserError as error:
        parser.error(error)
    except RunFailed as error:
        parser.exit(1, f"gpt.py: {error}\n")
    except (torch.OutOfMemoryError, MemoryError):
        parser.exit(1, "gpt.py: out of memory; lower --batch_size first, then --block_size or --n_embd, or take "
                       "--size laptop\n")
    except Interrupted as stopped:
        sys.exit(128 + stopped.args[0])
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:                                                     # whoever read our output has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
