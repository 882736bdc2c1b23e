"""
What a run shows while it works, and how it is asked to stop. Process 0 speaks for all.
"""
import math
import os
import shutil
import signal
import sys
import time
import unicodedata
from contextlib import suppress

import torch

from data.processes import rank, world_size


class Interrupted(Exception):
    """ a signal asked for the end; args[0] is its number """


def show(text, end="\n"):
    """ print at once, with a ? for each character that the console lacks """
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(text.encode(encoding, "replace").decode(encoding), end=end, flush=True)


def say(text):
    """ a line on standard output, from process 0 """
    if rank() == 0:
        status("")
        show(text)


def note(text):
    """ a line on standard error, from process 0 """
    if rank() == 0:
        status("")
        with suppress(OSError):  # the terminal may be gone
            print(text, file=sys.stderr, flush=True)


def on_terminal():
    return getattr(sys.stderr, "isatty", bool)() and os.environ.get("TERM") != "dumb"


def status(text):
    """ a line that the next one replaces, on a terminal """
    if on_terminal():
        with suppress(OSError):
            text = text[:shutil.get_terminal_size().columns - 1]
            print(f"\r{text}\x1b[K", end="" if text else "\r", file=sys.stderr, flush=True)


def listed(characters):
    """ the first twenty characters, invisible and combining ones as escapes, and how many more there are """
    clear = [ch.isprintable() and not unicodedata.combining(ch) for ch in characters[:20]]
    shown = "".join(ch if good else ascii(ch)[1:-1] for ch, good in zip(characters, clear))
    return f"'{shown}'" + (f" and {len(characters) - 20:,} more" if len(characters) > 20 else "")


def clock(seconds):
    return f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02}:{int(seconds) % 60:02}"


class Progress:
    """ how far a run is, how fast, how long it will take """

    def __init__(self, config, step):
        last, interval = config.max_iters, config.eval_interval
        reports = last // interval - (step - 1) // interval + (last % interval > 0)
        self.work = 3 * (last - step) + 2 * config.eval_iters * reports  # forward passes: a step takes three
        self.tokens_per_step = config.batch_size * config.block_size
        self.done, self.steps, self.seconds = 0, 0, 0.0  # seconds: in training steps
        self.recent_steps, self.recent_seconds, self.fastest, self.warned = 0, 0.0, math.inf, False
        self.began = self.now = time.monotonic()
        self.since, self.done_since = self.began, 0  # work is counted after the first pass, which is slow
        self.next_line = self.began + 0.5

    def tick(self, work, text):
        """ `work` forward passes begin: a line that changes on a terminal, elsewhere a new one every 10 s """
        self.now = time.monotonic()
        if self.done == 0:
            self.next_line = self.now + 0.5
        if self.done_since == 0:
            self.since, self.done_since = self.now, self.done
        self.done += work
        if self.now > self.next_line and rank() == 0:
            self.next_line = self.now + (0.2 if on_terminal() else 10)
            (status if on_terminal() else note)(", ".join([text, *self.speed()]))

    def stepped(self, device):
        """ a training step is done """
        seconds = time.monotonic() - self.now
        self.steps, self.seconds = self.steps + 1, self.seconds + seconds
        self.recent_steps, self.recent_seconds = self.recent_steps + 1, self.recent_seconds + seconds
        if self.recent_seconds > 2:
            pace, self.recent_steps, self.recent_seconds = self.recent_seconds / self.recent_steps, 0, 0.0
            self.fastest = min(self.fastest, pace)
            sharing = device.type == "cpu" and torch.get_num_threads() > 1
            if pace > 3 * self.fastest and sharing and not self.warned:
                self.warned = True
                note(f"notice: steps take {pace / self.fastest:.0f} times as long as before; another program "
                     "may be busy. OMP_NUM_THREADS=1 in the environment lets this run share the CPU better")

    def speed(self):
        """ what can be said of the speed: the tokens per second, the time left """
        parts = [f"{self.steps * self.tokens_per_step / self.seconds:,.0f} tokens/s"] if self.seconds else []
        if self.done > self.done_since > 0:
            pace = (time.monotonic() - self.since) / (self.done - self.done_since)
            parts.append(f"{clock(max(0, pace * (self.work - self.done)))} left")
        return parts


class Interrupts:
    """ the first Ctrl+C, SIGTERM or SIGHUP waits for the end of the step; a second one acts as before """

    def __init__(self):
        self.asked, self.before = 0, {}

    def __enter__(self):
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)  # Windows has no SIGHUP
            if number and signal.getsignal(number) != signal.SIG_IGN:  # as SIGHUP is under nohup
                with suppress(ValueError):                  # only the main thread receives signals
                    self.before[number] = signal.signal(number, self.remember)
        return self

    def __exit__(self, *error):
        for number, handler in self.before.items():
            signal.signal(number, handler or signal.SIG_DFL)

    def remember(self, number, frame):
        self.asked = int(number)
        self.__exit__()
        with suppress(RuntimeError):  # in the middle of another print
            note("\nstopping soon; a second Ctrl+C or signal stops at once")

    def check(self):
        """ Interrupted, in all processes at the same step, once one of them was asked to stop """
        asked = self.asked
        if world_size() > 1:
            tensor = torch.tensor(asked)
            torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX)
            asked = tensor.item()
        if asked:
            raise Interrupted(asked)
