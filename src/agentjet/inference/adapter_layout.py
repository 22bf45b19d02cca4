"""The tensors that a LoRA adapter of a model has, and the reading of a file that has to hold just these.

Invariant: a file is checked as a whole (kind, rank, names, shapes) before a tensor of it is put in use. It does not
know what an engine does with them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from torch import Tensor, nn

from agentjet.config import LoraSettings
from agentjet.errors import ConfigError, EngineError
from agentjet.inference.weight_file import Layout, Snapshot
from agentjet.pretrained.adapter_file import PREFIX, read_config

_REFUSED = ("use_rslora", "use_dora", "lora_bias", "modules_to_save", "rank_pattern", "alpha_pattern", "bias")
"""Entries of peft's configuration that would change what is computed."""
_ABSENT = (None, False, "none", {}, [])


@dataclass(frozen=True, slots=True)
class Factors:
    """What one layer gets: `scaling * up @ down` is added to its weight."""

    down: Tensor
    """peft's A [rank, inputs]."""
    up: Tensor
    """peft's B [outputs, rank]."""


@dataclass(frozen=True, slots=True)
class AdapterLayout:
    """The layers of a model that its settings adapt."""

    rank: int
    alpha: float
    layers: Mapping[str, tuple[int, int]]
    """By a layer's name in the model, its outputs and inputs."""

    @classmethod
    def of(cls, model: Any, lora: LoraSettings) -> Self:
        """The layout for a Transformers model, whose tensors may lie on the meta device.

        Raises ConfigError for a target that names no linear layer below the output head.
        """
        head = model.get_output_embeddings()
        layers: dict[str, tuple[int, int]] = {}
        for target in lora.target_modules:
            found = {
                name: (layer.out_features, layer.in_features)
                for name, layer in model.named_modules()
                if isinstance(layer, nn.Linear) and layer is not head and f".{name}".endswith(f".{target}")
            }
            if not found:
                raise ConfigError(
                    f"lora.target_modules: {target!r} is the end of no linear layer's name below the output head of "
                    f"{model.config.model_type}; leave it out, or take q_proj, v_proj, ..."
                )
            layers |= found
        return cls(lora.rank, lora.alpha, layers)

    @property
    def scaling(self) -> float:
        """Factor of the low-rank product."""
        return self.alpha / self.rank

    def check(self, path: Path) -> None:
        """Raises EngineError unless a file holds an adapter for these layers, and nothing else."""
        self._check_config(path)
        with Snapshot(path) as snapshot:
            snapshot.check(self._tensors())

    def read(self, path: Path) -> dict[str, Factors]:
        """The factors of each layer, as stored. Raises as `check`."""
        self._check_config(path)
        with Snapshot(path) as snapshot:
            snapshot.check(self._tensors())
            return {layer: Factors(snapshot.read(_down(layer)), snapshot.read(_up(layer))) for layer in self.layers}

    def _check_config(self, path: Path) -> None:
        config = read_config(path)
        strange = [name for name in _REFUSED if config.get(name) not in _ABSENT]
        if strange:
            raise EngineError(f"adapter {path} is of a kind that is not served: {', '.join(strange)}")
        has, wanted = (config.get("r"), config.get("lora_alpha")), (self.rank, self.alpha)
        if has != wanted:
            raise EngineError(
                f"adapter {path} has rank {has[0]} and alpha {has[1]}, the model's settings say rank {wanted[0]} and "
                f"alpha {wanted[1]:g}; engine and learner need the same `lora` settings"
            )

    def _tensors(self) -> Layout:
        shapes: dict[str, tuple[int, ...]] = {}
        for layer, (outputs, inputs) in self.layers.items():
            shapes[_down(layer)], shapes[_up(layer)] = (self.rank, inputs), (outputs, self.rank)
        return Layout(shapes, {})


def _down(layer: str) -> str:
    return f"{PREFIX}{layer}.lora_A.weight"


def _up(layer: str) -> str:
    return f"{PREFIX}{layer}.lora_B.weight"
