"""How one GPU is shared out between a learner and the engine of its model.

The learner's need is an estimate from above: what it holds all the time, and what its settings allow it for a pack.

| of each | bytes |
|---|---|
| trained parameter: float32 weights, gradients, two Adam moments | 16 |
| trained parameter, while it computes: its copy in bfloat16 | 2 |
| parameter of a frozen reference in float32, unless it lies on the CPU | 4 |
| parameter of a layer's matrix under a LoRA adapter, in the type that the learner multiplies in | 2 or 4 |
| other parameter under an adapter (embedding, output head, norms) | 4 |

and `learner.activation_gib`, and a reserve for the output head of a pack and the two processes' CUDA contexts. With an
adapter the reference is the base itself. vLLM takes the rest for its weights and as many keys and values as fit.
Nothing here is measured on a GPU.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from agentjet.config import LoraSettings, ModelSettings
from agentjet.errors import ConfigError

_GIB = 1024**3
_RESERVE_GIB = 4.0
_TRAINED_BYTES, _COMPUTED_BYTES, _FLOAT32_BYTES = 16, 2, 4
_WIDE = ("embed_tokens.weight", "lm_head.weight")

Shapes = Mapping[str, tuple[int, ...]]
"""Of a model's tensors by name, tied ones once."""


@dataclass(frozen=True, slots=True)
class LearnerNeed:
    """GPU memory that a learner takes."""

    matrix_bytes: int
    """Of each parameter of the layers' matrices."""
    other_bytes: int
    """Of each other parameter."""
    fixed_bytes: int
    lora: LoraSettings
    """What is trained instead of the parameters, where it has a rank."""

    @classmethod
    def of(cls, model: ModelSettings) -> Self:
        """Of a model that is trained."""
        fixed = int((model.learner.activation_gib + _RESERVE_GIB) * _GIB)
        if model.lora.rank:
            is_float32 = "float32" in (model.learner.precision, model.engine.dtype)
            return cls(_FLOAT32_BYTES if is_float32 else _COMPUTED_BYTES, _FLOAT32_BYTES, fixed, model.lora)
        has_reference = model.algorithm.kl != "none" and model.algorithm.reference_device != "cpu"
        each = _TRAINED_BYTES + _COMPUTED_BYTES + (_FLOAT32_BYTES if has_reference else 0)
        return cls(each, each, fixed, model.lora)

    def num_bytes(self, shapes: Shapes) -> int:
        """For a model of such tensors."""
        matrices = sum(math.prod(shape) for name, shape in shapes.items() if _is_matrix(name, shape))
        others = sum(map(math.prod, shapes.values())) - matrices
        trained = adapter_parameters(shapes, self.lora) * (_TRAINED_BYTES + _COMPUTED_BYTES)
        return self.matrix_bytes * matrices + self.other_bytes * others + trained + self.fixed_bytes

    def engine_share(self, total_bytes: int, shapes: Shapes) -> float:
        """What is left to the engine, as a share of the GPU's memory.

        Raises ConfigError when that does not hold the weights in bfloat16, the adapters, and a tenth more.
        """
        taken = self.num_bytes(shapes)
        held = sum(map(math.prod, shapes.values())) + adapter_parameters(shapes, self.lora) * self.lora.num_versions
        left, needed = total_bytes - taken, 1.1 * _COMPUTED_BYTES * held
        if left < needed:
            raise ConfigError(
                f"engine.is_colocated: of the GPU's {total_bytes / _GIB:.1f} GiB the learner may take "
                f"{taken / _GIB:.1f}, and the engine needs {needed / _GIB:.1f} at least; lower learner.activation_gib, "
                "train a LoRA adapter (lora.rank), take a smaller model, or give them a GPU each"
            )
        return left / total_bytes


def adapter_parameters(shapes: Shapes, lora: LoraSettings) -> int:
    """`rank x (inputs + outputs)` of the target layers; 0 without a rank."""
    ends = tuple(f".{target}.weight" for target in lora.target_modules)
    return lora.rank * sum(sum(shape) for name, shape in shapes.items() if f".{name}".endswith(ends))


def _is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and not name.endswith(_WIDE)
