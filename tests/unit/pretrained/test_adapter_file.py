import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from agentjet.errors import EngineError
from agentjet.pretrained.adapter_file import CONFIG, WEIGHTS, lay_out, read_config, write_adapter

CONFIGURATION = {"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"]}
NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    path = tmp_path / "1-3.safetensors"
    write_adapter(path, {NAME: torch.arange(6.0).reshape(2, 3)}, CONFIGURATION)
    return path


def test_a_file_becomes_the_folder_that_peft_loads(adapter: Path, tmp_path: Path):
    folder = lay_out(adapter, tmp_path / "deep" / "adapter")
    adapter.unlink()
    assert json.loads((folder / CONFIG).read_text()) == CONFIGURATION
    assert torch.equal(load_file(folder / WEIGHTS)[NAME], torch.arange(6.0).reshape(2, 3))


def test_a_file_of_whole_weights_is_told_apart(tmp_path: Path):
    save_file({"model.norm.weight": torch.ones(2)}, tmp_path / "whole.safetensors")
    with pytest.raises(EngineError, match=r"holds no adapter.*`lora` settings"):
        read_config(tmp_path / "whole.safetensors")


def test_a_file_that_is_cut_is_refused_and_leaves_no_folder(adapter: Path, tmp_path: Path):
    adapter.write_bytes(adapter.read_bytes()[:-3])
    with pytest.raises(EngineError, match="can not be read"):
        lay_out(adapter, tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


def test_a_file_is_a_function_of_what_it_holds(tmp_path: Path):
    written = set()
    for number in range(20):
        path = tmp_path / str(number)
        write_adapter(path, {NAME: torch.ones(2, 3), NAME.replace("A", "B"): torch.zeros(3, 2)}, CONFIGURATION)
        written.add(path.read_bytes())
    assert len(written) == 1
