"""Numbers as ordered integers: distances and back, for every pattern of bits."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentjet.delivery.float_layout import LAYOUTS


@given(st.sampled_from(sorted(LAYOUTS)), st.data())
def test_a_number_moved_by_its_distance_is_the_other_bit_for_bit(name: str, data: st.DataObject):
    layout = LAYOUTS[name]
    patterns = st.integers(0, 2 ** (8 * layout.bits.itemsize) - 1)
    base, new = (np.array([data.draw(patterns)], layout.bits) for _ in range(2))
    distances = layout.distances(base, new)
    assert layout.moved(base, distances) == new
    assert (distances == 0) == (base == new)


@pytest.mark.parametrize(
    ("base", "new", "distance"),
    [
        (0x3F80, 0x3F81, 1),  # 1.0, the next above
        (0xBF80, 0xBF7F, -1),  # -1.0, the next towards zero
        (0x0000, 0x8000, -1),  # 0.0, -0.0
        (0x8000, 0x0000, -1),
        (0x8000, 0x8001, 1),  # -0.0, the smallest negative number
        (0x0002, 0x8001, -4),  # through both zeros
        (0x7F7F, 0x7F80, 1),  # the largest number, infinity
    ],
)
def test_distances_count_representable_numbers(base: int, new: int, distance: int):
    found = LAYOUTS["BF16"].distances(np.array([base], np.uint16), np.array([new], np.uint16))
    assert found == distance


def test_exponents_of_every_type_are_those_of_float32():
    for name, one, tiny in (("BF16", 0xBF80, 0x0001), ("F32", 0xBF800000, 0x00000001)):
        found = LAYOUTS[name].exponents(np.array([one, tiny], LAYOUTS[name].bits))
        assert found.tolist() == [127, 0]
    assert LAYOUTS["F16"].exponents(np.array([0xBC00, 0x3C00, 0x0001], np.uint16)).tolist() == [127, 127, 112]
