"""How much faster a swarm is when episodes overlap training, while their environments answer with a long tail.

A real swarm (server, every actor in a process of its own, a tiny model that learns a game) trains the same number of
episodes, over the same drawn environment times (`slow_digits.py`), in three ways:

- `sync`: a = 0, w = 0. A batch is issued when the one before it is trained, so each step waits for its slowest episode.
- `async`: a = 2, w = 2. Two batches are issued ahead, and a slow group may be overtaken by two: staleness at most 4.
- `strict`: a = 2, w = 0. Two batches ahead, trained in the order of issue: staleness at most 2.

All have the same number of places for episodes, two batches'. Time counts from the first stored call to the last step,
so starting the processes is left out. `ideal` is an event simulation over the same times with the project's own rules
for admission and batches, and nothing that costs time but environments and the measured median step of the learner.

`python benchmarks/async_overlap.py --json [--repeats 2]`; the ways alternate, ratios are of medians.
"""

import argparse
import asyncio
import heapq
import itertools
import json
import statistics
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import slow_digits
from command import arguments, machine, run_folder, show

from agentjet.accounting.admission import ModelLoad, max_staleness
from agentjet.accounting.fold import Batch, LearnerFold
from agentjet.actors.swarm import Swarm
from agentjet.bus.record import read
from agentjet.config.load import load
from agentjet.curriculum.audit import read_audit
from agentjet.pretrained.model_file import fetch
from agentjet.schemas.ids import RunId, group_id
from agentjet.schemas.ledger import LearnerStep
from agentjet.schemas.sample import MergeReport, Sample
from agentjet.schemas.subject import Stream, stream_name

STEPS, BATCH_GROUPS, GROUP_SIZE = 16, 8, 2
CONCURRENCY = 2 * BATCH_GROUPS * GROUP_SIZE
WAYS = {"sync": (0, 0), "async": (2, 2), "strict": (2, 0)}
"""a and w of each."""
OTHER_SEEDS = range(1, 22)
"""Of the draws for which the ideal ratio is simulated beside the one that is measured."""
GIVE_UP_SECONDS = 300.0

CONFIG = """\
[run]
name = "overlap"
dir = "."
seed = 1
num_steps = {steps}

[models.policy]
path = {model}

[models.policy.engine]
dtype = "float32"
num_threads = 1

[models.policy.learner]
learning_rate = 0.02
batch_groups = {batch_groups}
admission_bound = {a}
straggler_bound = {w}
num_threads = 1

[pools.digits]
workflow = {agent}
tasks = {tasks}
group_size = {group_size}
max_running = {concurrency}
deadline_seconds = 120.0
sampling = {{ temperature = 1.0, max_tokens = 4 }}

[rollout]
max_running = {concurrency}
num_workers = {concurrency}

[checkpoint]
every_steps = 0
"""


def write_config(folder: Path, way: str) -> Path:
    """The swarm's configuration: without evaluations, which are barriers, and with one checkpoint, at the end."""
    agent = Path(slow_digits.__file__)
    a, w = WAYS[way]
    text = CONFIG.format(
        a=a,
        w=w,
        steps=STEPS,
        batch_groups=BATCH_GROUPS,
        group_size=GROUP_SIZE,
        concurrency=CONCURRENCY,
        model=json.dumps(str(fetch("tiny"))),
        agent=json.dumps(f"{agent}:run"),
        tasks=json.dumps(f"{agent}:tasks"),
    )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "swarm.toml"
    path.write_text(text, "utf-8")
    return path


@dataclass(frozen=True, slots=True)
class Measured:
    """One run of a real swarm."""

    seconds: float
    """From the first stored call to the last step."""
    steps: tuple[LearnerStep, ...]
    lost: int
    duplicated: int

    def metric(self, name: str) -> list[float]:
        """A figure of every step."""
        return [step.metrics[name] for step in self.steps]


