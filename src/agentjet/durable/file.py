"""Files whose bytes are on disk before their name is.

Invariant: whoever sees a name sees the whole file, also after a power loss.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


def file_digest(path: Path) -> tuple[int, str]:
    """Size and sha256 of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return file.tell(), digest


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name to write to; on success its bytes are synced and it takes the place of `path`, else it is removed."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        sync([partial])
        partial.replace(path)
        sync([path.parent])
    finally:
        partial.unlink(missing_ok=True)


def sync(paths: Iterable[Path]) -> None:
    """Wait until files or folders are on disk."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
