"""The numbers an actor shows: counters, gauges and summaries in one flat mapping.

Invariants: a name carries its unit (`_seconds`, `_bytes`, `_tokens`, `_ratio`) or counts (`num_`, `_total`); a name has
one kind for ever. Not thread-safe by locks: updates are single assignments under the interpreter's lock.
"""

import math
import re
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import TypeVar

_NAME = re.compile(r"(num_[a-z0-9_]+|[a-z0-9_]+_(seconds|bytes|tokens|ratio|total|per_second|info))")
_WINDOW = 512


class Counter:
    """Only grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, amount: float = 1.0) -> None:
        """Raises ValueError on a negative amount."""
        if amount < 0:
            raise ValueError(f"a counter can not go down (by {amount})")
        self.value += amount


class Gauge:
    """A current value, set or computed when asked for."""

    __slots__ = ("_read", "_value")

    def __init__(self, read: Callable[[], float] | None = None) -> None:
        self._read = read
        self._value = 0.0

    def set(self, value: float) -> None:
        """Replace the value."""
        self._value = value

    @property
    def value(self) -> float:
        """The value now."""
        return self._read() if self._read else self._value


class Summary:
    """Observations: how many, their sum, and median, 99th percentile and maximum of the newest 512."""

    __slots__ = ("_window", "count", "sum")

    def __init__(self) -> None:
        self.count = 0
        self.sum = 0.0
        self._window: deque[float] = deque(maxlen=_WINDOW)

    def observe(self, value: float) -> None:
        """Add an observation; non-finite ones are counted but leave sum and quantiles alone."""
        self.count += 1
        if math.isfinite(value):
            self.sum += value
            self._window.append(value)

    @contextmanager
    def time(self) -> Iterator[None]:
        """Observe how long the block took, in seconds."""
        start = perf_counter()
        try:
            yield
        finally:
            self.observe(perf_counter() - start)

    def quantile(self, q: float) -> float:
        """Nearest-rank quantile of the window; 0.0 without observations."""
        if not self._window:
            return 0.0
        ordered = sorted(self._window)
        return ordered[min(len(ordered) - 1, max(0, math.ceil(q * len(ordered)) - 1))]


M = TypeVar("M", "Counter", "Gauge", "Summary")


class Registry:
    """The metrics of one actor.

    Example:
        metrics = Registry()
        metrics.counter("num_calls").add()
        with metrics.summary("call_seconds").time():
            ...
        metrics.snapshot()  # {"num_calls": 1.0, "call_seconds_count": 1.0, "call_seconds_p50": ...}
    """

    def __init__(self) -> None:
        self._metrics: dict[str, Counter | Gauge | Summary] = {}

    def counter(self, name: str) -> Counter:
        """The counter of that name, created at first use."""
        return self._of_kind(name, Counter)

    def gauge(self, name: str, read: Callable[[], float] | None = None) -> Gauge:
        """The gauge of that name; `read` (at first use) computes it on every snapshot."""
        if read is not None and name not in self._metrics:
            self._add(name, Gauge(read))
        return self._of_kind(name, Gauge)

    def summary(self, name: str) -> Summary:
        """The summary of that name, created at first use."""
        return self._of_kind(name, Summary)

    def snapshot(self) -> dict[str, float]:
        """All values now, as a flat mapping sorted by name."""
        flat: dict[str, float] = {}
        for name, metric in sorted(self._metrics.items()):
            if isinstance(metric, Summary):
                flat |= {
                    f"{name}_count": float(metric.count),
                    f"{name}_sum": metric.sum,
                    f"{name}_p50": metric.quantile(0.5),
                    f"{name}_p99": metric.quantile(0.99),
                    f"{name}_max": metric.quantile(1.0),
                }
            else:
                flat[name] = metric.value
        return flat

    def _of_kind(self, name: str, kind: type[M]) -> M:
        metric = self._metrics.get(name)
        if metric is None:
            metric = self._add(name, kind())
        if not isinstance(metric, kind):
            raise ValueError(f"metric {name} is a {type(metric).__name__}, not a {kind.__name__}")
        return metric

    def _add(self, name: str, metric: M) -> M:
        if not _NAME.fullmatch(name):
            raise ValueError(f"metric name {name!r} has no unit; end it in _seconds, _bytes, ... or begin it with num_")
        self._metrics[name] = metric
        return metric
