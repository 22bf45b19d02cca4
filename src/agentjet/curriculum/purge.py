"""Forgetting what nobody needs any more, by sequence only.

- EPISODES, SCORES, JUDGEMENTS, CLAIMS and CALLS: everything stored before the issue of the oldest group that is out.
  A record of a group is younger than the group's issue, so what is older belongs to groups that are done. The border is
  found by bisecting store times, less a margin for clocks of a cluster.
- SAMPLES: below the lowest cursor of every kept checkpoint; nothing while a trained model has too few. What LEDGER has
  voided does not count: no learner starts from it.
- WEIGHTS: of each model what is older than its newest versions, the newest whole file (patches since then lead on from
  it) and all that a live engine has yet to load; when the stream is crowded, engines that lag are waited for no longer.
- A blob's chunks lie before the record that names them, far before it where an earlier record has the same bytes. They
  stay as long as their record.
- A stream is only purged when it needs the space: CALLS above `keep_calls_gib`, the others when half full.

TASKS and INFER empty themselves, EVENTS goes by age, LEDGER and CHECKPOINTS are kept for ever.
"""

from collections.abc import Mapping, Sequence

import structlog

from agentjet.accounting.ledger import LedgerView
from agentjet.bus.presence import live_actors
from agentjet.bus.protocol import Bus, StreamInfo
from agentjet.bus.record import BLOB_HEADER, read
from agentjet.delivery.acknowledgement import oldest_acknowledged
from agentjet.errors import BusError
from agentjet.schemas import subject
from agentjet.schemas.checkpoint import Checkpoint
from agentjet.schemas.ids import RunId, Version
from agentjet.schemas.presence import Presence
from agentjet.schemas.subject import Stream, stream_name, stream_subjects
from agentjet.schemas.weights import Weights

log = structlog.get_logger(__name__)

FULL_ENOUGH_RATIO = 0.5
CROWDED_RATIO = 0.75
KEPT_WEIGHTS = 3
_BY_TIME = (Stream.EPISODES, Stream.SCORES, Stream.JUDGEMENTS, Stream.CLAIMS)


