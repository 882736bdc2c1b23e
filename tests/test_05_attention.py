"""Chapter 5: self-attention, and why it is scaled."""

from dataclasses import replace

import pytest
import torch
from helpers import WIDE, wide_model
from torch import nn
from torch.nn import functional as F

import gpt

CONFIG = gpt.Config(n_layer=2, n_head=4, n_embd=32, block_size=8, dropout=0.0)


@pytest.fixture
def x():
    torch.manual_seed(1337)
    return torch.randn(4, 8, 32)  # (B, T, C)


def by_hand(head, x, causal=True):
    """The formula, one position and one pair at a time, in double precision."""
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


def attention_weights(head, x):
    maps = []
    hook = head.dropout.register_forward_hook(lambda module, args, output: maps.append(args[0]))
    head(x)
    hook.remove()
    return maps[0]  # (B, T, T)


def test_the_variance_of_a_dot_product_grows_with_the_head_size_and_scaling_brings_it_back():
    torch.manual_seed(1337)
    k = torch.randn(4, 8, 16)  # unit variance, head size 16
    q = torch.randn(4, 8, 16)
    wei = q @ k.transpose(-2, -1)
    assert wei.var().item() == pytest.approx(18.44, abs=0.005)
    assert (wei * 16**-0.5).var().item() == pytest.approx(1.15, abs=0.005)


def test_softmax_sharpens_towards_the_largest_when_its_inputs_are_large():
    a = torch.tensor([0.1, -0.2, 0.3, -0.2, 0.5])
    soft = torch.tensor([0.1925, 0.1426, 0.2351, 0.1426, 0.2872])
    sharp = torch.tensor([0.0326, 0.0030, 0.1615, 0.0030, 0.8000])
    assert torch.allclose(F.softmax(a, -1), soft, atol=5e-5)
    assert torch.allclose(F.softmax(8 * a, -1), sharp, atol=5e-5)


def test_a_saturated_softmax_has_hardly_a_gradient():
    def gradient(scale):
        a = (scale * torch.tensor([0.1, -0.2, 0.3, -0.2, 0.5])).requires_grad_()
        F.softmax(a, -1)[0].backward()
        return a.grad.abs().max().item()

    assert gradient(1) > 0.1 and gradient(100) < 1e-8


def test_the_head_is_the_formula_scaled_by_the_head_size(x):
    head = gpt.Head(CONFIG)
    assert head.key.out_features == 8  # 32 channels for four heads
    assert torch.allclose(head(x), by_hand(head, x), atol=1e-6)


def test_a_trusted_implementation_agrees(x):
    head = gpt.Head(CONFIG)
    trusted = F.scaled_dot_product_attention(head.query(x), head.key(x), head.value(x), is_causal=True)
    assert torch.allclose(head(x), trusted, atol=1e-6)


def test_query_key_and_value_are_three_layers_without_bias():
    head = gpt.Head(CONFIG)
    shapes = {name: tuple(p.shape) for name, p in head.named_parameters()}
    assert shapes == {"key.weight": (8, 32), "query.weight": (8, 32), "value.weight": (8, 32)}


def test_each_row_of_affinities_sums_to_one_and_the_future_gets_nothing(x):
    wei = attention_weights(gpt.Head(CONFIG), x)  # (B, T, T)
    assert torch.allclose(wei.sum(-1), torch.ones(4, 8))
    assert (wei.triu(1) == 0).all() and (wei.tril().diagonal(dim1=1, dim2=2) > 0).all()


LAYERS = [
    ("head", lambda: gpt.Head(CONFIG)),
    ("heads in a loop", lambda: gpt.MultiHeadAttention(replace(CONFIG, fused=False))),
    ("heads at once", lambda: gpt.MultiHeadAttention(CONFIG)),
    ("block", lambda: gpt.Block(CONFIG)),
]


@pytest.mark.parametrize("name, make", LAYERS)
def test_editing_the_future_does_not_change_the_past(name, make, x):
    layer = make()
    for t in range(1, 8):
        other = x.clone()
        other[:, t:] = torch.randn(4, 8 - t, 32)
        before, after = layer(x), layer(other)
        assert torch.allclose(before[:, :t], after[:, :t], atol=1e-6)
        assert not torch.allclose(before[:, t], after[:, t], atol=1e-3)  # the present does change


@pytest.mark.parametrize("name, make", LAYERS)
def test_the_present_hears_all_of_its_past(name, make, x):
    layer, x = make(), x.requires_grad_()
    layer(x)[:, 5].sum().backward()
    heard = x.grad.abs().sum((0, 2)) > 0  # (T,)
    assert heard.tolist() == [True] * 6 + [False] * 2


