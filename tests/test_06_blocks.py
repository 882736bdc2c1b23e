""" Chapter 6: several heads, feed-forward, residual connections, layer norm, dropout. """
from dataclasses import replace

import pytest
import torch
from helpers import new_model
from torch import nn
from torch.nn import functional as F

import gpt

CONFIG = gpt.Config(n_layer=2, n_head=4, n_embd=48, block_size=8, dropout=0.0)
either_way = pytest.mark.parametrize("fused", [True, False])


@pytest.fixture
def x():
    torch.manual_seed(1337)
    return torch.randn(4, 8, 48)  # (B, T, C)


@either_way
@pytest.mark.parametrize("n_head", [1, 2, 4, 6])
def test_heads_are_concatenated_and_projected_as_torchs_own_are_and_so_is_every_gradient(n_head, fused, x):
    ours = gpt.MultiHeadAttention(replace(CONFIG, n_head=n_head, fused=fused))
    theirs = nn.MultiheadAttention(48, n_head, batch_first=True)
    assert len(ours.heads) == n_head

    def rows(what):
        kinds = ("query", "key", "value")
        return torch.cat([what(getattr(head, kind)) for kind in kinds for head in ours.heads])

    with torch.no_grad():
        theirs.in_proj_weight.copy_(rows(lambda layer: layer.weight))
        theirs.in_proj_bias.zero_()
        theirs.out_proj.load_state_dict(ours.proj.state_dict())
    mask = torch.triu(torch.ones(8, 8, dtype=torch.bool), 1)  # True: not allowed to look
    x, other = x.requires_grad_(), x.detach().clone().requires_grad_()
    out, expected = ours(x), theirs(other, other, other, attn_mask=mask, need_weights=False)[0]
    out.pow(2).sum().backward()
    expected.pow(2).sum().backward()
    for mine, trusted in [(out, expected), (x.grad, other.grad),
                          (rows(lambda layer: layer.weight.grad), theirs.in_proj_weight.grad),
                          (ours.proj.weight.grad, theirs.out_proj.weight.grad)]:
        assert torch.allclose(mine, trusted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("n_head", [1, 4])
@pytest.mark.parametrize("T", [8, 3, 1])  # a full context, and less
def test_all_heads_at_once_give_what_each_head_gives_and_the_same_gradients(n_head, T, x):
    sa = gpt.MultiHeadAttention(replace(CONFIG, n_head=n_head))
    x = 3 * x[:, :T]
    results, gradients = [], []
    for way in (lambda: torch.cat([head(x) for head in sa.heads], dim=-1), lambda: sa.all_at_once(x)):
        sa.zero_grad()
        out = way()
        out.pow(2).sum().backward()
        results.append(out)
        gradients.append([p.grad.clone() for p in sa.heads.parameters()])
    assert results[0].shape == (4, T, 48) and torch.allclose(*results, atol=1e-5)
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-3) for a, b in zip(*gradients, strict=True))


def test_both_ways_have_the_same_weights_under_the_same_names():
    at_once, loop = (new_model(replace(CONFIG, fused=fused)).state_dict() for fused in (True, False))
    assert list(at_once) == list(loop)
    assert all(torch.equal(at_once[name], loop[name]) for name in loop)


def test_feed_forward_is_four_times_as_wide_inside_with_a_relu_for_each_position_alone(x):
    ffwd = gpt.FeedForward(CONFIG)
    up, down = [layer for layer in ffwd.net if isinstance(layer, nn.Linear)]
    assert up.weight.shape == (192, 48) and down.weight.shape == (48, 192)
    for position in range(8):
        alone = x[:, position]  # (B, C)
        inside = (alone @ up.weight.T + up.bias).clamp(min=0)  # (B, 4C), nothing below zero
        assert torch.allclose(ffwd(x)[:, position], inside @ down.weight.T + down.bias, atol=1e-5)


def test_a_block_is_the_identity_while_its_branches_say_nothing(x):
    block = gpt.Block(CONFIG)
    with torch.no_grad():
        for p in [*block.sa.proj.parameters(), *block.ffwd.net[2].parameters()]:
            p.zero_()
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
    assert torch.allclose(layer(rows)[0], layer(other)[0], atol=1e-6)
    assert not torch.allclose(batch(rows)[0], batch(other)[0], atol=0.1)
    assert layer(rows).mean(1).abs().max() < 1e-5  # LayerNorm: each row has mean 0
    assert batch(rows).mean(0).abs().max() < 1e-5  # BatchNorm: each column


def test_gradients_reach_the_first_of_twelve_blocks_as_strongly_as_the_last():
    model, idx = new_model(replace(CONFIG, n_layer=12), 65), torch.randint(65, (2, 8))
    model(idx, idx)[1].backward()
    first, last = (model.blocks[i].ffwd.net[0].weight.grad.norm() for i in (0, -1))
    assert 0.1 < first / last < 10


@either_way
def test_attention_drops_affinities_in_training_only(fused):
    torch.manual_seed(0)
    sa = gpt.MultiHeadAttention(replace(CONFIG, dropout=0.5, fused=fused))
    sa.dropout.p = 0.0  # the other dropout has its own test
    with torch.no_grad():
        sa.proj.weight.copy_(torch.eye(48))
        sa.proj.bias.zero_()
        for head in sa.heads:
            head.value.weight.copy_(torch.eye(48)[:12])
        ones = torch.ones(400, 1, 48)
        out = sa(ones)[:, 0, 0]  # one affinity of 1: dropped, or doubled
        assert set(out.tolist()) == {0.0, 2.0} and 0.4 < out.mean() / 2 < 0.6
        assert torch.allclose(sa.eval()(ones), ones)


