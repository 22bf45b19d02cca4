import json
from pathlib import Path

import pytest

from agentjet.durable.manifest import read_manifest, verify, verify_files, versions_in, write_manifest
from agentjet.errors import CheckpointError
from agentjet.schemas.ids import Version

FILES = {"model.safetensors": b"weights" * 100, "config.json": b"{}", "optimizer.bin": b"o"}
EXTRA = {"version": "1-20", "step": 20, "incarnation": 1, "cursor": 7, "fold": {}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "1-20")


def checkpoint(folder: Path, **changes: object) -> Path:
    folder.mkdir(parents=True)
    for name, data in FILES.items():
        (folder / name).write_bytes(data)
    (folder / "state.json").write_text(json.dumps({"format": 1, "extra": EXTRA | changes}))
    write_manifest(folder)
    return folder


def test_sound_checkpoint_is_verified_whole(folder):
    manifest = verify(folder)
    assert (manifest.step, manifest.cursor, len(manifest.files)) == (20, 7, 4)
    assert manifest.num_bytes > sum(map(len, FILES.values()))
    assert verify_files(folder) == manifest.files == write_manifest(folder)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / "optimizer.bin").write_bytes(b"x"), "its sha256 differs"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"cut"), "3 bytes instead of 700"),
        (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "manifest.json is damaged"),
        (lambda folder: (folder / "manifest.json").write_text("{}"), "manifest.json is damaged: files"),
        (lambda folder: (folder / "manifest.json").write_text("[]"), "manifest.json is damaged"),
        (lambda folder: (folder / "manifest.json").unlink(), "no whole checkpoint: it has no manifest.json"),
    ],
)
@pytest.mark.parametrize("check", [verify, verify_files])
def test_damage_is_named(folder, check, damage, said):
    damage(folder)
    with pytest.raises(CheckpointError, match=said):
        check(folder)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / "state.json").unlink(), "no whole checkpoint: it has no state.json"),
        (lambda folder: (folder / "state.json").write_text("{}"), "manifest.json is damaged: version"),
    ],
)
def test_a_checkpoint_without_a_name_is_none(folder, damage, said):
    damage(folder)
    with pytest.raises(CheckpointError, match=said):
        verify(folder)


@pytest.mark.parametrize("check", [verify, verify_files])
def test_file_outside_the_folder_is_refused(folder, check):
    (folder.parent / "secret").write_bytes(b"s")
    path = folder / "manifest.json"
    files = json.loads(path.read_text())["files"]
    path.write_text(json.dumps({"files": [*files, {"name": "../secret", "num_bytes": 1, "sha256": "0"}]}))
    with pytest.raises(CheckpointError, match="lies outside"):
        check(folder)


def test_version_must_be_that_of_its_step(tmp_path):
    with pytest.raises(CheckpointError, match="is not that of its step"):
        read_manifest(checkpoint(tmp_path / "1-2", version="1-3"))


def test_whole_checkpoints_are_listed_in_order_of_version(tmp_path):
    for name in ("2-21", "1-100", "1-20", "1-30.damaged-1"):
        checkpoint(tmp_path / name)
    (tmp_path / "1-5").mkdir()  # not finished: no manifest
    (tmp_path / "notes").mkdir()
    assert list(versions_in(tmp_path).items()) == [
        (Version(1, 20), tmp_path / "1-20"),
        (Version(1, 100), tmp_path / "1-100"),
        (Version(2, 21), tmp_path / "2-21"),
    ]
    assert versions_in(tmp_path / "absent") == {}
