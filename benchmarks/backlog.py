"""How long a run with a gigabyte of open work needs to be at work again after everything was killed at once.

The open work is made by the real stages and the real server, without a model (stand-ins of `soak.py`, with calls of
about 1,500 tokens). First episodes are played, scored and merged while no learner takes their samples; then merger is
stopped and scores pile up; then reward is stopped and ends pile up; tickets that nobody has claimed remain. Then the
server and every actor get SIGKILL, and all are started again at once. Seconds count from the start of the server's new
process: until clients can connect (`server`), until the first claim, score, sample and ledger record of the learner
that were stored after it, and until the learner's first step and the curriculum's next group; `restart_seconds` is the
longest of these. `cpu_seconds` is what each process had used by then, which other work on the machine changes little.
Then everything is worked off to the end of the run and audited: lost and duplicated have to be 0 (else exit code 1).

    python benchmarks/backlog.py --json [--mb 1000] [--dir D]
"""

import argparse
import asyncio
import contextlib
import json
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from command import arguments, machine, run_folder, show
from soak import BATCH_GROUPS, CONFIG, GROUP_SIZE, MODEL, POOL, SoakRollout, made_up_call, run_learner

from agentjet.accounting.ledger import LedgerView
from agentjet.actors.actor import Actor
from agentjet.actors.process import connect, embedded_server, ensure_streams, main
from agentjet.bus.handler import consume
from agentjet.bus.nats import NatsBus
from agentjet.bus.record import read
from agentjet.bus.server import EmbeddedServer
from agentjet.config import SwarmSettings
from agentjet.config.load import load
from agentjet.config.place import RunPlace
from agentjet.curriculum.audit import read_audit
from agentjet.schemas import subject
from agentjet.schemas.call import Call
from agentjet.schemas.ids import RunId
from agentjet.schemas.ledger import LearnerStep
from agentjet.schemas.subject import Stream, stream_name
from agentjet.schemas.task import Ticket

PROMPT_TOKENS = 1_500
EPISODE_BYTES = 14_000
"""Of the log for each open episode, at least, averaged over the stages; tells how many tickets are issued."""
CONCURRENCY = 64
SPARE = 1.15
"""Tickets issued for each that is played before the kill."""
GIVE_UP_SECONDS = 900.0
ACTORS = ("curriculum", "reward", "merger", "rollout", "learner")
TEXT = "the quick brown fox jumps over the lazy dog and is seen by nobody at all; "


class LongRollout(SoakRollout):
    """As `SoakRollout`, with prompts as agents have them."""

    def call(self, ticket: Ticket, attempt: int) -> Call:
        """One call of `PROMPT_TOKENS` tokens."""
        call = made_up_call(self._run, ticket, attempt)
        prompt = tuple(random.randrange(1000) for _ in range(PROMPT_TOKENS))
        messages = ({"role": "user", "content": (TEXT * PROMPT_TOKENS)[: 4 * PROMPT_TOKENS]},)
        return call.model_copy(update={"prompt_ids": prompt, "messages": messages})


async def run_rollout(actor: Actor) -> None:
    rollout = LongRollout(actor.bus, actor.run)
    consumer = await actor.bus.consumer(
        stream_name(actor.run, Stream.TASKS), f"tasks-{POOL}", subject=subject.tasks_of(actor.run, POOL)
    )
    await consume(consumer, rollout.handle, name="rollout", on_poison=rollout.poison, concurrency=CONCURRENCY)


