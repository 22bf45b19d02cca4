"""Runs AgentJet's side, a whole swarm, and replays its first episodes on TRL's side."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import psutil
from trl_match.game import Game, load_agent
from trl_match.match import GIVE_UP_SECONDS, GROUPS, MEMBERS, VALID, Match, Step

from agentjet.actors.swarm import Swarm
from agentjet.bus.record import read, read_as
from agentjet.config.load import load
from agentjet.pretrained.tokenizer import load_tokenizer
from agentjet.schemas import subject
from agentjet.schemas.call import Call
from agentjet.schemas.episode import EndStatus, Episode
from agentjet.schemas.ids import CallId
from agentjet.schemas.ledger import LearnerStep
from agentjet.schemas.subject import Stream, stream_name


async def play_agentjet(match: Match) -> tuple[list[Step], int]:
    """AgentJet's steps, and how many of its episodes TRL's side replayed alike."""
    launched, config = time.time(), match.config()
    swarm = Swarm(load(config).settings, config)
    steps: list[Step] = []
    started, processor = 0.0, ProcessorTime()
    ledger, policy = stream_name(swarm.run, Stream.LEDGER), subject.ledger(swarm.run, "policy")
    async with swarm.running(), asyncio.timeout(GIVE_UP_SECONDS):
        watching = asyncio.ensure_future(processor.watch())
        async for message in swarm.bus.tail(ledger, policy):
            record = await read(swarm.bus, swarm.run, Stream.LEDGER, message)
            if isinstance(record, LearnerStep):
                started = started or await _first_request(swarm)
                whole, cpu = message.time - launched, processor.seconds()
                steps.append(agentjet_step(record, message.time - started, whole, cpu))
                if len(steps) == match.updates or steps[-1].valid_ratio >= VALID:
                    break
        watching.cancel()
        num_alike = await replay(swarm, match)
    return steps, num_alike


def agentjet_step(record: LearnerStep, seconds: float, whole_seconds: float, cpu_seconds: float) -> Step:
    """A step of the ledger."""
    return Step(
        seconds=seconds,
        whole_seconds=whole_seconds,
        cpu_seconds=cpu_seconds,
        valid_ratio=record.metrics["episode/valid_ratio"],
        reward=record.metrics["reward_mean"],
        trained_tokens=record.metrics["trained_tokens"],
    )


class ProcessorTime:
    """Of the processes below this one; one that has ended counts with what it had when it was last seen."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, float], float] = {}

    def seconds(self) -> float:
        """Of all that were seen, by now."""
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                self._seen[process.pid, process.create_time()] = sum(process.cpu_times()[:2])
        return sum(self._seen.values())

    async def watch(self) -> None:
        """Looks once a second, until cancelled."""
        while True:
            await asyncio.sleep(1.0)
            self.seconds()


async def _first_request(swarm: Swarm) -> float:
    """When the engine took the earliest of the first calls."""
    times: list[float] = []
    async for call, stored in _calls(swarm):
        times.append(stored - call.seconds)
        if len(times) == GROUPS * MEMBERS:
            break
    return min(times)


async def _calls(swarm: Swarm) -> AsyncIterator[tuple[Call, float]]:
    """Stored calls and when they were stored."""
    async for message in swarm.bus.scan(stream_name(swarm.run, Stream.CALLS)):
        if ".blob." not in message.subject:
            yield await read_as(Call, swarm.bus, swarm.run, Stream.CALLS, message), message.time


async def replay(swarm: Swarm, match: Match) -> int:
    """Episodes of the first batch that TRL's side repeats: same prompts for the same replies, and the same reward.

    Raises AssertionError where one differs.
    """
    calls = {call.call: call async for call, _ in _calls(swarm)}
    tokenizer, agent, count = load_tokenizer(match.model), load_agent(match.agent), 0
    stream, ends = stream_name(swarm.run, Stream.EPISODES), subject.stream_subjects(swarm.run, Stream.EPISODES)[0]
    async for message in swarm.bus.scan(stream, ends):
        episode = await read_as(Episode, swarm.bus, swarm.run, Stream.EPISODES, message)
        if episode.status is not EndStatus.COMPLETED:
            continue
        answered = [calls[CallId(call)] for call in episode.calls["policy"]]
        await asyncio.to_thread(check_alike, episode, answered, agent, tokenizer)
        count += 1
        if count == GROUPS * MEMBERS:
            break
    return count


def check_alike(episode: Episode, calls: Sequence[Call], agent: Any, tokenizer: Any) -> None:
    """Raises AssertionError unless TRL's side plays this episode as AgentJet did."""
    replies = iter([list(call.completion_ids) for call in calls])
    game = Game(agent, tokenizer, end_id=tokenizer.eos_token_id, generate=lambda _: [next(replies)])
    (other,) = game.play([episode.ticket.task])
    prompts: list[list[int]] = []
    for call in calls:
        before = prompts[-1] + list(calls[len(prompts) - 1].completion_ids) if call.parent else []
        prompts.append(before + list(call.prompt_ids))
    assert other.prompts == prompts, f"{episode.ticket.id}: other prompts"
    assert other.outcome["reward"] == episode.reward, f"{episode.ticket.id}: another reward"
