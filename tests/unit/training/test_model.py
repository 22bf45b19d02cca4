"""A base whose files are 16-bit, read as such."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, PreTrainedModel, Qwen2Config

from agentjet.training.model import freeze, load_model, load_stored

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": None,
}


def stored(folder: Path, config: object, dtype: torch.dtype) -> Path:
    AutoModelForCausalLM.from_config(config).to(dtype).save_pretrained(folder)
    return folder


def dtypes(model: PreTrainedModel) -> set[torch.dtype]:
    return {weight.dtype for weight in model.parameters()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weights_come_as_their_files_hold_them(tmp_path: Path, dtype):
    assert dtypes(load_stored(stored(tmp_path, Qwen2Config(**SIZES), dtype))) == {dtype}


def test_files_of_two_types_are_read_as_float32(tmp_path: Path):
    stored(tmp_path / "a", Qwen2Config(**SIZES), torch.bfloat16)
    stored(tmp_path / "b", Qwen2Config(**SIZES), torch.float32)
    (tmp_path / "a/model.safetensors").rename(tmp_path / "b/more.safetensors")
    assert dtypes(load_stored(tmp_path / "b")) == {torch.float32}


def test_constants_that_would_be_rounded_are_not(tmp_path: Path):
    """Gemma 3 holds its embedding's scale, here the root of 32, as a buffer."""
    folder = stored(tmp_path, Gemma3TextConfig(**SIZES), torch.bfloat16)
    found = {name: buffer for name, buffer in load_stored(folder).named_buffers() if buffer.is_floating_point()}
    for name, buffer in load_model(folder).named_buffers():
        if buffer.is_floating_point():
            assert torch.equal(found[name], buffer), name


@pytest.mark.parametrize("config", [Qwen2Config(**SIZES, tie_word_embeddings=True), Qwen2Config(**SIZES)])
def test_a_frozen_model_is_the_same_whatever_it_was_read_as(tmp_path: Path, config):
    folder = stored(tmp_path, config, torch.bfloat16)
    short, long = load_stored(folder), load_model(folder)
    for model in (short, long):
        freeze(model, torch.bfloat16)
    for (name, one), other in zip(short.named_parameters(), long.parameters(), strict=True):
        assert (one.dtype, one.requires_grad) == (other.dtype, False), name
        assert torch.equal(one, other), name
    assert short.get_output_embeddings().weight.dtype is torch.float32
