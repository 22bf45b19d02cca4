"""Who takes part in a broadcast: a sender offers a file in a store of its own, and whoever joins in time is in.

Invariants:

- The sender settles once who takes part, and with which ranks; who comes later, or looks for another file, is told so.
- Every wait is bounded. A process that dies before it is settled is not waited for longer than the window.

It does not know how the file travels.
"""

import fcntl
import json
import socket
import struct
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from agentjet.errors import BroadcastError

_FILE, _ARRIVED, _MEMBER, _PLAN, _DONE = "file", "arrived", "member", "plan", "done"
_LOOK_SECONDS = 0.02
_SIOCGIFADDR = 0x8915


@dataclass(frozen=True, slots=True)
class Place:
    """A process's place in a broadcast; the sender has rank 0."""

    store: Store
    rank: int
    size: int
    backend: str
    """`nccl` where each has a GPU of its own, else `gloo`."""
    address: str
    """Of this process, as the others see it."""


class Meeting:
    """The sender's side."""

    def __init__(self, sha256: str, window_seconds: float) -> None:
        """Opens the store on every interface of this host. RuntimeError as torch does."""
        self._store = _store("localhost", 0, window_seconds, is_master=True)
        self._store.set(_FILE, sha256)
        self._window_seconds = window_seconds

    @property
    def port(self) -> int:
        """Where to join."""
        return self._store.port

    def settle(self, num_receivers: int) -> Place:
        """Wait for so many, or until the window closes; who is here then takes part.

        BroadcastError when nobody is.
        """
        give_up = time.monotonic() + self._window_seconds
        while len(members := self._members()) < num_receivers and time.monotonic() < give_up:
            time.sleep(_LOOK_SECONDS)
        if not members:
            raise BroadcastError(f"nobody came for the weights within {self._window_seconds:.0f} s")
        known = {index: json.loads(self._store.get(f"{_MEMBER}/{index}")) for index in members}
        devices = [_device(), *(one["device"] for one in known.values())]
        backend = "nccl" if all(devices) and len(set(devices)) == len(devices) else "gloo"
        self._store.set(_PLAN, json.dumps({"members": members, "backend": backend}))
        address = known[members[0]]["sender"]
        return Place(PrefixStore(backend, self._store), 0, 1 + len(members), backend, address)

    def num_done(self, wanted: int, timeout_seconds: float) -> int:
        """How many have the file, once that are so many or time is up."""
        give_up = time.monotonic() + timeout_seconds
        while (done := self._store.add(_DONE, 0)) < wanted and time.monotonic() < give_up:
            time.sleep(_LOOK_SECONDS)
        return done

    def _members(self) -> list[int]:
        arrived = range(1, 1 + self._store.add(_ARRIVED, 0))
        return [index for index in arrived if self._store.check([f"{_MEMBER}/{index}"])]


class Attendance:
    """A receiver's side."""

    def __init__(self, host: str, port: int, sha256: str, window_seconds: float) -> None:
        """Join. BroadcastError when that file is not offered there any more."""
        where = f"{host}:{port}"
        try:
            with socket.create_connection((host, port), timeout=window_seconds) as probe:
                self._address, sender = probe.getsockname()[0], probe.getpeername()[0]
            self._store = _store(host, port, window_seconds)
            if self._store.get(_FILE).decode() != sha256:
                raise BroadcastError(f"{where} sends other weights now")
            self._index = self._store.add(_ARRIVED, 1)
            self._store.set(f"{_MEMBER}/{self._index}", json.dumps({"device": _device(), "sender": sender}))
        except (OSError, RuntimeError) as error:
            raise BroadcastError(f"the broadcast at {where} can not be joined: {error}") from None

    def place(self, timeout_seconds: float) -> Place:
        """Where this process stands, once the sender has settled it. BroadcastError when it came too late."""
        try:
            self._store.wait([_PLAN], timedelta(seconds=timeout_seconds))
            plan = json.loads(self._store.get(_PLAN))
        except RuntimeError as error:
            raise BroadcastError(f"the sender has not settled who takes part: {error}") from None
        members, backend = plan["members"], plan["backend"]
        if self._index not in members:
            raise BroadcastError("this process came too late for the broadcast")
        rank = 1 + members.index(self._index)
        return Place(PrefixStore(backend, self._store), rank, 1 + len(members), backend, self._address)

    def done(self) -> None:
        """Tell the sender that the file is here."""
        with suppress(RuntimeError):  # the sender may be gone; the file is here all the same
            self._store.add(_DONE, 1)


def interface_of(address: str) -> str:
    """The network interface that has an address; empty where that can not be told."""
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
            found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return ""


def _device() -> str:
    """What tells this process's GPU from all others; empty where it has none."""
    return str(torch.cuda.get_device_properties(0).uuid) if torch.cuda.is_available() else ""


def _store(host: str, port: int, timeout_seconds: float, *, is_master: bool = False) -> TCPStore:
    timeout = timedelta(seconds=timeout_seconds)
    return TCPStore(host, port, is_master=is_master, timeout=timeout, wait_for_workers=False)
