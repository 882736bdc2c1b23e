"""
A GPT in one file: the Transformer of the lecture "Let's build GPT: from scratch, in code, spelled out".

    python gpt.py                                train on Tiny Shakespeare, then print a sample
    python gpt.py --sample --prompt "ROMEO:"     write with the best model so far
    python gpt.py --resume                       continue after an interrupt
    python gpt.py --help                         every flag, and the question it answers

Read bigram.py first, then this file from the top. Down to the line `running it` it is the lecture's program,
in its order. Without a GPU the small size `laptop` is trained; the full model of Config is --size lecture.
"""
# the lesson takes torch and a few of these helpers; the other imports are for the program below `running it`
import copy
import math
import time
import warnings
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path

from data.errors import RunFailed, UserError, explain
from data.files import bring_back, is_full, locked, move_aside, remove_files, write_whole
from data.flags import check, make_parser, parse
from data.machine import eval_mode, own_random_numbers, pick_device, pick_dtype
from data.machine import random_numbers_kept, random_state, set_random_state, torch_for_a_run
from data.pictures import attention_maps, draw_attention, draw_loss
from data.processes import joined, mean_over_processes, on_rank_0, part, rank, restarts, world_size
from data.screen import Progress, clock, listed, note, quoted, say, show
from data.script import plain_errors, run_script
from data.signals import Interrupts
from data.text import BY_HAND, INPUT, MANUAL, check_length, encode_text, find_text, fingerprint, read_text
from data.text import read_standard_input, typed_text

import torch
import torch.nn as nn
from torch.nn import functional as F

# ---- settings


@dataclass
class Config:
    """ the lecture's full model; every line is also a flag, and its comment the help """
    # model
    n_layer: int = 6       # how many blocks, one after the other?
    n_head: int = 6        # how many heads of attention in each block?
    n_embd: int = 384      # how many channels for each token? (a multiple of n_head)
    block_size: int = 256  # how far back can the model look, in characters?
    dropout: float = 0.2   # what share of the activations is dropped in training?
    # training
    batch_size: int = 64         # how many sequences in one step?
    max_iters: int = 5000        # how many steps?
    eval_interval: int = 500     # how many steps from one measurement of the loss to the next?
    eval_iters: int = 200        # over how many batches of each split is the loss averaged?
    learning_rate: float = 3e-4  # how large is a step?
    seed: int = 1337             # which random numbers?
    # data
    data: str = ""  # which text file? (default: input.txt, downloaded if absent)
    # not in the video
    fused: bool = True      # all heads, and all weight updates, at once? (--no-fused: the lecture's loops)
    init_std: float = 0.02  # how widely do the first weights spread? (0: PyTorch's default, as on screen)
    warmup_iters: int = 0   # over how many steps does the learning rate rise? (a tenth of all at most)
    decay: bool = False     # does it then fall in a straight line, to zero at the end?
    weight_decay: float = 0.01  # how strongly are weights pulled towards zero? (0.01: AdamW's own default)
    beta2: float = 0.999        # how slowly does AdamW forget the squares of old gradients?
    grad_clip: float = 0.0      # how large may the norm of the gradient be? (0: no limit)

    @property
    def head_size(self):
        return self.n_embd // self.n_head


# ---- data


