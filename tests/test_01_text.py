""" Chapter 1: the text, its characters, and integers for them. """
import hashlib

import numpy as np
import pytest

import gpt
from data.text import encode_text

TRICKY = "Hamlet: \u00e9t\u00e9, \u6771\u4eac, \U0001f600!\n\tTwo lines."
INTEGERS = [(256, np.uint8), (257, np.int16), (32768, np.int16), (32769, np.int32)]


def test_tiny_shakespeare_has_1115394_characters_65_of_them_distinct(shakespeare):
    assert len(shakespeare) == 1_115_394
    assert len(set(shakespeare)) == 65
    digest = hashlib.sha256(shakespeare.encode()).hexdigest()
    assert digest == "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


def test_the_vocabulary_is_the_sorted_characters(tokenizer):
    assert "".join(tokenizer.chars) == "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def test_hii_there_is_nine_integers(tokenizer):
    assert tokenizer.encode("hii there") == [46, 47, 47, 1, 58, 46, 43, 56, 43]
    assert tokenizer.decode([46, 47, 47, 1, 58, 46, 43, 56, 43]) == "hii there"


@pytest.mark.parametrize("text", ["hii there", TRICKY, "a", "\n\n"])
def test_decode_undoes_encode(text):
    tokenizer = gpt.Tokenizer(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_character_that_was_never_seen_has_no_integer():
    with pytest.raises(KeyError):
        gpt.Tokenizer("hii there").encode("100%")


def test_a_subword_tokenizer_would_need_fewer_tokens_google_takes_six_characters(tokenizer):
    assert len(tokenizer.encode("Google")) == 6


@pytest.mark.parametrize("text", [TRICKY, "".join(map(chr, range(40, 700))), "abc" * 400_000, ""])
def test_a_long_text_is_encoded_as_the_list_comprehension_does_it(text):
    tokenizer = gpt.Tokenizer(text)
    assert encode_text(text, tokenizer.stoi).tolist() == tokenizer.encode(text)


@pytest.mark.parametrize("count, dtype", INTEGERS)
def test_tokens_are_the_smallest_integers_that_hold_the_vocabulary(count, dtype):
    text = "".join(map(chr, range(count)))
    encoded = encode_text(text, gpt.Tokenizer(text).stoi)
    assert encoded.dtype == dtype and encoded.tolist() == list(range(count))
