"""
How a script begins and ends: what a person can mend, or the machine lacks, is said in one sentence.
"""
import os
import sys
from contextlib import contextmanager, suppress

from data.errors import RunFailed, UserError, explain
from data.processes import first_to_fail
from data.signals import Interrupted

SIGPIPE = 13  # a shell says 128 + 13 of a command whose reader is gone, as `yes | head -1` is


@contextmanager
def plain_errors(parser, remedy):
    """
    One sentence and an exit status: 2 for what a person can mend, 1 for what the machine lacks. Other errors
    keep their traceback. Of several processes the first one that fails speaks for all.
    """
    try:
        yield
    except UserError as error:
        parser.error(str(error))
    except RunFailed as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    except Interrupted as signalled:
        sys.exit(128 + signalled.args[0])
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(128 + SIGPIPE)
    except OSError as error:
        parser.exit(1, f"{parser.prog}: cannot continue: {error}\n")
    except Exception as error:
        sentence = None
        if isinstance(error, (MemoryError, RuntimeError)):
            sentence = explain(error, remedy)
        if sentence:
            parser.exit(1, f"{parser.prog}: {sentence}\n")
        if not first_to_fail():
            sys.exit(1)
        raise


def run_script(main):
    """ main(), and an end without a second complaint where standard output is closed, full or gone """
    try:
        main()
    finally:
        try:
            if sys.stdout:  # None where it was closed
                sys.stdout.flush()
        except OSError:  # Python flushes once more at its end
            with suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
