"""
Several processes that compute one run, as a launcher such as torchrun starts them. All do the same; process 0
alone speaks and writes. Without a launcher there is one process, number 0 of 1.
"""
import os
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch

from data.errors import UserError

LAUNCHER = ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]  # what a launcher sets in the environment
shared = {}  # "store": a table that all processes see; "is_first": whether this one is the first to fail


def launched():
    """ whether a launcher started this process as one of several; UserError for half of its settings """
    if os.environ.get("WORLD_SIZE", "") == "1":
        return False
    found = [name for name in [*LAUNCHER, "LOCAL_RANK"] if name in os.environ]
    with suppress(KeyError, ValueError):
        number, processes, port = (int(os.environ[name]) for name in ["RANK", "WORLD_SIZE", "MASTER_PORT"])
        if 0 <= number < processes and port and "MASTER_ADDR" in found and torch.distributed.is_available():
            return True
    if {"RANK", "WORLD_SIZE", "LOCAL_RANK"} & set(found):
        raise UserError(f"the environment has {found[0]}={os.environ[found[0]]}, but not all that a launcher "
                        f"sets ({', '.join(LAUNCHER)}); unset {' and '.join(found)}, or start with torchrun")
    return False


@contextmanager
def joined():
    """ together with the other processes, if there are several; afterwards each is alone """
    if launched():
        join()
    try:
        yield
    finally:
        leave()


def join():
    """ meet the other processes; UserError if they do not come, or cannot be reached """
    has_nccl = torch.cuda.is_available() and torch.distributed.is_nccl_available()  # not on Windows
    backend = "cpu:gloo,cuda:nccl" if has_nccl else "gloo"
    try:
        store, number, processes = next(torch.distributed.rendezvous("env://", timeout=timedelta(minutes=10)))
        # a launcher keeps its table when it starts all again, so each attempt writes into a part of its own
        shared["store"] = store = torch.distributed.PrefixStore(f"attempt {restarts()}", store)
        torch.distributed.init_process_group(backend, store=torch.distributed.PrefixStore("run", store),
                                             rank=number, world_size=processes, timeout=timedelta(minutes=10))
    except (torch.distributed.DistError, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0].split("] ")[-1][:150]  # behind [enforce fail at ...]
        raise UserError(f"the processes cannot meet: {reason}; check the network and the settings of the "
                        "launcher, then start all again") from None


def leave():
    """ part from the other processes """
    if several():
        torch.distributed.destroy_process_group()


def part():
    """ all processes part, when all are there; True in process 0, which does alone what remains """
    number = rank()
    if several():
        torch.distributed.barrier()
    leave()
    return number == 0


def several():
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def rank():
    """ the number of this process """
    return torch.distributed.get_rank() if several() else 0


def world_size():
    """ how many processes there are """
    return torch.distributed.get_world_size() if several() else 1


def local_rank():
    """ the number of this process among those on this machine """
    return int(os.environ.get("LOCAL_RANK", rank())) if several() else 0


def restarts():
    """ how often the launcher started all processes again, after one of them had failed """
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


def first_to_fail():
    """ whether no other process has spoken of an error yet: one of them does, for all """
    if "store" in shared and "is_first" not in shared:  # asked once: an error may pass here twice
        with suppress(RuntimeError):  # the process that kept the table is gone
            shared["is_first"] = shared["store"].add("failures", 1) == 1
    return shared.get("is_first", True)


def on_rank_0(function, *args):
    """ function(*args) in process 0 alone; all processes get its result, or its error """
    result, error = None, None
    if rank() == 0:
        try:
            result = function(*args)
        except Exception as failure:
            error = failure
    if several():
        outcome = [result, error]
        torch.distributed.broadcast_object_list(outcome)
        result, error = outcome
    if error:
        raise error
    return result


def mean_over_processes(numbers):
    """ a list of floats, one list in each process -> the list of their means, the same in all """
    return [total / world_size() for total in reduced(numbers, "SUM")]


def most_over_processes(numbers):
    """ a list of floats, one list in each process -> the list of the largest, the same in all """
    return reduced(numbers, "MAX")


def reduced(numbers, operation):
    """ a list of floats, one list in each process -> one list for all; operation: "SUM" or "MAX" """
    if not several():
        return numbers
    tensor = torch.tensor(numbers, dtype=torch.float64)
    torch.distributed.all_reduce(tensor, getattr(torch.distributed.ReduceOp, operation))
    return tensor.tolist()
