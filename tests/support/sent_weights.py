"""A learner that only publishes weights, and inference actors that load them, on a real server."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file
from whole_swarm import make_streams, until

from agentjet.bus.nats import NatsBus
from agentjet.bus.presence import live_actors
from agentjet.bus.record import put
from agentjet.config import LearnerSettings
from agentjet.config.place import RunPlace
from agentjet.durable.file import file_digest
from agentjet.schemas import subject
from agentjet.schemas.ids import Version, new_run_id
from agentjet.schemas.ledger import LearnerStart, LearnerStep
from agentjet.schemas.subject import Stream
from agentjet.schemas.weights import Weights
from agentjet.training.publisher import WeightsPublisher
from agentjet.training.snapshot import Snapshot

MODEL = "small"
SCRIPT = Path(__file__).with_name("inference_process.py")
CONFIG = """\
run = {{ dir = "{dir}", id = "{run}" }}
nats.url = "{url}"
streams.max_gib = 1
pools.guess.workflow = "nowhere:play"
[models.small]
path = "{model}"
engine = {{ kind = "{kind}", dtype = "float32", device = "cpu", num_threads = 1, context_tokens = 512 }}
"""


class SentWeights:
    """The learner's side, as a context; its weights are those of a model, a little changed in each version."""

    def __init__(self, bus: NatsBus, url: str, folder: Path, model: Path, route: str) -> None:
        self.bus, self.url, self.folder, self.model = bus, url, folder, model
        self.run, self.step = new_run_id("test"), -1
        self.place = RunPlace(folder / "run")
        settings = LearnerSettings.model_validate({"weights_route": route, "weights_host": "127.0.0.1"})
        self.publisher = WeightsPublisher(bus, self.run, MODEL, settings, self.place.weights(MODEL))
        self._weights, self._rng = load_file(model / "model.safetensors"), np.random.default_rng(0)
        self._serving: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "SentWeights":
        await make_streams(self.bus, self.run)
        self._serving = asyncio.create_task(self.publisher.serve_late())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._serving is not None
        self._serving.cancel()
        await asyncio.wait({self._serving})
        await self.publisher.close()

    def engine_weights(self, path: Path) -> Snapshot:
        for value in self._weights.values():
            chosen = self._rng.random(value.shape) < 0.01
            value[chosen] *= np.float32(1.001)
        save_file(self._weights, path, metadata={"format": "pt"})
        num_bytes, sha256 = file_digest(path)
        return Snapshot("float32", num_bytes, sha256)

    async def publish(self) -> Weights:
        """A step, and its weights."""
        self.step += 1
        common = {"run": self.run, "model": MODEL, "incarnation": 1, "cursor": 1}
        if self.step:
            record = LearnerStep.model_validate(common | {"step": self.step, "members": (), "groups": (), "digest": ""})
        else:
            record = LearnerStart.model_validate(common | {"base_step": 0, "config_digest": "", "fold_digest": ""})
        sequence = await put(self.bus, self.run, Stream.LEDGER, subject.ledger(self.run, MODEL), record)
        return await self.publisher.publish(Version(1, self.step), sequence, self)

    @contextlib.asynccontextmanager
    async def engine(
        self, host: str, point: str = "-", kind: str = "transformers"
    ) -> AsyncIterator[asyncio.subprocess.Process]:
        """An inference actor's process, killed at the end."""
        config = self.folder / f"{kind}.toml"
        config.write_text(CONFIG.format(dir=self.place.dir, run=self.run, url=self.url, model=self.model, kind=kind))
        command = [sys.executable, str(SCRIPT), host, point, "--config", str(config)]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        try:
            yield process
        finally:
            await kill(process)

    async def served(self, host: str) -> set[str]:
        """Versions that live engines of a host tell of."""
        live = await live_actors(self.bus, self.run, "inference")
        return {str(one.info.get("version")) for one in live if one.host == host}

    async def until_served(self, *hosts: str, seconds: float = 60.0) -> None:
        """Wait until every engine of these hosts serves the newest version."""

        async def check() -> bool:
            return [await self.served(host) for host in hosts] == [{f"1-{self.step}"}] * len(hosts)

        await until(check, seconds)

    def arrived(self, host: str) -> set[str]:
        """What a host keeps."""
        folder = next(self.place.weights(MODEL).glob(f"arrived-{host}-*"), None)
        return {path.stem for path in folder.iterdir() if path.name != ".turn"} if folder else set()


async def held(process: asyncio.subprocess.Process, seconds: float = 60.0) -> None:
    """Wait until a process tells that it is held."""
    assert process.stdout is not None
    async with asyncio.timeout(seconds):
        while await process.stdout.readline() != b"held\n":
            assert process.returncode is None


async def kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()
