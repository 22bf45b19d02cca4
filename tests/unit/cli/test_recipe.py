import tomllib
from pathlib import Path

import pytest

from agentjet.cli import recipe
from agentjet.cli.recipe import RECIPES, write_config


@pytest.mark.parametrize("name", ['a "quoted" one', "back\\slash", "ünï-\U0001f680", "tab\t and del\x7f"])
def test_folders_with_any_name_are_written_as_they_are(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(recipe, "examples_folder", lambda: tmp_path / name)
    path = write_config(RECIPES["tiny", 1], tmp_path / name, num_steps=2, seed=3, model_path=str(tmp_path / name))
    written = tomllib.loads(path.read_text("utf-8"))
    assert written["models"]["policy"]["path"] == str(tmp_path / name)
    agent = tmp_path / name / "guess" / "agent.py"
    assert (written["pools"]["guess"]["workflow"], written["pools"]["guess"]["tasks"]) == (
        f"{agent}:run",
        f"{agent}:tasks",
    )
