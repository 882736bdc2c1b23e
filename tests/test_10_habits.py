"""
Chapter 10: two habits. Name the dimensions and look at .shape; turn loops into products (chapter 4 has
the proof for time, chapter 6 for heads).
"""
import inspect
import math
import re

import pytest
import torch
from helpers import good, new_model, tiny
from torch import nn

import bigram
import gpt

CONFIG = gpt.Config(n_layer=1, n_head=2, n_embd=16, block_size=8, dropout=0.0)
B, T, C = 3, 8, 16
WIDTHS = [(gpt.Head, 8), (gpt.MultiHeadAttention, 16), (gpt.FeedForward, 16), (gpt.Block, 16)]


@pytest.mark.parametrize("layer, width", WIDTHS)
def test_dummy_data_goes_through_each_layer_as_soon_as_it_exists(layer, width):
    assert layer(CONFIG)(torch.randn(B, T, C)).shape == (B, T, width)
    assert layer(CONFIG)(torch.randn(B, 1, C)).shape == (B, 1, width)  # and one character alone


def test_the_model_turns_b_by_t_integers_into_b_by_t_by_vocab_size_logits():
    logits, loss = new_model(CONFIG, 65)(torch.zeros((B, T), dtype=torch.long))
    assert logits.shape == (B, T, 65) and loss is None


def test_the_first_line_of_every_forward_names_the_shape():
    classes = [c for module in (bigram, gpt) for c in vars(module).values()
               if inspect.isclass(c) and issubclass(c, nn.Module) and c.__module__ == module.__name__]
    assert len(classes) >= 6
    for c in classes:
        assert "of shape (B, T" in inspect.getsource(c.forward).splitlines()[1], c


def test_the_program_prints_the_loss_of_guessing_beside_its_first_loss(tmp_path):
    line = re.search(r"step 0: train loss (\S+), val loss (\S+) \(guessing scores ln\((\d+)\) = (\S+)\)\n",
                     good(*tiny(tmp_path, "--max_iters", 0)).out)
    train, val, vocab_size, guessing = map(float, line.groups())
    assert guessing == pytest.approx(math.log(vocab_size), abs=5e-5)
    assert abs(train - guessing) < 0.1 and abs(val - guessing) < 0.1
