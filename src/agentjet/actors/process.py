"""What every actor process shares: arguments, configuration, bus, presence, signals, exit code.

An actor is an async function of an `Actor`. It runs until it returns, is told to stop (SIGTERM, SIGINT), or the bus is
closed for good; the last exits non-zero, so that a supervisor restarts the process. Errors that the user can put right
end in one sentence on stderr; `--debug` shows the traceback. A record of a newer AgentJet that an actor can not pass
makes it wait, and say so in its heartbeat, until it is stopped and its successor knows the record.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("KMP_BLOCKTIME", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Before torch is imported: spinning OpenMP threads of two processes on the same cores slow one another several times.

import argparse
import asyncio
import gc
import secrets
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import structlog

from agentjet.actors.actor import Actor
from agentjet.bus.nats import NatsBus
from agentjet.bus.protocol import Bus
from agentjet.bus.record import stream_specs
from agentjet.bus.server import EmbeddedServer
from agentjet.config import SwarmSettings
from agentjet.config.load import load
from agentjet.config.place import RunPlace
from agentjet.errors import (
    STOPPED_EXIT_CODE,
    BusUnavailableError,
    ConfigError,
    FencedError,
    UnknownSchemaError,
    UserError,
)
from agentjet.observe.lag import LoopWatch
from agentjet.observe.log import configure
from agentjet.schemas import subject
from agentjet.schemas.ids import RunId
from agentjet.schemas.presence import Waiting
from agentjet.schemas.subject import Stream, stream_name

log = structlog.get_logger(__name__)

STOP_SECONDS = 55.0
"""A learner finishes its step and writes a checkpoint before it leaves."""
GIB = 1024**3

Main = Callable[[Actor], Awaitable[None]]


def parse(kind: str, argv: Sequence[str], *, needs_model: bool) -> argparse.Namespace:
    """The arguments that every actor takes."""
    parser = argparse.ArgumentParser(prog=f"python -m agentjet.actors.{kind}", description=f"The {kind} actor.")
    parser.add_argument("--config", type=Path, default=None, help="swarm.toml (default: ./swarm.toml if there is one)")
    parser.add_argument("--run", default="", help="run id (default: the run in run.dir)")
    parser.add_argument("--debug", action="store_true", help="show tracebacks and debug logs")
    if needs_model:
        parser.add_argument("--model", default="", help="name of the model (default: the only one)")
    return parser.parse_args(argv)


def main(kind: str, actor_main: Main, *, needs_model: bool = False, argv: Sequence[str] | None = None) -> None:
    """Run an actor until its end and exit with its code."""
    gc.freeze()  # what was imported stays for good, and need not be looked at again
    gc.enable()
    arguments = parse(kind, sys.argv[1:] if argv is None else argv, needs_model=needs_model)
    configure(actor=kind, level="debug" if arguments.debug else "info")
    try:
        code = asyncio.run(_run(kind, actor_main, arguments, needs_model))
    except (UserError, FencedError) as error:
        if arguments.debug:
            raise
        print(f"agentjet {kind}: {error}", file=sys.stderr)  # noqa: T201  (the sentence for the user)
        code = error.exit_code
    except KeyboardInterrupt:
        code = 130
    # torch's and the interpreter's own teardown can take seconds; everything that matters is stored by now.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


async def _run(kind: str, actor_main: Main, arguments: argparse.Namespace, needs_model: bool) -> int:
    settings = load(arguments.config).settings
    model = _model(settings, arguments.model) if needs_model else ""
    place = RunPlace(settings.run.dir)
    run = RunId(arguments.run or settings.run.id or place.run_id() or "")
    if not run:
        raise ConfigError(
            f"no run is known in {settings.run.dir}; start one with `agentjet up`, or give its id with --run"
        )
    bus = await connect(settings, name=f"{kind} {run}")
    actor = Actor(kind, _name(), settings, run, bus, model=model, models=(model,) if model else ())
    try:
        await _wait_for_streams(actor)
        return await _until_stopped(actor, actor_main, bus)
    finally:
        await actor.leave()
        await bus.close()


async def connect(settings: SwarmSettings, *, name: str) -> NatsBus:
    """The bus that the settings point at; an embedded server's address is read from the run's folder."""
    nats = settings.nats
    url = nats.url
    if url == "embedded":
        server = RunPlace(settings.run.dir).server()
        if server is None:
            raise BusUnavailableError(
                f"no server of a run was found in {settings.run.dir}; start one with `agentjet up`, or set nats.url"
            )
        url = server.url
    return await NatsBus.connect(
        url,
        name=name,
        user=nats.user or None,
        password=nats.password.get_secret_value() or None,
        token=nats.token.get_secret_value() or None,
        credentials=str(nats.credentials) if nats.credentials else None,
    )


def embedded_server(settings: SwarmSettings) -> EmbeddedServer:
    """The run's own server, not started yet."""
    nats = settings.nats
    return EmbeddedServer(
        RunPlace(settings.run.dir).nats,
        max_store_bytes=int(nats.store_gib * GIB),
        port=nats.port,
        token=nats.token.get_secret_value() or None,
        sync_always=nats.sync == "always",
    )


