"""
A GPT in one file: the Transformer of the lecture "Let's build GPT: from scratch, in code, spelled out".

    python gpt.py                                train on Tiny Shakespeare, then print a sample
    python gpt.py --sample --prompt "ROMEO:"     write with the best model so far
    python gpt.py --resume                       continue after an interrupt
    python gpt.py --help                         every flag, and the question it answers

Read bigram.py first, then this file from the top: everything down to the line `running it` is the lecture, in
its order. Without a GPU the small size `laptop` is trained; the full model of Config is --size lecture.
"""
import hashlib
import io
import math
import os
import shlex
import sys
import time
import warnings
from contextlib import nullcontext, suppress
from dataclasses import dataclass, fields
from pathlib import Path

if "OMP_WAIT_POLICY" not in os.environ:  # must come before torch: its idle threads then free the CPU sooner
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")
import torch
import torch.nn as nn
from torch.nn import functional as F

from data.errors import RunFailed, UserError, explain, plain_errors, run_script
from data.files import claimed, is_full, move_aside, write_whole
from data.flags import check, make_parser, parse
from data.machine import pick_device, pick_dtype, random_state, set_random_state
from data.pictures import attention_maps, draw_attention, draw_loss
from data.processes import join, launched, leave, rank, world_size
from data.screen import Interrupted, Interrupts, Progress, clock, listed, note, say, show
from data.text import BY_HAND, MANUAL, check_length, decode_text, encode_text, find_text, read_text

# ---- settings


@dataclass
class Config:
    """ the lecture's full model; every line is also a flag, and its comment the help """
    # model
    n_layer: int = 6        # how many blocks, one after the other?
    n_head: int = 6         # how many heads of attention in each block?
    n_embd: int = 384       # how many channels for each token? (a multiple of n_head)
    block_size: int = 256   # how far back can the model look, in characters?
    dropout: float = 0.2    # what share of the activations is dropped in training?
    init_std: float = 0.02  # how widely do the initial weights spread? (0: PyTorch's default, as on screen)
    fused: bool = True      # all heads, and all weight updates, at once? (--no-fused: the lecture's loops)
    # training
    batch_size: int = 64         # how many sequences in one step?
    max_iters: int = 5000        # how many steps?
    eval_interval: int = 500     # how many steps from one measurement of the loss to the next?
    eval_iters: int = 200        # over how many batches of each split is it averaged?
    learning_rate: float = 3e-4  # how large is a step?
    warmup_iters: int = 0        # over how many steps does the learning rate rise? (a tenth of all at most)
    decay: bool = False          # does the learning rate then fall in a straight line, to zero at the end?
    weight_decay: float = 0.01   # how strongly are weights pulled towards zero?
    beta2: float = 0.999         # how slowly does AdamW forget the squares of old gradients?
    grad_clip: float = 0.0       # how large may the gradient's norm be? (0: no limit)
    seed: int = 1337             # which random numbers?
    # data
    data: str = ""  # which text file? (default: input.txt, downloaded if absent)

    @property
    def head_size(self):
        if self.n_embd % self.n_head:
            raise UserError(f"n_embd {self.n_embd} is not a multiple of n_head {self.n_head}; "
                            f"use n_embd {max(1, self.n_embd // self.n_head) * self.n_head}")
        return self.n_embd // self.n_head


# ---- data


class Tokenizer:
    """
    Characters to integers and back; the vocabulary is the characters of the text, sorted. A subword tokenizer
    (BPE) would say more per token ("Google" is one there, six here), but with tens of thousands of tokens.
    """

    def __init__(self, text):
        self.chars = sorted(list(set(text)))
        self.stoi = {ch: i for i, ch in enumerate(self.chars)}
        self.itos = {i: ch for i, ch in enumerate(self.chars)}

    def encode(self, s):
        """ string -> list of integers; KeyError for a character outside the vocabulary """
        return [self.stoi[ch] for ch in s]

    def decode(self, ids):
        """ list of integers -> string """
        return "".join([self.itos[i] for i in ids])


def split_data(text, tokenizer):
    """ text -> {"train": (N,), "val": (M,)}: nine tenths to learn from, the last tenth to check """
    data = torch.from_numpy(encode_text(text, tokenizer.stoi))  # tokenizer.encode(text), but fast
    n = int(0.9 * len(data))
    return {"train": data[:n], "val": data[n:]}


def get_batch(data, config, device):
    """ (x, y), both (B, T): y[b, t] follows x[b, :t+1], so each row is T examples, contexts of 1 to T """
    ix = torch.randint(len(data) - config.block_size, (config.batch_size,))  # (B,) random places to start
    places = ix[:, None] + torch.arange(config.block_size)  # (B, 1) + (T,) -> (B, T)
    places = places.to(data.device)                         # the text may be on the GPU already
    x, y = data[places], data[places + 1]
    return x.to(device).long(), y.to(device).long()  # kept as small integers, but an embedding wants long


@torch.no_grad()
def estimate_loss(model, batch, eval_iters):
    """ {"train": ..., "val": ...}: the mean loss over eval_iters batches; batch(split) gives x and y """
    out = {}
    model.eval()
    for split in ["train", "val"]:
        losses = []
        for _ in range(eval_iters):
            xb, yb = batch(split)
            logits, loss = model(xb, yb)
            losses.append(loss)
        out[split] = torch.stack(losses).mean().item()
    model.train()
    return out


