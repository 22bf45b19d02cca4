"""Engines that are right, and engines that are wrong on purpose: the watch has to name the fault."""

import random

import pytest
import torch
from made_sample import sample_of_rows

from agentjet.config import AgreementSettings
from agentjet.schemas.sample import Sample
from agentjet.training.agreement_watch import AgreementWatch
from agentjet.training.compared_term import choose_terms
from agentjet.training.trainer import Trainer

VOCAB = 61


def unread(seed: int, *, engine: str = "good", temperature: float = 1.0, **call) -> Sample:
    """Three calls of forty tokens by one engine, without log-probs."""
    rng = random.Random(seed)
    rows = [([1, 2, 3], [rng.randrange(VOCAB) for _ in range(40)]) for _ in range(3)]
    fields = {"engine": engine, "temperature": temperature, "versions": ("1-4",), **call}
    return sample_of_rows(rows, calls=[fields] * 3, member=seed)


def told(sample: Sample, logprob: torch.Tensor) -> Sample:
    return sample.model_copy(update={"term_logprob": tuple(logprob.tolist())})


def drawn(trainer: Trainer, seed: int, **fields) -> Sample:
    """As an engine with the trainer's weights reports it."""
    sample = unread(seed, **fields)
    return told(sample, trainer.logprobs([sample])[0])


def watch(trainer: Trainer, **settings) -> AgreementWatch:
    return AgreementWatch("game", AgreementSettings(**settings), trainer)


def is_current(version: str) -> bool:
    return version == "1-4"


def test_l1_an_engine_with_the_same_weights_agrees(make_trainer):
    trainer = make_trainer()
    one = watch(trainer)
    figures = one.compare([drawn(trainer, 0), drawn(trainer, 1, temperature=0.6)], 4, is_current)
    assert figures["agreement_num_tokens"] == 240
    assert figures["agreement_max_nats"] <= 1e-5
    assert figures["agreement_outside_ratio"] == 0
    assert one.problems() == []
    assert one.metrics()["agreement_step"] == 4


def test_an_engine_that_reports_raw_log_probs_is_named(make_trainer):
    trainer = make_trainer()
    raw = told(unread(0, engine="bad", temperature=0.6), trainer.logprobs([unread(0)])[0])
    one = watch(trainer)
    one.compare([raw, drawn(trainer, 1, temperature=0.6)], 4, is_current)
    (problem,) = one.problems()
    assert problem.startswith("engine bad and the learner of model game disagree on 120 tokens")
    assert "processed_logprobs" in problem


def test_l2_an_engine_that_divides_log_probs_is_named(make_trainer):
    trainer = make_trainer()
    wrong = told(unread(0, temperature=0.6), trainer.logprobs([unread(0)])[0] / 0.6)
    one = watch(trainer)
    one.compare([wrong], 4, is_current)
    assert "divided by the temperature" in one.problems()[0]


def test_an_engine_that_keeps_older_weights_is_named_and_forgiven_when_it_has_loaded(make_trainer, make_batch):
    trainer = make_trainer()
    one = watch(trainer)
    one.compare([drawn(trainer, 0)], 4, is_current)
    stale = drawn(trainer, 1)
    trainer.step(make_batch(0))
    one.compare([stale], 5, is_current)
    assert "holds older weights than it says" in one.problems()[0]
    assert one.is_due(6)
    one.compare([drawn(trainer, 1)], 6, is_current)
    assert one.problems() == []
    assert not one.is_due(7)


def test_an_engine_in_bfloat16_where_float32_is_expected_is_named(make_trainer):
    trainer, rounded = make_trainer(), make_trainer()
    rounded.dtype = rounded.engine_dtype = torch.bfloat16
    one = watch(trainer)
    figures = one.compare([drawn(rounded, 0)], 4, is_current)
    assert 2e-4 < figures["agreement_mean_nats"] < 0.06
    assert "bfloat16" in one.problems()[0]
    assert "models.game.engine.dtype" in one.problems()[0]


def test_an_engine_with_other_weights_from_the_start_is_told_as_it_is(make_trainer, make_batch):
    trainer, other = make_trainer(), make_trainer(learning_rate=0.2)
    other.step(make_batch(0))
    one = watch(trainer)
    one.compare([drawn(other, 0, temperature=0.6)], 4, is_current)
    assert "version that it loaded last" in one.problems()[0]


