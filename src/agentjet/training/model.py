"""Loads a causal language model for tree training, or refuses it by name.

Invariants: master weights are float32; the matrices of a frozen model's layers lie in the type that the learner
multiplies in, everything else of it is float32; only architectures whose tree gradient is tested are accepted, and only
where positions enter through rotary embeddings that do not depend on the length of the row.
"""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from agentjet.errors import ModelNotFoundError, UnsupportedArchitectureError
from agentjet.training.attention import IMPLEMENTATION

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "smollm3")
"""Model types whose tree gradient is tested against unmerged rows."""
FIXED_ROPE = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose frequencies do not depend on the row's length."""


_STORED = {"BF16": torch.bfloat16, "F16": torch.float16}


def load_model(
    path: Path, device: torch.device | str = "cpu", *, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """The model with tree attention, in evaluation mode (no dropout).

    Args:
        path: Its folder.
        device: Where it computes.
        dtype: Of its weights.

    Raises:
        ModelNotFoundError: The folder holds no model.
        UnsupportedArchitectureError: Its architecture can not be trained exactly on trees.
    """
    disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        check_architecture(config)
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=dtype, attn_implementation=IMPLEMENTATION, local_files_only=True
        )
    except OSError as error:
        raise ModelNotFoundError(f"{path} holds no model that Transformers can load: {error}") from error
    torch.nn.Module.to(model, device)
    return model.eval()


def load_stored(path: Path) -> PreTrainedModel:
    """The model on the CPU with its weights as its files hold them, where that is one 16-bit type; else float32.

    Raises as `load_model`.
    """
    dtype = _stored_dtype(path)
    model = load_model(path, dtype=dtype)
    # Constants of some models (Gemma 3's scale of the embedding) are rounded with the weights.
    is_rounded = any(buffer.is_floating_point() and buffer.dtype != torch.float32 for buffer in model.buffers())
    return load_model(path) if is_rounded else model


def freeze(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Makes a model one that is not trained; `dtype` is the type of its layers' matrices."""
    # The head's weight may be the embedding's, and its product is float32.
    head = model.get_output_embeddings()
    layers = {m.weight for m in model.modules() if isinstance(m, nn.Linear) and m is not head}
    for weight in model.parameters():
        weight.data = weight.data.to(dtype if weight in layers else torch.float32)
    model.requires_grad_(False)


def _stored_dtype(path: Path) -> torch.dtype:
    found: set[str] = set()
    try:
        for file in path.glob("*.safetensors"):
            with safe_open(file, framework="pt") as opened:
                found |= {opened.get_slice(name).get_dtype() for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError):
        found.clear()  # Loading will say what is wrong.
    return _STORED.get(found.pop(), torch.float32) if len(found) == 1 else torch.float32


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
