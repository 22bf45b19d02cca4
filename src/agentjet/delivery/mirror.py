"""Whole files of weights that the engines of a host share, and how patches bring them forward.

They lie in `arrived-HOST-USER/`: `SHA256.safetensors` for each file, `.turn` (see `turn`), and `at-work-PID/` while a
process brings one.

Invariants:

- A file has its name only when it is whole, on disk, and its sha256 is the one in its name. A process that dies on the
  way leaves what was there, and a folder that others remove (`OwnFolder`).
- A file that a process has taken stays until that process takes another or ends (`FileLease`). What nobody holds goes
  with the next one that is taken.
- A patch is only applied to the file that it was made from, by sha256.

It does not know where files and patches come from, nor what versions are.
"""

import os
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from pathlib import Path

import numpy as np

from agentjet.delivery.file_lease import FileLease, remove_unless_leased, take_lease
from agentjet.delivery.own_folder import OwnFolder, remove_left
from agentjet.delivery.patch import apply_patch, read_head
from agentjet.delivery.turn import turn
from agentjet.durable.file import file_digest, sync
from agentjet.errors import PatchError

_PREFIX = "arrived-"
_SUFFIX = ".safetensors"
_TURN = ".turn"
_PATIENCE_SECONDS = 60.0
_SLOWEST_BYTES_PER_SECOND = 50e6
_FORGOTTEN_SECONDS = 24 * 3600.0
"""What was taken so long ago has been loaded."""


class Mirror:
    """A process's view of the files; it holds one at a time."""

    def __init__(self, folder: Path) -> None:
        """Nothing is made before a file is brought.

        Args:
            folder: Where the folder of this host and user belongs. Those of other hosts are left alone for as long as
                something happens there at least once a day.
        """
        self._folder = folder / f"{_PREFIX}{socket.gethostname()}-{os.getuid()}"
        self._lease: FileLease | None = None

    def place(self, sha256: str) -> Path:
        """Where a file belongs."""
        return self._folder / f"{sha256}{_SUFFIX}"

    def has(self, sha256: str) -> bool:
        """Whether it is there."""
        return self.place(sha256).exists()

    def take(self, sha256: str) -> Path | None:
        """Hold a file instead of the one before; None, and that one is held on, where it is not there.

        OSError as the disk does.
        """
        path = self.place(sha256)
        lease = take_lease(path)
        if lease is None:
            return None
        os.utime(path)
        self._hold(lease)
        return path

    def turn(self, sha256: str, num_bytes: int) -> AbstractAsyncContextManager[None]:
        """This process's turn to bring a file, unless another has brought it meanwhile."""
        return turn(
            self._folder / _TURN,
            patience_seconds=_PATIENCE_SECONDS + num_bytes / _SLOWEST_BYTES_PER_SECOND,
            is_done=lambda: self.has(sha256),
        )

    @contextmanager
    def work_file(self) -> Iterator[Path]:
        """A name to bring a file under; what has that name at the end is removed. OSError as the disk does."""
        own = OwnFolder(self._folder / f"at-work-{os.getpid()}")
        try:
            yield own.path / f"file{_SUFFIX}"
        finally:
            own.release()

    def adopt(self, work: Path, sha256: str) -> Path:
        """Give a file that has this sha256 its name, and hold it. OSError as the disk does."""
        sync([work])
        if (path := self.take(sha256)) is not None:
            return path
        path, lease = self.place(sha256), take_lease(work)
        assert lease is not None, "a work file is its process's own"
        work.replace(path)
        self._hold(lease)
        return path

    def discard(self, sha256: str) -> None:
        """A file is not what its name says."""
        self.place(sha256).unlink(missing_ok=True)

    def release(self) -> None:
        """Hold nothing. The folder goes with the last file."""
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()
        self._remove_unheld()
        with suppress(OSError):
            if not any(self._folder.glob(f"[!{_TURN[0]}]*")):
                (self._folder / _TURN).unlink(missing_ok=True)
            self._folder.rmdir()

    def _hold(self, lease: FileLease) -> None:
        before, self._lease = self._lease, lease
        if before is not None:
            before.release()
        self._remove_unheld()
        for folder in self._folder.parent.glob(f"{_PREFIX}*"):
            if folder != self._folder and time.time() - _newest_change(folder) > _FORGOTTEN_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)

    def _remove_unheld(self) -> None:
        for path in self._folder.glob(f"*{_SUFFIX}"):
            remove_unless_leased(path)
        remove_left(self._folder)


def advance(path: Path, base_sha256: str, sha256: str, patches: Sequence[bytes]) -> None:
    """Bring a file forward by patches in their order, where it lies.

    PatchError when they do not lead to `sha256` from it; it is then neither the base nor the new file.
    """
    _check_chain(base_sha256, sha256, patches)
    file = np.memmap(path, np.uint8, "r+")
    for patch in patches:
        apply_patch(patch, file)
    if file_digest(path)[1] != sha256:
        raise PatchError(f"patches did not lead to weights {sha256[:12]}; start from a whole file")


def _check_chain(base_sha256: str, sha256: str, patches: Sequence[bytes]) -> None:
    at = base_sha256
    for head in map(read_head, patches):
        if head.base_sha256 != at:
            raise PatchError(
                f"a patch on the way to weights {sha256[:12]} is of other weights; start from a whole file"
            )
        at = head.sha256
    if at != sha256:
        raise PatchError(f"the patches at hand do not lead to weights {sha256[:12]}; start from a whole file")


def _newest_change(folder: Path) -> float:
    with suppress(OSError):
        return max(path.stat().st_mtime for path in (folder, *folder.rglob("*")))
    return time.time()
