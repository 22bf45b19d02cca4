"""New weights on their way: which route, and what stays on disk."""

import hashlib
import socket
from pathlib import Path

import numpy as np
import pytest
import torch

from agentjet.bus.memory import MemoryBus
from agentjet.bus.presence import renew
from agentjet.bus.record import last, stream_specs
from agentjet.config import LearnerSettings
from agentjet.delivery.patch import apply_patch
from agentjet.schemas import subject
from agentjet.schemas.ids import RunId, Version
from agentjet.schemas.presence import Presence
from agentjet.schemas.subject import Stream, stream_name
from agentjet.schemas.weights import Weights
from agentjet.training.publisher import WeightsPublisher
from agentjet.training.snapshot import Snapshot

RUN = RunId("r-abcdef")
DATA = b"weights"


class Source:
    def engine_weights(self, path: Path) -> Snapshot:
        path.write_bytes(DATA)
        return Snapshot("float32", len(DATA), hashlib.sha256(DATA).hexdigest())


@pytest.fixture
async def bus(memory_bus: MemoryBus) -> MemoryBus:
    for spec in stream_specs(RUN, max_bytes=2**26):
        await memory_bus.ensure_stream(spec)
    return memory_bus


async def publish(bus: MemoryBus, folder: Path, version: str, **settings: object) -> Weights:
    publisher = WeightsPublisher(bus, RUN, "m", LearnerSettings.model_validate(settings), folder)
    return await publisher.publish(Version.parse(version), 1, Source())


async def test_the_record_names_the_file_and_is_stored_once(bus, tmp_path):
    record = await publish(bus, tmp_path, "1-2")
    stored = await last(Weights, bus, RUN, Stream.WEIGHTS, subject.weights(RUN, "m", "1-2"))
    assert stored is not None
    assert stored[1] == record
    assert (Path(record.path).read_bytes(), record.host, record.is_blob) == (DATA, socket.gethostname(), False)


@pytest.mark.parametrize(
    ("route", "host", "is_blob"),
    [("auto", "elsewhere", True), ("auto", socket.gethostname(), False), ("path", "elsewhere", False)],
)
async def test_the_bus_carries_them_where_an_engine_is_on_another_host(bus, tmp_path, route, host, is_blob):
    await renew(bus, engine_on(host))
    record = await publish(bus, tmp_path, "1-2", weights_route=route)
    assert record.is_blob is is_blob
    if is_blob:
        prefix = subject.blob(RUN, "weights")
        name = stream_name(RUN, Stream.WEIGHTS)
        assert await bus.get_blob(name, prefix, record.sha256, record.num_bytes) == DATA


async def test_an_engine_elsewhere_that_comes_late_finds_the_newest_version_on_the_bus(bus, tmp_path):
    publisher = WeightsPublisher(bus, RUN, "m", LearnerSettings(), tmp_path)
    await publisher.look()
    record = await publisher.publish(Version(1, 2), 1, Source())
    await publisher.look()
    stream = stream_name(RUN, Stream.WEIGHTS)
    assert (record.is_blob, (await bus.stream_info(stream)).num_messages) == (False, 1)
    await renew(bus, engine_on("elsewhere"))
    await publisher.look()
    prefix = subject.blob(RUN, "weights")
    assert await bus.get_blob(stream, prefix, record.sha256, record.num_bytes) == DATA


def engine_on(host: str) -> Presence:
    return Presence(run=RUN, actor="inference", name="e", models=("m",), host=host, pid=1, started=0.0, state="busy")


async def test_an_adapter_goes_over_the_bus_as_a_patch_where_that_is_small_and_whole_otherwise(
    bus, tmp_path, make_trainer, make_batch
):
    trainer = make_trainer(lora={"rank": 4}, learning_rate=1e-6)
    trainer.engine_dtype = torch.bfloat16
    # A fresh adapter is small, so that all of it changes.
    for weight in trainer.optimizer.weights:
        torch.nn.init.normal_(weight, std=0.1)
    publisher = WeightsPublisher(bus, RUN, "m", LearnerSettings(weights_route="bus"), tmp_path)
    records, files = [], []
    for step in range(4):
        records.append(await publisher.publish(Version(1, step), 1, trainer))
        files.append((tmp_path / f"1-{step}.safetensors").read_bytes())
        trainer.step(make_batch(step))
    assert records[0].is_blob
    last = np.frombuffer(bytearray(files[-2]), np.uint8)
    assert records[-1].base == "1-2"
    name, prefix = stream_name(RUN, Stream.WEIGHTS), subject.blob(RUN, "weights")
    patch = await bus.get_blob(name, prefix, records[-1].patch_sha256, records[-1].patch_bytes)
    apply_patch(patch, last)
    assert hashlib.sha256(last.tobytes()).hexdigest() == records[-1].sha256
    for weight in trainer.optimizer.weights:
        torch.nn.init.normal_(weight, std=0.1)
    whole = await publisher.publish(Version(1, 9), 1, trainer)
    assert (whole.is_blob, whole.base) == (True, "")


async def test_the_newest_files_stay_and_a_killed_learner_s_half_goes(bus, tmp_path):
    (tmp_path / ".1-8.safetensors.7.partial").write_bytes(b"half")
    for version in ("1-9", "1-10", "2-9"):
        await publish(bus, tmp_path, version, keep_weights=2)
    assert {path.name for path in tmp_path.iterdir()} == {"1-10.safetensors", "2-9.safetensors"}
