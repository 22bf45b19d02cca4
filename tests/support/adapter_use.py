"""Adapters for a model's folder, and what peft says of them."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from transformers import AutoModelForCausalLM

from agentjet.config import LoraSettings
from agentjet.pretrained.adapter_file import lay_out, write_adapter

LORA = LoraSettings(rank=4, alpha=8.0, num_versions=3)


def make_adapter(base: Path, path: Path, seed: int, lora: LoraSettings = LORA, *, size: float = 0.2) -> Path:
    """The file of an adapter whose factors are all random, of a standard deviation of `size`."""
    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=list(lora.target_modules))
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config)
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(tensor.shape, generator=generator) * size
        for name, tensor in get_peft_model_state_dict(model).items()
    }
    settings = {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_adapter(path, tensors, settings)
    return path


@cache
def adapted_model(base: Path, adapter: Path) -> Any:
    """The model with an adapter beside it, in float32, as peft computes it."""
    folder = adapter.with_suffix("")
    if not folder.exists():
        lay_out(adapter, folder)
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), folder).eval()


def adapted_reference(base: Path, adapter: Path, prompt: Sequence[int], drawn: Sequence[int]) -> torch.Tensor:
    """Log-probs of drawn ids by one plain forward pass of the model with an adapter."""
    with torch.no_grad():
        logits = adapted_model(base, adapter)(torch.tensor([[*prompt, *drawn]])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(drawn)[:, None])[:, 0]
