"""CHECKPOINTS: a verified checkpoint."""

from typing import Annotated

from agentjet.schemas.field import AsTuple
from agentjet.schemas.ids import RunId
from agentjet.schemas.record import Part, Record


class FileDigest(Part):
    """One file of a checkpoint."""

    name: str
    num_bytes: int
    sha256: str


class Checkpoint(Record):
    """Written by the checkpoint actor after it has read every byte."""

    schema_name = "checkpoint"

    run: RunId
    model: str
    version: str
    ledger_sequence: int
    cursor: int
    """SAMPLES sequence below which everything is settled in it."""
    path: str
    files: Annotated[tuple[FileDigest, ...], AsTuple]