class Tokenizer:
    """
    Characters to integers, the tokens, and back; the vocabulary is the characters of the text, sorted. A
    subword tokenizer (BPE) says more per token ("Google" is one, here six), but knows tens of thousands.
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
    tokens = torch.from_numpy(encode_text(text, tokenizer.stoi))  # tokenizer.encode(text), but fast
    n = int(0.9 * len(tokens))
    return {"train": tokens[:n], "val": tokens[n:]}


def get_batch(tokens, config, device):
    """ (x, y), both (B, T), B = batch_size, T = block_size: y[b, t] follows x[b, :t+1] """
    ix = torch.randint(len(tokens) - config.block_size, (config.batch_size,))  # (B,) random places to start
    ix = ix.to(tokens.device, non_blocking=True)  # the text may be on a GPU: no waiting until that is idle
    places = ix[:, None] + torch.arange(config.block_size, device=tokens.device)  # (B, 1) + (T,) -> (B, T)
    x, y = tokens[places], tokens[places + 1]  # one apart: each row is T examples, with contexts of 1 to T
    return x.to(device).long(), y.to(device).long()  # stored as small integers; a model takes long ones


@torch.no_grad()  # no training here, so nothing has to be remembered for a backward pass
def estimate_loss(model, next_batch, eval_iters):
    """ {"train": ..., "val": ...}: the mean loss over eval_iters batches; next_batch(split) gives x and y """
    out = {}
    model.eval()  # switches off what is for training only, such as dropout
    for split in ["train", "val"]:
        losses = []
        for _ in range(eval_iters):
            xb, yb = next_batch(split)
            logits, loss = model(xb, yb)
            losses.append(loss)
        out[split] = torch.stack(losses).mean().item()
    model.train()
    return out


# ---- model


class Head(nn.Module):
    """ one head of self-attention: each position gathers from itself and its past, in its own sequence """

    def __init__(self, config):
        super().__init__()
        # "self": keys, queries and values all come from the same x
        self.key = nn.Linear(config.n_embd, config.head_size, bias=False)    # what do I contain?
        self.query = nn.Linear(config.n_embd, config.head_size, bias=False)  # what am I looking for?
        self.value = nn.Linear(config.n_embd, config.head_size, bias=False)  # what do I tell, if I am found?
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        # x of shape (B, T, C), C = n_embd; the result of shape (B, T, hs), hs = head_size
        B, T, C = x.shape
        k = self.key(x)    # (B, T, hs)
        q = self.query(x)  # (B, T, hs)
        # affinities: how well does each query fit each key? If q and k have variance 1, these sums of hs
        # products have variance hs, and softmax would choose one position alone: hence the 1/sqrt(hs)
        wei = q @ k.transpose(-2, -1) * k.shape[-1]**-0.5  # (B, T, hs) @ (B, hs, T) -> (B, T, T)
        tril = torch.tril(torch.ones(T, T, device=x.device))  # row t: ones up to column t
        wei = wei.masked_fill(tril == 0, float("-inf"))  # hides the future; an encoder has no such line
        wei = F.softmax(wei, dim=-1)                     # each row sums to one: the weights of an average
        wei = self.dropout(wei)  # in training, leaves some positions out by chance
        v = self.value(x)  # (B, T, hs)
        return wei @ v     # (B, T, T) @ (B, T, hs) -> (B, T, hs)


class MultiHeadAttention(nn.Module):
    """ several heads side by side, each free to look for something else; their results are concatenated """

    def __init__(self, config):
        super().__init__()
        self.heads = nn.ModuleList([Head(config) for _ in range(config.n_head)])
        self.proj = nn.Linear(config.n_embd, config.n_embd)  # mixes what the heads found
        self.dropout = nn.Dropout(config.dropout)
        self.fused = config.fused

    def forward(self, x):
        # x of shape (B, T, C); nh = n_head heads, each with hs = head_size channels: nh * hs = C
        if not self.fused:
            out = torch.cat([h(x) for h in self.heads], dim=-1)  # the lecture's way: Head.forward, one by one
        else:
            out = self.all_at_once(x)                            # the default: the same result, faster
        return self.dropout(self.proj(out))  # (B, T, nh * hs) -> (B, T, C)

    def all_at_once(self, x):
        """ what runs by default, in place of Head.forward: the same results, heads as a dimension """
        # x of shape (B, T, C)
        B, T, C = x.shape
        layers = [h.query for h in self.heads] + [h.key for h in self.heads] + [h.value for h in self.heads]
        weight = torch.cat([layer.weight for layer in layers])        # (3 * nh * hs, C)
        qkv = F.linear(x, weight).view(B, T, 3, len(self.heads), -1)  # (B, T, 3, nh, hs)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)                          # three of (B, nh, T, hs)
        p = self.heads[0].dropout.p if self.training else 0.0
        # scale by hs**-0.5, mask the future, softmax, dropout, @ v: the rest of Head.forward
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        return out.transpose(1, 2).reshape(B, T, -1)  # (B, nh, T, hs) -> (B, T, nh * hs)


class FeedForward(nn.Module):
    """ after the communication, the computation: each position thinks about what it gathered, on its own """

    def __init__(self, config):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(config.n_embd, 4 * config.n_embd),  # room to compute: 4, as in the paper of 2017
            nn.ReLU(),
            nn.Linear(4 * config.n_embd, config.n_embd),  # back to the width of x, to which it is added
            nn.Dropout(config.dropout),
        )

    def forward(self, x):
        # x of shape (B, T, C)
        return self.net(x)


class Block(nn.Module):
    """ communication (sa), then computation (ffwd); both are branches, whose results are added to x """

    def __init__(self, config):
        super().__init__()
        self.sa = MultiHeadAttention(config)
        self.ffwd = FeedForward(config)
        self.ln1 = nn.LayerNorm(config.n_embd)  # normalises each token over its channels
        self.ln2 = nn.LayerNorm(config.n_embd)

    def forward(self, x):
        # x of shape (B, T, C); the norm comes before each branch, unlike in the paper of 2017
        x = x + self.sa(self.ln1(x))    # a residual connection: gradients pass through the + undiminished,
        x = x + self.ffwd(self.ln2(x))  # so that they have a direct path to the first block
        return x


class GPTLanguageModel(nn.Module):
    """ from tokens and their positions, through the blocks, to a logit for each character that may follow """

    def __init__(self, config, vocab_size):
        super().__init__()
        check(config)  # UserError for impossible settings, such as 65 channels for 4 heads
        self.block_size = config.block_size
        self.token_embedding_table = nn.Embedding(vocab_size, config.n_embd)
        self.position_embedding_table = nn.Embedding(config.block_size, config.n_embd)
        self.blocks = nn.Sequential(*[Block(config) for _ in range(config.n_layer)])
        self.ln_f = nn.LayerNorm(config.n_embd)  # once more, after the last block
        self.lm_head = nn.Linear(config.n_embd, vocab_size)
        if config.init_std:  # as in the lecture's repository: embeddings begin much smaller than PyTorch's
            for module in self.modules():
                if isinstance(module, (nn.Linear, nn.Embedding)):
                    nn.init.normal_(module.weight, mean=0.0, std=config.init_std)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, idx, targets=None):
        # idx and targets of shape (B, T): tokens
        B, T = idx.shape
        tok_emb = self.token_embedding_table(idx)  # (B, T, C): which character is it?
        pos_emb = self.position_embedding_table(torch.arange(T, device=idx.device))  # (T, C): where is it?
        x = tok_emb + pos_emb     # (B, T, C)
        x = self.blocks(x)        # (B, T, C)
        x = self.ln_f(x)          # (B, T, C)
        logits = self.lm_head(x)  # (B, T, vocab_size): scores; softmax would make probabilities of them

        if targets is None:
            loss = None
        else:
            B, T, C = logits.shape  # here C is vocab_size
            logits = logits.view(B*T, C)  # cross_entropy wants (N, C) and (N,)
            targets = targets.view(B*T)
            loss = F.cross_entropy(logits, targets)
        return logits, loss

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None):
        """ idx (B, T) of tokens -> (B, T + max_new_tokens), each new one drawn from the prediction """
        idx = idx.to(self.lm_head.weight.device)
        with eval_mode(self):  # no dropout while writing
            for _ in range(max_new_tokens):
                idx_cond = idx[:, -self.block_size:]  # there are no embeddings for more positions
                logits, loss = self(idx_cond)
                logits = logits[:, -1, :]                           # the last time step: (B, C)
                logits = sharpen(logits, temperature, top_k)        # not in the lecture; by default no change
                probs = F.softmax(logits, dim=-1)                   # (B, C)
                idx_next = torch.multinomial(probs, num_samples=1)  # (B, 1): not always the likeliest
                idx = torch.cat((idx, idx_next), dim=1)             # (B, T + 1)
        return idx


def sharpen(logits, temperature=1.0, top_k=None):
    """
    Logits (B, C) -> (B, C). A temperature below 1 makes the likely likelier, and 0 leaves only the likeliest;
    top_k leaves only the k likeliest. ValueError for a setting out of range.
    """
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature {temperature} must be 0 or more")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k {top_k} must be at least 1")
    if top_k is not None:
        kth = torch.topk(logits, min(top_k, logits.shape[-1])).values[:, -1:]  # (B, 1): the k-th best
        logits = logits.masked_fill(logits < kth, float("-inf"))
    if temperature < 1e-6:  # 0, or so close to it that the division would overflow
        likeliest = logits.argmax(dim=-1, keepdim=True)  # (B, 1)
        return torch.full_like(logits, float("-inf")).scatter(1, likeliest, 0.0)
    return logits / temperature


# ---- training


def rate_at(step, config):
    """ the learning rate: constant as in the lecture, unless config has it rise at first or fall to zero """
    warmup_iters = min(config.warmup_iters, config.max_iters // 10)
    if step < warmup_iters:
        return config.learning_rate * (step + 1) / warmup_iters
    if config.decay:
        return config.learning_rate * (config.max_iters - step) / max(1, config.max_iters - warmup_iters)
    return config.learning_rate


def train(model, splits, config, device, run=None):
    """
    The training loop, for any model with forward(idx, targets) -> logits, loss; split_data makes the splits.
    A run prints, saves and can be interrupted; without one the losses are only printed. Returns its reports.
    """
    run = run or Run(State(config, model))

    def next_batch(split):
        run.tick()  # between two batches: the status line, and Ctrl+C
        return get_batch(splits[split], config, device)

    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, config.beta2),
                                  weight_decay=config.weight_decay, fused=config.fused)
    first = run.begin(optimizer)  # 0, or the step of the checkpoint from which the run continues
    model.train()
    for step in range(first, config.max_iters + 1):
        if step % config.eval_interval == 0 or step == config.max_iters:
            losses = estimate_loss(model, next_batch, config.eval_iters)
            run.report(step, losses)  # prints the line, saves checkpoints
        if step == config.max_iters:
            break  # the last turn only measures

        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, config)
        xb, yb = next_batch("train")
        logits, loss = model(xb, yb)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if config.grad_clip:
            nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
        optimizer.step()
        run.stepped(step, loss)  # counts the step; a loss that is not a number ends the run
    return run.state.reports


# running it

SHAPE = ["n_layer", "n_head", "n_embd", "block_size"]  # the settings that the weights in a checkpoint decide
SIZES = {
    "lecture": {},
    "notebook": dict(n_layer=4, n_head=4, n_embd=64, block_size=32, dropout=0.0, batch_size=16,
                     learning_rate=1e-3),
    "laptop": dict(n_layer=3, n_head=4, n_embd=112, block_size=64, dropout=0.0, init_std=0.05, batch_size=16,
                   max_iters=4200, eval_iters=40, learning_rate=3e-3, warmup_iters=200, decay=True,
                   weight_decay=0.1, beta2=0.995, grad_clip=1.0),
}
FILES = ["best.pt", "last.pt", "loss.csv", "loss.png", "attention.png"]  # what a run leaves in --out
SAVE_AFTER = 600  # seconds: last.pt is saved so often even where reports are rarer
SAVE_REST = 30    # seconds between two saves of last.pt, where one takes half a second or more
LESS_MEMORY = "lower --batch_size first, then --block_size or --n_embd, or use --size laptop"


@dataclass
class Flags(Config):
    """ the Config, and how this run works """
    # data
    init_from: str = ""  # start from the weights and the vocabulary in which checkpoint? (fine-tuning)
    # running
    size: str = "auto"  # which named size? lecture, notebook, laptop (auto: lecture on CUDA, else laptop)
    device: str = "auto"  # where does it run? cpu, cuda, cuda:1, mps (auto: the fastest that is here)
    dtype: str = "auto"  # which type of numbers? float32, bfloat16 (auto: bfloat16 on a CUDA GPU that has it)
    compile: bool = None  # let torch.compile rewrite the model? (default: on CUDA)
    out: str = "out"      # which folder for checkpoints, record and pictures?
    resume: bool = False  # continue the run in --out?
    taste: bool = True    # show at each measurement a line that the model writes?
    # using a model
    sample: bool = False  # instead of training, write with the best model in --out?
    prompt: str = None    # how does the text begin? (implies --sample; \n: a newline; -: read standard input)
    stop: str = ""        # stop before which text? (\n: a newline, \\: a backslash, as in a prompt)
    max_new_tokens: int = 500  # how many characters, at most?
    temperature: float = 1.0   # how daring? (0: always the likeliest character)
    top_k: int = None          # choose among how many of the likeliest? (default: all)
    num_samples: int = 1       # how many texts?
    sample_seed: int = None    # which random numbers? (default: new ones each time)
    score: str = None      # instead of training, measure the best model in --out on which text file?
    attention: str = None  # instead of training, draw where each head looks in which text? (attention.png)


# ---- which task, which settings


@dataclass
class Start:
    """ where a task starts from """
    given: dict              # the flags that were given
    path: Path = None        # the checkpoint, if it starts from one
    checkpoint: dict = None  # what is in it


FITTING = {  # the flags that fit beside a task; training takes any
    "sample": "prompt stop max_new_tokens temperature top_k num_samples sample_seed".split(),
    "score": [],
    "attention": [],
}


def pick_task(given):
    """ the task that the flags ask for; UserError where they ask for two """
    if "prompt" in given:
        given = {**given, "sample": True}
    asked = [task for task in FITTING if given.get(task) not in (None, False)]
    if not asked:
        return "train"
    task = asked[0]
    fitting = {task, "init_from", "device", "out", *SHAPE, *FITTING[task]}
    others = asked[1:] + sorted(set(given) - fitting)
    if others:
        raise UserError(f"--{task} and --{others[0]} are for different tasks; leave one of them out")
    return task


def read_flags(task, given):
    """
    (flags, where the task starts from). A value comes from the size, then the checkpoint, then the flags
    given; the later one wins. UserError where these contradict.
    """
    device = pick_device(given.get("device", "auto"))
    size = given.get("size", "lecture" if device.startswith("cuda") else "laptop")
    if size not in SIZES:
        raise UserError(f"--size {size} is not one of: auto, {', '.join(SIZES)}")
    values = {**SIZES[size], "size": size}
    start = Start(given, find_start(task, given))
    if start.path:
        start.checkpoint = read_checkpoint(start.path)
        refuse_contradictions(given, start)
        kept = kept_settings(start.checkpoint)
        if task == "train" and not given.get("resume"):
            values.update({name: kept[name] for name in SHAPE})
        else:
            values = kept
    flags = Flags(**{**values, **given, "device": device})
    check(flags)
    if task == "train":
        check_run(flags, start)
    if is_a_restart(task, flags):
        note(f"the launcher started this run again, so it continues from {flags.out}/last.pt")
        return read_flags(task, {**given, "resume": True})
    return flags, start


def find_start(task, given):
    """ the path of the checkpoint from which a task starts, or None """
    out = Path(given.get("out", Flags.out))
    if given.get("resume"):
        return out / "last.pt"
    if given.get("init_from"):
        return Path(given["init_from"])
    if task == "train":
        return None
    if not (out / "best.pt").exists() and (out / "last.pt").exists():
        note(f"there is no {out / 'best.pt'}, so this is the model of {out / 'last.pt'}")
        return out / "last.pt"
    return out / "best.pt"


def refuse_contradictions(given, start):
    """ UserError for a flag that says something else than the checkpoint, where the checkpoint decides """
    names = [*SHAPE, "init_std"]
    if given.get("resume"):
        names += ["seed", "size", "init_from"]
        if not {f.name for f in fields(State)} <= set(start.checkpoint):
            raise UserError(f"{start.path} is a model, not a run to continue; start from it with --init_from")
    saved = {**settings(Flags()), **start.checkpoint["config"]}
    for name in names:
        if given.get(name, saved[name]) != saved[name]:
            raise UserError(f"--{name} {given[name]} contradicts {start.path}, where it is {saved[name]!r}; "
                            "leave the flag out, or train from the beginning")


def check_run(flags, start):
    """ UserError for what cannot be trained """
    if flags.resume and start.checkpoint["step"] > flags.max_iters:
        step = start.checkpoint["step"]
        raise UserError(f"the run in {flags.out} is at step {step}; use a larger --max_iters")
    processes = world_size()
    if flags.batch_size % processes:
        raise UserError(f"{processes} processes cannot share --batch_size {flags.batch_size}; use a multiple")


def is_a_restart(task, flags):
    """ whether the launcher started this run again, after a process had failed, and --out has its last.pt """
    last = Path(flags.out) / "last.pt"
    if task != "train" or flags.resume or not restarts() or not last.exists():
        return False
    return read_checkpoint(last)["config"] == settings(flags)


# ---- a run is a state


@dataclass
class State:
    """ a run at the beginning of a step: all that an exact continuation takes, and what last.pt contains """
    config: Config        # the settings
    model: nn.Module
    chars: str = ""       # the vocabulary, in order
    text: dict = None     # what the model learns from: its name, and the sha256 of its tokens
    optimizer: torch.optim.Optimizer = None  # made by the training loop
    step: int = 0         # how many steps were taken
    tokens: int = 0       # how many characters were in their batches
    seconds: float = 0.0  # how long all that took
    random: dict = None   # the random numbers from which to continue
    losses: list = field(default_factory=list)   # of each training step
    reports: list = field(default_factory=list)  # what was measured, a dictionary each
    best: dict = None     # the report with the lowest validation loss; best.pt has its model


def new_state(flags, start, tokenizer, text):
    """ the state in which a run begins: new, with the weights of --init_from, or that of --resume """
    torch.manual_seed(flags.seed)
    model = GPTLanguageModel(flags, len(tokenizer.chars))
    if start.checkpoint:
        load_weights(model, start)
    state = State(flags, model.to(flags.device), "".join(tokenizer.chars), text)
    if flags.resume:
        for name in ["step", "tokens", "seconds"]:
            setattr(state, name, start.checkpoint[name])
        state.losses = start.checkpoint["losses"].tolist()
        # a report of this very step is made again
        state.reports = [report for report in start.checkpoint["reports"] if report["step"] < state.step]
        state.best = report_of_best(start)
    return state


def report_of_best(start):
    """ the report of the model in best.pt, which may be newer than last.pt; None if it is of another run """
    path, last = start.path.with_name("best.pt"), start.checkpoint
    best = {}
    with suppress(UserError):
        best = read_checkpoint(path)
    is_of_this_run = best.get("reports", [None])[0] in last["reports"]  # no two took the same time
    if is_of_this_run and (last["best"] is None or best["best"]["step"] >= last["best"]["step"]):
        return best["best"]
    note(f"notice: {path} is not this run's best model; the next report makes a new one")
    return None


def settings(flags):
    """ what a checkpoint keeps of the flags, as plain values """
    values = {name: getattr(flags, name) for name in [f.name for f in fields(Config)] + ["init_from", "size"]}
    if flags.data and flags.data != MANUAL:
        values["data"] = str(Path(flags.data).absolute())  # found again from any folder
    return values


def contents(state, complete):
    """ what is saved of a state; complete: all of it, otherwise without optimizer and random numbers """
    saved = {f.name: getattr(state, f.name) for f in fields(State)}
    saved["config"] = settings(state.config)
    saved["model"] = state.model.state_dict()
    saved["losses"] = torch.tensor(state.losses)
    if complete:
        names = [name for name, weight in state.model.named_parameters()]
        moments = state.optimizer.state_dict()["state"]  # its settings are in the config
        saved["optimizer"] = {names[number]: memory for number, memory in moments.items()}
    else:
        del saved["optimizer"], saved["random"]
    return saved


def read_checkpoint(path):
    """ what is in a checkpoint, on the CPU; UserError for a missing, damaged or foreign file """
    if not path.exists():
        raise UserError(f"there is no {path}; train first (python gpt.py), or name a run's folder with --out")
    try:
        with warnings.catch_warnings():  # it warns of what it then refuses
            warnings.simplefilter("ignore")
            checkpoint = torch.load(path, map_location="cpu", weights_only=True)  # plain types, no code
        missing = {"config", "model", "chars", "step"} - set(checkpoint)
        if missing:
            raise KeyError(f"without {', '.join(sorted(missing))}")
        return checkpoint
    except Exception as error:  # of many kinds
        reason = str(error).partition("\n")[0][:100]
        raise UserError(f"{path} is not a checkpoint of gpt.py, or it is damaged ({type(error).__name__}: "
                        f"{reason}); name another, or train again") from None


def kept_settings(checkpoint):
    """ the settings in a checkpoint that are still settings; one that came later has its default """
    names = {f.name for f in fields(Flags)}
    return {name: value for name, value in checkpoint["config"].items() if name in names}


def load_weights(model, start):
    """ those of a checkpoint into a model; UserError, in torch's words, where gpt.py makes another now """
    try:
        model.load_state_dict(start.checkpoint["model"])
    except RuntimeError as error:
        raise UserError(f"{start.path} does not fit the model that gpt.py makes now: {error}") from None


