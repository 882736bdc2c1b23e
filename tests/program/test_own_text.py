"""
A text of one's own: from any editor, in any language, of any length that leaves both splits a context. What
is not a text is answered in one sentence that says what is wrong, where, and what to do.
"""
import math
import os
import random
import tracemalloc

import numpy as np
import pytest
import torch
from helpers import good, refusal, run, small_text, steps, tiny

import bigram
import gpt
from data.text import UserError, check_length, encode_text, find_text, read_text

CHINESE = "".join(random.Random(3).choices("你好，世界。🙂👩\u200d🚀é\n", k=2000))
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": None}
MARK = b"\xef\xbb\xbf"


def write(tmp_path, content, name="own.txt"):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def refused(tmp_path, content):
    """ what a run answers to a text, and the path of the text """
    path = write(tmp_path, content)
    return refusal(*tiny(tmp_path, data=path)), path


# ---- line endings and byte order marks


@pytest.mark.parametrize("ending", ["\r\n", "\r", "\n"])
@pytest.mark.parametrize("mark", [b"", MARK])
def test_every_line_ending_and_a_byte_order_mark_give_the_same_text(tmp_path, ending, mark):
    text = small_text(3_000) + "x" * ((1 << 20) - 3_001) + "\ny"  # an ending across the first MiB as well
    assert read_text(write(tmp_path, mark + text.replace("\n", ending).encode())) == text


def test_two_files_joined_do_not_bring_a_byte_order_mark_into_the_vocabulary(tmp_path):
    path = write(tmp_path, MARK + b"one\n" + MARK + b"two\n")
    assert read_text(path) == "one\ntwo\n"


def test_training_on_crlf_gives_the_digits_of_lf(tmp_path):
    lf, crlf = write(tmp_path, small_text()), write(tmp_path, small_text().replace("\n", "\r\n"), "crlf.txt")
    one, two = (steps(good(*tiny(tmp_path, data=path)).out) for path in (lf, crlf))
    assert len(one) == 3 and one == two


# ---- not UTF-8


BEFORE = {
    "at the start": b"",
    "after line endings of every kind": b"one\ntwo\r\nthree\r",
    "after a mark and characters of many bytes": MARK + "漢字🙂\n漢".encode(),
    "beyond the first MiB": "漢字🙂é\n".encode() * 120_000 + b"tail",
}


@pytest.mark.parametrize("before", BEFORE.values(), ids=BEFORE)
def test_a_byte_that_is_not_utf_8_is_named_with_its_offset(tmp_path, before):
    sentence, path = refused(tmp_path, before + b"\x92s time\n" + small_text().encode())
    assert sentence == f"{path} is not UTF-8: byte 0x92 at offset {len(before)}; save it as UTF-8"


def test_a_character_cut_at_the_end_of_the_file_is_named(tmp_path):
    sentence, _ = refused(tmp_path, small_text().encode() + "漢".encode()[:2])
    assert f"byte 0xe6 at offset {len(small_text())}" in sentence


@pytest.mark.parametrize("encoding", "utf-16 utf-16-le utf-16-be utf-32 utf-32-le utf-32-be".split())
@pytest.mark.parametrize("text", [small_text(), "Ünïcödé €\n" + small_text()], ids=["ascii", "others"])
def test_utf_16_and_utf_32_are_named_with_a_mark_and_without(tmp_path, encoding, text):
    sentence, path = refused(tmp_path, text.encode(encoding))
    assert sentence.startswith(f"{path} looks like UTF-16, or like no text at all: byte 0x")
    assert sentence.endswith("; save it as UTF-8")


def test_a_nul_character_is_named_with_its_offset(tmp_path):
    sentence, _ = refused(tmp_path, small_text() + "\0" + small_text())
    assert f"no text at all: byte 0x00 at offset {len(small_text())}" in sentence


# ---- other alphabets


def test_chinese_and_emoji_make_the_round_trip(tmp_path):
    text = read_text(write(tmp_path, CHINESE))
    tokenizer = gpt.Tokenizer(text)
    data = gpt.split_data(text, tokenizer)
    assert tokenizer.chars == sorted(set(CHINESE)) and "👩" in tokenizer.chars
    assert tokenizer.decode(torch.cat([data["train"], data["val"]]).tolist()) == CHINESE


