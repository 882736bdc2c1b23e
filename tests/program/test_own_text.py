"""
A text of one's own: from any editor, in any language, of any length that leaves both splits a context. What
is not a text is answered in one sentence that says what is wrong, where, and what to do.
"""
import math
import os
import random
import re
import tracemalloc

import pytest
from helpers import ASCII, call, good, refusal, run, small_text, steps, tiny

import bigram
import gpt
from data.text import UserError, check_length, encode_text, find_text, read_text

CHINESE = "".join(random.Random(3).choices(["👩\u200d🚀\n", *map(chr, range(0x4E00, 0x4F2C))], k=4000))
MARK = b"\xef\xbb\xbf"


def write(tmp_path, content):
    path = tmp_path / "own.txt"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def refused(tmp_path, content):
    """ what both scripts answer to a text, without the name of the file """
    path = write(tmp_path, content)
    sentence = refusal(*tiny(tmp_path, data=path))
    assert sentence == refusal("--data", path, main=bigram.main) and sentence.startswith(f"{path} ")
    return sentence.removeprefix(f"{path} ")


@pytest.mark.parametrize("ending", ["\r\n", "\r", "\n"])
@pytest.mark.parametrize("mark", [b"", MARK])
def test_every_line_ending_and_byte_order_mark_give_the_same_text(tmp_path, ending, mark):
    text = small_text(3_000) + "x" * ((1 << 20) - 3_001) + "\ny"  # with an ending across the first MiB
    content = text.replace("\n", ending).encode()
    assert read_text(write(tmp_path, mark + content)) == text
    assert read_text(write(tmp_path, mark + content + mark + content)) == text + text  # two files joined


@pytest.mark.parametrize("before", ["", "one\ntwo\r\n3\r", "\ufeff漢🙂\n漢", "漢é\n" * 200_000], ids=range(4))
def test_a_byte_that_is_not_utf_8_is_named_with_its_offset(tmp_path, before):
    for bad in (b"\x92s time\n" + small_text().encode(), "漢".encode()[:2]):  # the second is cut by the end
        assert refused(tmp_path, before.encode() + bad) == (
            f"is not UTF-8: byte 0x{bad[0]:02x} at offset {len(before.encode())}; save it as UTF-8")


@pytest.mark.parametrize("encoding", "utf-16 utf-16-le utf-16-be utf-32 utf-32-le utf-32-be".split())
def test_utf_16_and_utf_32_are_named_with_a_mark_and_without_and_so_is_a_nul_character(tmp_path, encoding):
    answer = "looks like UTF-16, or like no text at all: byte 0x.. at offset [0-3]; save it as UTF-8"
    for text in (small_text(), "Ünïcödé €\n" + small_text()):
        assert re.fullmatch(answer, refused(tmp_path, text.encode(encoding)))
    sentence = refused(tmp_path, small_text() + "\0" + small_text())
    assert f"no text at all: byte 0x00 at offset {len(small_text())};" in sentence


def test_a_text_of_300_chinese_characters_trains_on_any_console(tmp_path):
    flags = tiny(tmp_path, data=write(tmp_path, CHINESE))
    done = good(*flags)
    size = len(set(CHINESE))
    assert size > 256 and f"{len(CHINESE):,} characters, a vocabulary of {size}\n" in done.out
    assert f"(guessing scores ln({size}) = {math.log(size):.4f})" in done.out
    sample = done.out.split("the best model writes:\n")[1].split("\nfiles:")[0]
    assert set(sample) <= set(CHINESE) and len(sample) > 15
    assert gpt.load(tmp_path / "out/best.pt")[1].chars == sorted(set(CHINESE))
    assert steps(good(*flags, encoding="ascii").out) == steps(done.out)


@pytest.mark.slow
def test_a_text_of_300_chinese_characters_trains_whatever_the_locale_says(tmp_path):
    flags = tiny(tmp_path, data=write(tmp_path, CHINESE))
    done = run(*flags, env=ASCII)
    assert done.code == 0 and "Traceback" not in done.err and steps(done.out) == steps(good(*flags).out)


@pytest.mark.slow
@pytest.mark.parametrize("line, times, end", [("the cat", 10**6, ""), ("你好，世界。\r\n", 10**6, ""),
                                              ("你好，世界。\n", 10**6, "🙂")])
def test_a_long_text_takes_at_most_8_bytes_of_memory_for_each_character(tmp_path, line, times, end):
    text = line * times + end
    path, length = write(tmp_path, text), len(text)
    tracemalloc.start()
    try:
        name, found = find_text(path)
        tokens = encode_text(found, gpt.Tokenizer(found).stoi)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(tokens) >= 0.8 * length and peak <= 8 * length, peak / length


def test_a_text_that_is_too_short_is_answered_with_the_least_length_which_works(tmp_path):
    for length, train, val in [(80, 72, 8), (0, 0, 0)]:
        assert refused(tmp_path, small_text(length)) == (
            f"is too short: of its {length} characters {train} are to train and {val} to validate, and each "
            "must be more than block_size 8; use 81 characters or more, or a smaller --block_size")
    assert len(steps(good(*tiny(tmp_path, data=write(tmp_path, small_text(81)))).out)) == 3
    for block_size in range(1, 40):
        least = 10 * block_size + 1
        check_length("own", gpt.split_data("a" * least, gpt.Tokenizer("a")), block_size)
        with pytest.raises(UserError, match=f"use {least} characters"):
            check_length("own", gpt.split_data("a" * (least - 1), gpt.Tokenizer("a")), block_size)


def test_a_missing_file_is_named_and_an_earlier_run_stays_where_it_is(own):
    before = (own / "out/last.pt").read_bytes()
    sentence = refusal(*tiny(own, data=own / "nothing.txt"))
    assert sentence == f"cannot read {own}/nothing.txt: No such file or directory; name another file"
    assert (own / "out/last.pt").read_bytes() == before and not (own / "out/old-1").exists()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_folder_a_pipe_and_an_unreadable_file_are_named_instead_of_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        assert refusal(*tiny(tmp_path, data=path)) == f"{path} is not a plain file; name a text file"
    flags = tiny(tmp_path, data=write(tmp_path, small_text()))
    (tmp_path / "own.txt").chmod(0)
    if os.geteuid():  # root reads everything
        assert f"cannot read {tmp_path}/own.txt: Permission denied" in refusal(*flags)


def test_a_text_of_one_character_trains_and_is_continued(tmp_path):
    done = good(*tiny(tmp_path, data=write(tmp_path, "a" * 200)))
    assert "a vocabulary of 1\n" in done.out and "\n" + "a" * 21 + "\n" in done.out
    assert steps(done.out)[-1] == "step 20: train loss 0.0000, val loss 0.0000"
    done = call("--data", tmp_path / "own.txt", "--max_iters", 2, "--device", "cpu", main=bigram.main)
    assert done.code == 0 and "a" * 500 in done.out


def test_unusual_characters_are_kept_as_they_are(tmp_path):
    text = "e\u0301é\u00a0\u3000\u2028\x85\x0b\x0c\x1c\U0010ffff\ue000\u202e\t\n" * 40
    path = write(tmp_path, text)
    assert read_text(path) == text  # only \n ends a line here
    tokenizer = gpt.Tokenizer(text)
    assert tokenizer.decode(encode_text(text, tokenizer.stoi).tolist()) == text
    good(*tiny(tmp_path, data=path))
    done = good("--score", path, "--out", tmp_path / "out")
    assert done.out.startswith(f"{path}: {len(text)} characters, ")
