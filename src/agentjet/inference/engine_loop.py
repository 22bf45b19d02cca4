"""The engine's own thread: takes commands, runs one step after another, hands out draws.

Invariants:

- Commands are taken between steps only, so new weights never meet half a step.
- New weights are staged whole and then put in place; if anything fails, or the caller gave up before that instant, the
  old ones stay and generation goes on. They wait, in order, until there is room for them.
- A step that fails ends the requests that were in it, not the engine.

It knows nothing of asyncio: results go to callbacks, called on this thread.
"""

import queue
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

import structlog
import torch

from agentjet.errors import AgentJetError, EngineError
from agentjet.inference.attention import Chunk, plan_step
from agentjet.inference.engine import Draw, EngineLoad
from agentjet.inference.policy_model import PolicyModel
from agentjet.inference.request import Request
from agentjet.inference.row_cache import CacheShape, RowCache
from agentjet.inference.sampler import draw
from agentjet.inference.scheduler import Scheduler, Work
from agentjet.inference.served_weights import AdapterWeights, ServedWeights, WholeWeights
from agentjet.schemas.call import FinishReason
from agentjet.schemas.ids import Version

_LOG = structlog.get_logger(__name__)
_RATE_SECONDS = 5.0

Outcome = tuple[str, Draw | AgentJetError]
"""Id of a generation, and what it gets."""


@dataclass(slots=True)
class WeightUpdate:
    """An order to change the weights, which can be given up until the instant they are put in place."""

    version: Version
    path: Path
    done: Callable[[AgentJetError | None], None]
    """Called once, unless the order was given up."""
    _lock: Lock = field(default_factory=Lock)
    _state: str = "open"

    def settle(self, state: str) -> bool:
        """Moves from open to `committed` or `abandoned`; False when the other side was first."""
        with self._lock:
            if self._state != "open":
                return False
            self._state = state
            return True

    @property
    def is_open(self) -> bool:
        """Whether nobody has settled it."""
        return self._state == "open"


@dataclass(frozen=True, slots=True)
class Cancel:
    """An order to forget a generation."""

    id: str


@dataclass(frozen=True, slots=True)
class Close:
    """An order to end the thread."""


Command = Request | Cancel | WeightUpdate | Close


