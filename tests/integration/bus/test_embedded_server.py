"""The real server: starting, refusing, restarting, being killed."""

import asyncio
import json
import shutil
import socket
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentjet.bus.connection import ConnectionLostError, NobodyListensError
from agentjet.bus.nats import NatsBus
from agentjet.bus.protocol import StreamSpec
from agentjet.bus.pull import PullInbox
from agentjet.bus.reader import TruncatedError
from agentjet.bus.server import EmbeddedServer, is_in_use
from agentjet.errors import BusError, BusFullError, BusTimeoutError, BusUnavailableError, ConflictError, UserError

MIB = 1024**2


@pytest.fixture
async def own_server(tmp_path: Path) -> AsyncIterator[EmbeddedServer]:
    async with EmbeddedServer(tmp_path / "nats", max_store_bytes=256 * MIB) as server:
        yield server


@pytest.fixture
async def own_bus(own_server: EmbeddedServer) -> AsyncIterator[NatsBus]:
    bus = await NatsBus.connect(own_server.url, name="test")
    await bus.ensure_stream(StreamSpec("S", ("s.>",), 64 * MIB))
    yield bus
    await bus.close()


async def test_configuration_is_private_and_a_clean_stop_ends_with_zero(tmp_path: Path):
    server = EmbeddedServer(tmp_path / "nats", max_store_bytes=64 * MIB)
    await server.start()
    config = server.directory / "nats-server.conf"
    assert stat.S_IMODE(config.stat().st_mode) == 0o600
    assert 'sync_interval: "10ms"' in config.read_text()
    assert server.returncode is None
    with pytest.raises(UserError, match="already runs"):
        await server.start()
    await server.stop()
    await server.stop()
    assert server.returncode == 0
    assert not list(server.directory.glob("*.ports"))


async def test_the_strict_profile_syncs_always(tmp_path: Path):
    async with EmbeddedServer(tmp_path / "nats", max_store_bytes=64 * MIB, sync_always=True) as server:
        assert 'sync_interval: "always"' in (server.directory / "nats-server.conf").read_text()


async def test_a_port_in_use_is_one_clear_sentence(tmp_path: Path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = EmbeddedServer(tmp_path / "nats", max_store_bytes=64 * MIB, port=port)
        with pytest.raises(UserError, match=f"port {port} is in use"):
            await server.start()


async def test_two_servers_never_share_a_data_directory(own_server: EmbeddedServer):
    with pytest.raises(UserError, match="in use by another NATS server"):
        await EmbeddedServer(own_server.directory, max_store_bytes=64 * MIB).start()
    assert is_in_use(own_server.directory)
    await own_server.kill()
    assert not is_in_use(own_server.directory)
    async with EmbeddedServer(own_server.directory, max_store_bytes=64 * MIB) as successor:
        assert successor.port


async def test_the_server_dies_with_the_process_that_started_it(tmp_path: Path):
    program = textwrap.dedent(f"""
        import asyncio, os, pathlib
        from agentjet.bus.server import EmbeddedServer
        async def main():
            server = EmbeddedServer(pathlib.Path({str(tmp_path / "nats")!r}), max_store_bytes=2**26)
            await server.start()
            print(server.pid, flush=True)
            os.kill(os.getpid(), 9)
        asyncio.run(main())
    """)
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False
    )
    server = _process(int(done.stdout))
    try:
        for _ in range(200):
            if server is None or not _is_at_work(server):
                return
            await asyncio.sleep(0.02)
        pytest.fail("the server outlived its parent")
    finally:
        if server is not None and _is_at_work(server):
            server.kill()