# ---- model


class Head(nn.Module):
    """ one head: each position gathers from itself and its past, never from another row of the batch """

    def __init__(self, config):
        super().__init__()
        self.key = nn.Linear(config.n_embd, config.head_size, bias=False)    # what do I contain?
        self.query = nn.Linear(config.n_embd, config.head_size, bias=False)  # what am I looking for?
        self.value = nn.Linear(config.n_embd, config.head_size, bias=False)  # what do I tell, if asked?
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        # x of shape (B, T, C), C = n_embd; the result of shape (B, T, hs), hs = head_size
        B, T, C = x.shape
        k = self.key(x)    # (B, T, hs)
        q = self.query(x)  # (B, T, hs)
        # a sum of hs products has hs times their variance: divided by sqrt(hs), it leaves softmax soft
        wei = q @ k.transpose(-2, -1) * k.shape[-1]**-0.5  # (B, T, hs) @ (B, hs, T) -> (B, T, T)
        tril = torch.tril(torch.ones(T, T, device=x.device))  # row t: ones up to column t
        wei = wei.masked_fill(tril == 0, float("-inf"))  # the future stays hidden (without this: an encoder)
        wei = F.softmax(wei, dim=-1)                     # rows sum to one: equal affinities would average
        wei = self.dropout(wei)
        v = self.value(x)  # (B, T, hs)
        return wei @ v     # (B, T, T) @ (B, T, hs) -> (B, T, hs)


class MultiHeadAttention(nn.Module):
    """ several heads side by side, each with something else to look for; their results are concatenated """

    def __init__(self, config):
        super().__init__()
        self.heads = nn.ModuleList([Head(config) for _ in range(config.n_head)])
        self.proj = nn.Linear(config.n_embd, config.n_embd)  # the way back to the residual stream
        self.dropout = nn.Dropout(config.dropout)
        self.fused = config.fused

    def forward(self, x):
        # x of shape (B, T, C)
        out = self.all_at_once(x) if self.fused else torch.cat([h(x) for h in self.heads], dim=-1)
        return self.dropout(self.proj(out))  # (B, T, nh * hs) -> (B, T, C)

    def all_at_once(self, x):
        """ the same as the loop over heads, from the same weights, faster: heads are a batch dimension """
        # x of shape (B, T, C)
        B, T, C = x.shape
        layers = [h.query for h in self.heads] + [h.key for h in self.heads] + [h.value for h in self.heads]
        weight = torch.cat([layer.weight for layer in layers])        # (3 * nh * hs, C)
        qkv = F.linear(x, weight).view(B, T, 3, len(self.heads), -1)  # (B, T, 3, nh, hs)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)                          # three of (B, nh, T, hs)
        p = self.heads[0].dropout.p if self.training else 0.0
        # scale by hs**-0.5, mask the future, softmax, dropout, @ v: all of Head.forward
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        return out.transpose(1, 2).reshape(B, T, -1)  # (B, nh, T, hs) -> (B, T, nh * hs)


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
    """ first the tokens exchange (sa), then each thinks (ffwd); both results are added to x, the residual """

    def __init__(self, config):
        super().__init__()
        self.sa = MultiHeadAttention(config)
        self.ffwd = FeedForward(config)
        self.ln1 = nn.LayerNorm(config.n_embd)  # normalises each token over its channels
        self.ln2 = nn.LayerNorm(config.n_embd)

    def forward(self, x):
        # x of shape (B, T, C); the norm comes before each branch, unlike in the paper of 2017
        x = x + self.sa(self.ln1(x))
        x = x + self.ffwd(self.ln2(x))
        return x


