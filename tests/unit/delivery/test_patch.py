"""Patches between two files: the new file bit for bit, or an error."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_weights import DTYPES, bfloat16, sha256, trained, weights_file

from agentjet.delivery import patch as patch_module
from agentjet.delivery import tensor_file
from agentjet.delivery.patch import apply_patch, decode_patch, encode_patch, read_head
from agentjet.errors import PatchError

SIZES = st.integers(0, 300)


def patch_of(base: np.ndarray, new: np.ndarray) -> bytes:
    return encode_patch(base, new, base_sha256=sha256(base), sha256=sha256(new))


def applied(patch: bytes, base: np.ndarray) -> bytes:
    file = base.copy()
    apply_patch(patch, file)
    return file.tobytes()


@st.composite
def versions(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """A file of any types and a later version in which a share of the numbers moved, near or anywhere."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    before, after = {}, {}
    for name in draw(st.lists(st.sampled_from("abcdef"), unique=True, max_size=4)):
        dtype = draw(st.sampled_from(sorted(DTYPES)))
        bits = rng.integers(0, 2 ** (8 * DTYPES[dtype]().itemsize), draw(SIZES), DTYPES[dtype])
        share = draw(st.sampled_from([0.0, 0.01, 0.2, 0.7, 1.0]))
        reach = draw(st.sampled_from([1, 300, 2**15]))
        moved = bits + rng.integers(-reach, reach, len(bits), endpoint=True).astype(bits.dtype)
        before[name] = dtype, bits
        after[name] = dtype, np.where(rng.random(len(bits)) < share, moved, bits)
    return weights_file(before), weights_file(after)


@given(versions(), st.sampled_from([7, 64, 1 << 20]))
def test_a_patch_leads_to_the_new_file_bit_for_bit(files: tuple[np.ndarray, np.ndarray], block_numbers: int):
    base, new = files
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(tensor_file, "BLOCK_NUMBERS", block_numbers)
        changed.setattr(patch_module, "_SEGMENT_NUMBERS", 500)
        patch = patch_of(base, new)
        assert applied(patch, base) == new.tobytes()
    assert len(patch) < len(new) + 1024
    head = read_head(patch)
    assert (head.base_sha256, head.sha256, head.num_bytes) == (sha256(base), sha256(new), len(new))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_pattern_of_bits_may_become_every_other(dtype: str):
    rng = np.random.default_rng(1)
    special = np.array([0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7FFF, 0xFFFF, 0x0001, 0x8001, 0x7C00], np.uint16)
    bits = special.astype(np.uint32) << 16 | 5 if dtype == "float32" else special
    pairs = np.array([(one, other) for one in bits for other in bits], bits.dtype)
    # Beside numbers that stand still: a block that changes throughout is stored as it is.
    still = rng.integers(0, 2**16, 300).astype(bits.dtype)
    base, new = (weights_file({"w": (dtype, np.concatenate([still, pairs[:, side]]))}) for side in (0, 1))
    assert applied(patch_of(base, new), base) == new.tobytes()


@pytest.mark.parametrize(("learning_rate", "ratio"), [(1e-6, 200), (1e-5, 45)])
def test_a_small_update_is_a_small_patch(learning_rate: float, ratio: float):
    rng = np.random.default_rng(0)
    master = rng.standard_normal(3_000_000) * 0.05
    files = [weights_file({"w": ("bfloat16", bfloat16(one))}) for one in (master, trained(master, learning_rate, rng))]
    patch = patch_of(*files)
    assert applied(patch, files[0]) == files[1].tobytes()
    assert len(files[1]) / len(patch) > ratio


def test_nothing_changed_is_next_to_nothing():
    file = weights_file({"w": ("bfloat16", np.arange(60_000)), "none": ("float32", np.zeros(0))})
    assert len(patch_of(file, file)) < 400


def test_a_file_that_changed_throughout_costs_no_more_than_itself():
    rng = np.random.default_rng(0)
    base, new = (weights_file({"w": ("bfloat16", rng.integers(0, 2**16, 100_000))}) for _ in range(2))
    patch = patch_of(base, new)
    assert len(patch) < len(new) + 1024
    assert applied(patch, base) == new.tobytes()


def small_patch() -> tuple[bytes, np.ndarray]:
    bits = np.arange(5000, dtype=np.uint16)
    moved = np.where(bits % 50 == 0, bits + 3, bits)
    base, new = (weights_file({"w": ("bfloat16", one)}) for one in (bits, moved))
    return patch_of(base, new), base


@given(st.data())
def test_what_is_cut_or_damaged_is_refused_before_anything_is_written(data: st.DataObject):
    patch, base = small_patch()
    if data.draw(st.booleans()):
        broken = patch[: data.draw(st.integers(0, len(patch) - 1))]
    else:
        place = data.draw(st.integers(0, len(patch) - 1))
        broken = patch[:place] + bytes([patch[place] ^ data.draw(st.integers(1, 255))]) + patch[place + 1 :]
    file = base.copy()
    with pytest.raises(PatchError, match=r"fetch it again|upgrade it"):
        apply_patch(broken, file)
    assert np.array_equal(file, base)


def test_another_base_gives_an_error_or_a_file_whose_sha256_says_so():
    patch, base = small_patch()
    wanted = read_head(patch).sha256
    for seed in range(30):
        other = base.copy()
        rng = np.random.default_rng(seed)
        other[-9000:] = rng.integers(0, 256, 9000)
        try:
            apply_patch(patch, other)
        except PatchError:
            continue
        assert sha256(other) != wanted
    with pytest.raises(PatchError, match="start from a whole file"):
        apply_patch(patch, weights_file({"w": ("bfloat16", np.zeros(7))}))


@pytest.mark.parametrize(
    "new",
    [
        weights_file({"v": ("bfloat16", np.zeros(8))}),
        weights_file({"w": ("bfloat16", np.zeros(9))}),
        weights_file({"w": ("float16", np.zeros(8))}),
    ],
)
def test_files_of_other_tensors_have_no_patch(new: np.ndarray):
    with pytest.raises(PatchError, match="publish the whole file"):
        patch_of(weights_file({"w": ("bfloat16", np.zeros(8))}), new)


@pytest.mark.parametrize("file", [b"", b"\xff" * 40, b"\x02" + bytes(7) + b"[]", b"\x03" + bytes(7) + b"{]}"])
def test_what_is_no_safetensors_file_is_told(file: bytes):
    data = np.frombuffer(file, np.uint8)
    with pytest.raises(PatchError, match="no safetensors file"):
        encode_patch(data, data, base_sha256="00" * 32, sha256="00" * 32)


def test_changes_name_their_tensor_and_places():
    patch, base = small_patch()
    (change,) = decode_patch(patch, base)
    assert (change.block.tensor, change.block.start) == ("w", 0)
    assert change.places is not None
    assert sorted(change.places.tolist()) == list(range(0, 5000, 50))
    assert dict(zip(change.places.tolist(), change.bits.tolist(), strict=True))[50] == 53
