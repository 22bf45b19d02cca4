"""What a real learner's steps say of their own staleness, under a player who always ends the newest episode first."""

from pathlib import Path

import pytest
from hand_played import Swarm
from learner_run import MODEL, living, put_slot, sample, settings, steps
from whole_swarm import make_streams

from agentjet.accounting.admission import max_staleness
from agentjet.bus.nats import NatsBus
from agentjet.bus.record import put, read_as
from agentjet.config.settings import SwarmSettings
from agentjet.schemas import subject
from agentjet.schemas.ids import RunId
from agentjet.schemas.score import Outcome, Score
from agentjet.schemas.subject import Stream, stream_name
from agentjet.schemas.task import Ticket

NUM_STEPS = 8


def settings_of(folder: Path, model: Path, tasks: str, a: int, w: int) -> SwarmSettings:
    pool = {"workflow": "agent.py:run", "tasks": tasks, "group_size": 2}
    one = settings(folder, model, admission_bound=a, straggler_bound=w)
    return SwarmSettings.model_validate(one.model_dump() | {"pools": {"guess": pool}})


@pytest.mark.parametrize(("a", "w"), [(0, 0), (2, 0), (1, 1), (2, 2)])
async def test_p11_no_step_reports_tokens_that_are_more_than_a_plus_w_steps_old(
    nats_bus: NatsBus, run: RunId, tasks: str, tmp_path: Path, model_folder: Path, a: int, w: int
):
    of = settings_of(tmp_path, model_folder, tasks, a, w)
    await make_streams(nats_bus, run)
    async with Swarm(nats_bus, run).curriculum(of), living(nats_bus, run, of):
        consumer = await nats_bus.consumer(
            stream_name(run, Stream.TASKS),
            "tasks-guess",
            subject=subject.tasks_of(run, "guess"),
            ack_wait_seconds=600.0,
        )
        held: list[tuple[Ticket, int]] = []
        done = 0
        while done < NUM_STEPS:
            found = [delivery.message for delivery in await consumer.fetch(64, 0.1)]
            # Counted after the fetch: the weights that draw a ticket's tokens are not older than its issue.
            done = len(await steps(nats_bus, run))
            held += [(await read_as(Ticket, nats_bus, run, Stream.TASKS, one), done) for one in found]
            if held:
                await _settle(nats_bus, run, *held.pop())
    figures = [step.metrics["staleness_max"] for step in await steps(nats_bus, run)]
    assert max(figures) <= max_staleness(a, w), figures
    assert max(figures) >= a, f"a player this bad comes near the bound: {figures}"


async def _settle(bus: NatsBus, run: RunId, ticket: Ticket, version_step: int) -> None:
    score = Score(run=run, ticket=ticket.without_task(), attempt=1, outcome=Outcome.SCORED, reward=1.0)
    await put(bus, run, Stream.SCORES, subject.score(run, ticket.id), score)
    record = sample(run, ticket.ranks[MODEL], ticket.member, float(ticket.member))
    calls = tuple(call.model_copy(update={"versions": (f"1-{version_step}",)}) for call in record.calls)
    await put_slot(bus, run, record.model_copy(update={"calls": calls}))