def load_optimizer(optimizer, moments, model):
    """ its memory of each weight, by name, under the settings of now; UserError if it is of other weights """
    weights = dict(model.named_parameters())
    for name, memory in moments.items():
        shapes = {value.shape for value in memory.values() if value.dim()}
        if name not in weights or shapes - {weights[name].shape}:
            raise UserError("the optimizer in last.pt has other weights than the model that gpt.py makes "
                            "now; start from best.pt with --init_from")
    memory = {number: moments[name] for number, name in enumerate(weights) if name in moments}
    optimizer.load_state_dict({"state": memory, "param_groups": optimizer.state_dict()["param_groups"]})


def load(path="out/best.pt", device="auto"):
    """ (model, tokenizer) of a checkpoint, ready to generate; UserError if the file is not one """
    path = Path(path).expanduser()
    start = Start({}, path, read_checkpoint(path))
    flags = Flags(**{**kept_settings(start.checkpoint), "device": pick_device(device)})
    return load_model(flags, start)


def load_model(flags, start):
    """ (model, tokenizer) of a checkpoint, on the device of the flags """
    with random_numbers_kept(torch.device("cpu")):  # new weights draw some
        model = GPTLanguageModel(flags, len(start.checkpoint["chars"]))
    load_weights(model, start)
    return model.to(flags.device).eval(), Tokenizer(start.checkpoint["chars"])


