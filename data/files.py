"""
Files that are written completely or not at all, and folders that take one run at a time.
"""
import errno
import os
import time
from contextlib import contextmanager, suppress

from data.errors import UserError


def write_whole(path, content):
    """ bytes into a file, so that the old or the new one is always there; OSError after some tries """
    part = path.with_name(f"{path.name}.part")
    for pause in (0.1, 0.4, 1.0, None):  # seconds: another program may hold the file for a moment
        try:
            path.parent.mkdir(parents=True, exist_ok=True)  # it may have been removed in the meantime
            with open(part, "wb") as file:
                file.write(content)
                file.flush()
                try:
                    os.fsync(file.fileno())
                except OSError as error:
                    if error.errno != errno.EINVAL:  # so say file systems that cannot
                        raise
            os.replace(part, path)
            return
        except OSError as error:
            if pause is None or is_full(error):
                with suppress(OSError):
                    part.unlink()
                raise
        time.sleep(pause)


def is_full(error):
    """ whether an OSError says that the disk, or one's share of it, is full """
    return error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))


@contextmanager
def claimed(folder):
    """ the folder of a run, made and locked; UserError when another run holds it """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / ".lock", "w")
    except OSError as error:
        raise UserError(f"cannot write to --out {folder}: {error.strerror}; name another folder") from None
    with lock:
        try:
            import fcntl  # not on Windows
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:
            pass
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES, errno.EAGAIN):  # others say nothing
                raise UserError(f"another run is writing to {folder}; wait, or name another --out") from None
        yield


def move_aside(folder, names):
    """ move the files of an earlier run into a new folder, and return it; UserError: none was moved """
    earlier = [name for name in names if (folder / name).exists()]
    if not earlier:
        return None
    number = 1
    while (aside := folder / f"old-{number}").exists():
        number += 1
    try:
        aside.mkdir()
        for name in earlier:
            os.rename(folder / name, aside / name)
    except OSError as error:
        with suppress(OSError):
            for name in os.listdir(aside):
                os.rename(aside / name, folder / name)
            aside.rmdir()
        raise UserError(f"cannot move the earlier run in {folder} aside: {error.strerror}; close the program "
                        "that uses its files, or name another --out") from None
    return aside
