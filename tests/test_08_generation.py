""" Chapter 8: writing, one character after another, and measuring a model on a text. """
import math
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers import WIDE, new_model
from torch.nn import functional as F

import bigram
import gpt

START = torch.zeros((1, 1), dtype=torch.long)


@pytest.fixture
def model():
    """ of ten characters, with dropout, and in training mode as every new model """
    return new_model(replace(WIDE, dropout=0.3))


def seeded(generate, *args, **settings):
    torch.manual_seed(7)
    return generate(*args, **settings)


def predicted(model, temperature=1.0):
    """ what comes after START, how likely, (vocab_size,) """
    return F.softmax(model.eval()(START)[0][0, -1] / temperature, dim=-1)


# ---- writing


@pytest.mark.parametrize("rows, count", [(1, 30), (3, 30), (1, 0)])
def test_it_draws_exactly_the_lectures_numbers(model, rows, count):
    def lectures(idx, max_new_tokens):
        for _ in range(max_new_tokens):
            logits, _ = model(idx[:, -8:])               # (B, T, C)
            probs = F.softmax(logits[:, -1, :], dim=-1)  # (B, C)
            idx = torch.cat((idx, torch.multinomial(probs, num_samples=1)), dim=1)
        return idx

    idx = torch.randint(10, (rows, 5))
    ours = seeded(model.generate, idx, count)
    model.eval()
    assert ours.shape == (rows, 5 + count) and torch.equal(ours[:, :5], idx)  # the prompt comes first
    assert torch.equal(ours, seeded(lectures, idx, count))


@pytest.mark.parametrize("settings", [dict(), dict(temperature=0.7, top_k=3)])
def test_many_characters_at_once_are_as_many_calls_for_one(model, settings):
    def one_by_one(idx, max_new_tokens):
        for _ in range(max_new_tokens):
            idx = model.generate(idx, 1, **settings)
        return idx

    at_once = seeded(model.generate, START, 30, **settings)
    next_number = torch.rand(1)
    assert torch.equal(at_once, seeded(one_by_one, START, 30)) and torch.equal(next_number, torch.rand(1))


def test_only_the_last_block_size_tokens_are_looked_at(model):
    long = torch.randint(10, (1, 50))
    written = seeded(model.generate, long, 5)[:, 50:]
    assert torch.equal(written, seeded(model.generate, long[:, -8:], 5)[:, 8:])
    with pytest.raises(IndexError):
        model(long[:, :9])  # a ninth position has no embedding


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_a_token_comes_as_often_as_predicted_from_logits_divided_by_the_temperature(model, temperature):
    drawn = seeded(model.generate, START.expand(20000, 1), 1, temperature=temperature)[:, 1]
    share = torch.bincount(drawn, minlength=10) / 20000
    assert torch.allclose(share, predicted(model, temperature), atol=0.015)


def test_temperature_zero_and_top_k_one_take_the_likeliest(model):
    greedy = model.generate(START, 12, temperature=0)
    assert greedy[0, 1] == predicted(model).argmax()
    assert torch.equal(greedy, model.generate(START, 12, top_k=1))
    assert torch.equal(greedy, model.generate(START, 12, temperature=1e-40))  # which would overflow


def test_top_k_keeps_the_k_likeliest_and_a_larger_one_keeps_all(model):
    best = set(predicted(model).topk(3).indices.tolist())
    assert set(seeded(model.generate, START.expand(3000, 1), 1, top_k=3)[:, 1].tolist()) == best
    everything = seeded(model.generate, START, 20, top_k=999)
    assert torch.equal(everything, seeded(model.generate, START, 20))


def test_top_k_cuts_each_row_by_its_own_prediction(model):
    logits = 0.1 * torch.arange(10) + torch.tensor([[10.0], [0.0]])  # one row is far above the other
    model.forward = lambda idx: (logits[:, None, :], None)  # (B, 1, vocab_size)
    drawn = seeded(model.generate, torch.cat([START, START]), 200, top_k=3)[:, 1:]
    assert [set(row) for row in drawn.tolist()] == [{7, 8, 9}, {7, 8, 9}]


