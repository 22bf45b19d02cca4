"""Turns at work that one process does for all."""

import asyncio
from pathlib import Path

from agentjet.delivery.turn import turn


async def test_one_at_a_time_and_the_next_when_it_is_over(tmp_path: Path):
    order: list[str] = []
    may_end = asyncio.Event()

    async def work(name: str) -> None:
        async with turn(tmp_path / "made" / ".turn", patience_seconds=60, is_done=lambda: False):
            order.append(f"{name} begins")
            await may_end.wait()
            order.append(f"{name} ends")

    first = asyncio.ensure_future(work("one"))
    while not order:
        await asyncio.sleep(0)
    second = asyncio.ensure_future(work("two"))
    await asyncio.sleep(0.1)
    assert order == ["one begins"]
    may_end.set()
    await asyncio.gather(first, second)
    assert order == ["one begins", "one ends", "two begins", "two ends"]


async def test_nobody_waits_for_work_that_is_done_nor_for_ever(tmp_path: Path):
    path = tmp_path / ".turn"
    async with turn(path, patience_seconds=60, is_done=lambda: False):
        async with turn(path, patience_seconds=60, is_done=lambda: True):
            pass
        async with turn(path, patience_seconds=0.05, is_done=lambda: False):
            pass


async def test_a_turn_whose_file_was_cleared_up_is_taken_at_the_new_one(tmp_path: Path, monkeypatch):
    path = tmp_path / ".turn"
    honest, num = __import__("fcntl").flock, 0

    def late(handle: int, kind: int) -> None:
        nonlocal num
        num += 1
        if num == 1:
            path.unlink()
        honest(handle, kind)

    monkeypatch.setattr("fcntl.flock", late)
    async with turn(path, patience_seconds=60, is_done=lambda: False):
        assert (num, path.exists()) == (2, True)
