"""A Transformers model, prepared for the engine: from a flat row of tokens to float32 logits.

Invariants:

- Only architectures whose every layer is plain causal attention are loaded; what would be inexact is refused by name.
- As in a learner under autocast, `dtype` is that of the matrix products in the layers; the residual stream, norms, and
  the output head are float32. Measured on SmolLM2 in bfloat16, that halves the difference to the learner's log-probs.
- New weights are staged completely before the first of them is put in place; putting in place does not fail.

All of it runs on the engine's thread.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from agentjet.config import LoraSettings
from agentjet.errors import ConfigError, UnsupportedArchitectureError
from agentjet.inference import attention
from agentjet.inference.adapted_linear import AdapterBank
from agentjet.inference.adapter_layout import AdapterLayout
from agentjet.inference.packed_linear import PackedLinear, can_pack, pack_linears
from agentjet.inference.weight_file import Layout, Snapshot

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""Transformers model types (SmolLM and SmolLM2 are `llama`)."""
_USUAL_CONTEXT, _LARGEST_DEFAULT_CONTEXT = 2048, 8192
_STATIC_ROPE = {"default", "linear", "llama3", "yarn"}
_HEAD = "lm_head.weight"


def choose_device(name: str) -> torch.device:
    """`auto` is CUDA where there is one."""
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 where the device multiplies it natively, else float32."""
    if name == "auto":
        return torch.bfloat16 if device.type != "cpu" or can_pack(device, torch.bfloat16) else torch.float32
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]


def check_exact(config: Any, context_length: int) -> None:
    """Raises UnsupportedArchitectureError for a model that this engine would compute only approximately."""
    if config.model_type not in MODEL_TYPES:
        raise UnsupportedArchitectureError(
            f"this engine has no exact attention for model type {config.model_type!r}; it serves "
            f"{', '.join(MODEL_TYPES)} (use the vLLM engine for others)"
        )
    window = getattr(config, "sliding_window", None)
    if window is not None and getattr(config, "use_sliding_window", True) and window < context_length:
        raise UnsupportedArchitectureError(
            f"{config.model_type} attends within a sliding window of {window} tokens, less than the context of "
            f"{context_length}: set context_length to at most {window}"
        )
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in _STATIC_ROPE:
        raise UnsupportedArchitectureError(
            f"{config.model_type} uses rotary positions of type {rope!r}, which depend on the longest text of a batch; "
            f"supported are {', '.join(sorted(_STATIC_ROPE))}"
        )


def choose_context(wanted: int | None, config: Any) -> int:
    """Most tokens of prompt and completion; None takes what the model was made for, up to 8,192.

    Raises ConfigError when the model was made for fewer.
    """
    most = getattr(config, "max_position_embeddings", None) or _USUAL_CONTEXT
    if wanted is None:
        return min(most, _LARGEST_DEFAULT_CONTEXT)
    if wanted > most:
        raise ConfigError(
            f"engine.context_tokens is {wanted}, but the model was made for {most}; lower it, or take a model whose "
            "config.json says more"
        )
    return wanted


class PolicyModel:
    """Weights and forward pass."""

    def __init__(
        self,
        folder: Path,
        *,
        dtype: torch.dtype,
        device: torch.device,
        context_length: int | None = None,
        lora: LoraSettings | None = None,
    ) -> None:
        config = AutoConfig.from_pretrained(folder)
        self.context_length = choose_context(context_length, config)
        check_exact(config, self.context_length)
        logging.disable_progress_bar()
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", attn_implementation=attention.IMPLEMENTATION
        )
        self.config, self.dtype, self.device = config, dtype, device
        adapted = AdapterLayout.of(model, lora) if lora is not None else None
        self._prepare(model.to(device).eval().requires_grad_(False))
        self.adapters = AdapterBank(self._decoder, "model.", adapted) if adapted is not None else None
        """Of a model with LoRA settings."""

    def _prepare(self, model: Any) -> None:
        self._layout = Layout.of(model)
        self._head = PackedLinear(model.lm_head.weight, None, torch.float32)
        self._head_source = self._layout.aliases.get(_HEAD, _HEAD)
        self._decoder: nn.Module = model.model
        self._packed = {
            f"model.{name}.weight": layer for name, layer in pack_linears(self._decoder, self.dtype).items()
        }
        biases = {id(layer.bias) for layer in self._packed.values()}
        for parameter in self._decoder.parameters():
            if id(parameter) not in biases:
                parameter.data = parameter.data.float()
        self._plain: dict[str, Tensor] = {f"model.{name}": value for name, value in self._decoder.named_parameters()}

    @property
    def vocab_size(self) -> int:
        """Rows of the output head."""
        return self._layout.shapes[self._head_source][0]

    def logits(self, ids: Tensor, positions: Tensor, plan: attention.StepPlan, wanted: Tensor) -> Tensor:
        """One step.

        Args:
            ids: The flat row [tokens].
            positions: Position of each in its sequence [tokens].
            plan: Where they lie in the cache, and what they see.
            wanted: Places in the row whose next token will be drawn [wanted].

        Returns:
            Float32 logits [wanted, vocabulary].
        """
        output = self._decoder(input_ids=ids[None], position_ids=positions[None], use_cache=False, plan=plan)
        return self._head(output.last_hidden_state[0].index_select(0, wanted))

    def stage(self, path: Path, keep_going: Callable[[], bool]) -> dict[str, Tensor] | None:
        """Reads and converts a snapshot, touching no weight in use.

        Args:
            path: Safetensors file or folder.
            keep_going: Asked between tensors; False gives the staging up.

        Returns:
            What `commit` takes, or None when given up.

        Raises:
            EngineError: The snapshot is unreadable or of another model.
        """
        staged: dict[str, Tensor] = {}
        with Snapshot(path) as snapshot:
            snapshot.check(self._layout)
            for name, tensor in snapshot.tensors(list(self._layout.shapes)):
                if not keep_going():
                    return None
                if name == self._head_source:
                    staged["head"] = self._head.pack(tensor)
                if name in self._packed:
                    staged[name] = self._packed[name].pack(tensor)
                elif name in self._plain:
                    staged[name] = tensor
        return staged

    def commit(self, staged: Mapping[str, Tensor]) -> None:
        """Puts staged weights in place."""
        for name, tensor in staged.items():
            if name in self._plain:
                self._plain[name].copy_(tensor)
                continue
            layer = self._head if name == "head" else self._packed[name]
            if layer.is_packed:
                layer.packed = tensor
            else:
                layer.packed.copy_(tensor)
