"""A whole swarm on one machine: embedded server where wanted, every actor, and the end of a finite run.

The server is restarted on the same port and data when it dies; actors reconnect by themselves.
"""

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import structlog

from agentjet.accounting.ledger import CurriculumView, LedgerView
from agentjet.actors.process import connect, embedded_server, ensure_streams
from agentjet.actors.supervisor import Supervisor, actor_specs
from agentjet.bus.ledger import LedgerChain
from agentjet.bus.nats import NatsBus
from agentjet.bus.protocol import Bus
from agentjet.bus.record import read
from agentjet.bus.server import EmbeddedServer
from agentjet.config import SwarmSettings
from agentjet.config.place import RunPlace
from agentjet.errors import BusError, UserError
from agentjet.observe.log import configure
from agentjet.schemas import subject
from agentjet.schemas.ids import RunId
from agentjet.schemas.ledger import RunFinish
from agentjet.schemas.subject import Stream, stream_name

log = structlog.get_logger(__name__)

LAST_CHECKPOINT_SECONDS = 600.0


class Swarm:
    """What `agentjet up` and the demo start.

    Example:
        async with Swarm(settings, config_path).running() as swarm:
            await swarm.finished()
    """

    def __init__(self, settings: SwarmSettings, config: Path) -> None:
        self.settings, self.config = settings, config
        self.place = RunPlace(settings.run.dir)
        self.run: RunId = self.place.begin(settings.run.name, settings.run.id)
        self.server: EmbeddedServer | None = None
        self.supervisor: Supervisor | None = None
        self._bus: NatsBus | None = None
        self._started_at = 0

    @property
    def bus(self) -> Bus:
        """This process's own connection."""
        assert self._bus is not None, "the swarm is not running"
        return self._bus

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Swarm"]:
        """Everything is up inside; all processes have ended after it.

        Raises UserError (also inside, by cancelling the body) when an actor does not start.
        """
        self.place.secret()
        self.place.logs.mkdir(parents=True, exist_ok=True)
        configure(actor="swarm", run=self.run, path=self.place.logs / "swarm.log")
        async with contextlib.AsyncExitStack() as stack:
            if self.settings.nats.url == "embedded":
                await self._start_server(stack)
            self._bus = await connect(self.settings, name=f"swarm {self.run}")
            stack.push_async_callback(self._bus.close)
            await ensure_streams(self._bus, self.run, self.settings)
            self._started_at = (await self._bus.stream_info(stream_name(self.run, Stream.LEDGER))).last_sequence
            self.supervisor = Supervisor(self.settings, self.config, self.place.logs, self._env())
            try:
                async with asyncio.TaskGroup() as group:
                    keeping = group.create_task(self._keep())
                    yield self
                    keeping.cancel()
            except* UserError as failed:
                raise _first(failed) from None

    async def _start_server(self, stack: contextlib.AsyncExitStack) -> None:
        self.server = embedded_server(self.settings)
        await stack.enter_async_context(self.server)
        self.place.announce(self.server.url, self.server.pid or 0)
        stack.callback(self.place.withdraw)

    def _env(self) -> dict[str, str]:
        env = {"AGENTJET_RUN__ID": str(self.run)}
        if self.server is not None:
            env["AGENTJET_NATS__URL"] = self.server.url
        return env

    async def _keep(self) -> None:
        assert self.supervisor is not None
        async with asyncio.TaskGroup() as group:
            group.create_task(self.supervisor.run(actor_specs(self.settings)))
            if self.server is not None:
                group.create_task(self._keep_server(self.server))

    async def _keep_server(self, server: EmbeddedServer) -> None:
        while True:
            code = await server.wait()
            log.warning("the NATS server died and is started again", code=code)
            await server.start()
            self.place.announce(server.url, server.pid or 0)

    async def finished(self) -> RunFinish:
        """Wait for the end of a finite run: RunFinish in LEDGER, then a checkpoint of every model's last step.

        What the ledger held when the swarm was started does not count: a finished run may be gone on with.
        """
        ledger = stream_name(self.run, Stream.LEDGER)
        chain = subject.ledger(self.run, subject.CURRICULUM)
        async for message in self.bus.tail(ledger, chain, start=self._started_at + 1):
            record = await read(self.bus, self.run, Stream.LEDGER, message)
            if isinstance(record, RunFinish):
                await self._last_checkpoints()
                return record
        raise UserError("the ledger ended")  # pragma: no cover  (a tail never ends)

    async def _last_checkpoints(self) -> None:
        """Wait until every learner has trained what was issued and its last step's checkpoint is verified."""
        give_up = time.monotonic() + LAST_CHECKPOINT_SECONDS
        for model, settings in self.settings.models.items():
            while settings.is_trained and not await self._is_surely_saved(model):
                if time.monotonic() > give_up:
                    raise UserError(
                        f"the run is over, but model {model} has no verified checkpoint of its last step after "
                        f"{LAST_CHECKPOINT_SECONDS:g} s; see {self.place.logs}, and start it again to write one"
                    )
                await asyncio.sleep(0.2)

    async def _is_surely_saved(self, model: str) -> bool:
        try:
            return await self._is_saved(model)
        except BusError as error:
            log.warning("the bus does not say whether a model is saved; asking again", error=str(error))
            return False

    async def _is_saved(self, model: str) -> bool:
        curriculum, learner = CurriculumView(), LedgerView()
        for view, who in ((curriculum, subject.CURRICULUM), (learner, model)):
            for sequence, record in await LedgerChain(self.bus, self.run, who).load():
                view.apply(sequence, record)
        is_trained = learner.num_groups + learner.num_dropped >= curriculum.num_issued(model)
        is_last = 0 < self.settings.run.num_steps <= learner.num_steps
        last = learner.last_step
        if last is None or not (is_trained or is_last):
            return is_trained
        to = subject.checkpoint(self.run, model, str(last.version))
        return await self.bus.last(stream_name(self.run, Stream.CHECKPOINTS), to) is not None


def _first(group: BaseExceptionGroup[UserError]) -> UserError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, UserError)
    return error


async def run_until_stopped(body: Callable[[], Awaitable[None]]) -> None:
    """Run the body; SIGINT and SIGTERM cancel it, so that everything it opened is closed in order."""
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(body())
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
