"""How long a swarm stands still when one of its processes is killed, and when its rollout is replaced.

A real swarm trains a tiny model. For each kind of actor, and the NATS server: SIGKILL, then the seconds until that kind
stores its own next output (curriculum: a claim or an issued group; inference: a call; learner: a step; rollout: an
episode's end; reward: a score; merger: a sample; checkpoint: a record, or its heartbeat; server: anything). Times are
JetStream's. Last, the hot swap: a second rollout is started, and once it plays, the first is told to stop.

`python benchmarks/recovery.py --json [--repeats 3]`.
"""

import argparse
import asyncio
import itertools
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from command import arguments, machine, run_folder, show

from agentjet.actors.swarm import Swarm
from agentjet.bus.presence import live_actors
from agentjet.bus.protocol import Bus
from agentjet.bus.record import read
from agentjet.config.load import load
from agentjet.curriculum.audit import read_audit
from agentjet.schemas import subject
from agentjet.schemas.episode import EndStatus, Episode
from agentjet.schemas.ledger import GroupIssue, LearnerStep
from agentjet.schemas.record import Record
from agentjet.schemas.subject import Stream, stream_name
from chaos import SERVER, Victims, left_over, write_config

GIVE_UP_SECONDS = 120.0
OLD_LIFE_SECONDS = 0.2
"""What is stored sooner after a kill was sent before it: no process starts that fast."""
SETTLE_SECONDS = 1.0

Sought = tuple[Stream, Callable[[Record], bool]]


def _is_any(record: Record) -> bool:
    return True


def _is_played(record: Record) -> bool:
    return isinstance(record, Episode) and record.status is not EndStatus.DEAD


OUTPUTS: dict[str, tuple[Sought, ...]] = {
    "curriculum": ((Stream.CLAIMS, _is_any), (Stream.LEDGER, lambda record: isinstance(record, GroupIssue))),
    "inference": ((Stream.CALLS, _is_any),),
    "learner": ((Stream.LEDGER, lambda record: isinstance(record, LearnerStep)),),
    "rollout": ((Stream.EPISODES, _is_played),),
    "reward": ((Stream.SCORES, _is_any),),
    "merger": ((Stream.SAMPLES, _is_any),),
    "checkpoint": ((Stream.CHECKPOINTS, _is_any),),
    SERVER: tuple((stream, _is_any) for stream in (Stream.CLAIMS, Stream.CALLS, Stream.EPISODES, Stream.LEDGER)),
}


class Watch:
    """Waits for records of a running swarm."""

    def __init__(self, swarm: Swarm) -> None:
        self._swarm, self._run = swarm, swarm.run

    @property
    def _bus(self) -> Bus:
        return self._swarm.bus

    async def first(self, sought: Sought, after: float) -> float:
        """JetStream time of the first such record stored after a time."""
        stream, is_it = sought
        name = stream_name(self._run, stream)
        start = max(1, (await self._bus.stream_info(name)).last_sequence - 200)
        async for message in self._bus.tail(name, start=start):
            is_record = message.time > after and ".blob." not in message.subject
            if is_record and is_it(await read(self._bus, self._run, stream, message)):
                return message.time
        raise AssertionError("a tail never ends")

    async def heartbeat(self, kind: str, pids: set[int]) -> float:
        """When an actor of the kind with another pid has shown itself."""
        while True:
            if any(one.pid not in pids for one in await live_actors(self._bus, self._run, kind)):
                return time.time()
            await asyncio.sleep(0.05)

    async def progress(self) -> None:
        """Until the whole circle has turned, from a claim to a step: what the last kill held up flows again."""
        time_of_last = time.time()
        for kind in ("curriculum", "inference", "rollout", "reward", "merger", "learner"):
            time_of_last = await self.first(OUTPUTS[kind][0], time_of_last)