@dataclass
class Backlog:
    """A run from the first ticket over the kill to the last settled one."""

    settings: SwarmSettings
    config: Path
    run: RunId
    num_groups: int
    target_bytes: float
    processes: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)

    async def measure(self) -> dict[str, Any]:
        server = embedded_server(self.settings)
        try:
            async with server:
                self._announce(server)
                filled = await self._fill()
                await self._kill(server)
                seconds = await self._restart(server)
                return filled | seconds | await self._work_off()
        finally:
            for name in list(self.processes):
                await self._end(name, signal.SIGKILL)

    # The open work

    async def _fill(self) -> dict[str, Any]:
        began = time.monotonic()
        async with self._connected() as bus:
            await ensure_streams(bus, self.run, self.settings)
            for name in ("curriculum", "reward", "merger", "rollout"):
                await self._start(name)
            for share, stage in ((1 / 3, "merger"), (2 / 3, "reward"), (1.0, None)):
                await self._grown(bus, share * self.target_bytes)
                if stage is not None:
                    await self._end(stage, signal.SIGTERM)
            infos = {stream: await bus.stream_info(stream_name(self.run, stream)) for stream in Stream}
            return {
                "backlog_mb": round(sum(info.num_bytes for info in infos.values()) / 1e6, 1),
                "records": {stream.value: info.num_messages for stream, info in infos.items() if info.num_messages},
                "fill_seconds": round(time.monotonic() - began, 1),
            }

    async def _grown(self, bus: NatsBus, num_bytes: float) -> None:
        async with asyncio.timeout(GIVE_UP_SECONDS):
            while True:
                infos = [await bus.stream_info(stream_name(self.run, stream)) for stream in Stream]
                if sum(info.num_bytes for info in infos) >= num_bytes:
                    return
                await asyncio.sleep(0.2)

    # The kill, and the start

    async def _kill(self, server: EmbeddedServer) -> None:
        await server.kill()
        await asyncio.gather(*(self._end(name, signal.SIGKILL) for name in list(self.processes)))

    async def _restart(self, server: EmbeddedServer) -> dict[str, Any]:
        began = time.time()
        starting = [asyncio.ensure_future(self._start(name)) for name in ACTORS]
        await server.start(GIVE_UP_SECONDS)
        seconds = {"server": time.time() - began}
        self._announce(server)
        await asyncio.gather(*starting)
        waits: dict[str, Callable[[NatsBus], Awaitable[float]]] = {
            "claim": lambda bus: self._first(bus, Stream.CLAIMS, began),
            "score": lambda bus: self._first(bus, Stream.SCORES, began),
            "sample": lambda bus: self._first(bus, Stream.SAMPLES, began),
            "learner": lambda bus: self._first(bus, Stream.LEDGER, began, of=MODEL),
            "step": lambda bus: self._first(bus, Stream.LEDGER, began, of=MODEL, kind=LearnerStep),
            "issue": lambda bus: self._first(bus, Stream.LEDGER, began, of=subject.CURRICULUM),
        }
        async with self._connected() as bus, asyncio.timeout(GIVE_UP_SECONDS):
            times = await asyncio.gather(*(wait(bus) for wait in waits.values()))
        seconds |= {name: stored - began for name, stored in zip(waits, times, strict=True)}
        return {
            "restart_seconds": round(max(seconds.values()), 2),
            "seconds": {name: round(value, 2) for name, value in seconds.items()},
            "cpu_seconds": self._cpu_seconds(server),
        }

    def _cpu_seconds(self, server: EmbeddedServer) -> dict[str, float]:
        pids = {"server": server.pid} | {name: process.pid for name, process in self.processes.items()}
        times = {name: psutil.Process(pid).cpu_times() for name, pid in pids.items()}
        return {name: round(used.user + used.system, 2) for name, used in times.items()}

    async def _first(
        self, bus: NatsBus, stream: Stream, after: float, *, of: str = "", kind: type | None = None
    ) -> float:
        """When the stream's first such record was stored after a time; the server's clock is this machine's."""
        name = stream_name(self.run, stream)
        start = max(1, (await bus.stream_info(name)).last_sequence - 5_000)
        async for message in bus.tail(name, subject.ledger(self.run, of) if of else ">", start=start):
            if message.time > after and (kind is None or isinstance(await read(bus, self.run, stream, message), kind)):
                return message.time
        raise AssertionError("a tail never ends")

    # The rest

    async def _work_off(self) -> dict[str, Any]:
        began, view = time.monotonic(), LedgerView()
        async with self._connected() as bus, asyncio.timeout(GIVE_UP_SECONDS):
            name = stream_name(self.run, Stream.LEDGER)
            async for message in bus.tail(name, subject.ledger(self.run, MODEL)):
                view.apply(message.sequence, await read(bus, self.run, Stream.LEDGER, message))
                if view.num_groups + view.num_dropped >= self.num_groups:
                    break
            seconds = time.monotonic() - began
            report = await read_audit(bus, self.run)
        return {
            "work_off_seconds": round(seconds, 1),
            "episodes": report.settled,
            "lost": report.lost,
            "duplicated": report.duplicated,
            "machine": machine(),
        }

    # Processes

    @contextlib.asynccontextmanager
    async def _connected(self) -> AsyncIterator[NatsBus]:
        bus = await connect(self.settings, name="backlog")
        try:
            yield bus
        finally:
            await bus.close()

    def _announce(self, server: EmbeddedServer) -> None:
        RunPlace(self.settings.run.dir).announce(server.url, server.pid or 0)

    async def _start(self, name: str) -> None:
        what = [__file__, "--role", name] if name in ("rollout", "learner") else ["-m", f"agentjet.actors.{name}"]
        with (self.settings.run.dir / f"{name}.log").open("ab") as log:
            self.processes[name] = await asyncio.create_subprocess_exec(
                sys.executable, *what, "--config", str(self.config), stdout=log, stderr=log
            )

    async def _end(self, name: str, number: signal.Signals) -> None:
        process = self.processes.pop(name)
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
        await process.wait()


async def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One line of figures."""
    batch = BATCH_GROUPS * GROUP_SIZE
    num_batches = max(3, int(args.mb * 1e6 / EPISODE_BYTES * SPARE / batch))
    num_groups = num_batches * BATCH_GROUPS
    tasks = folder / "tasks.jsonl"
    tasks.write_text("".join(f'{{"number": {index}}}\n' for index in range(num_groups)))
    config = folder / "swarm.toml"
    config.write_text(
        CONFIG.format(
            dir=json.dumps(str(folder)),
            tasks=json.dumps(str(tasks)),
            model=MODEL,
            pool=POOL,
            group_size=GROUP_SIZE,
            batch_groups=BATCH_GROUPS,
            admission_bound=num_batches - 2,  # the last batch is issued after the first step
        )
    )
    settings = load(config).settings
    place = RunPlace(settings.run.dir)
    place.secret()
    run = place.begin(settings.run.name)
    return await Backlog(settings, config, run, num_groups, args.mb * 1e6).measure()


def run_command() -> int:
    parser = arguments(__doc__, has_folder=True)
    parser.add_argument("--mb", type=float, default=1000.0, help="size of the log at the kill")
    parser.add_argument("--role", choices=("rollout", "learner"), help=argparse.SUPPRESS)
    parser.add_argument("--config", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role:
        main(args.role, {"rollout": run_rollout, "learner": run_learner}[args.role], argv=["--config", args.config])
    with run_folder(args.dir, "backlog") as folder:
        result = asyncio.run(measure(args, folder))
    show(result, as_json=args.json)
    return 0 if result["lost"] == result["duplicated"] == 0 else 1


if __name__ == "__main__":
    sys.exit(run_command())
