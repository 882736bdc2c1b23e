"""
Any text will do: from any editor, in any language, of any length that leaves both splits a context. What will
not do is answered in one sentence that says what, where and how to mend it.
"""

import math
import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from helpers import ROOT, call, environment, run, small_text, steps, tiny

import gpt
from data.text import TextFile, UserError, encode_text, vocabulary


def write(tmp_path, content, name="own.txt"):
    path = tmp_path / name
    path.write_bytes(content)
    return path


def read(path):
    return "".join(TextFile(path))


def refusal(tmp_path, path):
    """What the program answers to a text: one sentence after the usage line, and status 2."""
    done = call(*tiny(tmp_path, data=path))
    assert done.code == 2 and steps(done.out) == []
    usage, sentence = done.err.strip().split("\n")
    assert "error: " in sentence
    return sentence


# ---- line endings and byte order mark


@pytest.mark.parametrize("ending", ["\r\n", "\r"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_every_line_ending_and_a_byte_order_mark_give_the_same_text(tmp_path, ending, mark):
    text = small_text()
    path = write(tmp_path, mark + text.replace("\n", ending).encode())
    assert text.count("\n") > 5 and read(path) == text
    assert vocabulary(TextFile(path)) == sorted(set(text))


def test_a_crlf_across_two_pieces_is_one_newline(tmp_path):
    text = "x" * ((1 << 20) - 1) + "\r\n" + "y"
    assert read(write(tmp_path, text.encode())) == text.replace("\r\n", "\n")


def test_training_on_crlf_gives_the_digits_of_lf(tmp_path):
    text = small_text()
    lf = call(*tiny(tmp_path, data=write(tmp_path, text.encode(), "lf.txt")))
    crlf = call(*tiny(tmp_path, data=write(tmp_path, b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())))
    assert len(steps(lf.out)) == 3 and steps(crlf.out) == steps(lf.out)


# ---- not UTF-8


@pytest.mark.parametrize(
    "before",
    [
        pytest.param(b"", id="at the start"),
        pytest.param(b"It", id="in the first line"),
        pytest.param(b"one\ntwo\r\nthree\r", id="after line endings of every kind"),
        pytest.param(b"\xef\xbb\xbf" + "漢字🙂\n漢".encode(), id="after a mark and characters of many bytes"),
        pytest.param(("漢字🙂é\n" * 120_000).encode() + b"tail", id="beyond one MiB"),
    ],
)
def test_a_byte_that_is_not_utf8_is_named_with_its_offset(tmp_path, before):
    path = write(tmp_path, before + b"\x92s time\n" + small_text().encode())
    sentence = refusal(tmp_path, path)
    assert f"{path} is not UTF-8: byte 0x92 at offset {len(before)}; save it as UTF-8" in sentence


def test_a_character_cut_at_the_end_of_the_file_is_named(tmp_path):
    content = small_text().encode() + "漢".encode()[:2]
    sentence = refusal(tmp_path, write(tmp_path, content))
    assert f"byte 0xe6 at offset {len(content) - 2}" in sentence


def test_utf_16_as_windows_notepad_may_save_it_is_named(tmp_path):
    assert "byte 0xff at offset 0" in refusal(tmp_path, write(tmp_path, small_text().encode("utf-16")))


# ---- other alphabets


def test_chinese_and_emoji_make_the_round_trip(tmp_path):
    text = "".join(random.Random(3).choices("你好，世界。🙂👩‍🚀é\n", k=2000))
    tokenizer, data = gpt.load_data(TextFile(write(tmp_path, text.encode())), "own.txt", 8)
    assert tokenizer.chars == sorted(set(text)) and "👩" in tokenizer.chars
    assert tokenizer.decode(torch.cat([data["train"], data["val"]]).tolist()) == text
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_chinese_text_trains_and_guessing_scores_the_logarithm_of_its_vocabulary(tmp_path):
    text = "".join(random.Random(3).choices("你好世界，。🙂", k=2000))
    done = call(*tiny(tmp_path, data=write(tmp_path, text.encode())))
    assert done.code == 0 and "2,000 characters, a vocabulary of 7" in done.out
    assert f"guessing scores ln(7) = {math.log(7):.4f}" in done.out
    sample = done.out.split("that model writes:\n")[1].split("\nfiles:")[0]
    assert set(sample.strip()) <= set(text) and len(sample.strip()) > 15


@pytest.mark.parametrize(
    "count, dtype", [(2, np.uint8), (256, np.uint8), (257, np.int16), (32768, np.int16), (32769, np.int32)]
)
def test_tokens_take_the_smallest_integers_that_hold_the_vocabulary(count, dtype):
    text = "".join(chr(0x10000 + i) for i in range(count))
    stoi = {ch: i for i, ch in enumerate(text)}
    tokens = encode_text([text[:1], text[1:]], stoi)
    assert tokens.dtype == dtype and tokens.tolist() == list(range(count))


def test_a_text_of_300_symbols_trains(tmp_path):
    text = "".join(chr(0x4E00 + i) for i in range(300)) * 4
    done = call(*tiny(tmp_path, data=write(tmp_path, text.encode())))
    assert done.code == 0 and "a vocabulary of 300" in done.out and len(steps(done.out)) == 3


# ---- too short


def test_block_size_plus_one_in_the_shorter_split_works(tmp_path):
    text = small_text(90)  # 81 to train, 9 to validate: 8 + 1
    done = call(*tiny(tmp_path, data=write(tmp_path, text.encode())))
    assert done.code == 0 and len(steps(done.out)) == 3


def test_one_less_is_an_error_that_says_the_lengths_and_the_remedy(tmp_path):
    path = write(tmp_path, small_text(80).encode())
    sentence = refusal(tmp_path, path)
    assert f"{path} is too short: of its 80 characters 72 are to train and 8 to validate" in sentence
    assert "more than block_size 8; take 81 characters or more, or a smaller --block_size" in sentence


def test_the_least_length_that_the_error_names_works_and_no_less_does():
    for block_size in range(1, 40):
        least = 10 * block_size + 1
        gpt.load_data([small_text(least)], "own", block_size)
        with pytest.raises(UserError, match=f"take {least} characters"):
            gpt.load_data([small_text(least - 1)], "own", block_size)


def test_an_empty_file_is_too_short(tmp_path):
    assert "is too short: of its 0 characters" in refusal(tmp_path, write(tmp_path, b""))


# ---- no text at all


def test_a_missing_file_is_named(tmp_path):
    path = tmp_path / "nothing.txt"
    sentence = refusal(tmp_path, path)
    assert f"cannot read {path}: No such file or directory; name another with --data" in sentence


def test_a_folder_is_named(tmp_path):
    (tmp_path / "folder").mkdir()
    assert f"cannot read {tmp_path / 'folder'}: " in refusal(tmp_path, tmp_path / "folder")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file_is_named(tmp_path):
    path = write(tmp_path, small_text().encode())
    path.chmod(0)
    assert f"cannot read {path}: Permission denied" in refusal(tmp_path, path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_is_named_instead_of_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert "is no plain file" in refusal(tmp_path, tmp_path / "pipe")


def test_a_mistake_in_the_text_leaves_an_earlier_run_where_it_is(tmp_path):
    assert call(*tiny(tmp_path)).code == 0
    before = (tmp_path / "out/last.pt").read_bytes()
    refusal(tmp_path, tmp_path / "nothing.txt")
    assert (tmp_path / "out/last.pt").read_bytes() == before and not (tmp_path / "out/old-1").exists()


# ---- UTF-8 whatever the platform says


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": None}


def test_the_locale_does_not_matter(tmp_path):
    text = "".join(random.Random(3).choices("你好世界，。🙂\n", k=2000))
    flags = tiny(tmp_path, data=write(tmp_path, text.encode()))
    plain = run(tmp_path, *flags, env=ASCII)
    assert plain.code == 0 and "Traceback" not in plain.err
    assert len(steps(plain.out)) == 3 and steps(plain.out) == steps(call(*flags).out)
    assert gpt.load(tmp_path / "out/best.pt")[1].chars == sorted(set(text))


def test_bigram_answers_in_one_sentence_as_well(tmp_path):
    path = write(tmp_path, b"It\x92s\n")
    done = subprocess.run(
        [sys.executable, "bigram.py", "--data", path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=environment(tmp_path, **ASCII),
        timeout=30,
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"{path} is not UTF-8: byte 0x92 at offset 2" in done.stderr
