import pytest
import torch
from safetensors.torch import load_file, save_file

from agentjet.errors import CheckpointError
from agentjet.training.state import load_state, save_state
from agentjet.training.trainer import Trainer

K3 = {"kl": "k3", "kl_coefficient": 0.1}


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("kl", ["k2", "k3"])
def test_r14_a_policy_that_is_its_reference_has_a_divergence_of_exactly_zero(make_trainer, make_batch, precision, kl):
    trainer = make_trainer({"kl": kl, "kl_coefficient": 1.0}, precision=precision)
    first, second = trainer.step(make_batch(0)), trainer.step(make_batch(1))
    assert first.metrics["reference_kl"] == 0.0
    assert second.metrics["reference_kl"] > 0.0


def test_the_divergence_pulls_back_to_the_reference(make_trainer, make_batch):
    distances = {}
    for coefficient in (1e-9, 10.0):
        algorithm = {"kl": "k2", "kl_coefficient": coefficient, "correction": "none"}
        trainer = make_trainer(algorithm, learning_rate=3e-3)
        distances[coefficient] = [trainer.step(make_batch(0)).metrics["reference_kl"] for _ in range(6)][-1]
    assert distances[10.0] < distances[1e-9] / 2


def test_samples_without_an_advantage_still_diverge(make_trainer, make_batch):
    trainer, constant = make_trainer(K3), make_batch(0, rewards=(1.0, 1.0))
    trainer.step(make_batch(1))
    before = trainer.digest
    result = trainer.step(constant)
    assert result.metrics["computed_tokens"] > 0
    assert result.metrics["zero_advantage_ratio"] == 1.0
    assert result.digest != before


def test_divergence_in_the_reward_tells_constant_groups_apart(make_trainer, make_batch):
    trainer, constant = make_trainer({"kl": "k1", "kl_coefficient": 0.1}), make_batch(0, rewards=(1.0, 1.0))
    result = trainer.step(constant)
    assert result.metrics["zero_advantage_ratio"] == 0.0
    assert result.metrics["reward_mean"] == 1.0
    assert result.metrics["reward_penalty_mean"] != 0.0


def test_the_reference_stays_as_it_was_while_the_policy_learns(make_trainer, make_batch):
    trainer = make_trainer(K3 | {"reference_device": "cpu"})
    before = trainer.reference_digest
    assert before == make_trainer().digest
    trainer.step(make_batch(0))
    assert trainer.reference_digest == before
    assert trainer.digest != before


def test_a_resumed_step_measures_against_the_same_reference(make_trainer, make_batch, tmp_path):
    straight = make_trainer(K3)
    straight.step(make_batch(0))
    save_state(straight, tmp_path / "s", {})
    wanted = straight.step(make_batch(1))
    resumed = make_trainer(K3)
    load_state(resumed, tmp_path / "s")
    found = resumed.step(make_batch(1))
    assert found.digest == wanted.digest
    assert found.metrics["reference_kl"] == wanted.metrics["reference_kl"] > 0


def test_a_checkpoint_of_another_reference_is_refused(make_trainer, model_folder, tmp_path):
    save_state(make_trainer(K3), tmp_path / "s", {})
    other = tmp_path / "other"
    other.mkdir()
    for path in model_folder.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    weights = load_file(other / "model.safetensors")
    save_file({name: weight + 1e-3 for name, weight in weights.items()}, other / "model.safetensors", {"format": "pt"})
    trainer = make_trainer(K3)
    moved = Trainer(other, trainer.learner, trainer.algorithm, engine_dtype="float32")
    with pytest.raises(CheckpointError, match="against a reference"):
        load_state(moved, tmp_path / "s")
    load_state(Trainer(other, trainer.learner, make_trainer().algorithm), tmp_path / "s")


def test_the_reference_holds_its_layers_in_the_type_that_multiplies(make_trainer):
    reference = make_trainer(K3, precision="bf16")._reference
    with reference.present() as model:
        kinds = {name.split(".")[-2]: weight.dtype for name, weight in model.named_parameters()}
    assert kinds["q_proj"] == kinds["down_proj"] == torch.bfloat16
    assert kinds["embed_tokens"] == kinds["norm"] == torch.float32
