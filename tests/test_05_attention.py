""" Chapter 5: self-attention, and why it is scaled. """
from dataclasses import replace

import pytest
import torch
from helpers import WIDE, new_model
from torch.nn import functional as F

import gpt


@pytest.fixture
def x():
    torch.manual_seed(1337)
    return torch.randn(4, 8, 32)  # (B, T, C)


@pytest.fixture
def head():
    torch.manual_seed(1337)
    return gpt.Head(WIDE)


def by_hand(head, x, causal=True):
    """ the formula, one position and one pair at a time, in double precision """
    x, hs = x.double(), head.key.out_features
    q, k, v = (x @ layer.weight.double().T for layer in (head.query, head.key, head.value))
    out = torch.zeros(*x.shape[:2], hs, dtype=torch.double)
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            seen = range(t + 1) if causal else range(x.shape[1])
            scores = torch.stack([q[b, t] @ k[b, s] / hs**0.5 for s in seen])
            weights = scores.exp() / scores.exp().sum()
            out[b, t] = sum(w * v[b, s] for w, s in zip(weights, seen))
    return out.float()


def test_the_variance_of_a_dot_product_grows_with_the_head_size_and_scaling_brings_it_back():
    torch.manual_seed(1337)
    k = torch.randn(4, 8, 16)  # unit variance, head size 16
    q = torch.randn(4, 8, 16)
    wei = q @ k.transpose(-2, -1)
    assert wei.var().item() == pytest.approx(18.44, abs=0.005)
    assert (wei * 16**-0.5).var().item() == pytest.approx(1.15, abs=0.005)


def test_softmax_sharpens_towards_the_largest_when_its_inputs_are_large():
    a = torch.tensor([0.1, -0.2, 0.3, -0.2, 0.5])
    assert F.softmax(a, -1).tolist() == pytest.approx([0.1925, 0.1426, 0.2351, 0.1426, 0.2872], abs=5e-5)
    assert F.softmax(8 * a, -1).tolist() == pytest.approx([0.0326, 0.0030, 0.1615, 0.0030, 0.8000], abs=5e-5)


def test_a_saturated_softmax_has_hardly_a_gradient():
    def gradient(scale):
        a = (scale * torch.tensor([0.1, -0.2, 0.3, -0.2, 0.5])).requires_grad_()
        F.softmax(a, -1)[0].backward()
        return a.grad.abs().max().item()

    assert gradient(1) > 0.1 and gradient(100) < 1e-8


@pytest.mark.parametrize("T", [8, 3, 1])  # a full context, and less
def test_the_head_is_the_formula_scaled_by_the_head_size(head, x, T):
    assert head.key.out_features == 8  # 32 channels for four heads
    assert torch.allclose(head(x[:, :T]), by_hand(head, x[:, :T]), atol=1e-6)


def test_each_row_of_affinities_sums_to_one_and_the_future_gets_nothing(head, x):
    maps = []
    head.dropout.register_forward_hook(lambda module, args, output: maps.append(args[0]))
    head(x)
    wei = maps[0]  # (B, T, T)
    assert torch.allclose(wei.sum(-1), torch.ones(4, 8))
    assert (wei.triu(1) == 0).all() and (wei.tril().diagonal(dim1=1, dim2=2) > 0).all()


def test_without_the_triangle_it_is_an_encoder_and_everything_hears_everything(head, x, monkeypatch):
    monkeypatch.setattr(torch, "tril", lambda ones: ones)
    assert torch.allclose(head(x), by_hand(head, x, causal=False), atol=1e-6)
    order = torch.randperm(8)
    assert torch.allclose(head(x)[:, order], head(x[:, order]), atol=1e-6)  # permute in, permute out


def test_attention_has_no_notion_of_space_without_position_embeddings_the_past_is_a_bag():
    model = new_model(replace(WIDE, n_layer=1))  # deeper ones can count through the mask
    idx = torch.randint(10, (1, 8))
    other = torch.cat([idx[:, :7].flip(1), idx[:, 7:]], dim=1)
    assert not torch.allclose(model(idx)[0][:, 7], model(other)[0][:, 7], atol=1e-2)
    with torch.no_grad():
        model.position_embedding_table.weight.zero_()
    assert torch.allclose(model(idx)[0][:, 7], model(other)[0][:, 7], atol=1e-4)


LAYERS = {  # of this chapter and of the next ones, up to the complete model
    "head": gpt.Head,
    "heads in a loop": lambda config: gpt.MultiHeadAttention(replace(config, fused=False)),
    "heads at once": gpt.MultiHeadAttention,
    "block": gpt.Block,
    "model, heads in a loop": lambda config: new_model(replace(config, fused=False)),
    "model, heads at once": new_model,
}


@pytest.mark.parametrize("name", LAYERS)
def test_each_position_hears_all_of_its_past_nothing_of_its_future_and_no_other_row(name):
    torch.manual_seed(0)
    layer, x, edited = LAYERS[name](WIDE), torch.randn(3, 8, 32), torch.randn(32)
    if name.startswith("model"):
        x, edited = torch.randint(9, (3, 8)), 9
    for t in range(8):
        other = x.clone()
        other[1, t] = edited  # one position in one row
        before, after = (out[0] if isinstance(out, tuple) else out for out in (layer(x), layer(other)))
        heard = ((after - before).abs() > 1e-6).any(-1)  # (B, T)
        assert heard.tolist() == [[row == 1 and position >= t for position in range(8)] for row in range(3)]
