""" Chapter 7, first part: the model, its size, its weights, and its first loss. """
import math
import pickle
from dataclasses import replace

import pytest
import torch
from helpers import WIDE, new_model
from torch import nn
from torch.nn import functional as F

import gpt

NAMES = """
token_embedding_table.weight position_embedding_table.weight
blocks.0.sa.heads.0.key.weight blocks.0.sa.heads.0.query.weight blocks.0.sa.heads.0.value.weight
blocks.0.sa.proj.weight blocks.0.sa.proj.bias
blocks.0.ffwd.net.0.weight blocks.0.ffwd.net.0.bias blocks.0.ffwd.net.2.weight blocks.0.ffwd.net.2.bias
blocks.0.ln1.weight blocks.0.ln1.bias blocks.0.ln2.weight blocks.0.ln2.bias
ln_f.weight ln_f.bias lm_head.weight lm_head.bias
"""


def size(name):
    return gpt.Config(**gpt.SIZES[name])


@pytest.mark.parametrize("name, count", [("lecture", 10_788_929), ("notebook", 209_729), ("laptop", 476_961)])
def test_the_number_of_parameters_also_by_formula(name, count):
    config = size(name)
    L, C, T, V = config.n_layer, config.n_embd, config.block_size, 65
    attention, feed_forward, norm = 3 * C * C + (C * C + C), (C * 4 * C + 4 * C) + (4 * C * C + C), 2 * C
    formula = V * C + T * C + L * (attention + feed_forward + 2 * norm) + norm + (C * V + V)
    assert sum(p.numel() for p in new_model(config, V).parameters()) == count == formula


def test_the_names_are_the_lectures_so_that_its_weights_can_be_loaded():
    assert list(new_model(replace(WIDE, n_layer=1, n_head=1)).state_dict()) == NAMES.split()


def test_initial_weights_are_small_and_biases_zero():
    for module in new_model(size("notebook"), 65).modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            assert module.weight.std().item() == pytest.approx(0.02, rel=0.1)
            assert getattr(module, "bias", None) is None or not module.bias.any()


def test_init_std_zero_is_pytorchs_own_way():
    model = new_model(replace(WIDE, init_std=0.0))
    assert model.token_embedding_table.weight.std().item() == pytest.approx(1, rel=0.2)
    assert model.lm_head.bias.any()
    assert 0.9 * 32**-0.5 < model.lm_head.weight.abs().max() <= 32**-0.5  # uniform in +-1/sqrt(n_embd)


@pytest.mark.parametrize("name", gpt.SIZES)
def test_the_first_loss_of_every_size_is_near_ln_65(name):
    model = new_model(size(name), 65).eval()
    idx = torch.randint(65, (4, 33))
    with torch.no_grad():
        loss = model(idx[:, :-1].contiguous(), idx[:, 1:].contiguous())[1].item()
    assert abs(loss - math.log(65)) < 0.25


def test_a_model_that_is_put_together_by_hand_is_the_model():
    model, idx = new_model(WIDE), torch.randint(10, (2, 5))
    with torch.no_grad():
        model.ln_f.weight.uniform_(0.5, 2)
    x = model.token_embedding_table.weight[idx] + model.position_embedding_table.weight[:5]
    for block in model.blocks:
        x = block(x)
    x = F.layer_norm(x, (32,), model.ln_f.weight, model.ln_f.bias)
    assert torch.allclose(model(idx)[0], x @ model.lm_head.weight.T + model.lm_head.bias, atol=1e-4)


def test_the_loss_is_that_of_every_position_with_its_own_target():
    model, x, y = new_model(WIDE), torch.randint(10, (4, 8)), torch.randint(10, (4, 8))
    log_probs = F.log_softmax(model(x)[0], dim=-1)  # (B, T, vocab_size)
    one_by_one = [-log_probs[b, t, y[b, t]].item() for b in range(4) for t in range(8)]
    assert model(x, y)[1].item() == pytest.approx(sum(one_by_one) / 32, abs=1e-5)


@pytest.mark.parametrize("fused", [True, False])
def test_the_gradient_is_that_of_finite_differences(fused):
    model = new_model(replace(WIDE, n_layer=1, n_head=2, n_embd=4, block_size=3, fused=fused), 5).double()
    x, y = torch.randint(5, (2, 3)), torch.randint(5, (2, 3))
    model(x, y)[1].backward()
    for p in model.parameters():
        flat, grad = p.data.view(-1), p.grad.view(-1)
        for i in range(0, len(flat), 3):
            value, losses = flat[i].item(), []
            for flat[i] in (value + 1e-6, value - 1e-6):
                losses.append(model(x, y)[1].item())
            flat[i] = value
            assert (losses[0] - losses[1]) / 2e-6 == pytest.approx(grad[i].item(), abs=1e-7)


@pytest.mark.parametrize("fused", [True, False])
def test_a_model_keeps_its_parameters_and_no_mask_however_long_its_context_is(fused):
    model = new_model(replace(WIDE, block_size=512, fused=fused))
    model(torch.zeros((1, 512), dtype=torch.long))
    assert len(pickle.dumps(model)) < 4 * sum(p.numel() for p in model.parameters()) + 100_000


def test_channels_that_the_heads_cannot_share_are_refused_in_a_notebook_too():
    with pytest.raises(gpt.UserError, match="n_embd 65 is not a multiple of n_head 4; use n_embd 64"):
        gpt.GPTLanguageModel(gpt.Config(n_embd=65, n_head=4), 65)