class EngineLoop:
    """Steps of one model; everything but `commands` and `load` belongs to one thread."""

    def __init__(
        self,
        model: PolicyModel,
        *,
        version: Version,
        max_running: int,
        cache_tokens: int,
        prefill_tokens_per_step: int,
        num_versions: int,
        keep_kv: bool,
        deliver: Callable[[Sequence[Outcome]], None],
    ) -> None:
        self.commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self.load = EngineLoad(0, 0, 0, 0.0)
        self._model = model
        self._deliver = deliver
        config = model.config
        heads = config.num_attention_heads
        on_cpu = model.device.type == "cpu"
        shape = CacheShape(
            num_layers=config.num_hidden_layers,
            num_kv_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            # On CPU float32 products of few rows are faster than bfloat16 ones, and exact.
            dtype=torch.float32 if on_cpu else model.dtype,
            device=model.device,
            max_rows=2 * max_running,
            max_length=model.context_length,
            budget_tokens=max(cache_tokens, model.context_length),
        )
        self._scheduler = Scheduler(
            RowCache(shape), max_running=max_running, prefill_tokens_per_step=prefill_tokens_per_step
        )
        self._weights: ServedWeights = (
            WholeWeights(model, self._scheduler, version, keeps_cache=keep_kv)
            if model.adapters is None
            else AdapterWeights(model.adapters, self._scheduler, version, num_versions)
        )
        self._updates: deque[WeightUpdate] = deque()
        self._requests: dict[str, Request] = {}
        self._rates: deque[tuple[float, int]] = deque()

    @property
    def version(self) -> Version:
        """Weights that a request which comes now is drawn with."""
        return self._weights.version

    def run(self) -> None:
        """Works until a Close comes; what is still open then ends with an EngineError."""
        try:
            with torch.inference_mode():
                while self._take_commands():
                    self._run_step()
        finally:
            self._fail(list(self._requests.values()), EngineError("the engine was closed while it generated"))
            for update in self._updates:
                if update.settle("abandoned"):
                    update.done(EngineError(f"the engine was closed before it had room for weights {update.version}"))

    def _take_commands(self) -> bool:
        """Handles what has come; waits when there is nothing else to do. False on Close."""
        while True:
            while self._updates and self._weights.has_room:
                self._update(self._updates.popleft())
            try:
                command = self.commands.get(block=not self._requests)
            except queue.Empty:
                return True
            match command:
                case Close():
                    return False
                case Cancel(id):
                    if (request := self._requests.get(id)) is not None:
                        self._forget(request)
                case WeightUpdate():
                    self._updates.append(command)
                case _:
                    self._weights.begin(command)
                    self._requests[command.generation.id] = command
                    self._scheduler.add(command)
            self._report()

    def _forget(self, request: Request) -> None:
        """A request is over."""
        self._scheduler.remove(request)
        del self._requests[request.generation.id]
        self._weights.end(request)

    def _update(self, update: WeightUpdate) -> None:
        try:
            staged = self._weights.stage(update.path, lambda: update.is_open)
        except Exception as error:  # noqa: BLE001 - whatever reading raises is the caller's, and ends no thread
            if update.settle("abandoned"):
                known = isinstance(error, AgentJetError)
                update.done(error if known else EngineError(f"weights {update.path} could not be loaded: {error}"))
            return
        if staged is None or not update.settle("committed"):
            return
        try:
            self._weights.commit(staged, update.version)
        except BaseException as error:
            # Half of the weights may be new: this engine can not go on, and its caller must not wait for it.
            update.done(EngineError(f"the engine broke while weights were put in place: {error}; restart it"))
            raise
        update.done(None)

    def _run_step(self) -> None:
        started = time.monotonic()
        works: list[Work] = []
        try:
            works = self._scheduler.next_step()
            outcomes = self._step(works)
        except Exception as error:  # noqa: BLE001 - whatever a kernel raises ends these requests, never the thread
            _LOG.exception("engine_step_failed", num_requests=len(works))
            self._recover(EngineError(f"a generation step failed: {error}"))
            return
        self._rates.append((time.monotonic() - started, len(outcomes)))
        self._report()
        if outcomes:
            self._deliver(outcomes)

    def _recover(self, error: EngineError) -> None:
        """Ends what was running or on its way there, else what waits, and starts over with an empty cache."""
        waiting = list(self._scheduler.waiting)
        failed = [request for request in self._requests.values() if request not in waiting] or waiting
        self._fail(failed, error)
        self._scheduler.clear_cache()

    def _fail(self, requests: Sequence[Request], error: EngineError) -> None:
        for request in requests:
            self._forget(request)
        if requests:
            self._deliver([(request.generation.id, error) for request in requests])

    def _report(self) -> None:
        while len(self._rates) > 1 and sum(seconds for seconds, _ in self._rates) > _RATE_SECONDS:
            self._rates.popleft()
        seconds = sum(seconds for seconds, _ in self._rates)
        rate = sum(count for _, count in self._rates) / seconds if seconds else 0.0
        scheduler = self._scheduler
        self.load = EngineLoad(len(scheduler.running), len(scheduler.waiting), scheduler.cache.num_cached_tokens, rate)

    def _step(self, works: Sequence[Work]) -> list[Outcome]:
        """Computes the works' tokens and draws the next ones."""
        cache, device = self._scheduler.cache, self._model.device
        chunks = [Chunk(work.request.row, work.request.num_computed, work.length) for work in works]
        plan = plan_step(cache.keys, cache.values, chunks)
        ids: list[int] = []
        wanted: list[int] = []
        for work in works:
            start = work.request.num_computed
            ids += work.request.ids[start : start + work.length]
            if work.draws:
                wanted.append(len(ids) - 1)
        self._weights.prepare(works)
        padding = _padded(len(ids)) - len(ids)
        positions = torch.nn.functional.pad(plan.token_positions, (0, padding))
        logits = self._model.logits(
            torch.tensor(ids + [0] * padding, device=device),
            positions,
            plan,
            torch.tensor(wanted, dtype=torch.long, device=device),
        )
        drawing = [work.request for work in works if work.draws]
        for work in works:
            work.request.num_computed += work.length
            cache.num_computed[work.request.row] = work.request.num_computed
        if not drawing:
            return []
        samplings = [request.generation.sampling for request in drawing]
        tokens, logprobs = draw(logits, samplings, [request.random.random() for request in drawing])
        return [
            (request.generation.id, self._accept(request, token, logprob))
            for request, token, logprob in zip(drawing, tokens, logprobs, strict=True)
        ]

    def _accept(self, request: Request, token: int, logprob: float) -> Draw:
        """Appends a drawn token and ends the request when it was the last."""
        self._scheduler.drew(request, token)
        stop_string = request.stop.add(token) if request.stop is not None else None
        reason = None
        if stop_string is not None or token in request.generation.stop_ids:
            reason = FinishReason.STOP
        elif request.num_drawn >= request.max_new:
            reason = FinishReason.LENGTH
        version = self._weights.version_of(request)
        if reason is not None:
            self._forget(request)
        return Draw((token,), (logprob,), version, reason, stop_string, request.num_cached, request.is_mixed)


def _padded(num_tokens: int) -> int:
    """Length of the flat row: kernels are prepared for each new one, so large ones are rounded up."""
    step = 1 if num_tokens <= 64 else 16 if num_tokens <= 512 else 64
    return -(-num_tokens // step) * step
