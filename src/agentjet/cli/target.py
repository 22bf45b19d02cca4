"""Which run and which server a command means: options, configuration, files of the run, streams of the server."""

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from cyclopts import Parameter

from agentjet.bus.protocol import Bus
from agentjet.config import SwarmSettings
from agentjet.config.load import LoadedConfig, load
from agentjet.config.place import RunPlace
from agentjet.errors import UsageError, UserError
from agentjet.schemas.ids import RunId
from agentjet.schemas.subject import Stream, stream_name, stream_prefix


@Parameter(name="*")
@dataclass(frozen=True)
class Target:
    """Options of every command that needs a configuration or a run."""

    config: Path | None = None
    """The swarm.toml (default: ./swarm.toml if there is one)."""
    set: tuple[str, ...] = ()
    """A setting, for example `--set run.seed=7`; may be repeated."""
    dir: Path | None = None
    """Folder of the run, instead of `run.dir`."""
    nats: str = ""
    """Server, for example nats://host:4222, instead of `nats.url`."""
    run: str = ""
    """Id of the run (default: the one in the folder, else the only one on the server)."""

    def load(self) -> LoadedConfig:
        """The configuration with these options on top."""
        overrides: dict[str, str] = {}
        for text in self.set:
            key, equals, value = text.partition("=")
            if not equals:
                raise UsageError(f"--set {text!r} is not KEY=VALUE, for example --set run.seed=7")
            overrides[key.strip()] = value
        if self.dir is not None:
            overrides["run.dir"] = str(self.dir)
        if self.nats:
            overrides["nats.url"] = self.nats
        if self.run:
            overrides["run.id"] = self.run
        return load(self.config, overrides)

    def settings(self) -> SwarmSettings:
        """The settings; where nothing says which folder, that of the only run that is up below `runs/`."""
        config = self.load()
        settings = config.settings
        if config.path is None and self.dir is None and settings.nats.url == "embedded":
            live = _live_folders(Path.cwd() / "runs")
            if RunPlace(settings.run.dir).server() is None and len(live) == 1:
                return settings.model_copy(update={"run": settings.run.model_copy(update={"dir": live[0]})})
        return settings


@asynccontextmanager
async def open_bus(settings: SwarmSettings) -> AsyncIterator[Bus]:
    """A connection to the server of the settings.

    A run whose embedded server is not up can be read all the same: its server is started for as long as that takes.
    """
    from agentjet.actors.process import connect, embedded_server

    async with AsyncExitStack() as stack:
        if settings.nats.url == "embedded" and _is_asleep(RunPlace(settings.run.dir)):
            server = await stack.enter_async_context(embedded_server(settings))
            nats = settings.nats.model_copy(update={"url": server.url})
            settings = settings.model_copy(update={"nats": nats})
        bus = await connect(settings, name="agentjet command line")
        stack.push_async_callback(bus.close)
        yield bus


def _is_asleep(place: RunPlace) -> bool:
    """Whether the run's server has data but is not running."""
    server = place.server()
    return place.nats.is_dir() and (server is None or not _is_alive(server.pid))


async def find_run(bus: Bus, settings: SwarmSettings) -> RunId:
    """The run that is meant.

    Raises UserError when it is not on the server, UsageError when there are several to choose from.
    """
    runs = await runs_on(bus)
    wanted = settings.run.id or RunPlace(settings.run.dir).run_id()
    if wanted:
        if wanted not in runs:
            raise UserError(f"run {wanted} is not on this server; it holds {_listed(runs)}")
        return RunId(wanted)
    if not runs:
        raise UserError("this server holds no run; start one with `agentjet up`, or check --nats")
    if len(runs) > 1:
        raise UsageError(f"this server holds {_listed(runs)}; say which with --run")
    return runs[0]


async def runs_on(bus: Bus) -> list[RunId]:
    """Ids of the runs whose ledger the server holds, sorted."""
    ending = f"_{Stream.LEDGER.value}"
    names = await bus.stream_names(stream_prefix())
    return [RunId(name.removeprefix(stream_prefix()).removesuffix(ending)) for name in names if name.endswith(ending)]


def stream_names_of(run: RunId) -> list[str]:
    """Every stream that a run has; exact names, as one run's name may begin with another's."""
    return [stream_name(run, stream) for stream in Stream]


def _live_folders(parent: Path) -> list[Path]:
    found: list[Path] = []
    for file in sorted(parent.glob("*/server.json")):
        server = RunPlace(file.parent).server()
        if server is not None and _is_alive(server.pid):
            found.append(file.parent)
    return found


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _listed(runs: Sequence[str]) -> str:
    return ", ".join(runs) if runs else "no run"
