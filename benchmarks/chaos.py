"""Kill anything at any instant: a whole swarm under SIGKILL, and what the log says about it afterwards.

A real swarm (server, every actor in a process of its own, two rollouts, a tiny model that learns a game) runs while
randomly chosen processes get SIGKILL at random instants: actors, the NATS server, zygotes and workers of user code.
After the last kill the run goes on to its end. Then, from the streams alone: the audit (nothing lost, nothing counted
twice, no ticket left open), and every step derived again from the initial weights (bit for bit the same).

`python benchmarks/chaos.py --kills 200 --seed 1 --json`; exit code 1 when anything is wrong. Targets and pauses are
drawn with the seed; what the processes are doing at these instants differs from run to run.
"""

import argparse
import asyncio
import contextlib
import json
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import structlog
from command import arguments, machine, run_folder, show

from agentjet.actors.supervisor import ActorProcess, ActorSpec
from agentjet.actors.swarm import Swarm
from agentjet.bus.protocol import Bus
from agentjet.bus.record import read
from agentjet.cli.recipe import examples_folder
from agentjet.cli.target import open_bus
from agentjet.config import SwarmSettings
from agentjet.config.load import load
from agentjet.curriculum.audit import read_audit
from agentjet.errors import BusError
from agentjet.pretrained.model_file import fetch
from agentjet.schemas import subject
from agentjet.schemas.ids import RunId
from agentjet.schemas.ledger import CurriculumStart, LearnerStart, LearnerStep
from agentjet.schemas.subject import Stream, stream_name

log = structlog.get_logger(__name__)

MODEL = "policy"
SERVER, ZYGOTE, WORKER = "server", "zygote", "worker"
KINDS = ("curriculum", "inference", "learner", "merger", "reward", "rollout", "checkpoint", SERVER, ZYGOTE, WORKER)
CATCH_UP_PAUSE, SHORTEST_PAUSE, LONGEST_PAUSE = 0.05, 0.3, 2.0
LARGEST_LEAD, LONGEST_LEAD_SECONDS = 0.15, 10.0
"""Share of the kills that may run ahead of the steps before a pause is drawn out, and for how long: an actor that never
lives long enough to work shows nothing."""
END_SECONDS = 600.0
"""Longest that the run may take to its end after the last kill."""

CONFIG = """\
[run]
name = "chaos"
dir = "."
seed = {seed}
num_steps = {steps}
is_deterministic = true

[models.policy]
path = {model}

[models.policy.engine]
dtype = "float32"
num_threads = 1

[models.policy.learner]
learning_rate = 0.02
batch_groups = 4
admission_bound = 1
straggler_bound = 1
num_threads = 1

[pools.guess]
workflow = {agent}
tasks = {tasks}
group_size = 4
deadline_seconds = 30.0
max_offers = 5
sampling = {{ temperature = 1.0, max_tokens = 1 }}

[checkpoint]
every_steps = 3
"""


def write_config(folder: Path, *, steps: int, seed: int) -> Path:
    """The swarm's configuration. Its streams are far from half full, so nothing is purged that a replay needs."""
    agent = examples_folder() / "guess" / "agent.py"
    text = CONFIG.format(
        seed=seed,
        steps=steps,
        model=json.dumps(str(fetch("tiny"))),
        agent=json.dumps(f"{agent}:run"),
        tasks=json.dumps(f"{agent}:tasks"),
    )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "swarm.toml"
    path.write_text(text, "utf-8")
    return path


class Victims:
    """The processes of a running swarm, to be killed by kind."""

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm
        self._extra: list[ActorProcess] = []

    @contextlib.asynccontextmanager
    async def one_more_rollout(self) -> AsyncIterator[ActorProcess]:
        """A further rollout on the same machine, kept alive like the swarm's own."""
        config, number = self._swarm.config, len(self._extra) + 2
        env = {"AGENTJET_RUN__ID": str(self._swarm.run)}
        log_path = self._swarm.place.logs / f"rollout-{number}.log"
        rollout = ActorProcess(ActorSpec("rollout"), ["--config", str(config)], env, log_path)
        self._extra.append(rollout)
        life = asyncio.create_task(rollout.live())
        try:
            yield rollout
        finally:
            life.cancel()
            await asyncio.gather(life, return_exceptions=True)

    def actors(self, kind: str) -> list[ActorProcess]:
        """The living processes of a kind."""
        assert self._swarm.supervisor is not None
        everybody = [*self._swarm.supervisor.processes.values(), *self._extra]
        return [one for one in everybody if one.spec.kind == kind and one.pid and psutil.pid_exists(one.pid)]

    async def kill(self, kind: str, rng: random.Random) -> bool:
        """SIGKILL to a process of the kind; False when there is none at this instant."""
        if kind == SERVER:
            server = self._swarm.server
            is_up = server is not None and server.returncode is None
            if server is not None and is_up:
                await server.kill()
            return is_up
        if kind in (ZYGOTE, WORKER):
            return self._kill_user_code(kind, rng)
        there = self.actors(kind)
        if there:
            rng.choice(there).kill()
        return bool(there)

    def _kill_user_code(self, kind: str, rng: random.Random) -> bool:
        found: list[psutil.Process] = []
        for rollout in self.actors("rollout"):
            with contextlib.suppress(psutil.NoSuchProcess):
                for zygote in psutil.Process(rollout.pid).children():
                    found += [zygote] if kind == ZYGOTE else zygote.children()
        for process in rng.sample(found, len(found)):
            # psutil compares the time of birth: another process that got the same pid is never hit.
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
                return True
        return False


