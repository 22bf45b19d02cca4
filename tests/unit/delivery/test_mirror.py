"""A local file brought forward by patches: the new version, or the file before it."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from made_weights import bfloat16, sha256, trained, weights_file

from agentjet.delivery import mirror as mirror_module
from agentjet.delivery.mirror import Mirror
from agentjet.delivery.patch import encode_patch
from agentjet.errors import PatchError
from agentjet.schemas.ids import Version


def made_files(count: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    master, found = rng.standard_normal(20_000) * 0.05, []
    for _ in range(count):
        found.append(weights_file({"w": ("bfloat16", bfloat16(master))}))
        master = trained(master, 1e-4, rng)
    return found


FILES = made_files(4)
PATCHES = [encode_patch(base, new, base_sha256=sha256(base), sha256=sha256(new)) for base, new in pairwise(FILES)]


@pytest.fixture
def mirror(tmp_path: Path) -> Mirror:
    one = Mirror(tmp_path / "engine")
    one.place(Version(1, 0)).write_bytes(FILES[0].tobytes())
    one.hold(Version(1, 0), sha256(FILES[0]))
    return one


def names(mirror: Mirror) -> list[str]:
    return sorted(path.name for path in mirror.place(Version(0, 0)).parent.iterdir() if path.name != ".lock")


def test_patches_bring_the_file_forward_one_by_one_or_together(mirror: Mirror):
    path = mirror.advance(Version(1, 1), sha256(FILES[1]), PATCHES[:1])
    assert path.read_bytes() == FILES[1].tobytes()
    path = mirror.advance(Version(1, 3), sha256(FILES[3]), PATCHES[1:])
    assert path.read_bytes() == FILES[3].tobytes()
    assert (names(mirror), mirror.held) == (["1-3.safetensors"], Version(1, 3))


@pytest.mark.parametrize(
    ("patches", "target", "message"),
    [
        (PATCHES[1:2], 2, "of other weights"),
        (PATCHES[:1], 2, "do not lead to"),
        ([PATCHES[0], PATCHES[2]], 3, "of other weights"),
        ([PATCHES[0][:-1]], 1, "fetch it again"),
    ],
)
def test_patches_of_another_way_are_refused(mirror: Mirror, patches: list[bytes], target: int, message: str):
    with pytest.raises(PatchError, match=message):
        mirror.advance(Version(1, target), sha256(FILES[target]), patches)
    assert (names(mirror), mirror.held) == (["1-0.safetensors"], Version(1, 0))


def test_a_file_that_is_not_what_it_was_taken_for_is_found_out(mirror: Mirror):
    path = mirror.place(Version(1, 0))
    damaged = bytearray(path.read_bytes())
    damaged[-2] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(PatchError, match="start from a whole file"):
        mirror.advance(Version(1, 1), sha256(FILES[1]), PATCHES[:1])
    mirror.drop()
    assert (names(mirror), mirror.held) == ([], None)


def test_killed_half_way_a_patch_leaves_the_file_before_it(mirror: Mirror, monkeypatch: pytest.MonkeyPatch):
    def killed(patch: bytes, file: np.ndarray) -> None:
        file[-1000:] = 0
        raise KeyboardInterrupt

    monkeypatch.setattr(mirror_module, "apply_patch", killed)
    with pytest.raises(KeyboardInterrupt):
        mirror.advance(Version(1, 1), sha256(FILES[1]), PATCHES[:1])
    assert mirror.place(Version(1, 0)).read_bytes() == FILES[0].tobytes()
    assert mirror.held == Version(1, 0)
    folder = mirror.place(Version(1, 0)).parent
    mirror.close()
    assert not folder.exists()
