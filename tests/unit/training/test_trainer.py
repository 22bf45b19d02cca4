import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from agentjet.errors import ConfigError, ModelNotFoundError
from agentjet.training.head import rounded, scored_logprobs
from agentjet.training.trainer import Trainer


def gradients(trainer: Trainer, batch, monkeypatch) -> list[torch.Tensor]:
    """The gradient that one step would apply."""
    found: list[torch.Tensor] = []

    def keep(optimizer):
        found.extend(weight.grad.clone() for weight in optimizer.weights)
        optimizer.adam.zero_grad()
        return 1.0

    monkeypatch.setattr("agentjet.training.optimizer.Optimizer.update", keep)
    trainer.step(batch)
    return found


def test_l2_temperature_divides_logits_not_log_probs():
    logits = torch.tensor([[1.0, 0.0, -1.0, -2.0]])
    found, _ = scored_logprobs(logits, torch.eye(4), torch.tensor([0.6]), torch.tensor([0]), torch.tensor([0]))
    assert found.item() == pytest.approx(-0.20806, abs=1e-5)


def test_a_rounded_weight_passes_its_gradient_unrounded():
    weight = torch.tensor([1.001], requires_grad=True)
    (rounded(weight, torch.bfloat16) * 1.2345).sum().backward()
    assert rounded(weight, torch.bfloat16).item() == 1.0
    assert weight.grad is not None
    assert weight.grad.item() == pytest.approx(1.2345, abs=1e-7)


def test_steps_raise_the_reward_weighted_likelihood(make_trainer, make_batch):
    trainer, batch = make_trainer({"advantage": "centred", "correction": "none"}), make_batch(0)
    before = trainer.digest
    entropies = [trainer.step(batch, policy_step=5) for _ in range(4)]
    first, last = entropies[0], entropies[-1]
    assert first.digest != before
    assert last.digest == trainer.digest
    assert first.metrics["ratio_mean"] == first.metrics["ratio_max"] == 1.0
    assert first.metrics["clip_ratio"] == 0.0
    assert first.metrics["staleness_mean"] == 2.0
    assert first.metrics["reward_mean"] == 0.375
    assert first.metrics["learning_rate"] == 1e-2
    assert first.metrics["grad_norm"] > 0
    assert not first.is_skipped
    assert all(math.isfinite(value) for value in last.metrics.values())


@pytest.mark.parametrize("pack_tokens", [1, 30, 70])
def test_r2_the_gradient_does_not_depend_on_packs(make_trainer, make_batch, monkeypatch, pack_tokens):
    batch = make_batch(1)
    whole = gradients(make_trainer(), batch, monkeypatch)
    split = gradients(make_trainer(pack_tokens=pack_tokens), batch, monkeypatch)
    for one, other in zip(whole, split, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)


def test_r11_ranks_add_up_to_the_whole_gradient(make_trainer, make_batch, monkeypatch):
    batch = make_batch(1)
    whole = gradients(make_trainer(pack_tokens=30), batch, monkeypatch)
    total = [torch.zeros_like(grad) for grad in whole]
    for rank in range(2):
        trainer = make_trainer(pack_tokens=30)
        monkeypatch.setattr(type(trainer.accelerator), "num_processes", 2)
        monkeypatch.setattr(type(trainer.accelerator), "process_index", rank)
        monkeypatch.setattr(trainer.accelerator, "reduce", lambda grad, reduction: grad)
        for sum_, part in zip(total, gradients(trainer, batch, monkeypatch), strict=True):
            sum_ += part
        monkeypatch.undo()
    for one, other in zip(whole, total, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)


def test_samples_without_an_advantage_are_not_computed_but_counted(make_trainer, make_batch, monkeypatch):
    mixed, constant = make_batch(2, groups=1), make_batch(3, groups=1, rewards=(1.0, 1.0, 1.0, 1.0))
    alone = gradients(make_trainer(), mixed, monkeypatch)
    trainer = make_trainer()
    both = gradients(trainer, [*mixed, *constant], monkeypatch)
    for one, other in zip(alone, both, strict=True):
        torch.testing.assert_close(one / 2, other, rtol=1e-4, atol=1e-7)


