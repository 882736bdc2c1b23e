"""
Fetches Tiny Shakespeare (one text file, 1.1 MB), checks it, and places it at input.txt beside gpt.py.

    python data/download.py

bigram.py and gpt.py do the same by themselves when input.txt is absent.
"""
import hashlib
import os
import sys
from pathlib import Path

INPUT = Path(__file__).resolve().parent.parent / "input.txt"
SIZE = 1_115_394  # bytes, and characters too: the text is plain ASCII
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
SOURCES = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    "https://cdn.jsdelivr.net/gh/karpathy/char-rnn@master/data/tinyshakespeare/input.txt",
    "https://raw.githubusercontent.com/karpathy/ng-video-lecture/master/input.txt",
)
TIMEOUT = (5, 15)  # seconds: to connect, and between two pieces


def fetch(url):
    """ url -> the text's bytes; ValueError if what it serves is something else """
    import requests  # here, since only a download needs it

    content = b""
    with requests.get(url, stream=True, timeout=TIMEOUT) as reply:
        reply.raise_for_status()
        for piece in reply.iter_content(1 << 16):
            content += piece
            if len(content) > SIZE:
                raise ValueError(f"not the text: more than its {SIZE:,} bytes")
    if len(content) != SIZE:
        raise ValueError(f"not the text: {len(content):,} bytes where {SIZE:,} were expected")
    if hashlib.sha256(content).hexdigest() != SHA256:
        raise ValueError("not the text: the right length, but another sha256")
    return content


def download():
    """ the bytes of Tiny Shakespeare, from the first source that has them; ConnectionError if none has """
    failures = []
    for url in SOURCES:
        print(f"downloading {url}", file=sys.stderr, flush=True)
        try:
            return fetch(url)
        except Exception as error:  # of many kinds; a missing or broken `requests` is one of them
            reason = str(error) or type(error).__name__
            failures.append(f"  {url}: {reason.split('(Caused by ')[-1].splitlines()[0]}")
    raise ConnectionError("\n".join(["Tiny Shakespeare could not be fetched:", *failures]))


def place(content, target):
    """ write a file completely or not at all; OSError where that is not possible """
    part = target.with_name(f".{target.name}.{os.getpid()}.part")  # one per process, in case two run at once
    try:
        part.write_bytes(content)
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


def main():
    try:
        if not INPUT.exists():
            place(download(), INPUT)
            print(f"{INPUT} is complete: its sha256 is right.")
        elif hashlib.sha256(INPUT.read_bytes()).hexdigest() == SHA256:
            print(f"{INPUT} is Tiny Shakespeare already.")
        else:
            return f"{INPUT} is another text and is left as it is; move it away to fetch Tiny Shakespeare."
    except OSError as error:  # a ConnectionError is one as well
        return f"{error}\nBy hand: save {SOURCES[0]} from a browser as {INPUT}."
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
