"""
How a text is found, read and encoded: UTF-8 everywhere, every line ending a newline, no byte order mark.
"""
import hashlib
import io
import os
import re
import sys
from contextlib import suppress

import numpy as np

from data.download import INPUT, SOURCES, download, place
from data.errors import UserError
from data.screen import note

MANUAL = "Python's own reference manual"
BY_HAND = f"By hand: save {SOURCES[0]} from a browser as {INPUT}, or name a text of yours with --data FILE."


def find_text(path=""):
    """ (name, text): the file `path`, or input.txt, downloaded if absent, or the manual inside Python """
    if path == MANUAL:
        return MANUAL, read_manual()
    if path:
        return path, read_text(path)
    if INPUT.exists():
        return INPUT.name, read_text(INPUT)
    try:
        return INPUT.name, download_text()
    except ConnectionError as error:
        note(f"{error}\nnotice: so the text is {MANUAL}, not Shakespeare. {BY_HAND}")
        return MANUAL, read_manual()


def read_manual():
    from pydoc_data.topics import topics
    return "\n\n".join(topics[name] for name in sorted(topics))


def download_text():
    """ Tiny Shakespeare, kept in input.txt if that can be written; ConnectionError if no source has it """
    content = download()
    try:
        place(content, INPUT)
    except OSError as error:
        note(f"notice: cannot write {INPUT}, so the text stays in memory: {error}")
    return content.decode()


def read_text(path):
    """ the characters of a UTF-8 file; UserError says what is wrong with any other """
    if os.path.exists(path) and not os.path.isfile(path):
        raise UserError(f"{path} is not a plain file; name a text file")
    try:
        with open(path, "rb") as file:
            return decode_text(file, path)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; name another file") from None


def decode_text(file, name):
    """ the characters in a binary file that contains UTF-8; every line ending becomes a newline """
    with io.TextIOWrapper(file, encoding="utf-8") as pieces:
        with suppress(UnicodeDecodeError):
            text = "".join([piece.replace("\ufeff", "") for piece in iter(lambda: pieces.read(1 << 20), "")])
            if "\0" not in text:
                return text
        file.seek(0)
        content = file.read()
    try:
        content.decode()
        bad = content.index(0)
    except UnicodeDecodeError as error:
        bad = error.start
    kind = "looks like UTF-16, or like no text at all" if b"\0" in content else "is not UTF-8"
    raise UserError(f"{name} {kind}: byte 0x{content[bad]:02x} at offset {bad}; save it as UTF-8")


def typed_text(word, name):
    """ a text from the command line: \\n is a newline, \\\\ a backslash; UserError if it is not UTF-8 """
    raw = word.encode("utf-8", "surrogateescape")  # the bytes, whatever the locale made of them
    text = decode_text(io.BytesIO(raw), name)
    return re.sub(r"\\([n\\])", lambda found: "\n" if found[1] == "n" else "\\", text)


def read_standard_input():
    """ what is typed or piped in, as a text file is read """
    if not sys.stdin:
        return ""
    raw = getattr(sys.stdin, "buffer", sys.stdin).read()
    return decode_text(io.BytesIO(raw.encode() if isinstance(raw, str) else raw), "the prompt")


def encode_text(text, stoi):
    """ [stoi[ch] for ch in text], fast: an array (N,) of the smallest integers; an unknown one becomes 0 """
    dtype = next(t for t in (np.uint8, np.int16, np.int32) if len(stoi) <= np.iinfo(t).max + 1)
    table = np.zeros(sys.maxunicode + 1, dtype)
    table[[ord(ch) for ch in stoi]] = list(stoi.values())
    tokens = np.empty(len(text), dtype)
    for i in range(0, len(text), 1 << 20):
        code_points = np.frombuffer(text[i:i + (1 << 20)].encode("utf-32-le"), np.uint32)
        tokens[i:i + (1 << 20)] = table[code_points]
    return tokens


def check_length(name, splits, block_size):
    """ UserError unless both splits, {"train": (N,), "val": (M,)}, are longer than one context """
    train, val = len(splits["train"]), len(splits["val"])
    if min(train, val) <= block_size:
        raise UserError(f"{name} is too short: of its {train + val:,} characters {train:,} are to train and "
                        f"{val:,} to validate, and each must be more than block_size {block_size}; use "
                        f"{10 * block_size + 1:,} characters or more, or a smaller --block_size")


def fingerprint(splits):
    """ the sha256 of the tokens of both splits: another text has another one """
    digest = hashlib.sha256(splits["train"].numpy())
    digest.update(splits["val"].numpy())
    return digest.hexdigest()