# ---- bfloat16, compiling, several processes


class Accelerated(nn.Module):
    """
    The model of a state as the training loop sees it: in bfloat16, compiled, one of several processes. Each
    process takes its rows of the batch. The weights are those of the plain model, which is the one to
    measure, to save and to write with.
    """

    def __init__(self, state, dtype=None, compiled=False):
        super().__init__()
        self.state = state
        self.model = state.model
        self.trained = state.model  # what computes a training step: the model, compiled or distributed
        self.dtype = dtype
        self.device = next(state.model.parameters()).device
        if compiled:
            note("compiling the model, which can take a minute (--no-compile skips this)")
            self.compile_model()
        if world_size() > 1:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # newer versions rename broadcast_buffers
                self.trained = nn.parallel.DistributedDataParallel(self.trained, broadcast_buffers=False)

    def forward(self, idx, targets):
        # idx and targets of shape (B, T), the same in all processes
        rows = idx.shape[0] // world_size()
        own = slice(rank() * rows, (rank() + 1) * rows)
        with self.number_type():
            if not self.training:
                return self.model(idx[own], targets[own])
            with self.dropout_numbers():
                return self.trained(idx[own], targets[own])

    def number_type(self):
        """ bfloat16 where operations gain from it; entered anew for each batch, since it caches weights """
        return torch.autocast(self.device.type, self.dtype) if self.dtype else nullcontext()

    def dropout_numbers(self):
        """ those of several processes are each their own, and after a resume the same again """
        if world_size() == 1:
            return nullcontext()
        return own_random_numbers(self.state.config.seed, self.state.step, self.device)

    def compile_model(self):
        """ use the compiled model if a trial step works: most failures show only then """
        config = self.state.config
        idx = torch.zeros((config.batch_size, config.block_size), dtype=torch.long, device=self.device)
        with random_numbers_kept(self.device):
            try:
                self.trained = torch.compile(self.model)
                logits, loss = self(idx, idx)
                loss.backward()
            except Exception as error:
                if explain(error, ""):
                    raise  # this is not the compiler's fault
                note(f"torch.compile does not work here ({type(error).__name__}), so this runs without it")
                self.trained = self.model
        self.model.zero_grad(set_to_none=True)


