"""The hearing of a group: one judgement on all of its members, once the last of them has ended.

The end that was *stored last* is the one that brings the group before its judge; the handler of any other has nothing
to do. That can not be missed: an end is handed out only after it was stored, so the handler of the last one finds all
the others in the stream, whoever stored them and however late their own handlers are. And it can not be forgotten: that
end is acknowledged only when the group's scores are stored, so after a crash at any point it comes again and finds the
judgement, or none and asks again, or some scores and adds the others. It comes again and again harmlessly, and to two
stages at once as well: the judgement is create-only, and scores are made from the one that is stored.
"""

from collections.abc import Awaitable, Callable

from agentjet.bus.protocol import Bus
from agentjet.bus.record import last, put_once, read_as
from agentjet.errors import RecordError
from agentjet.reward.panel import Panel
from agentjet.schemas import subject
from agentjet.schemas.episode import Episode
from agentjet.schemas.ids import RunId, TicketName
from agentjet.schemas.judgement import Judgement
from agentjet.schemas.score import Score
from agentjet.schemas.subject import Stream, stream_name
from agentjet.schemas.task import Ticket

Judge = Callable[[Panel], Awaitable[Judgement]]
"""Makes the judgement of a group that has none yet."""


async def hear(bus: Bus, run: RunId, sequence: int, ticket: Ticket, judge: Judge) -> list[Score]:
    """The scores of a ticket's group, from its judgement; none unless its ends are whole and this is the last.

    Args:
        bus: Where the ends are, and the judgement.
        run: The run.
        sequence: Of the ticket's end in EPISODES.
        ticket: Of the judged group.
        judge: Asked where there is no judgement yet; what it raises, this raises.

    Raises:
        BusError: The bus does not answer, or can not store the judgement.
        RecordError: A record of the group can not be read, or the judgement is too large to be stored.
    """
    panel = await _panel(bus, run, sequence, ticket)
    if panel is None or panel.num_open or not panel.completed:
        return []
    return panel.scores(await _judgement(bus, run, panel, judge))


async def _panel(bus: Bus, run: RunId, sequence: int, ticket: Ticket) -> Panel | None:
    """None where another end was stored later, or a member has none: then the bodies stay unread."""
    found = await bus.last_many(stream_name(run, Stream.EPISODES), [subject.episodes_of(run, ticket.group)])
    members = {TicketName.parse(".".join(of.split(".")[-3:])).member for of in found}
    if len(members) < ticket.group_size or any(message.sequence > sequence for message in found.values()):
        return None
    return Panel([await read_as(Episode, bus, run, Stream.EPISODES, message) for message in found.values()])


async def _judgement(bus: Bus, run: RunId, panel: Panel, judge: Judge) -> Judgement:
    to = subject.judgement(run, panel.group)
    known = await last(Judgement, bus, run, Stream.JUDGEMENTS, to)
    if known is not None:
        return known[1]
    stored = await put_once(bus, run, Stream.JUDGEMENTS, to, await judge(panel))
    if not isinstance(stored.record, Judgement):
        raise RecordError(f"{to}: expected a judgement record, found {stored.record.schema_name}")
    return stored.record
