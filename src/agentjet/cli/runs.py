"""`agentjet runs ls|rm`: the runs whose streams a server holds."""

import asyncio
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from agentjet.bus.protocol import Bus
from agentjet.cli.output import readable_bytes, readable_seconds, write_json, write_line
from agentjet.cli.run_folder import run_folders
from agentjet.cli.target import Server, Target, open_bus, runs_on, stream_names_of
from agentjet.config.place import RunPlace
from agentjet.errors import UserError
from agentjet.schemas.ids import RunId
from agentjet.schemas.subject import presence_bucket, stream_prefix


@dataclass(frozen=True, slots=True)
class RunSize:
    """A run on a server."""

    run: RunId
    num_messages: int
    num_bytes: int
    last_time: float
    """Of its newest message, seconds since the epoch."""
    num_actors: int
    """Live ones."""


async def ls(*, target: Server | None = None, json: bool = False) -> None:
    """List the runs whose streams a server holds.

    Args:
        json: One JSON list.
    """
    async with open_bus((target or Server()).settings()) as bus:
        sizes = [await size_of(bus, run) for run in await runs_on(bus)]
    if json:
        write_json([asdict(size) for size in sizes])
        return
    for size in sizes:
        age = readable_seconds(max(0.0, time.time() - size.last_time)) if size.last_time else "never"
        state = f"{size.num_actors} actors" if size.num_actors else "stopped"
        write_line(
            f"{size.run:<32} {readable_bytes(size.num_bytes):>10} {size.num_messages:>9} messages, "
            f"newest {age} ago, {state}"
        )
    if not sizes:
        write_line("no runs")


async def rm(run: str, /, *, target: Server | None = None, force: bool = False) -> None:
    """Delete a run's streams from the server; files in its folder stay, and no command takes it for a run any more.

    Args:
        run: Id of the run (see `agentjet runs ls`).
        force: Even while actors of it are alive.
    """
    settings = Target(**vars(target or Server()), run=run).settings()
    async with open_bus(settings) as bus:
        await remove(bus, RunId(run), force=force)
    for folder in {settings.run.dir, *(found.path.absolute() for found in run_folders(Path("runs")))}:
        place = RunPlace(folder)
        if place.run_id() == run:
            place.forget()
    write_line(f"run {run} is deleted from the server")


async def size_of(bus: Bus, run: RunId) -> RunSize:
    """What a run takes on the server."""
    present = set(await bus.stream_names(stream_prefix(run)))
    infos = await asyncio.gather(*(bus.stream_info(name) for name in stream_names_of(run) if name in present))
    return RunSize(
        run=run,
        num_messages=sum(info.num_messages for info in infos),
        num_bytes=sum(info.num_bytes for info in infos),
        last_time=max((info.last_time for info in infos), default=0.0),
        num_actors=len(await bus.presence(presence_bucket(run))),
    )


async def remove(bus: Bus, run: RunId, *, force: bool) -> None:
    """Delete a run's streams.

    Raises UserError when it is not there, or alive and not forced.
    """
    if run not in await runs_on(bus):
        raise UserError(f"run {run} is not on this server; `agentjet runs ls` lists those that are")
    live = await bus.presence(presence_bucket(run))
    if live and not force:
        raise UserError(f"run {run} is alive ({', '.join(sorted(live))}); stop it first, or give --force")
    for name in (*stream_names_of(run), f"KV_{presence_bucket(run)}"):
        await bus.delete_stream(name)
