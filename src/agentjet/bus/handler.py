"""The loop of a stage: hand a durable consumer's messages to a handler, each until it is settled.

Invariants:

- A message is acknowledged only after its handler returned; cancellation hands it back.
- While a handler runs its message is kept in progress, however long it takes.
- A handler that crashes is tried again after a growing delay; after `max_crashes` crashes over one message the poison
  hook writes the terminal record and only then is the message acknowledged.
- A failing bus and an unknown schema are never the message's fault: a delay and a warning, not a crash.

It never fetches more than it can start, so no message waits here while another worker is idle.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import structlog

from agentjet.bus.protocol import ACK_WAIT_SECONDS, Consumer, Delivery, StoredMessage
from agentjet.errors import AgentJetError, BusError, BusUnavailableError, UnknownSchemaError

log = structlog.get_logger(__name__)

Handle = Callable[[StoredMessage], Awaitable[None]]
OnPoison = Callable[[StoredMessage, Exception], Awaitable[None]]

_FETCH_SECONDS = 1.5
_GATHER_SECONDS = 0.003
"""Pause before the next fetch when the last one brought little: a request to the server costs more than a message."""
_LITTLE = 16
_HAND_BACK_SECONDS = 2.0
"""Longer than a fetch: one of ours that was cancelled may still stand at the server and would swallow the message."""
_BUS_DELAY_SECONDS = 1.0
_MAX_DELAY_SECONDS = 30.0


class PostponeError(AgentJetError):
    """Raised by a handler whose message can not be handled yet: hand it out again after the delay, not as a crash."""

    def __init__(self, reason: str, *, delay_seconds: float = 0.5) -> None:
        super().__init__(reason)
        self.delay_seconds = delay_seconds


@dataclass(frozen=True, slots=True)
class ConsumeState:
    """What a stage is doing, for its status."""

    num_running: int
    num_handled: int
    num_crashed: int
    num_poisoned: int
    waits_for: str
    """In words: a message, the bus, or its handlers."""
    since_seconds: float
    """Monotonic time of the last change of `waits_for`."""


@dataclass(slots=True)
class _Stage:
    handle: Handle
    on_poison: OnPoison
    name: str
    in_progress_seconds: float
    max_crashes: int
    backoff_seconds: float
    on_state: Callable[[ConsumeState], None] | None
    crashes: dict[int, int] = field(default_factory=dict[int, int])
    """By sequence: in a queue of questions many messages share a subject."""
    running: dict[int, Delivery] = field(default_factory=dict[int, Delivery])
    """By sequence."""
    num_running: int = 0
    num_handled: int = 0
    num_crashed: int = 0
    num_poisoned: int = 0
    waits_for: str = "a message"
    since_seconds: float = field(default_factory=time.monotonic)

    def tell(self, waits_for: str) -> None:
        if waits_for != self.waits_for:
            self.waits_for, self.since_seconds = waits_for, time.monotonic()
        if self.on_state:
            self.on_state(
                ConsumeState(
                    self.num_running,
                    self.num_handled,
                    self.num_crashed,
                    self.num_poisoned,
                    self.waits_for,
                    self.since_seconds,
                )
            )

    async def settle(self, delivery: Delivery) -> None:
        """Handle one delivery to its acknowledgement; never raises but for cancellation and a lost bus."""
        message = delivery.message
        self.running[message.sequence] = delivery
        try:
            await self._try(delivery, message)
        except asyncio.CancelledError:
            await _hand_back(delivery)
            raise
        except BusUnavailableError:
            raise
        except BusError as error:
            log.warning("could not settle a message; it comes again", stage=self.name, error=str(error))
        finally:
            if self.running.get(message.sequence) is delivery:
                del self.running[message.sequence]

    async def keep_in_progress(self) -> None:
        """Restart the clocks of running messages, for ever: one task for all, as most messages are done at once."""
        while True:
            await asyncio.sleep(self.in_progress_seconds)
            for delivery in list(self.running.values()):
                try:
                    await delivery.in_progress()
                except BusError as error:
                    log.warning("could not keep a message in progress", stage=self.name, error=str(error))

    async def _try(self, delivery: Delivery, message: StoredMessage) -> None:
        try:
            await self.handle(message)
        except BusUnavailableError:
            raise
        except PostponeError as error:
            await delivery.nak(error.delay_seconds)
        except (BusError, UnknownSchemaError) as error:
            log.warning("a message has to wait", stage=self.name, subject=message.subject, error=str(error))
            await delivery.nak(_BUS_DELAY_SECONDS)
        except Exception as error:  # noqa: BLE001
            # The boundary to the stage's code: a crash belongs to one message, not to the stage.
            await self._crashed(delivery, message, error)
        else:
            self.crashes.pop(message.sequence, None)
            self.num_handled += 1
            await delivery.ack()

    async def _crashed(self, delivery: Delivery, message: StoredMessage, error: Exception) -> None:
        count = self.crashes[message.sequence] = self.crashes.get(message.sequence, 0) + 1
        self.num_crashed += 1
        log.error("a handler crashed", stage=self.name, subject=message.subject, crashes=count, exc_info=error)
        if count < self.max_crashes:
            await delivery.nak(min(self.backoff_seconds * 2 ** (count - 1), _MAX_DELAY_SECONDS))
            return
        try:
            await self.on_poison(message, error)
        except BusUnavailableError:
            raise
        except Exception as second:
            log.error("the poison hook failed", stage=self.name, subject=message.subject, exc_info=second)
            await delivery.nak(_MAX_DELAY_SECONDS if not isinstance(second, BusError) else _BUS_DELAY_SECONDS)
            return
        self.crashes.pop(message.sequence, None)
        self.num_poisoned += 1
        await delivery.ack()


async def consume(
    consumer: Consumer,
    handle: Handle,
    *,
    name: str,
    on_poison: OnPoison,
    concurrency: int = 1,
    in_progress_seconds: float = ACK_WAIT_SECONDS / 3,
    max_crashes: int = 3,
    backoff_seconds: float = 0.5,
    on_state: Callable[[ConsumeState], None] | None = None,
    places: asyncio.Semaphore | None = None,
    allowance: Callable[[], Awaitable[int]] | None = None,
) -> None:
    """Handle a consumer's messages for ever; ends by cancellation.

    Args:
        consumer: Where messages come from.
        handle: Handles one message; returning means that its output is stored.
        name: The stage, for logs.
        on_poison: Writes the terminal record of a message that crashed `max_crashes` times.
        concurrency: Most messages handled at once.
        in_progress_seconds: How often a running message's clock is restarted; well below the consumer's `ack_wait`.
        max_crashes: Crashes over one message before it counts as poison.
        backoff_seconds: Delay after the first crash; doubles, up to 30 s.
        on_state: Told the stage's state after each step.
        places: Shared by several stages that may handle only so many messages together: one is taken before a message
            is fetched, and messages are fetched one by one.
        allowance: Awaited before each fetch: how many messages, at least one, may be fetched beside what else there is
            to do.

    Raises:
        BusUnavailableError: The bus is gone for good.
    """
    stage = _Stage(handle, on_poison, name, in_progress_seconds, max_crashes, backoff_seconds, on_state)
    free = asyncio.Semaphore(concurrency)

    async def run(delivery: Delivery) -> None:
        stage.num_running += 1
        try:
            await stage.settle(delivery)
        finally:
            stage.num_running -= 1
            free.release()
            if places:
                places.release()
            stage.tell(stage.waits_for)

    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(stage.keep_in_progress())
            while True:
                stage.tell("a free handler" if free.locked() else "a message")
                await free.acquire()
                free.release()
                if places:
                    await places.acquire()
                num_free = 1 if places else concurrency - stage.num_running
                if allowance:
                    num_free = min(num_free, await allowance())
                stage.tell("a message")
                deliveries = await _fetch(consumer, num_free, stage)
                for delivery in deliveries:
                    await free.acquire()
                    group.create_task(run(delivery))
                if places and not deliveries:
                    places.release()
                # `num_running` counts only started tasks; let the new ones start before the next count.
                await asyncio.sleep(0 if len(deliveries) >= min(num_free, _LITTLE) else _GATHER_SECONDS)
    except* BusUnavailableError as gone:
        raise gone.exceptions[0] from None


async def _hand_back(delivery: Delivery) -> None:
    try:
        await delivery.nak(_HAND_BACK_SECONDS)
    except BusError as error:
        log.warning("could not hand a message back", subject=delivery.message.subject, error=str(error))


async def _fetch(consumer: Consumer, num_free: int, stage: _Stage) -> list[Delivery]:
    try:
        return list(await consumer.fetch(num_free, _FETCH_SECONDS))
    except BusUnavailableError:
        raise
    except BusError as error:
        stage.tell("the bus")
        log.warning("fetch failed", stage=stage.name, error=str(error))
        await asyncio.sleep(_BUS_DELAY_SECONDS)
        return []
