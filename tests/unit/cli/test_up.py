"""What `agentjet up` refuses, and how its options reach the actors."""

import fcntl
import shlex
from pathlib import Path

import pytest

from agentjet.actors.swarm import Swarm
from agentjet.cli.main import run
from agentjet.cli.target import Target
from agentjet.cli.up import what_next
from agentjet.config.load import load, variables
from agentjet.config.place import RunPlace

CONFIG = """
[models.Big]
path = "tiny"
[models.Big.learner]
batch_groups = 2
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("words", "said"), [([], "there is no swarm.toml here"), (["--config", "x"], "no such file")])
def test_no_file_is_one_sentence(words, said, capsys):
    assert run(["up", *words]) == 1
    assert said in capsys.readouterr().err


def test_run_that_is_up_is_named_with_its_process(here, capsys):
    (here / "swarm.toml").write_text(CONFIG)
    place = RunPlace(here / "runs/default")
    place.begin("x", "x-abcdef")
    place.announce("nats://127.0.0.1:1", 4711)
    place.nats.mkdir()
    with (place.nats / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert run(["up"]) == 1
    assert "run x-abcdef is up here (server pid 4711)" in capsys.readouterr().err


def test_options_read_the_same_from_the_actors_environment(here):
    (here / "swarm.toml").write_text(CONFIG)
    given = {
        "run.dir": str(here / "x"),
        "run.seed": "7",
        "models.Big.learner.batch_groups": "3",
        "nats.url": "nats://h:1",
        "eval.sampling": '{"temperature": 0.5}',
    }
    by_options = load(None, given, environment={}).settings
    by_environment = load(None, environment=variables(given)).settings
    assert by_environment == by_options
    assert by_options.models["Big"].learner.batch_groups == 3
    assert by_options.run.dir == here / "x"


def test_names_that_only_the_options_know_keep_their_capitals_on_the_way_to_the_actors(here, monkeypatch):
    (here / "swarm.toml").write_text(CONFIG)
    given = {"models.Qwen.path": "tiny", "models.BIG.path": "tiny", "models.Big.path": "smollm2-135m"}
    given |= {"pools.Guess.workflow": "a.py:run", "pools.Guess.models": '["Qwen"]'}
    by_options = load(None, given, environment={}).settings
    around = {"AGENTJET_MODELS__BIG__PATH": "of the shell", "AGENTJET_MODELS__BIG__LEARNER__BATCH_GROUPS": "5"}
    by_environment = load(None, environment=variables(given) | around).settings
    assert list(by_environment.models) == list(by_options.models) == ["Big", "Qwen", "BIG"]
    assert by_environment.pools == by_options.pools
    assert by_environment.models["Big"].path == "smollm2-135m"
    assert by_environment.models["Big"].learner.batch_groups == 5


def test_its_end_names_the_commands_that_go_on(here):
    (here / "a b.toml").write_text(CONFIG + "[run]\nis_deterministic = true\n")
    given = Target(config=Path("a b.toml"), set=("run.seed=7", "run.num_steps=5"))
    loaded = given.load()
    assert loaded.path is not None
    lines = what_next(given, Swarm(loaded.settings, loaded.path), 10)
    words = [shlex.split(line.partition(": ")[2]) for line in lines]
    assert [command[1] for command in words] == ["up", "status", "audit", "replay"]
    assert all(command[-6:] == words[1][-6:] for command in words[1:])
    options = ["--config", "a b.toml", "--set", "run.seed=7", "--set", "run.num_steps=5"]
    assert words[0][2:] == [*options, "--set", "run.num_steps=10"]


def test_a_run_that_can_not_be_derived_again_names_no_replay(here):
    (here / "swarm.toml").write_text(CONFIG)
    loaded = Target(dir=here / "x").load()
    assert loaded.path is not None
    lines = what_next(Target(dir=here / "x"), Swarm(loaded.settings, loaded.path), 0)
    assert not any("replay" in line or "num_steps" in line for line in lines)
