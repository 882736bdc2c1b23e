"""
Files that are written completely or not at all, and folders that take one run at a time.
"""
import errno
import os
import time
from contextlib import contextmanager, suppress

from data.errors import UserError


def write_whole(path, write):
    """ write(file) into a file, so that the old or the new one is always there; OSError after some tries """
    part = path.with_name(f"{path.name}.part")
    for pause in (0.1, 0.4, 1.0, None):  # seconds: another program may hold the file for a moment
        try:
            path.parent.mkdir(parents=True, exist_ok=True)  # it may have been removed in the meantime
            with open(part, "wb") as file:
                write(file)
                file.flush()
                sync(file)
            os.replace(part, path)
            return
        except (OSError, RuntimeError) as error:
            cause = os_error_behind(error)
            if pause is None or is_full(cause):
                raise cause from None
        finally:  # also after a second Ctrl+C
            with suppress(OSError):
                part.unlink(missing_ok=True)
        time.sleep(pause)


def os_error_behind(error):
    """ the OSError behind a failed write, which torch.save hides; any other error is raised again """
    if isinstance(error, OSError):
        return error
    if isinstance(error.__context__, OSError):
        return error.__context__
    raise error


def sync(file):
    """ wait until the disk has it, where the file system can tell """
    try:
        os.fsync(file.fileno())
    except OSError as error:
        if error.errno != errno.EINVAL:  # the answer of file systems that cannot
            raise


def is_full(error):
    """ whether an OSError says that the disk, or one's share of it, is full """
    return error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))


@contextmanager
def locked(folder):
    """ the folder of a run, made and locked; UserError when another run holds it; removed if left empty """
    lock = folder / ".lock"
    made = [path for path in [lock, folder, *folder.parents] if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(lock, "a")
    except OSError as error:
        raise UserError(f"cannot write to --out {folder}: {error.strerror}; name another folder") from None
    with file:
        lock_file(file, folder)
        try:
            yield
        finally:
            if lock in made:
                remove_if_empty(folder, made)


def lock_file(file, folder):
    """ UserError if another process has locked it; where there are no locks, the run goes ahead """
    try:
        import fcntl  # not on Windows
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:
        pass
    except OSError as error:  # the other numbers are those of a file system without locks
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES, errno.EAGAIN):
            raise UserError(f"another run is writing to {folder}; wait, or name another --out") from None


def remove_if_empty(folder, made):
    """ a run that wrote nothing leaves nothing of what it made: its lock, its folder, the folders above """
    lock, *folders = made
    with suppress(OSError):
        if os.listdir(folder) == [lock.name]:
            lock.unlink()
            for empty in folders:
                empty.rmdir()


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
        bring_back(aside, folder)
        raise UserError(f"cannot move the earlier run in {folder} aside: {error.strerror}; close the program "
                        "that uses its files, or name another --out") from None
    return aside


def bring_back(aside, folder):
    """ undo move_aside, as far as that is possible """
    with suppress(OSError):
        for name in os.listdir(aside):
            os.replace(aside / name, folder / name)
        aside.rmdir()


def remove_files(folder, names):
    """ what was written of a run that then failed, as far as that is possible """
    with suppress(OSError):
        for name in names:
            (folder / name).unlink(missing_ok=True)
