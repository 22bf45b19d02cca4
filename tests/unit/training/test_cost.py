"""Costs of packs, and what the trainer tells of them."""

import pytest

from agentjet.merging.flop import ModelShape
from agentjet.training import attention_plan
from agentjet.training.cost import Cost, pack_cost
from agentjet.training.tree_forward import tree_input

SHAPE = ModelShape(
    num_layers=2,
    hidden_size=8,
    intermediate_size=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=2,
    vocab_size=50,
    windows=(0, 3),
)


def test_a_plan_without_hidden_pairs_reaches_the_bound(make_batch, monkeypatch):
    monkeypatch.setattr(attention_plan, "RUN_TOKENS", 1)
    monkeypatch.setattr(attention_plan, "GRID_TOKENS", 1)
    samples = make_batch(0, groups=1)[0]
    cost = pack_cost(SHAPE, samples, *tree_input(samples))
    assert cost.executed == cost.tree < cost.rows
    assert cost.figures()["bound_share"] == 1.0


def test_hidden_pairs_and_a_walk_cost_a_share_of_the_bound(make_batch):
    samples = make_batch(0, groups=1)[0]
    whole = pack_cost(SHAPE, samples, *tree_input(samples))
    assert whole.tree < whole.executed
    walked = pack_cost(SHAPE, samples, *tree_input(samples, stretch_tokens=lambda forest: 8))
    assert walked.tree / walked.executed <= 0.75


def test_costs_add_up():
    total = Cost()
    assert total.figures() == {}
    total.add(Cost(6.0, 2.0, 3.0))
    total.add(Cost(6.0, 2.0, 2.0))
    assert total.figures() == {"flop_ratio": 3.0, "bound_share": pytest.approx(0.8)}


def test_n3_a_tree_larger_than_memory_is_kept_whole_and_walked(make_trainer, make_batch):
    batch = make_batch(0)
    whole, walked = make_trainer(), make_trainer(activation_gib=1e-9)
    results = [trainer.step(batch) for trainer in (whole, walked)]
    assert results[0].metrics["bound_share"] > results[1].metrics["bound_share"]
    assert results[1].metrics["cut_tokens"] == 0.0
    assert results[0].metrics["flop_ratio"] == results[1].metrics["flop_ratio"] > 1
    for name in ("loss", "entropy", "grad_norm"):
        assert results[1].metrics[name] == pytest.approx(results[0].metrics[name], rel=1e-4, abs=1e-6)