# ---- the run


class Diverged(RunFailed):
    """ the loss or a weight is not a number: this state is not worth saving """


class Run:
    """ what happens around the training loop: a state, the screen, the folder `out` for files, the clock """

    def __init__(self, state, out=None, interrupts=None, last=None):
        self.state = state
        self.out = out                # None: no files
        self.interrupts = interrupts  # None: nobody asks to stop
        self.last = last              # what is in last.pt, if the run continues from it
        self.is_new = last is None    # until it has written its first file
        self.first_files = None       # those of the beginning, until a step has shown that the run works
        self.unread = []              # losses that are still on the device: to read one makes a GPU wait
        self.device = next(state.model.parameters()).device
        self.progress = Progress(state.config, state.step)
        self.began_at = time.monotonic() - state.seconds  # as if it had never been interrupted
        self.saved_at = time.monotonic()
        self.seconds_to_save = 0.0    # how long the last save took

    # what the loop calls

    def begin(self, optimizer):
        """ the first step to take; the optimizer and the random numbers continue where they were """
        if self.last:
            load_optimizer(optimizer, self.last["optimizer"], self.state.model)
            set_random_state(self.last["random"], self.device)
            self.last = None  # frees its memory
        self.state.optimizer = optimizer
        self.state.random = random_state(self.device)
        return self.state.step

    def tick(self):
        """ between two batches """
        if self.interrupts:
            self.interrupts.check()
        work, doing = 1, "measuring the loss"
        if self.state.model.training:
            work = 3
            doing = f"loss {self.state.losses[-1]:.4f}" if self.state.losses else "the first step"
        self.progress.tick(work, f"step {self.state.step} of {self.state.config.max_iters}, {doing}")

    def stepped(self, step, loss):
        """ after the optimizer: the state is that of the next step's beginning """
        state = self.state
        self.unread.append(loss.detach())
        waits_for_nobody = self.device.type == "cpu" and world_size() == 1
        is_first = self.progress.steps == 0
        if waits_for_nobody or is_first or len(self.unread) == 20:
            self.read_losses()
        self.progress.stepped()
        state.step = step + 1
        state.tokens += self.progress.tokens_per_step
        state.random = random_state(self.device)
        if self.first_files:
            self.write(self.first_files)
            self.first_files = None
        if time.monotonic() - self.saved_at > SAVE_AFTER and not self.unread:
            self.save()

    def report(self, step, losses):
        """ print, keep and save what was measured at the beginning of this step """
        state = self.state
        self.read_losses()
        train_loss, val_loss = mean_over_processes([losses["train"], losses["val"]])
        require_finite(step, train_loss, val_loss)
        state.seconds = self.seconds()
        report = dict(step=step, train=train_loss, val=val_loss, learning_rate=rate_at(step, state.config),
                      tokens=state.tokens, seconds=state.seconds)
        say(self.line(report))
        state.reports.append(report)
        is_made_again = state.best is not None and step == state.best["step"]  # after a resume
        if state.best is None or is_made_again or val_loss < state.best["val"]:
            state.best = report
        self.save_report(is_last=step == state.config.max_iters)
        if state.chars and state.config.taste and rank() == 0:
            self.taste()

    # the screen

    def line(self, report):
        """ the lecture's line to the letter, and more in parentheses """
        config, vocab_size = self.state.config, len(self.state.chars)
        more = [f"lr {report['learning_rate']:.1e}"] if config.decay or config.warmup_iters else []
        more += self.progress.speed()
        if report["step"] == 0 and vocab_size:
            more = [f"guessing scores ln({vocab_size}) = {math.log(vocab_size):.4f}"]
        losses = f"train loss {report['train']:.4f}, val loss {report['val']:.4f}"
        return f"step {report['step']}: {losses} ({', '.join(more)})"

    def taste(self):
        """ print a line that the model writes, always from the same random numbers """
        tokenizer = Tokenizer(self.state.chars)
        with random_numbers_kept(self.device):
            torch.manual_seed(self.state.config.seed)
            text = "".join(stream(self.state.model, tokenizer, first_character(tokenizer), 70))
        shown = [ch if ch.isprintable() else " " for ch in text.replace("\n", "↵")]
        say(f"    | {''.join(shown)}")

    def seconds(self):
        return time.monotonic() - self.began_at

    def read_losses(self, together=True):
        """ the losses that are still on the device, means over the processes; a NaN ends the run """
        if not self.unread:
            return
        losses, self.unread = torch.stack(self.unread).tolist(), []
        if together:
            losses = mean_over_processes(losses)
        for loss in losses:
            require_finite(len(self.state.losses), loss)
            self.state.losses.append(loss)

    # the folder

    def save_report(self, is_last):
        """ the files after a report: best.pt if it is the best, last.pt unless it was saved a moment ago """
        if not self.out:
            return
        rests = self.seconds_to_save > 0.5 and time.monotonic() - self.saved_at < SAVE_REST
        files = {}
        if self.state.best is self.state.reports[-1]:
            files["best.pt"] = contents(self.state, complete=False)  # first: it may be newer than last.pt
        if is_last or not rests:
            files["last.pt"] = self.complete_contents()
        if self.is_new and not is_last:
            self.first_files = copy.deepcopy(files)  # the next step will change the weights
        else:
            self.write(files)

    def save(self):
        """ the state into last.pt """
        if self.out:
            self.write({"last.pt": self.complete_contents()})

    def complete_contents(self):
        """ what last.pt is to contain; Diverged if the weights are not finite """
        norm = nn.utils.get_total_norm([p.detach() for p in self.state.model.parameters()])
        if not norm.isfinite():
            step = self.state.step
            raise Diverged(f"the weights are not finite at step {step}; use a lower --learning_rate")
        self.state.seconds = self.seconds()
        return contents(self.state, complete=True)

    def write(self, files):
        """ {name: contents}, and the record; before its first file a new run moves an earlier one aside """
        aside = move_aside(self.out, FILES) if self.is_new else None
        try:
            for name, saved in files.items():
                self.write_checkpoint(name, saved)
        except BaseException:  # also a second Ctrl+C
            if self.is_new:
                remove_files(self.out, files)
            if aside:
                bring_back(aside, self.out)
            raise
        self.is_new = False
        if aside:
            note(f"the earlier run in {self.out} is now in {aside}")
        self.write_record()

    def write_checkpoint(self, name, saved):
        path, began_at = self.out / name, time.monotonic()
        try:
            write_whole(path, partial(torch.save, saved))
        except OSError as error:
            remedy = "make room" if is_full(error) else "make it writable"
            then = "start again" if self.is_new else "continue with --resume"
            raise RunFailed(f"cannot write {path}: {error.strerror}; {remedy}, then {then}") from None
        if name == "last.pt":
            self.saved_at = time.monotonic()
            self.seconds_to_save = self.saved_at - began_at

    def write_record(self):
        """ loss.csv, a row for each report; that it cannot be written just now does not end the run """
        rows = [list(report.values()) for report in self.state.reports]
        rows.insert(0, list(self.state.reports[0]) if self.state.reports else [])
        lines = "".join(",".join(map(str, row)) + "\n" for row in rows)
        try:
            write_whole(self.out / "loss.csv", lambda file: file.write(lines.encode()))
        except OSError as error:
            note(f"notice: cannot write loss.csv: {error.strerror}; the next report tries again")

    def rescue(self, error, to_continue):
        """ after an error save the beginning of this step; what fails here is said, and hides nothing """
        if not self.out or self.state.optimizer is None or isinstance(error, Diverged):
            return
        if self.is_new:
            note("this run has no file yet, and none was saved")
            return
        step = self.state.step
        try:
            if self.is_half_updated():
                raise RunFailed("the weights are half updated")
            self.read_losses(together=False)
            self.save()
        except Exception as failure:
            reason = str(failure).partition("\n")[0]
            note(f"notice: step {step} could not be saved, and last.pt is as it was before: {reason}")
        else:
            note(f"stopped at step {step} and saved; to continue: {to_continue}")

    def is_half_updated(self):
        """ whether the error came in the middle of an update of the weights """
        memories = self.state.optimizer.state.values()
        return any(int(memory["step"]) != self.state.step for memory in memories if "step" in memory)


