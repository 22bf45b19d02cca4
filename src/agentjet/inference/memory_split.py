"""How one GPU is shared out between a learner and the engine of its model.

The learner's need is an estimate from above: what it holds all the time, and what its settings allow it for a pack.

| what | bytes a parameter |
|---|---|
| float32 weights, gradients, two Adam moments | 16 |
| weights in bfloat16 while it computes | 2 |
| a frozen reference in float32, unless it lies on the CPU | 4 |

and `learner.activation_gib`, and a reserve for the output head of a pack and the two processes' CUDA contexts. vLLM
takes the rest for its weights and as many keys and values as fit. Nothing here is measured on a GPU.
"""

from dataclasses import dataclass
from typing import Self

from agentjet.config import ModelSettings
from agentjet.errors import ConfigError

_GIB = 1024**3
_RESERVE_GIB = 4.0
_TRAINED_BYTES, _COMPUTED_BYTES, _REFERENCE_BYTES = 16, 2, 4


@dataclass(frozen=True, slots=True)
class LearnerNeed:
    """GPU memory that a learner takes."""

    bytes_per_parameter: int = 0
    fixed_bytes: int = 0

    @classmethod
    def of(cls, model: ModelSettings) -> Self:
        """Of a model that is trained."""
        has_reference = model.algorithm.kl != "none" and model.algorithm.reference_device != "cpu"
        per_parameter = _TRAINED_BYTES + _COMPUTED_BYTES + (_REFERENCE_BYTES if has_reference else 0)
        return cls(per_parameter, int((model.learner.activation_gib + _RESERVE_GIB) * _GIB))

    def num_bytes(self, num_parameters: int) -> int:
        """For a model of so many parameters."""
        return self.bytes_per_parameter * num_parameters + self.fixed_bytes

    def engine_share(self, total_bytes: int, num_parameters: int) -> float:
        """What is left to the engine, as a share of the GPU's memory.

        Raises ConfigError when that does not hold the weights in bfloat16 and a tenth more.
        """
        taken = self.num_bytes(num_parameters)
        left, needed = total_bytes - taken, 2.2 * num_parameters
        if left < needed:
            raise ConfigError(
                f"engine.is_colocated: of the GPU's {total_bytes / _GIB:.1f} GiB the learner may take "
                f"{taken / _GIB:.1f}, and the engine needs {needed / _GIB:.1f} at least; lower learner.activation_gib, "
                "take a smaller model, or give them a GPU each"
            )
        return left / total_bytes
