"""Actor processes of one machine: started, restarted when they die, stopped together.

Invariants:

- A process that ends with `FINAL_EXIT_CODE` must not be started again. One that ends with code 0 is done where its kind
  has an end (`FINITE_KINDS`). Any other end is a crash or a stranger's SIGTERM (`STOPPED_EXIT_CODE`): it is started
  again after a growing delay.
- An actor that keeps dying right after its start is a fault that a person has to see: the supervisor gives up with the
  last line that the actor wrote. What `ActorProcess.kill` did is not the actor's fault.
- Children get SIGTERM when this process dies, however it dies (Linux), and are ended by their own process ids only.
"""

import asyncio
import ctypes
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from agentjet.config import SwarmSettings
from agentjet.errors import FINAL_EXIT_CODE, UserError

log = structlog.get_logger(__name__)

YOUNG_SECONDS = 30.0
"""A process that ends sooner has failed at its start."""
MAX_YOUNG_DEATHS = 3
FINITE_KINDS = frozenset({"curriculum", "learner"})
"""Actors that end with their run."""
MAX_DELAY_SECONDS = 5.0
STOP_SECONDS = 60.0
_PR_SET_PDEATHSIG = 1
_TAIL_BYTES = 4096
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "2000000000", "MALLOC_TRIM_THRESHOLD_": "4000000000"}
"""glibc keeps the engine's large buffers instead of mapping them anew at each step (about 8 % of its time)."""


@dataclass(frozen=True, slots=True)
class ActorSpec:
    """Which actor a process runs."""

    kind: str
    model: str = ""
    number: int = 1
    """Tells copies apart."""

    @property
    def name(self) -> str:
        """`<kind>`, `<kind>-<model>`, or `<kind>-<model>.<number>` from the second copy on."""
        name = f"{self.kind}-{self.model}" if self.model else self.kind
        return name if self.number == 1 else f"{name}.{self.number}"


def actor_specs(settings: SwarmSettings) -> list[ActorSpec]:
    """Every actor that a swarm on one machine needs."""
    plain = ["curriculum", "reward", "merger", "checkpoint"]
    if any(pool.workflow for pool in settings.pools.values()):
        plain.append("rollout")
    specs = [
        ActorSpec("inference", model, number)
        for model, of in settings.models.items()
        for number in range(1, of.num_engines + 1)
    ]
    specs += [ActorSpec("learner", model) for model, of in settings.models.items() if of.is_trained]
    return specs + [ActorSpec(kind) for kind in plain]


class ActorProcess:
    """One actor, through all its lives."""

    def __init__(self, spec: ActorSpec, arguments: Sequence[str], env: Mapping[str, str], log_path: Path) -> None:
        self.spec = spec
        self.log_path = log_path
        self.num_starts = 0
        self._is_killed = False
        self._arguments, self._env = arguments, env
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the newest life."""
        return self._process.pid if self._process else None

    async def live(self) -> None:
        """Keep it running; returns when it is done.

        Raises UserError when it keeps dying right after its start.
        """
        young_deaths, delay = 0, 0.2
        while True:
            started = time.monotonic()
            code = await self._run_once()
            if code == 0 and self.spec.kind in FINITE_KINDS:
                return
            if code == FINAL_EXIT_CODE:
                raise UserError(f"{self.spec.name} has stopped for good ({self.last_line()}); see {self.log_path}")
            if self._is_killed:
                delay = 0.2
            elif time.monotonic() - started < YOUNG_SECONDS:
                young_deaths, delay = young_deaths + 1, min(delay * 2, MAX_DELAY_SECONDS)
            else:
                young_deaths, delay = 0, 0.2
            if young_deaths >= MAX_YOUNG_DEATHS:
                raise UserError(f"{self.spec.name} does not start ({self.last_line()}); its log is {self.log_path}")
            log.warning("an actor died and is started again", actor=self.spec.name, code=code)
            await asyncio.sleep(delay)

    async def _run_once(self) -> int:
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as file:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                f"agentjet.actors.{self.spec.kind}",
                *self._arguments,
                *(["--model", self.spec.model] if self.spec.model else []),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**(_ALLOCATOR if self.spec.kind == "inference" else {}), **os.environ, **self._env},
                start_new_session=True,  # an interrupt at the terminal is the parent's to pass on
                preexec_fn=_die_with_parent,
            )
        self._process, self._is_killed = process, False
        self.num_starts += 1
        try:
            return await process.wait()
        finally:
            await self._end(process)

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        if process.returncode is not None:
            return
        process.terminate()
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await process.wait()
        except TimeoutError:
            log.warning("an actor did not stop in time and is killed", actor=self.spec.name)
            process.kill()
            await process.wait()

    def kill(self) -> None:
        """SIGKILL to the running process, as a crash would (for tests of recovery); it is started again at once."""
        if self._process is not None and self._process.returncode is None:
            self._is_killed = True
            self._process.send_signal(signal.SIGKILL)

    def last_line(self) -> str:
        """The last line of its log."""
        with self.log_path.open("rb") as file:
            file.seek(max(0, self.log_path.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else "it wrote nothing"


@dataclass
class Supervisor:
    """All actors of this machine."""

    settings: SwarmSettings
    config: Path
    logs: Path
    env: Mapping[str, str]
    processes: dict[str, ActorProcess] = field(default_factory=dict)

    async def run(self, specs: Sequence[ActorSpec]) -> None:
        """Keep the actors running until cancelled; all have ended when it returns or raises."""
        try:
            async with asyncio.TaskGroup() as group:
                for spec in specs:
                    path = self.logs / f"{spec.name}.log"
                    process = ActorProcess(spec, ["--config", str(self.config)], self.env, path)
                    self.processes[spec.name] = process
                    group.create_task(process.live(), name=spec.name)
        except* UserError as failed:
            raise failed.exceptions[0] from None


_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def _die_with_parent() -> None:
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
