"""A step's loss without a model: log-probs are drawn, so that any batch can be split and turned around at will."""

import math
import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made_sample import sample_of_rows

from agentjet.algorithm.advantage import batch_advantages
from agentjet.config import AlgorithmSettings
from agentjet.config.algorithm import PRESETS
from agentjet.schemas.sample import Sample
from agentjet.training.objective import PackObjective
from agentjet.training.step_batch import StepBatch

torch.set_num_threads(1)

Names = dict[str, torch.Tensor]
"""[terms] by ticket."""

CASES: dict[str, dict[str, object]] = {
    **{name: {"preset": name} for name in PRESETS},
    "whitened": {"advantage": "reinforce++", "kl": "k1", "kl_coefficient": 0.1},
    "whitened_groups": {"advantage": "reinforce++_baseline", "kl": "k2", "kl_coefficient": 0.1},
    "long_sequences": {"preset": "gspo", "sequence": "episode", "correction": "sequence_tis"},
    "gated": {"loss": "sapo", "advantage": "maxrl", "entropy_coefficient": 0.01, "correction": "icepop"},
    "rejecting": {"rejection": "geometric", "rejection_floor": 0.8, "rejection_cap": 1.25, "overlong": "mask"},
    "rejecting_episodes": {"rejection": "sequence", "sequence": "episode", "advantage": "rloo"},
    "calls": {"credit": "call", "discount": 0.9, "kl": "k1", "kl_coefficient": 0.1, "preset": "gspo"},
    "whitened_calls": {"credit": "call", "advantage": "reinforce++", "drop_constant_groups": True},
    "decoupled_no_more": {"proximal": "sampler", "correction": "none", "std": "population"},
}


@dataclass(frozen=True)
class Outcome:
    """Everything a step would do."""

    loss: float
    gradients: Names
    entropy_gradients: Names
    figures: dict[str, float]


def make_sample(group: int, member: int, rng: random.Random) -> Sample:
    history = [group, 1]
    rows = []
    for _ in range(rng.randrange(1, 4)):
        reply = [rng.randrange(5) for _ in range(rng.randrange(1, 6))]
        rows.append((list(history), reply))
        history = [group, rng.randrange(5)] if rng.random() < 0.3 else [*history, *reply, 3]
    return sample_of_rows(
        rows,
        logprobs=[-0.1 - 2 * rng.random() for _, reply in rows for _ in reply],
        calls=[
            {
                "agent": rng.choice(["guide", "player"]),
                "is_truncated": rng.random() < 0.2,
                "reward": rng.random() if group else None,
            }
            for _ in rows
        ],
        group=group,
        member=member,
        reward=rng.choice([0.0, 1.0, 0.25]),
        agent_rewards={"guide": rng.random()} if rng.random() < 0.3 else {},
    )


def make_batch(seed: int) -> list[list[Sample]]:
    rng = random.Random(seed)
    return [[make_sample(group, member, rng) for member in range(rng.randrange(2, 5))] for group in range(3)]


def near(batch: list[list[Sample]], seed: int, spread: float) -> Names:
    """Log-probs of another policy for every term as sampled."""
    rng = torch.Generator().manual_seed(seed)
    return {
        sample.ticket: torch.tensor(sample.term_logprob) + spread * torch.randn(len(sample.term_logprob), generator=rng)
        for group in batch
        for sample in group
    }


def outcome(
    batch: list[list[Sample]], algorithm: AlgorithmSettings, budget: int, looked_up: dict[str, Names]
) -> Outcome:
    """One update: reject, score, weigh, and sum over packs, whose terms know their place in the sample as sampled."""
    ready = StepBatch(batch, algorithm, train_tokens=0)
    left = {sample.ticket: places_left(batch, sample) for group in ready.groups for sample in group}

    def of_members(names: Names, members: list[tuple[int, int]]) -> dict[tuple[int, int], torch.Tensor]:
        return {one: names[ready.sample(one).ticket][left[ready.sample(one).ticket]] for one in members}

    proximal = of_members(looked_up["proximal"], ready.members)
    if algorithm.rejection != "none":
        proximal = ready.reject(proximal)
        left = {sample.ticket: places_left(batch, sample) for group in ready.groups for sample in group}
    reference = of_members(looked_up["reference"], ready.members) if algorithm.kl != "none" else {}
    ready.score(reference)
    weights = ready.weights(range(len(ready.groups)))
    total, gradients, entropy_gradients = 0.0, Names(), Names()
    for packed in ready.packs(ready.live, budget):
        samples = [ready.sample(member) for member in packed]
        logprob = torch.cat(list(of_members(looked_up["policy"], packed).values())).requires_grad_()
        entropy = logprob.detach().abs().requires_grad_()
        objective = PackObjective(
            samples,
            [ready.advantage(member) for member in packed],
            [weights[member] for member in packed],
            proximal=torch.cat([proximal[member] for member in packed]),
            reference=torch.cat([reference[member] for member in packed]) if reference else None,
            settings=algorithm,
            device=torch.device("cpu"),
        )
        loss = objective(logprob, entropy)
        assert torch.equal(objective(logprob, entropy), loss)
        loss.backward()
        total += loss.item()
        lengths = [len(sample.term_logprob) for sample in samples]
        for found, leaf in ((gradients, logprob), (entropy_gradients, entropy)):
            grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            found.update(zip((sample.ticket for sample in samples), grad.split(lengths), strict=True))
    return Outcome(total, gradients, entropy_gradients, ready.figures())