class GPTLanguageModel(nn.Module):
    """ from tokens and their positions, through the blocks, to a score for each possible next character """

    def __init__(self, config, vocab_size):
        super().__init__()
        self.block_size = config.block_size
        self.token_embedding_table = nn.Embedding(vocab_size, config.n_embd)
        self.position_embedding_table = nn.Embedding(config.block_size, config.n_embd)
        self.blocks = nn.Sequential(*[Block(config) for _ in range(config.n_layer)])
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, vocab_size)
        if config.init_std:  # smaller weights than PyTorch's, so that the first loss is near ln(vocab_size)
            for module in self.modules():
                if isinstance(module, (nn.Linear, nn.Embedding)):
                    nn.init.normal_(module.weight, mean=0.0, std=config.init_std)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, idx, targets=None):
        # idx and targets of shape (B, T): tokens
        B, T = idx.shape
        tok_emb = self.token_embedding_table(idx)  # (B, T, C): which character it is
        pos_emb = self.position_embedding_table(torch.arange(T, device=idx.device))  # (T, C): where it is
        x = tok_emb + pos_emb     # (B, T, C)
        x = self.blocks(x)        # (B, T, C)
        x = self.ln_f(x)          # (B, T, C)
        logits = self.lm_head(x)  # (B, T, vocab_size)

        if targets is None:
            loss = None
        else:
            B, T, C = logits.shape
            logits = logits.view(B*T, C)  # cross_entropy wants (N, C) and (N,)
            targets = targets.view(B*T)
            loss = F.cross_entropy(logits, targets)
        return logits, loss

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None):
        """
        idx (B, T) of tokens -> (B, T + max_new_tokens), on the model's device, each new token drawn from the
        prediction. A temperature below 1 sharpens it, 0 takes the likeliest token; top_k draws among the k
        likeliest. ValueError for an empty idx, a token outside the vocabulary, or a setting out of range.
        """
        vocab_size = self.lm_head.out_features
        if idx.numel() == 0 or idx.min() < 0 or idx.max() >= vocab_size:
            raise ValueError(f"idx must contain tokens, each in 0..{vocab_size - 1}")
        if not 0 <= temperature < math.inf or (top_k is not None and top_k < 1):
            raise ValueError(f"temperature {temperature} must be 0 or more, and top_k {top_k} at least 1")
        idx = idx.to(self.lm_head.weight.device)
        was_training = self.training
        self.eval()  # no dropout while writing
        try:
            for _ in range(max_new_tokens):
                idx_cond = idx[:, -self.block_size:]  # later positions would have no embedding
                logits, loss = self(idx_cond)
                logits = logits[:, -1, :]  # the last time step: (B, C)
                if top_k is not None:
                    kth = torch.topk(logits, min(top_k, vocab_size)).values[:, -1:]  # (B, 1): the k-th best
                    logits = logits.masked_fill(logits < kth, float("-inf"))
                if temperature < 1e-6:  # 0, or so close to it that the division would overflow
                    idx_next = logits.argmax(dim=-1, keepdim=True)  # (B, 1)
                else:
                    probs = F.softmax(logits / temperature, dim=-1)     # (B, C)
                    idx_next = torch.multinomial(probs, num_samples=1)  # (B, 1): drawn, not the likeliest
                idx = torch.cat((idx, idx_next), dim=1)                 # (B, T + 1)
        finally:
            self.train(was_training)
        return idx


# ---- training


def learning_rate(step, config):
    """ constant as in the lecture, unless config has it rise at first or fall to zero at the end """
    warmup_iters = min(config.warmup_iters, config.max_iters // 10)
    if step < warmup_iters:
        return config.learning_rate * (step + 1) / warmup_iters
    if config.decay:
        return config.learning_rate * (config.max_iters - step) / max(1, config.max_iters - warmup_iters)
    return config.learning_rate


def train(model, data, config, device, run=None):
    """
    The training loop, for any model with forward(idx, targets) -> logits, loss; split_data makes the data.
    A run prints, saves and can be interrupted; without one the losses are only printed. Returns its reports.
    """
    run = run or Run(model, config)

    def batch(split):
        run.tick()  # between two batches: the status line, and Ctrl+C
        return get_batch(data[split], config, device)

    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, config.beta2),
                                  weight_decay=config.weight_decay, fused=config.fused)
    model.train()
    for step in range(run.begin(optimizer), config.max_iters + 1):  # from 0, or from a checkpoint's step
        if step % config.eval_interval == 0 or step == config.max_iters:
            losses = estimate_loss(model, batch, config.eval_iters)
            run.report(step, losses)  # prints the line, saves checkpoints
        if step == config.max_iters:
            break  # the last turn only measures

        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config)
        xb, yb = batch("train")
        logits, loss = model(xb, yb)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if config.grad_clip:
            nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
        optimizer.step()
        run.stepped(step, loss)  # counts the step; a loss that is not a number ends the run
    return run.history


# running it

SHAPE = ["n_layer", "n_head", "n_embd", "block_size"]  # what the weights in a checkpoint fix
SIZES = {
    "lecture": {},
    "notebook": dict(n_layer=4, n_head=4, n_embd=64, block_size=32, dropout=0.0, batch_size=16,
                     learning_rate=1e-3),
    "laptop": dict(n_layer=3, n_head=4, n_embd=112, block_size=64, dropout=0.0, init_std=0.05, batch_size=16,
                   max_iters=4200, eval_iters=40, learning_rate=3e-3, warmup_iters=200, decay=True,
                   weight_decay=0.1, beta2=0.995, grad_clip=1.0),
}
FILES = ["best.pt", "last.pt", "loss.csv", "loss.png", "attention.png"]  # what a run leaves in --out
RECORD = ["step", "train", "val", "learning_rate", "tokens", "seconds"]  # the columns of loss.csv


@dataclass
class Flags(Config):
    """ the Config, and how this run works """
    init_from: str = ""  # start from the weights and the vocabulary in which checkpoint? (fine-tuning)
    # running
    size: str = "auto"  # which named size? lecture, notebook, laptop (auto: lecture on CUDA, else laptop)
    device: str = "auto"  # where? cpu, cuda, cuda:1, mps (auto: the fastest that is here)
    dtype: str = "auto"  # which type of numbers? float32, bfloat16 (auto: bfloat16 on a CUDA GPU that has it)
    compile: bool = None  # let torch.compile rewrite the model? (default: on CUDA)
    out: str = "out"      # which folder for checkpoints, record and pictures?
    resume: bool = False  # continue the run in --out?
    taste: bool = True    # show at each measurement a line that the model writes?
    # using a model
    sample: bool = False  # instead of training, write with the best model in --out?
    prompt: str = None    # how does the text begin? (implies --sample; \n: a newline; -: read standard input)
    stop: str = ""        # stop before which text? (\n: a newline)
    max_new_tokens: int = 500  # how many characters, at most?
    temperature: float = 1.0  # how daring? (0: always the likeliest character)
    top_k: int = None         # choose among how many of the likeliest? (default: all)
    num_samples: int = 1      # how many texts?
    sample_seed: int = None   # which random numbers? (default: new ones each time)
    score: str = None         # instead of training, measure the best model in --out on which text file?
    attention: str = None     # instead of training, draw where each head looks in which text? (attention.png)


