"""A folder that belongs to one process, beside those of others; what a killed process left there is removed.

A process holds a lock on the file `.lock` in its folder for as long as it lives, however it ends. It does not know what
lies in the folder.
"""

import fcntl
import os
import shutil
from itertools import count
from pathlib import Path

from agentjet.delivery.file_lease import is_still

_LOCK = ".lock"


class OwnFolder:
    """Claims a folder, or one named after it where another holds that; removes its siblings that nobody holds."""

    def __init__(self, wanted: Path) -> None:
        """OSError when no folder can be made."""
        names = (wanted if number == 0 else wanted.with_name(f"{wanted.name}-{number}") for number in count())
        self.path, self._handle = next(claim for name in names if (claim := _claim(name)) is not None)
        for leftover in self.path.iterdir():
            if leftover.name != _LOCK:
                leftover.unlink()
        remove_left(self.path.parent)

    def release(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._handle)


def remove_left(parent: Path) -> None:
    """Remove the folders of processes that have ended."""
    for lock in parent.glob(f"*/{_LOCK}"):
        _remove_if_left(lock)


def _claim(path: Path) -> tuple[Path, int] | None:
    """The folder with a handle that locks it; None while another process holds it."""
    while True:
        path.mkdir(parents=True, exist_ok=True)
        try:
            handle = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return None
        # A process that cleared up may have removed the folder before the lock was ours.
        if is_still(path / _LOCK, handle):
            return path, handle
        os.close(handle)


def _remove_if_left(lock: Path) -> None:
    try:
        handle = os.open(lock, os.O_RDWR)
    except OSError:
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(lock.parent, ignore_errors=True)
    except BlockingIOError:
        return
    finally:
        os.close(handle)