class Purge:
    """Frees space in a run's streams.

    Args:
        learners: What LEDGER says, as it stands, of each model with a learner.
        keep_checkpoints: Newest valid checkpoints of a model that a learner may start from.
        keep_calls_bytes: Calls of finished groups kept for inspection.
        margin_seconds: Kept below the border by time.
        blob_seconds: Longest from the first chunk of a blob on its way to the record that names it.
    """

    def __init__(
        self,
        bus: Bus,
        run: RunId,
        *,
        learners: Mapping[str, LedgerView],
        keep_checkpoints: int,
        keep_calls_bytes: int,
        margin_seconds: float = 60.0,
        blob_seconds: float = 600.0,
    ) -> None:
        self._bus, self._run = bus, run
        self._learners, self._keep_checkpoints = learners, keep_checkpoints
        self._keep_calls_bytes, self._margin_seconds = keep_calls_bytes, margin_seconds
        self._blob_seconds = blob_seconds

    async def run(self, low_water: float) -> None:
        """Free what can be freed.

        Args:
            low_water: JetStream time of issue of the oldest group that is out; now, when there is none.
        """
        for stream in _BY_TIME:
            info = await self._info(stream)
            if _is_full_enough(info):
                await self._below(info, await first_since(self._bus, info, low_water - self._margin_seconds))
        await self._calls(low_water - self._margin_seconds)
        samples = await self._info(Stream.SAMPLES)
        if _is_full_enough(samples):
            await self._below(samples, await self._lowest_sample(samples))
        await self._weights()

    async def _calls(self, border: float) -> None:
        info = await self._info(Stream.CALLS)
        excess = info.num_bytes - self._keep_calls_bytes
        if excess <= 0 or not info.num_messages:
            return
        size = info.num_bytes / info.num_messages
        wanted = info.first_sequence + int(excess / size)
        await self._below(info, min(wanted, await first_since(self._bus, info, border)))

    async def _info(self, stream: Stream) -> StreamInfo:
        return await self._bus.stream_info(stream_name(self._run, stream))

    async def _below(self, info: StreamInfo, sequence: int) -> None:
        if sequence > info.first_sequence and info.num_messages:
            log.info("a stream is purged", stream=info.name, below=sequence, first=info.first_sequence)
            await self._bus.purge(info.name, below_sequence=sequence)

    async def _lowest_sample(self, info: StreamInfo) -> int:
        """The lowest sequence that a kept checkpoint needs, chunks included; 0 when that is everything."""
        cursor = await self._lowest_cursor()
        at_cursor = await self._bus.get(info.name, min(cursor, info.last_sequence)) if cursor else None
        if at_cursor is None:
            return 0
        border = min(cursor, await first_since(self._bus, info, at_cursor.time - self._blob_seconds))
        async for message in self._bus.scan(info.name, stream_subjects(self._run, Stream.SAMPLES)[0], start=cursor):
            if sha256 := message.headers.get(BLOB_HEADER):
                border = min(border, await self._first_chunk(info.name, "sample", sha256, border))
        return border

    async def _first_chunk(self, name: str, kind: str, sha256: str, otherwise: int) -> int:
        chunk = await self._bus.last(name, f"{subject.blob(self._run, kind)}.{sha256}.0")
        return otherwise if chunk is None else chunk.sequence

    async def _lowest_cursor(self) -> int:
        cursors: list[int] = []
        for model in self._learners:
            kept = await self._checkpoints(model)
            cursors.append(min((record.cursor for record in kept), default=0))
        return min(cursors, default=0)

    async def _checkpoints(self, model: str) -> list[Checkpoint]:
        name, found = stream_name(self._run, Stream.CHECKPOINTS), list[Checkpoint]()
        async for message in self._bus.scan(name, subject.checkpoints_of(self._run, model)):
            record = await read(self._bus, self._run, Stream.CHECKPOINTS, message)
            if isinstance(record, Checkpoint) and self._learners[model].is_valid(Version.parse(record.version)):
                found.append(record)
        return found[-self._keep_checkpoints :] if len(found) >= self._keep_checkpoints else []

    async def _weights(self) -> None:
        info = await self._info(Stream.WEIGHTS)
        if _is_full_enough(info):
            await self._below(info, await self._oldest_weights(await self._engines()))
        info = await self._info(Stream.WEIGHTS)
        if info.num_bytes >= CROWDED_RATIO * info.max_bytes:
            await self._below(info, await self._oldest_weights(()))

    async def _engines(self) -> list[Presence]:
        try:
            return await live_actors(self._bus, self._run, "inference")
        except BusError:
            return []

    async def _oldest_weights(self, engines: Sequence[Presence]) -> int:
        """The lowest sequence that any model needs; 0 when that is everything."""
        borders = [
            await self._oldest_weights_of(model, oldest_acknowledged(engines, model)) for model in self._learners
        ]
        return min(borders, default=0)

    async def _oldest_weights_of(self, model: str, acknowledged: Version | None) -> int:
        """Chunks of a version lie behind the record before it, unless an earlier version has the same bytes."""
        name, of = stream_name(self._run, Stream.WEIGHTS), subject.weights_of(self._run, model)
        found: list[tuple[int, Weights]] = []
        async for message in self._bus.scan(name, of):
            record = await read(self._bus, self._run, Stream.WEIGHTS, message)
            if isinstance(record, Weights):
                found.append((message.sequence, record))
        first = _first_needed([record for _, record in found], acknowledged)
        if first <= 0:
            return 0
        border = found[first - 1][0] + 1
        for _, record in found[first:]:
            # Chunks may have come after a record that names a file, for an engine that came late.
            for sha256 in filter(None, (record.sha256, record.patch_sha256)):
                border = min(border, await self._first_chunk(name, "weights", sha256, border))
        return border


def _first_needed(records: Sequence[Weights], acknowledged: Version | None) -> int:
    """Index of the oldest record that a live engine or one that comes late may need."""
    whole = [index for index, record in enumerate(records) if record.is_blob or not record.base]
    needed = [len(records) - KEPT_WEIGHTS, *whole[-1:]]
    if acknowledged is not None:
        needed += [index for index, record in enumerate(records) if Version.parse(record.version) > acknowledged][:1]
    return min(needed)


async def first_since(bus: Bus, info: StreamInfo, border: float) -> int:
    """The first sequence of a stream that was stored at or after `border` (JetStream time), by bisection."""
    low, high = info.first_sequence, info.last_sequence + 1
    while low < high:
        middle = (low + high) // 2
        message = await bus.get(info.name, middle)
        # A gap says nothing about time: keep everything from it on.
        if message is None or message.time >= border:
            high = middle
        else:
            low = middle + 1
    return low


def _is_full_enough(info: StreamInfo) -> bool:
    return info.num_bytes >= FULL_ENOUGH_RATIO * info.max_bytes
