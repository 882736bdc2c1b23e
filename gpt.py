"""
A GPT in one file: the Transformer of the lecture "Let's build GPT: from scratch, in code, spelled out".

    python gpt.py                                train on Tiny Shakespeare, then print a sample
    python gpt.py --sample --prompt "ROMEO:"     let the best model so far go on writing
    python gpt.py --resume                       go on training after an interrupt
    python gpt.py --help                         every flag, with its reason

Read bigram.py first, then this from the top: all down to the line `running it` is the lecture, in order.
What a program needs around it (checkpoints, interrupts, several GPUs, the screen) stands below that line.
"""
import argparse
import csv
import io
import math
import os
import signal
import sys
import time
import warnings
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch
import torch.nn as nn
from torch.nn import functional as F

from data.text import BY_HAND, MANUAL, UserError, encode_text, find_text, vocabulary

# --------------------------------------------------------------------------------------------------
# hyperparameters


def opt(default, help, group=None, **limits):
    """A field of a Config: its default, the question it answers, and the limits that `check` holds it to."""
    return field(default=default, metadata=dict(help=help, group=group, limits=limits))


@dataclass
class Config:
    """The settings, each also a flag of the command line. The defaults are the lecture's full model."""
    n_layer: int = opt(6, "how many blocks stand on top of each other?", "model", least=1)
    n_head: int = opt(6, "how many heads of attention has a block?", least=1)
    n_embd: int = opt(384, "how many channels carry one token? (a multiple of n_head)", least=1)
    block_size: int = opt(256, "what is the maximum context length for predictions?", least=1)
    dropout: float = opt(0.2, "what share of the activations is dropped in training?", least=0, below=1)
    init_std: float = opt(0.02, "how far do initial weights spread? (0: PyTorch's way, as on video)", least=0)
    fused: bool = opt(True, "compute all heads at once? (--no-fused: the lecture's loop and random numbers)")

    batch_size: int = opt(64, "how many independent sequences run in parallel?", "training", least=1)
    max_iters: int = opt(5000, "how many steps of training?", least=0)
    eval_interval: int = opt(500, "after how many steps do we measure the loss again?", least=1)
    eval_iters: int = opt(200, "over how many batches of each split is the loss averaged?", least=1)
    learning_rate: float = opt(3e-4, "how large is a step?", least=0)
    warmup_iters: int = opt(0, "over how many steps does the learning rate rise from zero?", least=0)
    lr_decay_iters: int = opt(0, "by which step has it fallen straight to min_lr? (0: it stays)", least=0)
    min_lr: float = opt(0.0, "where does it fall to?", least=0)
    weight_decay: float = opt(0.01, "how hard are weights pulled to zero? (0.01 is AdamW's default)", least=0)
    beta2: float = opt(0.999, "how long does AdamW remember squared gradients?", least=0, below=1)
    grad_clip: float = opt(0.0, "the longest gradient that is let through (0: any)", least=0)
    seed: int = opt(1337, "which random numbers?", least=0)

    data: str = opt("", "which text file? (default: input.txt, downloaded when absent)", "data")

    @property
    def head_size(self):
        return self.n_embd // self.n_head


# --------------------------------------------------------------------------------------------------
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


def load_data(text, name, block_size, tokenizer=None):
    """ encode and split a text -> tokenizer, {"train": (N,), "val": (M,)}; UserError if it will not do """
    # here are all the unique characters that occur in this text
    chars = vocabulary(text)                                    # sorted(list(set(text)))
    tokenizer = tokenizer or Tokenizer(chars)
    if lacking := sorted(set(chars) - set(tokenizer.chars)):
        raise UserError(f"{name} has characters the model never saw, {''.join(lacking)!r}; take them out")
    # train and val splits; encode_text does what tokenizer.encode does, fast enough for a gigabyte
    data = torch.from_numpy(encode_text(text, tokenizer.stoi)) if chars else torch.empty(0)
    n = int(0.9 * len(data))                                    # first 90% will be train, rest val
    if min(n, len(data) - n) <= block_size:
        raise UserError(f"{name} is too short: of its {len(data):,} characters {n:,} are to train and "
                        f"{len(data) - n:,} to validate, and each must be more than block_size {block_size}; "
                        f"take {10 * block_size + 1:,} characters or more, or a smaller --block_size")
    return tokenizer, {"train": data[:n], "val": data[n:]}


def get_batch(data, config, device):
    """ one batch of inputs x and targets y, both (B, T): y is x one character later """
    ix = torch.randint(len(data) - config.block_size, (config.batch_size,))     # (B,) random places to start
    at = ix[:, None] + torch.arange(config.block_size)          # (B, 1) + (T,) -> (B, T)
    at = at.to(data.device)
    x, y = data[at], data[at + 1]
    return x.to(device).long(), y.to(device).long()


# --------------------------------------------------------------------------------------------------
# loss estimate


@torch.no_grad()
def estimate_loss(model, batch, eval_iters):
    """ one batch is noisy: the mean loss of each split over eval_iters of them; batch(split) -> x, y """
    out = {}
    model.eval()
    for split in ["train", "val"]:
        losses = [model(*batch(split))[1] for _ in range(eval_iters)]
        out[split] = torch.stack(losses).mean().item()
    model.train()
    return out


# --------------------------------------------------------------------------------------------------
# model


