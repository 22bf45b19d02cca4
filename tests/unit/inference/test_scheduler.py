from random import Random

import torch

from agentjet.inference.engine import Generation
from agentjet.inference.request import Request
from agentjet.inference.row_cache import CacheShape, RowCache
from agentjet.inference.scheduler import Scheduler
from agentjet.schemas.sampling import Sampling


def scheduler(*, max_running: int = 8, budget: int = 64, tokens: int = 4096) -> Scheduler:
    shape = CacheShape(
        num_layers=1,
        num_kv_heads=1,
        head_dim=1,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_rows=2 * max_running,
        max_length=1024,
        budget_tokens=tokens,
    )
    return Scheduler(RowCache(shape), max_running=max_running, prefill_tokens_per_step=budget)


def request(id: str, ids: list[int]) -> Request:
    return Request(Generation(id, ids, Sampling(), frozenset()), 100, Random(0), None)


def step(queue: Scheduler) -> dict[str, int]:
    """Computes a step's work and draws a token wherever one is due."""
    works = queue.next_step()
    for work in works:
        work.request.num_computed += work.length
        queue.cache.num_computed[work.request.row] = work.request.num_computed
    for request in [work.request for work in works if work.request.num_left == 0]:
        queue.drew(request, 7)
    return {work.request.generation.id: work.length for work in works}


def test_followers_wait_one_step_for_a_shared_prompt_and_others_pass_them() -> None:
    queue = scheduler()
    shared = list(range(100, 130))
    for index in range(3):
        queue.add(request(f"member{index}", [*shared, index]))
    queue.add(request("other", [1, 2, 3]))
    assert step(queue) == {"member0": 31, "other": 3}
    assert step(queue) == {"member0": 1, "other": 1, "member1": 1, "member2": 1}


def test_followers_go_on_alone_when_their_leader_is_cancelled() -> None:
    queue = scheduler(budget=10)
    shared = list(range(100, 130))
    leader, follower = request("a", [*shared, 1]), request("b", [*shared, 2])
    queue.add(leader)
    queue.add(follower)
    assert step(queue) == {"a": 10}
    queue.remove(leader)
    assert step(queue) == {"b": 10}
    assert follower.num_cached == 10


def test_a_prefill_is_cut_by_the_budget_while_others_decode() -> None:
    queue = scheduler(budget=20)
    queue.add(request("short", [1, 2]))
    step(queue)
    queue.add(request("long", list(range(50))))
    assert [step(queue) for _ in range(3)] == [
        {"short": 1, "long": 20},
        {"short": 1, "long": 20},
        {"short": 1, "long": 10},
    ]


def test_only_so_many_run_and_the_rest_keep_their_order() -> None:
    queue = scheduler(max_running=2)
    requests = [request(str(index), [index, index]) for index in range(4)]
    for each in requests:
        queue.add(each)
    assert set(step(queue)) == {"0", "1"}
    queue.remove(requests[0])
    assert set(step(queue)) == {"1", "2"}
    assert [each.generation.id for each in queue.waiting] == ["3"]


def test_after_new_weights_running_requests_recompute_from_their_ids() -> None:
    queue = scheduler()
    first = request("a", list(range(10)))
    queue.add(first)
    step(queue)
    step(queue)
    queue.clear_cache()
    assert step(queue) == {"a": 12}
    assert first.num_cached == 0


def test_rows_that_outgrow_the_budget_send_the_latest_back() -> None:
    queue = scheduler(max_running=4, tokens=1024, budget=4096)
    requests = [request(str(index), [index] * 255) for index in range(4)]
    for each in requests:
        queue.add(each)
    step(queue)
    step(queue)
    assert [each.generation.id for each in queue.running] == ["0", "1"]
    assert [each.generation.id for each in queue.waiting] == ["2", "3"]
    assert all(len(each.ids) == 257 for each in requests)
    queue.remove(requests[0])
    assert step(queue) == {"1": 1, "2": 257}


def test_when_the_cache_is_kept_running_requests_go_on_and_are_marked_and_those_that_wait_are_not() -> None:
    queue = scheduler(max_running=1)
    first, second = request("a", list(range(10))), request("b", list(range(10)))
    for each in (first, second):
        queue.add(each)
    step(queue)
    queue.keep_cache()
    assert step(queue) == {"a": 1}
    assert (first.is_mixed, second.is_mixed) == (True, False)
    queue.remove(first)
    assert step(queue) == {"b": 10}


def test_requests_of_one_adapter_stand_together_among_those_of_equal_length() -> None:
    queue = scheduler()
    requests = [request(str(index), [index, index]) for index in range(4)]
    for index, each in enumerate(requests):
        each.weights = index % 2
        queue.add(each)
    step(queue)
    assert [work.request.generation.id for work in queue.next_step()] == ["0", "2", "1", "3"]
