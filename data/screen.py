"""
What a run shows while it works. Process 0 speaks for all.

    show    text on standard output
    say     a line on standard output, from process 0
    note    a line on standard error, from process 0
    status  a line on standard error, on a terminal only, which the next one replaces
"""
import errno
import os
import re
import shlex
import subprocess
import sys
import time
import unicodedata
from contextlib import suppress

from data.processes import rank


def show(text, end="\n"):
    """ print at once; a ? for each character that the console lacks, and silence if the terminal is gone """
    if is_terminal(sys.stdout):
        text = without_controls(text)
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        print(text.encode(encoding, "replace").decode(encoding), end=end, flush=True)
    except OSError as error:
        if error.errno != errno.EIO:  # what a terminal that is gone answers
            raise


def say(text):
    if rank() == 0:
        status("")
        show(text)


def note(text):
    if rank() == 0 and sys.stderr:  # None where it was closed
        status("")
        with suppress(OSError):  # the terminal may be gone
            print(without_controls(text), file=sys.stderr, flush=True)


def status(text):
    if has_status_line() and rank() == 0:
        with suppress(OSError):
            text = text[:terminal_width() - 1]
            print(f"\r{text}\x1b[K", end="" if text else "\r", file=sys.stderr, flush=True)


def is_terminal(stream):
    return getattr(stream, "isatty", bool)()


def has_status_line():
    """ whether standard error is a terminal on which a line can be replaced """
    return is_terminal(sys.stderr) and os.environ.get("TERM") != "dumb"


def terminal_width():
    """ columns of the terminal that shows standard error """
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    except (OSError, ValueError, AttributeError):
        return 80


def without_controls(text):
    """ control characters, which can garble a terminal, as escapes such as \\x1b; newlines and tabs stay """
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda found: ascii(found[0])[1:-1], text)


def listed(characters):
    """ the first twenty characters, invisible and combining ones as escapes, and how many more there are """
    def clear(ch):
        return ch if ch.isprintable() and not unicodedata.combining(ch) else ascii(ch)[1:-1]

    shown, hidden = characters[:20], len(characters) - 20
    return f"'{''.join(map(clear, shown))}'" + (f" and {hidden:,} more" if hidden > 0 else "")


def quoted(words):
    """ words of a command line as one line to paste into a shell """
    return subprocess.list2cmdline(words) if os.name == "nt" else shlex.join(words)


def clock(seconds):
    return f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02}:{int(seconds) % 60:02}"


class Progress:
    """ how far a run is, how fast it is, how long it will take; work is counted in forward passes """

    def __init__(self, config, step):
        steps_left = config.max_iters - step
        next_report = -(-step // config.eval_interval) * config.eval_interval
        reports_left = len(range(next_report, config.max_iters, config.eval_interval)) + 1  # and the last one
        self.work_left = 3 * steps_left + 2 * config.eval_iters * reports_left  # a training step takes three
        self.tokens_per_step = config.batch_size * config.block_size
        self.ticks = 0              # how many times tick was called
        self.steps = 0              # training steps since the program began
        self.seconds_training = 0.0  # spent in them
        self.work_timed = 0         # forward passes since timed_from
        self.timed_from = None      # when the second pass began: the first one is slow
        self.batch_at = time.monotonic()
        self.next_line_at = self.batch_at + 0.5

    def tick(self, work, text):
        """ `work` forward passes begin: a line that changes on a terminal, elsewhere a new one every 10 s """
        self.batch_at = time.monotonic()
        self.ticks += 1
        if self.ticks == 1:
            self.next_line_at = self.batch_at + 0.5
        if self.ticks == 2:  # the first pass is slow: the time left is reckoned from the second
            self.timed_from, self.work_timed = self.batch_at, 0
        self.work_timed += work
        self.work_left -= work
        if self.batch_at > self.next_line_at:
            self.next_line_at = self.batch_at + (0.2 if has_status_line() else 10)
            show_line = status if has_status_line() else note
            show_line(", ".join([text, *self.speed()]))

    def stepped(self):
        """ a training step is done """
        self.steps += 1
        self.seconds_training += time.monotonic() - self.batch_at

    def speed(self):
        """ what can be said of the speed: the tokens per second, the time left """
        parts = []
        if self.seconds_training:
            parts.append(f"{self.steps * self.tokens_per_step / self.seconds_training:,.0f} tokens/s")
        if self.timed_from:
            seconds = time.monotonic() - self.timed_from
            parts.append(f"{clock(seconds / self.work_timed * max(0, self.work_left))} left")
        return parts
