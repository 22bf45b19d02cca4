"""What every chain of a run's ledger says, as far as this AgentJet can read it."""

from collections.abc import Mapping
from dataclasses import dataclass

from agentjet.accounting.ledger import CurriculumView, LedgerView
from agentjet.bus.protocol import Bus
from agentjet.bus.record import read
from agentjet.errors import UnknownSchemaError
from agentjet.schemas.ids import RunId
from agentjet.schemas.subject import CURRICULUM, Stream, stream_name


@dataclass(frozen=True, slots=True)
class Ledgers:
    """The chains of a run."""

    curriculum: CurriculumView
    learners: Mapping[str, LedgerView]
    """By model; also of models that groups were issued for and no learner has come to."""
    unknown: tuple[str, ...]
    """Of each chain that a newer AgentJet has written in: its first record that can not be read, in a sentence.

    What comes after it in that chain is not counted.
    """


async def read_ledgers(bus: Bus, run: RunId) -> Ledgers:
    """All chains; empty ones while the run is just being set up. Raises BusError, RecordError."""
    curriculum, learners, unknown = CurriculumView(), dict[str, LedgerView](), dict[str, str]()
    name = stream_name(run, Stream.LEDGER)
    if name not in await bus.stream_names(name):
        return Ledgers(curriculum, learners, ())
    async for message in bus.scan(name):
        who = message.subject.rpartition(".")[2]
        view = curriculum if who == CURRICULUM else learners.setdefault(who, LedgerView())
        if who not in unknown:
            try:
                view.apply(message.sequence, await read(bus, run, Stream.LEDGER, message))
            except UnknownSchemaError as error:
                unknown[who] = str(error)
    for model in curriculum.models:
        learners.setdefault(model, LedgerView())
    return Ledgers(curriculum, learners, tuple(unknown.values()))