def _process(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None


def _is_at_work(process: psutil.Process) -> bool:
    """A killed parent's child may stay a zombie where nothing reaps it; that is dead too."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_data_survive_a_kill_and_the_port_stays(own_server: EmbeddedServer, own_bus: NatsBus):
    for i in range(50):
        await own_bus.publish(f"s.{i}", str(i).encode(), stream="S", expected=0)
    port = own_server.port
    await own_server.kill()
    assert own_server.returncode == -9
    assert await own_server.wait() == -9
    await own_server.start()
    assert own_server.port == port
    assert [m.payload async for m in own_bus.scan("S")] == [str(i).encode() for i in range(50)]
    with pytest.raises(ConflictError):
        await own_bus.publish("s.7", b"again", stream="S", expected=0)


async def test_last_error_says_that_the_server_is_gone(own_server: EmbeddedServer, own_bus: NatsBus):
    assert own_bus.last_error is None
    await own_server.kill()
    with pytest.raises(BusTimeoutError, match=r"not connected to 127\.0\.0\.1"):
        await own_bus.publish("s.a", b"", stream="S", timeout_seconds=0.5)
    assert own_bus.last_error is not None and "127.0.0.1" in own_bus.last_error
    await own_server.start()
    assert await own_bus.publish("s.b", b"", stream="S") >= 1
    assert own_bus.last_error is None


async def test_publishes_across_a_kill_are_each_stored_exactly_once(own_server: EmbeddedServer, own_bus: NatsBus):
    async def publish(i: int) -> int:
        await asyncio.sleep(i * 0.002)
        subject = f"s.{'create' if i % 2 else 'plain'}.{i}"
        return await own_bus.publish(
            subject, bytes(2000), stream="S", expected=0 if i % 2 else None, timeout_seconds=30
        )

    publishing = asyncio.gather(*(publish(i) for i in range(400)))
    for _ in range(2):
        await asyncio.sleep(0.25)
        await own_server.kill()
        await own_server.start()
    sequences = await publishing
    stored = {m.subject: m.sequence async for m in own_bus.scan("S")}
    assert len(stored) == 400
    assert (await own_bus.stream_info("S")).num_messages == 400
    assert sorted(sequences) == sorted(stored.values())


@pytest.mark.parametrize("expectation", ["none", "create-only", "predecessor"])
async def test_a_publish_whose_acknowledgement_is_lost_is_stored_once_and_returns_its_place(
    own_bus: NatsBus, monkeypatch: pytest.MonkeyPatch, expectation: str
):
    first = await own_bus.publish("s.a", b"first", stream="S")
    subject, expected = {"none": ("s.a", None), "create-only": ("s.b", 0), "predecessor": ("s.a", first)}[expectation]
    ask = own_bus._connection.ask
    num_lost = 0

    async def lossy(to: str, payload: bytes, **options: Any) -> Any:
        nonlocal num_lost
        answer = await ask(to, payload, **options)
        if to == subject and payload == b"mine" and num_lost < 2:
            num_lost += 1
            if expected is not None and num_lost == 1:
                # A follower of ours makes ours no longer the subject's last message.
                await own_bus.publish(subject, b"follower", stream="S", expected=first + 1)
            raise ConnectionLostError("the acknowledgement is lost")
        return answer

    monkeypatch.setattr(own_bus._connection, "ask", lossy)
    assert await own_bus.publish(subject, b"mine", stream="S", expected=expected) == first + 1
    assert num_lost == 2
    assert [m.payload async for m in own_bus.scan("S")].count(b"mine") == 1


async def test_a_lost_acknowledgement_does_not_hide_that_another_won(own_bus: NatsBus, monkeypatch: pytest.MonkeyPatch):
    await own_bus.publish("s.a", b"theirs", stream="S", expected=0)
    ask = own_bus._connection.ask
    num_lost = 0

    async def lossy(to: str, payload: bytes, **options: Any) -> Any:
        nonlocal num_lost
        answer = await ask(to, payload, **options)
        if payload == b"mine" and not num_lost:
            num_lost += 1
            raise ConnectionLostError("the refusal is lost")
        return answer

    monkeypatch.setattr(own_bus._connection, "ask", lossy)
    with pytest.raises(ConflictError):
        await own_bus.publish("s.a", b"mine", stream="S", expected=0)


async def test_a_tail_notices_a_message_that_did_not_arrive(own_bus: NatsBus, monkeypatch: pytest.MonkeyPatch):
    receive = PullInbox.receive
    num_received = 0

    async def drop_the_third(self: PullInbox, timeout_seconds: float) -> Any:
        nonlocal num_received
        num_received += 1
        answer = await receive(self, timeout_seconds)
        return await receive(self, timeout_seconds) if num_received == 3 else answer

    monkeypatch.setattr(PullInbox, "receive", drop_the_third)
    for i in range(6):
        await own_bus.publish(f"s.{i}", b"", stream="S")
    tail = own_bus.tail("S")
    assert [(await asyncio.wait_for(anext(tail), 5)).sequence for _ in range(6)] == [1, 2, 3, 4, 5, 6]
    await tail.aclose()  # type: ignore[attr-defined]


async def test_a_tail_refuses_to_go_on_when_read_messages_are_lost(own_server: EmbeddedServer, own_bus: NatsBus):
    """A power loss, played by putting an older copy of the data directory back."""
    data, copy = own_server.directory / "data", own_server.directory / "copy"
    await own_bus.publish("s.0", b"", stream="S")
    await own_server.stop()
    await asyncio.to_thread(shutil.copytree, data, copy)
    await own_server.start()
    for i in (1, 2):
        await own_bus.publish(f"s.{i}", b"", stream="S")
    tail = own_bus.tail("S")
    for _ in range(3):
        await anext(tail)
    waiting = asyncio.ensure_future(anext(tail))
    await own_server.kill()
    await asyncio.to_thread(shutil.rmtree, data)
    await asyncio.to_thread(copy.rename, data)
    await own_server.start()
    with pytest.raises(TruncatedError, match="ends at sequence 1 but 3 was already read"):
        await asyncio.wait_for(waiting, 10)


async def test_a_request_in_flight_fails_at_once_when_the_connection_breaks(
    own_server: EmbeddedServer, own_bus: NatsBus
):
    async def silent(_request: object) -> None:
        return None

    async with own_bus.serve("silent", silent, queue="q"):
        asking = asyncio.create_task(own_bus.request("silent", b"", timeout_seconds=30))
        await asyncio.sleep(0.1)
        await own_server.kill()
        with pytest.raises(BusError, match="connection broke"):
            await asyncio.wait_for(asking, 2)


async def test_a_wait_for_the_server_that_is_cancelled_leaves_the_connection_at_work(own_bus: NatsBus):
    for yields in range(4):
        settling = asyncio.create_task(own_bus._connection.settle())
        for _ in range(yields):
            await asyncio.sleep(0)
        settling.cancel()
        await asyncio.gather(settling, return_exceptions=True)
        assert await own_bus.stream_names("S") == ["S"]


async def test_a_server_that_answers_a_flush_late_finds_the_connection_at_work(
    own_server: EmbeddedServer, own_bus: NatsBus, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("agentjet.bus.flush.SETTLE_SECONDS", 0.05)
    assert own_server.pid is not None
    process = psutil.Process(own_server.pid)
    process.suspend()
    try:
        await own_bus._connection.settle()
        await asyncio.sleep(0.1)
    finally:
        process.resume()
    assert await own_bus.stream_names("S") == ["S"]
    assert own_bus.last_error is None


async def test_a_flush_that_a_break_interrupts_is_forgotten(
    own_server: EmbeddedServer, own_bus: NatsBus, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("agentjet.bus.flush.SETTLE_SECONDS", 0.05)
    assert own_server.pid is not None
    psutil.Process(own_server.pid).suspend()
    await own_bus._connection.settle()
    assert own_bus._connection._flushes
    await own_server.kill()
    await own_server.start()
    assert await own_bus.stream_names("S") == ["S"]
    assert not own_bus._connection._flushes


async def test_a_tail_is_gapless_across_a_kill_and_a_restart(own_server: EmbeddedServer, own_bus: NatsBus):
    seen: list[int] = []

    async def follow() -> None:
        async for message in own_bus.tail("S"):
            seen.append(message.sequence)

    task = asyncio.create_task(follow())
    for round_number in range(3):
        await asyncio.gather(*(own_bus.publish(f"s.{round_number}.{i}", b"", stream="S") for i in range(100)))
        await (own_server.kill() if round_number % 2 else own_server.stop())
        await own_server.start()
    await asyncio.gather(*(own_bus.publish(f"s.end.{i}", b"", stream="S") for i in range(100)))
    deadline = time.monotonic() + 10
    while len(seen) < 400 and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert seen == list(range(1, 401))


async def test_a_durable_consumer_goes_on_after_a_kill(own_server: EmbeddedServer, own_bus: NatsBus):
    for i in range(40):
        await own_bus.publish(f"s.{i}", b"", stream="S")
    consumer = await own_bus.consumer("S", "stage", ack_wait_seconds=1.0)
    seen: set[int] = set()
    for delivery in await consumer.fetch(15, 2.0):
        seen.add(delivery.message.sequence)
        await delivery.ack()
    waiting = asyncio.create_task(consumer.fetch(1, 1.0))
    await own_server.kill()
    await waiting
    await own_server.start()
    deadline = time.monotonic() + 15
    while len(seen) < 40 and time.monotonic() < deadline:
        for delivery in await consumer.fetch(10, 1.0):
            seen.add(delivery.message.sequence)
            await delivery.ack()
    assert seen == set(range(1, 41))


async def test_a_consumer_deleted_at_the_server_is_made_again(own_server: EmbeddedServer, own_bus: NatsBus):
    consumer = await own_bus.consumer("S", "stage")
    await own_bus.publish("s.a", b"", stream="S")
    await own_bus._connection.api("CONSUMER.DELETE.S.stage", what="test")
    got = [d for _ in range(3) for d in await consumer.fetch(1, 1.0)]
    assert [d.message.subject for d in got] == ["s.a"]


async def test_a_subscription_and_a_server_of_requests_outlive_a_restart(own_server: EmbeddedServer, own_bus: NatsBus):
    async def echo(request: object) -> tuple[bytes, dict[str, str]]:
        return b"pong", {}

    inbox = own_bus.inbox()
    subscription = await own_bus.subscribe(inbox)
    async with own_bus.serve("ping", echo, queue="q"):
        await own_server.stop()
        await own_server.start()
        assert (await own_bus.request("ping", b"")).payload == b"pong"
        await own_bus.send(inbox, b"x")
        assert (await subscription.next(2.0)).payload == b"x"


async def test_streams_read_by_the_leaders_message_get_give_the_same(own_server: EmbeddedServer, own_bus: NatsBus):
    """The road of replicated streams, on a stream that allows no direct reads."""
    config = {"name": "R", "subjects": ["r.>"], "storage": "file", "max_bytes": MIB, "allow_direct": False}
    await own_bus._connection.api("STREAM.CREATE.R", config, what="test")
    for i in range(5):
        await own_bus.publish(f"r.{i % 2}", str(i).encode(), stream="R", headers={"AJ-N": str(i)})
    assert not await own_bus._reader.is_direct("R")
    scanned = [m async for m in own_bus.scan("R")]
    assert [(m.sequence, m.payload, m.headers["AJ-N"]) for m in scanned] == [
        (i + 1, str(i).encode(), str(i)) for i in range(5)
    ]
    last = await own_bus.last("R", "r.0")
    assert last == scanned[4] == await own_bus.get("R", 5)
    assert (
        set(await own_bus.last_many("R", ["r.*"]))
        == {"r.0", "r.1"}
        == set(await own_bus.last_many("R", ["r.0", "r.1"]))
    )
    assert await own_bus.get("R", 9) is None


async def test_a_stream_larger_than_the_store_is_refused_as_full(own_bus: NatsBus):
    with pytest.raises(BusFullError, match="storage"):
        await own_bus.ensure_stream(StreamSpec("BIG", ("big.>",), 10**12))


async def test_credentials_are_checked_and_never_shown(tmp_path: Path):
    async with EmbeddedServer(tmp_path / "nats", max_store_bytes=64 * MIB, token="right-token") as server:
        for token in ("wrong-token", None):
            start = time.monotonic()
            with pytest.raises(BusUnavailableError, match="refuses the credentials") as caught:
                await NatsBus.connect(server.url, name="test", token=token)
            assert time.monotonic() - start < 5
            assert "token" not in str(caught.value).split("check")[0]
        bus = await NatsBus.connect(server.url, name="test", token="right-token")
        await bus.close()
        with_token = server.url.replace("//", "//right-token@")
        bus = await NatsBus.connect(with_token, name="test")
        await server.kill()
        with pytest.raises(BusError) as lost:
            await bus.request("x", b"", timeout_seconds=0.3)
        assert "right-token" not in str(lost.value)
        await bus.close()


async def test_an_unreachable_server_is_an_error_in_bounded_time():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start = time.monotonic()
    said = rf"^no NATS server answers at 127.0.0.1:{port} within 0.6 s \(Connection refused\); start it"
    with pytest.raises(BusUnavailableError, match=said):
        await NatsBus.connect(f"nats://127.0.0.1:{port}", name="test", timeout_seconds=0.6)
    assert time.monotonic() - start < 3


async def old_server(version: str, *, jetstream: bool) -> asyncio.Server:
    """A TCP server that greets like a NATS server of some version and answers pings; no old server can be installed."""

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        info = {"server_id": "X", "version": version, "max_payload": MIB, "headers": True, "jetstream": jetstream}
        writer.write(b"INFO " + json.dumps(info).encode() + b"\r\n")
        try:
            while line := await reader.readline():
                if line.startswith(b"PING"):
                    writer.write(b"PONG\r\n")
        finally:
            writer.close()

    return await asyncio.start_server(greet, "127.0.0.1", 0)


async def test_a_server_that_is_too_old_is_refused():
    async with await old_server("2.9.25", jetstream=True) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(BusUnavailableError, match=r"is version 2\.9; AgentJet needs 2\.11"):
            await NatsBus.connect(f"nats://127.0.0.1:{port}", name="test")


async def test_a_server_without_jetstream_is_refused(tmp_path: Path):
    async with EmbeddedServer(tmp_path / "nats", max_store_bytes=64 * MIB) as server:
        await server.stop()
        config = server.directory / "plain.conf"
        config.write_text(f'host: "127.0.0.1"\nport: {server.port}\n')
        from agentjet.bus.server import find_binary

        process = await asyncio.create_subprocess_exec(
            find_binary(), "-c", str(config), stderr=asyncio.subprocess.DEVNULL
        )
        try:
            with pytest.raises(BusUnavailableError, match="JetStream is not enabled"):
                await NatsBus.connect(server.url, name="test")
        finally:
            process.terminate()
            await process.wait()


async def test_the_end_of_a_connection_is_visible(own_server: EmbeddedServer):
    bus = await NatsBus.connect(own_server.url, name="test")
    ending = asyncio.create_task(bus.wait_closed())
    await asyncio.sleep(0)
    await bus.close()
    assert "closed" in await asyncio.wait_for(ending, 2)
    with pytest.raises(BusUnavailableError):
        await bus.publish("s.a", b"", stream="S")
    with pytest.raises(BusError):
        await bus.subscribe("x")


@pytest.mark.parametrize("delay_seconds", [0.0, 0.005, 0.05, 0.3])
async def test_a_broken_connection_closes_without_an_error(own_server: EmbeddedServer, delay_seconds: float):
    bus = await NatsBus.connect(own_server.url, name="test")
    await own_server.kill()
    await bus.send("x", b"still buffered")
    await asyncio.sleep(delay_seconds)
    await asyncio.wait_for(bus.close(), 5)
    assert "closed" in await asyncio.wait_for(bus.wait_closed(), 2)


async def test_a_missing_permission_is_named(tmp_path: Path):
    async with EmbeddedServer(tmp_path / "nats", max_store_bytes=64 * MIB) as server:
        admin = await NatsBus.connect(server.url, name="admin")
        await admin.ensure_stream(StreamSpec("S", ("s.>",), MIB))
        await admin.close()
        await server.stop()
        config = server.directory / "limited.conf"
        text = (server.directory / "nats-server.conf").read_text()
        config.write_text(
            text.replace("port: -1", f"port: {server.port}").replace(
                "jetstream {",
                "authorization { users: [ { user: u, password: p, "
                'permissions: { publish: { deny: "s.secret" } } } ] }\njetstream {',
            )
        )
        from agentjet.bus.server import find_binary

        process = await asyncio.create_subprocess_exec(
            find_binary(), "-c", str(config), stderr=asyncio.subprocess.DEVNULL
        )
        try:
            bus = await NatsBus.connect(server.url, name="test", user="u", password="p")
            assert await bus.publish("s.open", b"", stream="S") == 1
            with pytest.raises(BusTimeoutError, match=r"(?i)permissions violation for publish to .s.secret"):
                await bus.publish("s.secret", b"", stream="S", timeout_seconds=0.5)
            await bus.close()
        finally:
            process.terminate()
            await process.wait()


async def test_a_denied_permission_is_not_blamed_for_a_later_silence(own_bus: NatsBus):
    await own_bus._connection._on_error(RuntimeError("nats: permissions violation for publish to s.secret"))
    await own_bus.subscribe("quiet")
    with pytest.raises(BusTimeoutError, match=r"s\.secret"):
        await own_bus.request("quiet", b"", timeout_seconds=0.05)
    await asyncio.sleep(1.2)
    with pytest.raises(BusTimeoutError, match="a missing permission looks like this too"):
        await own_bus.request("quiet", b"", timeout_seconds=0.05)


async def test_a_request_waits_for_connection_and_answer_together(own_bus: NatsBus, monkeypatch: pytest.MonkeyPatch):
    async def connected(timeout_seconds: float) -> bool:
        await asyncio.sleep(0.4)
        return True

    await own_bus.subscribe("quiet")
    monkeypatch.setattr(own_bus._connection, "connected", connected)
    started = time.monotonic()
    with pytest.raises(BusTimeoutError):
        await own_bus.request("quiet", b"", timeout_seconds=0.5)
    assert time.monotonic() - started < 0.8


async def test_silence_after_a_slow_start_is_told_from_a_stream_that_is_not_ready(
    own_bus: NatsBus, monkeypatch: pytest.MonkeyPatch
):
    ask, answers = own_bus._connection.ask, [NobodyListensError("JetStream still starts")]

    async def slow(subject: str, *arguments: Any, **options: Any) -> Any:
        if subject != "s.x":
            return await ask(subject, *arguments, **options)
        if answers:
            raise answers.pop()
        await asyncio.sleep(0.05)
        raise BusTimeoutError("silence")

    monkeypatch.setattr(own_bus._connection, "ask", slow)
    with pytest.raises(BusTimeoutError):
        await own_bus.publish("s.x", b"", stream="S", timeout_seconds=0.3)
