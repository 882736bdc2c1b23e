"""
The bigram baseline: the lecture's first language model, which sees one character and guesses the next.

    python bigram.py                 train on Tiny Shakespeare (seconds on a CPU), then print 500 characters
    python bigram.py --help          every flag

Guessing would score ln(65) = 4.1744. This model comes near 2.4519, the best that any bigram can do on the
training text, and its words are no words yet. gpt.py is the answer: `diff bigram.py gpt.py` is the lecture.
"""
import argparse
import math
import os
import sys
from dataclasses import dataclass, field, fields

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
    """The settings, each also a flag of the command line."""
    batch_size: int = opt(32, "how many independent sequences run in parallel?", "training", least=1)
    block_size: int = opt(8, "what is the maximum context length for predictions?", least=1)
    max_iters: int = opt(3000, "how many steps of training?", least=0)
    eval_interval: int = opt(300, "after how many steps do we measure the loss again?", least=1)
    eval_iters: int = opt(200, "over how many batches of each split is the loss averaged?", least=1)
    learning_rate: float = opt(1e-2, "how large is a step?", least=0)
    seed: int = opt(1337, "which random numbers?", least=0)
    data: str = opt("", "which text file? (default: input.txt, downloaded when absent)", "data")
    device: str = opt("auto", "where? cpu, cuda, cuda:1, mps (auto: the fastest that is here)", "running")
    max_new_tokens: int = opt(500, "how many characters to write at the end?", least=0)


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


class BigramLanguageModel(nn.Module):
    """ a table: row i holds the score of every character to come after character i """

    def __init__(self, vocab_size):
        super().__init__()
        # each token directly reads off the logits for the next token from a lookup table
        self.token_embedding_table = nn.Embedding(vocab_size, vocab_size)

    def forward(self, idx, targets=None):
        # idx and targets of shape (B, T), integers
        logits = self.token_embedding_table(idx)                # (B, T, C), C = vocab_size

        if targets is None:
            loss = None
        else:
            B, T, C = logits.shape
            logits = logits.view(B*T, C)                        # cross_entropy wants (N, C) and (N,)
            targets = targets.view(B*T)
            loss = F.cross_entropy(logits, targets)
        return logits, loss

    @torch.no_grad()
    def generate(self, idx, max_new_tokens):
        """ idx (B, T) of tokens -> (B, T + max_new_tokens), each new token drawn from the prediction """
        for _ in range(max_new_tokens):
            logits, loss = self(idx)
            logits = logits[:, -1, :]                           # the last time step: (B, C)
            probs = F.softmax(logits, dim=-1)                   # (B, C)
            idx_next = torch.multinomial(probs, num_samples=1)  # (B, 1): drawn, not the likeliest
            idx = torch.cat((idx, idx_next), dim=1)             # (B, T + 1)
        return idx


# --------------------------------------------------------------------------------------------------
# training


def train(model, data, config, device):
    """ the training loop; prints the loss of both splits every eval_interval steps and at the end """
    def batch(split):
        return get_batch(data[split], config, device)

    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate)
    for step in range(config.max_iters + 1):
        # every once in a while evaluate the loss on train and val sets
        if step % config.eval_interval == 0 or step == config.max_iters:
            losses = estimate_loss(model, batch, config.eval_iters)
            if not math.isfinite(losses["train"] + losses["val"]):
                sys.exit(f"bigram.py: the loss is no number any more at step {step}; lower --learning_rate")
            print(f"step {step}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}", flush=True)
        if step == config.max_iters:
            break                                               # the last turn only measures

        # sample a batch of data
        xb, yb = batch("train")
        # evaluate the loss
        logits, loss = model(xb, yb)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()


# --------------------------------------------------------------------------------------------------
# running it


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


def main(argv=None):
    sys.stdout = sys.stdout or open(os.devnull, "w")            # None where whoever started us closed it
    parser = make_parser(Config, __doc__, {})
    sys.stdout.reconfigure(errors="replace")                    # no console that lacks a character ends a run
    try:
        config = check(Config(**vars(parser.parse_args(argv))))
        device = pick_device(config.device)
        name, text = find_text(config.data)
        tokenizer, data = load_data(text, name, config.block_size)
        vocab_size = len(tokenizer.chars)
        print(f"{name} on {device}, torch {torch.__version__}: guessing scores ln({vocab_size}) = "
              f"{math.log(vocab_size):.4f}", flush=True)
        torch.manual_seed(config.seed)
        model = BigramLanguageModel(vocab_size).to(device)
        train(model, data, config, device)
        context = torch.zeros((1, 1), dtype=torch.long, device=device)  # token 0, a newline
        print(tokenizer.decode(model.generate(context, config.max_new_tokens)[0].tolist()), flush=True)
        if name == MANUAL:
            print(f"notice: it learned {MANUAL}, not Shakespeare. {BY_HAND}", file=sys.stderr)
    except UserError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):              # that one: whoever read our output has left
            parser.exit(1, f"bigram.py: cannot go on: {error}\n")
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        parser.exit(1, "bigram.py: out of memory; lower --batch_size or --block_size\n")


if __name__ == "__main__":
    main()
