"""What `agentjet up` refuses, and how its options reach the actors."""

import fcntl
from pathlib import Path

import pytest

from agentjet.cli.main import run
from agentjet.cli.up import variables
from agentjet.config.load import load
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
