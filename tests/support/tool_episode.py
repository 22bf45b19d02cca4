"""An episode of several turns with tools, for any agent: what the model says in it, and what has to come out.

The model asks for two sums at once, then for a third, then answers. However the agent keeps its history, the episode
has to merge into one branch in which every sampled token is trained once.
"""

import gc
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from chat_models import QWEN, RUN
from gateway_site import site
from openai import AsyncOpenAI

from agentjet.bus import record
from agentjet.merging.timeline import merge_episode
from agentjet.schemas import subject
from agentjet.schemas.claim import Claim
from agentjet.schemas.sample import Sample
from agentjet.schemas.score import Outcome, Score
from agentjet.schemas.subject import Stream, stream_name

TASK = "What is 1 + 2 + 3 + 4? Use the tool."
SYSTEM = "You add numbers."
ANSWER = "The sum is 10."
ADDED = [(1, 2), (3, 4), (3, 7)]
"""What the tool is asked for, in this order."""


def _call(a, b):
    return f'<tool_call>\n{{"name": "add", "arguments": {{"a": {a}, "b": {b}}}}}\n</tool_call>'


REPLIES = (f"Both at once.\n{_call(1, 2)}\n{_call(3, 4)}", _call(3, 7), ANSWER)


@dataclass
class ToolEpisode:
    """A claimed episode and its tool."""

    swarm: object
    gateway: object
    url: str
    key: str
    added: list[tuple[int, int]] = field(default_factory=list)

    def add(self, a: int, b: int) -> int:
        """Adds two numbers."""
        self.added.append((a, b))
        return a + b

    async def sample(self) -> Sample:
        """The episode ended and merged as its swarm does."""
        session, calls = self.gateway.session(self.key), await self.swarm.calls()
        claims = stream_name(RUN, Stream.CLAIMS)
        message = await self.swarm.bus.last(claims, subject.claim(RUN, calls[0].ticket))
        claim = await record.read_as(Claim, self.swarm.bus, RUN, Stream.CLAIMS, message)
        score = Score(
            run=RUN,
            ticket=claim.ticket,
            attempt=calls[0].attempt,
            outcome=Outcome.SCORED,
            reward=1.0,
            calls={model: tuple(answered) for model, answered in session.calls.items()},
        )
        return merge_episode(calls, ticket=claim.ticket, model="m", score=score)

    async def check(self, answer: str) -> None:
        """The agent played it to the end, and it is one branch with every sampled token trained once."""
        assert answer == ANSWER
        assert self.added == ADDED
        await self.check_sample()

    async def check_sample(self) -> None:
        """The episode is one branch with every sampled token trained once."""
        prompt = self.swarm.engine.prompt_text()
        assert [prompt.count(text) for text in ("Both at once.", "<tool_response>", TASK)] == [1, 3, 1]
        calls, sample = await self.swarm.calls(), await self.sample()
        assert [call.parent for call in calls] == [None, calls[0].call, calls[1].call]
        assert (sample.report.num_calls, sample.report.num_branches) == (3, 1)
        terms = list(zip(sample.term_segment, sample.term_offset, strict=True))
        assert len(set(terms)) == len(terms) == sum(len(call.completion_ids) for call in calls)
        trained = [sample.segments[segment].ids[offset] for segment, offset in terms]
        assert trained == [token for call in calls for token in call.completion_ids]


@asynccontextmanager
async def tool_episode(bus, replies=REPLIES):
    """The episode over real HTTP, with a model that says these replies."""
    remaining = iter(replies)
    async with site(bus, lambda prompt: next(remaining), template=QWEN, context_length=1 << 14) as here:
        key = await here.swarm.claim(ranks={"m": 0})
        try:
            yield ToolEpisode(here.swarm, here.gateway, here.url, key)
        finally:
            await _close_clients()


async def _close_clients():
    """Frameworks leave theirs open, which warns long after the test."""
    for one in gc.get_objects():
        if issubclass(type(one), AsyncOpenAI):
            await one.close()
