"""Loads a causal language model for tree training, or refuses it by name.

Invariants: master weights are float32; only architectures whose tree gradient is tested are accepted, and only where
positions enter through rotary embeddings that do not depend on the length of the row.
"""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from agentjet.errors import ModelNotFoundError, UnsupportedArchitectureError
from agentjet.training.attention import IMPLEMENTATION

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "smollm3")
"""Model types whose tree gradient is tested against unmerged rows."""
FIXED_ROPE = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose frequencies do not depend on the row's length."""


def load_model(path: Path, device: torch.device | str = "cpu") -> PreTrainedModel:
    """The model with float32 weights and tree attention, in evaluation mode (no dropout).

    Raises:
        ModelNotFoundError: The folder holds no model.
        UnsupportedArchitectureError: Its architecture can not be trained exactly on trees.
    """
    disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        check_architecture(config)
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=torch.float32, attn_implementation=IMPLEMENTATION, local_files_only=True
        )
    except OSError as error:
        raise ModelNotFoundError(f"{path} holds no model that Transformers can load: {error}") from error
    torch.nn.Module.to(model, device)
    return model.eval()


def check_architecture(config: PreTrainedConfig) -> None:
    """Raises UnsupportedArchitectureError, naming what is in the way."""
    if config.model_type not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UnsupportedArchitectureError(f"tree training knows {known}; this model is a {config.model_type!r}")
    for rope in _rope_types(config):
        if rope not in FIXED_ROPE:
            raise UnsupportedArchitectureError(
                f"rotary embedding {rope!r} depends on the row's length, so a tree has no single value; "
                f"set rope_parameters.rope_type to one of {', '.join(FIXED_ROPE)} or take another model"
            )
    if getattr(config, "use_bidirectional_attention", False):
        raise UnsupportedArchitectureError("use_bidirectional_attention lets a token see its future: not a policy")
    if getattr(config, "attention_dropout", 0.0):
        raise UnsupportedArchitectureError("attention_dropout has to be 0: the sampler draws without dropout")


def _rope_types(config: PreTrainedConfig) -> list[str]:
    """Of all layers; a model whose layers differ has a table for each kind of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    tables = [table for table in parameters.values() if isinstance(table, dict)] or [parameters]
    return [table.get("rope_type", "default") for table in tables]
