"""`VllmEngine`: vLLM's asynchronous engine behind AgentJet's protocol, on GPUs or a CPU.

Invariants:

- Token ids go in and come out; text is looked at for stop strings only, and all sampled ids are kept.
- New weights are read once while generation goes on, so that they are at hand. Then generation is paused, running
  requests give up their keys and values, every worker loads its part, the version is set, and generation resumes: no
  token is drawn in between, and none rests on a key of older weights.
- Adapters are loaded beside those in use, without a pause (`vllm_adapters`).
- Whatever stops an update before the first weight is touched leaves the old version serving. A worker that was stopped
  half-way can not be trusted: the engine then ends, and says so in `ended`. It is never left paused.

The engine's processes are vLLM's: a core, and a worker for each device. They end with this one (`vllm_executor`).
Log-probs of calls with a top-p below 1 or a top-k are those of the tokens that were kept; no such call is trained.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NoReturn, Self

from agentjet.config import LoraSettings, ModelSettings
from agentjet.errors import AgentJetError, EngineEndedError, EngineError
from agentjet.inference.engine import Draw, EngineLoad, Generation
from agentjet.inference.memory_split import LearnerNeed
from agentjet.inference.rate import Rate
from agentjet.inference.stop_string import StopWatcher
from agentjet.inference.vllm_adapters import VllmAdapters
from agentjet.inference.vllm_launch import LaunchedModel, launch
from agentjet.inference.vllm_reader import DrawReader, Start
from agentjet.inference.vllm_sampling import sampling_parameters
from agentjet.inference.vllm_weights import VllmWeights
from agentjet.schemas.ids import Version
from agentjet.schemas.sampling import Sampling

_LOOK_SECONDS = 0.2
_CLOSE_SECONDS = 10.0
_FIRST_VERSION = Version(0, 0)
_NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})
_NO_LORA = LoraSettings()


class VllmEngine:
    """The production engine (see `Engine` for the contract)."""

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
        options: Mapping[str, Any] = _NO_OPTIONS,
        learner: LearnerNeed | None = None,
        lora: LoraSettings = _NO_LORA,
        keep_kv: bool = False,
    ) -> None:
        """Nothing is loaded before `start`.

        Args:
            path: Model folder, preset or hub id, as `model_file.resolve` takes it.
            dtype: Of weights, activations and cache; `auto` is bfloat16 where the hardware multiplies it.
            device: `auto` is what the installed vLLM was built for.
            num_threads: Threads of a CPU's worker; None takes every core.
            max_running: Most requests in one step.
            cache_tokens: Positions of keys and values kept, on a CPU; on a GPU `gpu_memory_utilization` tells.
            prefill_tokens_per_step: Most tokens a step computes.
            version: What the weights at `path` are.
            context_length: Most tokens of prompt and completion; None takes the model's, up to 8,192.
            options: Further fields of vLLM's `AsyncEngineArgs`.
            learner: Who shares the GPU; None where nobody does.
            lora: With a rank, updates are adapters, and a generation keeps the one with which it began.
            keep_kv: At an update of whole weights, running generations keep their keys and values.
        """
        self._path, self._initial_version, self._lora, self._keep_kv = path, version, lora, keep_kv
        self._launch: Callable[[], tuple[Any, LaunchedModel]] = partial(
            launch,
            path,
            dtype=dtype,
            device=device,
            num_threads=num_threads,
            max_running=max_running,
            cache_tokens=cache_tokens,
            prefill_tokens_per_step=prefill_tokens_per_step,
            context_length=context_length,
            options=options,
            learner=learner,
            lora=lora,
        )
        self._llm: Any = None
        self._model: LaunchedModel | None = None
        self._weights: VllmWeights | VllmAdapters | None = None
        self._open: dict[str, DrawReader] = {}
        self._lengths: dict[str, int] = {}
        self._rate = Rate()
        self._end_reason = "the engine is not running: call start() first, and not after close()"

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
            options=settings.vllm,
            learner=LearnerNeed.of(of) if settings.is_colocated else None,
            lora=of.lora,
            keep_kv=settings.keep_kv,
        )

    @property
    def version(self) -> Version:
        """Weights that a generation which begins now is drawn with."""
        return self._weights.version if self._weights else self._initial_version

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and completion together; raises EngineError before `start`."""
        if self._model is None:
            raise EngineError("the context length is known once the engine has started: call start() first")
        return self._model.context_length

    @property
    def load(self) -> EngineLoad:
        """How busy the engine is; a request whose first token has not come counts as waiting."""
        running = [id for id, reader in self._open.items() if reader.num_drawn]
        held = sum(self._lengths[id] + self._open[id].num_drawn for id in running)
        return EngineLoad(len(running), len(self._open) - len(running), held, self._rate.per_second)

    async def start(self) -> None:
        """Loads the model in vLLM's processes.

        Raises:
            MissingExtraError: vLLM is not installed.
            ConfigError: An option is unknown to it, or AgentJet's own, or `lora` does not fit it or the model.
            ModelNotFoundError: There is no such model on this machine.
            UnsupportedArchitectureError: Its attention is none that vLLM has here.
            EngineError: vLLM can not load it, or not as it was asked to.
        """
        try:
            # In a thread: it takes seconds, and presence has to be told meanwhile.
            self._llm, self._model = await asyncio.to_thread(self._launch)
        except AgentJetError:
            raise
        except Exception as error:
            raise EngineError(
                f"vLLM can not load model {self._path}: {error}; what it wrote before says why"
            ) from error
        adapted, version = self._model.adapted, self._initial_version
        self._weights = (
            VllmWeights(self._model.layout, version, keep_kv=self._keep_kv)
            if adapted is None
            else VllmAdapters(adapted, version, self._lora.num_versions)
        )
        await self._weights.label(self._llm)

    async def generate(self, generation: Generation) -> AsyncIterator[Draw]:
        """Draws as they come; closing the iterator cancels the generation.

        Raises:
            ContextLengthError: The prompt leaves no room for a token.
            BadRequestError: vLLM would draw otherwise than asked.
            EngineEndedError: The engine is not running, or not any more.
            EngineError: It failed at this generation, or knows a running one of that id.
        """
        from vllm.inputs import tokens_input  # pyright: ignore[reportMissingImports]

        llm, model, weights = self._running()
        parameters = sampling_parameters(generation, model)
        if generation.id in self._open:
            raise EngineError(f"generation {generation.id} is already running; ids have to be unique")
        stop = self._stop_watcher(generation.sampling, model)
        beginning = weights.begin()
        reader = DrawReader(stop, beginning, lambda: _starts(llm, generation.id))
        self._open[generation.id], self._lengths[generation.id] = reader, len(generation.prompt_ids)
        prompt = tokens_input(list(generation.prompt_ids), cache_salt=beginning.salt)
        try:
            drawing = llm.generate(prompt, parameters, generation.id, **beginning.options)
            async with contextlib.aclosing(drawing) as outputs:
                async for output in outputs:
                    for draw in reader.read(output):
                        self._rate.add(len(draw.ids))
                        yield draw
                    if reader.is_over and not output.finished:
                        return  # at a stop string: closing the outputs ends it in vLLM too
        except AgentJetError:
            raise
        except Exception as error:
            kind = EngineEndedError if self._problem() else EngineError
            raise kind(f"generation {generation.id} failed: {self._why(error)}") from error
        finally:
            del self._open[generation.id], self._lengths[generation.id]
            if not self._open:
                self._rate.rest()
            if self._llm is llm and not reader.is_over:
                # One that was cancelled while vLLM took it in would go on there.
                await llm.abort(generation.id)
            weights.end(llm, beginning)

    def _running(self) -> tuple[Any, LaunchedModel, VllmWeights | VllmAdapters]:
        if problem := self._problem():
            raise EngineEndedError(problem)
        assert self._model is not None and self._weights is not None, "a running engine has a model and weights"
        return self._llm, self._model, self._weights

    def _why(self, error: Exception) -> str:
        if self._llm is None:
            return self._end_reason
        return str(error) or repr(error.__cause__ or error)

    def _stop_watcher(self, sampling: Sampling, model: LaunchedModel) -> StopWatcher | None:
        if not sampling.stop:
            return None
        if model.tokenizer is None:
            raise EngineError(f"model {self._path} has no tokenizer.json, which stop strings need")
        return StopWatcher(model.tokenizer, sampling.stop)

    async def update_weights(self, version: Version, path: Path, *, timeout_seconds: float = 120.0) -> None:
        """Serves a snapshot as `version`, also to running generations; or an adapter, to those that begin from now on.

        The path has to be readable where vLLM's workers run. `timeout_seconds` bounds what can be given up: from the
        pause on, the update is brought to its end, within as long again and at least a minute.

        Raises:
            EngineError: The file is unreadable or of another model, and the old weights stay; or the engine broke, and
                ends.
            TimeoutError: It was not read in time, or as many adapters as are allowed were in use; the old weights stay.
            CancelledError: Nobody waits any more; the weights may be in place or not.
        """
        llm, _, weights = self._running()
        try:
            await weights.update(llm, version, Path(path), timeout_seconds=timeout_seconds)
        finally:
            if weights.problem:
                await self._end(weights.problem)

    async def ended(self) -> NoReturn:
        """Raises EngineEndedError once the engine has ended, by `close` or because one of its processes died."""
        while not self._problem():  # noqa: ASYNC110 - vLLM has no event for it
            await asyncio.sleep(_LOOK_SECONDS)
        raise EngineEndedError(f"the engine of {self._path} has ended: {self._problem()}")

    def _problem(self) -> str:
        """Why the engine can serve no more; empty while it can."""
        if self._llm is None:
            return self._end_reason
        if self._weights is not None and self._weights.problem:
            return self._weights.problem
        return "one of its processes died" if self._llm.errored else ""

    async def close(self) -> None:
        """Ends vLLM's processes; open generations raise EngineError."""
        await self._end("the engine is not running: it was closed")

    async def _end(self, why: str) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError  # pyright: ignore[reportMissingImports]

        llm, self._llm = self._llm, None
        if llm is not None:
            self._end_reason = why
            if self._weights is not None:
                self._weights.close()
            llm.output_processor.propagate_error(EngineDeadError())
            await asyncio.to_thread(llm.shutdown, _CLOSE_SECONDS)
            # vLLM closes its sockets in a callback on this loop, and leaves their context open.
            await asyncio.sleep(0)
            llm.engine_core.resources.ctx.destroy(linger=0)


def _starts(llm: Any, id: str) -> Sequence[Start]:
    """Where versions begin in what vLLM has drawn for an open request; it tells in its outputs at the end only."""
    processor = llm.output_processor
    states = [processor.request_states[internal] for internal in processor.external_req_ids[id]]
    return states[0].weight_version_starts
