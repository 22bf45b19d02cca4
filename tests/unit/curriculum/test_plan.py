import pytest

from agentjet.curriculum.plan import EvalPlan


def schedule(plan, until=30):
    done, found = set(), []
    while (step := plan.next_step(found[-1] if found else 0, done.__contains__)) is not None and step <= until:
        found.append(step)
        done.add(step)
    return found


@pytest.mark.parametrize(
    ("every", "last", "steps"),
    [
        (10, None, [0, 10, 20, 30]),
        (10, 25, [0, 10, 20, 25]),
        (10, 20, [0, 10, 20]),
        (0, 7, [0, 7]),
        (0, None, [0]),
        (50, 7, [0, 7]),
    ],
)
def test_evaluations_come_before_every_n_and_last(every, last, steps):
    assert schedule(EvalPlan(every, last)) == steps


def test_steps_that_were_passed_are_not_caught_up():
    assert EvalPlan(10, None).next_step(35, lambda step: False) == 40
    assert EvalPlan(10, 38).next_step(35, lambda step: False) == 38
    assert EvalPlan(10, 30).next_step(30, lambda step: False) == 30
    assert EvalPlan(10, 30).next_step(31, lambda step: False) is None
