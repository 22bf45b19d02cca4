"""`TransformersEngine`: continuous batching on a Transformers model, on CPU or one GPU.

Invariants:

- All tensor work happens in one thread of its own; the event loop only passes messages.
- An episode's next turn and the members of a group reuse keys and values by their token ids; nobody names a session.
- `update_weights` either commits before it returns, or raises and never commits.
"""

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Literal, NoReturn, Self

import torch
from transformers import AutoTokenizer

from agentjet.config import LoraSettings, ModelSettings
from agentjet.errors import AgentJetError, ContextLengthError, EngineEndedError, EngineError, UserError
from agentjet.inference.engine import Draw, EngineLoad, Generation, Tokenizer
from agentjet.inference.engine_loop import Cancel, Close, EngineLoop, Outcome, WeightUpdate
from agentjet.inference.policy_model import PolicyModel, choose_device, choose_dtype
from agentjet.inference.request import Request
from agentjet.inference.stop_string import StopWatcher
from agentjet.pretrained import model_file
from agentjet.schemas.ids import Version

_CLOSE_SECONDS = 30.0
_FIRST_VERSION = Version(0, 0)
_NO_LORA = LoraSettings()


class TransformersEngine:
    """The embedded default engine (see `Engine` for the contract)."""

    def __init__(
        self,
        path: str | Path,
        *,
        dtype: Literal["bfloat16", "float32", "auto"] = "auto",
        device: Literal["cpu", "cuda", "auto"] = "auto",
        num_threads: int | None = None,
        max_running: int = 64,
        cache_tokens: int = 32768,
        prefill_tokens_per_step: int = 1024,
        version: Version = _FIRST_VERSION,
        context_length: int | None = None,
        lora: LoraSettings = _NO_LORA,
        keep_kv: bool = False,
    ) -> None:
        """Nothing is loaded before `start`.

        Args:
            path: Model folder, preset or hub id, as `model_file.resolve` takes it.
            dtype: Of weights and activations; `auto` is bfloat16 where the hardware multiplies it.
            device: `auto` is CUDA where there is one.
            num_threads: Torch threads of the engine's thread; None leaves torch's choice.
            max_running: Most requests in one step.
            cache_tokens: Positions of keys and values kept, running and finished sequences together.
            prefill_tokens_per_step: Most prompt tokens a step computes, so that long prompts do not stall the others.
            version: What the weights at `path` are.
            context_length: Most tokens of prompt and completion; None takes the model's, up to 8,192.
            lora: With a rank, updates are adapters, and a generation keeps the one with which it began.
            keep_kv: At an update of whole weights, running generations keep their keys and values.
        """
        self._path, self._lora, self._keep_kv = path, lora, keep_kv
        self._dtype, self._device, self._num_threads = dtype, device, num_threads
        self._max_running, self._cache_tokens = max_running, cache_tokens
        self._prefill_tokens, self._context_length = prefill_tokens_per_step, context_length
        self._initial_version = version
        self._engine: EngineLoop | None = None
        self._model_context: int | None = None
        self._tokenizer: Tokenizer | None = None
        self._open: set[str] = set()
        """Ids of running generations."""
        self._serials = itertools.count()
        self._queues: dict[str, asyncio.Queue[Draw | AgentJetError]] = {}
        """By an id of our own: what was drawn before a cancel is not for who uses the caller's id again."""
        self._thread: threading.Thread | None = None
        self._ended = asyncio.Event()

    @classmethod
    def from_settings(cls, of: ModelSettings) -> Self:
        """The engine that a model's settings describe; a 0 there leaves the choice to the model or the machine."""
        settings = of.engine
        return cls(
            of.path,
            dtype=settings.dtype,
            device=settings.device,
            num_threads=settings.num_threads or None,
            max_running=settings.max_running,
            cache_tokens=settings.cache_tokens,
            prefill_tokens_per_step=settings.prefill_tokens,
            context_length=settings.context_tokens or None,
            lora=of.lora,
            keep_kv=settings.keep_kv,
        )

    @property
    def version(self) -> Version:
        """Weights that a generation which begins now is drawn with."""
        return self._engine.version if self._engine else self._initial_version

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and completion together; raises EngineError before `start`."""
        if self._model_context is None:
            raise EngineError("the context length is known once the engine has started: call start() first")
        return self._model_context

    @property
    def load(self) -> EngineLoad:
        """How busy the engine is, as of its last step."""
        return self._engine.load if self._engine else EngineLoad(0, 0, 0, 0.0)

    async def start(self) -> None:
        """Loads the model on the engine's thread.

        Raises:
            ModelNotFoundError: There is no such model on this machine.
            UnsupportedArchitectureError: This engine would serve it only approximately.
            ConfigError: It has no such layers as `lora` is to adapt.
            EngineError: Its files can not be loaded.
        """
        loop = asyncio.get_running_loop()
        started: asyncio.Future[None] = loop.create_future()
        self._loop = loop
        self._thread = threading.Thread(target=self._run, args=(started,), name="agentjet-engine", daemon=True)
        self._thread.start()
        await started

    def _run(self, started: asyncio.Future[None]) -> None:
        """The engine's thread."""
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)
        try:
            self._engine = self._load()
        except UserError as error:
            self._call(_fail, started, error)
            return
        except Exception as error:  # noqa: BLE001 - loading runs foreign code; its caller gets whatever went wrong
            self._call(_fail, started, EngineError(f"model {self._path} can not be loaded: {error}"))
            return
        self._call(_succeed, started)
        try:
            self._engine.run()
        finally:
            self._call(self._end)

    def _load(self) -> EngineLoop:
        folder = model_file.resolve(self._path)
        device = choose_device(self._device)
        model = PolicyModel(
            folder,
            dtype=choose_dtype(self._dtype, device),
            device=device,
            context_length=self._context_length,
            lora=self._lora if self._lora.rank else None,
        )
        if (folder / "tokenizer.json").is_file():
            self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model_context = model.context_length
        return EngineLoop(
            model,
            version=self._initial_version,
            max_running=self._max_running,
            cache_tokens=self._cache_tokens,
            prefill_tokens_per_step=self._prefill_tokens,
            num_versions=self._lora.num_versions,
            keep_kv=self._keep_kv,
            deliver=lambda outcomes: self._call(self._deliver, outcomes),
        )

    def _call(self, function: Callable[..., None], *args: object) -> None:
        """Runs a function on the event loop; there is nobody to tell once that is closed."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)

    def _deliver(self, outcomes: Sequence[Outcome]) -> None:
        for id, outcome in outcomes:
            if (queue := self._queues.get(id)) is not None:
                queue.put_nowait(outcome)

    def _end(self) -> None:
        """The thread is over: nobody will answer what is open, nor what came too late for it to see."""
        self._ended.set()
        for queue in self._queues.values():
            queue.put_nowait(EngineEndedError("the engine was closed"))

    async def generate(self, generation: Generation) -> AsyncIterator[Draw]:
        """Draws as they come; closing the iterator cancels the generation.

        Raises:
            ContextLengthError: The prompt leaves no room for a token.
            EngineEndedError: The engine is not running, or not any more.
            EngineError: It failed in a step, or knows a running generation of that id.
        """
        engine, request = self._running(), self._request(generation)
        if generation.id in self._open:
            raise EngineError(f"generation {generation.id} is already running; ids have to be unique")
        id = request.generation.id
        queue = self._queues[id] = asyncio.Queue()
        self._open.add(generation.id)
        is_over = False
        engine.commands.put(request)
        try:
            while not is_over:
                outcome = await queue.get()
                is_over = not isinstance(outcome, Draw) or outcome.finish_reason is not None
                if not isinstance(outcome, Draw):
                    raise outcome
                yield outcome
        finally:
            del self._queues[id]
            self._open.discard(generation.id)
            if not is_over:
                engine.commands.put(Cancel(id))

    def _running(self) -> EngineLoop:
        if self._engine is None or self._ended.is_set():
            raise EngineEndedError("the engine is not running: call start() first, and not after close()")
        return self._engine

    def _request(self, generation: Generation) -> Request:
        num_prompt, sampling = len(generation.prompt_ids), generation.sampling
        room = self.context_length - num_prompt
        if num_prompt == 0 or room < 1:
            raise ContextLengthError(
                f"the prompt has {num_prompt} tokens, but it takes 1 to {self.context_length - 1} of the context of "
                f"{self.context_length}: shorten the conversation"
            )
        stop = None
        if sampling.stop:
            if self._tokenizer is None:
                raise EngineError(f"model {self._path} has no tokenizer.json, which stop strings need")
            stop = StopWatcher(self._tokenizer, sampling.stop)
        own = replace(generation, id=f"{generation.id}#{next(self._serials)}")
        return Request(own, min(sampling.max_tokens, room), Random(sampling.seed), stop)

    async def update_weights(self, version: Version, path: Path, *, timeout_seconds: float = 120.0) -> None:
        """Serves a snapshot as `version`, also to running generations; or an adapter, to those that begin from now on.

        Raises:
            EngineError: The file is unreadable or of another model; the old weights stay.
            TimeoutError: It was not in place in time, or as many adapters as are allowed were in use; the old weights
                stay.
            CancelledError: Nobody waits any more; the weights may be in place or not.
        """
        engine = self._running()
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def settle(error: AgentJetError | None) -> None:
            self._call(_succeed, done) if error is None else self._call(_fail, done, error)

        update = WeightUpdate(version, Path(path), settle)
        engine.commands.put(update)
        try:
            async with asyncio.timeout(timeout_seconds):
                await asyncio.shield(done)
        except asyncio.CancelledError:
            update.settle("abandoned")
            done.cancel()
            raise
        except TimeoutError:
            # Too late to give up: the weights are in place, or will be in a moment.
            if not update.settle("abandoned"):
                await done
                return
            done.cancel()
            raise TimeoutError(
                f"weights {version} were not in place within {timeout_seconds:g} s, and the old ones stay; an adapter "
                "waits while running calls use others: raise lora.num_versions where calls are long"
            ) from None

    async def ended(self) -> NoReturn:
        """Raises EngineEndedError once the engine's thread is over, by `close` or by a defect."""
        await self._ended.wait()
        raise EngineEndedError(f"the engine of {self._path} has ended; restart it")

    async def close(self) -> None:
        """Ends the thread; open generations raise EngineError."""
        if self._engine is not None and self._thread is not None and self._thread.is_alive():
            self._engine.commands.put(Close())
            await asyncio.to_thread(self._thread.join, _CLOSE_SECONDS)
            self._end()


def _succeed(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _fail(future: asyncio.Future[None], error: AgentJetError) -> None:
    if not future.done():
        future.set_exception(error)
