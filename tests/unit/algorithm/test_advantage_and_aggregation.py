import pytest

from agentjet.algorithm.advantage import call_advantages, group_advantages, group_has_signal, has_signal
from agentjet.algorithm.aggregation import term_weights
from agentjet.config import AlgorithmSettings
from agentjet.schemas.ids import GroupId, RunId
from agentjet.schemas.sample import MergeReport, Sample, SampledCall


def settings(**fields: object) -> AlgorithmSettings:
    return AlgorithmSettings.model_validate(fields)


def make_sample(reward: float, *agents: str, agent_rewards: dict[str, float] | None = None) -> Sample:
    return Sample(
        run=RunId("run-abcdef"),
        model="m",
        ticket="p-0.0.0",
        group=GroupId("p-0"),
        member=0,
        rank=0,
        group_size=2,
        reward=reward,
        agent_rewards=agent_rewards or {},
        segments=(),
        calls=tuple(SampledCall(call=str(i), agent=agent, num_terms=0, versions=()) for i, agent in enumerate(agents)),
        term_segment=(),
        term_offset=(),
        term_logprob=(),
        report=MergeReport(num_calls=0, num_branches=0, num_row_tokens=0, num_tree_tokens=0),
    )


def aggregate(losses: list[list[tuple[int, float]]], **fields: object) -> float:
    """Loss of episodes given as calls of (terms, loss per term)."""
    weights = term_weights([[length for length, _ in calls] for calls in losses], settings(**fields))
    return sum(
        length * loss * weight
        for calls, row in zip(losses, weights, strict=True)
        for (length, loss), weight in zip(calls, row, strict=True)
    )


@pytest.mark.parametrize(
    ("fields", "size"),
    [
        ({"advantage": "centred"}, 0.5),
        ({"advantage": "grpo", "std": "population", "std_epsilon": 1e-12}, 1.0),
        ({"advantage": "grpo", "std": "sample", "std_epsilon": 1e-12}, 0.866025),
    ],
)
def test_r3_standard_deviations(fields, size):
    assert group_advantages([1, 0, 0, 1], settings(**fields)) == pytest.approx([size, -size, -size, size], abs=1e-6)


def test_r4_rloo_on_one_winner():
    assert group_advantages([1, 0, 0, 0], settings(advantage="rloo")) == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])


@pytest.mark.parametrize("kind", ["grpo", "rloo", "centred"])
def test_r5_a_group_of_one_has_no_advantage(kind):
    assert group_advantages([0.7], settings(advantage=kind)) == [0.0]


def test_r6_an_invalid_member_is_left_out():
    found = group_advantages([1, 3, 2, None], settings(advantage="centred"))
    assert found == [-1.0, 1.0, 0.0, None]
    assert group_advantages([1, 3, 2, float("nan")], settings(advantage="centred")) == found


@pytest.mark.parametrize("kind", ["grpo", "rloo", "centred"])
def test_r7_one_valid_member_gives_no_nan(kind):
    assert group_advantages([1, None, None, None], settings(advantage=kind)) == [0.0, None, None, None]
    assert not has_signal([1, None, None, None])


def test_equal_rewards_give_exactly_zero():
    assert group_advantages([0.1] * 7, settings(advantage="grpo")) == [0.0] * 7


def test_r9_every_call_carries_the_advantage():
    group = [make_sample(1.0, "a", "a", "a"), make_sample(0.0, "a")]
    assert call_advantages(group, settings(advantage="centred")) == [[0.5, 0.5, 0.5], [-0.5]]


def test_agents_with_rewards_of_their_own_have_their_own_baseline():
    group = [
        make_sample(1.0, "guide", "player", agent_rewards={"guide": 4.0}),
        make_sample(0.0, "guide", "player", agent_rewards={"guide": 2.0}),
        make_sample(0.0, "player"),
    ]
    found = call_advantages(group, settings(advantage="centred"))
    assert found == [pytest.approx([1.0, 2 / 3]), pytest.approx([-1.0, -1 / 3]), pytest.approx([-1 / 3])]


def test_agent_rewards_alone_are_a_signal():
    group = [make_sample(1.0, "a", agent_rewards={"a": 1.0}), make_sample(1.0, "a", agent_rewards={"a": 0.0})]
    assert group_has_signal(group)
    assert not group_has_signal([make_sample(1.0, "a"), make_sample(1.0, "a")])


@pytest.mark.parametrize(
    ("aggregation", "value"),
    [("token_mean", 0.6), ("sequence_mean", 0.75), ("sequence_sum", 3.0), ("constant", 0.375), ("episode", 0.75)],
)
def test_r1_aggregations(aggregation, value):
    losses = [[(2, 1.0)], [(8, 0.5)]]
    assert aggregate(losses, aggregation=aggregation, constant_divisor=8) == pytest.approx(value)


def test_r2_token_mean_does_not_depend_on_the_split():
    losses = [[(100, 2.0)], [(900, 0.5)]]
    weights = term_weights([[100], [900]], settings(aggregation="token_mean"))
    parts = [length * loss * row[0] for ([(length, loss)], row) in zip(losses, weights, strict=True)]
    assert sum(parts) == pytest.approx(0.65)


def test_r10_a_dropped_group_counts_in_no_denominator():
    mixed = [[(4, 1.0)], [(4, 0.0)]]
    assert aggregate(mixed, aggregation="token_mean") == pytest.approx(0.5)
    assert aggregate([*mixed, [(0, 0.0)]], aggregation="episode") == pytest.approx(0.5)


def test_r11_sequence_mean_over_ranks():
    weights = term_weights([[5]] * 32, settings(aggregation="sequence_mean"))
    ranks = [sum(5 * row[0] for row in weights[rank::4]) for rank in range(4)]
    assert sum(ranks) == pytest.approx(1.0)
    assert ranks == pytest.approx([0.25] * 4)


def test_r12_truncated_tokens_leave_the_denominator():
    assert term_weights([[10], [15]], settings(aggregation="token_mean")) == [[1 / 25], [1 / 25]]


@pytest.mark.parametrize(
    ("fields", "value"),
    [
        ({"aggregation": "token_mean"}, 0.46667),
        ({"aggregation": "sequence_mean", "sequence": "call"}, 0.56667),
        ({"aggregation": "sequence_mean", "sequence": "episode"}, 0.4),
    ],
)
def test_r17_what_a_sequence_is(fields, value):
    losses = [[(2, 1.0), (8, 0.5)], [(5, 0.2)]]
    assert aggregate(losses, **fields) == pytest.approx(value, abs=1e-5)


def test_t12_episodes_weigh_the_same_however_they_fork():
    weights = term_weights([[3, 4, 5, 6, 7], [2]], settings())
    assert sum(n * w for n, w in zip([3, 4, 5, 6, 7], weights[0], strict=True)) == pytest.approx(0.5)
    assert 2 * weights[1][0] == pytest.approx(0.5)
    forked, linear = make_sample(1.0, *"aaaaa"), make_sample(0.0, "a")
    assert call_advantages([forked, linear], settings(advantage="centred")) == [[0.5] * 5, [-0.5]]