class Diverged(RunFailed):
    """ the loss is not a number: these weights are not worth saving """


# ---- settings of a run


def settle(given, processes, local_rank):
    """
    The flags given -> (task, flags, checkpoint or None, a line about the size). A value comes from the size,
    then the checkpoint, then the flags given; the later one wins. UserError where these contradict.
    """
    given = {name: value for name, value in given.items() if (name, value) != ("size", "auto")}
    if "prompt" in given:
        given["sample"] = True
    tasks = [name for name in ("sample", "score", "attention") if given.get(name) not in (None, False)]
    names = [f.name for f in fields(Flags)]
    fitting = {"init_from", "device", "out", *SHAPE, *tasks[:1]}
    fitting |= set(names[names.index("sample"):]) if tasks[:1] == ["sample"] else set()
    if tasks and (others := tasks[1:] + sorted(set(given) - fitting)):
        raise UserError(f"--{tasks[0]} and --{others[0]} are for different tasks; leave one of them out")

    several_without_cuda = processes > 1 and not torch.cuda.is_available()
    device = pick_device(given.get("device", "cpu" if several_without_cuda else "auto"), local_rank)
    size = given.get("size", "lecture" if device.startswith("cuda") else "laptop")
    if size not in SIZES:
        raise UserError(f"--size {size} is not one of: auto, {', '.join(SIZES)}")
    why = "as asked" if "size" in given else f"the default on {device}; or choose: --size {', '.join(SIZES)}"
    why = f"{size}, {why}"
    resume, init_from, out = given.get("resume", False), given.get("init_from"), Path(given.get("out", "out"))
    start, kept = None, {}
    if resume or tasks or init_from:
        path = out / "last.pt" if resume else Path(init_from or out / "best.pt")
        start = read_checkpoint(path)
        if resume and "optimizer" not in start:
            raise UserError(f"{path} is a model, not a run to continue; start from it with --init_from")
        for name in SHAPE + ["init_std"] + (["seed", "size", "init_from"] if resume else []):
            if given.get(name, start["config"][name]) != start["config"][name]:
                raise UserError(f"--{name} {given[name]} contradicts {path}, where it is "
                                f"{start['config'][name]!r}; leave the flag out, or train from the beginning")
        wanted = start["config"] if resume or tasks else SHAPE
        kept = {name: start["config"][name] for name in wanted if name in names}
        why = f"that of {path}"
    flags = check(Flags(**{**SIZES[size], "size": size, **kept, **given, "device": device}))
    _ = flags.head_size  # UserError if the heads cannot share n_embd
    if resume and start["step"] > flags.max_iters:
        raise UserError(f"the run in {flags.out} is at step {start['step']}; use a larger --max_iters")
    if flags.batch_size % processes and not tasks:
        raise UserError(f"{processes} processes cannot share --batch_size {flags.batch_size}; use a multiple")
    return tasks[0] if tasks else "train", flags, start, why


# ---- bfloat16, compiling, several processes


class Accelerated(nn.Module):
    """
    The model as the training loop sees it: in bfloat16, compiled, one of several processes. Each process
    takes its rows of the batch; a training loss is that of these rows, a measured one the mean over all. The
    weights are those of the plain model, which is the one to measure, to save and to write with.
    """

    def __init__(self, model, config, dtype=None, compiled=False):
        super().__init__()
        self.model, self.stepper, self.dtype = model, model, dtype
        self.device = model.lm_head.weight.device
        if compiled:
            note("compiling the model, which can take a minute (--no-compile skips this)")
            self.compile_it(config)
        if world_size() > 1:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # newer versions rename broadcast_buffers
                self.stepper = nn.parallel.DistributedDataParallel(self.stepper, broadcast_buffers=False)

    def forward(self, idx, targets):
        # idx and targets of shape (B, T), the same in all processes
        rows = idx.shape[0] // world_size()
        mine = slice(rank() * rows, (rank() + 1) * rows)
        with torch.autocast(self.device.type, self.dtype) if self.dtype else nullcontext():
            logits, loss = (self.stepper if self.training else self.model)(idx[mine], targets[mine])
        if world_size() > 1 and not self.training:
            torch.distributed.all_reduce(loss)
            loss = loss / world_size()
        return logits, loss

    def compile_it(self, config):
        """ use the compiled model if a trial step works: most failures show only then """
        random = random_state(self.device)
        idx = torch.zeros((config.batch_size, config.block_size), dtype=torch.long, device=self.device)
        try:
            self.stepper = torch.compile(self.model)
            logits, loss = self(idx, idx)
            loss.backward()
        except Exception as error:
            if explain(error, ""):
                raise  # this is not the compiler's fault
            note(f"torch.compile does not work here ({type(error).__name__}), so this runs without it")
            self.stepper = self.model
        self.model.zero_grad(set_to_none=True)
        set_random_state(random)


# ---- the run


