"""Files that the engines of a host share: whole or not there, and brought forward by patches."""

import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from made_weights import bfloat16, sha256, trained, weights_file

from agentjet.delivery.mirror import Mirror, advance
from agentjet.delivery.patch import encode_patch
from agentjet.errors import PatchError


def made_files(count: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    master, found = rng.standard_normal(20_000) * 0.05, []
    for _ in range(count):
        found.append(weights_file({"w": ("bfloat16", bfloat16(master))}))
        master = trained(master, 1e-4, rng)
    return found


FILES = made_files(4)
NAMES = [sha256(file) for file in FILES]
PATCHES = [encode_patch(base, new, base_sha256=sha256(base), sha256=sha256(new)) for base, new in pairwise(FILES)]


def bring(mirror: Mirror, number: int) -> Path:
    with mirror.work_file() as work:
        work.write_bytes(FILES[number].tobytes())
        return mirror.adopt(work, NAMES[number])


def held_by(*mirrors: Mirror) -> set[str]:
    return {path.stem for mirror in mirrors for path in mirror.place("").parent.glob("*") if path.name[0] != "."}


def test_a_file_stays_while_anybody_holds_it_and_goes_with_the_next_one(tmp_path: Path):
    one, other = Mirror(tmp_path), Mirror(tmp_path)
    assert one.take(NAMES[0]) is None
    assert bring(one, 0).read_bytes() == FILES[0].tobytes()
    assert other.take(NAMES[0]) == one.place(NAMES[0])
    bring(one, 1)
    assert held_by(one) == {NAMES[0], NAMES[1]}
    assert other.take(NAMES[1]) is not None
    assert held_by(one) == {NAMES[1]}
    one.release()
    assert other.has(NAMES[1])
    other.release()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_another_has_brought_meanwhile_is_taken_instead(tmp_path: Path):
    one, other = Mirror(tmp_path), Mirror(tmp_path)
    with other.work_file() as work:
        work.write_bytes(FILES[0].tobytes())
        inode = bring(one, 0).stat().st_ino
        assert other.adopt(work, NAMES[0]).stat().st_ino == inode
    assert held_by(one) == {NAMES[0]}


def test_what_was_not_adopted_is_removed(tmp_path: Path):
    mirror = Mirror(tmp_path)
    with pytest.raises(OSError, match="full"), mirror.work_file() as work:
        work.write_bytes(b"half")
        raise OSError("the disk is full")
    assert held_by(mirror) == set()


def test_folders_of_other_hosts_go_when_nothing_has_happened_there_for_a_day(tmp_path: Path):
    for name, age in (("arrived-gone-0", 90_000), ("arrived-here-0", 3600), ("learners", 90_000)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file.safetensors").touch()
        for path in (tmp_path / name / "file.safetensors", tmp_path / name):
            then = path.stat().st_mtime - age
            os.utime(path, (then, then))
    mirror = Mirror(tmp_path)
    bring(mirror, 0)
    assert {path.name for path in tmp_path.iterdir()} == {mirror.place("").parent.name, "arrived-here-0", "learners"}


def on_disk(folder: Path, number: int) -> Path:
    path = folder / "file"
    path.write_bytes(FILES[number].tobytes())
    return path


def test_patches_bring_a_file_forward_one_by_one_or_together(tmp_path: Path):
    path = on_disk(tmp_path, 0)
    advance(path, NAMES[0], NAMES[1], PATCHES[:1])
    assert path.read_bytes() == FILES[1].tobytes()
    advance(path, NAMES[1], NAMES[3], PATCHES[1:])
    assert path.read_bytes() == FILES[3].tobytes()


@pytest.mark.parametrize(
    ("patches", "target", "message"),
    [
        (PATCHES[1:2], 2, "of other weights"),
        (PATCHES[:1], 2, "do not lead to"),
        ([PATCHES[0], PATCHES[2]], 3, "of other weights"),
        ([PATCHES[0][:-1]], 1, "fetch it again"),
    ],
)
def test_patches_of_another_way_are_refused_before_anything_is_written(
    tmp_path: Path, patches: list[bytes], target: int, message: str
):
    path = on_disk(tmp_path, 0)
    with pytest.raises(PatchError, match=message):
        advance(path, NAMES[0], NAMES[target], patches)
    assert path.read_bytes() == FILES[0].tobytes()


def test_a_file_that_is_not_what_it_was_taken_for_is_found_out(tmp_path: Path):
    path = on_disk(tmp_path, 0)
    damaged = bytearray(path.read_bytes())
    damaged[-2] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(PatchError, match="start from a whole file"):
        advance(path, NAMES[0], NAMES[1], PATCHES[:1])
