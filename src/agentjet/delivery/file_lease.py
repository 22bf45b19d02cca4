"""Leases on files: a file that a process reads is removed by no other process.

A lease is a shared lock on the file itself, so it ends with its process, however that ends. It stays when the file is
renamed. It does not know what the files hold.
"""

import fcntl
import os
from pathlib import Path


class FileLease:
    """Held until `release`, or until the process ends. Made by `take_lease`."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def release(self) -> None:
        """The file may go as far as this process is concerned."""
        os.close(self._handle)


def take_lease(path: Path) -> FileLease | None:
    """None when there is no such file, or it is being removed. OSError as the disk does."""
    handle = _lock(path, fcntl.LOCK_SH)
    return None if handle is None else FileLease(handle)


def remove_unless_leased(path: Path) -> None:
    """Remove a file that nobody has a lease on, the caller included. OSError as the disk does."""
    handle = _lock(path, fcntl.LOCK_EX)
    if handle is not None:
        path.unlink(missing_ok=True)
        os.close(handle)


def _lock(path: Path, kind: int) -> int | None:
    try:
        # For writing: a network file system gives an exclusive lock to nobody else.
        handle = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    if not is_still(path, handle):
        os.close(handle)
        return None
    return handle


def is_still(path: Path, handle: int) -> bool:
    """Whether a path names the file that was opened."""
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False
