"""Weights as bytes: their digest, and the file that engines load.

Invariants: tied weights appear once, under the first of their names; a file appears whole or not at all, and its bytes
are on disk before its name is.
"""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from agentjet.durable.file import file_digest, replacing

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


def _tensor_digest(name: str, weight: Tensor) -> str:
    # A view as bytes: NumPy knows no bfloat16.
    data = weight.contiguous().reshape(-1).view(torch.uint8).numpy().data
    return f"{name} {tuple(weight.shape)} {hashlib.sha256(data).hexdigest()}"