class Run:
    """
    What happens around the training loop: the screen, the record, the checkpoints. Files go to the folder
    `out`, if there is one, with the vocabulary of `tokenizer`; header is what they say about the text, and
    start a last.pt to continue from.
    """

    def __init__(self, model, config, out=None, tokenizer=None, header=None, start=None, interrupts=None):
        self.model, self.config, self.out, self.tokenizer = model, config, out, tokenizer
        self.header, self.start, self.interrupts = header or {}, start, interrupts
        past = start or dict(step=0, seconds=0.0, history=[], curve=[], twenty=[], best=None,
                             id=os.urandom(8).hex())
        self.step, self.seconds, self.best, self.id = past["step"], past["seconds"], past["best"], past["id"]
        self.history = [row for row in past["history"] if row["step"] < self.step]  # a report is made again
        self.curve, self.twenty = past["curve"], past["twenty"]  # (step, mean of twenty losses), the next
        self.device = next(model.parameters()).device
        self.random, self.optimizer, self.loss, self.unread = random_state(self.device), None, None, []
        self.progress = Progress(config, self.step)
        self.saved = self.reported = self.progress.began
        self.saving = 0.0  # seconds spent on it
        if self.best and self.out and origin(self.out / "best.pt") != (self.id, self.best["step"]):
            note(f"notice: best.pt in {out} is not this run's best model; the next report makes a new one")
            self.best = None

    # what the loop calls

    def begin(self, optimizer):
        """ the first step to take; the optimizer and the random numbers continue where they were """
        if self.start:
            try:
                state, weights = self.start["optimizer"], list(self.model.parameters())
                shapes = [(state[i]["exp_avg"].shape, state[i]["exp_avg_sq"].shape) for i in state]
                if shapes != [(weights[i].shape, weights[i].shape) for i in state]:  # torch would crash
                    raise ValueError("its optimizer's state is that of another model")
                groups = optimizer.state_dict()["param_groups"]  # the settings of now, not those of the file
                optimizer.load_state_dict({"state": state, "param_groups": groups})
                set_random_state(self.start["random"])
            except Exception as error:
                raise UserError(f"cannot continue from last.pt in {self.out}: {error}") from None
        self.optimizer, self.random, self.start = optimizer, random_state(self.device), None
        return self.step

    def tick(self):
        """ between two batches """
        if self.interrupts:
            self.interrupts.check()
        training = self.model.training
        what = f"loss {self.loss:.4f}" if training and self.loss is not None else "measuring the loss"
        self.progress.tick(3 if training else 1, f"step {self.step} of {self.config.max_iters}, {what}")

    def stepped(self, step, loss):
        """ after the optimizer: the weights are those of the next step now """
        self.unread.append((step, loss.detach()))
        if self.device.type == "cpu" or len(self.unread) == 20:  # to read one makes a GPU wait
            self.read_losses()
        self.progress.stepped(self.device)
        self.step, self.random = step + 1, random_state(self.device)
        if time.monotonic() - self.saved > 600 or self.step == self.config.max_iters:
            self.save("last.pt")

    def report(self, step, losses):
        """ print, keep and save what was measured at the beginning of this step """
        self.read_losses()
        require_finite(step, *losses.values())
        tokens, rate = step * self.progress.tokens_per_step, learning_rate(step, self.config)
        row = (step, losses["train"], losses["val"], rate, tokens, self.elapsed())
        self.history.append(dict(zip(RECORD, row)))
        more = [f"lr {rate:.1e}"] if self.config.decay or self.config.warmup_iters else []
        more += self.progress.speed()
        if step == 0 and self.tokenizer:
            size = len(self.tokenizer.chars)
            more = [f"guessing scores ln({size}) = {math.log(size):.4f}"]
        line = f"step {step}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}"
        say(f"{line} ({', '.join(more)})")
        # the best report may be this one, made again after a resume
        if self.best is None or losses["val"] < self.best["val"] or step == self.best["step"]:
            self.best = self.history[-1]
        if step == self.config.max_iters or self.saving < 1 + 0.03 * (time.monotonic() - self.progress.began):
            self.save("last.pt")  # three times as large as best.pt: on a fast GPU not every time
        if self.best is self.history[-1]:
            self.save("best.pt")
        self.save_record()
        if self.tokenizer and self.config.taste and rank() == 0:
            self.taste(0.04 * (time.monotonic() - self.reported) if step else 0.5)
        self.reported = time.monotonic()

    def read_losses(self):
        unread, self.unread = self.unread, []
        for step, loss in unread:
            self.loss = loss.item()
            require_finite(step, self.loss)
            self.twenty.append(self.loss)
            if len(self.twenty) == 20:
                self.curve.append((step, sum(self.twenty) / 20))
                self.twenty = []

    def elapsed(self):
        return self.seconds + time.monotonic() - self.progress.began

    def taste(self, seconds):
        """ print a line that the model writes, from the same random numbers each time, not the run's """
        random, end, text = random_state(self.device), time.monotonic() + seconds, ""
        torch.manual_seed(self.config.seed)
        for ch in stream(self.model, self.tokenizer, beginning(self.tokenizer), 70):
            text += "↵" if ch == "\n" else ch if ch.isprintable() else " "
            if time.monotonic() > end:
                break
        set_random_state(random)
        say(f"    | {text}")

    def save(self, name):
        """ write best.pt (a model to write with) or last.pt (with all that an exact continuation takes) """
        if not self.out:
            return
        path, began = self.out / name, time.monotonic()
        state = dict(self.header, chars="".join(self.tokenizer.chars), config=settings(self.config),
                     id=self.id, step=self.step, model=self.model.state_dict())
        if name == "last.pt":
            self.read_losses()
            if not all(p.isfinite().all() for p in self.model.parameters()):
                raise Diverged(f"the weights are not finite at step {self.step}; use a lower --learning_rate")
            self.saved = began
            state.update(optimizer=self.optimizer.state_dict()["state"], random=self.random, best=self.best,
                         history=self.history, curve=self.curve, twenty=self.twenty, seconds=self.elapsed())
        content = io.BytesIO()
        torch.save(dict(state, checksum=checksum(state)), content)
        try:
            write_whole(path, content.getbuffer())
        except OSError as error:
            remedy = "make room" if is_full(error) else "make it writable"
            more = "continue with --resume" if (self.out / "last.pt").exists() else "start again"
            raise RunFailed(f"cannot write {path}: {error.strerror}; {remedy}, then {more}") from None
        self.saving += time.monotonic() - began

    def save_record(self):
        """ loss.csv, a row for each report; that it cannot be written just now does not end the run """
        if self.out:
            lines = [",".join(map(str, row)) for row in (RECORD, *(row.values() for row in self.history))]
            try:
                write_whole(self.out / "loss.csv", "".join(f"{line}\n" for line in lines).encode())
            except OSError as error:
                note(f"notice: cannot write loss.csv: {error.strerror}; the next report tries again")

    def rescue(self, error, command):
        """ after an error save the beginning of this step, unless its weights are spoiled or half updated """
        if self.optimizer is None or isinstance(error, Diverged):
            return
        if {int(state["step"]) for state in self.optimizer.state.values()} <= {self.step}:
            with suppress(RunFailed):
                self.save("last.pt")
                note(f"stopped at step {self.step} and saved; to continue: {command}")


