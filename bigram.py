"""
The bigram baseline: the lecture's first language model, which sees one character and guesses the next.

    python bigram.py                 train on Tiny Shakespeare (seconds on a CPU), then print 500 characters
    python bigram.py --help          every flag, and the question it answers

Guessing would give a loss of ln(65) = 4.1744. This model comes near 2.4519, the best that any bigram can do
on the training text, and its words are not words yet. gpt.py does better: the same program, with attention.
"""
# the lesson takes torch and a few of these helpers; the other imports are for the program below `running it`
import math
from dataclasses import dataclass

from data.errors import RunFailed
from data.flags import check, make_parser, parse
from data.machine import pick_device, torch_for_a_run
from data.processes import joined, part
from data.screen import note, show
from data.script import plain_errors, run_script
from data.text import BY_HAND, MANUAL, check_length, encode_text, find_text

import torch
import torch.nn as nn
from torch.nn import functional as F

# ---- settings


@dataclass
class Config:
    """ the lecture's baseline; every line is also a flag, and its comment the help """
    # training
    batch_size: int = 32         # how many sequences in one step?
    block_size: int = 8          # how many characters in each?
    max_iters: int = 3000        # how many steps?
    eval_interval: int = 300     # how many steps from one measurement of the loss to the next?
    eval_iters: int = 200        # over how many batches of each split is the loss averaged?
    learning_rate: float = 1e-2  # how large is a step?
    seed: int = 1337             # which random numbers?
    # data
    data: str = ""  # which text file? (default: input.txt, downloaded if absent)
    # running
    device: str = "auto"       # where does it run? cpu, cuda, cuda:1, mps (auto: the fastest that is here)
    max_new_tokens: int = 500  # how many characters to write at the end?


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


class BigramLanguageModel(nn.Module):
    """ a table: row i has a score, called logit, for each character that may come after character i """

    def __init__(self, vocab_size):
        super().__init__()
        self.token_embedding_table = nn.Embedding(vocab_size, vocab_size)

    def forward(self, idx, targets=None):
        # idx and targets of shape (B, T): tokens
        logits = self.token_embedding_table(idx)  # (B, T, C), C = vocab_size: a row of scores for each token

        if targets is None:
            loss = None
        else:
            B, T, C = logits.shape  # here C is vocab_size
            logits = logits.view(B*T, C)  # cross_entropy wants (N, C) and (N,)
            targets = targets.view(B*T)
            loss = F.cross_entropy(logits, targets)
        return logits, loss

    @torch.no_grad()
    def generate(self, idx, max_new_tokens):
        """ idx (B, T) of tokens -> (B, T + max_new_tokens), each new one drawn from the prediction """
        for _ in range(max_new_tokens):
            logits, loss = self(idx)  # all of idx goes in, though only its last character counts here
            logits = logits[:, -1, :]                           # the last time step: (B, C)
            probs = F.softmax(logits, dim=-1)                   # (B, C)
            idx_next = torch.multinomial(probs, num_samples=1)  # (B, 1): not always the likeliest
            idx = torch.cat((idx, idx_next), dim=1)             # (B, T + 1)
        return idx


# ---- training


def train(model, splits, config, device):
    """ the training loop; prints the loss of both splits every eval_interval steps and at the end """
    def next_batch(split):
        return get_batch(splits[split], config, device)

    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate)
    for step in range(config.max_iters + 1):
        if step % config.eval_interval == 0 or step == config.max_iters:
            losses = estimate_loss(model, next_batch, config.eval_iters)
            if not math.isfinite(losses["train"] + losses["val"]):
                raise RunFailed(f"the loss is not a number at step {step}; try a lower --learning_rate")
            show(f"step {step}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")
        if step == config.max_iters:
            break  # the last turn only measures

        xb, yb = next_batch("train")
        logits, loss = model(xb, yb)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()


# running it


def main(argv=None):
    parser = make_parser(Config, "bigram.py", __doc__, {})
    with plain_errors(parser, "lower --batch_size or --block_size"), joined():
        config = Config(**parse(parser, argv))
        check(config)
        if not part():
            return  # one process is enough
        device = pick_device(config.device)
        with torch_for_a_run(device):
            train_and_write(config, device)


def train_and_write(config, device):
    name, text = find_text(config.data)
    tokenizer = Tokenizer(text)
    splits = split_data(text, tokenizer)
    check_length(name, splits, config.block_size)
    vocab_size = len(tokenizer.chars)
    show(f"{name} on {device}, torch {torch.__version__}: guessing scores ln({vocab_size}) = "
         f"{math.log(vocab_size):.4f}")
    torch.manual_seed(config.seed)
    model = BigramLanguageModel(vocab_size).to(device)
    train(model, splits, config, device)
    context = torch.zeros((1, 1), dtype=torch.long, device=device)  # token 0, a newline in most texts
    show(tokenizer.decode(model.generate(context, config.max_new_tokens)[0].tolist()))
    if name == MANUAL:
        note(f"notice: the model learned {MANUAL}, not Shakespeare. {BY_HAND}")


if __name__ == "__main__":
    run_script(main)