async def play(folder: Path, way: str) -> Measured:
    """A run from nothing to its last step."""
    config = write_config(folder, way)
    swarm = Swarm(load(config).settings, config)
    async with swarm.running():
        async with asyncio.timeout(GIVE_UP_SECONDS):
            await swarm.finished()
        steps, ended = await _steps(swarm)
        report = await read_audit(swarm.bus, swarm.run)
        return Measured(ended - await _first_call(swarm), steps, report.lost, report.duplicated)


async def _steps(swarm: Swarm) -> tuple[tuple[LearnerStep, ...], float]:
    """The steps, and the time of the last one."""
    steps: list[LearnerStep] = []
    ended = 0.0
    async for message in swarm.bus.scan(stream_name(swarm.run, Stream.LEDGER)):
        record = await read(swarm.bus, swarm.run, Stream.LEDGER, message)
        if isinstance(record, LearnerStep):
            steps.append(record)
            ended = message.time
    return tuple(steps), ended


async def _first_call(swarm: Swarm) -> float:
    async for message in swarm.bus.scan(stream_name(swarm.run, Stream.CALLS)):
        return message.time
    raise LookupError("the run stored no call")


class Ideal:
    """The same run when nothing takes time but the environments and the learner's steps.

    Args:
        a: Admission bound.
        w: Straggler bound.
        step_seconds: Of the learner, for a batch.
        seed: Of the environments' times.
    """

    def __init__(self, a: int, w: int, *, step_seconds: float, seed: int = slow_digits.SEED) -> None:
        self._a, self._step_seconds, self._seed = a, step_seconds, seed
        self._fold = LearnerFold(batch_groups=BATCH_GROUPS, straggler_bound=w)
        self._now, self._free = 0.0, CONCURRENCY
        self._num_issued = self._num_steps = 0
        self._order = itertools.count(1)
        self._events: list[tuple[float, int, tuple[int, int] | None]] = []
        """Time, number, and the slot whose episode ends; None for the end of a step."""
        self._tickets: deque[tuple[int, int]] = deque()
        self._training: Batch | None = None

    def seconds(self) -> float:
        """When the last step ends."""
        self._go_on()
        while self._num_steps < STEPS:
            self._now, _, slot = heapq.heappop(self._events)
            if slot is None:
                self._num_steps, self._training = self._num_steps + 1, None
            else:
                self._free += 1
                self._fold.apply(self._fold.position + 1, _sample(*slot))
            self._go_on()
        return self._now

    def _go_on(self) -> None:
        """Issue, play and train all that can be at this instant."""
        trained = self._num_steps * BATCH_GROUPS
        load = ModelLoad(BATCH_GROUPS, self._a, self._num_steps, trained, self._num_issued, 0, last_step=STEPS)
        for _ in range(load.room):
            self._tickets += [(self._num_issued, member) for member in range(GROUP_SIZE)]
            self._num_issued += 1
        while self._free and self._tickets:
            slot = self._tickets.popleft()
            self._free -= 1
            self._at(slow_digits.delay_seconds(*slot, seed=self._seed), slot)
        if self._training is None and (batch := self._fold.pop_batch()) is not None:
            self._training = batch
            self._at(self._step_seconds, None)

    def _at(self, delay: float, slot: tuple[int, int] | None) -> None:
        heapq.heappush(self._events, (self._now + delay, next(self._order), slot))


def _sample(index: int, member: int) -> Sample:
    """All that the fold looks at."""
    group = group_id("digits", index)
    return Sample(
        run=RunId("ideal"),
        model="policy",
        ticket=f"{group}.{member}.0",
        group=group,
        member=member,
        rank=index,
        group_size=GROUP_SIZE,
        reward=float(member),
        segments=(),
        calls=(),
        term_segment=(),
        term_offset=(),
        term_logprob=(),
        report=MergeReport(num_calls=0, num_branches=0, num_row_tokens=0, num_tree_tokens=0),
    )


def ideal_seconds(way: str, step_seconds: float, seed: int = slow_digits.SEED) -> float:
    """Of a way over the times of a seed."""
    a, w = WAYS[way]
    return Ideal(a, w, step_seconds=step_seconds, seed=seed).seconds()


