"""Chapter 8: writing, one character after another."""

from dataclasses import replace

import pytest
import torch
from helpers import WIDE, wide_model
from torch.nn import functional as F

import gpt

CONFIG = gpt.Config(n_layer=2, n_head=2, n_embd=16, block_size=8, dropout=0.3, init_std=0.5)
START = torch.zeros((1, 1), dtype=torch.long)


@pytest.fixture
def model():
    torch.manual_seed(1337)
    return gpt.GPTLanguageModel(CONFIG, 20)


def naive(model, idx, count):
    """The lecture's loop."""
    model.eval()
    for _ in range(count):
        logits, _ = model(idx[:, -8:])  # (B, T, C)
        probs = F.softmax(logits[:, -1, :], dim=-1)  # (B, C)
        idx = torch.cat((idx, torch.multinomial(probs, num_samples=1)), dim=1)
    model.train()
    return idx


@pytest.mark.parametrize("rows", [1, 3])
def test_it_draws_exactly_the_lectures_numbers(model, rows):
    idx = torch.randint(20, (rows, 5))
    torch.manual_seed(7)
    ours = model.generate(idx, 30)
    torch.manual_seed(7)
    assert ours.shape == (rows, 35) and torch.equal(ours, naive(model, idx, 30))
    assert torch.equal(ours[:, :5], idx)  # the prompt stands before it, whole


def test_only_the_last_block_size_tokens_are_looked_at(model):
    long = torch.randint(20, (1, 50))
    torch.manual_seed(7)
    first = model.generate(long, 5)[:, 50:]
    torch.manual_seed(7)
    assert torch.equal(first, model.generate(long[:, -8:], 5)[:, 8:])
    with pytest.raises(IndexError):
        model(long[:, :9])  # a ninth position has no embedding


def test_the_same_prompt_goes_on_differently_since_tokens_are_drawn(model):
    texts = {tuple(model.generate(START, 10)[0].tolist()) for _ in range(5)}
    assert len(texts) > 1


def test_how_often_a_token_comes_is_what_the_model_predicts(model):
    model.eval()
    probs = F.softmax(model(START)[0][0, -1], dim=-1)
    drawn = model.generate(START.expand(20000, 1), 1)[:, 1]
    assert torch.allclose(torch.bincount(drawn, minlength=20) / 20000, probs, atol=0.015)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature_divides_the_logits(model, temperature):
    model.eval()
    probs = F.softmax(model(START)[0][0, -1] / temperature, dim=-1)
    drawn = model.generate(START.expand(20000, 1), 1, temperature=temperature)[:, 1]
    assert torch.allclose(torch.bincount(drawn, minlength=20) / 20000, probs, atol=0.015)


def test_temperature_zero_and_top_k_one_take_the_likeliest(model):
    model.eval()
    likeliest = model(START)[0][0, -1].argmax().item()
    greedy = model.generate(START, 12, temperature=0)
    assert greedy[0, 1].item() == likeliest
    assert torch.equal(greedy, model.generate(START, 12, top_k=1))
    assert torch.equal(greedy, model.generate(START, 12, temperature=1e-40))  # which would overflow


def test_top_k_keeps_the_k_likeliest_and_a_larger_one_keeps_all(model):
    model.eval()
    best = set(model(START)[0][0, -1].topk(3).indices.tolist())
    assert set(model.generate(START.expand(3000, 1), 1, top_k=3)[:, 1].tolist()) == best
    torch.manual_seed(7)
    everything = model.generate(START, 20, top_k=999)
    torch.manual_seed(7)
    assert torch.equal(everything, model.generate(START, 20))


@pytest.mark.parametrize("training", [True, False])
def test_no_dropout_while_writing_and_the_mode_is_as_before(model, training):
    model.train(training)
    assert torch.equal(model.generate(START, 12, temperature=0), model.generate(START, 12, temperature=0))
    assert model.training is training


def test_the_mode_is_as_before_after_an_interrupt_too(model):
    def stop(idx_next):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.generate(START, 5, each=stop)
    assert model.training


def test_each_character_can_be_had_as_soon_as_it_is_drawn(model):
    seen = []
    out = model.generate(START, 6, each=seen.append)
    assert [column.shape for column in seen] == [(1, 1)] * 6
    assert torch.equal(torch.cat(seen, dim=1), out[:, 1:])


def test_writing_keeps_no_gradients(model):
    seen = []
    handle = model.register_forward_hook(lambda module, args, output: seen.append(output[0].requires_grad))
    model.generate(START, 2)
    handle.remove()
    assert seen == [False, False]


@pytest.mark.parametrize(
    "idx", [torch.tensor([[20]]), torch.tensor([[-1]]), torch.zeros((1, 0), dtype=torch.long)]
)
def test_a_token_outside_the_vocabulary_is_said_before_the_model_sees_it(model, idx):
    with pytest.raises(ValueError, match=r"0\.\.19"):
        model.generate(idx, 1)


@pytest.mark.parametrize(
    "settings",
    [{"temperature": -1}, {"temperature": float("nan")}, {"top_k": 0}, {"temperature": float("inf")}],
)
def test_settings_that_make_no_sense_are_refused(model, settings):
    with pytest.raises(ValueError, match="temperature|top_k"):
        model.generate(START, 1, **settings)


def test_nothing_to_write_gives_the_prompt_back(model):
    assert torch.equal(model.generate(START, 0), START)


def test_a_fused_and_a_looped_model_write_the_same(model):
    other = gpt.GPTLanguageModel(replace(CONFIG, fused=False), 20)
    other.load_state_dict(model.state_dict())
    torch.manual_seed(7)
    ours = model.generate(START, 40)
    torch.manual_seed(7)
    assert torch.equal(ours, other.generate(START, 40))


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_is_as_before_after_an_interrupt_whichever_it_was(training):
    model = wide_model(WIDE).train(training)

    def stop(idx_next):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.generate(torch.zeros((1, 1), dtype=torch.long), 5, each=stop)
    assert model.training is training
