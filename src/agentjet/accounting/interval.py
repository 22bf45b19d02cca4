"""A set of whole numbers kept as intervals: ranks settle nearly in order, so the set stays a few pairs long."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator


class IntervalSet:
    """Non-negative whole numbers as sorted, disjoint, non-touching half-open intervals."""

    def __init__(self, intervals: Iterable[tuple[int, int]] = ()) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in intervals:
            if start >= end or (self._ends and start <= self._ends[-1]):
                raise ValueError(f"[{start}, {end}) is empty, or touches the interval before it")
            self._starts.append(start)
            self._ends.append(end)

    def __contains__(self, value: int) -> bool:
        place = bisect_right(self._starts, value) - 1
        return place >= 0 and value < self._ends[place]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """The intervals [start, end), ascending."""
        return zip(self._starts, self._ends, strict=True)

    def __len__(self) -> int:
        """How many numbers are in the set."""
        return sum(self._ends) - sum(self._starts)

    def add(self, value: int) -> bool:
        """Take a number in; False when it is there already."""
        if value in self:
            return False
        place = bisect_left(self._starts, value)
        joins_left = place > 0 and self._ends[place - 1] == value
        joins_right = place < len(self._starts) and self._starts[place] == value + 1
        if joins_left and joins_right:
            self._ends[place - 1] = self._ends.pop(place)
            del self._starts[place]
        elif joins_left:
            self._ends[place - 1] = value + 1
        elif joins_right:
            self._starts[place] = value
        else:
            self._starts.insert(place, value)
            self._ends.insert(place, value + 1)
        return True

    @property
    def first_gap(self) -> int:
        """The lowest whole number that is not in the set."""
        return self._ends[0] if self._starts and self._starts[0] == 0 else 0

    def count_below(self, value: int) -> int:
        """How many numbers of the set lie below `value`."""
        return sum(min(end, value) - start for start, end in self if start < value)
