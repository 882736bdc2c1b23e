""" Chapter 2: the split, chunks, and batches of chunks. """
import pytest
import torch

import gpt
from data.text import check_length

FOUR_BY_EIGHT = gpt.Config(batch_size=4, block_size=8)


def test_the_first_nine_tenths_are_to_train_and_the_rest_to_validate(shakespeare, tokenizer, data):
    assert (len(data["train"]), len(data["val"])) == (1_003_854, 111_540)
    assert tokenizer.decode(data["train"][-20:].tolist()) == shakespeare[1_003_834:1_003_854]
    assert tokenizer.decode(data["val"][:20].tolist()) == shakespeare[1_003_854:1_003_874]


def test_the_first_chunk_of_nine_contains_eight_examples(data):
    chunk = data["train"][:9]
    assert chunk.tolist() == [18, 47, 56, 57, 58, 1, 15, 47, 58]
    x, y = chunk[:8], chunk[1:]  # (8,), (8,)
    examples = [(x[:t + 1].tolist(), y[t].item()) for t in range(8)]
    assert examples[0] == ([18], 47)  # this is why writing may start from one character
    assert examples[1] == ([18, 47], 56)
    assert examples[7] == ([18, 47, 56, 57, 58, 1, 15, 47], 58)


def test_the_first_batch_at_seed_1337(data):
    torch.manual_seed(1337)
    x, y = gpt.get_batch(data["train"], FOUR_BY_EIGHT, "cpu")
    assert x.tolist() == [[24, 43, 58, 5, 57, 1, 46, 43],
                          [44, 53, 56, 1, 58, 46, 39, 58],
                          [52, 58, 1, 58, 46, 39, 58, 1],
                          [25, 17, 27, 10, 0, 21, 1, 54]]
    assert y[0].tolist() == [43, 58, 5, 57, 1, 46, 43, 39]


def test_a_batch_is_what_the_lectures_slices_give():
    data = torch.arange(200, dtype=torch.uint8)
    torch.manual_seed(7)
    x, y = gpt.get_batch(data, FOUR_BY_EIGHT, "cpu")
    torch.manual_seed(7)
    ix = torch.randint(len(data) - 8, (4,))
    assert torch.equal(x, torch.stack([data[i:i + 8] for i in ix]).long())
    assert torch.equal(y, torch.stack([data[i + 1:i + 9] for i in ix]).long())
    assert x.shape == y.shape == (4, 8) and x.dtype == y.dtype == torch.long


def test_every_place_in_the_text_is_reached_the_first_and_the_last():
    starts, ends = set(), set()
    for _ in range(100):
        x, y = gpt.get_batch(torch.arange(12), FOUR_BY_EIGHT, "cpu")
        starts |= set(x[:, 0].tolist())
        ends |= set(y[:, -1].tolist())
    assert starts == {0, 1, 2, 3} and ends == {8, 9, 10, 11}


def test_one_chunk_in_each_split_is_enough_and_one_character_less_is_not():
    text = "ab" * 40 + "c"  # 81 characters: 72 to train on and 9 to validate
    data = gpt.split_data(text, gpt.Tokenizer(text))
    assert (len(data["train"]), len(data["val"])) == (72, 9)
    check_length("it", data, 8)
    gpt.get_batch(data["val"], FOUR_BY_EIGHT, "cpu")
    with pytest.raises(gpt.UserError, match="80 characters 72 .* 8 to validate.*block_size 8.*use 81"):
        check_length("it", gpt.split_data(text[:-1], gpt.Tokenizer(text)), 8)
