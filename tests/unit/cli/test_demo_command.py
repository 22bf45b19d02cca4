import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from agentjet.cli.demo import _checkpoints, _commands
from agentjet.cli.main import build_app
from agentjet.config.place import RunPlace


def swarm(folder: Path, *versions: str) -> Any:
    place = RunPlace(folder)
    for version in versions:
        path = place.checkpoints("policy") / version
        path.mkdir(parents=True)
        (path / "manifest.json").write_text("{}")
    settings = SimpleNamespace(models={"policy": SimpleNamespace(path="/models/tiny")})
    return SimpleNamespace(place=place, settings=settings)


def test_the_newest_sound_checkpoint_is_shown(tmp_path):
    one = swarm(tmp_path, "1-9", "1-10", "2-11.damaged-1")
    assert _checkpoints(one) == {"policy": str(tmp_path / "checkpoints/policy/1-10")}


def test_every_command_that_the_report_shows_can_be_typed(tmp_path):
    commands = _commands(swarm(tmp_path, "1-10"), tmp_path, 20)
    assert set(commands) == {"Train longer", "Look inside", "Export policy"}
    for command in commands.values():
        program, *words = shlex.split(command)
        assert program == "agentjet"
        cast(Any, build_app()).parse_args(words, exit_on_error=False, print_error=False)