def places_left(batch: list[list[Sample]], kept: Sample) -> list[int]:
    """Places of a sample's remaining terms among those it was sampled with."""
    (whole,) = [sample for group in batch for sample in group if sample.ticket == kept.ticket]
    places, start = [], 0
    for before, after in zip(whole.calls, kept.calls, strict=True):
        places += range(start, start + after.num_terms)
        start += before.num_terms
    return places


def assert_same(one: Outcome, other: Outcome) -> None:
    assert one.loss == pytest.approx(other.loss, rel=1e-4, abs=1e-6)
    assert one.figures == pytest.approx(other.figures)
    for ours, theirs in ((one.gradients, other.gradients), (one.entropy_gradients, other.entropy_gradients)):
        assert ours.keys() == theirs.keys()
        for ticket, gradient in ours.items():
            torch.testing.assert_close(gradient, theirs[ticket], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("case", list(CASES))
@settings(max_examples=10)
@given(seed=st.integers(0, 10_000), budget=st.integers(1, 60))
def test_the_loss_depends_neither_on_packs_nor_on_the_order_of_members(case, seed, budget):
    algorithm, batch, rng = AlgorithmSettings.model_validate(CASES[case]), make_batch(seed), random.Random(seed)
    looked_up = {name: near(batch, seed + i, 0.3) for i, name in enumerate(("policy", "proximal", "reference"))}
    whole = outcome(batch, algorithm, 10_000, looked_up)
    turned = [rng.sample(group, len(group)) for group in rng.sample(batch, len(batch))]
    assert_same(outcome(turned, algorithm, budget, looked_up), whole)


def test_a_steps_loss_is_the_plain_sum_over_its_terms():
    algorithm = AlgorithmSettings.model_validate(
        {
            "aggregation": "token_mean",
            "kl": "k3",
            "kl_coefficient": 0.3,
            "entropy_coefficient": 0.2,
            "std": "population",
        }
    )
    batch = make_batch(7)
    looked_up = {name: near(batch, 7 + i, 0.6) for i, name in enumerate(("policy", "proximal", "reference"))}
    total, count = 0.0, 0
    for group, rows in zip(batch, batch_advantages(batch, algorithm), strict=True):
        for sample, row in zip(group, rows, strict=True):
            advantages = [a for a, call in zip(row, sample.calls, strict=True) for _ in range(call.num_terms)]
            found = (looked_up[name][sample.ticket].tolist() for name in ("policy", "proximal", "reference"))
            for a, now, proximal, reference, sampler in zip(advantages, *found, sample.term_logprob, strict=True):
                ratio, gap = math.exp(now - proximal), reference - now
                loss = max(-a * ratio, -a * min(max(ratio, 0.8), 1.2))
                loss = min(loss, -3 * a) if a < 0 else loss
                loss += 0.3 * ratio * (math.exp(gap) - 1 - gap)
                total += min(math.exp(proximal - sampler), 2.0) * loss - 0.2 * abs(now)
                count += 1
    assert outcome(batch, algorithm, 30, looked_up).loss == pytest.approx(total / count, rel=1e-5)


def test_rewards_of_single_calls_pay_for_their_divergence_before_they_become_advantages():
    rows = [([1], [2, 3]), ([1, 2, 3, 4], [5])]
    group = [
        sample_of_rows(rows, calls=[{"reward": a}, {"reward": b}], member=member)
        for member, (a, b) in enumerate([(1.0, 0.0), (0.0, 3.0)])
    ]
    algorithm = AlgorithmSettings(credit="call", advantage="centred", kl="k1", kl_coefficient=0.5)
    ready = StepBatch([group], algorithm, train_tokens=0)
    # Sampler less reference is 2 + 2 and 4 in the first sample, 0 in the second: its rewards become -1 and -2.
    ready.score({(0, 0): torch.tensor([-2.0, -2.0, -4.0]), (0, 1): torch.zeros(3)})
    assert ready.advantages == [[[-3.0, -2.0], [3.0, 3.0]]]


def test_groups_without_rewards_of_single_calls_are_counted_where_these_are_asked_for():
    batch = make_batch(4)
    looked_up = dict.fromkeys(("policy", "proximal", "reference"), near(batch, 0, 0.1))
    figures = outcome(batch, AlgorithmSettings(credit="call"), 10_000, looked_up).figures
    assert figures["no_call_rewards_ratio"] == pytest.approx(1 / 3)
    assert "no_call_rewards_ratio" not in outcome(batch, AlgorithmSettings(), 10_000, looked_up).figures


def test_an_entropy_bonus_pulls_with_the_weight_of_each_term():
    algorithm = AlgorithmSettings.model_validate({"entropy_coefficient": 0.5, "aggregation": "token_mean"})
    batch = make_batch(3)
    found = outcome(batch, algorithm, 10_000, dict.fromkeys(("policy", "proximal", "reference"), near(batch, 0, 0.1)))
    gradients = torch.cat(list(found.entropy_gradients.values()))
    torch.testing.assert_close(gradients, torch.full_like(gradients, -0.5 / len(gradients)))


def with_a_broken_second_call() -> list[list[Sample]]:
    rows = [([1], [2, 3]), ([1, 2, 3, 4], [5])]
    return [
        [
            sample_of_rows(rows, logprobs=[-1.0, -1.0, math.nan], calls=[{}, {"is_truncated": True}], reward=reward)
            for reward in (0.0, 1.0)
        ]
    ]


def objective_of(algorithm: AlgorithmSettings, batch: list[list[Sample]]) -> tuple[PackObjective, int]:
    """Of the whole batch as one pack, and its number of terms."""
    ready = StepBatch(batch, algorithm, train_tokens=0)
    ready.score({})
    weights, members = ready.weights(range(len(batch))), ready.members
    samples = [ready.sample(member) for member in members]
    objective = PackObjective(
        samples,
        [ready.advantage(member) for member in members],
        [weights[member] for member in members],
        proximal=None,
        reference=None,
        settings=algorithm,
        device=torch.device("cpu"),
    )
    return objective, sum(len(sample.term_logprob) for sample in samples)


def test_l5_nan_of_a_term_that_does_not_train_reaches_neither_value_nor_gradient():
    objective, num_terms = objective_of(AlgorithmSettings(overlong="mask"), with_a_broken_second_call())
    logprob = torch.full((num_terms,), -1.0, requires_grad=True)
    loss = objective(logprob, torch.zeros(num_terms))
    loss.backward()
    assert (num_terms, logprob.grad is not None) == (4, True)
    assert math.isfinite(loss.item())
    assert torch.isfinite(logprob.grad).all()


@pytest.mark.parametrize("correction", ["none", "tis", "icepop", "sequence_tis"])
def test_l5_nan_of_a_term_that_trains_is_refused(correction):
    with pytest.raises(ValueError, match="NaN"):
        objective_of(AlgorithmSettings(correction=correction), with_a_broken_second_call())


def test_rejected_and_masked_terms_leave_the_denominators():
    batch = make_batch(5)
    looked_up = dict.fromkeys(("policy", "proximal", "reference"), near(batch, 0, 0.5))
    algorithm = AlgorithmSettings.model_validate(
        {**CASES["rejecting"], "loss": "reinforce", "aggregation": "token_mean"}
    )
    figures = outcome(batch, algorithm, 10_000, looked_up).figures
    plain = outcome(batch, AlgorithmSettings(), 10_000, looked_up).figures
    assert 0 < figures["rejected_ratio"] < 1
    assert figures["trained_tokens"] < plain["trained_tokens"]
    ready = StepBatch(batch, algorithm, train_tokens=0)
    tickets = {member: ready.sample(member) for member in ready.members}
    ready.reject({m: looked_up["proximal"][one.ticket][places_left(batch, one)] for m, one in tickets.items()})
    weights = ready.weights(range(len(batch)))
    total = sum(
        call.num_terms * weight
        for member, row in weights.items()
        for call, weight in zip(ready.sample(member).calls, row, strict=True)
    )
    assert total == pytest.approx(1.0)
