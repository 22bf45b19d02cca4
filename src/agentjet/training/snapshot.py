"""Weights as bytes: their digest, and the file that engines load.

Invariants: tied weights appear once, under the first of their names; a file appears whole or not at all, and its bytes
are on disk before its name is.
"""

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from agentjet.durable.file import file_digest, replacing
from agentjet.pretrained.adapter_file import write_adapter

HASH_THREADS = 2


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A weights file that was written."""

    dtype: str
    num_bytes: int
    sha256: str


def weights_digest(weights: Mapping[str, Tensor]) -> str:
    """sha256 over name, shape and bytes in float32 of every weight, in their order."""
    with ThreadPoolExecutor(HASH_THREADS) as threads:
        parts = threads.map(_tensor_digest, weights, weights.values())
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def write_snapshot(
    weights: Mapping[str, Tensor], path: Path, dtype: torch.dtype, adapter: Mapping[str, Any] | None = None
) -> Snapshot:
    """Writes weights in an engine's type, under their names. OSError when the disk refuses.

    Args:
        weights: A model's, or an adapter's.
        path: Where to.
        dtype: The engine's.
        adapter: Peft's configuration, where the weights are an adapter's.
    """
    name = str(dtype).removeprefix("torch.")
    with replacing(path) as partial:
        write_weights({key: weight.detach().to("cpu", dtype) for key, weight in weights.items()}, partial, adapter)
        num_bytes, sha256 = file_digest(partial)
    return Snapshot(name, num_bytes, sha256)


def write_weights(weights: Mapping[str, Tensor], path: Path, adapter: Mapping[str, Any] | None) -> None:
    """A safetensors file of weights as they are; the arguments are those of `write_snapshot`."""
    tensors = {name: weight.detach().cpu().contiguous() for name, weight in weights.items()}
    if adapter is None:
        save_file(tensors, path, metadata={"format": "pt"})
    else:
        write_adapter(path, tensors, adapter)


def _tensor_digest(name: str, weight: Tensor) -> str:
    data = weight.detach().to("cpu", torch.float32).reshape(-1).numpy().data
    return f"{name} {tuple(weight.shape)} {hashlib.sha256(data).hexdigest()}"
