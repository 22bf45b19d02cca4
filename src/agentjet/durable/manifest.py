"""A checkpoint's folder: its files with their digests, and what it is.

`manifest.json` lists every other file with size and sha256; it is written last, and the whole folder is then renamed
into place, so a folder without one is no checkpoint yet. What the learner says of itself stands in `state.json`, one of
the listed files, under `extra`.

Learners write such folders and load them again, the checkpoint actor verifies and names them; both through this module
alone.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from agentjet.durable.file import file_digest
from agentjet.errors import CheckpointDamagedError, CheckpointError
from agentjet.schemas.checkpoint import FileDigest
from agentjet.schemas.ids import Version

MANIFEST = "manifest.json"
STATE = "state.json"


class FileList(BaseModel):
    """What `manifest.json` holds."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    files: tuple[FileDigest, ...]


class Manifest(FileList):
    """A checkpoint's name and files. Fields of the state that only the learner reads are ignored."""

    run: str = ""
    model: str = ""
    version: str
    step: int
    incarnation: int
    cursor: int = 0
    """SAMPLES sequence below which everything is settled in it."""
    ledger_sequence: int = 0
    """The LEDGER record of its step."""

    @property
    def num_bytes(self) -> int:
        """Of all files."""
        return sum(file.num_bytes for file in self.files)


L = TypeVar("L", bound=FileList)


def versions_in(folder: Path) -> dict[Version, Path]:
    """The whole checkpoints below a model's folder, oldest first; those set aside as damaged are not among them."""
    found: dict[Version, Path] = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        try:
            version = Version.parse(path.name)
        except ValueError:
            continue
        if (path / MANIFEST).is_file():
            found[version] = path
    return dict(sorted(found.items()))


def write_manifest(folder: Path) -> tuple[FileDigest, ...]:
    """List the files that lie in a folder; returns the list. OSError when the disk refuses."""
    paths = sorted(path for path in folder.iterdir() if path.name != MANIFEST)
    digests = [(path.name, *file_digest(path)) for path in paths]
    files = FileList(
        files=tuple(FileDigest(name=name, num_bytes=size, sha256=sha256) for name, size, sha256 in digests)
    )
    (folder / MANIFEST).write_text(files.model_dump_json(indent=1), "utf-8")
    return files.files


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint's folder.

    Raises CheckpointDamagedError when it is absent, broken, or names another version than that of its step.
    """
    fields, state = _object(folder / MANIFEST), _object(folder / STATE).get("extra")
    manifest = _parse(Manifest, folder, (state if isinstance(state, dict) else {}) | fields)
    if manifest.version != str(Version(manifest.incarnation, manifest.step)):
        raise CheckpointDamagedError(
            f"{folder / MANIFEST} is damaged: version {manifest.version} is not that of its step"
        )
    return manifest


def verify(folder: Path) -> Manifest:
    """Read every byte of a checkpoint and compare sizes and digests.

    Raises CheckpointDamagedError that names the first file which is absent, cut or changed, and CheckpointError where
    the disk can not be read.
    """
    manifest = read_manifest(folder)
    _compare(folder, manifest.files)
    return manifest


def verify_files(folder: Path) -> tuple[FileDigest, ...]:
    """As `verify`, whatever the state says of itself."""
    files = _parse(FileList, folder, _object(folder / MANIFEST)).files
    _compare(folder, files)
    return files


def set_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint to `<version>.damaged-<n>`, out of everybody's way; it is kept, as evidence."""
    number = 1
    while (aside := folder.with_name(f"{folder.name}.damaged-{number}")).exists():
        number += 1
    return folder.rename(aside)


def _parse(cls: type[L], folder: Path, fields: dict[str, Any]) -> L:
    try:
        return cls.model_validate(fields, strict=False)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise CheckpointDamagedError(
            f"{folder / MANIFEST} is damaged: {where}: {first['msg']}; use an older checkpoint"
        ) from None


def _object(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise CheckpointDamagedError(f"{path.parent} is no whole checkpoint: it has no {path.name}") from None
    except OSError as error:
        raise CheckpointError(f"{path} can not be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointDamagedError(f"{path} is damaged: {error}; use an older checkpoint") from None
    if not isinstance(fields, dict):
        raise CheckpointDamagedError(f"{path} is damaged: it holds no object; use an older checkpoint")
    return fields


def _compare(folder: Path, files: Sequence[FileDigest]) -> None:
    for file in files:
        path = folder / file.name
        if path.parent != folder:
            raise CheckpointDamagedError(
                f"{folder / MANIFEST} is damaged: {file.name} lies outside; use an older checkpoint"
            )
        try:
            # The size first: a cut file of many gigabytes is told of without reading it.
            num_bytes = path.stat().st_size
            digest = file_digest(path)[1] if num_bytes == file.num_bytes else ""
        except FileNotFoundError:
            raise CheckpointDamagedError(f"{path} is missing; use an older checkpoint") from None
        except OSError as error:
            raise CheckpointError(f"{path} can not be read: {error.strerror}") from error
        if num_bytes != file.num_bytes:
            raise CheckpointDamagedError(
                f"{path} is damaged: {num_bytes} bytes instead of {file.num_bytes}; use an older checkpoint"
            )
        if digest != file.sha256:
            raise CheckpointDamagedError(
                f"{path} is damaged: its sha256 differs from the manifest's; use an older checkpoint"
            )
