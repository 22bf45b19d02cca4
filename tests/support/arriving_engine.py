"""A process of an engine that fetches versions from a folder of blobs, and may be held at a point on the way.

    python arriving_engine.py FOLDER BLOBS [POINT]

It reads versions from its standard input, one a line, and writes to its standard output the sha256 of the file it was
given, and by how many patches it made it. At POINT it writes `held` and waits for ever.
"""

import asyncio
import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from agentjet.bus.protocol import StoredMessage
from agentjet.delivery import arrival, mirror
from agentjet.delivery.arrival import Arrivals
from agentjet.schemas.ids import RunId, Version
from agentjet.schemas.weights import Weights

POINTS: dict[str, tuple[Any, str]] = {
    "fetching": (arrival, "get_file"),
    "decoding": (mirror, "apply_patch"),
    "checking": (mirror, "file_digest"),
    "naming": (mirror, "sync"),
    "named": (mirror.Mirror, "_hold"),
}


class BlobFolder:
    """The part of a bus that brings weights."""

    max_payload_bytes = 1 << 20

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    async def get_blob(self, stream: str, prefix: str, sha256: str, num_bytes: int) -> bytes:
        return (self.folder / sha256).read_bytes()

    async def last(self, stream: str, subject: str) -> StoredMessage | None:
        payload = (self.folder / subject.split(".")[-2]).read_bytes()
        headers = {"AJ-Chunks": "1", "AJ-Blob-Bytes": str(len(payload))}
        return StoredMessage(subject=subject, payload=payload, headers=headers, sequence=1, time=0.0)


def hold_at(point: str) -> None:
    def held(*_: Any, **__: Any) -> None:
        print("held", flush=True)
        time.sleep(1e6)

    owner, name = POINTS[point]
    setattr(owner, name, held)


async def serve(folder: Path, blobs: Path) -> None:
    records = [Weights.model_validate(one) for one in json.loads((blobs / "records.json").read_text())]
    published = {Version.parse(one.version): one for one in records}
    arrivals, num_applied = Arrivals(BlobFolder(blobs), RunId("run-aaaaaa"), folder), 0
    honest = mirror.apply_patch

    def counted(*arguments: Any) -> None:
        nonlocal num_applied
        num_applied += 1
        honest(*arguments)

    if mirror.apply_patch.__name__ == "apply_patch":
        mirror.apply_patch = counted
    for line in iter(sys.stdin.readline, ""):
        num_applied = 0
        path = await arrivals.file(Version.parse(line.strip()), published)
        print(hashlib.sha256(path.read_bytes()).hexdigest(), num_applied, flush=True)
    await arrivals.close()


if __name__ == "__main__":
    if sys.argv[3:]:
        hold_at(sys.argv[3])
    asyncio.run(serve(Path(sys.argv[1]), Path(sys.argv[2])))
