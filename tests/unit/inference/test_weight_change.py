"""What differs between two files of weights: found exactly, and written down and read back."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from agentjet.inference import weight_change
from agentjet.inference.weight_change import WeightsFile, find_changes, pack_changes, read_changes


def file_of(folder: Path, name: str, **tensors: torch.Tensor) -> WeightsFile:
    save_file(tensors, folder / name)
    return WeightsFile(folder / name)


@given(
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    changed=st.sets(st.integers(0, 999), max_size=200),
    chunk=st.sampled_from([64, 4096]),
)
def test_changes_lead_from_one_file_to_the_other_bit_for_bit(tmp_path_factory, dtype, changed, chunk):
    folder, before = tmp_path_factory.mktemp("files"), torch.randn(20, 50).to(dtype)
    after = before.clone()
    for place in changed:
        after.view(-1)[place] = -after.view(-1)[place]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_change, "_CHUNK_BYTES", chunk)
        same = torch.ones(3, dtype=dtype)
        found = find_changes(file_of(folder, "a", w=before, b=same), file_of(folder, "b", w=after, b=same))
    assert found is not None
    (folder / "changes").write_bytes(pack_changes(found))
    restored = before.clone()
    for one in read_changes(folder / "changes"):
        assert (one.name, one.shape) == ("w", (20, 50))
        restored.view(-1)[one.places] = one.values
    assert torch.equal(restored, after)
    assert len(found) == (1 if changed else 0)


def test_zeros_of_either_sign_are_told_apart(tmp_path: Path):
    zeros = torch.zeros(100)
    signed = zeros.clone()
    signed[7] = -0.0
    found = find_changes(file_of(tmp_path, "a", w=zeros), file_of(tmp_path, "b", w=signed))
    assert found is not None
    assert found[0].places.tolist() == [7]


@pytest.mark.parametrize(
    "other",
    [
        {"w": torch.ones(100)},
        {"w": torch.zeros(50, 2)},
        {"v": torch.zeros(100)},
        {"w": torch.zeros(100, dtype=torch.bfloat16)},
        {"w": torch.tensor([math.nan] + [0.0] * 99)},
    ],
    ids=["most of it changed", "another shape", "another name", "another type", "not a number"],
)
def test_what_can_not_be_told_as_few_changes_is_loaded_whole(tmp_path: Path, other: dict[str, torch.Tensor]):
    assert find_changes(file_of(tmp_path, "a", w=torch.zeros(100)), file_of(tmp_path, "b", **other)) is None


def test_a_file_stays_readable_after_its_name_is_gone_and_a_cut_one_is_an_error(tmp_path: Path):
    one, other = file_of(tmp_path, "a", w=torch.zeros(100)), file_of(tmp_path, "b", w=torch.zeros(100))
    (tmp_path / "a").unlink()
    assert find_changes(one, other) == []
    with (tmp_path / "b").open("r+b") as file:
        file.truncate(200)
    with pytest.raises(OSError, match="cut"):
        find_changes(one, other)