def test_r10_a_dropped_constant_group_counts_in_no_denominator(make_trainer, make_batch, monkeypatch):
    mixed, constant = make_batch(2, groups=1), make_batch(3, groups=1, rewards=(1.0, 1.0, 1.0, 1.0))
    alone = gradients(make_trainer(), mixed, monkeypatch)
    both = gradients(make_trainer({"drop_constant_groups": True}), [*mixed, *constant], monkeypatch)
    for one, other in zip(alone, both, strict=True):
        assert torch.equal(one, other)


def test_a_batch_without_any_advantage_changes_nothing(make_trainer, make_batch):
    trainer = make_trainer()
    before = trainer.digest
    result = trainer.step(make_batch(0, rewards=(1.0, 1.0)))
    assert result.digest == before
    assert result.metrics["zero_advantage_ratio"] == 1.0
    assert result.metrics["computed_tokens"] == 0.0


def test_r18_a_gradient_that_is_not_finite_is_skipped(make_trainer, make_batch):
    trainer, batch = make_trainer(), make_batch(0)
    trainer.step(batch)
    good = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
    moments = [dict(trainer.optimizer.adam.state[weight]) for weight in trainer.optimizer.weights]
    kept = [{key: value.clone() for key, value in state.items()} for state in moments]
    handle = trainer.optimizer.weights[3].register_hook(lambda grad: grad * float("inf"))
    result = trainer.step(batch)
    handle.remove()
    assert result.is_skipped
    assert trainer.num_skipped_in_a_row == 1
    assert result.metrics["num_skipped_updates"] == 1.0
    assert all(torch.equal(weight, good[name]) for name, weight in trainer.model.named_parameters())
    for weight, state in zip(trainer.optimizer.weights, kept, strict=True):
        assert all(torch.equal(trainer.optimizer.adam.state[weight][key], value) for key, value in state.items())
    assert trainer.optimizer.num_updates == 1
    assert not trainer.step(batch).is_skipped
    assert trainer.num_skipped_in_a_row == 0


def test_a_sampler_that_is_not_a_number_is_refused(make_trainer, make_batch):
    batch = make_batch(0, groups=1)
    batch[0][0] = batch[0][0].model_copy(update={"term_logprob": (math.nan,) * len(batch[0][0].term_logprob)})
    with pytest.raises(ValueError, match="NaN"):
        make_trainer().step(batch)


def test_mini_batches_clip_against_the_policy_at_the_batch_start(make_trainer, make_batch):
    trainer = make_trainer(num_minibatches=3, learning_rate=0.05)
    result = trainer.step(make_batch(4))
    assert trainer.optimizer.num_updates == 3
    assert result.metrics["ratio_max"] > 1.05
    assert result.metrics["clip_ratio"] > 0


def test_r12_tokens_beyond_the_training_limit_are_cut_and_counted(make_trainer, make_batch, monkeypatch):
    batch = make_batch(1, groups=1)
    result = make_trainer(train_tokens=3).step(batch)
    assert result.metrics["cut_tokens"] > 0
    assert result.metrics["shortened_context_tokens"] > 0
    assert result.metrics["computed_tokens"] < make_trainer().step(batch).metrics["computed_tokens"]


def test_truncated_replies_do_not_train_but_count_in_the_baseline(make_trainer, make_batch):
    batch = make_batch(1, groups=1)
    call = batch[0][0].calls[1]
    batch[0][0] = batch[0][0].model_copy(
        update={"calls": (batch[0][0].calls[0], call.model_copy(update={"is_truncated": True}))}
    )
    masked = make_trainer({"overlong": "mask"}).step(batch).metrics
    plain = make_trainer().step(batch).metrics
    assert masked["trained_tokens"] == plain["trained_tokens"] - call.num_terms
    assert masked["reward_mean"] == plain["reward_mean"]
    assert masked["truncation_ratio"] == plain["truncation_ratio"] > 0


def test_long_episodes_cost_reward(make_trainer, make_batch):
    chosen = {"overlong": "penalty", "overlong_tokens": 3, "overlong_buffer_tokens": 2}
    metrics = make_trainer(chosen).step(make_batch(0, rewards=(1.0, 1.0))).metrics
    assert 0 < metrics["reward_penalty_mean"] <= 1
    assert metrics["zero_advantage_ratio"] < 1


