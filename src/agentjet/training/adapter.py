"""A LoRA adapter in a frozen model (arXiv:2106.09685), by peft's layers.

The model stays the Transformers model that it was; its target layers compute `W x + alpha / rank * B A x`. W lies in
the type that the learner multiplies in; A and B are float32 masters, which take part in that type like any trained
weight.

Invariants: a fresh adapter changes nothing (B is 0), and its A is a function of seed and shapes alone; there is no
dropout; names and configuration are those of peft's files.

It does not know the optimizer, or where weights go.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import PreTrainedModel

from agentjet.config import LoraSettings
from agentjet.errors import ConfigError
from agentjet.pretrained.adapter_file import PREFIX
from agentjet.training.model import freeze, load_stored
from agentjet.training.snapshot import weights_digest

_NAME = "default"


class Adapter:
    """A model's adapter, which alone is trained.

    Args:
        model: On the CPU; it is frozen, and gets the adapter's layers.
        settings: Rank and target layers.
        base: Folder of the model.
        dtype: Type of the matrix products.
        seed: Of A.

    Raises ConfigError when a target is no linear layer of the model, or its output head.
    """

    def __init__(
        self, model: PreTrainedModel, settings: LoraSettings, *, base: Path, dtype: torch.dtype, seed: int
    ) -> None:
        check_targets(model, settings.target_modules)
        self.model = model
        self.base_path = base
        self.base_digest = weights_digest(dict(model.named_parameters()))
        """sha256 over the base's weights in float32."""
        self.config = _peft_config(settings, base)
        """As peft writes it."""
        freeze(model, dtype)
        self._layers = _inject(model, settings, seed)

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        """A [rank, inputs] and B [outputs, rank] of every target layer, by their names in peft's files."""
        return {
            f"{PREFIX}{name}.{part}.weight": getattr(layer, part)[_NAME].weight
            for name, layer in self._layers.items()
            for part in ("lora_A", "lora_B")
        }

    @contextmanager
    def off(self) -> Iterator[None]:
        """Inside the block the model is its base."""
        self._enable(False)
        try:
            yield
        finally:
            self._enable(True)

    def _enable(self, is_on: bool) -> None:
        for layer in self._layers.values():
            layer.enable_adapters(is_on)


def load_with_adapter(
    path: Path, device: torch.device, dtype: torch.dtype, settings: LoraSettings, seed: int
) -> Adapter:
    """A fresh adapter in the model of a folder; the arguments are those of `Adapter`.

    Raises as `Adapter` and `load_model`.
    """
    adapter = Adapter(load_stored(path), settings, base=path, dtype=dtype, seed=seed)
    nn.Module.to(adapter.model, device)
    return adapter


def check_targets(model: PreTrainedModel, targets: Sequence[str]) -> None:
    """Raises ConfigError that names the first target which can not have an adapter."""
    head = model.get_output_embeddings()
    modules = dict(model.named_modules())
    linear = {name for name, module in modules.items() if isinstance(module, nn.Linear) and module is not head}
    for target in targets:
        found = {name for name in modules if f".{name}".endswith(f".{target}")}
        if found and found <= linear:
            continue
        why = (
            "is no linear layer of this model" if not found or modules[min(found)] is not head else "is its output head"
        )
        known = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
        raise ConfigError(f"lora.target_modules: {target!r} {why}; choose among {known}")


def _peft_config(settings: LoraSettings, base: Path) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(settings.target_modules),
        "inference_mode": True,
    }


def _inject(model: PreTrainedModel, settings: LoraSettings, seed: int) -> dict[str, LoraLayer]:
    """Puts the layers in; those of the model by name."""
    config = LoraConfig(r=settings.rank, lora_alpha=settings.alpha, target_modules=list(settings.target_modules))  # type: ignore[arg-type]
    inject_adapter_in_model(config, model, _NAME)
    model.eval()
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    generator = torch.Generator().manual_seed(seed)
    for layer in layers.values():
        first, second = (matrices[_NAME].float().get_parameter("weight") for matrices in (layer.lora_A, layer.lora_B))
        nn.init.kaiming_uniform_(first, a=math.sqrt(5), generator=generator)
        nn.init.zeros_(second)
        # Autocast casts what is multiplied; a float32 copy of the input would only take memory.
        layer.cast_input_dtype_enabled = False
    return layers
