"""
Several processes that compute one run, as torchrun starts them. Alone, a process is number 0 of 1.
"""
import os
from contextlib import suppress
from datetime import timedelta

import torch

from data.errors import UserError


def launched():
    """ (rank, number of processes, rank on this machine), from torchrun; UserError for what it left over """
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK"]
    with suppress(KeyError, ValueError):
        number, processes, local_rank = (int(os.environ[name]) for name in names)
        started = torch.distributed.is_available() and torch.distributed.is_torchelastic_launched()
        if started and 0 <= number < processes and "MASTER_ADDR" in os.environ:
            return number, processes, local_rank
    if found := [name for name in names if name in os.environ]:
        raise UserError(f"the environment has {found[0]}={os.environ[found[0]]}, but torchrun did not start "
                        f"this process; unset {' and '.join(found)}, or start with torchrun")
    return 0, 1, 0


def join():
    """ meet the other processes: from here on they compute one run, and process 0 speaks and writes """
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    try:
        torch.distributed.init_process_group(backend, timeout=timedelta(minutes=10))
    except (torch.distributed.DistError, ValueError) as error:
        raise UserError(f"the other processes did not come: {str(error)[:100]}; start all again") from None


def leave(together=False):
    """ part from the other processes; together: when all of them are there """
    if several():
        if together:
            torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def several():
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def world_size():
    return torch.distributed.get_world_size() if several() else 1


def rank():
    return torch.distributed.get_rank() if several() else 0
