"""The process that sends or receives: `python -m agentjet.broadcast.carrier`, started by `courier.Courier`.

A collective operation may hang in a driver where nothing but SIGKILL ends it, and a broken one may end its process. So
it runs in a process that nobody else needs. Commands come as lines of JSON on its standard input, one at a time;
answers go to its standard output. It ends with its input, and so with the process that started it.
"""

import json
import os
import sys
from pathlib import Path
from threading import Thread
from typing import Any

from agentjet.broadcast.group import receive_file, send_file
from agentjet.broadcast.meeting import Attendance, Meeting
from agentjet.errors import BroadcastError


def send(*, path: str, sha256: str, num_receivers: int, window_seconds: float, stall_seconds: float) -> dict[str, Any]:
    """Offer a file, say where, and send it to whoever came."""
    meeting = Meeting(sha256, window_seconds)
    _say({"port": meeting.port})
    place = meeting.settle(num_receivers)
    send_file(place, Path(path), stall_seconds)
    return {"num_done": meeting.num_done(place.size - 1, stall_seconds)}


def receive(
    *, host: str, port: int, path: str, num_bytes: int, sha256: str, window_seconds: float, stall_seconds: float
) -> dict[str, Any]:
    """Join a broadcast and write what comes."""
    attendance = Attendance(host, port, sha256, window_seconds)
    place = attendance.place(window_seconds + stall_seconds)
    receive_file(place, Path(path), num_bytes, sha256, stall_seconds)
    attendance.done()
    return {}


def _answer(command: dict[str, Any]) -> None:
    work = {"send": send, "receive": receive}[command.pop("do")]
    try:
        _say(work(**command))
    except (BroadcastError, OSError, RuntimeError) as error:
        _say({"error": str(error)})


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)  # noqa: T201 - the answer


if __name__ == "__main__":
    for line in sys.stdin:
        Thread(target=_answer, args=(json.loads(line),), daemon=True).start()
    os._exit(0)  # an operation that hangs is not waited for
