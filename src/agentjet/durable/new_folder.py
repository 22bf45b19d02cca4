"""Folders that appear whole: what fills one may be killed at any time, or fail."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentjet.errors import CheckpointError


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A draft to fill, which takes the name when the block ends well.

    Raises CheckpointError at once when the name is in use, and when it can not be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} is there already; choose a new folder")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
            draft = Path(scratch) / "model"
            draft.mkdir()
            yield draft
            draft.rename(folder)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{folder} can not be written: {error.strerror}; choose another folder") from error
