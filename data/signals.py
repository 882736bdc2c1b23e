"""
How a run is asked to stop: Ctrl+C and the signals of an operating system.
"""
import signal
import time
from contextlib import suppress

from data.processes import most_over_processes, world_size
from data.screen import note


class Interrupted(Exception):
    """ a signal asked for the end; args[0] is its number """


class Interrupts:
    """ the first Ctrl+C, SIGTERM or SIGHUP waits for the end of the step; a second one acts as before """

    def __init__(self):
        self.asked = 0         # the number of the signal that came
        self.handlers = {}     # those of before, by number
        self.checks = 0        # since the processes last asked one another
        self.checks_until_asked = 1
        self.asked_at = time.monotonic()

    def __enter__(self):
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)  # Windows has no SIGHUP
            if number and signal.getsignal(number) != signal.SIG_IGN:  # as SIGHUP is under nohup
                with suppress(ValueError):  # only the main thread receives signals
                    self.handlers[number] = signal.signal(number, self.remember)
        return self

    def __exit__(self, *error):
        for number, handler in self.handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)

    def remember(self, number, frame):
        self.asked = int(number)
        self.__exit__()
        with suppress(RuntimeError):  # in the middle of another print
            note("\nstopping soon; a second Ctrl+C or signal stops at once")

    def check(self):
        """ Interrupted, in all processes at the same batch, once one of them was asked to stop """
        asked = self.asked
        if world_size() > 1:
            self.checks += 1
            if self.checks < self.checks_until_asked:
                return
            asked = self.ask_all()
        if asked:
            raise Interrupted(asked)

    def ask_all(self):
        """ the signal that any process got; asked every sixteenth batch, or every second if sooner """
        now = time.monotonic()
        pace = (now - self.asked_at) / self.checks
        asked, seconds_per_batch = most_over_processes([self.asked, pace])
        self.asked_at, self.checks = now, 0
        self.checks_until_asked = 1 + min(15, int(1 / max(seconds_per_batch, 1e-3)))
        return int(asked)
