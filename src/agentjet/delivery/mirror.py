"""The file of weights that an engine's process holds, and how patches bring it forward.

Invariants:

- A file has its name only when it is whole and its sha256 is the one that was announced; a process that dies on the way
  leaves the file before it, and nothing of its own (`OwnFolder`).
- A patch is only applied to the file that it was made from, by sha256.

It does not know where files and patches come from.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from agentjet.delivery.own_folder import OwnFolder
from agentjet.delivery.patch import apply_patch, read_head
from agentjet.durable.file import file_digest
from agentjet.errors import PatchError
from agentjet.schemas.ids import Version


class Mirror:
    """One whole file at a time, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._own: OwnFolder | None = None
        self.held: Version | None = None
        """The version of the file at hand."""
        self._sha256 = ""

    def place(self, version: Version) -> Path:
        """Where a version's file belongs. OSError when the folder can not be made."""
        if self._own is None:
            self._own = OwnFolder(self._folder)
        return self._own.path / f"{version}.safetensors"

    def hold(self, version: Version, sha256: str) -> Path:
        """The file that was put in a version's place is the one at hand; the one before it is removed."""
        if self.held is not None and self.held != version:
            self.place(self.held).unlink(missing_ok=True)
        self.held, self._sha256 = version, sha256
        return self.place(version)

    def advance(self, version: Version, sha256: str, patches: Sequence[bytes]) -> Path:
        """Bring the file at hand forward by patches in their order, to the version that has this sha256.

        PatchError when they do not lead there from it, OSError as the disk does; the file at hand stays as it was.
        """
        assert self.held is not None
        self._check_chain(version, sha256, patches)
        target = self.place(version)
        partial = target.with_name(f".{version}.partial")
        try:
            shutil.copyfile(self.place(self.held), partial)
            file = np.memmap(partial, np.uint8, "r+")
            for patch in patches:
                apply_patch(patch, file)
            file.flush()
            if file_digest(partial)[1] != sha256:
                raise PatchError(f"patches did not lead to the weights of {version}; start from a whole file")
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
        return self.hold(version, sha256)

    def _check_chain(self, version: Version, sha256: str, patches: Sequence[bytes]) -> None:
        at = self._sha256
        for head in map(read_head, patches):
            if head.base_sha256 != at:
                raise PatchError(f"a patch on the way to {version} is of other weights; start from a whole file")
            at = head.sha256
        if at != sha256:
            raise PatchError(f"the patches at hand do not lead to the weights of {version}; start from a whole file")

    def drop(self) -> None:
        """Forget the file at hand: it is not what it was taken for, or no longer needed."""
        if self.held is not None:
            self.place(self.held).unlink(missing_ok=True)
            self.held, self._sha256 = None, ""

    def close(self) -> None:
        """Remove everything."""
        if self._own is not None:
            self._own.release()
            self._own, self.held = None, None