def test_a_chinese_text_trains_whatever_the_locale_says(tmp_path):
    flags = tiny(tmp_path, data=write(tmp_path, CHINESE))
    one, two = good(*flags), run(*flags, env=ASCII)
    size = len(set(CHINESE))
    assert f"2,000 characters, a vocabulary of {size}" in one.out
    assert f"(guessing scores ln({size}) = {math.log(size):.4f})" in one.out
    sample = one.out.split("the best model writes:\n")[1].split("\nfiles:")[0]
    assert set(sample) <= set(CHINESE) and len(sample) > 15
    assert two.code == 0 and "Traceback" not in two.err and steps(two.out) == steps(one.out)
    assert gpt.load(tmp_path / "out/best.pt")[1].chars == sorted(set(CHINESE))


@pytest.mark.parametrize("count, dtype", [(2, np.uint8), (256, np.uint8), (257, np.int16), (32768, np.int16),
                                          (32769, np.int32)])
def test_tokens_take_the_smallest_integers_that_hold_the_vocabulary(count, dtype):
    text = "".join(chr(0x10000 + i) for i in range(count))
    tokens = encode_text(text, {ch: i for i, ch in enumerate(text)})
    assert tokens.dtype == dtype and tokens.tolist() == list(range(count))


def test_a_text_of_300_symbols_trains(tmp_path):
    done = good(*tiny(tmp_path, data=write(tmp_path, "".join(chr(0x4E00 + i) for i in range(300)) * 4)))
    assert "a vocabulary of 300" in done.out and len(steps(done.out)) == 3


TEXTS = {
    "english": small_text(1_000_000) * 20,
    "one line": "abcd" * 5_000_000,
    "chinese, an emoji, line endings of Windows": ("你好，世界。" * 5 + "\r\n") * 200_000 + "🙂",
}


@pytest.mark.slow
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_a_long_text_takes_at_most_8_bytes_of_memory_for_each_character(tmp_path, text):
    path, length = write(tmp_path, text), len(text)
    tracemalloc.start()
    try:
        name, found = find_text(path)
        tokenizer = gpt.Tokenizer(found)
        tokens = encode_text(found, tokenizer.stoi)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(tokens) > 0.9 * length and peak <= 8 * length, peak / length


# ---- too short


def test_the_least_length_that_the_error_names_works_and_no_less_does(tmp_path):
    for block_size in range(1, 40):
        least = 10 * block_size + 1
        for length in range(least + 1):
            data = {"train": range(int(0.9 * length)), "val": range(length - int(0.9 * length))}
            if length == least:
                check_length("own", data, block_size)
            else:
                with pytest.raises(UserError, match=f"take {least} characters"):
                    check_length("own", data, block_size)
    assert len(steps(good(*tiny(tmp_path, data=write(tmp_path, small_text(81)))).out)) == 3


@pytest.mark.parametrize("length, train, val", [(80, 72, 8), (0, 0, 0)])
def test_a_text_that_is_too_short_is_answered_with_its_lengths_and_the_remedy(tmp_path, length, train, val):
    sentence, path = refused(tmp_path, small_text(length))
    assert sentence == (f"{path} is too short: of its {length} characters {train} are to train and {val} to "
                        "validate, and each must be more than block_size 8; take 81 characters or more, or a "
                        "smaller --block_size")


# ---- no text at all


def test_a_missing_file_is_named_and_an_earlier_run_stays_where_it_is(tmp_path):
    good(*tiny(tmp_path))
    before = (tmp_path / "out/last.pt").read_bytes()
    sentence = refusal(*tiny(tmp_path, data=tmp_path / "nothing.txt"))
    assert sentence == f"cannot read {tmp_path}/nothing.txt: No such file or directory; name another file"
    assert (tmp_path / "out/last.pt").read_bytes() == before and not (tmp_path / "out/old-1").exists()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_folder_and_a_pipe_are_named_instead_of_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        assert refusal(*tiny(tmp_path, data=path)) == f"{path} is not a plain file; name a text file"


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file_is_named(tmp_path):
    path = write(tmp_path, small_text())
    path.chmod(0)
    assert f"cannot read {path}: Permission denied" in refusal(*tiny(tmp_path, data=path))


def test_bigram_answers_in_one_sentence_as_well(tmp_path):
    path = write(tmp_path, b"It\x92s\n")
    assert f"{path} is not UTF-8: byte 0x92 at offset 2" in refusal("--data", path, main=bigram.main)
    path = write(tmp_path, small_text(80))
    assert f"{path} is too short" in refusal("--data", path, main=bigram.main)
