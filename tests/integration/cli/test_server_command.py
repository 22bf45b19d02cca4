"""Commands against a real server."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from agentjet.bus.nats import NatsBus
from agentjet.bus.record import put, stream_specs
from agentjet.bus.server import EmbeddedServer
from agentjet.cli.main import run
from agentjet.cli.run_folder import run_folders
from agentjet.config.place import RunPlace
from agentjet.schemas import subject
from agentjet.schemas.codec import encode
from agentjet.schemas.event import Event
from agentjet.schemas.ids import RunId, new_run_id
from agentjet.schemas.ledger import CurriculumStart, LearnerStart
from agentjet.schemas.presence import Presence
from agentjet.schemas.subject import Stream
from agentjet.training.replay import ReplayedStep


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def on_bus(url: str, body: Callable[[NatsBus], Awaitable[None]]) -> None:
    async def within() -> None:
        bus = await NatsBus.connect(url, name="test")
        try:
            await body(bus)
        finally:
            await bus.close()

    asyncio.run(within())


@pytest.fixture
def made(nats_server: EmbeddedServer) -> RunId:
    """A run with a little in it."""
    name = new_run_id("cli")

    async def make(bus: NatsBus) -> None:
        for spec in stream_specs(name, max_bytes=2**26):
            await bus.ensure_stream(spec)
        curriculum = CurriculumStart(run=name, incarnation=1, config_digest="")
        start = LearnerStart(
            run=name, model="m", incarnation=1, base_step=0, cursor=0, config_digest="", fold_digest=""
        )
        await put(bus, name, Stream.LEDGER, subject.ledger(name, subject.CURRICULUM), curriculum)
        await put(bus, name, Stream.LEDGER, subject.ledger(name, "m"), start)
        large = Event(run=name, actor="a", kind="k", data={"text": "x"})
        await put(bus, name, Stream.EVENTS, subject.event(name, "a", "k"), large)

    on_bus(nats_server.url, make)
    return name


def output(capsys, *words: str, code: int = 0) -> str:
    assert run(words) == code
    return capsys.readouterr().out


def test_status_lists_streams_and_says_what_is_missing(nats_server, made, capsys):
    shown = json.loads(output(capsys, "status", "--json", "--nats", nats_server.url, "--run", made))
    assert shown["run"] == made
    assert {stream["name"] for stream in shown["streams"]} == {f"AJ_{made}_{stream.name}" for stream in Stream}
    assert shown["problems"] == ["no actor is alive: the run is stopped, and `agentjet up` goes on with it"]
    assert [model["name"] for model in shown["models"]] == ["m"]
    assert "no actor is alive" in output(capsys, "status", "--nats", nats_server.url, "--run", made)


def test_status_finds_the_server_of_a_run_that_is_up_here(nats_server, made, tmp_path, capsys):
    place = RunPlace(tmp_path / "runs/demo")
    place.begin("x", made)
    place.announce(nats_server.url, nats_server.pid or 0)
    assert json.loads(output(capsys, "status", "--json"))["run"] == made
    assert (place.dir / "server.json").stat().st_mode & 0o777 == 0o600


def test_audit_of_a_fresh_run_has_no_differences(nats_server, made, capsys):
    shown = json.loads(output(capsys, "audit", "--json", "--nats", nats_server.url, "--run", made))
    assert (shown["run"], shown["issued"], shown["lost"], shown["duplicated"]) == (made, 0, 0, 0)
    assert "lost 0, duplicated 0" in output(capsys, "audit", "--nats", nats_server.url, "--run", made)


def test_decode_reads_a_record_of_a_stream(nats_server, made, capsys):
    words = ["decode", "--stream", "LEDGER", "--nats", nats_server.url, "--run", made]
    assert json.loads(output(capsys, *words, "--seq", "2"))["schema"] == "learner_start/1.0"
    assert run([*words, "--seq", "99"]) == 1
    assert "LEDGER holds no message 99; it holds 1 to 2" in capsys.readouterr().err


def test_a_replay_that_compared_nothing_verifies_nothing(nats_server, made, capsys, monkeypatch):
    class NoSteps:
        def __init__(self, *_: object) -> None:
            pass

        async def steps(self) -> AsyncIterator[ReplayedStep]:
            for step in ():
                yield step

    monkeypatch.setattr("agentjet.training.replay.Replay", NoSteps)
    words = ["replay", "--nats", nats_server.url, "--run", made, "--set", "models.m.path=tiny"]
    assert "0 steps replayed" in output(capsys, *words)
    assert run([*words, "--verify", "--set", "run.is_deterministic=true"]) == 1
    assert "no step follows initial: nothing was compared" in capsys.readouterr().err


def test_runs_are_listed_and_deleted(nats_server, made, capsys):
    rows = json.loads(output(capsys, "runs", "ls", "--json", "--nats", nats_server.url))
    (row,) = [row for row in rows if row["run"] == made]
    assert (row["num_messages"], row["num_actors"]) == (3, 0)
    output(capsys, "runs", "rm", made, "--nats", nats_server.url)
    assert made not in output(capsys, "runs", "ls", "--nats", nats_server.url)
    assert run(["runs", "rm", made, "--nats", nats_server.url]) == 1


def test_a_deleted_run_is_not_taken_for_the_newest_any_more(nats_server, made, tmp_path, capsys):
    place, other = RunPlace(tmp_path / "runs/demo"), RunPlace(tmp_path / "runs/other")
    place.begin("x", made)
    other.begin("x", "x-abcdef")
    output(capsys, "runs", "rm", made, "--nats", nats_server.url)
    assert [folder.run for folder in run_folders(Path("runs"))] == ["x-abcdef"]
    assert (place.dir / "removed.json").is_file() and place.run_id() is None


def test_the_server_of_a_run_that_is_deleted_is_found_by_its_folder(nats_server, made, tmp_path, capsys):
    place, newer = RunPlace(tmp_path / "runs/demo"), RunPlace(tmp_path / "runs/newer")
    place.begin("x", made)
    place.announce(nats_server.url, nats_server.pid or 0)
    newer.begin("x", "x-abcdef")
    newer.announce("nats://127.0.0.1:1", nats_server.pid or 0)
    output(capsys, "runs", "rm", made)
    assert made not in output(capsys, "runs", "ls", "--nats", nats_server.url)


def test_live_run_is_deleted_only_by_force(nats_server, made, capsys):
    presence = Presence(run=made, actor="learner", name="l", host="h", pid=1, started=0.0, state="busy")

    async def live(bus: NatsBus) -> None:
        body = encode(presence)[1]
        await bus.put_presence(subject.presence_bucket(made), "learner.l", body, ttl_seconds=60)

    on_bus(nats_server.url, live)
    assert run(["runs", "rm", made, "--nats", nats_server.url]) == 1
    assert "is alive (learner.l); stop it first, or give --force" in capsys.readouterr().err
    output(capsys, "runs", "rm", made, "--force", "--nats", nats_server.url)


def test_other_runs_with_a_longer_name_stay(nats_server, made, capsys):
    longer = RunId(f"{made}_2")

    async def make(bus: NatsBus) -> None:
        for spec in stream_specs(longer, max_bytes=2**26):
            await bus.ensure_stream(spec)

    on_bus(nats_server.url, make)
    output(capsys, "runs", "rm", made, "--nats", nats_server.url)
    assert longer in output(capsys, "runs", "ls", "--nats", nats_server.url)
    output(capsys, "runs", "rm", longer, "--nats", nats_server.url)


def test_unknown_run_lists_those_that_are_there(nats_server, made, capsys):
    assert run(["status", "--nats", nats_server.url, "--run", "no-abcdef"]) == 1
    said = capsys.readouterr().err
    assert "run no-abcdef is not on this server; it holds" in said
    assert made in said


def test_doctor_reaches_the_server(nats_server, capsys):
    found = json.loads(output(capsys, "doctor", "--json", "--nats", nats_server.url))
    (nats,) = [finding for finding in found if finding["name"] == "nats"]
    assert nats["grade"] == "ok"
