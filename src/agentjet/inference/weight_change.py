"""What differs between two files of weights, tensor by tensor.

Invariants: exact in the bits; files are read, not mapped, so one that is gone from a network folder is an error and not
the end of the process. It does not know what the changes are for.
"""

import json
import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

_TYPES = {"BF16": (torch.bfloat16, np.int16), "F16": (torch.float16, np.int16), "F32": (torch.float32, np.int32)}
_CHUNK_BYTES = 32 * 1024**2
_LARGEST_RATIO = 0.25
"""Of the values; where more change, all of them are loaded as fast."""
_PLACES, _VALUES, _SHAPES = "places", "values", "shapes"
_MOST_THREADS = 8


@dataclass(frozen=True, slots=True)
class TensorChange:
    """New values of a tensor."""

    name: str
    shape: tuple[int, ...]
    places: Tensor
    """[changes] in the flattened tensor."""
    values: Tensor
    """[changes]"""


class WeightsFile:
    """A safetensors file that stays readable for as long as this is open, whatever becomes of its name."""

    def __init__(self, path: Path) -> None:
        """OSError when it can not be read, ValueError when it is none."""
        self._handle = os.open(path, os.O_RDONLY)
        try:
            length = int.from_bytes(os.pread(self._handle, 8, 0), "little")
            self.header = os.pread(self._handle, length, 8)
            self.tensors: dict[str, Any] = json.loads(self.header)
            self.tensors.pop("__metadata__", None)
            self._start = 8 + length
        except ValueError:
            self.close()
            raise

    def read(self, start: int, stop: int) -> bytes:
        """Bytes of the tensors' part. OSError as the disk does."""
        data = os.pread(self._handle, stop - start, self._start + start)
        if len(data) != stop - start:
            raise OSError("the file of weights is cut")
        return data

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._handle)


def find_changes(old: WeightsFile, new: WeightsFile) -> list[TensorChange] | None:
    """The values that differ; None when that is no small part, or can not be told in these types.

    OSError as the disk does.
    """
    if old.header != new.header or any(entry["dtype"] not in _TYPES for entry in new.tensors.values()):
        return None
    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as threads:
        found = list(threads.map(lambda name: _tensor_change(name, old, new), new.tensors))
    num_values = sum(math.prod(entry["shape"]) for entry in new.tensors.values())
    if sum(len(one.places) for one in found) > _LARGEST_RATIO * num_values:
        return None
    # "Not a number" is how vLLM's loader marks what stays.
    return None if any(one.values.isnan().any() for one in found) else [one for one in found if len(one.places)]


def _tensor_change(name: str, old: WeightsFile, new: WeightsFile) -> TensorChange:
    entry = new.tensors[name]
    dtype, bits = _TYPES[entry["dtype"]]
    size, (first, last) = np.dtype(bits).itemsize, entry["data_offsets"]
    places, values = [np.empty(0, np.int64)], [np.empty(0, bits)]
    for start in range(first, last, _CHUNK_BYTES):
        stop = min(start + _CHUNK_BYTES, last)
        before, after = (np.frombuffer(file.read(start, stop), bits) for file in (old, new))
        changed = np.flatnonzero(before != after)
        places.append(changed + (start - first) // size)
        values.append(after[changed])
    joined = torch.from_numpy(np.concatenate(values)).view(dtype)
    return TensorChange(name, tuple(entry["shape"]), torch.from_numpy(np.concatenate(places)), joined)


def pack_changes(changes: list[TensorChange]) -> bytes:
    """As one safetensors file."""
    tensors = {f"{one.name}:{_PLACES}": one.places for one in changes}
    tensors |= {f"{one.name}:{_VALUES}": one.values for one in changes}
    return save(tensors, metadata={_SHAPES: json.dumps({one.name: one.shape for one in changes})})


def read_changes(path: Path) -> Iterator[TensorChange]:
    """The changes again; SafetensorError or OSError when they can not be read."""
    with safe_open(path, framework="pt") as file:
        for name, shape in json.loads(file.metadata()[_SHAPES]).items():
            yield TensorChange(
                name, tuple(shape), file.get_tensor(f"{name}:{_PLACES}"), file.get_tensor(f"{name}:{_VALUES}")
            )
