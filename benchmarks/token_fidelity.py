"""Whether every sampled token is trained, exactly once and as sampled, whatever a model says in whatever template.

For each model family (`chat_family.py`) two agents hold 30-turn conversations in one episode, turn about: one with
tools and a system message, one without either, which leaves the thinking out of what it sends back. The engine draws
what `adversarial_reply.py` writes: tool calls, thinking, odd unicode, broken characters, special tokens spelt out,
unusual tokenizations, empty and cut replies, stop strings. It all goes through the inference service to CALLS and
through timeline merging to a sample.

Figures of each family: `num_sampled` tokens that the engine drew; `num_trained` terms of the sample that are such a
token with its log-prob, each counted once; calls by cause of `forks`; `num_drifted` replies whose text encodes to other
ids; `num_crashed` calls without a reply; `num_bos_wrong` prompts without exactly one BOS; `num_distrusted` times that a
rendering of a conversation's end was found wrong. Exit code 1 unless all tokens are trained and nothing crashed.

    python benchmarks/token_fidelity.py --json [--turns 30] [--families qwen3,mistral]
"""

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from adversarial_reply import STOP, Author, Script
from chat_family import FAMILIES, Family
from command import arguments, machine, show

from agentjet.accounting.key import Key, sign
from agentjet.bus import record
from agentjet.bus.memory import MemoryBus
from agentjet.bus.protocol import Subscription
from agentjet.inference.engine import Draw, EngineLoad, Generation
from agentjet.inference.service import InferenceService
from agentjet.merging.timeline import merge_episode
from agentjet.schemas import subject
from agentjet.schemas.call import Call, FinishReason, InferReply, InferRequest
from agentjet.schemas.claim import Claim
from agentjet.schemas.codec import decode
from agentjet.schemas.ids import GroupId, RunId, Version, new_call_id
from agentjet.schemas.sample import Sample
from agentjet.schemas.sampling import Sampling
from agentjet.schemas.score import Outcome, Score
from agentjet.schemas.subject import Stream, stream_name
from agentjet.schemas.task import Ticket

RUN, MODEL, SECRET = RunId("fidelity-aaaaaa"), "policy", bytes(range(32))
FINISH = {"end": FinishReason.STOP, "stop": FinishReason.STOP, "length": FinishReason.LENGTH}
TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the weather.",
            "parameters": {
                "type": "object",
                "properties": {"town": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["town"],
            },
        },
    },
)


class ScriptEngine:
    """Draws what is written, each token with a log-prob that no other has."""

    def __init__(self, scripts: Iterator[Script]) -> None:
        self._scripts = scripts
        self.version = Version(0, 0)
        self.context_length = 1 << 20
        self.load = EngineLoad(0, 0, 0, 0.0)
        self.drawn: list[tuple[int, float]] = []
        """Every token with its log-prob."""
        self.prompts: list[tuple[int, ...]] = []

    async def start(self) -> None: ...
    async def close(self) -> None: ...
    async def update_weights(self, version: Version, path: Path, *, timeout_seconds: float = 120.0) -> None: ...

    async def generate(self, generation: Generation) -> AsyncIterator[Draw]:
        script = next(self._scripts)
        self.prompts.append(tuple(generation.prompt_ids))
        first = len(self.drawn)
        self.drawn += [(token, -(first + index + 1) / 1024) for index, token in enumerate(script.ids)]
        logprobs = tuple(logprob for _, logprob in self.drawn[first:])
        stop = STOP if script.finish == "stop" else None
        yield Draw(script.ids, logprobs, self.version, FINISH[script.finish], stop)


class Dialogue:
    """One agent's conversation."""

    def __init__(self, author: Author, agent: str, *, has_tools: bool) -> None:
        self._author = author
        self.agent = agent
        self._keeps_thinking = has_tools
        self.tools = TOOLS if has_tools and author.family.has_tools else ()
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}] if has_tools else []
        self._num_questions = 0
        self._ask()

    def answer(self, message: dict[str, Any]) -> None:
        """Takes the model's message and says what comes next."""
        own = json.loads(json.dumps(message))
        if not self._keeps_thinking:
            own.pop("reasoning_content", None)
        self.messages.append(own)
        calls = message.get("tool_calls") or ()
        for call in calls:
            result = f"low 🙂 {self._num_questions}"
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        if not calls:
            self._ask()

    def _ask(self) -> None:
        self.messages.append({"role": "user", "content": self._author.question(self._num_questions)})
        self._num_questions += 1


