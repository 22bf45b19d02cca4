"""`manifest.json` of a checkpoint: what it is, and the digest of every file beside it.

A learner writes it last and renames the whole folder into place, so a folder without one is not a checkpoint yet.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from agentjet.errors import CheckpointError
from agentjet.schemas.checkpoint import FileDigest
from agentjet.schemas.ids import Version

MANIFEST = "manifest.json"


class Manifest(BaseModel):
    """What a learner says of a checkpoint. Fields that only the learner reads are ignored."""

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

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, fields: Any) -> Any:
        """What the learner handed in lies under `extra`."""
        if isinstance(fields, dict) and isinstance(fields.get("extra"), dict):
            return {**fields["extra"], **fields}
        return fields

    @property
    def num_bytes(self) -> int:
        """Of all files."""
        return sum(file.num_bytes for file in self.files)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint's folder.

    Raises CheckpointError when it is absent, broken, or names another version than the folder.
    """
    path = folder / MANIFEST
    try:
        manifest = Manifest.model_validate(json.loads(path.read_text("utf-8")), strict=False)
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is no checkpoint: it has no {MANIFEST}") from None
    except OSError as error:
        raise CheckpointError(f"{path} can not be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(f"{path} is damaged: {where}: {first['msg']}; use an older checkpoint") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}; use an older checkpoint") from None
    if manifest.version != str(Version(manifest.incarnation, manifest.step)):
        raise CheckpointError(f"{path} is damaged: version {manifest.version} is not that of its step")
    return manifest


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
