"""The folders of checkpoints: `<root>/<model>/<version>/`.

Invariants:

- A checkpoint appears and disappears by one rename: readers never see a half of one.
- A damaged folder is renamed aside and kept, as evidence; nothing here deletes it.
"""

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from agentjet.durable.manifest import MANIFEST, versions_in
from agentjet.errors import CheckpointError
from agentjet.schemas.ids import Version, is_token


@dataclass(frozen=True, slots=True)
class Entry:
    """A checkpoint's place; nothing is said yet about its contents."""

    model: str
    version: Version
    path: Path


class CheckpointStore:
    """The checkpoints below one folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def models(self) -> list[str]:
        """Models with a folder, sorted."""
        if not self.root.is_dir():
            return []
        return sorted(path.name for path in self.root.iterdir() if path.is_dir() and is_token(path.name))

    def entries(self, model: str) -> list[Entry]:
        """Complete checkpoints of a model, oldest first; damaged ones were moved aside and are left out."""
        return [Entry(model, version, path) for version, path in versions_in(self.root / model).items()]

    def find(self, name: str) -> Path:
        """The folder that is meant by a path, by `model/version`, or by `model` (its newest).

        Raises CheckpointError, which lists what there is.
        """
        for path in (Path(name).expanduser(), self.root / name):
            if (path / MANIFEST).is_file():
                return path
        entries = self.entries(name) if is_token(name) else []
        if entries:
            return entries[-1].path
        known = [f"{entry.model}/{entry.version}" for model in self.models() for entry in self.entries(model)]
        if not known:
            raise CheckpointError(f"{self.root} holds no checkpoints; say with --config or --dir which run is meant")
        raise CheckpointError(f"there is no checkpoint {name!r} in {self.root}; there are {', '.join(known)}")

    def remove(self, path: Path) -> None:
        """Delete a checkpoint; a crash in between leaves a `.pruned` folder that the next removal takes along."""
        path.rename(path.with_name(f".{path.name}.pruned"))
        self.sweep(path.parent.name)

    def sweep(self, model: str) -> None:
        """Delete what a removal that was interrupted left behind."""
        for leftover in (self.root / model).glob(".*.pruned"):
            shutil.rmtree(leftover)


def surplus(entries: Iterable[Entry], *, keep: int, valid: Iterable[Version], base: str) -> list[Entry]:
    """Checkpoints to prune, oldest first.

    Args:
        entries: Of one model.
        keep: How many of the newest valid ones stay; at least one always does.
        valid: Versions that LEDGER has not voided. Voided ones can not be resumed from and do not count as kept.
        base: Version that the newest learner started from, which stays; empty for none.
    """
    known = set(valid)
    ordered = sorted(entries, key=lambda entry: entry.version)
    kept = [entry for entry in ordered if entry.version in known][-max(keep, 1) :]
    return [entry for entry in ordered if entry not in kept and str(entry.version) != base]
