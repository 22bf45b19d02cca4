"""How commands write to standard output: JSON for programs, text for people."""

import os
import re
import shutil
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import orjson

_NUMBERS = re.compile(r"\[\n *[-+.\deE]+(?:,\n *[-+.\deE]+)*\n *\]")
"""A list of numbers over several lines; no JSON string holds a line's end."""


def write_json(value: Any, *, indent: bool = True) -> None:
    """A JSON document, lists of numbers on one line; numbers that JSON lacks (NaN, infinities) become null."""
    option = orjson.OPT_NON_STR_KEYS | (orjson.OPT_INDENT_2 if indent else 0)
    text = orjson.dumps(value, option=option).decode()
    sys.stdout.write(_NUMBERS.sub(lambda found: f"[{' '.join(found[0][1:-1].split())}]", text) + "\n")


def write_line(text: str = "") -> None:
    """One line of text."""
    sys.stdout.write(text + "\n")


def program() -> str:
    """How this program can be called again from the working directory: `agentjet` where that finds it."""
    found, called = shutil.which("agentjet"), Path(sys.argv[0])
    if called.name != "agentjet" or (found and Path(found).resolve() == called.resolve()):
        return "agentjet"
    return os.path.relpath(called)


def readable_bytes(num_bytes: int) -> str:
    """A size in binary units, for people."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def readable_seconds(seconds: float) -> str:
    """A duration, for people."""
    return f"{seconds:.1f} s" if seconds < 60 else str(timedelta(seconds=round(seconds)))
