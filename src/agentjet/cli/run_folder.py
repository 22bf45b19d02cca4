"""The folders of runs below a folder, so that a command finds the run that was played last.

A folder counts as a run's when `run.json` lies in it. How new it is says what its actors logged, for reading a run
touches neither.
"""

from dataclasses import dataclass
from pathlib import Path

from agentjet.bus.server import is_in_use
from agentjet.config.place import RunPlace
from agentjet.errors import UserError
from agentjet.schemas.ids import RunId


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A run's folder."""

    path: Path
    run: RunId
    is_up: bool
    """Its server is running."""
    last_time: float
    """Of the newest log, or of its beginning; seconds since the epoch."""

    def __str__(self) -> str:
        return f"run {self.run} in {self.path}" + (", which is up" if self.is_up else "")


def run_folders(parent: Path) -> list[RunFolder]:
    """The runs below a folder, newest first; those whose files can not be read are left out."""
    found = [_folder(file.parent) for file in parent.glob("*/run.json")]
    return sorted((one for one in found if one is not None), key=lambda one: (-one.last_time, one.path))


def _folder(path: Path) -> RunFolder | None:
    place = RunPlace(path)
    try:
        run, server = place.run_id(), place.server()
    except UserError:
        return None
    is_up = server is not None and server.is_alive and (not place.nats.is_dir() or is_in_use(place.nats))
    times = [file.stat().st_mtime for file in (path / "run.json", *place.logs.glob("*.log"))]
    return None if run is None else RunFolder(path, run, is_up, max(times))
