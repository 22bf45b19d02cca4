"""Records over the bus: typed publish and read.

A record that exceeds the payload limit rides as a blob: its chunks are stored first, then a message with an empty body
and the headers `AJ-Blob` (sha256) and `AJ-Blob-Bytes`. Readers see no difference.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from agentjet.bus.protocol import Bus, Handler, Request, StoredMessage, StreamSpec
from agentjet.errors import ConflictError, RecordError, RecordTooLargeError, UnknownSchemaError
from agentjet.schemas import subject
from agentjet.schemas.codec import decode, encode
from agentjet.schemas.ids import RunId
from agentjet.schemas.record import Record
from agentjet.schemas.subject import Stream, stream_name, stream_subjects

BLOB_HEADER = "AJ-Blob"
BLOB_BYTES_HEADER = "AJ-Blob-Bytes"
REPLY_HEADER = "AJ-Reply"
_CHUNK_GRACE_SECONDS = 10.0

_BLOB_KINDS = {
    Stream.CALLS: "call",
    Stream.EPISODES: "episode",
    Stream.INFER: "infer",
    Stream.SAMPLES: "sample",
}

_SHARES = {
    Stream.TASKS: 0.04,
    Stream.CLAIMS: 0.02,
    Stream.INFER: 0.05,
    Stream.CALLS: 0.22,
    Stream.EPISODES: 0.10,
    Stream.JUDGEMENTS: 0.01,
    Stream.SCORES: 0.05,
    Stream.SAMPLES: 0.18,
    Stream.LEDGER: 0.05,
    Stream.WEIGHTS: 0.22,
    Stream.CHECKPOINTS: 0.01,
    Stream.EVENTS: 0.05,
}
"""Each stream's share of `streams.max_gib`; they sum to 1."""

R = TypeVar("R", bound=Record)
Q = TypeVar("Q", bound=Record)


def stream_specs(run: RunId, *, max_bytes: int, replicas: int = 1) -> list[StreamSpec]:
    """How the streams of a run are to exist within `max_bytes` in all."""
    return [
        StreamSpec(
            name=stream_name(run, stream),
            subjects=stream_subjects(run, stream),
            max_bytes=int(max_bytes * share),
            work_queue=stream in (Stream.TASKS, Stream.INFER),
            max_age_seconds={Stream.EVENTS: 7 * 86_400.0, Stream.INFER: 3_600.0}.get(stream, 0.0),
            allow_message_ttl=stream is Stream.INFER,
            discard_old=stream is Stream.EVENTS,
            replicas=replicas,
        )
        for stream, share in _SHARES.items()
    ]


async def put(
    bus: Bus,
    run: RunId,
    stream: Stream,
    to: str,
    record: Record,
    *,
    expected: int | None = None,
    ttl_seconds: float | None = None,
    reply: str | None = None,
) -> int:
    """Store a record under the subject `to`; returns its sequence. `expected` as in `Bus.publish`.

    Raises RecordTooLargeError where the stream carries no blobs, and what `Bus.publish` raises.
    """
    headers, body = encode(record)
    name = stream_name(run, stream)
    if len(body) > bus.max_payload_bytes:
        kind = _BLOB_KINDS.get(stream)
        if kind is None:
            raise RecordTooLargeError(
                f"{to}: a {record.schema_name} record of {len(body)} bytes exceeds the payload limit of "
                f"{bus.max_payload_bytes} bytes; make it smaller or raise max_payload of the NATS server"
            )
        # The chunks outlive the message that names them.
        chunk_seconds = None if ttl_seconds is None else ttl_seconds + _CHUNK_GRACE_SECONDS
        sha256 = await bus.put_blob(name, subject.blob(run, kind), body, ttl_seconds=chunk_seconds)
        headers |= {BLOB_HEADER: sha256, BLOB_BYTES_HEADER: str(len(body))}
        body = b""
    return await bus.publish(
        to, body, stream=name, headers=headers, expected=expected, ttl_seconds=ttl_seconds, reply=reply
    )


async def read(bus: Bus, run: RunId, stream: Stream, message: StoredMessage) -> Record:
    """The record in a stored message, fetched from its blob where it rides as one.

    Raises RecordError, UnknownSchemaError, BlobError.
    """
    body = await _body(bus, run, stream, message)
    try:
        return decode(message.headers, body)
    except UnknownSchemaError as error:
        raise UnknownSchemaError(f"{stream.value} sequence {message.sequence}: {error}") from None


async def _body(bus: Bus, run: RunId, stream: Stream, message: StoredMessage) -> bytes:
    sha256 = message.headers.get(BLOB_HEADER)
    if sha256 is None:
        return message.payload
    kind = _BLOB_KINDS.get(stream)
    size = message.headers.get(BLOB_BYTES_HEADER, "")
    if kind is None or not size.isdecimal():
        raise RecordError(f"{message.subject}: a blob stands where none belongs")
    return await bus.get_blob(stream_name(run, stream), subject.blob(run, kind), sha256, int(size))


async def read_as(cls: type[R], bus: Bus, run: RunId, stream: Stream, message: StoredMessage) -> R:
    """As `read`, and RecordError when it is another schema than that of `cls`."""
    record = await read(bus, run, stream, message)
    if not isinstance(record, cls):
        raise RecordError(f"{message.subject}: expected a {cls.schema_name} record, found {record.schema_name}")
    return record


async def last(cls: type[R], bus: Bus, run: RunId, stream: Stream, of: str) -> tuple[int, R] | None:
    """Sequence and record of the newest message under a subject, or None."""
    message = await bus.last(stream_name(run, stream), of)
    return None if message is None else (message.sequence, await read_as(cls, bus, run, stream, message))


@dataclass(frozen=True, slots=True)
class Stored:
    """What stands under a create-only subject after a try to write it."""

    sequence: int
    record: Record
    is_ours: bool
    """False: another record was there first; `record` is that one."""


async def put_once(bus: Bus, run: RunId, stream: Stream, to: str, record: Record) -> Stored:
    """Create-only publish; when something is stored already, that is what counts."""
    try:
        return Stored(await put(bus, run, stream, to, record, expected=0), record, is_ours=True)
    except ConflictError:
        message = await bus.last(stream_name(run, stream), to)
        if message is None:
            raise
        return Stored(message.sequence, await read(bus, run, stream, message), is_ours=False)


async def ask(bus: Bus, to: str, question: Record, answer: type[R], *, timeout_seconds: float = 5.0) -> R:
    """A question to another actor's service; raises as `Bus.request`, and RecordError for a strange answer."""
    headers, body = encode(question)
    reply = await bus.request(to, body, headers=headers, timeout_seconds=timeout_seconds)
    return read_plain(answer, reply)


def read_plain(cls: type[R], message: Request) -> R:
    """The record in a message that is not stored."""
    record = decode(message.headers, message.payload)
    if not isinstance(record, cls):
        raise RecordError(f"{message.subject}: expected a {cls.schema_name} record, found {record.schema_name}")
    return record


async def tell(bus: Bus, to: str, record: Record) -> None:
    """Send a record that is not stored."""
    headers, body = encode(record)
    await bus.send(to, body, headers=headers)


def answering(cls: type[Q], answer: Callable[[Q], Awaitable[Record]]) -> Handler:
    """A handler for `Bus.serve` that takes and gives records."""

    async def handle(request: Request) -> tuple[bytes, Mapping[str, str]]:
        headers, payload = encode(await answer(read_plain(cls, request)))
        return payload, headers

    return handle