def require_finite(step, *losses):
    for loss in losses:
        if not math.isfinite(loss):
            raise Diverged(f"the loss is {loss} at step {step}; try a lower --learning_rate or --grad_clip 1 "
                           "(the checkpoints date from before that)")


# ---- files


def settings(flags):
    """ what a checkpoint keeps of the flags, as plain values """
    return {name: getattr(flags, name) for name in [f.name for f in fields(Config)] + ["size", "init_from"]}


def checksum(checkpoint):
    """ of plain values, shapes and types, not of the weights: an edited file is found out """
    def plain(value):
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(item) for item in value]
        return (value.dtype, value.shape, value.stride()) if isinstance(value, torch.Tensor) else value

    return hashlib.sha256(repr(plain(checkpoint)).encode()).hexdigest()


def read_checkpoint(path):
    """ the dictionary in a checkpoint, on the CPU; UserError for a missing, damaged or foreign file """
    if not os.path.exists(path):
        raise UserError(f"there is no {path}; train first (python gpt.py), or name a run's folder with --out")
    try:
        with warnings.catch_warnings():  # it warns of what it then refuses
            warnings.simplefilter("ignore")
            checkpoint = torch.load(path, map_location="cpu", weights_only=True)  # plain types, no code
        if checkpoint.pop("checksum") != checksum(checkpoint):
            raise ValueError("edited after it was saved")
        return checkpoint
    except Exception as error:  # of many kinds
        raise UserError(f"{path} is not a checkpoint of gpt.py, or it is damaged ({type(error).__name__}: "
                        f"{str(error).partition(chr(10))[0][:100]}); name another, or train again") from None


def origin(path):
    """ (run, step) that a checkpoint is from; None if the file does not say """
    with suppress(UserError):
        checkpoint = read_checkpoint(path)
        return checkpoint["id"], checkpoint["step"]


def build(checkpoint, config, path):
    """ the model in a checkpoint; UserError, in torch's words, where gpt.py now makes another """
    with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay as they are
        model = GPTLanguageModel(config, len(checkpoint["chars"]))
    try:
        model.load_state_dict(checkpoint["model"])
    except RuntimeError as error:
        raise UserError(f"{path} does not fit the model that gpt.py makes now: {error}") from None
    return model


def load(path="out/best.pt", device="auto"):
    """ (model, tokenizer) of a checkpoint, ready to generate; UserError if the file is not one """
    checkpoint = read_checkpoint(Path(path))
    names = {f.name for f in fields(Flags)}
    config = Flags(**{name: value for name, value in checkpoint["config"].items() if name in names})
    return build(checkpoint, config, path).to(pick_device(device)).eval(), Tokenizer(checkpoint["chars"])


# ---- writing and measuring


def refuse_unknown(text, tokenizer, name):
    """ UserError if the text has characters that the model never saw """
    if unknown := sorted(set(text) - set(tokenizer.chars)):
        raise UserError(f"{name} has characters that the model never saw: {listed(unknown)}; it knows "
                        f"{listed(tokenizer.chars)}")


def beginning(tokenizer):
    """ what a text without a prompt begins with: a newline, if the model knows one """
    return "\n" if "\n" in tokenizer.chars else tokenizer.chars[0]


