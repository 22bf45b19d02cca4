"""When a group is judged and what its members are worth then: pure decisions."""

import itertools

import pytest
from judged_group import GROUP, end

from agentjet.errors import RewardError
from agentjet.reward.judge import MAX_REASON, verdicts
from agentjet.reward.panel import NOT_JUDGED, Panel, settles_slot
from agentjet.reward.scorer import unscored
from agentjet.schemas.episode import PROMPT_TOO_LONG, EndStatus
from agentjet.schemas.judgement import Judgement
from agentjet.schemas.score import Outcome

CALLS = [{"m": ["c"]}] * 2
COMPLETED, FAILED, ABORTED, DEAD = EndStatus.COMPLETED, EndStatus.FAILED, EndStatus.ABORTED, EndStatus.DEAD


@pytest.mark.parametrize(
    ("one", "is_settled"),
    [
        (end(0), True),
        (end(0, DEAD), True),
        (end(0, FAILED), False),
        (end(0, ABORTED, offer=1), False),
        (end(0, FAILED, offer=2), True),
        (end(0, ABORTED, offer=2), True),
        (end(0, FAILED, kind=PROMPT_TOO_LONG), True),
    ],
)
def test_a_slot_has_settled_exactly_when_no_further_offer_of_it_comes(one, is_settled):
    assert settles_slot(one) is is_settled
    score = unscored(one)
    assert score is None or score.closes_slot is is_settled, "the curriculum offers again by the same rule"


def test_a_group_waits_for_the_members_without_a_settled_slot_in_any_order_of_arrival():
    ends = [end(0, size=4), end(1, FAILED, size=4), end(1, offer=1, size=4), end(2, FAILED, size=4)]
    for order in itertools.permutations(ends):
        assert Panel(order).num_open == 2
    last = [end(2, ABORTED, offer=1, size=4), end(2, FAILED, offer=2, size=4), end(3, DEAD, size=4)]
    assert Panel([*ends, *last]).num_open == 0
    assert [one.ticket.id for one in Panel([*last, *ends]).completed] == ["p-0.0.0", "p-0.1.1"]


def test_a_judge_is_told_the_task_once_and_of_each_completed_episode_its_member_and_own_reward():
    panel = Panel([end(2, result="b", size=3), end(0, result="a", reward=0.5, size=3), end(1, DEAD, size=3)])
    question = panel.question()
    assert question["task"] == {"answer": "4"}
    told = [(one["member"], one["result"], one["reward"], one["num_calls"]) for one in question["episodes"]]
    assert told == [(0, "a", 0.5, 1), (2, "b", None, 1)]


def test_scores_are_the_judgements_and_the_ends_and_nothing_else():
    panel = Panel([end(0, metrics={"turns": 2.0}), end(1)])
    answer = verdicts([{"reward": 1, "metrics": {"n": 3}, "agent_rewards": {"a": 2}, "components": {"c": 4}}, 0], CALLS)
    judgement = panel.judged("j.py:judge", answer)
    judgement = Judgement.model_validate(judgement.model_dump())
    one, two = panel.scores(judgement)
    assert (one.outcome, one.reward, one.metrics) == (Outcome.SCORED, 1.0, {"turns": 2.0, "n": 3.0})
    assert (one.agent_rewards, one.components, one.judged_by) == ({"a": 2.0}, {"c": 4.0}, "j.py:judge")
    assert (one.calls, one.attempt, one.ticket.task) == ({"m": ("c",)}, 3, {})
    assert (two.outcome, two.reward) == (Outcome.SCORED, 0.0)
    assert (judgement.group, [one.ticket for one in judgement.verdicts]) == (GROUP, ["p-0.0.0", "p-0.1.0"])


def test_a_member_without_a_verdict_is_dead_and_never_offered_again_or_worth_zero():
    panel = Panel([end(0), end(1)])
    judged = panel.scores(panel.judged("j", verdicts([None, {"reward": None, "reason": "unreadable"}], CALLS)))
    given_up = panel.scores(panel.unjudged("j", "ValueError: " + "x" * 10_000))
    unknown = panel.scores(Judgement(run=panel.ends[0].run, group=GROUP, judge="j", verdicts=()))
    for score in (*judged, *given_up, *unknown):
        assert (score.outcome, score.reward, score.closes_slot) == (Outcome.DEAD, None, True)
        assert score.fault is not None and score.fault.kind == NOT_JUDGED
        assert score.judged_by == "j"
    faults = [score.fault.message for score in (*judged, *given_up) if score.fault]
    assert faults[:2] == ["j: the judge gave it no reward", "j: unreadable"]
    assert faults[2].startswith("j: ValueError: xxx") and len(faults[2]) <= MAX_REASON + 3


def test_a_judge_may_give_rewards_of_single_calls_and_those_of_the_client_stand_where_it_does_not():
    panel = Panel([end(0, call_rewards={"c": 0.25}), end(1, call_rewards={"c": 0.5})])
    asked = [one["calls"] for one in panel.question()["episodes"]]
    judgement = panel.judged("j", verdicts([1, {"reward": 1, "call_rewards": [0.75]}], asked))
    assert [one.call_rewards for one in panel.scores(judgement)] == [{"c": 0.25}, {"c": 0.75}]


def test_a_judge_may_return_numbers_none_and_mappings_in_any_iterable():
    found = verdicts(iter([1, None, {"reward": 0.5, "reason": "better"}]), [{}] * 3)
    assert [(one["reward"], one["reason"]) for one in found] == [(1.0, ""), (None, ""), (0.5, "better")]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([1.0], "1 verdicts for 2 episodes"),
        ([1.0, float("nan")], "verdict 1 of the group judge is nan"),
        ([1.0, "good"], "verdict 1 of the group judge is 'good'"),
        ([1.0, {"reason": "good"}], "it needs 'reward'"),
        ([1.0, {"reward": 1.0, "rank": 2}], "it needs 'reward'"),
        ([1.0, {"reward": 1.0, "call_rewards": {"x": 1}}], "verdict 1 of the group judge: call_rewards names x"),
        ({"reward": 1.0}, "it has to return a list"),
        ("ab", "it has to return a list"),
        (None, "it has to return a list"),
        (1.0, "it has to return a list"),
    ],
)
def test_a_return_that_is_not_one_verdict_for_each_episode_is_refused(value: object, said: str):
    with pytest.raises(RewardError, match=said):
        verdicts(value, CALLS)