@pytest.mark.parametrize("name, make", LAYERS)
def test_there_is_no_talk_across_the_batch(name, make, x):
    layer, other = make(), x.clone()
    other[1] = torch.randn(8, 32)
    assert torch.allclose(layer(x)[[0, 2, 3]], layer(other)[[0, 2, 3]], atol=1e-6)


def test_attention_has_no_notion_of_space(x):
    head = gpt.Head(CONFIG)
    shuffled = torch.cat([x[:, torch.randperm(7)], x[:, 7:]], dim=1)  # another order of the past
    assert torch.allclose(head(x)[:, 7], head(shuffled)[:, 7], atol=1e-6)


def test_without_the_mask_it_is_an_encoder_and_everything_hears_everything(x):
    head = gpt.Head(CONFIG)
    head.tril.fill_(1)
    assert torch.allclose(head(x), by_hand(head, x, causal=False), atol=1e-6)
    order = torch.randperm(8)
    assert torch.allclose(head(x)[:, order], head(x[:, order]), atol=1e-6)  # permute in, permute out


def test_fewer_positions_than_block_size_will_do(x):
    head = gpt.Head(CONFIG)
    assert torch.allclose(head(x[:, :3]), head(x)[:, :3], atol=1e-6)


def test_dropout_falls_on_the_affinities_in_training_and_not_in_eval(x):
    head = gpt.Head(replace(CONFIG, dropout=0.5))
    with torch.no_grad():
        head.value.weight.zero_()
        head.value.weight[:, :] = torch.eye(32)[:8]
        ones = torch.ones(400, 8, 32)
        out = head(ones)[:, 0, 0]  # one affinity of 1: dropped, or doubled
    assert set(out.tolist()) == {0.0, 2.0} and 0.4 < out.mean() / 2 < 0.6
    head.eval()
    assert torch.allclose(head(ones)[:, 0, 0], torch.ones(400))


def test_the_gradient_is_that_of_finite_differences():
    torch.manual_seed(0)
    head = gpt.Head(gpt.Config(n_embd=4, n_head=2, block_size=3, dropout=0.0)).double()
    x = torch.randn(2, 3, 4, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(head, (x,))


def test_torchs_own_multi_head_attention_agrees_with_ours(x):
    ours = gpt.MultiHeadAttention(CONFIG)
    theirs = nn.MultiheadAttention(32, 4, batch_first=True)
    with torch.no_grad():
        rows = [
            layer.weight
            for kind in ("query", "key", "value")
            for layer in (getattr(head, kind) for head in ours.heads)
        ]
        theirs.in_proj_weight.copy_(torch.cat(rows))
        theirs.in_proj_bias.zero_()
        theirs.out_proj.weight.copy_(ours.proj.weight)
        theirs.out_proj.bias.copy_(ours.proj.bias)
    mask = torch.triu(torch.ones(8, 8, dtype=torch.bool), 1)  # True: not allowed to look
    expected, _ = theirs(x, x, x, attn_mask=mask, need_weights=False)
    assert torch.allclose(ours(x), expected, atol=1e-5)


def test_queries_keys_and_values_cannot_stand_in_for_each_other():
    torch.manual_seed(0)
    head, x = gpt.Head(WIDE), torch.randn(2, 8, 32)
    roles = {"query": head.query.weight, "key": head.key.weight, "value": head.value.weight}

    def attend(query, key, value):
        q, k, v = (x @ roles[name].T for name in (query, key, value))
        wei = (q @ k.mT / 8**0.5).masked_fill(torch.ones(8, 8).triu(1) == 1, float("-inf"))
        return F.softmax(wei, dim=-1) @ v

    assert torch.allclose(head(x), attend("query", "key", "value"), atol=1e-6)
    for swapped in [("key", "query", "value"), ("value", "key", "query"), ("query", "value", "key")]:
        assert not torch.allclose(head(x), attend(*swapped), atol=1e-3)


def test_the_model_has_one_through_its_positions_and_without_them_hears_a_bag():
    model = wide_model(replace(WIDE, n_layer=1))  # deeper ones can count through the mask
    idx = torch.randint(10, (1, 8))
    other = torch.cat([idx[:, :7].flip(1), idx[:, 7:]], dim=1)
    assert not torch.allclose(model(idx)[0][:, 7], model(other)[0][:, 7], atol=1e-2)
    with torch.no_grad():
        model.position_embedding_table.weight.zero_()
    assert torch.allclose(model(idx)[0][:, 7], model(other)[0][:, 7], atol=1e-4)
