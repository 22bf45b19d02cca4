"""What an agent may return, and what it is handed."""

import math
from fractions import Fraction

import pytest

from agentjet.errors import AbortError
from agentjet.rollout.policy import Policy
from agentjet.rollout.stage import Part, openai_sampling
from agentjet.rollout.workflow import play, returned
from agentjet.schemas.sampling import Sampling


@pytest.mark.parametrize(
    ("value", "reward"), [(1, 1.0), (0.25, 0.25), (True, 1.0), (Fraction(1, 2), 0.5), (None, None)]
)
def test_a_number_is_the_reward_and_nothing_leaves_it_open(value: object, reward: float | None):
    assert returned(value) == {"reward": reward, "call_rewards": None, "metrics": {}, "result": None}


def test_a_mapping_may_leave_things_out():
    assert returned({"result": [1]}) == {"reward": None, "call_rewards": None, "metrics": {}, "result": [1]}
    assert returned({"reward": 1, "metrics": {"a": True}})["metrics"] == {"a": 1.0}


def test_rewards_of_single_calls_become_numbers_by_text_or_in_order():
    assert returned({"reward": 1, "call_rewards": {"c": Fraction(1, 2)}})["call_rewards"] == {"c": 0.5}
    assert returned({"reward": 1, "call_rewards": (1, True)})["call_rewards"] == [1.0, 1.0]


def test_not_a_number_is_left_to_the_scorer():
    assert math.isnan(returned(float("nan"))["reward"])


@pytest.mark.parametrize(("value", "words"), [({"rewards": 1}, "'rewards'"), ("1", "returned str"), ([1.0], "list")])
def test_anything_else_is_refused_by_name(value: object, words: str):
    with pytest.raises(TypeError, match=words):
        returned(value)


def test_the_adapter_hands_over_task_and_policy():
    seen: list[dict[str, object]] = []

    def run(task: dict[str, int], policy: Policy) -> float:
        assert policy.models == ("a", "b")
        assert (policy.model, policy.is_eval, policy.seed) == ("a", True, 7)
        policy.log({"role": "user", "content": "hi"})
        return task["worth"]

    part = Part("http://x/v1", "key", ("a", "b"), seed=7, ticket="g-0.0.0", is_eval=True)
    assert play(run, part.payload({"worth": 3}), seen.append)["reward"] == 3.0
    assert seen == [{"role": "user", "content": "hi"}]


def test_giving_up_is_an_error_of_its_own():
    with pytest.raises(AbortError, match="no tool server"):
        Policy("", "", ("m",)).abort("no tool server")


def test_sampling_becomes_arguments_of_the_openai_client():
    assert openai_sampling(Sampling(max_tokens=8)) == {"temperature": 1.0, "max_tokens": 8}
    full = Sampling(temperature=0.0, max_tokens=1, top_p=0.5, stop=("\n",), seed=3)
    assert openai_sampling(full) == {"temperature": 0.0, "max_tokens": 1, "top_p": 0.5, "stop": ["\n"], "seed": 3}
