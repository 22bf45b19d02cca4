"""Episodes per second through every stage and the real NATS server, without a model.

Curriculum, reward and merger are the real actors, each in its own process. Two more processes stand in for what needs a
model: a *rollout* claims tickets by the claim service, stores one call with made-up ids and log-probs and the
episode's end; a *learner* runs the real fold and ledger chain and writes its steps without computing anything. When
every episode is settled the audit reads the whole log: lost and duplicated have to be 0 (else exit code 1).

`cpu_ms_per_episode` is what each process used after the first tenth, so it says where the time goes, also on a machine
that others use; `episodes_per_busy_core` is one over their sum. Memory is resident MB after 10, 50 and 100 % of the
episodes. `restart_seconds` is a curriculum's second life over the whole log.

    python benchmarks/soak.py --json [--episodes 200000] [--dir D]
"""

import argparse
import asyncio
import contextlib
import json
import random
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from command import arguments, machine, run_folder, show

from agentjet.accounting.ledger import LedgerView
from agentjet.actors.actor import Actor
from agentjet.actors.process import connect, embedded_server, ensure_streams, main
from agentjet.bus.handler import consume
from agentjet.bus.ledger import LedgerChain
from agentjet.bus.protocol import Bus, StoredMessage
from agentjet.bus.record import put_once, read, read_as
from agentjet.bus.server import EmbeddedServer
from agentjet.config import SwarmSettings
from agentjet.config.load import load
from agentjet.config.place import RunPlace
from agentjet.curriculum.audit import read_audit
from agentjet.rollout.claiming import claim, worker_name
from agentjet.rollout.ending import store_end
from agentjet.schemas import subject
from agentjet.schemas.call import Call, FinishReason, ForkCause, Usage
from agentjet.schemas.episode import EndStatus, Episode
from agentjet.schemas.ids import RunId, new_call_id
from agentjet.schemas.ledger import GroupDrop, LearnerStart, LearnerStep
from agentjet.schemas.sample import SlotRecord
from agentjet.schemas.sampling import Sampling
from agentjet.schemas.subject import Stream, stream_name
from agentjet.schemas.task import Ticket
from agentjet.training.batch_source import BatchSource

MODEL, POOL = "policy", "soak"
GROUP_SIZE, BATCH_GROUPS, ADMISSION_BOUND = 8, 16, 7
CONCURRENCY = 128
STAGES = ("curriculum", "reward", "merger")
STAND_INS = ("rollout", "learner")
MARKS = (0.1, 0.5, 1.0)

CONFIG = """\
run.name = "soak"
run.dir = {dir}
nats.store_gib = 48
streams.max_gib = 32
streams.keep_calls_gib = 32

[models.{model}]
path = "none"
learner.batch_groups = {batch_groups}
learner.admission_bound = {admission_bound}

[pools.{pool}]
tasks = {tasks}
num_epochs = 1
group_size = {group_size}
"""


# What stands in for the model


class SoakRollout:
    """Plays tickets by storing what an engine and an agent would have stored."""

    def __init__(self, bus: Bus, run: RunId) -> None:
        self._bus, self._run, self._worker = bus, run, worker_name()

    async def handle(self, message: StoredMessage) -> None:
        """Claim, one call, the end."""
        ticket = await read_as(Ticket, self._bus, self._run, Stream.TASKS, message)
        claimed = await claim(self._bus, self._run, ticket, self._worker)
        if claimed is None:
            return
        call = self.call(ticket, claimed.attempt)
        to = subject.call(self._run, MODEL, ticket.id, claimed.attempt, call.call)
        await put_once(self._bus, self._run, Stream.CALLS, to, call)
        episode = Episode(
            run=self._run,
            ticket=ticket,
            attempt=claimed.attempt,
            status=EndStatus.COMPLETED,
            calls={MODEL: (call.call,)},
            reward=float(random.random() < 0.5),
            worker=self._worker,
        )
        await store_end(self._bus, self._run, episode)

    def call(self, ticket: Ticket, attempt: int) -> Call:
        """What the episode's one call is to be."""
        return made_up_call(self._run, ticket, attempt)

    async def poison(self, message: StoredMessage, error: Exception) -> None:
        """Nothing here may crash three times over one message."""
        raise error


def made_up_call(run: RunId, ticket: Ticket, attempt: int) -> Call:
    prompt = tuple(range(100, 124))
    completion = tuple(random.randrange(1000) for _ in range(16))
    return Call(
        run=run,
        call=new_call_id(),
        ticket=ticket.id,
        attempt=attempt,
        model=MODEL,
        engine="none",
        generation="g",
        prompt_ids=prompt,
        completion_ids=completion,
        logprobs=tuple(-1.0 - token / 1000 for token in completion),
        versions=("1-0",),
        sampling=Sampling(max_tokens=16),
        messages=({"role": "user", "content": "Guess a number from 1 to 7."},),
        message={"role": "assistant", "content": "4"},
        finish_reason=FinishReason.STOP,
        fork=ForkCause.FIRST,
        usage=Usage(prompt_tokens=len(prompt), completion_tokens=len(completion)),
    )


