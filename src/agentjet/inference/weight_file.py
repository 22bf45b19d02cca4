"""Reads full snapshots of a model's weights from safetensors files.

A snapshot is checked as a whole (names, shapes, dtypes) from the files' headers before a single tensor is put in use.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from agentjet.errors import EngineError

_DTYPES = {"BF16", "F16", "F32", "F64"}
_ADAPTER = ".lora_A."


@dataclass(frozen=True, slots=True)
class Layout:
    """The tensors that a snapshot of a model has."""

    shapes: Mapping[str, tuple[int, ...]]
    aliases: Mapping[str, str]
    """Further names of tied tensors, and the name in `shapes` that each stands for."""

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        """The layout of a Transformers model, whose tensors may lie on the meta device."""
        first: dict[int, str] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        aliases: dict[str, str] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            original = first.setdefault(id(tensor), name)
            if original == name:
                shapes[name] = tuple(tensor.shape)
            else:
                aliases[name] = original
        return cls(shapes, aliases)


class Snapshot:
    """An open snapshot: a safetensors file, or a folder of them. Use as a context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files: tuple[Path, ...] = ()
        """What it consists of."""
        self._stack = ExitStack()
        self._opened: dict[str, Any] = {}

    def __enter__(self) -> "Snapshot":
        self.files = tuple(sorted(self.path.glob("*.safetensors"))) if self.path.is_dir() else (self.path,)
        if not self.files:
            raise EngineError(f"{self.path} holds no *.safetensors file")
        try:
            for file in self.files:
                opened = self._stack.enter_context(safe_open(file, framework="pt"))
                self._opened |= dict.fromkeys(opened.keys(), opened)
        except (OSError, SafetensorError) as error:
            self._stack.close()
            raise EngineError(f"weights {self.path} can not be read: {error}; publish them again") from error
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._opened

    def check(self, layout: "Layout") -> None:
        """Raises EngineError unless the snapshot has all tensors of a layout, and no others.

        Second names of tied tensors may be missing; where they are there, they have to be equal to the first.
        """
        missing = sorted(set(layout.shapes) - set(self._opened))
        unknown = sorted(set(self._opened) - set(layout.shapes) - set(layout.aliases))
        if any(_ADAPTER in name for name in unknown) and not any(_ADAPTER in name for name in layout.shapes):
            raise EngineError(
                f"{self.path} is a LoRA adapter, but this engine serves whole weights; engine and learner need the "
                "same `lora` settings of the model"
            )
        if missing or unknown:
            raise EngineError(
                f"weights {self.path} are of another model: {len(missing)} tensors missing {missing[:3]}, "
                f"{len(unknown)} unknown {unknown[:3]}"
            )
        for name, file in self._opened.items():
            entry = file.get_slice(name)
            expected = list(layout.shapes[layout.aliases.get(name, name)])
            if entry.get_shape() != expected or entry.get_dtype() not in _DTYPES:
                raise EngineError(
                    f"weights {self.path}: {name} is {entry.get_dtype()} {entry.get_shape()}, "
                    f"the model has floating {expected}"
                )
        for alias, name in layout.aliases.items():
            if alias in self and not torch.equal(self.read(alias), self.read(name)):
                raise EngineError(f"weights {self.path}: {alias} differs from {name}, but the model ties them")

    def read(self, name: str) -> Tensor:
        """One tensor, as stored."""
        try:
            return self._opened[name].get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise EngineError(f"weights {self.path}: {name} can not be read: {error}; publish them again") from error

    def tensors(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """The named tensors."""
        for name in names:
            yield name, self.read(name)
