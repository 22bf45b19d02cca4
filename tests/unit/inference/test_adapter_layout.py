from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_use import LORA, make_adapter
from safetensors.torch import load_file, save_file
from served_engine import build_small
from transformers import AutoConfig, AutoModelForCausalLM

from agentjet.config import LoraSettings
from agentjet.errors import ConfigError, EngineError
from agentjet.inference.adapter_layout import AdapterLayout
from agentjet.pretrained.adapter_file import read_config, write_adapter


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_small(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture(scope="module")
def model(small: Path) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(small))


def test_peft_names_just_the_layers_that_are_expected(small: Path, model: Any, tmp_path: Path):
    path = make_adapter(small, tmp_path / "adapter.safetensors", 1)
    layout = AdapterLayout.of(model, LORA)
    assert len(layout.layers) == 14
    assert layout.layers["model.layers.1.mlp.down_proj"] == (64, 128)
    stored = load_file(path)
    for layer, factors in layout.read(path).items():
        assert torch.equal(factors.down, stored[f"base_model.model.{layer}.lora_A.weight"])
        assert torch.equal(factors.up, stored[f"base_model.model.{layer}.lora_B.weight"])


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens", "proj", "w1"])
def test_targets_that_are_no_linear_layers_below_the_head_are_refused_by_name(model: Any, target: str):
    with pytest.raises(ConfigError, match=rf"lora\.target_modules: '{target}' is the end of no linear layer"):
        AdapterLayout.of(model, LoraSettings(rank=4, target_modules=("q_proj", target)))


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"use_dora": True}, "of a kind that is not served: use_dora"),
        ({"use_rslora": True, "rank_pattern": {"q_proj": 2}}, "use_rslora, rank_pattern"),
        ({"bias": "all"}, "not served: bias"),
        ({"r": 8}, "has rank 8 and alpha 8.0, the model's settings say rank 4 and alpha 8"),
        ({"lora_alpha": 16}, "has rank 4 and alpha 16"),
    ],
)
def test_what_would_be_computed_otherwise_is_refused(
    small: Path, model: Any, tmp_path: Path, entries: dict[str, Any], words: str
):
    path = make_adapter(small, tmp_path / "adapter.safetensors", 1)
    write_adapter(tmp_path / "other", load_file(path), read_config(path) | entries)
    with pytest.raises(EngineError, match=words):
        AdapterLayout.of(model, LORA).check(tmp_path / "other")


def test_a_file_that_lacks_a_layer_or_has_one_too_many_is_refused(small: Path, model: Any, tmp_path: Path):
    path = make_adapter(small, tmp_path / "adapter.safetensors", 1)
    layout, tensors, config = AdapterLayout.of(model, LORA), load_file(path), read_config(path)
    name, first = next(iter(tensors.items()))
    others = {key: value for key, value in tensors.items() if key != name}
    for number, (words, changed) in enumerate(
        {
            "1 tensors missing": others,
            "1 unknown": tensors | {f"{name}.more": first.clone()},
            "the model has floating": tensors | {name: first[:, 1:].contiguous()},
            "I64": tensors | {name: first.long()},
        }.items()
    ):
        write_adapter(tmp_path / str(number), changed, config)
        with pytest.raises(EngineError, match=words):
            layout.check(tmp_path / str(number))


def test_whole_weights_are_told_apart(small: Path, model: Any, tmp_path: Path):
    save_file({"model.norm.weight": torch.ones(64)}, tmp_path / "whole.safetensors")
    with pytest.raises(EngineError, match="holds no adapter"):
        AdapterLayout.of(model, LORA).check(tmp_path / "whole.safetensors")
