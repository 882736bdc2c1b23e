""" Chapter 4: the mathematical trick, averaging the past three ways. """
import pytest
import torch
from torch.nn import functional as F

import gpt

B, T, C = 4, 8, 2


@pytest.fixture
def x():
    torch.manual_seed(1337)
    return torch.randn(B, T, C)


def two_loops(x):
    xbow = torch.zeros(B, T, C)  # "bag of words": the mean of all words so far
    for b in range(B):
        for t in range(T):
            xbow[b, t] = x[b, :t + 1].mean(0)  # (t + 1, C) -> (C,)
    return xbow


def one_matrix(x):
    wei = torch.tril(torch.ones(T, T))
    wei = wei / wei.sum(1, keepdim=True)  # each row sums to one
    return wei @ x  # (T, T) @ (B, T, C) -> (B, T, C)


def masked_softmax(x):
    wei = torch.zeros((T, T)).masked_fill(torch.tril(torch.ones(T, T)) == 0, float("-inf"))
    return F.softmax(wei, dim=-1) @ x


@pytest.mark.parametrize("way", [one_matrix, masked_softmax])
def test_three_ways_to_average_the_past_are_equal(way, x):
    assert torch.allclose(two_loops(x), way(x), atol=1e-6)


def test_the_first_position_has_only_itself_and_the_last_has_everything(x):
    xbow = masked_softmax(x)
    assert torch.allclose(xbow[:, 0], x[:, 0]) and torch.allclose(xbow[:, -1], x.mean(1), atol=1e-6)


def test_a_head_that_looks_for_nothing_averages_its_past(x):
    head = gpt.Head(gpt.Config(n_embd=C, n_head=1, block_size=T, dropout=0.0))
    with torch.no_grad():
        head.query.weight.zero_()  # all affinities zero: the third way above
        head.value.weight.copy_(torch.eye(C))
    assert torch.allclose(head(x), two_loops(x), atol=1e-6)
