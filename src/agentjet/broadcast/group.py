"""A file through a process group of its own, bucket by bucket.

Invariants:

- The group is nobody's default group, so that those of accelerate and vLLM in the same program are left alone.
- An operation that stalls ends in an error, after `stall_seconds` at the latest.
- What was received counts only if its sha256 is the one that was announced.
"""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from agentjet.broadcast.meeting import Place, interface_of
from agentjet.errors import BroadcastError

BUCKET_BYTES = 16 * 1024**2


def send_file(place: Place, path: Path, stall_seconds: float) -> None:
    """Give a file to all others of the group. BroadcastError when one of them fails, OSError as the disk does."""
    with _group(place, stall_seconds) as broadcast, path.open("rb", buffering=0) as file:
        for bucket in _buckets(path.stat().st_size):
            _fill(file, bucket)
            broadcast(bucket)


def receive_file(place: Place, path: Path, num_bytes: int, sha256: str, stall_seconds: float) -> None:
    """Write the file that the sender gives. Raises as `send_file`, and where it is not the one that was announced."""
    digest = hashlib.sha256()
    with _group(place, stall_seconds) as broadcast, path.open("wb") as file:
        for bucket in _buckets(num_bytes):
            broadcast(bucket)
            data = bucket.numpy().data
            file.write(data)
            digest.update(data)
    if digest.hexdigest() != sha256:
        raise BroadcastError("the bytes that came are not the weights that were announced")


def _buckets(num_bytes: int) -> Iterator[Tensor]:
    """Host memory for each bucket, the same again and again."""
    buffer = torch.empty(min(num_bytes, BUCKET_BYTES), dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    for start in range(0, num_bytes, BUCKET_BYTES):
        yield buffer[: min(BUCKET_BYTES, num_bytes - start)]


def _fill(file: Any, bucket: Tensor) -> None:
    view = bucket.numpy().data
    while view:
        num = file.readinto(view)
        if not num:
            raise BroadcastError("the file of weights is shorter than it was")
        view = view[num:]


@contextmanager
def _group(place: Place, stall_seconds: float) -> Iterator[Any]:
    """The operation that gives a bucket of the sender's to everybody."""
    timeout = timedelta(seconds=stall_seconds)
    try:
        group = _nccl(place, timeout) if place.backend == "nccl" else _gloo(place, timeout)
    except RuntimeError as error:
        raise BroadcastError(f"no process group came about: {error}") from None
    device = torch.device("cuda" if place.backend == "nccl" else "cpu")

    def broadcast(bucket: Tensor) -> None:
        try:
            there = bucket.to(device)
            group.broadcast(there, 0).wait(timeout)
            if there is not bucket:
                bucket.copy_(there)
        except RuntimeError as error:
            raise BroadcastError(f"a process of the broadcast failed: {error}") from None

    try:
        yield broadcast
    finally:
        group.abort()


def _gloo(place: Place, timeout: timedelta) -> Any:
    if name := interface_of(place.address):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    return dist.ProcessGroupGloo(place.store, place.rank, place.size, timeout)


def _nccl(place: Place, timeout: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(place.store, place.rank, place.size, options)
