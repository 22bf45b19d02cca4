import asyncio

import pytest

from agentjet.inference import room as module
from agentjet.inference.room import Room, num_places


def test_an_engine_has_places_to_spare_beside_its_batch():
    assert [num_places(max_running) for max_running in (1, 8, 64)] == [2, 10, 73]


def test_a_place_is_promised_once_and_taken_by_the_message_that_it_was_promised_to():
    room = Room(2)
    assert room.promise()
    assert room.promise()
    assert not room.promise()
    with room.taken(is_promised=True):
        assert room.num_free == 0
    assert room.num_free == 1
    with room.taken():
        assert room.num_free == 0


def test_a_promise_that_nobody_calls_in_runs_out(monkeypatch: pytest.MonkeyPatch):
    room, now = Room(1), [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    assert room.promise()
    now[0] += module.PROMISE_SECONDS
    assert room.num_free == 1


async def test_the_shared_queue_is_left_alone_until_a_place_is_free():
    room = Room(1)
    with room.taken():
        waiting = asyncio.create_task(room.allowance())
        await asyncio.sleep(0.01)
        assert not waiting.done()
    assert await waiting == 1


async def test_of_a_burst_only_a_part_is_taken_at_once():
    assert await Room(64).allowance() == 8


def test_what_was_promised_is_taken_even_where_it_does_not_fit():
    room = Room(1)
    with room.taken(), room.taken(is_promised=True):
        assert room.num_free == 0
    assert room.num_free == 1