@pytest.mark.parametrize("training", [True, False])
def test_there_is_no_dropout_and_no_gradient_while_writing_and_the_mode_is_as_before(model, training):
    seen = []
    model.train(training).register_forward_hook(
        lambda module, args, output: seen.append((module.training, output[0].requires_grad)))
    model.generate(START, 2)
    assert seen == [(False, False)] * 2 and model.training is training


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_is_as_before_after_an_interrupt_too(model, training):
    def stop(module, args):
        raise KeyboardInterrupt

    model.train(training).register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        model.generate(START, 5)
    assert model.training is training and model.blocks[0].training is training


@pytest.mark.parametrize("settings, what", [
    (dict(temperature=-1), "temperature -1"), (dict(temperature=math.nan), "temperature nan"),
    (dict(temperature=math.inf), "temperature inf"), (dict(top_k=0), "top_k 0"), (dict(top_k=-3), "top_k -3"),
])
def test_senseless_settings_are_refused(model, settings, what):
    with pytest.raises(ValueError, match=what):
        model.generate(START, 1, **settings)
    with pytest.raises(ValueError, match=what):
        gpt.sharpen(torch.zeros(2, 10), **settings)


@pytest.mark.parametrize("idx", [START + 10, START - 1])
def test_a_token_outside_the_vocabulary_is_an_error_and_not_a_text(model, idx):
    with pytest.raises(IndexError):
        model.generate(idx, 1)


def test_sharpen_leaves_the_lectures_logits_alone_and_makes_probabilities_to_draw_from():
    logits = torch.tensor([[1.0, 3.0, 2.0], [0.5, 0.0, 0.5]])  # (B, C); the second row has two that are best
    assert torch.equal(gpt.sharpen(logits), logits)
    assert gpt.sharpen(logits, 0.5).tolist() == (2 * logits).tolist()
    two = F.softmax(gpt.sharpen(logits, top_k=2), -1)
    assert two[0].tolist() == pytest.approx([0, 0.7311, 0.2689], abs=1e-4)
    assert F.softmax(gpt.sharpen(logits, 0), -1).tolist() == [[0, 1, 0], [1, 0, 0]]


def test_heads_at_once_and_in_a_loop_write_the_same(model):
    other = new_model(replace(WIDE, fused=False))
    assert torch.equal(seeded(model.generate, START, 40), seeded(other.generate, START, 40))


def test_the_prompt_moves_to_where_the_model_is(model):
    written = model.to("meta").generate(START, 3, top_k=2)  # a device of shapes without numbers
    assert START.device.type == "cpu" and written.device.type == "meta" and written.shape == (1, 4)


# ---- measuring


@pytest.mark.parametrize("length", [2, 8, 9, 10, 17, 100])  # one window is 8 characters and the next one
def test_the_score_is_the_mean_over_all_characters_but_the_first_window_by_window(model, length):
    tokens = torch.randint(10, (length,), dtype=torch.uint8)
    score = gpt.score(model, tokens)
    assert model.training  # as before, and measured without dropout
    model.eval()
    total = 0.0
    for i in range(0, length - 1, 8):
        x, y = tokens[i:i + 9][:-1].long(), tokens[i:i + 9][1:].long()  # (T,), (T,); the last one shorter
        total += sum(-F.log_softmax(model(x[None])[0][0], dim=-1)[t, y[t]].item() for t in range(len(x)))
    assert score == pytest.approx(total / (length - 1), abs=1e-5)


def test_a_model_that_knows_nothing_scores_the_logarithm_of_its_vocabulary(model):
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert gpt.score(model, torch.randint(10, (1000,))) == pytest.approx(math.log(10), abs=1e-6)


def test_a_table_of_counts_scores_its_entropy():
    torch.manual_seed(0)
    tokens = torch.cat([torch.randint(10, (20_000,)), torch.randint(3, (20_000,))])  # the end is easier
    pairs = Counter(zip(tokens[:-1].tolist(), tokens[1:].tolist()))
    firsts = Counter(tokens[:-1].tolist())
    entropy = -sum(n * math.log(n / firsts[a]) for (a, b), n in pairs.items()) / (len(tokens) - 1)

    table = bigram.BigramLanguageModel(10)
    with torch.no_grad():
        for a in range(10):
            for b in range(10):
                table.token_embedding_table.weight[a, b] = math.log(pairs[a, b])
    table.block_size, table.lm_head = 8, SimpleNamespace(weight=table.token_embedding_table.weight)
    asked = []
    assert gpt.score(table, tokens, lambda: asked.append(1)) == pytest.approx(entropy, abs=1e-5)
    assert len(asked) > 1  # between windows it can be interrupted
