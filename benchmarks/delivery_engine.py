"""One engine of `weight_delivery.py`, in a process of its own: follows a learner with requests running all the time.

`python benchmarks/delivery_engine.py SERVER_URL MODEL_FOLDER OWN_FOLDER PROMPTS_JSON` prints a JSON line for each
version, once a token was drawn with it and the requests have gone on for a second: `first_token` (this machine's
monotonic clock), `load_seconds`, and `stalls`, seconds that each request running across the update waited beyond its
usual wait.
"""

import asyncio
import itertools
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import structlog

from agentjet.bus.nats import NatsBus
from agentjet.inference.engine import Generation
from agentjet.inference.transformers_engine import TransformersEngine
from agentjet.inference.weights import WeightsFollower
from agentjet.schemas.ids import RunId, Version
from agentjet.schemas.sampling import Sampling

RUN, MODEL = RunId("bench-000000"), "m"
Draws = list[tuple[float, Version]]
"""Of one request: when its tokens came, and by which weights."""


@dataclass(slots=True)
class Requests:
    """What runs on the engine: one request after the other in each place."""

    draws: list[Draws] = field(default_factory=list)
    seen: dict[Version, asyncio.Event] = field(default_factory=lambda: defaultdict(asyncio.Event))
    """Set once a token of the version was drawn."""

    async def keep_asking(self, engine: TransformersEngine, name: str, prompt: list[int]) -> None:
        for number in itertools.count():
            mine: Draws = []
            self.draws.append(mine)
            sampling = Sampling(max_tokens=200, temperature=1.0)
            async for draw in engine.generate(Generation(f"{name}-{number}", prompt, sampling, frozenset())):
                mine.append((time.monotonic(), draw.version))
                self.seen[draw.version].set()

    def first_token(self, version: Version) -> float:
        return min(at for mine in self.draws for at, of in mine if of == version)

    def stalls(self, version: Version) -> list[float]:
        """How much longer than usual each request waited that ran across the update to a version."""
        found: list[float] = []
        for mine in self.draws:
            waits = [later - at for (at, _), (later, _) in itertools.pairwise(mine)]
            first = next((index for index, (_, of) in enumerate(mine) if of == version), 0)
            if first:
                found.append(waits[first - 1] - statistics.median(waits))
        return found


async def tell(loaded: "asyncio.Queue[tuple[Version, float]]", requests: Requests) -> None:
    while True:
        version, seconds = await loaded.get()
        await requests.seen[version].wait()
        await asyncio.sleep(1.0)
        line = {
            "first_token": requests.first_token(version),
            "load_seconds": seconds,
            "stalls": requests.stalls(version),
        }
        print(json.dumps(line), flush=True)


async def follow(url: str, model: Path, folder: Path, prompts: list[list[int]]) -> None:
    bus = await NatsBus.connect(url, name="engine")
    engine = TransformersEngine(model, dtype="bfloat16", num_threads=1, cache_tokens=2048)
    await engine.start()
    loaded: asyncio.Queue[tuple[Version, float]] = asyncio.Queue()
    requests = Requests()
    follower = WeightsFollower(
        bus, RUN, MODEL, engine, folder, hold_seconds=0.0, on_loaded=lambda *what: loaded.put_nowait(what)
    )
    await follower.catch_up()
    async with asyncio.TaskGroup() as group:
        group.create_task(follower.run())
        group.create_task(tell(loaded, requests))
        for index, prompt in enumerate(prompts):
            group.create_task(requests.keep_asking(engine, f"request-{index}", prompt))


if __name__ == "__main__":
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    asyncio.run(follow(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), json.loads(sys.argv[4])))
