"""Safetensors files of made-up numbers, as buffers, and versions of them."""

import hashlib
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save

DTYPES = {"bfloat16": np.uint16, "float16": np.uint16, "float32": np.uint32, "int64": np.uint64}


def weights_file(tensors: Mapping[str, tuple[str, NDArray]]) -> NDArray[np.uint8]:
    """A file of tensors, each a type and its bits."""
    entries = {
        name: torch.from_numpy(bits.astype(DTYPES[dtype])).view(getattr(torch, dtype))
        for name, (dtype, bits) in tensors.items()
    }
    return np.frombuffer(bytearray(save(entries, {"format": "pt"})), np.uint8)


def bfloat16(numbers: NDArray) -> NDArray[np.uint16]:
    """Bits of numbers, rounded to nearest."""
    bits = numbers.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def trained(master: NDArray, learning_rate: float, rng: np.random.Generator) -> NDArray:
    """Numbers after an update as Adam makes them: of the size of the learning rate, whatever the gradient's."""
    return master + learning_rate * np.clip(rng.standard_normal(master.shape) * 0.4, -1, 1)


def sha256(file: NDArray[np.uint8]) -> str:
    return hashlib.sha256(file.tobytes()).hexdigest()
