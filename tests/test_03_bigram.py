""" Chapter 3: the bigram baseline. """
import math

import pytest
import torch
from helpers import good
from torch.nn import functional as F

import bigram

FLOOR = 2.4519  # what the best of all bigrams scores on the training text
START = torch.zeros((1, 1), dtype=torch.long)
RECORD = """
step 0: train loss 4.7305, val loss 4.7241
step 300: train loss 2.8110, val loss 2.8249
step 600: train loss 2.5434, val loss 2.5682
step 900: train loss 2.4932, val loss 2.5088
step 1200: train loss 2.4863, val loss 2.5035
step 1500: train loss 2.4665, val loss 2.4921
step 1800: train loss 2.4683, val loss 2.4936
step 2100: train loss 2.4696, val loss 2.4846
step 2400: train loss 2.4638, val loss 2.4879
step 2700: train loss 2.4738, val loss 2.4911
step 3000: train loss """


def new_bigram(seed=1337):
    torch.manual_seed(seed)
    return bigram.BigramLanguageModel(65)


@pytest.fixture(scope="module")
def first(data):
    """ the untrained model and the first batch, in the lecture's random order """
    torch.manual_seed(1337)
    x, y = bigram.get_batch(data["train"], bigram.Config(batch_size=4), "cpu")
    return new_bigram(), x, y


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
    assert abs(wrong.item() - 4.8786) > 0.01


def test_what_the_untrained_model_writes(tokenizer):
    text = tokenizer.decode(new_bigram().generate(START, 100)[0].tolist())
    assert len(text) == 101
    now = "\nSKIcLT;AcELMoTbvZv C?nq-QE33:CJqkOKH-q;:la!oiywkHjgChzbQ?u!3bLIgwevmyFJGUGp"
    on_screen = "\nSr?qP-QWktXoL&jLDJgOLVz'RIoDqHdhsV&vLLxatjscMpwLERSPyao.qfzs$Ys$zF-w,;eEkzx"
    assert text.startswith((now, on_screen))  # torch 2.6 still draws as in the lecture, newer ones otherwise


def test_a_bigram_sees_one_character_only(first):
    model, x, _ = first
    other = x.clone()
    other[:, :-1] = 0  # another past, the same last character
    assert torch.equal(model(x)[0][:, -1], model(other)[0][:, -1])


def test_the_bigram_draws_and_does_not_take_the_likeliest():
    assert len(set(new_bigram().generate(START.expand(64, 1), 1)[:, 1].tolist())) > 10


def test_no_bigram_beats_the_entropy_of_the_count_table(data):
    first, second = data["train"][:-1].long(), data["train"][1:].long()
    counts = torch.bincount(first * 65 + second, minlength=65 * 65).view(65, 65).double()
    rows = counts / counts.sum(1, keepdim=True)
    entropy = -(counts * rows.clamp(min=1e-300).log()).sum().item() / counts.sum().item()
    assert entropy == pytest.approx(FLOOR, abs=5e-5)

    model = new_bigram()
    with torch.no_grad():  # the best table there is: the counts themselves
        model.token_embedding_table.weight.copy_(counts.clamp(min=1e-9).log())
        assert model(first[None], second[None])[1].item() == pytest.approx(entropy, abs=1e-4)


def test_training_is_adamw_on_the_gradient_of_each_batch_alone(data):
    config = bigram.Config(max_iters=3, eval_interval=10, eval_iters=1)
    model, table = new_bigram(), new_bigram().token_embedding_table.weight.detach().requires_grad_()
    torch.manual_seed(1)
    bigram.train(model, data, config, "cpu")

    torch.manual_seed(1)  # the same by hand
    optimizer = torch.optim.AdamW([table], lr=1e-2)
    for split in ("train", "val"):  # what the report at step 0 drew
        bigram.get_batch(data[split], config, "cpu")
    for _ in range(3):
        x, y = bigram.get_batch(data["train"], config, "cpu")
        table.grad = None
        F.cross_entropy(table[x].view(-1, 65), y.view(-1)).backward()
        optimizer.step()
    assert torch.allclose(model.token_embedding_table.weight, table, atol=1e-6)


def test_the_program_prints_the_numbers_on_record_comes_near_the_floor_and_writes_500_characters(shakespeare):
    out = good("--device", "cpu", main=bigram.main).out
    assert "ln(65) = 4.1744" in out and RECORD in out
    train, _, text = out.split(RECORD)[1].partition("\n")
    assert FLOOR - 0.01 < float(train.split(",")[0]) < FLOOR + 0.03  # after the last step
    assert len(text.removesuffix("\n")) == 501  # with the newline from which it starts