class Head(nn.Module):
    """ one head of self-attention: every position gathers from the positions up to its own """

    def __init__(self, config):
        super().__init__()
        self.key = nn.Linear(config.n_embd, config.head_size, bias=False)       # what do I contain?
        self.query = nn.Linear(config.n_embd, config.head_size, bias=False)     # what am I looking for?
        self.value = nn.Linear(config.n_embd, config.head_size, bias=False)     # what do I tell, if asked?
        tril = torch.tril(torch.ones(config.block_size, config.block_size))
        self.register_buffer("tril", tril, persistent=False)    # not a parameter, not saved
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        # x of shape (B, T, C), C = n_embd; the result of shape (B, T, hs), hs = head_size
        B, T, C = x.shape
        k = self.key(x)                                         # (B, T, hs)
        q = self.query(x)                                       # (B, T, hs)
        # affinities: scaled by the head size their variance is about 1, so that softmax does not saturate
        wei = q @ k.transpose(-2, -1) * k.shape[-1]**-0.5       # (B, T, hs) @ (B, hs, T) -> (B, T, T)
        wei = wei.masked_fill(self.tril[:T, :T] == 0, float("-inf"))    # the future stays hidden
        wei = F.softmax(wei, dim=-1)                            # each row sums to one
        wei = self.dropout(wei)
        v = self.value(x)                                       # (B, T, hs)
        return wei @ v                                          # (B, T, T) @ (B, T, hs) -> (B, T, hs)


class MultiHeadAttention(nn.Module):
    """ several heads of self-attention in parallel: several conversations about different things """

    def __init__(self, config):
        super().__init__()
        self.heads = nn.ModuleList([Head(config) for _ in range(config.n_head)])
        self.proj = nn.Linear(config.n_embd, config.n_embd)     # the way back to the residual stream
        self.dropout = nn.Dropout(config.dropout)
        self.fused = config.fused

    def forward(self, x):
        # x of shape (B, T, C)
        out = self.all_at_once(x) if self.fused else torch.cat([h(x) for h in self.heads], dim=-1)
        return self.dropout(self.proj(out))                     # (B, T, nh * hs) -> (B, T, C)

    def all_at_once(self, x):
        """ what the loop over heads computes, from the same weights: heads as a batch dimension, faster """
        # x of shape (B, T, C)
        B, T, C = x.shape
        layers = [h.query for h in self.heads] + [h.key for h in self.heads] + [h.value for h in self.heads]
        weight = torch.cat([layer.weight for layer in layers])  # (3 * nh * hs, C)
        qkv = F.linear(x, weight).view(B, T, 3, len(self.heads), -1)    # (B, T, 3, nh, hs)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)                    # three of (B, nh, T, hs)
        p = self.heads[0].dropout.p if self.training else 0.0
        # scale by hs**-0.5, mask the future, softmax, dropout, @ v: the whole of Head.forward
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        return out.transpose(1, 2).reshape(B, T, -1)            # (B, nh, T, hs) -> (B, T, nh * hs)


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
    """ tokens and positions, through the blocks, to a score for every character that could come next """

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
        tok_emb = self.token_embedding_table(idx)               # (B, T, C): what stands there
        pos_emb = self.position_embedding_table(torch.arange(T, device=idx.device))  # (T, C): where it stands
        x = tok_emb + pos_emb                                   # (B, T, C)
        x = self.blocks(x)                                      # (B, T, C)
        x = self.ln_f(x)                                        # (B, T, C)
        logits = self.lm_head(x)                                # (B, T, vocab_size)

        if targets is None:
            loss = None
        else:
            B, T, C = logits.shape
            logits = logits.view(B*T, C)                        # cross_entropy wants (N, C) and (N,)
            targets = targets.view(B*T)
            loss = F.cross_entropy(logits, targets)
        return logits, loss

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, each=None):
        """
        idx (B, T) of tokens -> (B, T + max_new_tokens), each new token drawn from what the model predicts.
        A temperature below 1 sharpens, 0 takes the likeliest; top_k keeps the k likeliest; each is called
        with every new column (B, 1) as it comes. ValueError: tokens outside the vocabulary, or bad settings.
        """
        if idx.numel() == 0 or idx.min() < 0 or idx.max() >= self.lm_head.out_features:
            raise ValueError(f"tokens must be one or more, each in 0..{self.lm_head.out_features - 1}")
        if not 0 <= temperature < math.inf or (top_k is not None and top_k < 1):
            raise ValueError(f"temperature {temperature} must be 0 or more, and top_k {top_k} at least 1")
        was_training = self.training
        self.eval()                                             # no dropout while writing
        try:
            for _ in range(max_new_tokens):
                idx_cond = idx[:, -self.block_size:]            # positions beyond have no embedding
                logits, loss = self(idx_cond)
                logits = logits[:, -1, :]                       # the last time step: (B, C)
                if top_k is not None:
                    least = torch.topk(logits, min(top_k, logits.shape[-1])).values[:, -1:]  # (B, 1)
                    logits = logits.masked_fill(logits < least, float("-inf"))
                if temperature < 1e-6:                          # 0, or so little that dividing would overflow
                    idx_next = logits.argmax(dim=-1, keepdim=True)      # (B, 1)
                else:
                    probs = F.softmax(logits / temperature, dim=-1)     # (B, C)
                    idx_next = torch.multinomial(probs, num_samples=1)  # (B, 1): drawn, not the likeliest
                idx = torch.cat((idx, idx_next), dim=1)         # (B, T + 1)
                if each:
                    each(idx_next)
        finally:
            self.train(was_training)
        return idx


