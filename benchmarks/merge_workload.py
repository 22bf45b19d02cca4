"""Episodes of made-up tokens in the shapes that agents leave behind, for `merge_speed.py`.

Each shape's lengths stand in its builder's signature and are reported with the figures. Token ids come from a seeded
generator: speed does not depend on them. An episode is what engines store of it, its calls' prompts and completions;
merging gets no other hint. A group needs two different rewards to have a gradient, so an episode that stands for
itself gets a *partner* of one prompt token and one completion token.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from agentjet.merging import merge_episode
from agentjet.schemas.call import Call, FinishReason, Usage
from agentjet.schemas.ids import CallId, GroupId, RunId
from agentjet.schemas.sample import Sample
from agentjet.schemas.sampling import Sampling
from agentjet.schemas.score import Outcome, Score
from agentjet.schemas.task import Ticket

Ids = list[int]
VOCAB = 256
"""Ids that are drawn; every model's vocabulary holds them."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One model call."""

    prompt: Ids
    completion: Ids
    agent: str = ""


@dataclass(frozen=True, slots=True)
class Episode:
    """Calls in the order in which they were made."""

    reward: float
    turns: list[Turn]


@dataclass(frozen=True, slots=True)
class Workload:
    """The batch of one optimizer step."""

    name: str
    shape: dict[str, int | str]
    """What was fixed: lengths in tokens, or what was taken of a trace."""
    groups: list[list[Episode]]
    aimed_share: float = 0.85
    """Of the bound."""

    def samples(self) -> list[list[Sample]]:
        """The groups as the merger writes them."""
        return [
            [_merged(episode, group, member, len(episodes)) for member, episode in enumerate(episodes)]
            for group, episodes in enumerate(self.groups)
        ]


@dataclass(slots=True)
class _Writer:
    """Draws token ids."""

    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def draw(self, length: int) -> Ids:
        return [self.rng.randrange(3, VOCAB) for _ in range(length)]


def chain(*, system: int = 512, completion: int = 16, observation: int = 32, turns: int = 30) -> Workload:
    """Every call continues the one before it."""
    write = _Writer().draw
    episode = _conversation(write, write(system), completion, observation, turns)
    shape = {"system": system, "completion": completion, "observation": observation, "turns": turns}
    return Workload("chain30", shape, [with_partner(episode)], 0.9)


def think_drop(
    *, system: int = 256, thought: int = 24, answer: int = 8, observation: int = 24, turns: int = 30
) -> Workload:
    """The template drops a reply's thought once the next turn begins."""
    write = _Writer().draw
    history, calls = write(system), list[Turn]()
    for _ in range(turns):
        said = write(answer)
        calls.append(Turn(history, write(thought) + said))
        history = history + said + write(observation)
    shape = {"system": system, "thought": thought, "answer": answer, "observation": observation, "turns": turns}
    return Workload("thinkdrop30", shape, [with_partner(calls)])


def group(*, prompt: int = 1280, completion: int = 32, members: int = 16) -> Workload:
    """Single answers to one long prompt."""
    write = _Writer().draw
    shared = write(prompt)
    episodes = [Episode(float(member % 2), [Turn(shared, write(completion))]) for member in range(members)]
    shape = {"prompt": prompt, "completion": completion, "members": members}
    return Workload("group16", shape, [episodes], 0.9)


def group_of_chains(
    *, prompt: int = 448, completion: int = 8, observation: int = 16, turns: int = 5, members: int = 16
) -> Workload:
    """Conversations that begin with one long prompt."""
    write = _Writer().draw
    shared = write(prompt)
    episodes = [
        Episode(float(member % 2), _conversation(write, shared, completion, observation, turns))
        for member in range(members)
    ]
    shape = {
        "prompt": prompt,
        "completion": completion,
        "observation": observation,
        "turns": turns,
        "members": members,
    }
    return Workload("group16x5turns", shape, [episodes], 0.9)