def test_sequences_that_the_sampler_drew_too_differently_are_rejected(make_trainer, make_batch):
    chosen = {"rejection": "geometric", "rejection_floor": 0.5, "rejection_cap": 2.0}
    trainer, batch = make_trainer(chosen), make_batch(1)
    result = trainer.step(batch)
    assert 0 < result.metrics["rejected_ratio"] < 1
    kept = result.metrics["trained_tokens"] / result.metrics["sampled_tokens"]
    assert kept == pytest.approx(1 - result.metrics["rejected_ratio"])


def test_when_everything_is_rejected_nothing_changes(make_trainer, make_batch):
    trainer = make_trainer({"rejection": "sequence", "rejection_floor": 1e8, "rejection_cap": 1e9})
    before = trainer.digest
    result = trainer.step(make_batch(1))
    assert result.digest == before
    assert result.metrics["rejected_ratio"] == 1.0


def test_ratios_may_refer_to_the_sampler_without_another_pass(make_trainer, make_batch, monkeypatch):
    trainer = make_trainer({"proximal": "sampler", "correction": "none"}, num_minibatches=2)
    monkeypatch.setattr(trainer, "_logprobs", lambda *_: pytest.fail("a forward pass that nothing needs"))
    assert trainer.step(make_batch(1)).metrics["ratio_max"] > 1.5


def test_an_entropy_bonus_raises_the_entropy(make_trainer, make_batch):
    found = {}
    for coefficient in (0.0, 1.0):
        trainer = make_trainer({"entropy_coefficient": coefficient}, learning_rate=3e-3)
        found[coefficient] = [trainer.step(make_batch(0)).metrics["entropy"] for _ in range(4)][-1]
    assert found[1.0] > found[0.0]


@pytest.mark.parametrize("preset", ["grpo", "dapo", "dr_grpo", "gspo", "cispo"])
def test_every_preset_learns_the_same_bits_twice(make_trainer, make_batch, preset):
    trainers = [make_trainer({"preset": preset}, num_minibatches=2) for _ in range(2)]
    results = [[trainer.step(make_batch(seed)) for seed in range(2)] for trainer in trainers]
    assert [result.digest for result in results[0]] == [result.digest for result in results[1]]
    assert all(math.isfinite(value) for result in results[0] for value in result.metrics.values())
    assert results[0][0].metrics["grad_norm"] > 0


def test_schedules_warm_up_and_fall(make_trainer, make_batch):
    trainer, batch = make_trainer(num_steps=6, schedule="linear", warmup_steps=2), make_batch(0, groups=1)
    rates = [trainer.step(batch).metrics["learning_rate"] for _ in range(6)]
    assert rates == pytest.approx([0.0, 0.005, 0.01, 0.0075, 0.005, 0.0025])
    with pytest.raises(ConfigError, match="schedule_steps"):
        make_trainer(schedule="cosine")


def test_bfloat16_stays_near_float32(make_trainer, make_batch, monkeypatch):
    batch = make_batch(1)
    exact = torch.cat([grad.flatten() for grad in gradients(make_trainer(), batch, monkeypatch)])
    trainer = make_trainer(precision="bf16")
    trainer.engine_dtype = torch.bfloat16
    rough = torch.cat([grad.flatten() for grad in gradients(trainer, batch, monkeypatch)])
    assert rough.dtype == torch.float32
    assert torch.cosine_similarity(exact, rough, dim=0) > 0.99


def test_engines_load_the_snapshot_under_the_models_own_names(make_trainer, make_batch, model_folder, tmp_path):
    from safetensors.torch import load_file

    trainer = make_trainer()
    trainer.step(make_batch(0))
    snapshot = trainer.engine_weights(tmp_path / "w.safetensors")
    assert snapshot.num_bytes == (tmp_path / "w.safetensors").stat().st_size
    assert snapshot.dtype == "float32"
    engine = AutoModelForCausalLM.from_pretrained(model_folder)
    loaded = engine.load_state_dict(load_file(tmp_path / "w.safetensors"), strict=False)
    assert loaded.unexpected_keys == []
    assert loaded.missing_keys == ["lm_head.weight"]
    for name, weight in trainer.model.named_parameters():
        assert torch.equal(engine.get_parameter(name), weight)
    assert engine.lm_head.weight is engine.model.embed_tokens.weight
    assert [path.name for path in tmp_path.iterdir()] == ["w.safetensors"]


def test_a_missing_model_is_named(tmp_path, make_trainer):
    with pytest.raises(ModelNotFoundError, match="nowhere"):
        Trainer(tmp_path / "nowhere", make_trainer().learner, make_trainer().algorithm)