async def run_rollout(actor: Actor) -> None:
    rollout = SoakRollout(actor.bus, actor.run)
    consumer = await actor.bus.consumer(
        stream_name(actor.run, Stream.TASKS), f"tasks-{POOL}", subject=subject.tasks_of(actor.run, POOL)
    )
    await consume(consumer, rollout.handle, name="rollout", on_poison=rollout.poison, concurrency=CONCURRENCY)


async def run_learner(actor: Actor) -> None:
    settings = actor.settings.models[MODEL]
    source = BatchSource(settings.learner, settings.algorithm)
    chain = LedgerChain(actor.bus, actor.run, MODEL)
    await chain.load()
    start = LearnerStart(
        run=actor.run, model=MODEL, incarnation=1, base_step=0, cursor=1, config_digest="", fold_digest=""
    )
    await chain.append(start)
    samples = stream_name(actor.run, Stream.SAMPLES)
    async for message in actor.bus.tail(samples, subject.samples_of(actor.run, MODEL)):
        record = await read(actor.bus, actor.run, Stream.SAMPLES, message)
        assert isinstance(record, SlotRecord)
        source.take(message.sequence, record)
        for drop in source.pop_drops():
            fields = {"group": drop.group, "rank": drop.rank, "reason": drop.reason}
            await chain.append(GroupDrop(run=actor.run, model=MODEL, incarnation=1, **fields))
        while (ready := source.pop_batch()) is not None:
            batch = ready.batch
            step = LearnerStep(
                run=actor.run,
                model=MODEL,
                incarnation=1,
                step=batch.step,
                cursor=batch.cursor,
                members=tuple(member.slot for member in batch.members),
                groups=tuple(group.group for group in batch.groups),
                digest="",
            )
            await chain.append(step)


# The measurement


@dataclass
class Usages:
    """Processor time and memory of the processes."""

    processes: dict[str, psutil.Process] = field(default_factory=dict)
    cpu_seconds: dict[str, float] = field(default_factory=dict)
    rss_mb: dict[str, float] = field(default_factory=dict)

    def look(self) -> None:
        """Take the figures of the moment; those of a process that has ended stay."""
        for name, process in self.processes.items():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                rss = process.memory_info().rss
                if rss:
                    self.cpu_seconds[name] = times.user + times.system
                    self.rss_mb[name] = round(rss / 1e6, 1)


