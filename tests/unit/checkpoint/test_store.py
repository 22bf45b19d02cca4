import json
from pathlib import Path

import pytest

from agentjet.checkpoint.export import export
from agentjet.checkpoint.store import CheckpointStore, Entry, surplus
from agentjet.durable.manifest import set_aside, write_manifest
from agentjet.errors import CheckpointError
from agentjet.schemas.ids import Version

FILES = {"model.safetensors": b"weights" * 100, "config.json": b"{}", "tokenizer.json": b"{}", "optimizer.bin": b"o"}


def checkpoint(root: Path, model: str, version: str) -> Path:
    folder = root / model / version
    folder.mkdir(parents=True)
    for name, data in FILES.items():
        (folder / name).write_bytes(data)
    parsed = Version.parse(version)
    extra = {"version": version, "step": parsed.step, "incarnation": parsed.incarnation}
    (folder / "state.json").write_text(json.dumps({"extra": extra}))
    write_manifest(folder)
    return folder


def test_entries_are_in_order_of_version(tmp_path):
    for version in ("1-100", "1-20", "2-21"):
        checkpoint(tmp_path, "m", version)
    (tmp_path / "m/1-5").mkdir()  # not finished: no manifest
    (tmp_path / "m/notes").mkdir()
    store = CheckpointStore(tmp_path)
    assert [str(entry.version) for entry in store.entries("m")] == ["1-20", "1-100", "2-21"]
    assert store.models() == ["m"]
    assert CheckpointStore(tmp_path / "absent").models() == []


def test_find_takes_a_path_a_version_or_a_model(tmp_path):
    old, new = checkpoint(tmp_path, "m", "1-2"), checkpoint(tmp_path, "m", "1-4")
    store = CheckpointStore(tmp_path)
    assert store.find(str(old)) == old
    assert store.find("m/1-2") == old
    assert store.find("m") == new
    with pytest.raises(CheckpointError, match=r"there are m/1-2, m/1-4"):
        store.find("m/9-9")


def test_damaged_folders_are_kept_aside(tmp_path):
    store = CheckpointStore(tmp_path)
    first = set_aside(checkpoint(tmp_path, "m", "1-2"))
    second = set_aside(checkpoint(tmp_path, "m", "1-2"))
    assert (first.name, second.name) == ("1-2.damaged-1", "1-2.damaged-2")
    assert store.entries("m") == []


def test_removed_folders_leave_nothing(tmp_path):
    store = CheckpointStore(tmp_path)
    store.remove(checkpoint(tmp_path, "m", "1-2"))
    assert list((tmp_path / "m").iterdir()) == []


def test_interrupted_removal_is_finished_later(tmp_path):
    folder = checkpoint(tmp_path, "m", "1-2")
    folder.rename(tmp_path / "m/.1-2.pruned")
    CheckpointStore(tmp_path).sweep("m")
    assert list((tmp_path / "m").iterdir()) == []


def pruned(versions: list[str], *, keep: int, valid: list[str], base: str = "") -> list[str]:
    entries = [Entry("m", Version.parse(version), Path(version)) for version in versions]
    return [str(e.version) for e in surplus(entries, keep=keep, valid=map(Version.parse, valid), base=base)]


def test_newest_are_kept():
    versions = ["1-2", "1-4", "1-6"]
    assert pruned(versions, keep=2, valid=versions) == ["1-2"]


def test_newest_is_kept_even_when_none_is_wanted():
    assert pruned(["1-2", "1-4"], keep=0, valid=["1-2", "1-4"]) == ["1-2"]


def test_base_of_the_learner_is_kept():
    versions = ["1-2", "1-4", "2-6"]
    assert pruned(versions, keep=1, valid=versions, base="1-2") == ["1-4"]


def test_voided_ones_do_not_count_as_kept():
    assert pruned(["1-8", "1-10", "1-12"], keep=2, valid=["1-8"]) == ["1-10", "1-12"]


def test_export_holds_the_model_and_nothing_of_the_learner(tmp_path):
    folder = export(checkpoint(tmp_path, "m", "1-2"), tmp_path / "out/model")
    assert {path.name for path in folder.iterdir()} == {"model.safetensors", "config.json", "tokenizer.json"}
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]


def test_export_refuses_a_folder_in_use(tmp_path):
    source = checkpoint(tmp_path, "m", "1-2")
    with pytest.raises(CheckpointError, match="is there already"):
        export(source, source)


def test_export_of_a_damaged_checkpoint_writes_nothing(tmp_path):
    source = checkpoint(tmp_path, "m", "1-2")
    (source / "optimizer.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="sha256"):
        export(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