def require_finite(step, *losses):
    for loss in losses:
        if not math.isfinite(loss):
            raise Diverged(f"the loss is {loss} at step {step}; try a lower --learning_rate or --grad_clip 1")


# ---- writing and measuring


def refuse_unknown(text, tokenizer, name):
    """ UserError if the text has characters that the model never saw """
    unknown = sorted(set(text) - set(tokenizer.chars))
    if unknown:
        raise UserError(f"{name} has characters that the model never saw: {listed(unknown)}; it knows "
                        f"{listed(tokenizer.chars)}")


def first_character(tokenizer):
    """ what a text without a prompt begins with: a newline, if the model knows one """
    return "\n" if "\n" in tokenizer.chars else tokenizer.chars[0]


def stream(model, tokenizer, prompt, max_new_tokens, temperature=1.0, top_k=None):
    """ the characters after the prompt one by one: those that model.generate gives at once """
    idx = torch.tensor([tokenizer.encode(prompt)])  # (1, T)
    for _ in range(max_new_tokens):
        idx = model.generate(idx[:, -model.block_size:], 1, temperature, top_k)
        yield tokenizer.itos[idx[0, -1].item()]


def until(stop, characters):
    """ the characters before the text `stop`; the last few wait, since they may be its beginning """
    waiting = ""
    for ch in characters:
        waiting += ch
        if stop and waiting.endswith(stop):
            waiting = waiting[:-len(stop)]
            break
        if len(waiting) >= len(stop):
            yield waiting[0]
            waiting = waiting[1:]
    yield waiting


