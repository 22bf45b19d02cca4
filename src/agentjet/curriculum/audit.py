"""The audit of a run, read from its streams, which go on being written meanwhile.

Invariants:

- What the learners settled is read first: all of it was stored before, so a run in progress never seems to lose
  anything.
- Then the streams come against their flow, and what the curriculum issued last: nothing is scored that had not ended,
  and nothing ended that was not issued.
"""

import time

from agentjet.accounting.audit import Audit, AuditReport
from agentjet.bus.protocol import Bus, StoredMessage
from agentjet.bus.record import read
from agentjet.schemas import subject
from agentjet.schemas.codec import SCHEMA_HEADER
from agentjet.schemas.ids import RunId, TicketId, TicketName
from agentjet.schemas.sample import Sample
from agentjet.schemas.score import Score
from agentjet.schemas.subject import CURRICULUM, Stream, stream_name

_AGAINST_THE_FLOW = (Stream.SAMPLES, Stream.SCORES, Stream.EPISODES, Stream.CLAIMS)


async def read_audit(bus: Bus, run: RunId) -> AuditReport:
    """The report on a run as it stands; ages are by the server's clock.

    Raises:
        RecordError: A chain of the ledger is damaged.
        BusError: The bus can not be read.
    """
    audit, ledger = Audit(), stream_name(run, Stream.LEDGER)
    last = (await bus.stream_info(ledger)).last_sequence
    async for message in bus.scan(ledger, end=last):
        audit.ledger(message.sequence, message.time, await read(bus, run, Stream.LEDGER, message))
    for stream in _AGAINST_THE_FLOW:
        async for message in bus.scan(stream_name(run, stream)):
            await _add(bus, run, stream, message, audit)
        # After it was read: a purge in between has to be known of.
        if (await bus.stream_info(stream_name(run, stream))).first_sequence > 1:
            audit.purged(stream.value)
    async for message in bus.scan(ledger, subject.ledger(run, CURRICULUM), start=last + 1):
        audit.ledger(message.sequence, message.time, await read(bus, run, Stream.LEDGER, message))
    return audit.report((await bus.stream_info(ledger)).time or time.time())


async def _add(bus: Bus, run: RunId, stream: Stream, message: StoredMessage, audit: Audit) -> None:
    _, _, kind, *tokens = message.subject.split(".")
    if kind == "blob":
        return
    match stream:
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
