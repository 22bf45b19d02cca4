"""Which run and which server a command means: options, configuration, folders below `runs/`, streams of the server."""

import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Self

from cyclopts import Parameter

from agentjet.bus.protocol import Bus
from agentjet.bus.server import is_in_use
from agentjet.cli.run_folder import RunFolder, run_folders
from agentjet.config import SwarmSettings
from agentjet.config.load import DEFAULT_FILE, LoadedConfig, load
from agentjet.config.place import RunPlace
from agentjet.errors import BusUnavailableError, UsageError, UserError
from agentjet.schemas.ids import RunId
from agentjet.schemas.subject import Stream, stream_name, stream_prefix


@Parameter(name="*")
@dataclass(frozen=True)
class Folder:
    """Options of every command that needs a configuration or the files of a run."""

    config: Path | None = None
    """The swarm.toml (default: that of --dir, else ./swarm.toml, else that of the newest run below ./runs)."""
    set: tuple[str, ...] = ()
    """A setting, for example `--set run.seed=7`; may be repeated."""
    dir: Path | None = None
    """Folder of the run, instead of `run.dir`."""

    def overrides(self) -> dict[str, str]:
        """Dotted key to text of every setting that the options give. UsageError for what is no setting."""
        overrides: dict[str, str] = {}
        for text in self.set:
            key, equals, value = text.partition("=")
            if not equals:
                raise UsageError(f"--set {text!r} is not KEY=VALUE, for example --set run.seed=7")
            overrides[key.strip()] = value
        if self.dir is not None:
            overrides["run.dir"] = str(self.dir.expanduser().absolute())
        return overrides

    def words(self) -> list[str]:
        """These options as they are written on a command line."""
        words: list[str] = []
        for field in fields(self):
            value = getattr(self, field.name)
            for one in value if isinstance(value, tuple) else (value,) if value else ():
                words += [f"--{field.name}", str(one)]
        return words

    def load(self) -> LoadedConfig:
        """The configuration with these options on top; a folder brings its own swarm.toml along."""
        own = self.dir.expanduser() / DEFAULT_FILE if self.dir is not None else None
        return load(own if self.config is None and own is not None and own.is_file() else self.config, self.overrides())

    def settings(self) -> SwarmSettings:
        """The settings; where nothing says which run, those of the one that is up below ./runs, else of the newest.

        Which one was taken is said on standard error.
        """
        config = self.load()
        is_said = config.path is not None or any(config.origins[key] != "default" for key in ("run.dir", "nats.url"))
        found = None if is_said else self._found()
        if found is None:
            return config.settings
        sys.stderr.write(f"agentjet: {found}; --dir names another\n")
        return self._in(found.path).load().settings

    def _found(self) -> RunFolder | None:
        """The run that is meant when nothing says which."""
        folders = run_folders(Path("runs"))
        return next((folder for folder in folders if folder.is_up), folders[0] if folders else None)

    def _in(self, folder: Path) -> Self:
        return type(self)(**{**vars(self), "dir": folder})


@Parameter(name="*")
@dataclass(frozen=True)
class Server(Folder):
    """Options of every command that speaks to a server."""

    nats: str = ""
    """Server, for example nats://host:4222, instead of `nats.url`."""

    def overrides(self) -> dict[str, str]:
        """As of `Folder`, and the server."""
        return super().overrides() | ({"nats.url": self.nats} if self.nats else {})


@Parameter(name="*")
@dataclass(frozen=True)
class Target(Server):
    """Options of every command that reads one run."""

    run: str = ""
    """Id of the run (default: the one in the folder, else the only one on the server)."""

    def overrides(self) -> dict[str, str]:
        """As of `Server`, and the run."""
        return super().overrides() | ({"run.id": self.run} if self.run else {})

    def _found(self) -> RunFolder | None:
        if not self.run:
            return super()._found()
        return next((folder for folder in run_folders(Path("runs")) if folder.run == self.run), None)


@asynccontextmanager
async def open_bus(settings: SwarmSettings) -> AsyncIterator[Bus]:
    """A connection to the server of the settings.

    A run whose embedded server is not up can be read all the same: its server is started for as long as that takes.
    """
    from agentjet.actors.process import connect, embedded_server

    async with AsyncExitStack() as stack:
        if settings.nats.url == "embedded":
            place = RunPlace(settings.run.dir)
            if not place.nats.is_dir() and place.server() is None:
                raise BusUnavailableError(no_run_in(place.dir))
            is_up = is_in_use(place.nats)
            if is_up and place.server() is None:
                raise BusUnavailableError(f"another command reads the run in {place.dir} just now; try again")
            if place.nats.is_dir() and not is_up:
                server = await stack.enter_async_context(embedded_server(settings))
                nats = settings.nats.model_copy(update={"url": server.url})
                settings = settings.model_copy(update={"nats": nats})
        bus = await connect(settings, name="agentjet command line")
        stack.push_async_callback(bus.close)
        yield bus


def no_run_in(folder: Path) -> str:
    """A sentence for a folder that was looked into in vain."""
    known = ", ".join(str(found.path) for found in run_folders(Path("runs")))
    others = f"; below ./runs there are {known}" if known else ""
    return (
        f"there is no run in {folder}{others}; say with --config or --dir which run is meant, or start one with "
        "`agentjet up`"
    )


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


def _listed(runs: Sequence[str]) -> str:
    return ", ".join(runs) if runs else "no run"
