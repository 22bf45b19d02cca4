"""Which run a command means: options, files, and what lies below ./runs."""

import os
from pathlib import Path

import pytest

from agentjet.cli.main import run
from agentjet.cli.run_folder import run_folders
from agentjet.cli.target import Folder, Target, open_bus
from agentjet.config.load import load
from agentjet.config.place import RunPlace
from agentjet.errors import BusUnavailableError, UsageError


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def made(here: Path, name: str, *, time: float, seed: int | None = None) -> Path:
    """A run's folder whose newest log is of that time, with its own swarm.toml where it has a seed."""
    place = RunPlace(here / "runs" / name)
    place.begin(name, f"{name}-abcdef")
    place.logs.mkdir()
    (place.logs / "swarm.log").touch()
    for file in (place.dir / "run.json", place.logs / "swarm.log"):
        os.utime(file, (time, time))
    if seed is not None:
        (place.dir / "swarm.toml").write_text(f'[run]\ndir = "."\nseed = {seed}\n')
    return place.dir


def test_newest_run_is_taken_with_its_own_configuration_and_is_named(here, capsys):
    made(here, "old", time=100, seed=1)
    made(here, "new", time=200, seed=2)
    settings = Folder().settings()
    assert (settings.run.dir, settings.run.seed) == (here / "runs/new", 2)
    assert capsys.readouterr().err == "agentjet: run new-abcdef in runs/new; --dir names another\n"


def test_reading_a_run_does_not_make_it_the_newest(here):
    made(here, "new", time=200)
    (made(here, "old", time=100) / "nats").mkdir()
    assert [folder.path.name for folder in run_folders(Path("runs"))] == ["new", "old"]


def test_run_that_is_up_is_taken_before_a_newer_one(here, capsys):
    RunPlace(made(here, "up", time=100)).announce("nats://127.0.0.1:1", os.getpid())
    RunPlace(made(here, "new", time=200)).announce("nats://127.0.0.1:2", 2**22 + 1)
    assert Target().settings().run.dir == here / "runs/up"
    assert "run up-abcdef in runs/up, which is up" in capsys.readouterr().err


def test_server_whose_data_nobody_uses_is_not_up_though_its_process_id_is_taken(here):
    place = RunPlace(made(here, "old", time=100))
    place.announce("nats://127.0.0.1:1", os.getpid())
    place.nats.mkdir()
    assert not run_folders(Path("runs"))[0].is_up


def test_run_that_is_named_is_found_by_its_id(here):
    made(here, "old", time=100, seed=1)
    made(here, "new", time=200)
    assert Target(run="old-abcdef").settings().run.seed == 1
    assert Target(run="none-abcdef").settings().run.dir == here / "runs/default"


@pytest.mark.parametrize(
    "said", [{"nats": "nats://h:1"}, {"dir": Path("x")}, {"set": ("run.dir=x",)}, {"config": Path("own.toml")}]
)
def test_what_is_said_is_taken(here, said, capsys):
    made(here, "new", time=200)
    (here / "own.toml").write_text("")
    assert Target(**said).settings().run.dir != here / "runs/new"
    assert capsys.readouterr().err == ""


def test_configuration_of_the_working_directory_and_of_the_environment_come_first(here, monkeypatch):
    made(here, "new", time=200)
    monkeypatch.setenv("AGENTJET_RUN__DIR", "x")
    assert Target().settings().run.dir == here / "x"
    monkeypatch.delenv("AGENTJET_RUN__DIR")
    (here / "swarm.toml").write_text("[run]\nseed = 7\n")
    assert (Target().settings().run.dir, Target().settings().run.seed) == (here / "runs/default", 7)


def test_folder_brings_its_own_configuration_along(here):
    (here / "swarm.toml").write_text("[run]\nseed = 7\n")
    made(here, "a", time=100, seed=1)
    made(here, "b", time=100)
    assert Target(dir=Path("runs/a")).settings().run.seed == 1
    assert Target(dir=Path("runs/b")).settings().run.seed == 7
    assert Target(dir=Path("runs/a"), config=Path("swarm.toml")).settings().run.seed == 7


def test_damaged_folders_are_passed_over(here):
    (made(here, "bad", time=300) / "run.json").write_text("[")
    made(here, "good", time=100)
    assert [folder.path.name for folder in run_folders(Path("runs"))] == ["good"]


async def test_no_run_in_a_folder_lists_those_there_are(here):
    made(here, "a", time=100)
    (here / "swarm.toml").write_text('[run]\ndir = "runs/b"\n')
    with pytest.raises(BusUnavailableError, match=r"no run in .*runs/b; below ./runs there are runs/a; say with --con"):
        async with open_bus(Target().settings()):
            pass


def test_setting_without_a_value_is_wrong_usage():
    with pytest.raises(UsageError, match="KEY=VALUE"):
        Folder(set=("run.seed",)).overrides()


def test_paths_lose_their_dots(here):
    (here / "swarm.toml").write_text('[run]\ndir = "../x"\n[pools.p]\nworkflow = "../a.py:run"\n')
    (here / "y").mkdir()
    settings = load(here / "y/../swarm.toml").settings
    assert settings.run.dir == here.parent / "x"
    assert settings.pools["p"].workflow == f"{here.parent / 'a.py'}:run"
    assert Folder(dir=Path("y/../z")).settings().run.dir == here / "z"


@pytest.mark.parametrize(
    ("words", "absent"), [(["runs", "rm"], "--run "), (["checkpoint", "verify"], "--nats"), (["eval"], "--nats")]
)
def test_commands_offer_only_what_they_use(words, absent, capsys):
    assert run([*words, "--help"]) == 0
    assert absent not in capsys.readouterr().out


@pytest.mark.parametrize("words", [["runs", "ls"], ["dead", "ls"], ["checkpoint", "ls"], ["model", "ls"]])
def test_json_is_described(words, capsys):
    assert run([*words, "--help"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "--json" in line]
    assert "One JSON" in line
