"""What the benchmarks' command lines share: arguments, a run's folder, one line of JSON, and the machine in words."""

import argparse
import contextlib
import json
import os
import platform
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil


def arguments(doc: str | None, *, has_folder: bool = False) -> argparse.ArgumentParser:
    """A parser with `--json`, and with `--dir` where the benchmark makes a run; `doc` is the script's docstring."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON line instead of progress and a table")
    if has_folder:
        parser.add_argument("--dir", type=Path, default=None, help="folder of the run, which is kept")
    return parser


@contextlib.contextmanager
def run_folder(given: Path | None, name: str) -> Iterator[Path]:
    """The folder that was given, or a temporary one; absolute, and there."""
    with contextlib.ExitStack() as stack:
        temporary = tempfile.TemporaryDirectory(prefix=f"agentjet-{name}-", ignore_cleanup_errors=True)
        folder = (given or Path(stack.enter_context(temporary))).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        yield folder


def machine() -> dict[str, Any]:
    """Where figures come from; the load average is that of the last minute."""
    return {
        "system": platform.system(),
        "processor": platform.processor() or platform.machine(),
        "num_cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "load_average": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
    }


def show(result: Mapping[str, Any], *, as_json: bool) -> None:
    """Print the figures: one line of JSON, or a line for each."""
    width = max(map(len, result)) + 2
    print(json.dumps(result) if as_json else "\n".join(f"{key:{width}}{value}" for key, value in result.items()))