# --------------------------------------------------------------------------------------------------
# training


def learning_rate(step, config):
    """ constant, unless the config has it rise at first and then fall in a straight line to min_lr """
    if step < config.warmup_iters:
        return config.learning_rate * (step + 1) / config.warmup_iters
    if not config.lr_decay_iters:
        return config.learning_rate
    left = (config.lr_decay_iters - step) / max(1, config.lr_decay_iters - config.warmup_iters)
    return config.min_lr + max(0.0, left) * (config.learning_rate - config.min_lr)


def train(model, data, config, run=None):
    """
    The training loop, for any model with forward(idx, targets) -> logits, loss; data as from load_data.
    `run` watches over it: it hands out the batches, prints and saves. Returns the reports, a dictionary each.
    """
    run = run or Run(model, data, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, config.beta2),
                                  weight_decay=config.weight_decay, fused=config.fused)
    model.train()
    for step in run.turns(optimizer):                           # 0, 1, .. max_iters
        # every once in a while evaluate the loss on train and val sets
        if step % config.eval_interval == 0 or step == config.max_iters:
            with run.precision():                               # bfloat16, on a GPU that has it
                losses = estimate_loss(model, run.batch, config.eval_iters)
            run.report(losses)
        if step == config.max_iters:
            break                                               # the last turn only measures
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


# --------------------------------------------------------------------------------------------------
# running it

SHAPE = ("n_layer", "n_head", "n_embd", "block_size")           # what the weights of a checkpoint fix
SIZES = {
    "lecture": {},
    "notebook": dict(n_layer=4, n_head=4, n_embd=64, block_size=32, dropout=0.0, batch_size=16,
                     learning_rate=1e-3),
    "laptop": dict(n_layer=3, n_head=4, n_embd=112, block_size=64, dropout=0.0, init_std=0.05, batch_size=16,
                   max_iters=4200, eval_interval=500, eval_iters=40, learning_rate=3e-3, warmup_iters=200,
                   lr_decay_iters=4200, min_lr=1.5e-4, weight_decay=0.1, beta2=0.995, grad_clip=1.0),
}
RECORD = ("step", "train", "val", "learning_rate", "tokens", "seconds")         # the columns of loss.csv
FILES = ("best.pt", "last.pt", "loss.csv", "loss.png", "attention.png")         # what a run leaves in --out
RANK = int(os.environ.get("RANK", 0))                           # which of several processes: torchrun says
WORLD = int(os.environ.get("WORLD_SIZE", 1))                    # of how many; process 0 speaks and writes


@dataclass
class Flags(Config):
    """A Config and, beside it, how this one run is to go. A checkpoint keeps the Config alone."""
    init_from: str = opt("", "start from the weights and vocabulary of which checkpoint? (fine-tuning)")

    size: str = opt("auto", "which set of values? (auto: lecture on CUDA, laptop elsewhere)", "running",
                    among=("auto", *SIZES))
    device: str = opt("auto", "where? cpu, cuda, cuda:1, mps (auto: the fastest that is here)")
    dtype: str = opt("auto", "which numbers? (auto: bfloat16 on CUDA where it can, else float32)",
                     among=("auto", "float32", "bfloat16"))
    compile: bool = opt(None, "let torch.compile fuse the model? (default: on CUDA; a CPU gains nothing)")
    out: str = opt("out", "which folder takes the checkpoints, the record and the pictures?")
    resume: bool = opt(False, "go on where the run in --out stopped?")

    sample: bool = opt(False, "train nothing, write text with the best model in --out?", "sampling")
    prompt: str = opt(None, "how does the text begin? (implies --sample; - reads standard input)")
    max_new_tokens: int = opt(500, "how many characters to write?", least=0)
    temperature: float = opt(1.0, "how daring? (0: always the likeliest character)", least=0)
    top_k: int = opt(None, "choose among how many of the likeliest? (default: all)", least=1)
    num_samples: int = opt(1, "how many texts?", least=1)
    sample_seed: int = opt(None, "which random numbers draw it? (default: new ones each time)", least=0)
    attention: str = opt(None, "draw where each head looks, in this text, as attention.png in --out")


class RunFailed(RuntimeError):
    """The run cannot go on; the text is one sentence that says why, and what is left."""


class Interrupted(Exception):
    """Ctrl+C or SIGTERM asked for the end; args[0] is the signal's number."""


def say(text, file=None):
    if RANK == 0:
        if sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)      # the status line makes room
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
        if RANK == 0:                                           # print may not be called from here
            os.write(sys.stderr.fileno(), b"\nstopping when this step is done; once more stops at once\n")

    def check(self):
        asked = self.asked
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            # all processes stop at the same step
            asked = int(total(torch.tensor(asked), "MAX"))
        if asked:
            raise Interrupted(asked)


def total(tensor, op="SUM"):
    """The sum (or what op says) of a CPU tensor over all processes."""
    torch.distributed.all_reduce(tensor, getattr(torch.distributed.ReduceOp, op))
    return tensor


