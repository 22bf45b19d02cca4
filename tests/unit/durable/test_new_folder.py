from pathlib import Path

import pytest

from agentjet.durable.new_folder import new_folder
from agentjet.errors import CheckpointError


def test_the_folder_appears_when_it_is_whole(tmp_path: Path):
    wanted = tmp_path / "deep" / "model"
    with new_folder(wanted) as draft:
        (draft / "config.json").write_text("{}")
        assert not wanted.exists()
    assert [path.name for path in wanted.iterdir()] == ["config.json"]
    assert list(wanted.parent.iterdir()) == [wanted]


@pytest.mark.parametrize("error", [ValueError("broken"), CheckpointError("damaged")])
def test_what_fails_leaves_nothing_and_keeps_its_error(tmp_path: Path, error: Exception):
    with pytest.raises(type(error), match=str(error)), new_folder(tmp_path / "model") as draft:
        (draft / "config.json").write_text("{}")
        raise error
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_refuses_is_told_with_the_folder(tmp_path: Path):
    with pytest.raises(CheckpointError, match="model can not be written: full; choose"), new_folder(tmp_path / "model"):
        raise OSError(28, "full")
    assert list(tmp_path.iterdir()) == []


def test_a_name_in_use_is_refused_at_once(tmp_path: Path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").write_text("mine")
    for name in ("file", "used"):
        with pytest.raises(CheckpointError, match="is there already"), new_folder(tmp_path / name):
            pytest.fail("not at once")


def test_an_empty_folder_is_taken(tmp_path: Path):
    (tmp_path / "model").mkdir()
    with new_folder(tmp_path / "model") as draft:
        (draft / "a").touch()
    assert (tmp_path / "model" / "a").exists()