def stream(model, tokenizer, prompt, max_new_tokens, temperature=1.0, top_k=None):
    """ the characters after the prompt one by one: those that model.generate gives at once """
    idx = torch.tensor([tokenizer.encode(prompt)])  # (1, T)
    for _ in range(max_new_tokens):
        idx = model.generate(idx[:, -model.block_size:], 1, temperature, top_k)
        yield tokenizer.itos[idx[0, -1].item()]


def until(stop, characters):
    """ the characters before `stop`; its length less one is held back, since that may be its beginning """
    held = ""
    for ch in characters:
        held += ch
        if stop and held.endswith(stop):
            held = held[:-len(stop)]
            break
        if len(held) >= len(stop):
            yield held[0]
            held = held[1:]
    yield held


def write_text(model, tokenizer, flags, prompt, interrupts):
    """ print flags.num_samples texts, each character as soon as it is drawn """
    prompt = prompt or beginning(tokenizer)
    for number in range(flags.num_samples):
        show(("\n---\n" if number else "") + prompt, end="")
        characters = stream(model, tokenizer, prompt, flags.max_new_tokens, flags.temperature, flags.top_k)
        for ch in until(flags.stop.replace("\\n", "\n"), characters):
            interrupts.check()
            show(ch, end="")
    show("")


