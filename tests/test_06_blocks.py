"""Chapter 6: several heads, feed-forward, residual connections, layer norm, dropout."""

from dataclasses import replace

import pytest
import torch
from helpers import WIDE, wide_model
from torch import nn
from torch.nn import functional as F

import gpt

CONFIG = gpt.Config(n_layer=2, n_head=4, n_embd=48, block_size=8, dropout=0.0)


@pytest.fixture
def x():
    torch.manual_seed(1337)
    return torch.randn(4, 8, 48)  # (B, T, C)


def test_heads_are_concatenated_and_projected(x):
    sa = gpt.MultiHeadAttention(replace(CONFIG, fused=False))
    assert len(sa.heads) == 4
    together = torch.cat([head(x) for head in sa.heads], dim=-1)  # four of (B, T, 12) -> (B, T, 48)
    assert torch.allclose(sa(x), together @ sa.proj.weight.T + sa.proj.bias, atol=1e-6)


@pytest.mark.parametrize("n_head", [1, 2, 4, 6])
def test_heads_as_a_batch_dimension_compute_what_the_loop_computes(n_head, x):
    sa = gpt.MultiHeadAttention(replace(CONFIG, n_head=n_head))
    results = []
    for sa.fused in (True, False):
        sa.zero_grad()
        inputs = x.clone().requires_grad_()
        out = sa(inputs)
        out.pow(2).sum().backward()
        results.append([out, inputs.grad] + [p.grad for p in sa.parameters()])
    for fused, loop in zip(*results):  # the values, and every gradient
        assert torch.allclose(fused, loop, rtol=1e-4, atol=1e-4)


def test_both_ways_have_the_same_weights_under_the_same_names():
    models = []
    for fused in (True, False):
        torch.manual_seed(1)
        models.append(gpt.GPTLanguageModel(replace(CONFIG, fused=fused), 65).state_dict())
    assert models[0].keys() == models[1].keys()
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


@pytest.mark.parametrize("fused", [True, False])
def test_attention_drops_affinities_in_training_only_on_either_way(fused):
    torch.manual_seed(0)
    sa = gpt.MultiHeadAttention(replace(CONFIG, dropout=0.5, fused=fused))
    sa.dropout.p = 0.0  # leave the other dropout out of it
    with torch.no_grad():
        sa.proj.weight.copy_(torch.eye(48))
        sa.proj.bias.zero_()
        for head in sa.heads:
            head.value.weight.copy_(torch.eye(48)[:12])
        out = sa(torch.ones(400, 1, 48))[:, 0, 0]  # one affinity of 1: dropped, or doubled
        assert set(out.tolist()) == {0.0, 2.0} and 0.4 < out.mean() / 2 < 0.6
        sa.eval()
        assert torch.allclose(sa(torch.ones(400, 1, 48)), torch.ones(400, 1, 48))


@pytest.mark.parametrize("branch", ["sa", "ffwd"])
def test_both_branches_end_in_dropout(branch, x):
    torch.manual_seed(0)
    layer = getattr(gpt.Block(replace(CONFIG, dropout=0.5)), branch)
    if branch == "sa":
        for head in layer.heads:
            head.dropout.p = 0.0  # the affinities have their own test
    out = layer(x)
    assert 0.4 < (out == 0).float().mean() < 0.6
    layer.eval()
    kept = out != 0
    assert torch.allclose(out[kept], 2 * layer(x)[kept], atol=1e-5)
    assert not (layer(x) == 0).any()


def test_feed_forward_acts_on_each_position_alone(x):
    ffwd = gpt.FeedForward(CONFIG)
    other = x.clone()
    other[:, 3] = 0
    same = [t for t in range(8) if t != 3]
    assert torch.allclose(ffwd(x)[:, same], ffwd(other)[:, same], atol=1e-6)
    assert torch.allclose(ffwd(x)[:, 3], ffwd(x[:, 3]), atol=1e-6)


def test_feed_forward_is_four_times_as_wide_inside_with_a_relu(x):
    ffwd = gpt.FeedForward(CONFIG)
    up, down = [layer for layer in ffwd.net if isinstance(layer, nn.Linear)]
    assert up.weight.shape == (192, 48) and down.weight.shape == (48, 192)
    inside = (x @ up.weight.T + up.bias).clamp(min=0)  # (B, T, 4C), nothing below zero
    assert torch.allclose(ffwd(x), inside @ down.weight.T + down.bias, atol=1e-5)


