"""
Fetches Tiny Shakespeare (one text file, 1.1 MB), checks it, and places it at input.txt beside gpt.py.

    python data/download.py

bigram.py and gpt.py do the same by themselves when input.txt is absent.
"""
import hashlib
import os
import sys
import time
from pathlib import Path

INPUT = Path(__file__).resolve().parent.parent / "input.txt"
SIZE = 1_115_394                                   # bytes, and characters too: the text is plain ASCII
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
SOURCES = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    "https://cdn.jsdelivr.net/gh/karpathy/char-rnn@master/data/tinyshakespeare/input.txt",
    "https://raw.githubusercontent.com/karpathy/ng-video-lecture/master/input.txt",
)
TIMEOUT = (5, 15)                                  # seconds: to connect, and between two pieces
DEADLINE = 90                                      # seconds for the whole file, so that a trickle ends too
TRIES = 2                                          # for each source, when something broke on the way


def fetch(url, part):
    """Write what stands at `url` to the file `part`; ValueError if that is not the text."""
    import requests  # here, since only a download needs it

    digest, size, start = hashlib.sha256(), 0, time.monotonic()
    with requests.get(url, stream=True, timeout=TIMEOUT) as reply, open(part, "wb") as file:
        reply.raise_for_status()
        # read1 gives what is there; iter_content would wait for a whole piece, however slowly it comes
        while piece := reply.raw.read1(1 << 16, decode_content=True):
            file.write(piece)
            digest.update(piece)
            size += len(piece)
            if sys.stderr.isatty():
                print(f"\r{size:,} of {SIZE:,} bytes", end="", file=sys.stderr, flush=True)
            if size > SIZE:
                raise ValueError(f"not the text: more than its {SIZE:,} bytes")
            if time.monotonic() - start > DEADLINE:
                raise ValueError(f"too slow: {size:,} of {SIZE:,} bytes in {DEADLINE} seconds")
        file.flush()
        os.fsync(file.fileno())
    if size != SIZE:
        raise ValueError(f"not the text: {size:,} bytes where {SIZE:,} were expected")
    if digest.hexdigest() != SHA256:
        raise ValueError("not the text: as long, but with another sha256")


def download(target=INPUT, sources=SOURCES):
    """Place Tiny Shakespeare at `target`, from the first source that has it; ConnectionError says why not."""
    import requests

    raw_errors = requests.packages.urllib3.exceptions.HTTPError  # raised in mid-reply
    target, failures = Path(target), []
    part = target.with_name(f".{target.name}.{os.getpid()}.part")  # one each, should two of us run at once
    for url in sources:
        for _ in range(TRIES):
            print(f"downloading {url}", file=sys.stderr)
            try:
                fetch(url, part)
                os.replace(part, target)           # the whole file or none
                print(f"{target} is whole: its sha256 is right", file=sys.stderr)
                return target
            except (requests.RequestException, raw_errors, ValueError) as error:
                failures.append(f"  {url}: {reason(error)}")
                broke = isinstance(error, raw_errors)
                if not broke and getattr(getattr(error, "response", None), "status_code", 0) < 500:
                    break                          # the answer was clear: another try would not change it
            finally:
                part.unlink(missing_ok=True)
                if sys.stderr.isatty():
                    print(file=sys.stderr)         # below the moving line
    raise ConnectionError("\n".join(["Tiny Shakespeare could not be fetched:", *failures]))


def reason(error):
    """What a person needs to know of an error, in one line."""
    if "Failed to resolve" in str(error) or "NameResolutionError" in str(error):
        return "the name cannot be resolved (no network?)"
    return str(error).split("(Caused by ")[-1].splitlines()[0]


def main():
    try:
        if not INPUT.exists():
            download()
        elif hashlib.sha256(INPUT.read_bytes()).hexdigest() == SHA256:
            print(f"{INPUT} is Tiny Shakespeare already.")
        else:
            return f"{INPUT} holds another text and stays as it is; move it away to fetch Tiny Shakespeare."
    except OSError as error:                       # a ConnectionError is one as well
        return f"{error}\nBy hand: save {SOURCES[0]} from a browser as {INPUT}."
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