async def ensure_streams(bus: Bus, run: RunId, settings: SwarmSettings) -> None:
    """Create what the run needs on the server."""
    max_bytes = int(settings.streams.max_gib * GIB)
    for spec in stream_specs(run, max_bytes=max_bytes, replicas=settings.nats.num_replicas):
        await bus.ensure_stream(spec)


async def _wait_for_streams(actor: Actor, timeout_seconds: float = 60.0) -> None:
    """The curriculum creates the streams; everybody else waits for them."""
    if actor.kind == "curriculum":
        await ensure_streams(actor.bus, actor.run, actor.settings)
        return
    wanted = {stream_name(actor.run, stream) for stream in Stream}
    give_up = time.monotonic() + timeout_seconds
    while not wanted <= set(await actor.bus.stream_names(subject.stream_prefix(actor.run))):
        if time.monotonic() > give_up:
            raise BusUnavailableError(
                f"run {actor.run} has no streams on this server after {timeout_seconds:g} s; "
                "start its curriculum, or check run.id and nats.url"
            )
        await asyncio.sleep(0.2)


async def _until_stopped(actor: Actor, actor_main: Main, bus: NatsBus) -> int:
    """Runs the actor; its exit code tells an end of its own from somebody's signal."""
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    async with LoopWatch() as lag:
        actor.lag = lag
        beat = asyncio.ensure_future(actor.beat())
        jobs = {
            asyncio.ensure_future(_work(actor, actor_main)): "main",
            asyncio.ensure_future(stopping.wait()): "stop",
            asyncio.ensure_future(bus.wait_closed()): "closed",
        }
        done, left = await asyncio.wait([*jobs, beat], return_when=asyncio.FIRST_COMPLETED)
        actor.state = "stopping"
        left.discard(beat)
        for job in left:
            job.cancel()
        # The heartbeat goes on meanwhile: an actor that finishes its work is seen as stopping, not as dead.
        stopped, _ = await asyncio.wait(left, timeout=STOP_SECONDS)
        beat.cancel()
        await asyncio.wait({beat})
    for job in (*done, *stopped):
        if not job.cancelled():
            _raise_first(job)
    ended = {jobs[job] for job in done & jobs.keys()}
    if "closed" in ended:
        raise BusUnavailableError("the connection to the NATS server is closed for good; restart this actor")
    return 0 if "main" in ended else STOPPED_EXIT_CODE


async def _work(actor: Actor, actor_main: Main) -> None:
    """The actor's own part; a record that only an upgrade can read ends it, and is waited over and not died of."""
    try:
        await actor_main(actor)
        return
    except (UnknownSchemaError, ExceptionGroup) as error:
        unknown = _first(error)
        if not isinstance(unknown, UnknownSchemaError):
            raise
    who = f"{actor.kind} of model {actor.model}" if actor.model else actor.kind
    log.error("a record of a newer version; this actor waits to be upgraded", error=str(unknown))
    wait = Waiting(what=f"an upgrade of this {actor.kind}: {unknown}", since=time.time(), unblocked_by="its operator")
    actor.state, actor.waiting = "waiting", lambda: [wait]
    actor.problems = lambda: [f"the {who} on {socket.gethostname()} does nothing: {unknown}"]
    await asyncio.Event().wait()


def _raise_first(job: "asyncio.Future[Any]") -> None:
    error = job.exception()
    if error is not None:
        raise _first(error)


def _first(error: BaseException) -> BaseException:
    """Of a group of errors the one that the user can act on."""
    while isinstance(error, BaseExceptionGroup):
        known = error.subgroup((UserError, FencedError))
        error = (known or error).exceptions[0]
    return error


def _model(settings: SwarmSettings, wanted: str) -> str:
    names = list(settings.models)
    if not names:
        raise ConfigError("the configuration has no [models.NAME] table; add one")
    if not wanted and len(names) == 1:
        return names[0]
    if wanted not in names:
        problem = f"there is no model {wanted!r}" if wanted else "several models are configured"
        raise ConfigError(f"{problem}; give --model one of: {', '.join(names)}")
    return wanted


def host_token() -> str:
    """This host's name as a token of subjects."""
    return "".join(char if char.isascii() and char.isalnum() else "-" for char in socket.gethostname())


def _name() -> str:
    return f"{host_token()}-{os.getpid()}-{secrets.token_hex(2)}"
