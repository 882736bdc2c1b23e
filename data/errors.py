"""
Errors in one sentence: what a person can mend, what the machine lacks. Our own mistakes keep their traceback.
"""
import os
import re
import sys
from contextlib import contextmanager


class UserError(ValueError):
    """ a mistake that the person at the keyboard can mend; the message is one sentence with the remedy """


class RunFailed(Exception):
    """ the run cannot continue; the message is one sentence that says why """


def explain(error, remedy):
    """ one sentence for an error of the machine, with the remedy if it lacks memory; None for any other """
    memory = "out of memory|allocate memory|not enough memory|ALLOC_FAILED|Storage size calculation overflow"
    if "no kernel image is available" in str(error):
        return "this build of torch has no kernels for this GPU; install another build, or use --device cpu"
    if isinstance(error, MemoryError) or re.search(memory, str(error)):
        return f"out of memory; {remedy}"
    return None


@contextmanager
def plain_errors(parser, remedy):
    """ one sentence and an exit status for what a person can mend or the machine lacks; other errors stay """
    try:
        yield
    except UserError as error:
        parser.error(str(error))
    except RunFailed as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        pass  # the reader of our output is gone, as after `| head`
    except OSError as error:
        parser.exit(1, f"{parser.prog}: cannot continue: {error}\n")
    except (MemoryError, RuntimeError) as error:
        if not (sentence := explain(error, remedy)):
            raise
        parser.exit(1, f"{parser.prog}: {sentence}\n")


def run_script(main):
    """ main(), and an end without a second complaint where standard output is closed or full """
    try:
        main()
    finally:
        try:
            if sys.stdout:  # None where it was closed
                sys.stdout.flush()
        except OSError:  # Python flushes once more at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