def ideal_ratio(way: str, step_seconds: float, seed: int = slow_digits.SEED) -> float:
    """Of `sync` over a way."""
    return ideal_seconds("sync", step_seconds, seed) / ideal_seconds(way, step_seconds, seed)


async def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One line of figures."""
    started = time.monotonic()
    runs: dict[str, list[Measured]] = {way: [] for way in WAYS}
    for repeat in range(args.repeats):
        for way in WAYS:
            if way == "strict" and repeat:
                continue  # beside the point of the comparison: once is enough
            runs[way].append(await play(folder / f"{way}-{repeat}", way))
            if not args.json:
                print(f"{way:6} {runs[way][-1].seconds:.1f} s", file=sys.stderr)
    return _report(runs) | {"total_seconds": round(time.monotonic() - started, 1), "machine": machine()}


def _report(runs: dict[str, list[Measured]]) -> dict[str, Any]:
    every = [run for of_way in runs.values() for run in of_way]
    step = statistics.median(value for run in runs["sync"] for value in run.metric("step_seconds"))
    seconds = {way: statistics.median(run.seconds for run in of_way) for way, of_way in runs.items()}
    overlapped = [way for way in WAYS if way != "sync"]
    return {
        "ratio": round(seconds["sync"] / seconds["async"], 2),
        "ideal_ratio": round(ideal_ratio("async", step), 2),
        "strict_ratio": round(seconds["sync"] / seconds["strict"], 2),
        "strict_ideal_ratio": round(ideal_ratio("strict", step), 2),
        "ideal_ratio_of_other_seeds": {
            way: round(statistics.median(ideal_ratio(way, step, seed) for seed in OTHER_SEEDS), 2) for way in overlapped
        },
        "seconds": {way: [round(run.seconds, 1) for run in of_way] for way, of_way in runs.items()},
        "ideal_seconds": {way: round(ideal_seconds(way, step), 1) for way in WAYS},
        "bounds": {way: {"a": a, "w": w} for way, (a, w) in WAYS.items()},
        "staleness_bound": {way: max_staleness(a, w) for way, (a, w) in WAYS.items()},
        "staleness_max": {way: max(max(run.metric("staleness_max")) for run in runs[way]) for way in WAYS},
        "staleness_mean": {
            way: round(statistics.mean(value for run in runs[way] for value in run.metric("staleness_mean")), 2)
            for way in WAYS
        },
        "reward_curves": {way: [round(value, 3) for value in runs[way][0].metric("reward_mean")] for way in WAYS},
        "episodes": sorted({sum(len(one.members) for one in run.steps) for run in every}),
        "steps": STEPS,
        "batch_groups": BATCH_GROUPS,
        "group_size": GROUP_SIZE,
        "concurrency": CONCURRENCY,
        "seed": slow_digits.SEED,
        "median_seconds": slow_digits.MEDIAN_SECONDS,
        "sigma": round(slow_digits.SIGMA, 4),
        "tail": slow_digits.TAIL,
        "learner_step_seconds": round(step, 3),
        "compute_share_of_sync": round(step * STEPS / seconds["sync"], 3),
        "lost": sum(run.lost for run in every),
        "duplicated": sum(run.duplicated for run in every),
    }


def is_right(result: dict[str, Any]) -> bool:
    """Whether every run trained the same episodes, each once, within its bound."""
    is_bounded = all(result["staleness_max"][way] <= bound for way, bound in result["staleness_bound"].items())
    is_same = result["episodes"] == [STEPS * BATCH_GROUPS * GROUP_SIZE]
    return is_bounded and is_same and result["lost"] == result["duplicated"] == 0


def main() -> int:
    parser = arguments(__doc__, has_folder=True)
    parser.add_argument("--repeats", type=int, default=2, help="runs of `sync` and `async`")
    args = parser.parse_args()
    with run_folder(args.dir, "overlap") as folder:
        result = asyncio.run(measure(args, folder))
    show(result, as_json=args.json)
    return 0 if is_right(result) else 1


if __name__ == "__main__":
    sys.exit(main())
