"""What a checkpoint is, and the digest of every file in it.

`manifest.json` lists the files; a learner writes it last and renames the whole folder into place, so a folder without
one is not a checkpoint yet. What the learner says of itself stands in `state.json`, one of those files, under `extra`.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from agentjet.errors import CheckpointError
from agentjet.schemas.checkpoint import FileDigest
from agentjet.schemas.ids import Version

MANIFEST = "manifest.json"
STATE = "state.json"


class Manifest(BaseModel):
    """A checkpoint's name and files. Fields that only the learner reads are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    run: str = ""
    model: str = ""
    version: str
    step: int
    incarnation: int
    cursor: int = 0
    """SAMPLES sequence below which everything is settled in it."""
    ledger_sequence: int = 0
    """The LEDGER record of its step."""
    files: tuple[FileDigest, ...]

    @property
    def num_bytes(self) -> int:
        """Of all files."""
        return sum(file.num_bytes for file in self.files)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint's folder.

    Raises CheckpointError when it is absent, broken, or names another version than that of its step.
    """
    path = folder / MANIFEST
    fields = _object(path)
    state = _object(folder / STATE).get("extra")
    try:
        manifest = Manifest.model_validate((state if isinstance(state, dict) else {}) | fields, strict=False)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(f"{path} is damaged: {where}: {first['msg']}; use an older checkpoint") from None
    if manifest.version != str(Version(manifest.incarnation, manifest.step)):
        raise CheckpointError(f"{path} is damaged: version {manifest.version} is not that of its step")
    return manifest


def _object(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} is no whole checkpoint: it has no {path.name}") from None
    except OSError as error:
        raise CheckpointError(f"{path} can not be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}; use an older checkpoint") from None
    if not isinstance(fields, dict):
        raise CheckpointError(f"{path} is damaged: it holds no object; use an older checkpoint")
    return fields


def verify(folder: Path) -> Manifest:
    """Read every byte of a checkpoint and compare sizes and digests.

    Raises CheckpointError that names the first file which is absent, cut or changed.
    """
    manifest = read_manifest(folder)
    for file in manifest.files:
        path = folder / file.name
        if path.parent != folder:
            raise CheckpointError(f"{folder / MANIFEST} is damaged: {file.name} lies outside; use an older checkpoint")
        try:
            num_bytes = path.stat().st_size
            if num_bytes != file.num_bytes:
                raise CheckpointError(
                    f"{path} is damaged: {num_bytes} bytes instead of {file.num_bytes}; use an older checkpoint"
                )
            with path.open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing; use an older checkpoint") from None
        except CheckpointError:
            raise
        except OSError as error:
            raise CheckpointError(f"{path} can not be read: {error.strerror}") from error
        if digest != file.sha256:
            raise CheckpointError(f"{path} is damaged: its sha256 differs from the manifest's; use an older checkpoint")
    return manifest