@torch.no_grad()
def score(model, tokens, between=lambda: None):
    """ the mean loss in nats over tokens (N,), each but the first predicted once, in windows side by side """
    T, device = model.block_size, model.lm_head.weight.device
    x, y = tokens[:-1], tokens[1:]
    n = len(x) // T * T  # as much as fills windows of block_size; one shorter window takes the rest
    rows = max(1, 2**14 // T)
    windows = [*zip(x[:n].view(-1, T).split(rows), y[:n].view(-1, T).split(rows)), (x[None, n:], y[None, n:])]
    total, was_training = 0.0, model.training
    model.eval()
    for xb, yb in windows:
        between()
        if yb.numel():
            logits, loss = model(xb.to(device).long(), yb.to(device).long())
            total += loss.item() * yb.numel()
    model.train(was_training)
    return total / len(y)


# ---- the program


def use_model(task, flags, start):
    """ --sample, --score and --attention: what a model that is there already can do """
    path = flags.init_from or Path(flags.out) / "best.pt"
    model, tokenizer = build(start, flags, path).to(flags.device).eval(), Tokenizer(start["chars"])
    if task == "attention":
        if not flags.attention:
            raise UserError("--attention takes a text of one character or more")
        asked = flags.attention.replace("\\n", "\n")
        refuse_unknown(asked, tokenizer, "--attention")
        text = asked[-min(model.block_size, 40):]  # more would be too small to read
        if len(text) < len(asked):
            note(f"notice: the picture shows the last {len(text)} characters")
        maps = attention_maps(model, tokenizer, text)
        Path(flags.out).mkdir(parents=True, exist_ok=True)
        try:
            draw_attention(maps, text, Path(flags.out) / "attention.png")
        except (ImportError, AttributeError, RuntimeError, ValueError) as error:  # so matplotlib fails
            reason = str(error)[:100]
            raise UserError(f'--attention needs matplotlib ({reason}): pip install -e ".[plot]"') from None
    elif task == "score":
        text = read_text(flags.score)
        refuse_unknown(text, tokenizer, flags.score)
        if len(text) < 2:
            raise UserError(f"{flags.score} is too short to measure; use two characters or more")
        loss = score(model, torch.from_numpy(encode_text(text, tokenizer.stoi)))
        say(f"{flags.score}: {len(text):,} characters, {loss:.4f} nats per character, "
            f"{loss / math.log(2):.4f} bits per character, perplexity {math.exp(min(loss, 700)):.5g}")
    else:
        prompt = (flags.prompt or "").replace("\\n", "\n").encode("utf-8", "surrogateescape")
        if prompt == b"-":
            typed = getattr(sys.stdin, "buffer", sys.stdin).read() if sys.stdin else b""
            prompt = typed.encode() if isinstance(typed, str) else typed
        prompt = decode_text(io.BytesIO(prompt), "the prompt")
        refuse_unknown(prompt, tokenizer, "the prompt")
        seed = torch.seed() % 2**32 if flags.sample_seed is None else flags.sample_seed
        note(f"{path}, --sample_seed {seed}")
        torch.manual_seed(seed)
        with Interrupts() as interrupts:
            write_text(model, tokenizer, flags, prompt, interrupts)


def prepare(flags, start, name, text):
    """ (tokenizer, data, what the checkpoints say about the text); UserError if this text is not suitable """
    tokenizer = Tokenizer(start["chars"] if start else text)
    if start:
        refuse_unknown(text, tokenizer, name)
    data = split_data(text, tokenizer)
    check_length(name, data, flags.block_size)
    digest = hashlib.sha256(data["train"].numpy())
    digest.update(data["val"].numpy())
    if flags.resume and digest.hexdigest() != start["sha256"]:
        raise UserError(f"{name} is not the text that the run in {flags.out} trains on ({start['text']}); to "
                        f"train on another, use --init_from {flags.out}/best.pt and another --out")
    return tokenizer, data, {"text": name, "sha256": digest.hexdigest()}


def train_and_sample(flags, start, why, given, tokenizer, data, header):
    """ a run: the training, how good it became, a sample, and where everything is """
    out, device, dtype = Path(flags.out), flags.device, pick_dtype(flags.dtype, flags.device)
    torch.manual_seed(flags.seed)
    model = build(start, flags, "the checkpoint") if start else GPTLanguageModel(flags, len(tokenizer.chars))
    model.to(device)
    threads = f" ({torch.get_num_threads()} threads)" if device == "cpu" else ""
    processes = f", {world_size()} processes" if world_size() > 1 else ""
    numbers, length = "bfloat16" if dtype else "float32", sum(map(len, data.values()))
    say(f"device: {device}{threads}{processes}, {numbers}, torch {torch.__version__}")
    say(f"text:   {header['text']}, {length:,} characters, a vocabulary of {len(tokenizer.chars)}")
    say(f"model:  {sum(p.numel() for p in model.parameters()):,} parameters: "
        + ", ".join(f"{name} {getattr(flags, name)}" for name in SHAPE))
    say(f"size:   {why}")
    if device.startswith("cuda"):
        data = {split: tokens.to(device) for split, tokens in data.items()}  # bytes: small beside the model
        if world_size() > 1:
            torch.cuda.manual_seed(flags.seed + rank())  # dropout of its own for each process
    if rank() == 0 and not flags.resume:
        if aside := move_aside(out, FILES):
            note(f"the earlier run in {out} is now in {aside}")
    with Interrupts() as interrupts:
        compiled = flags.compile if flags.compile is not None else device.startswith("cuda")
        accelerated = Accelerated(model, flags, dtype, compiled)
        run = Run(model, flags, None if rank() else out, tokenizer, header, start if flags.resume else None,
                  interrupts)
        try:
            train(accelerated, data, flags, device, run)
        except Exception as error:
            run.rescue(error, command(given, "--resume"))
            raise
        number = rank()
        leave(together=True)
        if number:
            return  # process 0 does the rest alone
        seconds, best = run.elapsed(), run.best
        try:
            model.load_state_dict(read_checkpoint(out / "best.pt")["model"])
        except UserError as error:
            note(f"notice: the last model writes instead of the best, since {error}")
        loss = score(model, data["val"], interrupts.check)
        say(f"best:   val loss {best['val']:.4f} at step {best['step']}; over the whole validation text "
            f"{loss:.4f}, which is {loss / math.log(2):.4f} bits per character")
        say(f"time:   {clock(seconds)}; the best model writes:")
        torch.manual_seed(flags.seed if flags.sample_seed is None else flags.sample_seed)
        write_text(model, tokenizer, flags, "", interrupts)
    if header["text"] == MANUAL:
        note(f"notice: the model learned {MANUAL}, not Shakespeare. {BY_HAND}")
    say(f"\nfiles:  in {out}: best.pt (the best model), last.pt (to continue), loss.csv (the record)")
    say(f"write:  {command(given, '--sample')}")
    try:
        draw_loss(run.history, run.curve, run.best, len(tokenizer.chars), out / "loss.png")
    except ModuleNotFoundError:
        pass  # matplotlib is an optional extra
    except Exception as error:
        note(f"notice: no loss.png ({type(error).__name__}: {error})")


def command(given, task):
    """ a command to paste into a shell: what a checkpoint does not keep is said again """
    words = ["python", "gpt.py" if Path.cwd() == Path(__file__).resolve().parent else __file__, task]
    names = ["out", "device"] + (["dtype", "compile"] if task == "--resume" else [])
    words += [word for name in names if name in given for word in (f"--{name}", str(given[name]))]
    return shlex.join(words)


def perform(parser, given, number, processes, local_rank):
    """ do what the flags ask for; process 0 checks everything before it joins the others """
    task, flags, start, why = settle(given, processes, local_rank)
    if flags.device.startswith("cuda"):
        torch.cuda.set_device(flags.device)
    if task != "train":
        if number == 0:
            if processes > 1:
                join()  # let the others go
                leave()
            with plain_errors(parser, "use a smaller model, or --device cpu"):
                use_model(task, flags, start)
        return
    with claimed(Path(flags.out)) if number == 0 else nullcontext():
        found = [None]
        if number == 0:
            fallback = start and start["text"] == MANUAL and not flags.data
            found = [find_text(MANUAL if fallback else flags.data)]
            prepared = prepare(flags, start, *found[0])
        if processes > 1:
            if number == 0:
                join()
            torch.distributed.broadcast_object_list(found)
            if number:
                prepared = prepare(flags, start, *found[0])
        found.clear()  # frees a long text
        train_and_sample(flags, start, why, given, *prepared)


def main(argv=None):
    """ the program; the CPU's random numbers and the signal handlers are left as they were found """
    parser = make_parser(Flags, __doc__, SIZES)
    remedy = "lower --batch_size first, then --block_size or --n_embd, or use --size laptop"
    with plain_errors(parser, remedy):
        try:
            number, processes, local_rank = launched()
            if number and {"-h", "--help"} & set(sys.argv[1:] if argv is None else argv):
                return  # process 0 shows the help
            if number:
                join()
            with torch.random.fork_rng(devices=[]):
                perform(parser, parse(parser, argv), number, processes, local_rank)
        except Interrupted as signalled:
            sys.exit(128 + signalled.args[0])
        finally:
            leave()


if __name__ == "__main__":
    run_script(main)
