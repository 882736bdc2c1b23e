"""Chapter 3: the bigram baseline."""

import math

import pytest
import torch
from torch.nn import functional as F

import bigram

ON_RECORD = """0: 4.7305/4.7241; 300: 2.8110/2.8249; 600: 2.5434/2.5682; 900: 2.4932/2.5088;
1200: 2.4863/2.5035; 1500: 2.4665/2.4921; 1800: 2.4683/2.4936; 2100: 2.4696/2.4846;
2400: 2.4638/2.4879; 2700: 2.4738/2.4911"""


@pytest.fixture(scope="module")
def first(shakespeare_data):
    """The untrained model and the first batch, in the lecture's random order."""
    torch.manual_seed(1337)
    x, y = bigram.get_batch(shakespeare_data[1]["train"], bigram.Config(batch_size=4), "cpu")
    torch.manual_seed(1337)
    return bigram.BigramLanguageModel(65), x, y


def entropy(text_tokens):
    """Of the next character given this one, in nats, by counting pairs: the floor of every bigram model."""
    pairs = text_tokens[:-1].long() * 65 + text_tokens[1:].long()
    counts = torch.bincount(pairs, minlength=65 * 65).view(65, 65).double()
    rows = counts / counts.sum(1, keepdim=True).clamp(min=1)
    return -(counts * rows.clamp(min=1e-300).log()).sum().item() / counts.sum().item()


def test_a_model_that_knows_nothing_scores_ln_65():
    logits = torch.zeros(32, 65)  # every character as likely as any other
    assert F.cross_entropy(logits, torch.randint(65, (32,))).item() == pytest.approx(math.log(65), abs=1e-5)
    assert round(math.log(65), 4) == 4.1744


def test_the_untrained_bigram_is_a_little_worse_than_guessing(first):
    model, x, y = first
    logits, loss = model(x, y)
    assert logits.shape == (32, 65)  # (B*T, C)
    assert loss.item() == pytest.approx(4.8786, abs=5e-5)


def test_without_targets_the_logits_keep_their_three_dimensions(first):
    model, x, _ = first
    logits, loss = model(x)
    assert logits.shape == (4, 8, 65) and loss is None  # (B, T, C)
    assert torch.equal(logits[1, 2], model.token_embedding_table.weight[x[1, 2]])


def test_cross_entropy_wants_n_by_c_and_takes_b_t_c_for_something_else(first):
    model, x, y = first
    logits, _ = model(x)
    with pytest.raises((RuntimeError, ValueError)):
        F.cross_entropy(logits, y)  # it would read T as the classes
    wrong = F.cross_entropy(logits.transpose(0, 1).reshape(32, 65), y.view(32))  # rows in another order
    right = F.cross_entropy(logits.view(32, 65), y.view(32))
    assert right.item() == pytest.approx(4.8786, abs=5e-5) and abs(wrong.item() - right.item()) > 0.01


def test_what_the_untrained_model_writes(shakespeare_data):
    torch.manual_seed(1337)
    model = bigram.BigramLanguageModel(65)
    text = shakespeare_data[0].decode(model.generate(torch.zeros((1, 1), dtype=torch.long), 100)[0].tolist())
    assert len(text) == 101
    assert text.startswith("\nSKIcLT;AcELMoTbvZv C?nq-QE33:CJqkOKH-q;:la!oiywkHjgChzbQ?u!3bLIgwevmyFJGUGp")


def test_the_program_prints_the_numbers_on_record_and_ends_above_the_floor(
    shakespeare_data, shakespeare, capsys
):
    bigram.main(["--device", "cpu"])
    screen = capsys.readouterr().out
    assert "ln(65) = 4.1744" in screen
    for report in ON_RECORD.split(";"):
        step, losses = report.split(":")
        train, val = losses.strip().split("/")
        assert f"step {step.strip()}: train loss {train}, val loss {val}\n" in screen
    last = screen.split("step 3000: ")[1]
    assert 2.44 < float(last.split()[2].rstrip(",")) < 2.48  # measured after the last step
    assert len(last.split("\n", 1)[1].rstrip("\n")) >= 495  # 500 characters and the newline it starts from
    assert entropy(shakespeare_data[1]["train"]) == pytest.approx(2.4519, abs=5e-5)


def test_no_bigram_beats_the_entropy_of_the_count_table(shakespeare_data):
    train = shakespeare_data[1]["train"]
    counts = torch.bincount(train[:-1].long() * 65 + train[1:].long(), minlength=65 * 65).view(65, 65)
    model = bigram.BigramLanguageModel(65)
    with torch.no_grad():  # the best table there is: the counts themselves
        model.token_embedding_table.weight.copy_(counts.clamp(min=1e-9).double().log())
        loss = model(train[None, :-1].long(), train[None, 1:].long())[1].item()
    assert loss == pytest.approx(entropy(train), abs=1e-4)


def test_a_bigram_sees_one_character_only(first):
    model, x, _ = first
    other = x.clone()
    other[:, :-1] = 0  # another past, the same last character
    assert torch.equal(model(x)[0][:, -1], model(other)[0][:, -1])


def test_the_bigram_draws_and_does_not_take_the_likeliest():
    model = bigram.BigramLanguageModel(65)
    start = torch.zeros((64, 1), dtype=torch.long)
    assert len(set(model.generate(start, 1)[:, 1].tolist())) > 10


def test_gradients_are_forgotten_between_steps(shakespeare_data):
    config = bigram.Config(max_iters=3, eval_interval=10, eval_iters=1)
    torch.manual_seed(1)
    model = bigram.BigramLanguageModel(65)
    start = model.token_embedding_table.weight.detach().clone()
    bigram.train(model, shakespeare_data[1], config, "cpu")

    torch.manual_seed(1)  # the same by hand
    table = torch.nn.Parameter(bigram.BigramLanguageModel(65).token_embedding_table.weight.detach())
    assert torch.equal(table, start)
    optimizer = torch.optim.AdamW([table], lr=1e-2)
    for split in ("train", "val"):  # what the report at step 0 drew
        bigram.get_batch(shakespeare_data[1][split], config, "cpu")
    for _ in range(3):
        x, y = bigram.get_batch(shakespeare_data[1]["train"], config, "cpu")
        table.grad = None
        F.cross_entropy(table[x].view(-1, 65), y.view(-1)).backward()
        optimizer.step()
    assert torch.allclose(model.token_embedding_table.weight, table, atol=1e-6)


def test_a_trained_bigram_lies_above_the_entropy_of_the_count_table(shakespeare_data):
    train = shakespeare_data[1]["train"].long()
    torch.manual_seed(1337)
    model = bigram.BigramLanguageModel(65)
    config = bigram.Config(max_iters=1500, eval_interval=1500, eval_iters=1)
    bigram.train(model, shakespeare_data[1], config, "cpu")
    with torch.no_grad():
        loss = model(train[None, :-1], train[None, 1:])[1].item()  # the whole text, not a noisy batch
    assert 2.4519 < loss < 2.55