def test_a_block_is_the_identity_while_its_branches_say_nothing(x):
    block = gpt.Block(CONFIG)
    with torch.no_grad():
        for layer in (block.sa.proj, block.ffwd.net[2]):
            layer.weight.zero_()
            layer.bias.zero_()
    assert torch.equal(block(x), x)


def test_norm_comes_before_each_branch_unlike_the_paper_of_2017(x):
    block = gpt.Block(CONFIG)
    with torch.no_grad():  # two norms that can be told from each other
        block.ln1.weight.uniform_(0.5, 2)
        block.ln2.weight.uniform_(0.5, 2)
        block.ln2.bias.uniform_(-1, 1)
    between = x + block.sa(block.ln1(x))
    assert torch.allclose(block(x), between + block.ffwd(block.ln2(between)), atol=1e-6)
    post = block.ln1(x + block.sa(x))
    assert not torch.allclose(block(x), block.ln2(post + block.ffwd(post)), atol=0.1)


def test_layer_norm_by_hand(x):
    mean, var = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
    assert torch.allclose(gpt.Block(CONFIG).ln1(x), (x - mean) / (var + 1e-5).sqrt(), atol=1e-5)


def test_layer_norm_looks_at_one_token_and_batch_norm_at_the_batch(x):
    rows = x.view(32, 48)  # (N, C)
    other = rows.clone()
    other[1:] += 5  # other neighbours for the first row
    layer, batch = nn.LayerNorm(48), nn.BatchNorm1d(48)
    assert torch.equal(layer(rows)[0], layer(other)[0])
    assert not torch.allclose(batch(rows)[0], batch(other)[0], atol=0.1)
    assert layer(rows).mean(1).abs().max() < 1e-5  # LayerNorm: each row has mean 0
    assert batch(rows).mean(0).abs().max() < 1e-5  # BatchNorm: each column


def test_gradients_reach_the_embeddings_through_the_residual_road():
    torch.manual_seed(0)
    model = gpt.GPTLanguageModel(replace(CONFIG, n_layer=12), 65)
    idx = torch.randint(65, (2, 8))
    model(idx, idx)[1].backward()
    first, last = (model.blocks[i].ffwd.net[0].weight.grad.norm() for i in (0, -1))
    assert 0.1 < first / last < 10


def test_dropout_is_off_in_eval():
    model = gpt.GPTLanguageModel(replace(CONFIG, dropout=0.3), 65)
    idx = torch.randint(65, (2, 8))
    assert not torch.equal(model(idx)[0], model(idx)[0])
    model.eval()
    assert torch.equal(model(idx)[0], model(idx)[0])


def test_a_model_that_is_put_together_by_hand_is_the_model():
    torch.manual_seed(0)
    model = gpt.GPTLanguageModel(replace(CONFIG, init_std=0.3), 65)
    with torch.no_grad():
        model.ln_f.weight.uniform_(0.5, 2)
    idx = torch.randint(65, (2, 5))
    x = model.token_embedding_table.weight[idx] + model.position_embedding_table.weight[:5]
    for block in model.blocks:
        x = block(x)
    x = F.layer_norm(x, (48,), model.ln_f.weight, model.ln_f.bias)
    assert torch.allclose(model(idx)[0], x @ model.lm_head.weight.T + model.lm_head.bias, atol=1e-4)


@pytest.mark.parametrize("n_head", [1, 2, 4, 6])
@pytest.mark.parametrize("fused", [True, False])
def test_any_number_of_heads_is_causal_either_way(n_head, fused):
    torch.manual_seed(0)
    sa = gpt.MultiHeadAttention(replace(WIDE, n_embd=48, n_head=n_head, fused=fused))
    x = torch.randn(2, 8, 48, requires_grad=True)
    sa(x)[:, :5].pow(2).sum().backward()
    assert (x.grad[:, :5] != 0).any() and not x.grad[:, 5:].any()


def test_dropout_stands_in_three_places_and_nowhere_else():
    model = wide_model(replace(WIDE, dropout=0.5))
    places = [name for name, m in model.blocks[0].named_modules() if isinstance(m, torch.nn.Dropout)]
    assert places == [f"sa.heads.{i}.dropout" for i in range(4)] + ["sa.dropout", "ffwd.net.3"]
    for m in model.blocks.modules():
        if isinstance(m, torch.nn.Dropout):
            m.p = 0.0
    idx = torch.randint(10, (2, 8))
    assert torch.equal(model.train()(idx)[0], model.eval()(idx)[0])  # none at the embeddings or the end
