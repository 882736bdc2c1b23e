""" Chapter 1: the text, its characters, and integers for them. """
import hashlib
from collections import Counter

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


def byte_pairs(text, merges):
    """ tokens and vocabulary, after the commonest pair of neighbours became one token, again and again """
    tokens, vocabulary = list(text), set(text)
    for _ in range(merges):
        (pair, count), = Counter(zip(tokens, tokens[1:])).most_common(1)
        vocabulary.add("".join(pair))
        shorter = []
        for token in tokens:
            if shorter and (shorter[-1], token) == pair:
                shorter[-1] += token
            else:
                shorter.append(token)
        tokens = shorter
    return tokens, vocabulary


def test_a_subword_tokenizer_needs_fewer_tokens_from_a_larger_vocabulary(shakespeare):
    text = shakespeare[:20_000]
    characters, alphabet = byte_pairs(text, 0)
    pairs, vocabulary = byte_pairs(text, 50)
    assert "".join(pairs) == "".join(characters) == text
    assert len(pairs) < 0.7 * len(characters) and len(vocabulary) == len(alphabet) + 50
    assert {"th", "the ", "you"} <= vocabulary


def test_google_is_six_characters_and_one_subword_where_it_is_common(tokenizer):
    tokens, vocabulary = byte_pairs("Google it: Google found Google on Google.", 5)
    assert len(tokenizer.encode("Google")) == 6
    assert tokens.count("Google") == 4


@pytest.mark.parametrize("text", [TRICKY, "".join(map(chr, range(40, 700))), "abc" * 400_000, ""])
def test_a_long_text_is_encoded_as_the_list_comprehension_does_it(text):
    tokenizer = gpt.Tokenizer(text)
    assert encode_text(text, tokenizer.stoi).tolist() == tokenizer.encode(text)


@pytest.mark.parametrize("count, dtype", INTEGERS)
def test_tokens_are_the_smallest_integers_that_hold_the_vocabulary(count, dtype):
    text = "".join(map(chr, range(count)))
    encoded = encode_text(text, gpt.Tokenizer(text).stoi)
    assert encoded.dtype == dtype and encoded.tolist() == list(range(count))