class Run:
    """
    What happens around the training loop: the batches, the screen, the record, the checkpoints. Files go to
    the folder `out`, if there is one; `extra` goes into checkpoints beside the weights; `start` is one to go
    on from. `stepper` is the model as steps call it, compiled or distributed: it shares the weights of
    `model`, and that one is measured and saved.
    """

    def __init__(self, model, data, config, out=None, extra=None, start=None, stepper=None, dtype=None,
                 signals=None):
        self.model, self.data, self.config, self.out, self.extra = model, data, config, out, extra or {}
        self.stepper = model if stepper is None else stepper    # a compiled model has no truth value
        self.dtype, self.signals, self.start = dtype, signals, start
        self.device = next(model.parameters()).device
        self.step, self.history, self.seconds = 0, [], 0.0
        if start:                                               # its last report is made once more
            self.step, self.seconds = start["step"], start["seconds"]
            self.history = [row for row in start["history"] if row["step"] < self.step]
        self.loss, self.unread = None, []

    # what the loop calls

    def turns(self, optimizer):
        """The numbers of the turns to take. Before each one, note what an exact resume would need."""
        self.optimizer = optimizer
        if self.start:
            try:
                optimizer.load_state_dict(self.start["optimizer"])
                set_random_state(self.start["random"])
            except Exception as error:
                raise UserError(f"last.pt is damaged ({type(error).__name__}); use --init_from") from None
        config = self.config
        reports = 1 + -(-config.max_iters // config.eval_interval)
        self.work = 3 * config.max_iters + 2 * config.eval_iters * reports   # a step counts as three forwards
        self.done = self.done_before = int(self.work * self.step / max(1, config.max_iters))
        self.begin = self.seen = time.monotonic()
        self.next_status, self.stepping, self.step_seconds, self.tokens = self.begin + 0.5, False, 0.0, 0
        for self.step in range(self.step, config.max_iters + 1):
            self.random = random_state()
            yield self.step

    def batch(self, split):
        """This process's rows of the next batch. An interrupt ends the run here, between two steps."""
        if self.signals:
            self.signals.check()
        self.tick()
        x, y = get_batch(self.data[split], self.config, self.device)
        rows = len(x) // WORLD
        mine = slice(RANK * rows, (RANK + 1) * rows)
        return x[mine], y[mine]

    def precision(self):
        return torch.autocast(self.device.type, self.dtype) if self.dtype else nullcontext()

    def forward(self, x, y):
        with self.precision():
            return self.stepper(x, y)

    def watch(self, loss):
        """Stop at a loss that is no number. On a GPU twenty are read at a time: each read makes it wait."""
        self.unread.append((self.step, loss.detach()))
        self.tokens += self.config.batch_size * self.config.block_size
        if self.device.type == "cpu" or len(self.unread) == 20:
            self.read_losses()

    def report(self, losses):
        """Save, record and print what was measured at the top of this turn."""
        self.read_losses()
        if WORLD > 1:
            losses = {split: total(torch.tensor(loss)).item() / WORLD for split, loss in losses.items()}
        self.must_be_finite(self.step, *losses.values())
        tokens = self.step * self.config.batch_size * self.config.block_size
        rate = learning_rate(self.step, self.config)
        values = (self.step, losses["train"], losses["val"], rate, tokens, self.elapsed())
        self.history.append(dict(zip(RECORD, values)))
        if self.best() is self.history[-1]:
            self.save("best.pt")
        self.save("last.pt")
        self.save_record()
        more = self.speed()
        if self.step == 0 and self.extra:
            vocab_size = len(self.extra["chars"])
            more = f"guessing scores ln({vocab_size}) = {math.log(vocab_size):.4f}"
        say(f"step {self.step}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f} ({more})")

    # what that takes

    def read_losses(self):
        unread, self.unread = self.unread, []
        for step, loss in unread:
            self.loss = loss.item()
            self.must_be_finite(step, self.loss)

    def best(self):
        return min(self.history, key=lambda row: row["val"])

    def elapsed(self):
        return self.seconds + time.monotonic() - self.begin

    def must_be_finite(self, step, *losses):
        for loss in losses:
            if not math.isfinite(loss):
                raise RunFailed(f"the loss is {loss} at step {step}; try a lower --learning_rate, or "
                                "--grad_clip 1 (the checkpoints are from before)")

    def speed(self):
        seconds_each = (time.monotonic() - self.begin) / max(1, self.done - self.done_before)
        left = max(0, int((self.work - self.done) * seconds_each))
        rate = f"{self.tokens / self.step_seconds:,.0f} tokens/s, " if self.step_seconds else ""
        return f"{rate}{left // 3600}:{left // 60 % 60:02}:{left % 60:02} left"

    def tick(self):
        """Keep the time, and show it: a moving line on a terminal, now and then a plain one elsewhere."""
        now, moving = time.monotonic(), sys.stderr.isatty()
        if self.stepping:
            self.step_seconds += now - self.seen
        self.seen, self.stepping = now, self.model.training
        self.done += 3 if self.stepping else 1
        if now > self.next_status and RANK == 0:
            self.next_status = now + (0.2 if moving else 10)
            known = self.stepping and self.loss is not None
            what = f"loss {self.loss:.4f}" if known else "measuring the loss"
            text = f"step {self.step} of {self.config.max_iters}, {what}, {self.speed()}"
            begin, end = ("\r", "\x1b[K") if moving else ("", "\n")
            print(begin + text, end=end, file=sys.stderr, flush=True)

    def save(self, name):
        """Write best.pt (a model to sample from) or last.pt (with all it takes to go on exactly)."""
        if self.out and RANK == 0:
            state = dict(self.extra, format=1, config=settings(self.config), step=self.step,
                         history=self.history, model=self.model.state_dict(), seconds=self.elapsed())
            if name == "last.pt":
                state.update(optimizer=self.optimizer.state_dict(), random=self.random)
            content = io.BytesIO()
            torch.save(state, content)
            write_whole(self.out / name, content.getbuffer())

    def save_record(self):
        if self.out and RANK == 0:
            content = io.StringIO(newline="")
            table = csv.DictWriter(content, RECORD, lineterminator="\n")
            table.writeheader()
            table.writerows(self.history)
            write_whole(self.out / "loss.csv", content.getvalue().encode())


def random_state():
    """Where the random numbers stand, as plain tensors."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"cpu": torch.get_rng_state(), "cuda": cuda}


def set_random_state(state):
    torch.set_rng_state(state["cpu"])
    if len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


# ---- files


def write_whole(path, content):
    """Write a file so that at every moment either the old or the new one stands there whole."""
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        raise RunFailed(f"cannot write {path}: {error.strerror}; what stood there is whole; make room, "
                        "then go on with --resume") from None


def claim(out):
    """Make the folder of a run and lock it until this process ends; UserError when another run holds it."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = open(out / ".lock", "w")
    except OSError as error:
        raise UserError(f"cannot write to --out {out}: {error.strerror}; name another folder") from None
    try:
        if os.name == "nt":
            import msvcrt
            msvcrt.locking(lock.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise UserError(f"another run is writing to {out}; wait for it, or name another --out") from None
    return lock


def move_aside(out):
    """An earlier run in this folder gets a folder of its own."""
    if earlier := [out / name for name in FILES if (out / name).exists()]:
        number = 1
        while (aside := out / f"old-{number}").exists():
            number += 1
        aside.mkdir()
        for path in earlier:
            path.rename(aside / path.name)
        note(f"the earlier run in {out} is now in {aside}")


def settings(config):
    """What of all flags belongs to a run wherever it goes on: the fields of Config, as plain values."""
    return {f.name: getattr(config, f.name) for f in fields(Config)}


def read_checkpoint(path, given=(), base=None):
    """
    (checkpoint, config, model) of a file, on the CPU. The file fixes the vocabulary and the model's shape;
    other settings are those of `base` (without one, the file's) and, above them, of the flags `given`. Bare
    weights saved from the lecture's own script will do as well; `chars` is then None.
    """
    if not Path(path).exists():
        raise UserError(f"there is no {path}; train first (python gpt.py), or name a run's folder with --out")
    try:
        with warnings.catch_warnings():                         # it warns of what it then refuses
            warnings.simplefilter("ignore")
            checkpoint = torch.load(path, map_location="cpu", weights_only=True)  # plain types, no code
        if "lm_head.weight" in checkpoint:
            checkpoint = {"format": 1, "config": {}, "chars": None, "model": checkpoint}
        weights = {name: w for name, w in checkpoint["model"].items() if not name.endswith(".tril")}
        vocab_size, n_embd = weights["token_embedding_table.weight"].shape
        shape = {"n_layer": sum(name.endswith("ln1.weight") for name in weights), "n_embd": n_embd,
                 "n_head": n_embd // len(weights["blocks.0.sa.heads.0.key.weight"]),
                 "block_size": len(weights["position_embedding_table.weight"])}
        known = {k: v for k, v in checkpoint["config"].items() if k in settings(Config)}
        config = check(Flags(**{**(base or known), **dict(given), **shape}))
        model = GPTLanguageModel(config, vocab_size)
        model.load_state_dict(weights)
        if checkpoint["format"] != 1 or len(checkpoint["chars"] or range(vocab_size)) != vocab_size:
            raise ValueError("of another format")
    except Exception as error:                                  # damaged or foreign, in any of many ways
        raise UserError(f"{path} is no checkpoint of gpt.py, or it is damaged ({type(error).__name__}); "
                        "name another, or train again") from None
    for name in SHAPE:
        if name in given and given[name] != shape[name]:
            raise UserError(f"--{name} {given[name]} contradicts {path}, where it is {shape[name]}; "
                            "leave the flag out, or train from the beginning")
    return checkpoint, config, model


def load(path="out/best.pt", device="auto", given=()):
    """The model of a checkpoint, ready to generate, and its tokenizer; UserError if the file will not do."""
    checkpoint, config, model = read_checkpoint(path, given)
    if checkpoint["chars"] is None:
        raise UserError(f"{path} has weights and no vocabulary; give it to --init_from, with its text")
    return model.to(pick_device(device)).eval(), Tokenizer(checkpoint["chars"])


# ---- flags and machines


def make_parser(config_class, doc, sizes):
    """A flag for every field, with both spellings (--n_layer, --n-layer), its question and its defaults."""
    parser = argparse.ArgumentParser(usage="python %(prog)s [flags]   (--help lists them)", description=doc,
                                     formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
                                     argument_default=argparse.SUPPRESS)
    for f in fields(config_class):
        if f.metadata["group"]:
            group = parser.add_argument_group(f.metadata["group"])
        defaults = [f"{name} {values.get(f.name, f.default)}" for name, values in sizes.items()]
        if not any(f.name in values for values in sizes.values()):
            defaults = [] if f.default in (None, "") or f.type is bool else [str(f.default)]
        how = {"help": f.metadata["help"] + (f" [{', '.join(defaults)}]" if defaults else "")}
        if f.type is bool:
            how["action"] = argparse.BooleanOptionalAction
        elif choices := f.metadata["limits"].get("among"):
            how["choices"] = choices
        else:
            how.update(type=f.type, metavar={int: "N", float: "X", str: "TEXT"}[f.type])
        group.add_argument(*dict.fromkeys([f"--{f.name}", f"--{f.name.replace('_', '-')}"]), **how)
    return parser


def check(config):
    """Hold every number to its limits; UserError names the first that is outside."""
    for f in fields(config):
        value, limits = getattr(config, f.name), f.metadata["limits"]
        if value is None or "least" not in limits:
            continue
        least, below = limits["least"], limits.get("below", math.inf if f.type is float else 2**63)
        if not least <= value < below:                          # "not", since nothing is true of nan
            raise UserError(f"--{f.name} {value} is out of range; it takes from {least} to under {below}")
    return config


def pick_device(name):
    """ "auto" -> the fastest device that is here; UserError for one that is not """
    here = ["cpu"]
    if torch.backends.mps.is_available():
        here = ["mps", "cpu"]
    if torch.cuda.is_available():
        here = [f"cuda:{i}" for i in range(torch.cuda.device_count())] + here
    name = {"auto": here[0], "cuda": "cuda:0"}.get(name, name)
    if name not in here:
        raise UserError(f"--device {name} does not work here with torch {torch.__version__}; take one of: "
                        f"{', '.join(here)}")
    return name


def pick_dtype(wanted, device):
    """The type for autocast, bfloat16 or None for float32 throughout; UserError if it cannot be had."""
    cuda = device.startswith("cuda")
    able = device == "cpu" or cuda and torch.cuda.is_bf16_supported(including_emulation=False)
    if wanted == "bfloat16" and not able:
        raise UserError(f"--dtype bfloat16 does not work on {device}; leave it out, or take --dtype float32")
    if wanted == "auto" and cuda and not able:
        note(f"{device} has no bfloat16, so this runs in float32, more slowly")
    return torch.bfloat16 if able and (wanted == "bfloat16" or wanted == "auto" and cuda) else None


def pick_size(given, device):
    """The settings of a fresh run from the flags given, and a line that says which size it is and why."""
    size = given.get("size", "auto")
    if size != "auto":
        why = f"{size}, as asked"
    elif all(name in given for name in SHAPE):
        size, why = "lecture", "your own, by the flags; what they leave open is as in the lecture"
    else:
        size = "lecture" if device.startswith("cuda") else "laptop"
        why = f"{size}, since there is {'a' if size == 'lecture' else 'no'} CUDA GPU; or choose: --size " \
              + ", ".join(SIZES)
    return check(Flags(**{**SIZES[size], **given})), why


def make_stepper(model, config, device, dtype):
    """The model as training steps call it: compiled where that pays, one of several under torchrun."""
    stepper = model
    if config.compile or config.compile is None and device.startswith("cuda"):
        note("compiling the model, which can take a minute (--no-compile: without)")
        random = random_state()
        try:                                                    # a trial step, since much fails only then
            stepper = torch.compile(model)
            shape = (config.batch_size // WORLD, config.block_size)
            tokens = torch.zeros(shape, dtype=torch.long, device=device)
            with torch.autocast(torch.device(device).type, dtype) if dtype else nullcontext():
                logits, loss = stepper(tokens, tokens)
            loss.backward()
        except Exception as error:
            note(f"torch.compile does not work here ({type(error).__name__}), so this runs without it")
            stepper = model
        model.zero_grad(set_to_none=True)
        set_random_state(random)
    if WORLD > 1:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)      # newer torch names it otherwise
            stepper = nn.parallel.DistributedDataParallel(stepper, broadcast_buffers=False)
    return stepper


# ---- text and pictures


def encode_prompt(text, tokenizer):
    if lacking := sorted(set(text) - set(tokenizer.chars)):
        known = "".join(tokenizer.chars)
        raise UserError(f"the model never saw {''.join(lacking)!r}; take only its characters, {known!r}")
    return tokenizer.encode(text)


def write_text(model, tokenizer, config, seed, signals):
    """Print config.num_samples texts, each character as soon as it is drawn."""
    prompt = sys.stdin.read() if config.prompt == "-" else config.prompt or ""
    idx = torch.tensor([encode_prompt(prompt, tokenizer) or [0]])       # (1, T); without one, a newline

    def each(idx_next):
        signals.check()
        print(tokenizer.decode(idx_next[0].tolist()), end="", flush=True)

    torch.manual_seed(seed)
    for number in range(config.num_samples):
        print("\n---\n" if number else "", tokenizer.decode(idx[0].tolist()), sep="", end="", flush=True)
        model.generate(idx.to(next(model.parameters()).device), config.max_new_tokens, config.temperature,
                       config.top_k, each)
    print(flush=True)


def new_figure(width, height):
    """An empty picture; None, and one sentence, where the extra that draws it is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return note('no picture, since matplotlib is not installed: pip install -e ".[plot]"')
    return Figure((width, height), layout="constrained")


def save_figure(figure, path):
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=130)
    write_whole(path, content.getbuffer())
    note(f"picture: {path}")


def draw_loss(history, best, vocab_size, path):
    """Train and val loss step by step, with the best step, and what guessing scores."""
    if figure := new_figure(7, 4):
        axes = figure.subplots()
        for split in ("train", "val"):
            axes.plot([row["step"] for row in history], [row[split] for row in history], ".-", label=split)
        axes.axhline(math.log(vocab_size), color="gray", linestyle="--", label=f"guessing: ln({vocab_size})")
        axes.plot(best["step"], best["val"], "k*", label=f"best: {best['val']:.4f} at step {best['step']}")
        axes.set(xlabel="step", ylabel="loss (nats per character)")
        axes.legend()
        save_figure(figure, path)


def draw_attention(model, tokenizer, text, path):
    """One panel for each layer and head: at which earlier characters (columns) each position (row) looks."""
    tokens = encode_prompt(text, tokenizer)[-model.block_size:]
    if not tokens:
        raise UserError("--attention takes a text of one character or more")
    maps = []
    for block in model.blocks:
        block.sa.fused = False                                  # the loop over heads lets us look inside:
        for head in block.sa.heads:                             # what goes into dropout is wei, (1, T, T)
            head.dropout.register_forward_hook(lambda module, args, output: maps.append(args[0][0].tolist()))
    with torch.no_grad():
        model(torch.tensor([tokens], device=next(model.parameters()).device))
    rows, columns = len(model.blocks), len(model.blocks[0].sa.heads)
    side = max(2.2, 0.12 * len(tokens))                         # inches, so that the characters stay legible
    if figure := new_figure(side * columns, side * rows):
        labels = [{" ": "␣", "\n": "↵"}.get(ch, ch) for ch in tokenizer.decode(tokens)]
        for number, axes in enumerate(figure.subplots(rows, columns, squeeze=False).flat):
            axes.imshow(maps[number], cmap="Blues", vmin=0, vmax=1)
            axes.set_title(f"layer {number // columns + 1}, head {number % columns + 1}", fontsize=8)
            axes.set_xticks(range(len(labels)), labels, fontsize=7)
            axes.set_yticks(range(len(labels)), labels, fontsize=7)
            axes.tick_params(length=0, pad=1)
        save_figure(figure, path)


# ---- the program


def sample_or_draw(flags, given):
    """--sample and --attention: use a model that is there already."""
    path = flags.init_from or Path(flags.out) / "best.pt"
    model, tokenizer = load(path, flags.device, given)
    if flags.attention is not None:
        Path(flags.out).mkdir(parents=True, exist_ok=True)
        draw_attention(model, tokenizer, flags.attention, Path(flags.out) / "attention.png")
    else:
        seed = torch.seed() % 2**32 if flags.sample_seed is None else flags.sample_seed
        note(f"{path}, --sample_seed {seed}")
        write_text(model, tokenizer, flags, seed, Signals())


def get_text(flags, start):
    """The tokenizer, the data and the name of the text; what a checkpoint has learned must fit."""
    fallback = start and start.get("text") == MANUAL and not flags.data
    found = [find_text(MANUAL if fallback else flags.data)] if RANK == 0 else [("", None)]
    if WORLD > 1:                                               # process 0 fetches, the others come after
        names = [found[0][0]]
        torch.distributed.broadcast_object_list(names)
        found = found if RANK == 0 else [find_text(MANUAL if names[0] == MANUAL else flags.data)]
    (name, text), chars = found[0], start and start["chars"]
    tokenizer, data = load_data(text, name, flags.block_size, Tokenizer(chars) if chars else None)
    length = len(data["train"]) + len(data["val"])
    learned = len(start["model"]["lm_head.weight"]) if start else len(tokenizer.chars)
    if learned != len(tokenizer.chars):                         # bare weights lack their vocabulary
        raise UserError(f"{flags.init_from} was trained on {learned} distinct characters and {name} has "
                        f"{len(tokenizer.chars)}; give the text that these weights learned with --data")
    if flags.resume and length != start["length"]:
        raise UserError(f"{name} has {length:,} characters, and this run learned from {start['text']} with "
                        f"{start['length']:,}; for another text there is --init_from {flags.out}/best.pt")
    return tokenizer, data, name, length


def train_and_sample(flags, why, given):
    """A whole run: the text, the model, the training, a sample, and where everything is."""
    out, start, model = Path(flags.out), None, None
    if flags.resume or flags.init_from:
        path = flags.init_from or out / "last.pt"
        start, flags, model = read_checkpoint(path, given, None if flags.resume else settings(flags))
        why = f"that of {path}"
        if flags.resume and "optimizer" not in start:
            raise UserError(f"{path} is a model, not a run to go on with; use --init_from {path}")
        if flags.resume and start["step"] > flags.max_iters:
            raise UserError(f"the run in {out} is at step {start['step']} already; take a larger --max_iters")
    if flags.batch_size % WORLD:
        raise UserError(f"{WORLD} processes cannot share --batch_size {flags.batch_size}; take a multiple")
    device = flags.device
    if WORLD > 1 and torch.cuda.is_available() and device in ("auto", "cuda"):
        device = f"cuda:{os.environ['LOCAL_RANK']}"             # a GPU for each process
    elif WORLD > 1 and device == "auto":
        device = "cpu"
    device = pick_device(device)
    cuda, dtype = device.startswith("cuda"), pick_dtype(flags.dtype, device)
    if cuda:
        torch.cuda.set_device(device)
    if WORLD > 1:
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    lock = claim(out) if RANK == 0 else None

    tokenizer, data, name, length = get_text(flags, start)
    torch.manual_seed(flags.seed)
    model = (model or GPTLanguageModel(flags, len(tokenizer.chars))).to(device)
    threads = f" ({torch.get_num_threads()} threads)" if device == "cpu" else ""
    processes = f", {WORLD} processes" if WORLD > 1 else ""
    numbers = "bfloat16" if dtype else "float32"
    say(f"device: {device}{threads}{processes}, {numbers}, torch {torch.__version__}")
    say(f"text:   {name}, {length:,} characters, a vocabulary of {len(tokenizer.chars)}")
    say(f"model:  {sum(p.numel() for p in model.parameters()):,} parameters: n_layer {flags.n_layer}, n_head "
        f"{flags.n_head}, n_embd {flags.n_embd}, block_size {flags.block_size}")
    say(f"size:   {why}")
    if flags.lr_decay_iters not in (0, flags.max_iters):
        note(f"notice: the learning rate falls until step {flags.lr_decay_iters}, the run ends at "
             f"{flags.max_iters}; --lr_decay_iters {flags.max_iters} would fit it")
    if cuda:
        data = {split: tokens.to(device) for split, tokens in data.items()}    # bytes: small beside the model
        if WORLD > 1:
            torch.cuda.manual_seed(flags.seed + RANK)           # dropout of its own for each process
    if RANK == 0 and not flags.resume:
        move_aside(out)
    signals = Signals()
    run = Run(model, data, flags, out, {"chars": "".join(tokenizer.chars), "text": name, "length": length},
              start if flags.resume else None, make_stepper(model, flags, device, dtype), dtype, signals)
    try:
        train(model, data, flags, run)
    except (Interrupted, OSError):                      # the second: whoever read our output left
        run.save("last.pt")
        note(f"stopped at step {run.step} and saved; to go on: {command(flags, '--resume')}")
        raise
    finally:
        if WORLD > 1:
            torch.distributed.destroy_process_group()
    if RANK:
        os._exit(0)                                             # no teardown: its threads may abort
    best = run.best()
    draw_loss(run.history, best, len(tokenizer.chars), out / "loss.png")
    say(f"best:   val loss {best['val']:.4f} at step {best['step']}; that model writes:")
    model.load_state_dict(read_checkpoint(out / "best.pt")[2].state_dict())
    seed = flags.seed if flags.sample_seed is None else flags.sample_seed
    write_text(model, tokenizer, flags, seed, signals)
    if name == MANUAL:
        note(f"notice: it learned {MANUAL}, not Shakespeare. {BY_HAND}")
    say(f"\nfiles:  in {out}: best.pt (the best model), last.pt (to go on), loss.csv (the record)")
    say(f"write:  {command(flags, '--sample')}")
    longer = 2 * flags.max_iters or 1000
    decay = f" --lr_decay_iters {longer}" if flags.lr_decay_iters else ""       # up again, then down
    say(f"go on:  {command(flags, f'--resume --max_iters {longer}{decay}')}")
    lock.close()                                                    # held until here


def command(flags, words):
    return f"python gpt.py {words}" + (f" --out {flags.out}" if flags.out != "out" else "")


def main(argv=None):
    parser = make_parser(Flags, __doc__, SIZES)
    given = vars(parser.parse_args(argv))
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:                          # closed by whoever started us
            setattr(sys, name, open(os.devnull, mode))
        getattr(sys, name).reconfigure(errors="replace")        # a console may lack a character
    try:
        # what can be said at once is said before the text, the model or the network is touched
        flags, why = pick_size(given, pick_device(given.get("device", "auto")))
        if given.get("size", "auto") != "auto" and flags.resume:
            raise UserError("--size is for a new run, and --resume goes on with its own; leave one out")
        if flags.n_embd % flags.n_head and not (flags.resume or flags.init_from):
            raise UserError(f"--n_embd {flags.n_embd} is not a multiple of --n_head {flags.n_head}; take "
                            f"--n_embd {(flags.n_embd // flags.n_head or 1) * flags.n_head}")
        if flags.sample or flags.prompt is not None or flags.attention is not None:
            sample_or_draw(flags, given)
        else:
            train_and_sample(flags, why, given)
    except UserError as error:
        if int(os.environ.get("LOCAL_RANK", 0)):                # one voice a machine: torchrun ends all with
            time.sleep(2)                                       # the first, which must have spoken by then
            sys.exit(2)
        parser.error(str(error))
    except RunFailed as error:
        parser.exit(1, f"gpt.py: {error}\n")
    except Interrupted as stopped:
        sys.exit(128 + stopped.args[0])
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):              # that one: whoever read our output has left
            parser.exit(1, f"gpt.py: cannot go on: {error}\n")
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error):
            parser.exit(1, "gpt.py: out of memory; lower --batch_size first, then --block_size or --n_embd, "
                           "or take --size laptop\n")
        if WORLD == 1:
            raise
        parser.exit(1, f"gpt.py: process {RANK} of {WORLD} cannot go on: {str(error).splitlines()[0]}\n")


if __name__ == "__main__":
    main()
