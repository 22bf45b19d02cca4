import time
from dataclasses import replace

import pytest
from made_issue import group_issue
from rich.console import Console

from agentjet.accounting.ledger import LedgerView
from agentjet.bus.protocol import StreamInfo
from agentjet.bus.record import put, stream_specs
from agentjet.schemas import subject
from agentjet.schemas.codec import encode
from agentjet.schemas.ids import RunId
from agentjet.schemas.ledger import CurriculumStart, GroupIssue, LearnerStart, LearnerStep, RunFinish
from agentjet.schemas.presence import Presence, Waiting
from agentjet.schemas.subject import Stream
from agentjet.ui.status import Facts, assess, fetch
from agentjet.ui.status_table import render

RUN = RunId("r-abcdef")
KINDS = ("checkpoint", "curriculum", "merger", "reward", "rollout")


def presence(actor: str, *models: str, **changes) -> Presence:
    fields = {"run": RUN, "actor": actor, "name": f"host-{actor}", "models": models, "host": "host", "pid": 1}
    return Presence(**(fields | {"started": 100.0, "state": "busy"} | changes))


def start(model: str = "small") -> LearnerStart:
    return LearnerStart(run=RUN, model=model, incarnation=1, base_step=0, cursor=0, config_digest="", fold_digest="")


def step(number: int, model: str = "small") -> LearnerStep:
    return LearnerStep(
        run=RUN, model=model, incarnation=1, step=number, cursor=0, members=(), groups=(), digest="", metrics={}
    )


def ledger(*steps: int) -> LedgerView:
    view = LedgerView()
    view.apply(1, start())
    for number in steps:
        view.apply(number + 1, step(number))
    return view


def whole(**changes) -> Facts:
    actors = [presence(kind) for kind in KINDS]
    actors += [presence("learner", "small"), presence("inference", "small", info={"version": "1-2"})]
    return replace(Facts(RUN, 160.0, tuple(actors), {}, {"small": ledger(1, 2, 3)}), **changes)


def without(actor: str) -> Facts:
    facts = whole()
    return replace(facts, presences=tuple(one for one in facts.presences if one.actor != actor))


def test_whole_swarm_has_no_problem():
    assert assess(whole()).problems == ()


def test_a14_status_says_in_one_line_that_no_learner_is_attached():
    assert assess(without("learner")).problems == (
        "no learner is attached to model small: its samples are kept and wait",
    )


@pytest.mark.parametrize("actor", KINDS)
def test_absent_actor_is_one_line(actor):
    (problem,) = assess(without(actor)).problems
    assert problem.startswith(f"no {actor} ")
    assert " is attached: " in problem


def test_a_run_that_is_stopped_is_one_line():
    assert assess(whole(presences=())).problems == (
        "no actor is alive: the run is stopped, and `agentjet up` goes on with it",
    )


def test_what_actors_say_needs_a_person_is_a_problem_said_once():
    curriculum = [presence("curriculum", problems=("the last 40 episodes failed",), name=name) for name in "ab"]
    facts = without("curriculum")
    assert assess(replace(facts, presences=(*facts.presences, *curriculum))).problems == (
        "the last 40 episodes failed",
    )


def test_a13_lost_engine_is_visible():
    status = assess(without("inference"))
    assert status.problems == ("no engine serves model small: its calls wait",)
    assert status.models[0].staleness_steps is None


def test_a13_lost_engine_is_told_with_its_age_and_the_calls_that_wait():
    questions = StreamInfo("AJ_r_INFER", 3, 9, 100, 1, 3, 150.0, {"infer-small-any": 3})
    seen = presence("curriculum", info={"last_seen": {"inference small": 148.0, "learner small": 30.0}})
    facts = without("inference")
    others = tuple(one for one in facts.presences if one.actor not in ("curriculum", "learner"))
    facts = replace(
        facts,
        presences=(*others, seen),
        streams={Stream.INFER: questions},
        oldest={Stream.INFER: {"infer-small-any": 151.0}},
    )
    assert assess(facts).problems == (
        "no learner is attached to model small: learner lost 2 min 10 s ago, its samples are kept and wait",
        "no engine serves model small: engine lost 12 s ago, 3 calls waiting, the oldest for 9 s",
    )


def test_slow_and_dead_consumers_are_named_with_their_age():
    ends = StreamInfo("AJ_r_EPISODES", 9, 9, 100, 1, 9, 150.0, {"reward": 7})
    scores = StreamInfo("AJ_r_SCORES", 9, 9, 100, 1, 9, 150.0, {"merger": 1})
    slow = {Stream.EPISODES: {"reward": 100.0}, Stream.SCORES: {"merger": 159.0}}
    facts = whole(streams={Stream.EPISODES: ends, Stream.SCORES: scores}, oldest=slow)
    status = assess(facts)
    assert status.problems == ("consumer reward of EPISODES is slow: 7 messages waiting, the oldest for 1 min 00 s",)
    assert [stream.waiting_seconds for stream in status.streams] == [{"reward": 60.0}, {"merger": 1.0}]
    dead = replace(facts, presences=tuple(one for one in facts.presences if one.actor not in ("reward", "merger")))
    assert assess(dead).problems == (
        "no reward actor is attached: ended episodes are not scored; 7 messages waiting, the oldest for 1 min 00 s",
        "no merger is attached: scored episodes do not reach the learners; 1 message waiting, the oldest for 1 s",
    )