def werewolf(
    *,
    rules: int = 96,
    role: int = 16,
    statement: int = 3,
    question: int = 8,
    completion: int = 8,
    agents: int = 9,
    rounds: int = 12,
) -> Workload:
    """Several agents read rules, their role and the public log; each call's prompt is rendered afresh.

    A question closes every prompt and stays out of the log, so no call continues another.
    """
    write = _Writer().draw
    shared, roles, log = write(rules), [write(role) for _ in range(agents)], Ids()
    calls: list[Turn] = []
    for _ in range(rounds):
        for agent in range(agents):
            prompt = shared + roles[agent] + log + write(question)
            calls.append(Turn(prompt, write(completion), f"player-{agent}"))
        log = log + write(statement * agents)
    shape = {
        "rules": rules,
        "role": role,
        "statement": statement,
        "question": question,
        "completion": completion,
        "agents": agents,
        "calls_per_agent": rounds,
    }
    return Workload("werewolf", shape, [with_partner(calls)])


def window(
    *, system: int = 384, completion: int = 16, observation: int = 32, turns: int = 24, kept: int = 5
) -> Workload:
    """The agent keeps the system prompt and the last few turns."""
    write = _Writer().draw
    head, exchanges, calls = write(system), list[Ids](), list[Turn]()
    for _ in range(turns):
        asked, said = write(observation), write(completion)
        calls.append(Turn([*head, *(token for turn in exchanges[-kept:] for token in turn), *asked], said))
        exchanges.append(asked + said)
    shape = {"system": system, "completion": completion, "observation": observation, "turns": turns, "kept": kept}
    return Workload("window5", shape, [with_partner(calls)])


def summary(
    *,
    system: int = 384,
    completion: int = 16,
    observation: int = 32,
    request: int = 16,
    summary: int = 64,
    turns: int = 10,
    spans: int = 3,
) -> Workload:
    """After some turns the agent has the conversation summarised and goes on from the summary."""
    write = _Writer().draw
    head, carried, calls = write(system), Ids(), list[Turn]()
    for span in range(spans):
        calls += _conversation(write, head + carried, completion, observation, turns)
        if span + 1 < spans:
            carried = write(summary)
            last = calls[-1]
            calls.append(Turn(last.prompt + last.completion + write(request), carried))
    shape = {
        "system": system,
        "completion": completion,
        "observation": observation,
        "request": request,
        "summary": summary,
        "turns": turns,
        "spans": spans,
    }
    return Workload("summary10", shape, [with_partner(calls)])


SHAPES: dict[str, Callable[..., Workload]] = {
    "chain30": chain,
    "thinkdrop30": think_drop,
    "group16": group,
    "group16x5turns": group_of_chains,
    "werewolf": werewolf,
    "window5": window,
    "summary10": summary,
}


def with_partner(turns: list[Turn]) -> list[Episode]:
    """A group of the episode and its partner."""
    return [Episode(1.0, turns), Episode(0.0, [Turn([1], [2])])]


def _conversation(
    write: Callable[[int], Ids], history: Ids, completion: int, observation: int, turns: int
) -> list[Turn]:
    """Turns that each continue the one before."""
    calls: list[Turn] = []
    for _ in range(turns):
        said = write(completion)
        calls.append(Turn(history, said))
        history = history + said + write(observation)
    return calls


def _merged(episode: Episode, group: int, member: int, size: int) -> Sample:
    ticket = Ticket(
        run=RunId("bench-000000"),
        pool="p",
        group=GroupId(f"p-{group}"),
        member=member,
        group_size=size,
        models=("m",),
        ranks={"m": group},
        seed=0,
        deadline_seconds=1.0,
    )
    calls = [_call(turn, ticket, index) for index, turn in enumerate(episode.turns)]
    score = Score(
        run=ticket.run,
        ticket=ticket,
        attempt=1,
        outcome=Outcome.SCORED,
        reward=episode.reward,
        calls={"m": tuple(call.call for call in calls)},
    )
    return merge_episode(calls, ticket=ticket, model="m", score=score)


def _call(turn: Turn, ticket: Ticket, index: int) -> Call:
    return Call(
        run=ticket.run,
        call=CallId(f"c{index}"),
        ticket=ticket.id,
        attempt=1,
        model="m",
        engine="e",
        generation="g",
        agent=turn.agent,
        prompt_ids=tuple(turn.prompt),
        completion_ids=tuple(turn.completion),
        logprobs=(-1.0,) * len(turn.completion),
        versions=("1-0",),
        sampling=Sampling(),
        messages=(),
        message={},
        finish_reason=FinishReason.STOP,
        usage=Usage(prompt_tokens=len(turn.prompt), completion_tokens=len(turn.completion)),
    )
