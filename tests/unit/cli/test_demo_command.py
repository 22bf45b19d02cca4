import os
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from agentjet.cli.demo import _checkpoints, _commands, _continued, pick_pair
from agentjet.cli.main import build_app, run
from agentjet.cli.recipe import recipe_for, write_config
from agentjet.config.load import load
from agentjet.config.place import RunPlace
from agentjet.errors import UsageError, UserError


def swarm(folder: Path, *versions: str) -> Any:
    place = RunPlace(folder)
    for version in versions:
        path = place.checkpoints("policy") / version
        path.mkdir(parents=True)
        (path / "manifest.json").write_text("{}")
    models = {"policy": SimpleNamespace(path="/models/tiny")}
    settings = SimpleNamespace(models=models, run=SimpleNamespace(num_steps=20))
    return SimpleNamespace(place=place, settings=settings)


def test_the_newest_sound_checkpoint_is_shown(tmp_path):
    one = swarm(tmp_path, "1-9", "1-10", "2-11.damaged-1")
    assert _checkpoints(one) == {"policy": str(tmp_path / "checkpoints/policy/1-10")}


def test_every_command_that_the_report_shows_can_be_typed(tmp_path):
    commands = _commands(swarm(tmp_path, "1-10"), tmp_path)
    assert set(commands) == {"Train longer", "Look inside", "Export policy"}
    for command in commands.values():
        program, *words = shlex.split(command)
        assert program == "agentjet"
        cast(Any, build_app()).parse_args(words, exit_on_error=False, print_error=False)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A folder of a tiny demo whose owner has added a comment."""
    path = write_config(recipe_for("tiny", 1), tmp_path, num_steps=7, seed=3, model_path="/models/tiny")
    path.write_text(path.read_text() + "# mine\n")
    return path


def test_going_on_leaves_the_run_s_file_as_it_is(config: Path):
    before = config.read_text()
    assert _continued(config, None, None, None, None) is recipe_for("tiny", 1)
    assert config.read_text() == before


def test_going_on_with_more_steps_changes_only_their_number(config: Path):
    before = config.read_text()
    _continued(config, "tiny", 1, "transformers", 20)
    assert load(config).settings.run.num_steps == 20
    assert config.read_text() == before.replace("num_steps = 7", "num_steps = 20")


@pytest.mark.parametrize(("model", "models"), [("smollm2-135m", None), (None, 2)])
def test_going_on_with_another_model_is_refused(config: Path, model: str | None, models: int | None):
    before = config.read_text()
    with pytest.raises(UsageError, match="holds a run of 1 x tiny"):
        _continued(config, model, models, None, 20)
    assert config.read_text() == before


def test_going_on_with_another_engine_is_refused(config: Path):
    with pytest.raises(UsageError, match=r"engine\.kind = transformers; leave --engine out"):
        _continued(config, None, None, "vllm", None)


def test_a_run_that_is_up_is_not_touched(config: Path):
    before = config.read_text()
    RunPlace(config.parent).announce("nats://127.0.0.1:4222", os.getpid())
    with pytest.raises(UserError, match=f"is up .server pid {os.getpid()}"):
        _continued(config, None, None, None, 20)
    assert config.read_text() == before


def test_no_steps_is_wrong_usage(capsys: pytest.CaptureFixture[str]):
    assert run(["demo", "--model", "tiny", "--steps", "0"]) == 2
    assert "--steps" in capsys.readouterr().err


def test_the_transcripts_are_of_the_task_that_gained_most():
    first = {"a": SimpleNamespace(reward=1.0), "b": SimpleNamespace(reward=0.2), "c": SimpleNamespace(reward=0.0)}
    last = {"a": SimpleNamespace(reward=1.0), "b": SimpleNamespace(reward=1.0), "c": SimpleNamespace(reward=0.1)}
    assert pick_pair(cast(Any, first), cast(Any, last)) == (first["b"], last["b"])
    assert pick_pair(cast(Any, first), cast(Any, first)) == (first["a"], None)
    assert pick_pair({}, {}) == (None, None)
