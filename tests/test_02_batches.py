"""Chapter 2: the split, chunks, and batches of chunks."""

import pytest
import torch

import bigram
import gpt

FOUR_BY_EIGHT = gpt.Config(batch_size=4, block_size=8)


def test_the_first_nine_tenths_are_to_train_the_rest_to_validate(shakespeare, shakespeare_data):
    tokenizer, data = shakespeare_data
    assert (len(data["train"]), len(data["val"])) == (1_003_854, 111_540)
    assert tokenizer.decode(data["train"][-20:].tolist()) == shakespeare[1_003_834:1_003_854]
    assert tokenizer.decode(data["val"][:20].tolist()) == shakespeare[1_003_854:1_003_874]


def test_the_first_chunk_of_nine(shakespeare_data):
    assert shakespeare_data[1]["train"][:9].tolist() == [18, 47, 56, 57, 58, 1, 15, 47, 58]


def test_one_chunk_of_nine_holds_eight_examples(shakespeare_data):
    chunk = shakespeare_data[1]["train"][:9]
    x, y = chunk[:8], chunk[1:]  # (8,), (8,)
    examples = [(x[: t + 1].tolist(), y[t].item()) for t in range(8)]
    assert examples[0] == ([18], 47)  # this is why writing may start from one character
    assert examples[1] == ([18, 47], 56)
    assert examples[7] == ([18, 47, 56, 57, 58, 1, 15, 47], 58)


def test_the_first_batch_at_seed_1337(shakespeare_data):
    torch.manual_seed(1337)
    x, y = gpt.get_batch(shakespeare_data[1]["train"], FOUR_BY_EIGHT, "cpu")
    assert x.tolist() == [
        [24, 43, 58, 5, 57, 1, 46, 43],
        [44, 53, 56, 1, 58, 46, 39, 58],
        [52, 58, 1, 58, 46, 39, 58, 1],
        [25, 17, 27, 10, 0, 21, 1, 54],
    ]
    assert y[0].tolist() == [43, 58, 5, 57, 1, 46, 43, 39]


@pytest.mark.parametrize("get_batch", [gpt.get_batch, bigram.get_batch])
def test_y_is_x_one_character_later(get_batch):
    data = torch.arange(200, dtype=torch.uint8)  # every value says where it stood
    x, y = get_batch(data, FOUR_BY_EIGHT, "cpu")
    assert x.shape == y.shape == (4, 8) and x.dtype == y.dtype == torch.long
    assert torch.equal(y, x + 1)
    assert torch.equal(x, x[:, :1] + torch.arange(8))  # and each row is one piece of the text


def test_a_batch_is_what_the_lectures_slices_give(shakespeare_data):
    data = shakespeare_data[1]["val"]
    torch.manual_seed(7)
    x, y = gpt.get_batch(data, FOUR_BY_EIGHT, "cpu")
    torch.manual_seed(7)
    ix = torch.randint(len(data) - 8, (4,))
    assert torch.equal(x, torch.stack([data[i : i + 8] for i in ix]).long())
    assert torch.equal(y, torch.stack([data[i + 1 : i + 9] for i in ix]).long())


@pytest.mark.parametrize("get_batch", [gpt.get_batch, bigram.get_batch])
def test_every_place_in_the_text_is_reached_the_first_and_the_last(get_batch):
    data = torch.arange(12)
    starts, ends = set(), set()
    for _ in range(100):
        x, y = get_batch(data, FOUR_BY_EIGHT, "cpu")
        starts |= set(x[:, 0].tolist())
        ends |= set(y[:, -1].tolist())
    assert starts == {0, 1, 2, 3} and ends == {8, 9, 10, 11}


@pytest.mark.parametrize("module", [gpt, bigram])
def test_a_text_of_one_chunk_for_each_split_is_enough_and_one_less_is_not(module):
    text = "ab" * 40 + "c"  # 81: 72 to train and 9 to validate
    _, data = module.load_data([text], "it", 8)
    assert (len(data["train"]), len(data["val"])) == (72, 9)
    module.get_batch(data["val"], FOUR_BY_EIGHT, "cpu")
    with pytest.raises(module.UserError, match="80 characters 72 .* 8 to validate.*block_size 8.*take 81"):
        module.load_data([text[:-1]], "it", 8)
