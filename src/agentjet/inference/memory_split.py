"""How one GPU is shared out between a learner and the engine of its model.

The learner's need is an estimate from above: what it holds all the time, and what its settings allow it for a pack.

| of each | bytes |
|---|---|
| trained parameter: float32 weights, gradients, two Adam moments | 16 |
| trained parameter, while it computes: its copy in bfloat16 | 2 |
| parameter of a frozen layer's matrix, in the type that the learner multiplies in | 2 or 4 |
| other frozen parameter (embedding, output head, norms) | 4 |

and `learner.activation_gib`, and a reserve for the output head of a pack and the two processes' CUDA contexts. Frozen
are a reference, unless it lies on the CPU, and the base under a LoRA adapter, which is its own reference.

vLLM takes the rest: for its weights and adapters, for a step, and all else for keys and values. That last figure is
given to it. What it would measure by itself is how the whole GPU's free memory changes while it starts, which a learner
that starts at the same time falsifies. Nothing here is measured on a GPU.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from agentjet.config import EngineSettings, LoraSettings, ModelSettings
from agentjet.errors import ConfigError

_GIB = 1024**3
_RESERVE_GIB = 4.0
_TRAINED_BYTES, _COMPUTED_BYTES, _FLOAT32_BYTES = 16, 2, 4
_GRAPHS_GIB = 1.0
_LOGITS_COPIES, _ROW_COPIES = 4, 4
"""As drawn, scaled, sorted and as log-probs; both halves of an MLP's input, their product, and what comes of it."""
_WIDE = ("embed_tokens.weight", "lm_head.weight")

Shapes = Mapping[str, tuple[int, ...]]
"""Of a model's tensors by name, tied ones once."""


@dataclass(frozen=True, slots=True)
class Split:
    """The engine's part of a GPU."""

    share: float
    """Of the GPU's memory."""
    cache_bytes: int
    """Of that, for keys and values."""


@dataclass(frozen=True, slots=True)
class EngineNeed:
    """GPU memory that vLLM takes beside its keys and values."""

    parameter_bytes: int
    max_running: int
    prefill_tokens: int

    @classmethod
    def of(cls, engine: EngineSettings) -> Self:
        """What is asked for in its settings; `auto` is bfloat16 on a GPU."""
        wide = engine.dtype == "float32"
        return cls(_FLOAT32_BYTES if wide else _COMPUTED_BYTES, engine.max_running, engine.prefill_tokens)

    def num_bytes(self, shapes: Shapes, lora: LoraSettings) -> int:
        """Weights, adapters, a step's rows and logits, and CUDA graphs."""
        held = sum(map(math.prod, shapes.values())) + adapter_parameters(shapes, lora) * lora.num_versions
        widest = max(shape[0] for name, shape in shapes.items() if _is_matrix(name, shape))
        vocabulary = max(shape[0] for shape in shapes.values())
        rows = self.prefill_tokens * widest * _ROW_COPIES * self.parameter_bytes
        logits = self.max_running * vocabulary * _LOGITS_COPIES * _FLOAT32_BYTES
        return held * self.parameter_bytes + rows + logits + int(_GRAPHS_GIB * _GIB)


@dataclass(frozen=True, slots=True)
class LearnerNeed:
    """GPU memory that a learner takes, beside its engine."""

    matrix_bytes: int
    """Of each parameter of the layers' matrices."""
    other_bytes: int
    """Of each other parameter."""
    fixed_bytes: int
    lora: LoraSettings
    """What is trained instead of the parameters, where it has a rank."""
    engine: EngineNeed

    @classmethod
    def of(cls, model: ModelSettings) -> Self:
        """Of a model that is trained."""
        fixed, engine = int((model.learner.activation_gib + _RESERVE_GIB) * _GIB), EngineNeed.of(model.engine)
        is_float32 = "float32" in (model.learner.precision, model.engine.dtype)
        frozen = _FLOAT32_BYTES if is_float32 else _COMPUTED_BYTES
        if model.lora.rank:
            return cls(frozen, _FLOAT32_BYTES, fixed, model.lora, engine)
        trained = _TRAINED_BYTES + _COMPUTED_BYTES
        if model.algorithm.kl == "none" or model.algorithm.reference_device == "cpu":
            return cls(trained, trained, fixed, model.lora, engine)
        return cls(trained + frozen, trained + _FLOAT32_BYTES, fixed, model.lora, engine)

    def num_bytes(self, shapes: Shapes) -> int:
        """For a model of such tensors."""
        matrices = sum(math.prod(shape) for name, shape in shapes.items() if _is_matrix(name, shape))
        others = sum(map(math.prod, shapes.values())) - matrices
        trained = adapter_parameters(shapes, self.lora) * (_TRAINED_BYTES + _COMPUTED_BYTES)
        return self.matrix_bytes * matrices + self.other_bytes * others + trained + self.fixed_bytes

    def split(self, total_bytes: int, shapes: Shapes) -> Split:
        """What is left to the engine of a GPU.

        Raises ConfigError when that does not hold what it needs, and a tenth of it as keys and values.
        """
        taken, needed = self.num_bytes(shapes), self.engine.num_bytes(shapes, self.lora)
        left, least = total_bytes - taken, 1.1 * needed
        if left < least:
            raise ConfigError(
                f"engine.is_colocated: of the GPU's {total_bytes / _GIB:.1f} GiB the learner may take "
                f"{taken / _GIB:.1f}, and the engine needs {least / _GIB:.1f} at least; lower learner.activation_gib, "
                "train a LoRA adapter (lora.rank), take a smaller model, or give them a GPU each"
            )
        return Split(left / total_bytes, left - needed)


def adapter_parameters(shapes: Shapes, lora: LoraSettings) -> int:
    """`rank x (inputs + outputs)` of the target layers; 0 without a rank."""
    ends = tuple(f".{target}.weight" for target in lora.target_modules)
    return lora.rank * sum(sum(shape) for name, shape in shapes.items() if f".{name}".endswith(ends))


def _is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and not name.endswith(_WIDE)