def write_samples(model, tokenizer, flags, prompt, interrupts):
    """ print flags.num_samples texts, each character as soon as it is drawn """
    prompt = prompt or first_character(tokenizer)
    stop = typed_text(flags.stop, "--stop")
    for number in range(flags.num_samples):
        show(("\n---\n" if number else "") + prompt, end="")
        characters = stream(model, tokenizer, prompt, flags.max_new_tokens, flags.temperature, flags.top_k)
        for ch in until(stop, characters):
            interrupts.check()
            show(ch, end="")
    show("")


@torch.no_grad()
def score(model, tokens, tick=lambda: None):
    """ the mean loss in nats over tokens (N,), each but the first predicted once, in windows side by side """
    T, device = model.block_size, model.lm_head.weight.device
    x, y = tokens[:-1], tokens[1:]
    n = len(x) // T * T  # as much as fills windows of block_size; one shorter window takes the rest
    rows = max(1, 2**14 // T)
    windows = []
    if n:
        windows += zip(x[:n].view(-1, T).split(rows), y[:n].view(-1, T).split(rows))
    if n < len(x):
        windows.append((x[None, n:], y[None, n:]))
    losses, sizes = [], []
    with eval_mode(model):
        for xb, yb in windows:
            tick()
            logits, loss = model(xb.to(device).long(), yb.to(device).long())
            losses.append(loss)
            sizes.append(yb.numel())
    return sum(loss * size for loss, size in zip(torch.stack(losses).tolist(), sizes)) / len(y)


# ---- tasks


def train_task(flags, start):
    """ train, say how good the model became, let it write, and say where everything is """
    out = Path(flags.out)
    with ExitStack() as stack:
        on_rank_0(stack.enter_context, locked(out))
        tokenizer, text, splits = read_splits(flags, start)
        dtype = pick_dtype(flags.dtype, flags.device)
        state = new_state(flags, start, tokenizer, text)
        announce(state, start, splits, dtype)
        compare_heads(state.model, flags)
        interrupts = stack.enter_context(Interrupts())
        last = start.checkpoint if flags.resume else None
        run = Run(state, out if rank() == 0 else None, interrupts, last)
        compiled = flags.compile if flags.compile is not None else flags.device.startswith("cuda")
        if flags.device.startswith("cuda"):  # one to four bytes a character: small there
            splits = {split: tokens.to(flags.device) for split, tokens in splits.items()}
        try:
            train(Accelerated(state, dtype, compiled), splits, flags, flags.device, run)
        except Exception as error:
            run.rescue(error, command(start.given, "--resume"))
            raise
        if part():
            finish(run, splits, start)


def read_splits(flags, start):
    """ (tokenizer, the text's name and sha256, splits); UserError if this text is not suitable """
    learned = start.checkpoint.get("text") if start.checkpoint else None
    goes_on = isinstance(learned, dict) and learned["name"] == MANUAL and not flags.data
    name, text = on_rank_0(find_text, MANUAL if goes_on else flags.data)
    tokenizer = Tokenizer(start.checkpoint["chars"] if start.checkpoint else text)
    refuse_unknown(text, tokenizer, name)
    splits = split_data(text, tokenizer)
    check_length(name, splits, flags.block_size)
    sha256 = fingerprint(splits)
    if flags.resume and sha256 != learned["sha256"]:
        raise UserError(f"{name} is not the text that the run in {flags.out} trains on ({learned['name']}), "
                        f"or it has changed since; to train on another, use --init_from {flags.out}/best.pt "
                        "and another --out")
    return tokenizer, {"name": name, "sha256": sha256}, splits


def announce(state, start, splits, dtype):
    """ the first lines of a run: what is computed, from what, and how """
    flags, weights = state.config, list(state.model.parameters())
    numbers = str(dtype or weights[0].dtype).removeprefix("torch.")
    threads = f" ({torch.get_num_threads()} threads)" if flags.device == "cpu" else ""
    processes = f", {world_size()} processes" if world_size() > 1 else ""
    shape = ", ".join(f"{name} {getattr(flags, name)}" for name in SHAPE)
    heads = "all at once; --no-fused runs Head.forward" if flags.fused else "one by one, Head.forward"
    if start.path:
        size = f"that of {start.path}"
    elif "size" in start.given:
        size = f"{flags.size}, as asked"
    else:
        size = f"{flags.size}, the default on {flags.device}; or choose: --size {', '.join(SIZES)}"
    characters = sum(map(len, splits.values()))
    say(f"device: {flags.device}{threads}{processes}, {numbers}, torch {torch.__version__}")
    say(f"text:   {state.text['name']}, {characters:,} characters, a vocabulary of {len(state.chars)}")
    say(f"model:  {sum(p.numel() for p in weights):,} parameters: {shape}")
    say(f"heads:  {heads}")
    say(f"size:   {size}")
    if flags.resume:
        before = rate_at(state.step, Flags(**kept_settings(start.checkpoint)))
        now = rate_at(state.step, flags)
        if now != before:
            note(f"notice: the learning rate at step {state.step} was {before:.1e} and is now {now:.1e}")


@torch.no_grad()
def compare_heads(model, config):
    """ a notice if Head.forward and all_at_once, the one that runs, no longer compute the same """
    if not config.fused:
        return
    numbers = torch.Generator().manual_seed(0)  # of its own: the run's stay as they are
    x = 3 * torch.randn(1, 8, config.n_embd, generator=numbers)  # (B, T, C), wide: a missing scale shows
    try:
        sa = model.blocks[0].sa
        x = x.to(next(sa.parameters()))
        with eval_mode(sa), random_numbers_kept(x.device):  # without dropout
            one_by_one = torch.cat([h(x) for h in sa.heads], dim=-1)
            if not torch.allclose(sa.all_at_once(x), one_by_one, rtol=1e-4, atol=1e-5):
                note("notice: Head.forward and all_at_once no longer compute the same; all_at_once runs, and "
                     "--no-fused runs Head.forward")
    except Exception as error:  # of a learner's own model
        note(f"notice: Head.forward and all_at_once cannot be compared ({type(error).__name__}: {error})")


def finish(run, splits, start):
    """ after the training: how good the best model became, what it writes, where everything is """
    state, out = run.state, run.out
    flags, tokenizer = state.config, Tokenizer(state.chars)
    seconds = run.seconds()
    try:
        state.model.load_state_dict(read_checkpoint(out / "best.pt")["model"])
    except UserError as error:
        note(f"notice: the last model writes instead of the best, since {error}")
    loss = score(state.model, splits["val"], run.interrupts.check)
    best = f"val loss {state.best['val']:.4f} at step {state.best['step']}"
    say(f"best:   {best}; over the whole validation text {loss:.4f}, which is {loss / math.log(2):.4f} "
        "bits per character")
    say(f"time:   {clock(seconds)}; the best model writes:")
    torch.manual_seed(flags.seed if flags.sample_seed is None else flags.sample_seed)
    write_samples(state.model, tokenizer, flags, "", run.interrupts)
    if state.text["name"] == MANUAL:
        note(f"notice: the model learned {MANUAL}, not Shakespeare. {BY_HAND}")
    say(f"\nfiles:  in {out}: best.pt (the best model), last.pt (to continue), loss.csv (the record)")
    say(f"write:  {command(start.given, '--sample')}")
    try:
        draw_loss(state.losses, state.reports, state.best, len(state.chars), out / "loss.png")
    except ModuleNotFoundError:
        pass  # matplotlib is an optional extra
    except Exception as error:
        note(f"notice: no loss.png ({type(error).__name__}: {error})")


def command(given, task):
    """ a command to paste into a shell: what a checkpoint does not keep is said again """
    script = INPUT.with_name("gpt.py")  # __file__ is missing where the source is piped in
    words = ["python", "gpt.py" if Path.cwd() == script.parent else str(script), task]
    names = ["out", "device"] + (["dtype", "compile"] if task == "--resume" else [])
    for name in names:
        if name in given:
            words += [f"--{name}", str(given[name])]
    return quoted(words)


def sample_task(flags, start):
    """ write texts that begin with the prompt """
    model, tokenizer = load_model(flags, start)
    prompt = read_standard_input() if flags.prompt == "-" else typed_text(flags.prompt or "", "the prompt")
    refuse_unknown(prompt, tokenizer, "the prompt")
    seed = torch.seed() % 2**32 if flags.sample_seed is None else flags.sample_seed
    note(f"{start.path}, --sample_seed {seed}")
    torch.manual_seed(seed)
    with Interrupts() as interrupts:
        write_samples(model, tokenizer, flags, prompt, interrupts)


def score_task(flags, start):
    """ measure how well a model predicts a text """
    model, tokenizer = load_model(flags, start)
    text = read_text(flags.score)
    refuse_unknown(text, tokenizer, flags.score)
    if len(text) < 2:
        raise UserError(f"{flags.score} is too short to measure; use two characters or more")
    loss = score(model, torch.from_numpy(encode_text(text, tokenizer.stoi)))
    say(f"{flags.score}: {len(text):,} characters, {loss:.4f} nats per character, "
        f"{loss / math.log(2):.4f} bits per character, perplexity {math.exp(min(loss, 700)):.5g}")


def attention_task(flags, start):
    """ draw where each head looks """
    model, tokenizer = load_model(flags, start)
    text = typed_text(flags.attention, "--attention")
    if not text:
        raise UserError("--attention takes a text of one character or more")
    refuse_unknown(text, tokenizer, "--attention")
    shown = text[-min(model.block_size, 40):]  # more would be too small to read
    if len(shown) < len(text):
        note(f"notice: the picture shows the last {len(shown)} characters")
    maps = attention_maps(model, tokenizer, shown)
    try:
        draw_attention(maps, shown, Path(flags.out) / "attention.png")
    except (ImportError, AttributeError, RuntimeError, ValueError) as error:  # of a broken matplotlib
        reason = str(error)[:100]
        raise UserError(f'--attention needs matplotlib ({reason}): pip install -e ".[plot]"') from None


TASKS = {"train": train_task, "sample": sample_task, "score": score_task, "attention": attention_task}


def main(argv=None):
    """ the program; random numbers, signal handlers and torch's settings are left as they were found """
    parser = make_parser(Flags, "gpt.py", __doc__, SIZES)
    with plain_errors(parser, LESS_MEMORY), joined():
        given = parse(parser, argv)
        if given.get("size") == "auto":
            del given["size"]  # as if the flag had not been given
        task = pick_task(given)
        flags, start = read_flags(task, given)
        if task != "train" and not part():
            return
        remedy = LESS_MEMORY if task == "train" else "use a smaller model, or --device cpu"
        with plain_errors(parser, remedy), torch_for_a_run(flags.device):
            TASKS[task](flags, start)


if __name__ == "__main__":
    run_script(main)
