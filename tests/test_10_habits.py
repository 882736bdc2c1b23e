"""Chapter 10: the two habits. Name the dimensions and look at .shape; turn loops over time into products."""

import ast
import inspect
import math
import re

import pytest
import torch

import bigram
import gpt

CONFIG = gpt.Config(n_layer=1, n_head=2, n_embd=16, block_size=8, dropout=0.0)
B, T, C = 3, 8, 16


@pytest.mark.parametrize(
    "layer, width", [(gpt.Head, 8), (gpt.MultiHeadAttention, 16), (gpt.FeedForward, 16), (gpt.Block, 16)]
)
def test_dummy_data_goes_through_each_layer_as_soon_as_it_exists(layer, width):
    assert layer(CONFIG)(torch.randn(B, T, C)).shape == (B, T, width)
    assert layer(CONFIG)(torch.randn(B, 1, C)).shape == (B, 1, width)  # and one character alone


def test_the_model_turns_b_by_t_integers_into_b_by_t_by_vocab_size_logits():
    logits, loss = gpt.GPTLanguageModel(CONFIG, 65)(torch.zeros((B, T), dtype=torch.long))
    assert logits.shape == (B, T, 65) and loss is None


def test_the_first_line_of_every_forward_names_the_shape():
    for module in (gpt, bigram):
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if (
                isinstance(node, ast.FunctionDef)
                and node.name == "forward"
                and node.args.args[1].arg in ("x", "idx")
            ):
                lines = inspect.getsource(module).splitlines()[node.lineno : node.lineno + 2]
                if len(node.args.args) == 3 and node.args.args[2].arg == "y":
                    continue  # Run.forward only hands over
                assert any("of shape (B, T" in line for line in lines), lines


def test_the_program_prints_the_loss_of_guessing_beside_its_first_loss(capsys):
    config = gpt.Config(n_layer=1, n_head=1, n_embd=8, block_size=4, batch_size=2, max_iters=0, eval_iters=1)
    tokens = torch.randint(10, (100,))
    model = gpt.GPTLanguageModel(config, 10)
    run = gpt.Run(model, {"train": tokens, "val": tokens}, config, extra={"chars": "0123456789"})
    gpt.train(model, run.data, config, run)
    line = capsys.readouterr().out
    assert f"(guessing scores ln(10) = {math.log(10):.4f})" in line
    assert re.match(r"step 0: train loss 2\.[23]\d{3}, val loss 2\.[23]\d{3} \(", line)


def test_a_loop_over_time_and_a_product_with_a_triangle_are_the_same():
    x = torch.randn(T, C)
    running = torch.stack([x[: t + 1].sum(0) for t in range(T)])
    assert torch.allclose(torch.tril(torch.ones(T, T)) @ x, running, atol=1e-5)
