"""Plays an agent of `examples/` with a batched generator in place of the HTTP API: rounds of replies, rows of tokens.

The agent's own code runs, prompts, answers and reward included; only its `client` is exchanged. All episodes of a batch
play at once, and a round asks for the replies of every episode that still plays, which is the best a batched `generate`
can get. A conversation's ids grow: prompt, sampled ids, and the ids of what the chat template adds.

It knows neither TRL nor torch.
"""

import asyncio
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from agentjet.rollout.policy import Policy

Ids = list[int]
Generate = Callable[[list[Ids]], list[Ids]]
"""Sampled ids for a list of prompts, an end-of-turn token included."""


def load_agent(path: Path) -> Any:
    """The agent's file as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(slots=True)
class Episode:
    """One game: its tokens as a row, and what the agent said of it."""

    task: dict[str, Any]
    prompt_ids: Ids = field(default_factory=list)
    """The first prompt."""
    completion_ids: Ids = field(default_factory=list)
    """All that came after it."""
    is_sampled: list[int] = field(default_factory=list)
    """For each id of the completion: 1 where the model drew it."""
    prompts: list[Ids] = field(default_factory=list)
    """The whole prompt of each reply."""
    text: str = ""
    """The conversation so far as the template renders it."""
    outcome: dict[str, Any] = field(default_factory=dict)
    """What the agent returned: reward and metrics."""


class Game:
    """Plays batches of episodes.

    Args:
        agent: Module with `client` and `run`.
        tokenizer: The model's, with a chat template.
        end_id: The template's end-of-turn token.
        generate: Draws replies.
    """

    def __init__(self, agent: Any, tokenizer: Any, *, end_id: int, generate: Generate) -> None:
        self._agent, self._tokenizer, self._generate = agent, tokenizer, generate
        self._end_id, self._end_text = end_id, tokenizer.decode([end_id])
        self._episodes: list[Episode] = []
        self._waiting: list[tuple[Episode, asyncio.Future[str]]] = []
        agent.client = SimpleNamespace(with_options=self._client_of)

    def play(self, tasks: Sequence[dict[str, Any]]) -> list[Episode]:
        """One episode for each task."""
        self._episodes = [Episode(task) for task in tasks]
        asyncio.run(self._play())
        return self._episodes

    async def _play(self) -> None:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(self._run(seat)) for seat in range(len(self._episodes))]
            while live := sum(not one.done() for one in running):
                if len(self._waiting) == live:
                    self._reply()
                await asyncio.sleep(0)

    async def _run(self, seat: int) -> None:
        episode = self._episodes[seat]
        policy = Policy(base_url="", api_key=str(seat), models=("policy",))
        episode.outcome = await self._agent.run(episode.task, policy)

    def _client_of(self, *, api_key: str, **_: Any) -> Any:
        """What the agent takes for its OpenAI client."""
        create = _Create(self, self._episodes[int(api_key)])
        return SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))

    async def ask(self, episode: Episode, messages: Sequence[dict[str, Any]]) -> str:
        """The text of the model's reply, once the round's replies are drawn."""
        self._extend(episode, messages)
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((episode, future))
        return await future

    def _extend(self, episode: Episode, messages: Sequence[dict[str, Any]]) -> None:
        """Adds to an episode's row what the template writes after the last reply."""
        text = self._tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        assert text.startswith(episode.text), "the template rewrote the conversation"
        added = text[len(episode.text) :]
        if not episode.prompts:
            episode.prompt_ids = self._encode(added)
        else:
            if episode.completion_ids[-1] == self._end_id:
                added = added.removeprefix(self._end_text)
            ids = self._encode(added)
            episode.completion_ids += ids
            episode.is_sampled += [0] * len(ids)
        episode.text = text
        episode.prompts.append(episode.prompt_ids + episode.completion_ids)

    def _encode(self, text: str) -> Ids:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _reply(self) -> None:
        """Draws the replies of a round."""
        waiting, self._waiting = self._waiting, []
        drawn = self._generate([episode.prompts[-1] for episode, _ in waiting])
        for (episode, future), ids in zip(waiting, drawn, strict=True):
            episode.completion_ids += ids
            episode.is_sampled += [1] * len(ids)
            reply = self._tokenizer.decode(ids, skip_special_tokens=True)
            episode.text += reply
            future.set_result(reply)


class _Create:
    """`client.chat.completions.create`, as far as an agent of text needs it."""

    def __init__(self, game: Game, episode: Episode) -> None:
        self._game, self._episode = game, episode

    async def __call__(self, *, messages: Sequence[dict[str, Any]], **_: Any) -> Any:
        message = SimpleNamespace(content=await self._game.ask(self._episode, messages))
        return SimpleNamespace(choices=[SimpleNamespace(message=message)])