class Episode:
    """One attempt at one ticket of one family."""

    def __init__(self, family: Family) -> None:
        self._family = family
        self._author = Author(family)
        self._bus = MemoryBus()
        self._engine = ScriptEngine(self._author.scripts())
        self._ticket = Ticket(
            run=RUN,
            pool="pool",
            group=GroupId("pool-0"),
            member=0,
            group_size=1,
            models=(MODEL,),
            ranks={MODEL: 0},
            seed=0,
            deadline_seconds=600.0,
        )
        self._service = InferenceService(
            self._bus,
            RUN,
            MODEL,
            self._engine,
            self._author.tokenizer,
            secret=SECRET,
            served_models=(MODEL,),
            stop_ids=frozenset({self._author.end, self._author.other_end}),
        )

    async def play(self, num_turns: int) -> dict[str, Any]:
        """The family's figures."""
        began, num_crashed = time.perf_counter(), 0
        for spec in record.stream_specs(RUN, max_bytes=1 << 30):
            await self._bus.ensure_stream(spec)
        where = subject.claim(RUN, self._ticket.id)
        claim = Claim(ticket=self._ticket, worker="benchmark")
        attempt = await record.put(self._bus, RUN, Stream.CLAIMS, where, claim)
        key = sign(SECRET, Key(run=RUN, ticket=self._ticket.id, attempt=attempt, expires=time.time() + 600))
        dialogues = [Dialogue(self._author, "main", has_tools=True), Dialogue(self._author, "sub", has_tools=False)]
        inbox = self._bus.inbox()
        replies = await self._bus.subscribe(inbox)
        serving = asyncio.create_task(self._service.run())
        for dialogue in dialogues * num_turns:
            reply = await self._ask(dialogue, key, inbox, replies)
            if reply.error is None:
                dialogue.answer(reply.message)
            else:
                num_crashed += 1
                print(f"{self._family.name}: {reply.error}", file=sys.stderr)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        return await self._figures(attempt) | {
            "num_crashed": num_crashed,
            "seconds": round(time.perf_counter() - began, 2),
        }

    async def _ask(self, dialogue: Dialogue, key: str, inbox: str, replies: Subscription) -> InferReply:
        request = InferRequest(
            run=RUN,
            call=new_call_id(),
            key=key,
            model=MODEL,
            agent=dialogue.agent,
            messages=tuple(dialogue.messages),
            tools=dialogue.tools,
            sampling=Sampling(stop=(STOP,)),
            deadline=time.time() + 60,
        )
        await record.put(self._bus, RUN, Stream.INFER, subject.infer(RUN, MODEL), request, reply=inbox)
        while True:
            message = await replies.next(60.0)
            answer = decode(message.headers, message.payload)
            if isinstance(answer, InferReply) and answer.call == request.call:
                return answer

    async def _figures(self, attempt: int) -> dict[str, Any]:
        scan = self._bus.scan(stream_name(RUN, Stream.CALLS))
        calls = [await record.read_as(Call, self._bus, RUN, Stream.CALLS, message) async for message in scan]
        score = Score(
            run=RUN,
            ticket=self._ticket,
            attempt=attempt,
            outcome=Outcome.SCORED,
            reward=1.0,
            calls={MODEL: tuple(call.call for call in calls)},
        )
        sample = merge_episode(calls, ticket=self._ticket, model=MODEL, score=score)
        bos = self._author.tokenizer.bos_token_id
        return {
            "num_calls": len(calls),
            "num_branches": sample.report.num_branches,
            "num_sampled": len(self._engine.drawn),
            "num_trained": num_trained(sample, self._engine.drawn),
            "forks": sample.report.forks,
            "num_drifted": sample.report.num_drifted,
            "num_bos_wrong": sum(ids.count(bos) != 1 for ids in self._engine.prompts) if bos is not None else 0,
            "num_distrusted": int(self._service.metrics()["num_template_distrusted"]),
        }


def num_trained(sample: Sample, drawn: list[tuple[int, float]]) -> int:
    """Drawn tokens that are terms of the sample, with their log-prob; each term counts once."""
    places = zip(sample.term_segment, sample.term_offset, sample.term_logprob, strict=True)
    terms = Counter((sample.segments[segment].ids[offset], logprob) for segment, offset, logprob in places)
    return (terms & Counter(drawn)).total() if terms.total() == len(sample.term_logprob) else 0


async def measure(families: list[str], num_turns: int) -> dict[str, dict[str, Any]]:
    """The figures of each family."""
    return {name: await Episode(FAMILIES[name]).play(num_turns) for name in families}


def is_exact(figures: dict[str, Any]) -> bool:
    """Whether nothing was lost, added or refused."""
    num_terms = figures["num_sampled"] == figures["num_trained"]
    return num_terms and not figures["num_crashed"] and not figures["num_bos_wrong"]


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--turns", type=int, default=30, help="of each of the two conversations")
    parser.add_argument("--families", default=",".join(FAMILIES), help="some of them, by name")
    options = parser.parse_args()
    found = asyncio.run(measure(options.families.split(","), options.turns))
    is_all_exact = all(map(is_exact, found.values()))
    show(
        {"benchmark": "token_fidelity", "is_exact": is_all_exact, "turns": options.turns}
        | found
        | {"machine": machine()},
        as_json=options.json,
    )
    return 0 if is_all_exact else 1


if __name__ == "__main__":
    sys.exit(main())
