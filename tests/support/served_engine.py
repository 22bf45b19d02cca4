"""An engine of either kind, started on a small model, and new weights for it."""

import importlib.util
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from agentjet.inference.engine import Engine
from agentjet.pretrained import tiny_model
from agentjet.schemas.ids import Version

CONTEXT = 512
START = Version(1, 0)

needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (make vllm)")


def build_small(folder: Path) -> Path:
    """A Llama of two layers with an output head of its own, in a shape that vLLM's kernels for the CPU take."""
    tiny_model.build_tiny(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=448,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        dtype="float32",
    )
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return folder


def make_engine(kind: str, path: Path, **settings: Any) -> Engine:
    """In float32 on one thread, if not told otherwise."""
    settings = {"dtype": "float32", "device": "cpu", "num_threads": 1, "version": START} | settings
    if kind == "vllm":
        from agentjet.inference.vllm_engine import VllmEngine

        # Its default of 128 tokens is longer than most prompts here.
        return VllmEngine(path, **{"options": {"block_size": 32}} | settings)
    from agentjet.inference.transformers_engine import TransformersEngine

    return TransformersEngine(path, **settings)


@dataclass
class ServedEngine:
    """A started engine, and the folder of the model that it serves at the moment."""

    kind: str
    engine: Engine
    base: Path
    serves: Path = field(init=False)

    def __post_init__(self) -> None:
        self.serves = self.base

    @classmethod
    @asynccontextmanager
    async def started(cls, kind: str, base: Path, **settings: Any) -> AsyncIterator[Self]:
        engine = make_engine(kind, base, **{"context_length": CONTEXT} | settings)
        await engine.start()
        try:
            yield cls(kind, engine, base)
        finally:
            await engine.close()

    @property
    def next_version(self) -> Version:
        return self.engine.version._replace(step=self.engine.version.step + 1)

    async def serve(self, folder: Path) -> Version:
        """Put the weights of a model's folder in place, as the next version."""
        version = self.next_version
        await self.engine.update_weights(version, folder / "model.safetensors")
        self.serves = folder
        return version

    async def restore(self) -> None:
        """Serve the base, whatever a test that was cut short has left in place."""
        await self.serve(self.base)


def changed(base: Path, folder: Path, factor: float) -> Path:
    """A model whose first projection and head are another's, times a factor."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = load_file(base / "model.safetensors")
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.up_proj.weight", "lm_head.weight"):
        weights[name] = weights[name] * np.float32(factor)
    return save_model(base, folder, weights)


def constant(base: Path, folder: Path, logits: dict[int, float], others: float) -> Path:
    """A model with the same logits after every prompt."""
    weights = load_file(base / "model.safetensors")
    hidden = weights["model.norm.weight"].shape[0]
    weights["model.embed_tokens.weight"][:] = 1.0
    weights["model.norm.weight"][:] = 1.0
    for name, value in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            value[:] = 0.0
    # What comes to the head is all ones.
    weights["lm_head.weight"][:] = others / hidden
    for token, logit in logits.items():
        weights["lm_head.weight"][token] = logit / hidden
    return save_model(base, folder, weights)


def save_model(base: Path, folder: Path, weights: dict[str, np.ndarray]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text((base / "config.json").read_text())
    return folder
