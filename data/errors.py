"""
The errors that are worth a sentence. All others are mistakes of our own, and keep their traceback.
"""
import re


class UserError(ValueError):
    """ a mistake that the person at the keyboard can mend; the message is one sentence with the remedy """


class RunFailed(Exception):
    """ the run cannot continue; the message is one sentence that says why """


def explain(error, remedy):
    """ one sentence for an error of the machine, with the remedy if it lacks memory; None for any other """
    message = str(error)
    if "no kernel image is available" in message:
        return "this build of torch has no kernels for this GPU; install another build, or use --device cpu"
    if "busy or unavailable" in message:
        return "the GPU is taken by another program; wait, or choose another one with --device"
    if re.search("closed by peer|reset by peer|remote process exited", message):
        return "another process of this run is gone; it may have been killed, for lack of memory for example"
    if others := memory_of_others(message):
        return f"out of memory; other programs hold {others:.0f} GiB of it; wait, or choose another --device"
    memory = "out of memory|allocate memory|not enough memory|ALLOC_FAILED|Storage size calculation overflow"
    if isinstance(error, MemoryError) or re.search(memory, message):
        return f"out of memory; {remedy}"
    return None


def memory_of_others(message):
    """ GiB of a GPU that other programs hold, from torch's message; 0 if this program holds more """
    others = re.findall(r"Process \d+ has ([\d.]+) GiB memory in use", message)
    ours = re.findall(r"this process has ([\d.]+) GiB memory in use", message)
    gib_of_others, our_gib = sum(map(float, others)), sum(map(float, ours))
    return gib_of_others if gib_of_others > our_gib else 0.0
