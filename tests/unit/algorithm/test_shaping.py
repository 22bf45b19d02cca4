import pytest
from made_sample import sample_of_lengths

from agentjet.algorithm.advantage import batch_advantages
from agentjet.algorithm.shaping import length_penalty, shaped_rewards
from agentjet.config import AlgorithmSettings

DAPO = {"overlong": "penalty", "overlong_tokens": 20, "overlong_buffer_tokens": 8}


def settings(**fields: object) -> AlgorithmSettings:
    return AlgorithmSettings.model_validate(fields)


@pytest.mark.parametrize(("length", "cost"), [(0, 0), (12, 0), (13, 1 / 8), (16, 0.5), (20, 1), (21, 1), (999, 1)])
def test_the_penalty_grows_over_the_buffer_and_then_stays(length, cost):
    assert length_penalty([length], settings(**DAPO)) == pytest.approx(cost)
    assert length_penalty([length], settings(**DAPO, overlong_penalty=0.5)) == pytest.approx(cost / 2)


def test_without_a_buffer_the_penalty_comes_at_once():
    chosen = settings(overlong="penalty", overlong_tokens=20)
    assert [length_penalty([length], chosen) for length in (20, 21)] == [0.0, 1.0]


def test_a_sequence_is_the_longest_call_or_the_whole_episode():
    assert length_penalty([10, 10], settings(**DAPO)) == 0.0
    assert length_penalty([10, 10], settings(**DAPO, sequence="episode")) == 1.0


def test_divergence_is_summed_over_the_episode_and_taken_from_its_reward():
    group = [sample_of_lengths(1.0, [("a", 2), ("a", 1)]), sample_of_lengths(1.0, [("a", 2)])]
    chosen = settings(kl="k1", kl_coefficient=0.1, advantage="centred")
    shaped = shaped_rewards(group, [[1.0, 2.0], [-1.0]], chosen)
    assert [one.episode for one in shaped] == [pytest.approx(0.7), pytest.approx(1.1)]
    assert [(one.agents, one.calls) for one in shaped] == [({}, (None, None)), ({}, (None,))]
    changed = [sample.model_copy(update={"reward": one.episode}) for sample, one in zip(group, shaped, strict=True)]
    assert batch_advantages([changed], chosen) == [[[pytest.approx(-0.2)] * 2, [pytest.approx(0.2)]]]


def test_a_reward_of_an_agents_own_pays_for_that_agents_calls():
    group = [
        sample_of_lengths(1.0, [("guide", 2), ("player", 30)], agent_rewards={"guide": 4.0}),
        sample_of_lengths(0.0, [("guide", 2), ("player", 2)]),
        sample_of_lengths(0.5, [("player", 2)]),
    ]
    chosen = settings(kl="k1", kl_coefficient=1.0, **DAPO)
    found = shaped_rewards(group, [[0.25, 0.5], [0.5, 0.0], [0.0]], chosen)
    found = [(one.episode, one.agents) for one in found]
    assert found == [(1.0 - 0.5 - 1.0, {"guide": 3.75}), (0.0, {"guide": -0.5}), (0.5, {})]


def test_a_reward_of_a_single_call_pays_for_its_own_divergence_and_length():
    group = [sample_of_lengths(1.0, [("a", 16), ("a", 10)], call_rewards=(4.0, 2.0))]
    chosen = {"kl": "k1", "kl_coefficient": 1.0, **DAPO}
    (by_call,) = shaped_rewards(group, [[0.25, 0.5]], settings(**chosen))
    assert by_call.calls == (4.0 - 0.25 - 0.5, 2.0 - 0.5)
    (by_episode,) = shaped_rewards(group, [[0.25, 0.5]], settings(**chosen, sequence="episode"))
    assert by_episode.calls == (4.0 - 0.25, 2.0 - 0.5 - 1.0)
    assert by_episode.episode == 1.0 - 0.75 - 1.0


def test_without_a_penalty_rewards_stay_as_they_were():
    group = [sample_of_lengths(0.1, [("a", 2_000)]), sample_of_lengths(0.2, [("a", 1)])]
    assert [(one.episode, one.agents) for one in shaped_rewards(group, [[5.0], [5.0]], settings())] == [
        (0.1, {}),
        (0.2, {}),
    ]
