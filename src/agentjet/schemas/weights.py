"""WEIGHTS: a version that engines may load."""

from typing import Annotated

from pydantic import Field

from agentjet.schemas.ids import RunId
from agentjet.schemas.record import Record


class Weights(Record):
    """A version of a model's weights; immutable. Engines ignore versions that LEDGER lacks or has voided.

    It is to be had as a file (`path`), as the same file on the bus (`is_blob`), as a patch of another version, or for a
    short while by a broadcast.
    """

    schema_name = "weights"
    schema_version = (1, 2)

    run: RunId
    model: str
    version: str
    ledger_sequence: int
    """The LEDGER record (step or start) that made it."""
    dtype: str
    num_bytes: Annotated[int, Field(ge=0)]
    sha256: str
    """Of the safetensors file."""
    path: str = ""
    """A file on a path shared with the engines; empty when it rides as a blob."""
    host: str = ""
    """Where `path` is local; another host needs the blob or a shared folder."""
    is_blob: bool = False
    """Whether the whole file is on the bus."""
    base: str = ""
    """The version that the patch brings forward; empty: there is none."""
    patch_sha256: str = ""
    """Of the patch, on the bus."""
    patch_bytes: Annotated[int, Field(ge=0)] = 0
    broadcast: str = ""
    """`HOST:PORT` where the file is sent once to all hosts that come in time; empty: it is not. One that comes late, or
    in vain, finds it on the bus."""
