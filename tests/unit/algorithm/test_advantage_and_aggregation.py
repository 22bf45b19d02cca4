import pytest
from made_sample import sample_of_lengths

from agentjet.algorithm.advantage import (
    batch_advantages,
    call_advantages,
    group_advantages,
    group_has_signal,
    has_signal,
)
from agentjet.algorithm.aggregation import term_weights
from agentjet.config import AlgorithmSettings
from agentjet.schemas.sample import Sample


def settings(**fields: object) -> AlgorithmSettings:
    return AlgorithmSettings.model_validate(fields)


def make_sample(
    reward: float, *agents: str, agent_rewards: dict[str, float] | None = None, num_terms: tuple[int, ...] = ()
) -> Sample:
    calls = [(agent, num_terms[i] if num_terms else 0) for i, agent in enumerate(agents)]
    return sample_of_lengths(reward, calls, agent_rewards=agent_rewards or {})


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


@pytest.mark.parametrize("kind", ["grpo", "rloo", "centred", "maxrl", "reinforce++_baseline"])
def test_r5_a_group_of_one_has_no_advantage(kind):
    assert group_advantages([0.7], settings(advantage=kind)) == [0.0]


def test_r6_an_invalid_member_is_left_out():
    found = group_advantages([1, 3, 2, None], settings(advantage="centred"))
    assert found == [-1.0, 1.0, 0.0, None]
    assert group_advantages([1, 3, 2, float("nan")], settings(advantage="centred")) == found


@pytest.mark.parametrize("kind", ["grpo", "rloo", "centred", "maxrl", "reinforce++_baseline"])
def test_r7_one_valid_member_gives_no_nan(kind):
    assert group_advantages([1, None, None, None], settings(advantage=kind)) == [0.0, None, None, None]
    assert not has_signal([1, None, None, None])


def test_equal_rewards_give_exactly_zero():
    assert group_advantages([0.1] * 7, settings(advantage="grpo")) == [0.0] * 7


def test_maxrl_divides_by_the_success_rate():
    assert group_advantages([1, 0, 0, 0], settings(advantage="maxrl")) == pytest.approx([3, -1, -1, -1])
    assert group_advantages([1, 1, 1, 0], settings(advantage="maxrl")) == pytest.approx([1 / 3, 1 / 3, 1 / 3, -1])


@pytest.mark.parametrize("rewards", [[0, 0, 0], [1, 0, -1], [3, -1, 0]])
def test_maxrl_learns_nothing_without_success_or_from_rewards_below_zero(rewards):
    assert group_advantages(rewards, settings(advantage="maxrl")) == [0.0, 0.0, 0.0]


def test_reinforce_plus_plus_whitens_over_every_term_of_the_batch():
    batch = [
        [make_sample(1.0, "a", num_terms=(3,)), make_sample(0.0, "a", num_terms=(1,))],
        [make_sample(4.0, "a", "a", num_terms=(1, 1)), make_sample(0.0, "a", num_terms=(2,))],
    ]
    values = [1.0] * 3 + [0.0] + [4.0] * 2 + [0.0] * 2
    mean = sum(values) / 8
    std = (sum((value - mean) ** 2 for value in values) / 8) ** 0.5
    found = batch_advantages(batch, settings(advantage="reinforce++", std_epsilon=1e-12))
    white = {value: pytest.approx((value - mean) / std) for value in values}
    assert found == [[[white[1.0]], [white[0.0]]], [[white[4.0], white[4.0]], [white[0.0]]]]


def test_reinforce_plus_plus_with_a_baseline_whitens_what_is_left_of_the_group():
    batch = [
        [make_sample(1.0, "a", num_terms=(2,)), make_sample(0.0, "a", num_terms=(2,))],
        [make_sample(9.0, "a", num_terms=(2,)), make_sample(9.0, "a", num_terms=(2,))],
    ]
    found = batch_advantages(batch, settings(advantage="reinforce++_baseline", std_epsilon=1e-12))
    assert found == [[[pytest.approx(2**0.5)], [pytest.approx(-(2**0.5))]], [[0.0], [0.0]]]


