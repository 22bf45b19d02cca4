"""The bounds and the plain code that `benchmarks/weight_delivery.py` prints beside a patch."""

import numpy as np
import pytest
from delivery_cost import census, gaps_and_values_bytes, same_bytes
from made_weights import bfloat16, sha256, trained, weights_file

from agentjet.delivery.patch import encode_patch


def test_a_census_counts_changes_by_exponent():
    base = weights_file({"w": ("bfloat16", np.array([0x3F80, 0x3F81, 0x3F82, 0x4080]))})
    new = weights_file({"w": ("bfloat16", np.array([0x3F81, 0x3F81, 0x3F82, 0x4083]))})
    found = census(base, new)
    assert (found.num_values, found.num_changed, found.num_one_ulp) == (4, 2, 1)
    assert {int(one): int(found.changed[one]) for one in np.flatnonzero(found.changed)} == {127: 1, 129: 1}
    assert found.positions_and_signs_bits == pytest.approx(4 + 2)
    # One of three values of one exponent, all of the other; distances are told by the exponent.
    assert found.by_exponent_bits == pytest.approx(3 * 0.9182958, abs=1e-4)


def test_a_patch_lies_between_the_bound_and_the_plain_code():
    rng = np.random.default_rng(0)
    master = rng.standard_normal(400_000) * 0.05
    base, new = (weights_file({"w": ("bfloat16", bfloat16(one))}) for one in (master, trained(master, 1e-5, rng)))
    patch = encode_patch(base, new, base_sha256=sha256(base), sha256=sha256(new))
    assert census(base, new).by_exponent_bits / 8 < len(patch) < 0.8 * gaps_and_values_bytes(base, new)


def test_files_and_buffers_are_compared_byte_by_byte(tmp_path):
    (tmp_path / "file").write_bytes(b"ab")
    assert same_bytes([tmp_path / "file", np.frombuffer(b"ab", np.uint8)])
    assert not same_bytes([tmp_path / "file", np.frombuffer(b"ac", np.uint8)])