async def recover(watch: Watch, victims: Victims, kind: str) -> float:
    """Seconds from the kill of a kind to its next output."""
    await watch.progress()
    await asyncio.sleep(SETTLE_SECONDS)
    pids = {one.pid for one in victims.actors(kind) if one.pid}
    killed = time.time()
    await victims.kill(kind, random.Random(0))
    after = killed + (0.0 if kind == SERVER else OLD_LIFE_SECONDS)
    waits = [asyncio.ensure_future(watch.first(sought, after)) for sought in OUTPUTS[kind]]
    if kind == "checkpoint":
        waits.append(asyncio.ensure_future(watch.heartbeat(kind, pids)))
    try:
        done, _ = await asyncio.wait(waits, timeout=GIVE_UP_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            raise TimeoutError(f"{kind}: nothing for {GIVE_UP_SECONDS:g} s")
        return min(one.result() for one in done) - killed
    finally:
        for one in waits:
            one.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


async def swap(swarm: Swarm, watch: Watch, victims: Victims) -> dict[str, Any]:
    """Replace the rollout while it plays; what the episodes say of it."""
    await watch.progress()
    started = time.time()
    (old,) = victims.actors("rollout")
    assert old.pid is not None
    async with victims.one_more_rollout() as new:
        await _ends(swarm, started, lambda ends: any(f"-{new.pid}-" in worker for _, worker in ends))
        told = time.time()
        os.kill(old.pid, signal.SIGTERM)
        while psutil.pid_exists(old.pid):
            if time.time() - told > GIVE_UP_SECONDS:
                raise TimeoutError("the old rollout does not stop")
            await asyncio.sleep(0.02)
        stopped = time.time()
        await watch.first(OUTPUTS["rollout"][0], stopped)
        ends = await _ends(swarm, started - 1.0, lambda ends: True)
        before = await _ends(swarm, started - (stopped - started), lambda ends: True)
    usual = [end for end, _ in before if end < started]
    times = [end for end, _ in ends]
    last_old = max((end for end, worker in ends if f"-{old.pid}-" in worker), default=told)
    next_new = min((end for end, worker in ends if f"-{new.pid}-" in worker and end > last_old), default=last_old)
    return {
        "hot_swap_seconds": round(next_new - last_old, 3),
        "hot_swap_longest_pause_seconds": _longest_pause(times),
        "longest_pause_before_seconds": _longest_pause(usual),
        "hot_swap_start_seconds": round(told - started, 2),
        "hot_swap_drain_seconds": round(stopped - told, 2),
        "hot_swap_failed_episodes": await _failed(swarm, started),
    }


def _longest_pause(times: list[float]) -> float:
    """Between two episodes' ends; the learner's rhythm makes some even when nothing is swapped."""
    return round(max((b - a for a, b in itertools.pairwise(times)), default=0.0), 3)


async def _ends(
    swarm: Swarm, since: float, is_enough: Callable[[list[tuple[float, str]]], bool]
) -> list[tuple[float, str]]:
    """Time and worker of each played episode's end since a time, once there are enough."""
    name = stream_name(swarm.run, Stream.EPISODES)
    async with asyncio.timeout(GIVE_UP_SECONDS):
        while True:
            found: list[tuple[float, str]] = []
            async for message in swarm.bus.scan(name, subject.stream_subjects(swarm.run, Stream.EPISODES)[0]):
                record = await read(swarm.bus, swarm.run, Stream.EPISODES, message) if message.time > since else None
                if isinstance(record, Episode) and _is_played(record):
                    found.append((message.time, record.worker))
            if is_enough(found):
                return found
            await asyncio.sleep(0.1)


async def _failed(swarm: Swarm, since: float) -> int:
    """Episodes that did not end by themselves since a time: failed, or played twice."""
    count = 0
    async for message in swarm.bus.scan(
        stream_name(swarm.run, Stream.EPISODES), subject.stream_subjects(swarm.run, Stream.EPISODES)[0]
    ):
        if message.time > since:
            record = await read(swarm.bus, swarm.run, Stream.EPISODES, message)
            count += isinstance(record, Episode) and record.status is not EndStatus.COMPLETED
    return count


async def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One line of figures."""
    started = time.monotonic()
    config = write_config(folder, steps=0, seed=1)
    seconds: dict[str, list[float]] = {kind: [] for kind in args.kinds}
    swarm = Swarm(load(config).settings, config)
    victims, watch = Victims(swarm), Watch(swarm)
    async with swarm.running():
        for _ in range(args.repeats):
            for kind in args.kinds:
                seconds[kind].append(await recover(watch, victims, kind))
                if not args.json:
                    print(f"{kind:12} {seconds[kind][-1]:.2f} s", file=sys.stderr)
        swapped = await swap(swarm, watch, victims)
        report = await read_audit(swarm.bus, swarm.run)
    return {
        "median_seconds": {kind: round(statistics.median(values), 2) for kind, values in seconds.items()},
        "worst_seconds": {kind: round(max(values), 2) for kind, values in seconds.items()},
        "repeats": args.repeats,
        **swapped,
        "lost": report.lost,
        "duplicated": report.duplicated,
        "left_over": left_over(swarm.run, folder),
        "seconds": round(time.monotonic() - started, 1),
        "machine": machine(),
    }


def main() -> int:
    parser = arguments(__doc__, has_folder=True)
    parser.add_argument("--repeats", type=int, default=3, help="kills of each kind")
    parser.add_argument("--kinds", nargs="*", default=list(OUTPUTS), choices=list(OUTPUTS))
    args = parser.parse_args()
    with run_folder(args.dir, "recovery") as folder:
        result = asyncio.run(measure(args, folder))
    show(result, as_json=args.json)
    return 0 if result["lost"] == result["duplicated"] == 0 and not result["left_over"] else 1


if __name__ == "__main__":
    sys.exit(main())
