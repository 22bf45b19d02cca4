"""What AgentJet adds to vLLM's workers so that single weights can be written where they lie.

Invariants:

- Changes go through the loader that vLLM's own files go through, which then writes only where there is something new;
  so it finds fused and cut tensors.
- Changes that can not be read are refused before a weight is touched. What fails later leaves the worker half-loaded,
  and raises: the engine has to end.

This module is imported in vLLM's own processes.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from agentjet.inference.weight_change import read_changes

_SUM_NUMBERS = 1 << 24


class WeightChanger:
    """A part of vLLM's worker class; its public methods are called on every worker at once."""

    def in_place_obstacle(self) -> str:
        """Why single weights can not be written; empty when all lie as the loader puts them."""
        worker: Any = self
        config = worker.vllm_config
        if config.model_config.quantization is not None or config.lora_config is not None:
            return "the weights are quantized or carry adapters"
        packed = [name for name, module in worker.model_runner.get_model().named_modules() if _is_packed(module)]
        return f"{len(packed)} layers hold their weights in another form, such as {packed[0]}" if packed else ""

    def change_weights(self, path: str) -> str:
        """Writes the changed values of a file of them in place.

        Returns:
            Why nothing was touched; empty when they are in place.
        """
        from vllm.config import set_current_vllm_config  # pyright: ignore[reportMissingImports]
        from vllm.model_executor.model_loader.checkpoint_weight_patch import (  # pyright: ignore[reportMissingImports]
            CheckpointWeightPatch,
            load_checkpoint_weight_patches,
        )

        worker: Any = self
        try:
            changes = list(read_changes(Path(path)))
        except (OSError, SafetensorError) as error:
            return f"the changes can not be read: {error}"
        patches = [
            CheckpointWeightPatch(
                one.name, one.shape, one.values.dtype, one.values.to(worker.device), one.places.to(worker.device)
            )
            for one in changes
        ]
        with set_current_vllm_config(worker.vllm_config):
            load_checkpoint_weight_patches(worker.model_runner.get_model(), patches, validate_unique_indices=False)
        return ""

    def weight_sums(self) -> list[int]:
        """A number for each tensor of this worker, which any change of its bits changes."""
        worker: Any = self
        return [_sum(one) for one in worker.model_runner.get_model().state_dict().values()]


def _is_packed(module: nn.Module) -> bool:
    """Whether what a layer computes with is not, or need not be, what its loader writes."""
    from vllm.model_executor.model_loader.reload.layerwise import (  # pyright: ignore[reportMissingImports]
        get_layerwise_info,
    )

    if getattr(module, "cpu_linear", nn.functional.linear) is not nn.functional.linear:
        return True
    if any("MoE" in kind.__name__ or "MLA" in kind.__name__ for kind in type(module).__mro__):
        return True
    loaded: Any = get_layerwise_info(module).restore_metadata[0]
    held = module._parameters
    return any((kept := held.get(name)) is not None and kept.shape != one.shape for name, one in loaded.items())


def _sum(tensor: Tensor) -> int:
    """Of its bits as integers, each times its place."""
    kind = {2: torch.int16, 4: torch.int32}.get(tensor.element_size(), torch.uint8)
    numbers, total = tensor.contiguous().reshape(-1).view(kind), 0
    for start in range(0, len(numbers), _SUM_NUMBERS):
        part = numbers[start : start + _SUM_NUMBERS].long()
        places = torch.arange(start, start + len(part), device=part.device)
        total += int((part * (2 * places + 1)).sum())
    return total
