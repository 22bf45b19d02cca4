"""An engine that says what the test tells it to, token by token."""

import asyncio
from collections.abc import AsyncIterator, Callable

from agentjet.errors import ContextLengthError
from agentjet.inference.engine import Draw, EngineLoad, Generation
from agentjet.schemas.call import FinishReason
from agentjet.schemas.ids import Version


class ScriptedEngine:
    """`reply` is a text, or a function from the prompt's text to one; it may raise."""

    def __init__(self, chat, reply: str | Callable[[str], str] = "hi", *, context_length: int = 512) -> None:
        self.chat = chat
        self.reply = reply
        self.context_length = context_length
        self.version = Version(0, 0)
        self.load = EngineLoad(0, 0, 0, 0.0)
        self.generations: list[Generation] = []
        self.num_closed = 0
        self.go = asyncio.Event()
        """Cleared: engines stop after the first token."""
        self.go.set()
        self.on_draw: Callable[[int], None] = lambda index: None
        self.keeps_version = False
        """As with adapters: a generation has the version of its beginning."""
        self.is_mixed: Callable[[int], bool] = lambda index: False

    def prompt_text(self, index: int = -1) -> str:
        return self.chat.template.decode(self.generations[index].prompt_ids, with_specials=True)

    async def start(self) -> None: ...
    async def close(self) -> None: ...
    async def update_weights(self, version, path, *, timeout_seconds=120.0) -> None:
        self.version = version

    async def generate(self, generation: Generation) -> AsyncIterator[Draw]:
        self.generations.append(generation)
        room = self.context_length - len(generation.prompt_ids)
        if room < 1:
            raise ContextLengthError(f"the prompt of {len(generation.prompt_ids)} tokens leaves no room for a token")
        began = self.version
        text = self.reply if isinstance(self.reply, str) else self.reply(self.prompt_text())
        ids = (*self.chat.encode(text), self.chat.end)
        is_whole = False
        try:
            said = ""
            for index, token in enumerate(ids[: min(room, generation.sampling.max_tokens)]):
                if index:
                    await self.go.wait()
                await asyncio.sleep(0)
                self.on_draw(index)
                said += self.chat.template.decode([token])
                stop = next((s for s in generation.sampling.stop if s in said), None)
                finish = FinishReason.STOP if token == self.chat.end or stop else None
                if index == min(room, generation.sampling.max_tokens) - 1 and finish is None:
                    finish = FinishReason.LENGTH
                version = began if self.keeps_version else self.version
                yield Draw((token,), (-0.5,), version, finish, stop, num_cached_tokens=3, is_mixed=self.is_mixed(index))
                if finish:
                    is_whole = True
                    return
        finally:
            self.num_closed += not is_whole