@pytest.mark.parametrize("kind", ["reinforce++", "reinforce++_baseline"])
def test_r5_r7_whitening_never_leaves_a_raw_reward_or_a_nan(kind):
    alone = [[make_sample(0.7, "a", num_terms=(3,))]]
    assert batch_advantages(alone, settings(advantage=kind)) == [[[0.0]]]
    broken = make_sample(float("nan"), "a", num_terms=(3,))
    pair = [make_sample(1.0, "a", num_terms=(3,)), make_sample(0.0, "a", num_terms=(3,))]
    found = batch_advantages([[*pair, broken]], settings(advantage=kind))
    assert found[0][2] == [0.0]
    assert found[0][:2] == batch_advantages([pair], settings(advantage=kind))[0]


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
    assert group_has_signal(group, settings())
    assert not group_has_signal([make_sample(1.0, "a"), make_sample(1.0, "a")], settings())


def rewarded(*rewards: float | None, reward: float = 0.0, num_terms: int = 1) -> Sample:
    """A sample with a reward of each call."""
    return sample_of_lengths(reward, [("a", num_terms)] * len(rewards), call_rewards=rewards)


@pytest.mark.parametrize(
    ("fields", "first", "second"),
    [
        ({"advantage": "centred"}, [-1.0, -1.0], [1.0, 2.0]),
        ({"advantage": "centred", "discount": 0.5}, [-0.5, -1.0], [0.0, 2.0]),
        ({"std": "population"}, [-1 / 1.5**0.5] * 2, [1 / 1.5**0.5, 2 / 1.5**0.5]),
        ({"std": "sample"}, [-1 / 2**0.5] * 2, [1 / 2**0.5, 2 / 2**0.5]),
    ],
)
def test_a_call_earns_its_own_normalized_reward_and_those_after_it(fields, first, second):
    """Rewards 1, 0 and 0, 3: less their mean 0, -1 and -1, 2; variance 1.5 of the four, 2 as a sample's."""
    chosen = settings(credit="call", std_epsilon=1e-12, **fields)
    found = call_advantages([rewarded(1.0, 0.0), rewarded(0.0, 3.0)], chosen)
    assert found == [pytest.approx(first), pytest.approx(second)]


def test_the_mean_of_a_group_counts_every_call_alike():
    found = call_advantages([rewarded(0.0, 0.0, 0.0), rewarded(4.0)], settings(credit="call", advantage="centred"))
    assert found == [[-3.0, -2.0, -1.0], [3.0]]


def test_whitening_takes_the_raw_returns_of_every_term():
    batch = [[rewarded(1.0, 0.0), rewarded(0.0, 3.0, num_terms=2)]]
    values = [1.0, 0.0] + [3.0] * 4
    mean = sum(values) / 6
    std = (sum((value - mean) ** 2 for value in values) / 6) ** 0.5
    found = batch_advantages(batch, settings(credit="call", advantage="reinforce++", std_epsilon=1e-12))
    white = [pytest.approx((value - mean) / std) for value in (1.0, 0.0, 3.0)]
    assert found == [[white[:2], [white[2], white[2]]]]


@pytest.mark.parametrize("kind", ["grpo", "centred", "reinforce++", "reinforce++_baseline"])
def test_a_group_in_which_a_call_has_no_reward_falls_back_to_those_of_its_episodes(kind):
    group = [rewarded(5.0, None, reward=1.0), rewarded(7.0, 9.0, reward=0.0)]
    chosen = {"advantage": kind}
    by_episode = batch_advantages([group], settings(**chosen))
    assert batch_advantages([group], settings(**chosen, credit="call")) == by_episode
    assert group_has_signal(group, settings(credit="call"))


def test_r5_calls_of_one_episode_alone_and_equal_rewards_give_exactly_zero():
    chosen = settings(credit="call")
    alone, equal = [rewarded(1.0, 0.0)], [rewarded(0.1, 0.1, 0.1), rewarded(0.1, reward=1.0)]
    assert call_advantages(alone, chosen) == [[0.0, 0.0]]
    assert call_advantages(equal, chosen) == [[0.0] * 3, [0.0]]
    assert not group_has_signal(alone, chosen)
    assert not group_has_signal(equal, chosen)
    assert group_has_signal(equal, settings()), "their episodes differ"
    assert group_has_signal([rewarded(1.0, 0.0), rewarded(1.0, 0.0)], chosen), "equal episodes of unequal calls"


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


@pytest.mark.parametrize(
    ("aggregation", "weight"), [("sequence_mean", 1 / 8), ("sequence_sum", 1 / 2), ("constant", 1 / 16)]
)
def test_r12_a_call_without_terms_is_no_sequence(aggregation, weight):
    found = term_weights([[4, 0], [4]], settings(aggregation=aggregation, constant_divisor=8))
    assert found == [[weight, 0.0], [weight]]


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