def test_model_that_is_only_served_needs_no_learner():
    facts = whole()
    judge = presence("inference", "judge")
    assert assess(replace(facts, presences=(*facts.presences, judge))).problems == ()


def test_finished_run_misses_nobody():
    assert assess(Facts(RUN, 0.0, ledgers={"small": ledger(1)}, finish_reason="3 steps")).problems == ()


def test_staleness_is_that_of_the_oldest_engine():
    facts = whole()
    newer = presence("inference", "small", name="other", info={"version": "1-3"})
    (model,) = assess(replace(facts, presences=(*facts.presences, newer))).models
    assert (model.step, model.version, model.staleness_steps) == (3, "1-3", 1)
    assert model.engines == {"host-inference": "1-2", "other": "1-3"}


def test_full_stream_is_a_problem_even_after_the_end():
    info = StreamInfo("AJ_r_CALLS", 10, 90, 100, 1, 10, 150.0, {"merger": 3})
    status = assess(whole(streams={Stream.CALLS: info}, finish_reason="done"))
    assert "AJ_r_CALLS is 90% full" in status.problems[0]
    assert (status.streams[0].age_seconds, status.streams[0].consumers) == (10.0, {"merger": 3})


def test_events_that_fill_their_stream_hold_nobody_up():
    info = StreamInfo("AJ_r_EVENTS", 10, 100, 100, 1, 10, 150.0)
    assert assess(whole(streams={Stream.EVENTS: info})).problems == ()


def test_waits_have_their_age():
    wait = Waiting(what="samples for step 4", since=130.0, unblocked_by="rollouts")
    status = assess(Facts(RUN, 160.0, (presence("learner", "small", waiting=(wait,)),)))
    assert status.actors[0].waiting[0].seconds == 30.0
    assert status.actors[0].up_seconds == 60.0


def test_status_names_an_engine_that_disagrees_and_says_when_they_were_compared():
    bad = "engine e and the learner of model small disagree on 120 tokens"
    metrics = {"agreement_mean_nats": 0.25, "agreement_step": 40.0}
    facts = without("learner")
    learner = presence("learner", "small", metrics=metrics, problems=(bad,))
    status = assess(replace(facts, presences=(*facts.presences, learner)))
    assert status.problems == (bad,)
    assert (status.models[0].agreement_nats, status.models[0].agreement_step) == (0.25, 40)
    console = Console(record=True, width=200)
    with console.capture() as capture:
        console.print(render(status))
    assert "2.5e-01 nats (step 40)" in capture.get()


def test_engines_that_were_not_compared_yet_are_told_as_such():
    assert assess(whole()).models[0].agreement_step is None


def test_table_shows_problem_wait_and_version():
    wait = Waiting(what="samples for step 4", since=100.0, unblocked_by="rollouts")
    facts = replace(without("rollout"), streams={Stream.CALLS: StreamInfo("AJ_r_CALLS", 1, 1, 9, 1, 1, 0.0)})
    facts = replace(facts, presences=(*facts.presences, presence("learner", "small", waiting=(wait,))))
    console = Console(record=True, width=200, file=None, quiet=False)
    with console.capture() as capture:
        console.print(render(assess(facts)))
    text = capture.get()
    for part in (
        "no rollout is attached",
        "samples for step 4 (1 min 00 s), by rollouts",
        "host-inference (1-2)",
        "CALLS",
    ):
        assert part in text


async def test_facts_come_from_presence_streams_and_ledger(memory_bus):
    for spec in stream_specs(RUN, max_bytes=2**26):
        await memory_bus.ensure_stream(spec)
    await memory_bus.consumer(f"AJ_{RUN}_EPISODES", "reward")
    await memory_bus.consumer(f"AJ_{RUN}_LEDGER", "reader")
    _, body = encode(presence("learner", "small"))
    await memory_bus.put_presence(subject.presence_bucket(RUN), "learner.x", body, ttl_seconds=60)
    await memory_bus.put_presence(subject.presence_bucket(RUN), "learner.y", b"of the future", ttl_seconds=60)
    for who, record in (
        ("curriculum", CurriculumStart(run=RUN, incarnation=1, config_digest="")),
        ("curriculum", issue({"small": 0, "other": 0})),
        ("small", start()),
        ("small", step(1)),
        ("curriculum", RunFinish(run=RUN, reason="1 step")),
    ):
        await put(memory_bus, RUN, Stream.LEDGER, subject.ledger(RUN, who), record)
    facts = await fetch(memory_bus, RUN)
    assert [one.actor for one in facts.presences] == ["learner"]
    assert facts.streams[Stream.LEDGER].num_messages == 5
    assert facts.streams[Stream.EPISODES].consumers == {"reward": 0}
    assert (facts.oldest[Stream.EPISODES], list(facts.oldest[Stream.LEDGER])) == ({}, ["reader"])
    assert abs(facts.oldest[Stream.LEDGER]["reader"] - time.time()) < 60
    assert (facts.ledgers["small"].num_steps, set(facts.ledgers)) == (1, {"small", "other"})
    assert facts.finish_reason == "1 step"


async def test_run_that_is_being_set_up_has_no_streams_yet(memory_bus):
    facts = await fetch(memory_bus, RUN)
    assert (facts.streams, facts.ledgers) == ({}, {})


def issue(ranks: dict[str, int]) -> GroupIssue:
    return group_issue(RUN, models=tuple(ranks), ranks=ranks, seed=0)
