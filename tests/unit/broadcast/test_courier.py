"""A file from one process to several at once, over real process groups, and what SIGKILL does to it."""

import asyncio
import contextlib
import hashlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentjet.broadcast import courier as courier_module
from agentjet.broadcast.courier import Courier
from agentjet.errors import BroadcastError

DATA = os.urandom(40 * 1024**2 + 12_345)
NAME = hashlib.sha256(DATA).hexdigest()


@pytest.fixture
async def couriers() -> AsyncIterator[list[Courier]]:
    """One that sends, and two that receive."""
    found = [Courier() for _ in range(3)]
    yield found
    for one in found:
        await one.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "sent").write_bytes(DATA)
    return tmp_path / "sent"


def receiving(courier: Courier, port: int, path: Path, sha256: str = NAME) -> "asyncio.Task[None]":
    return asyncio.create_task(courier.receive(f"127.0.0.1:{port}", path, len(DATA), sha256))


async def test_every_receiver_gets_the_file_again_and_again(couriers: list[Courier], path: Path, tmp_path: Path):
    sender, *receivers = couriers
    targets = [tmp_path / str(number) for number in range(2)]
    for _ in range(2):
        port = await sender.offer(path, NAME, 2)
        await asyncio.gather(*(receiving(one, port, to) for one, to in zip(receivers, targets, strict=True)))
        assert await sender.sent(len(DATA)) == 2
        for target in targets:
            assert target.read_bytes() == DATA
            target.unlink()


async def test_who_has_not_come_when_the_window_closes_is_not_waited_for(
    couriers: list[Courier], path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    sender, early, _ = couriers
    await ready(early)
    monkeypatch.setattr(courier_module, "WINDOW_SECONDS", 1.5)
    port = await sender.offer(path, NAME, 2)
    await receiving(early, port, tmp_path / "early")
    assert await sender.sent(len(DATA)) == 1
    port = await sender.offer(path, NAME, 1)
    with pytest.raises(BroadcastError, match="nobody came"):
        await sender.sent(len(DATA))
    with pytest.raises(BroadcastError, match="can not be joined"):
        await receiving(early, port, tmp_path / "late")


async def ready(courier: Courier) -> None:
    """Its process has started."""
    with contextlib.suppress(BroadcastError):
        await courier.receive("127.0.0.1:1", Path("none"), 1, "")


async def test_one_that_looks_for_other_weights_is_told_so_and_not_counted(
    couriers: list[Courier], path: Path, tmp_path: Path
):
    sender, one, other = couriers
    port = await sender.offer(path, NAME, 1)
    with pytest.raises(BroadcastError, match="other weights"):
        await receiving(other, port, tmp_path / "other", "0" * 64)
    await receiving(one, port, tmp_path / "one")
    assert await sender.sent(len(DATA)) == 1


async def test_bytes_that_are_not_those_that_were_announced_are_refused(
    couriers: list[Courier], path: Path, tmp_path: Path
):
    sender, one, _ = couriers
    damaged = bytearray(DATA)
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    port = await sender.offer(path, NAME, 1)
    with pytest.raises(BroadcastError, match="not the weights"):
        await receiving(one, port, tmp_path / "one")


@pytest.mark.parametrize("dying", ["sender", "receiver"])
async def test_a11_when_one_is_killed_in_the_middle_the_others_end_in_bounded_time(
    couriers: list[Courier], path: Path, tmp_path: Path, dying: str, monkeypatch: pytest.MonkeyPatch
):
    sender, one, other = couriers
    monkeypatch.setattr(courier_module, "STALL_SECONDS", 2.0)
    await asyncio.gather(ready(one), ready(other))
    os.truncate(path, 4 * 1024**3)  # what it has come to when the kill comes is a small part
    port = await sender.offer(path, NAME, 2)
    size = path.stat().st_size
    tasks = [
        asyncio.create_task(courier.receive(f"127.0.0.1:{port}", tmp_path / name, size, NAME))
        for courier, name in ((one, "one"), (other, "other"))
    ]
    while not all((tmp_path / name).exists() and (tmp_path / name).stat().st_size for name in ("one", "other")):
        await asyncio.sleep(0.01)
    victim = sender if dying == "sender" else other
    assert victim._process is not None
    victim._process.kill()
    async with asyncio.timeout(30):
        outcomes = await asyncio.gather(*tasks, sender.sent(size), return_exceptions=True)
    assert all(isinstance(outcome, BroadcastError) for outcome in outcomes), outcomes


async def test_a_new_offer_gives_up_the_one_that_is_open(couriers: list[Courier], path: Path, tmp_path: Path):
    sender, one, _ = couriers
    await sender.offer(path, NAME, 2)
    port = await sender.offer(path, NAME, 1)
    await receiving(one, port, tmp_path / "one")
    assert await sender.sent(len(DATA)) == 1


async def test_the_process_ends_with_the_one_that_started_it(couriers: list[Courier], path: Path):
    sender = couriers[0]
    await sender.offer(path, NAME, 1)
    assert sender._process is not None and sender._process.stdin is not None
    sender._process.stdin.close()
    async with asyncio.timeout(10):
        assert await sender._process.wait() == 0
