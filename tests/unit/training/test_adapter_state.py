"""A learner's checkpoint where an adapter is trained."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file, save_file

from agentjet.durable.manifest import verify_files, write_manifest
from agentjet.errors import CheckpointError
from agentjet.training.state import load_state, save_state

LORA = {"rank": 4, "alpha": 8.0}
K3 = {"kl": "k3", "kl_coefficient": 0.1}


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_a_resumed_step_equals_the_uninterrupted_one_bit_for_bit(make_trainer, make_batch, tmp_path, precision):
    fields = {"lora": LORA, "num_steps": 9, "schedule": "cosine", "num_minibatches": 2, "precision": precision}
    straight = make_trainer(K3, **fields)
    for seed in range(3):
        straight.step(make_batch(seed))
    save_state(straight, tmp_path / "1-3", {"step": 3})
    resumed = make_trainer(K3, seed=7, **fields)
    assert load_state(resumed, tmp_path / "1-3") == {"step": 3}
    assert resumed.digest == straight.digest
    for seed in range(3, 6):
        one, other = straight.step(make_batch(seed)), resumed.step(make_batch(seed))
        assert one.digest == other.digest
        for name in ("learning_rate", "grad_norm", "reference_kl"):
            assert one.metrics[name] == other.metrics[name]


def test_the_folder_holds_the_adapter_and_names_its_base(make_trainer, make_batch, tmp_path, model_folder: Path):
    trainer = make_trainer(lora=LORA)
    trainer.step(make_batch(0))
    files = save_state(trainer, tmp_path / "s", {})
    assert files == verify_files(tmp_path / "s")
    assert {file.name for file in files} == {
        "adapter_model.safetensors",
        "adapter_config.json",
        "optimizer.safetensors",
        "random.safetensors",
        "state.json",
    }
    state = json.loads((tmp_path / "s" / "state.json").read_text())
    assert state["base"] == {"path": str(model_folder), "digest": make_trainer().digest}
    kept = load_file(tmp_path / "s" / "adapter_model.safetensors")
    assert {name: tensor.dtype for name, tensor in kept.items()} == dict.fromkeys(trainer.weights, torch.float32)
    moments = {name for name in load_file(tmp_path / "s" / "optimizer.safetensors") if name.endswith(".exp_avg")}
    assert len(moments) == len(kept)


def test_the_folder_is_an_adapter_that_peft_loads(make_trainer, make_batch, tmp_path):
    trainer = make_trainer(lora=LORA)
    trainer.step(make_batch(0))
    save_state(trainer, tmp_path / "s", {})
    loaded = AutoPeftModelForCausalLM.from_pretrained(str(tmp_path / "s"))
    for name, weight in trainer.weights.items():
        assert torch.equal(loaded.get_parameter(name.replace(".weight", ".default.weight")), weight)


@pytest.mark.parametrize(
    ("lora", "match"),
    [
        ({"rank": 2, "alpha": 8.0}, r"holds a LoRA adapter .*rank 4, .* trains a LoRA adapter .*rank 2, "),
        ({"rank": 4, "alpha": 16.0}, r"alpha 8, .*alpha 16, "),
        (LORA | {"target_modules": ["q_proj"]}, r"trains a LoRA adapter .* q_proj\)"),
        ({}, r"holds a LoRA adapter .* trains a llama of"),
    ],
)
def test_what_trains_something_else_refuses_it(make_trainer, tmp_path, lora, match):
    save_state(make_trainer(lora=LORA), tmp_path / "s", {})
    with pytest.raises(CheckpointError, match=match):
        load_state(make_trainer(lora=lora), tmp_path / "s")


def test_an_adapter_does_not_go_on_from_all_weights(make_trainer, tmp_path):
    save_state(make_trainer(), tmp_path / "s", {})
    with pytest.raises(CheckpointError, match=r"holds a llama of .* trains a LoRA adapter"):
        load_state(make_trainer(lora=LORA), tmp_path / "s")


def test_the_same_adapter_of_another_base_is_refused_by_digest(make_trainer, tmp_path, model_folder: Path):
    save_state(make_trainer(lora=LORA), tmp_path / "s", {})
    other = tmp_path / "other"
    shutil.copytree(model_folder, other)
    weights = load_file(other / "model.safetensors")
    save_file({name: weight + 1e-3 for name, weight in weights.items()}, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"adapter of the model with digest .* bring that model back there"):
        load_state(make_trainer(lora=LORA, model=other), tmp_path / "s")


def test_a_base_that_was_moved_is_the_same_base(make_trainer, make_batch, tmp_path, model_folder: Path):
    trainer = make_trainer(lora=LORA)
    trainer.step(make_batch(0))
    save_state(trainer, tmp_path / "s", {})
    moved = make_trainer(lora=LORA, model=Path(shutil.copytree(model_folder, tmp_path / "moved")))
    load_state(moved, tmp_path / "s")
    assert moved.digest == trainer.digest


def test_a_damaged_adapter_is_named(make_trainer, tmp_path):
    trainer = make_trainer(lora=LORA)
    save_state(trainer, tmp_path / "s", {})
    (tmp_path / "s" / "adapter_model.safetensors").write_bytes(b"no")
    with pytest.raises(CheckpointError, match="adapter_model"):
        load_state(trainer, tmp_path / "s")
    write_manifest(tmp_path / "s")
    with pytest.raises(CheckpointError, match="can not be read"):
        load_state(trainer, tmp_path / "s")
