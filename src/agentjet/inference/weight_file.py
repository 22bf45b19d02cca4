"""Reads full snapshots of a model's weights from safetensors files.

A snapshot is checked as a whole (names, shapes, dtypes) from the files' headers before a single tensor is read.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from agentjet.errors import EngineError

_DTYPES = {"BF16", "F16", "F32", "F64"}


class Snapshot:
    """An open snapshot: a safetensors file, or a folder of them. Use as a context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}

    def __enter__(self) -> "Snapshot":
        files = sorted(self.path.glob("*.safetensors")) if self.path.is_dir() else [self.path]
        if not files:
            raise EngineError(f"{self.path} holds no *.safetensors file")
        try:
            for file in files:
                opened = self._stack.enter_context(safe_open(file, framework="pt"))
                self._files |= dict.fromkeys(opened.keys(), opened)
        except (OSError, SafetensorError) as error:
            self._stack.close()
            raise EngineError(f"weights {self.path} can not be read: {error}; publish them again") from error
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def check(self, shapes: Mapping[str, Sequence[int]], optional: Mapping[str, Sequence[int]]) -> None:
        """Raises EngineError unless the snapshot has all `shapes` names, any `optional` ones, and no others."""
        missing = sorted(set(shapes) - set(self._files))
        unknown = sorted(set(self._files) - set(shapes) - set(optional))
        if missing or unknown:
            raise EngineError(
                f"weights {self.path} are of another model: {len(missing)} tensors missing {missing[:3]}, "
                f"{len(unknown)} unknown {unknown[:3]}"
            )
        for name, file in self._files.items():
            entry = file.get_slice(name)
            expected = list((shapes if name in shapes else optional)[name])
            if entry.get_shape() != expected or entry.get_dtype() not in _DTYPES:
                raise EngineError(
                    f"weights {self.path}: {name} is {entry.get_dtype()} {entry.get_shape()}, "
                    f"the model has floating {expected}"
                )

    def read(self, name: str) -> Tensor:
        """One tensor, as stored."""
        try:
            return self._files[name].get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise EngineError(f"weights {self.path}: {name} can not be read: {error}; publish them again") from error

    def tensors(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """The named tensors."""
        for name in names:
            yield name, self.read(name)
