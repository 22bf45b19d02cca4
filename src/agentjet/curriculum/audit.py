"""The audit of a run, read from its streams."""

from agentjet.accounting.audit import Audit, AuditReport
from agentjet.bus.protocol import Bus
from agentjet.bus.record import read
from agentjet.schemas.codec import SCHEMA_HEADER
from agentjet.schemas.ids import RunId, TicketId, TicketName
from agentjet.schemas.sample import Sample
from agentjet.schemas.score import Score
from agentjet.schemas.subject import Stream, stream_name

_READ = (Stream.LEDGER, Stream.CLAIMS, Stream.EPISODES, Stream.SCORES, Stream.SAMPLES)
"""The ledger first: what it calls settled was stored before, so a run in progress never seems to lose anything."""


async def read_audit(bus: Bus, run: RunId) -> AuditReport:
    """The report on a run as it stands; ages count to the newest record that was seen.

    Raises:
        RecordError: A chain of the ledger is damaged.
        BusError: The bus can not be read.
    """
    audit, now = Audit(), 0.0
    for stream in _READ:
        info = await bus.stream_info(stream_name(run, stream))
        if info.first_sequence > 1:
            audit.purged(stream.value)
        now = max(now, info.last_time, await _read(bus, run, stream, audit))
    return audit.report(now)


async def _read(bus: Bus, run: RunId, stream: Stream, audit: Audit) -> float:
    newest = 0.0
    async for message in bus.scan(stream_name(run, stream)):
        newest = max(newest, message.time)
        _, _, kind, *tokens = message.subject.split(".")
        if kind == "blob":
            continue
        match stream:
            case Stream.LEDGER:
                audit.ledger(message.sequence, message.time, await read(bus, run, stream, message))
            case Stream.SCORES:
                record = await read(bus, run, stream, message)
                if isinstance(record, Score):
                    audit.score(record, message.time)
            case Stream.SAMPLES:
                # Body unread: trees are large, and the header says what it is.
                is_sample = message.headers.get(SCHEMA_HEADER, "").startswith(f"{Sample.schema_name}/")
                model, group, member = tokens
                slot = TicketName.parse(f"{group}.{member}.0").slot
                audit.sample(model, slot, message.time, is_sample=is_sample)
            case Stream.EPISODES:
                audit.end(TicketId(".".join(tokens)), message.time)
            case _:
                audit.claim(TicketId(".".join(tokens)))
    return newest
