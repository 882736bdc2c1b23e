"""
How a text is found, read and encoded: UTF-8 on every platform, a byte order mark dropped, every line ending a
plain newline. A text is an iterable of strings, its pieces, so that a gigabyte need never be held whole.
"""
import sys
from pathlib import Path

import numpy as np

from data.download import INPUT, SOURCES, download

MANUAL = "Python's own reference manual"
BY_HAND = f"By hand: save {SOURCES[0]} from a browser as {INPUT}, or name a text of yours with --data FILE."


class UserError(ValueError):
    """A mistake that the person at the keyboard can mend; the text is one sentence with the remedy."""


class TextFile:
    """The characters of a UTF-8 file, in pieces of a million, as often as it is looped over."""

    def __init__(self, path):
        self.path = Path(path)

    def __iter__(self):
        if self.path.exists() and not (self.path.is_file() or self.path.is_dir()):
            raise UserError(f"{self.path} is no plain file, and a text is read twice; save it as one first")
        try:
            with open(self.path, encoding="utf-8-sig") as file:        # "-sig": without a byte order mark
                while piece := file.read(1 << 20):
                    yield piece
        except UnicodeDecodeError:
            raise UserError(self.where_it_is_not_utf8()) from None
        except OSError as error:
            raise UserError(f"cannot read {self.path}: {error.strerror}; name another with --data") from None

    def where_it_is_not_utf8(self):
        offset = 0
        for line in open(self.path, "rb"):                         # a newline never stands inside a character
            try:
                line.decode()
            except UnicodeDecodeError as error:
                return (f"{self.path} is not UTF-8: byte 0x{line[error.start]:02x} at offset "
                        f"{offset + error.start}; save it as UTF-8 in a text editor")
            offset += len(line)


def find_text(path=""):
    """
    The name and the pieces of the text to train on: the file `path`; without one input.txt, downloaded if
    need be; with no network the manual inside every Python, so that there is always something to learn.
    """
    if path and path != MANUAL:
        return path, TextFile(path)
    if path != MANUAL:
        try:
            return INPUT.name, TextFile(INPUT if INPUT.exists() else download())
        except OSError as error:                                       # no network, or no room for the file
            print(f"{error}\nnotice: so the text is {MANUAL}, not Shakespeare. {BY_HAND}", file=sys.stderr)
    from pydoc_data.topics import topics

    return MANUAL, ["\n\n".join(topics[name] for name in sorted(topics))]


def vocabulary(text):
    """sorted(list(set(text))), piece by piece"""
    chars = set()
    for piece in text:
        chars.update(piece)
    return sorted(list(chars))


def encode_text(text, stoi):
    """
    Every character of a text through the dictionary stoi, as an array (N,) of the smallest integers that hold
    the vocabulary. numpy looks up all characters of a piece at once, in a table with an entry per code point.
    """
    dtype = next(t for t in (np.uint8, np.int16, np.int32) if len(stoi) - 1 <= np.iinfo(t).max)
    table = np.zeros(sys.maxunicode + 1, dtype)
    for ch, i in stoi.items():
        table[ord(ch)] = i
    return np.concatenate([table[np.frombuffer(piece.encode("utf-32-le"), np.uint32)] for piece in text])