@dataclass
class Soak:
    """One run from the first ticket to the last settled one."""

    settings: SwarmSettings
    config: Path
    run: RunId
    num_episodes: int
    usages: Usages = field(default_factory=Usages)
    memory: dict[str, dict[str, float]] = field(default_factory=dict)
    early_cpu: dict[str, float] = field(default_factory=dict)
    marks: list[tuple[float, float]] = field(default_factory=list)
    """(share settled, monotonic time)."""

    async def measure(self) -> dict[str, Any]:
        began = time.monotonic()
        async with embedded_server(self.settings) as server:
            place = RunPlace(self.settings.run.dir)
            place.announce(server.url, server.pid or 0)
            bus = await connect(self.settings, name="soak")
            try:
                await ensure_streams(bus, self.run, self.settings)
                async with self.actors(server):
                    first, last = await self.watch(bus)
                settled = time.monotonic()
                restart_seconds, log_mb = await self.restart(), await self.log_mb(bus)
                audited = time.monotonic()
                report = await read_audit(bus, self.run)
            finally:
                await bus.close()
        seconds, cpu_ms = last - first, self.cpu_ms()
        return {
            "episodes": report.settled,
            "seconds": round(seconds, 2),
            "episodes_per_second": round(self.num_episodes / seconds, 1),
            "episodes_per_busy_core": round(1e3 / sum(cpu_ms.values()), 1),
            "lost": report.lost,
            "duplicated": report.duplicated,
            "trained": report.trained,
            "cpu_ms_per_episode": cpu_ms,
            "rss_mb": self.memory,
            "rss_growth_ratio": self.growth(),
            "phases": {
                "start_seconds": round(first - began, 2),
                "first_half_per_second": self.rate(0.0, 0.5),
                "second_half_per_second": self.rate(0.5, 1.0),
                "stop_seconds": round(settled - last, 2),
                "restart_seconds": round(restart_seconds, 2),
                "audit_seconds": round(time.monotonic() - audited, 2),
            },
            "log_mb": log_mb,
            "settings": {
                "group_size": GROUP_SIZE,
                "batch_groups": BATCH_GROUPS,
                "admission_bound": ADMISSION_BOUND,
                "rollout_concurrency": CONCURRENCY,
            },
            "machine": machine(),
        }

    @contextlib.asynccontextmanager
    async def actors(self, server: EmbeddedServer) -> AsyncIterator[None]:
        """Every process runs inside; none is left after it."""
        assert server.pid is not None
        self.usages.processes["nats-server"] = psutil.Process(server.pid)
        running: list[asyncio.subprocess.Process] = []
        try:
            for name in (*STAGES, *STAND_INS):
                process = await self.start(name)
                running.append(process)
                self.usages.processes[name] = psutil.Process(process.pid)
            yield
        finally:
            for process in running:
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()
            await asyncio.gather(*(process.wait() for process in running))

    async def start(self, name: str) -> asyncio.subprocess.Process:
        what = ["-m", f"agentjet.actors.{name}"] if name in STAGES else [__file__, "--role", name]
        with (self.settings.run.dir / f"{name}.log").open("ab") as log:
            return await asyncio.create_subprocess_exec(
                sys.executable, *what, "--config", str(self.config), stdout=log, stderr=log
            )

    async def restart(self) -> float:
        """A curriculum over the whole log, from the start of its process to its end: there is nothing left to do."""
        began = time.monotonic()
        process = await self.start("curriculum")
        assert await process.wait() == 0, "the curriculum did not start again"
        return time.monotonic() - began

    async def log_mb(self, bus: Bus) -> float:
        infos = [await bus.stream_info(stream_name(self.run, stream)) for stream in Stream]
        return round(sum(info.num_bytes for info in infos) / 1e6, 1)

    async def watch(self, bus: Bus) -> tuple[float, float]:
        """Follow the learner's chain to the last episode; when the first group was issued, and the last one settled."""
        sampler = asyncio.ensure_future(self.sample())
        try:
            ledger = stream_name(self.run, Stream.LEDGER)
            async for _ in bus.tail(ledger, subject.ledger(self.run, subject.CURRICULUM)):
                first = time.monotonic()
                break
            self.marks.append((0.0, first))
            view, names = LedgerView(), list(MARKS)
            async for message in bus.tail(ledger, subject.ledger(self.run, MODEL)):
                view.apply(message.sequence, await read(bus, self.run, Stream.LEDGER, message))
                share = (view.num_groups + view.num_dropped) * GROUP_SIZE / self.num_episodes
                self.marks.append((share, time.monotonic()))
                while names and share >= names[0]:
                    self.usages.look()
                    self.early_cpu = self.early_cpu or dict(self.usages.cpu_seconds)
                    self.memory[f"{names.pop(0):.0%}"] = dict(self.usages.rss_mb)
                if share >= 1:
                    return first, time.monotonic()
            raise AssertionError("a tail never ends")
        finally:
            sampler.cancel()

    async def sample(self) -> None:
        while True:
            self.usages.look()
            await asyncio.sleep(0.25)

    def cpu_ms(self) -> dict[str, float]:
        """Processor time for each episode after the first tenth, which holds the start of the processes."""
        count = (1 - MARKS[0]) * self.num_episodes
        return {
            name: round(1e3 * (used - self.early_cpu[name]) / count, 3)
            for name, used in self.usages.cpu_seconds.items()
        }

    def rate(self, start: float, end: float) -> float:
        """Episodes per second between two shares."""
        began = next(at for share, at in self.marks if share >= start)
        ended = next(at for share, at in self.marks if share >= end)
        return round((end - start) * self.num_episodes / max(ended - began, 1e-9), 1)

    def growth(self) -> dict[str, float]:
        """Resident memory at the end over that after a tenth."""
        early, late = (self.memory[f"{share:.0%}"] for share in (MARKS[0], MARKS[-1]))
        return {name: round(late[name] / early[name], 3) for name in early}


async def soak(num_episodes: int, folder: Path) -> dict[str, Any]:
    num_groups = num_episodes // GROUP_SIZE // BATCH_GROUPS * BATCH_GROUPS
    tasks = folder / "tasks.jsonl"
    tasks.write_text("".join(f'{{"number": {index}}}\n' for index in range(num_groups)))
    text = CONFIG.format(
        dir=json.dumps(str(folder)),
        tasks=json.dumps(str(tasks)),
        model=MODEL,
        pool=POOL,
        group_size=GROUP_SIZE,
        batch_groups=BATCH_GROUPS,
        admission_bound=ADMISSION_BOUND,
    )
    config = folder / "swarm.toml"
    config.write_text(text)
    settings = load(config).settings
    place = RunPlace(settings.run.dir)
    place.secret()
    run = place.begin(settings.run.name)
    return await Soak(settings, config, run, num_groups * GROUP_SIZE).measure()


def run_role(role: str, config: str) -> None:
    main(role, {"rollout": run_rollout, "learner": run_learner}[role], argv=["--config", config])


def run_command() -> int:
    parser = arguments(__doc__, has_folder=True)
    parser.add_argument("--episodes", type=int, default=200_000, help="rounded down to whole batches of 128")
    parser.add_argument("--role", choices=STAND_INS, help=argparse.SUPPRESS)
    parser.add_argument("--config", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role:
        run_role(args.role, args.config)
    if args.episodes < 10 * GROUP_SIZE * BATCH_GROUPS:
        parser.error(f"--episodes: at least {10 * GROUP_SIZE * BATCH_GROUPS}, ten batches")
    with run_folder(args.dir, "soak") as folder:
        result = asyncio.run(soak(args.episodes, folder))
    show(result, as_json=args.json)
    return 0 if result["lost"] == result["duplicated"] == 0 else 1


if __name__ == "__main__":
    sys.exit(run_command())