async def steps_so_far(bus: Bus, run: RunId) -> int:
    """The newest step in LEDGER; -1 while the server is away."""
    try:
        message = await bus.last(stream_name(run, Stream.LEDGER), subject.ledger(run, MODEL))
        record = await read(bus, run, Stream.LEDGER, message) if message else None
    except BusError:
        return -1
    if isinstance(record, LearnerStart):
        return record.base_step
    return record.step if isinstance(record, LearnerStep) else 0


async def torment(swarm: Swarm, victims: Victims, *, kills: int, seed: int, steps: int, say: bool) -> Counter[str]:
    """Kill until enough has died, or the run is over."""
    rng, killed, deck = random.Random(seed), Counter[str](), list[str]()
    finished = asyncio.ensure_future(swarm.finished())
    try:
        while killed.total() < kills and not finished.done():
            done = await _pause(swarm, rng, kills_ratio=killed.total() / kills, steps=steps)
            kind = await _kill_one(victims, rng, deck)
            killed[kind] += 1
            log.info("killed", kind=kind, number=killed.total(), step=done)
            if say:
                print(f"kill {killed.total()} of {kills}: {kind}, step {done}", file=sys.stderr)
        await asyncio.wait_for(finished, END_SECONDS)
    finally:
        finished.cancel()
    return killed


async def _kill_one(victims: Victims, rng: random.Random, deck: list[str]) -> str:
    """Kill the first kind of the deck that is alive at this instant, and take it from the deck.

    Kinds come like shuffled cards: all are drawn before one is drawn again, unless none of those left is alive.
    """
    while True:
        for kind in deck:
            if await victims.kill(kind, rng):
                deck.remove(kind)
                return kind
        deck += rng.sample(KINDS, len(KINDS))
        await asyncio.sleep(0.01)


async def _pause(swarm: Swarm, rng: random.Random, *, kills_ratio: float, steps: int) -> int:
    """Until the next kill: a short time when the kills lag behind the run's steps, a long one when they lead.

    Returns the run's step.
    """
    done = await steps_so_far(swarm.bus, swarm.run)
    lead = kills_ratio - _progress(done, steps)
    await asyncio.sleep(CATCH_UP_PAUSE if lead < 0 else rng.uniform(SHORTEST_PAUSE, LONGEST_PAUSE))
    give_up = time.monotonic() + LONGEST_LEAD_SECONDS
    while lead > LARGEST_LEAD and time.monotonic() < give_up:
        await asyncio.sleep(SHORTEST_PAUSE)
        done = await steps_so_far(swarm.bus, swarm.run)
        lead = kills_ratio - _progress(done, steps)
    return done


def _progress(done: int, steps: int) -> float:
    """Share of the steps up to the last three, before which the last kill should fall."""
    return max(done, 0) / max(steps - 3, 1)


async def read_back(settings: SwarmSettings, run: RunId) -> dict[str, Any]:
    """What the streams say of a run that is over and whose processes are gone."""
    from agentjet.training.replay import Replay

    async with open_bus(settings) as bus:
        report = await read_audit(bus, run)
        replayed = [step async for step in Replay(bus, run, MODEL, settings, None).steps()]
        starts: Counter[str] = Counter()
        async for message in bus.scan(stream_name(run, Stream.LEDGER)):
            record = await read(bus, run, Stream.LEDGER, message)
            starts["learner"] += isinstance(record, LearnerStart)
            starts["curriculum"] += isinstance(record, CurriculumStart)
    return {
        "issued": report.issued,
        "slots_settled": report.settled,
        "states": report.states,
        "open": report.issued_not_ended.count + report.ended_not_scored.count,
        "lost": report.lost,
        "duplicated": report.duplicated,
        "problems": list(report.problems),
        "steps": len(replayed),
        "replay_identical": bool(replayed) and all(step.is_identical for step in replayed),
        "incarnations": dict(starts),
    }


def left_over(run: RunId, folder: Path) -> list[str]:
    """Processes that still name the run or its folder in their arguments or environment."""
    ours = psutil.Process()
    above = {ours.pid, *(parent.pid for parent in ours.parents())}
    found: list[str] = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            texts = [*process.cmdline(), *process.environ().values()]
            if process.pid not in above and any(run in text or f"{folder}/" in f"{text}/" for text in texts):
                found.append(f"{process.pid} {' '.join(process.cmdline())[:120]}")
    return found


async def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One line of figures."""
    started = time.monotonic()
    steps = args.steps or max(10, args.kills // 4)
    config = write_config(folder, steps=steps, seed=args.seed)
    swarm = Swarm(load(config).settings, config)
    victims = Victims(swarm)
    async with swarm.running(), victims.one_more_rollout():
        killed = await torment(swarm, victims, kills=args.kills, seed=args.seed, steps=steps, say=not args.json)
    seconds = time.monotonic() - started
    found = await read_back(load(config).settings, swarm.run)
    # Process ends are seen by their parents first; this process is the parent of them all.
    remaining = left_over(swarm.run, folder)
    return {
        "kills": killed.total(),
        "kills_by_actor": dict(sorted(killed.items())),
        "seed": args.seed,
        **found,
        "left_over": remaining,
        "seconds": round(seconds, 1),
        "machine": machine(),
    }


def is_right(result: dict[str, Any]) -> bool:
    """Whether the promise was kept."""
    is_whole = result["open"] == result["lost"] == result["duplicated"] == 0 and result["replay_identical"]
    return is_whole and not result["left_over"]


def main() -> int:
    parser = arguments(__doc__, has_folder=True)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=0, help="optimizer steps of the run (default: kills / 4)")
    args = parser.parse_args()
    with run_folder(args.dir, "chaos") as folder:
        result = asyncio.run(measure(args, folder))
    show(result, as_json=args.json)
    return 0 if is_right(result) else 1


if __name__ == "__main__":
    sys.exit(main())