@pytest.mark.parametrize("branch", ["sa", "ffwd"])
def test_both_branches_end_in_dropout(branch, x):
    torch.manual_seed(0)
    layer = getattr(gpt.Block(replace(CONFIG, dropout=0.5)), branch)
    if branch == "sa":
        for head in layer.heads:
            head.dropout.p = 0.0
    out = layer(x)
    kept, complete = out != 0, layer.eval()(x)
    assert 0.4 < kept.float().mean() < 0.6
    assert torch.allclose(out[kept], 2 * complete[kept], atol=1e-5)
    assert (complete != 0).all()


def test_dropout_has_three_places_and_no_other_and_is_off_in_eval():
    model, idx = new_model(replace(CONFIG, dropout=0.5)), torch.randint(10, (2, 8))
    drops = {name: m for name, m in model.named_modules() if isinstance(m, nn.Dropout)}
    places = [f"sa.heads.{i}.dropout" for i in range(4)] + ["sa.dropout", "ffwd.net.3"]
    assert list(drops) == [f"blocks.{i}.{place}" for i in range(2) for place in places]
    assert not torch.equal(model(idx)[0], model(idx)[0])
    written = model.eval()(idx)[0]
    assert torch.equal(written, model(idx)[0])
    for dropout in drops.values():
        dropout.p = 0.0
    assert torch.allclose(written, model.train()(idx)[0], atol=1e-5)  # none at the embeddings or the end


# ---- what is read is what runs


DIFFER = ("notice: Head.forward and all_at_once no longer compute the same; all_at_once runs, and --no-fused "
          "runs Head.forward\n")
MODELS = [gpt.Config(**gpt.SIZES[name]) for name in gpt.SIZES] + [CONFIG, replace(CONFIG, init_std=0.0)]


class WithoutMask(gpt.Head):
    def forward(self, x):
        wei = self.query(x) @ self.key(x).transpose(-2, -1) * self.key.out_features**-0.5
        return F.softmax(wei, dim=-1) @ self.value(x)


class WithAnotherScale(gpt.Head):
    def forward(self, x):
        wei = self.query(x) @ self.key(x).transpose(-2, -1) * x.shape[-1]**-0.5
        wei = wei.masked_fill(torch.ones(wei.shape[-2:]).tril() == 0, float("-inf"))
        return F.softmax(wei, dim=-1) @ self.value(x)


class WithoutQueries(gpt.MultiHeadAttention):
    def all_at_once(self, x):
        return torch.cat([head.value(x).cumsum(1) for head in self.heads], dim=-1)


@pytest.mark.parametrize("config", MODELS)
def test_a_run_compares_both_ways_and_says_nothing_while_they_agree(config, capsys):
    gpt.compare_heads(new_model(config), config)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("change", [WithoutMask, WithAnotherScale, WithoutQueries])
def test_a_run_says_so_when_they_no_longer_agree_unless_the_head_that_is_read_runs(change, capsys):
    model = new_model(CONFIG)
    for module in model.modules():
        if type(module) is change.__base__:
            module.__class__ = change  # the same weights, another forward
    gpt.compare_heads(model, CONFIG)
    assert capsys.readouterr().err == DIFFER
    gpt.compare_heads(model, replace(CONFIG, fused=False))
    assert capsys.readouterr().err == ""


def test_the_comparison_draws_no_random_number_of_the_run_and_leaves_the_mode_as_it_was():
    config = replace(CONFIG, dropout=0.5)
    model = new_model(config)
    before = torch.get_rng_state()
    gpt.compare_heads(model, config)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(module.training for module in model.modules())
    assert all(p.grad is None for p in model.parameters())


class DrawsAlways(gpt.Head):
    def forward(self, x):
        return nn.functional.dropout(super().forward(x), 0.5)


class AThousandthMore(gpt.Head):
    def forward(self, x):
        return super().forward(x) * 1.001


@pytest.mark.parametrize("change", [DrawsAlways, AThousandthMore])
def test_a_small_change_is_noticed_and_one_that_draws_random_numbers_leaves_those_of_the_run(change, capsys):
    model = new_model(CONFIG)
    for head in model.blocks[0].sa.heads:
        head.__class__ = change
    before = torch.get_rng_state()
    gpt.compare_heads(model, CONFIG)
    assert capsys.readouterr().err == DIFFER and torch.equal(torch.get_rng_state(), before)


class Wrapped(nn.Module):
    """ a layer inside another, with something added, as for fine-tuning by a few weights """

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x) + 1


@pytest.mark.parametrize("what", ["no heads", "no blocks", "another block"])
def test_a_model_that_a_learner_has_rebuilt_is_not_compared_and_no_crash(what, capsys):
    model = new_model(CONFIG)
    if what == "no heads":
        del model.blocks[0].sa.heads
    if what == "no blocks":
        del model.blocks
    if what == "another block":
        model.blocks[0] = nn.Identity()
    gpt.compare_heads(model, CONFIG)
    assert capsys.readouterr().err.startswith("notice: Head.forward and all_at_once cannot be compared (Attr")


def test_a_layer_that_is_wrapped_is_no_crash_of_the_comparison(capsys):
    model = new_model(CONFIG)
    head = model.blocks[0].sa.heads[0]
    head.key = Wrapped(head.key)  # has no weight of its own, which all_at_once would look for
    gpt.compare_heads(model, CONFIG)
    said = capsys.readouterr().err
    assert said == "" or said.startswith("notice: Head.forward and all_at_once cannot be compared (Attr")
