"""Weights as bytes: their digest, and the file that engines load.

Invariants: tied weights appear once, under the first of their names; a file appears whole or not at all, and its bytes
are on disk before its name is.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

HASH_THREADS = 2


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A weights file that was written."""

    dtype: str
    num_bytes: int
    sha256: str


def weights_digest(model: nn.Module) -> str:
    """sha256 over name, shape and bytes of every trainable weight."""
    named = [(name, weight.detach().cpu()) for name, weight in model.named_parameters() if weight.requires_grad]
    with ThreadPoolExecutor(HASH_THREADS) as threads:
        parts = threads.map(_tensor_digest, *zip(*named, strict=True))
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def write_snapshot(model: nn.Module, path: Path, dtype: torch.dtype) -> Snapshot:
    """Writes the weights in an engine's type, names as in the model's state dict. OSError when the disk refuses."""
    weights = {name: weight.detach().to("cpu", dtype).contiguous() for name, weight in model.named_parameters()}
    name = str(dtype).removeprefix("torch.")
    with replacing(path) as partial:
        save_file(weights, partial, metadata={"format": "pt"})
        num_bytes, sha256 = file_digest(partial)
    return Snapshot(name, num_bytes, sha256)


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


def _tensor_digest(name: str, weight: Tensor) -> str:
    # A view as bytes: NumPy knows no bfloat16.
    data = weight.contiguous().reshape(-1).view(torch.uint8).numpy().data
    return f"{name} {tuple(weight.shape)} {hashlib.sha256(data).hexdigest()}"