def test_bounds_can_be_set_and_few_tokens_are_not_judged(make_trainer):
    trainer = make_trainer()
    sample = drawn(trainer, 0)
    moved = told(sample, torch.tensor(sample.term_logprob) + 0.01)
    wide = watch(trainer, max_mean_nats=0.02, max_p999_nats=0.02, max_nats=0.02)
    assert wide.compare([moved], 4, is_current)["agreement_mean_nats"] == pytest.approx(0.01, abs=1e-4)
    assert wide.problems() == []
    few = sample_of_rows([([1, 2], [3, 4])], logprobs=[-50.0, -50.0], calls=[{"versions": ("1-4",)}])
    one = watch(trainer)
    assert one.compare([few], 4, is_current)["agreement_max_nats"] > 10
    assert one.problems() == []


def test_only_tokens_of_the_weights_at_hand_are_compared(make_trainer):
    trainer = make_trainer()
    one = watch(trainer)
    assert one.compare([unread(0, versions=("1-3",))], 4, is_current) == {}
    assert one.is_due(5)
    assert one.metrics() == {}
    cut = drawn(trainer, 1, versions=("1-3", "1-4"), version_starts=(0, 30))
    logprob = [value if place % 40 >= 30 else -90.0 for place, value in enumerate(cut.term_logprob)]
    figures = one.compare([cut.model_copy(update={"term_logprob": tuple(logprob)})], 5, is_current)
    assert figures["agreement_num_tokens"] == 30
    assert figures["agreement_max_nats"] <= 1e-5


def test_tokens_that_rest_on_keys_of_older_weights_are_not_compared(make_trainer):
    cut = drawn(make_trainer(), 1, versions=("1-4", "1-4"), version_starts=(0, 30), is_mixed=(False, True))
    assert choose_terms([cut], is_current, 400).place.tolist() == [
        place for place in range(len(cut.term_logprob)) if place % 40 < 30
    ]


def test_every_engine_gets_its_share_of_the_tokens():
    samples = [unread(seed, engine="a") for seed in range(6)] + [unread(seed, engine="b") for seed in range(6)]
    terms = choose_terms(samples, is_current, 400)
    assert terms.engines == ["a", "b"]
    assert terms.of("a").sum() == terms.of("b").sum() == 240


def test_every_engine_of_many_gets_tokens_enough_to_be_judged():
    samples = [unread(seed, engine=f"e{seed % 40}") for seed in range(80)]
    terms = choose_terms(samples, is_current, 400, least=64)
    assert {int(terms.of(engine).sum()) for engine in terms.engines} == {120}
    assert len(terms.engines) == 40


def wrong(trainer: Trainer, seed: int, **fields) -> Sample:
    sample = drawn(trainer, seed, **fields)
    return told(sample, torch.tensor(sample.term_logprob) - 3)


def test_too_few_tokens_neither_end_an_alarm_nor_count_as_agreement(make_trainer):
    trainer = make_trainer()
    one = watch(trainer)
    one.compare([wrong(trainer, 0, engine="bad")], 4, is_current)
    few = sample_of_rows([([1, 2], [3, 4])], logprobs=[-4.0, -4.0], calls=[{"versions": ("1-4",), "engine": "bad"}])
    one.compare([few], 5, is_current)
    assert one.problems()[0].startswith("engine bad")
    assert one.is_due(6)
    one.compare([wrong(trainer, 0, engine="bad")], 6, is_current)
    assert "it agreed before" not in one.problems()[0]


def test_an_alarm_ends_with_its_engine(make_trainer):
    """One that was started again has a new name, under which it is judged anew."""
    trainer = make_trainer()
    one = watch(trainer)
    one.compare([wrong(trainer, 0, engine="bad-1")], 4, is_current)
    for step in (5, 6):
        one.compare([drawn(trainer, 0, engine="bad-2")], step, is_current)
        assert one.problems(), "it may just have drawn nothing"
    one.compare([drawn(trainer, 0, engine="bad-2")], 7, is_current)
    assert one.problems() == []
    assert not one.is_due(8)


def test_comparisons_come_every_so_many_steps_and_can_be_turned_off(make_trainer):
    trainer = make_trainer()
    one = watch(trainer, every_steps=3)
    assert one.is_due(0)
    one.compare([drawn(trainer, 0)], 0, is_current)
    assert [one.is_due(step) for step in (1, 2, 3)] == [False, False, True]
    assert not watch(trainer, every_steps=0).is_due(0)


def test_a_comparison_changes_nothing_in_the_step_after_it(make_trainer, make_batch):
    looked, other = make_trainer(), make_trainer()
    watch(looked).compare([unread(0)], 4, is_current)
    assert looked.step(make_batch(0)).digest == other.step(make_batch(0)).digest
