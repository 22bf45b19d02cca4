"""A run whose other actors are played by hand, around a real curriculum."""

import asyncio
import contextlib

from agentjet.bus.ledger import LedgerChain
from agentjet.bus.record import ask, put_once, read, stream_specs
from agentjet.config.settings import SwarmSettings
from agentjet.curriculum.curriculum import Curriculum
from agentjet.schemas import subject
from agentjet.schemas.claim import ClaimGrant, ClaimRequest
from agentjet.schemas.episode import EndStatus, Episode
from agentjet.schemas.ids import RunId
from agentjet.schemas.ledger import GroupIssue, LearnerStart, LearnerStep
from agentjet.schemas.score import Outcome, Score
from agentjet.schemas.subject import Stream, stream_name
from agentjet.schemas.task import EpisodeKind

SECRET = bytes(range(32))


def settings_of(tasks, *, run=None, pool=None, learner=None, **sections):
    pools = {"guess": {"workflow": "agent.py:run", "tasks": tasks, "group_size": 2} | (pool or {})}
    learners = {"batch_groups": 2, "admission_bound": 0} | (learner or {})
    models = {"small": {"path": "tiny", "learner": learners, "algorithm": {"min_group": 1}}}
    return SwarmSettings.model_validate({"run": run or {}, "pools": pools, "models": models} | sections)


class Swarm:
    """Everybody but the curriculum, played by hand."""

    def __init__(self, bus, run):
        self.bus, self.run = bus, RunId(run)
        self.running = []
        self.steps = 0
        self.chain = LedgerChain(bus, self.run, "small")

    async def begin(self):
        for spec in stream_specs(self.run, max_bytes=64 * 1024 * 1024):
            await self.bus.ensure_stream(spec)

    @contextlib.asynccontextmanager
    async def curriculum(self, settings, **options):
        one = Curriculum(self.bus, self.run, settings, SECRET, **({"tick_seconds": 0.05} | options))
        job = asyncio.ensure_future(one.run())
        try:
            yield one, job
        finally:
            job.cancel()
            await asyncio.gather(job, return_exceptions=True)

    async def records(self, stream, of=">"):
        found = [message async for message in self.bus.scan(stream_name(self.run, stream), of)]
        return [await read(self.bus, self.run, stream, message) for message in found]

    async def issues(self):
        return [one for one in await self.records(Stream.LEDGER) if isinstance(one, GroupIssue)]

    async def until(self, check, timeout_seconds=10.0):
        async with asyncio.timeout(timeout_seconds):
            while not (found := await check()):
                await asyncio.sleep(0.02)
        return found

    async def fetch(self, count, pool="guess"):
        """Take `count` tickets; they stay in progress as long as the test runs."""
        name = stream_name(self.run, Stream.TASKS)
        of = subject.tasks_of(self.run, pool)
        consumer = await self.bus.consumer(name, f"tasks-{pool}", subject=of, ack_wait_seconds=600.0)
        found = []
        async with asyncio.timeout(10.0):
            while len(found) < count:
                found += list(await consumer.fetch(count - len(found), 0.2))
        return [(await read(self.bus, self.run, Stream.TASKS, one.message), one) for one in found]

    async def none_waits(self, pool="guess"):
        name, of = stream_name(self.run, Stream.TASKS), subject.tasks_of(self.run, pool)
        consumer = await self.bus.consumer(name, f"tasks-{pool}", subject=of, ack_wait_seconds=600.0)
        return not await consumer.fetch(1, 0.3)

    async def claim(self, ticket, worker="w"):
        request = ClaimRequest(run=self.run, ticket=ticket, worker=worker)
        return await ask(self.bus, subject.claim_service(self.run), request, ClaimGrant)

    async def end(self, ticket):
        """Claim and end a ticket as its rollout does."""
        grant = await self.claim(ticket.id)
        assert grant.granted, grant.reason
        episode = Episode(run=self.run, ticket=ticket, attempt=grant.attempt, status=EndStatus.COMPLETED)
        await put_once(self.bus, self.run, Stream.EPISODES, subject.episode(self.run, ticket.id), episode)
        return grant

    async def play(self, ticket, delivery=None, outcome=Outcome.SCORED):
        """Claim, end and score a ticket as its rollout and the reward actor do."""
        grant = await self.end(ticket)
        await self.score(ticket, grant.attempt, outcome)
        if delivery is not None:
            await delivery.ack()
        return grant

    async def score(self, ticket, attempt, outcome):
        reward = 1.0 if outcome is Outcome.SCORED else None
        score = Score(run=self.run, ticket=ticket.without_task(), attempt=attempt, outcome=outcome, reward=reward)
        await put_once(self.bus, self.run, Stream.SCORES, subject.score(self.run, ticket.id), score)

    async def play_groups(self, count, size=2, pool="guess"):
        tickets = []
        for ticket, delivery in await self.fetch(count * size, pool):
            await self.play(ticket, delivery)
            tickets.append(ticket)
        return tickets

    async def start_learner(self, incarnation=1, base_step=0):
        await self.chain.load()
        self.steps = base_step
        self.incarnation = incarnation
        await self.chain.append(
            LearnerStart(
                run=self.run,
                model="small",
                incarnation=incarnation,
                base_step=base_step,
                cursor=1,
                config_digest="c",
                fold_digest="f",
            )
        )

    async def step(self, tickets):
        self.steps += 1
        groups = tuple(dict.fromkeys(ticket.group for ticket in tickets if ticket.kind is EpisodeKind.TRAIN))
        await self.chain.append(
            LearnerStep(
                run=self.run,
                model="small",
                incarnation=self.incarnation,
                step=self.steps,
                cursor=1,
                members=(),
                groups=groups,
                digest="d",
            )
        )
