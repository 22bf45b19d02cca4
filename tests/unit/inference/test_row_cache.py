import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentjet.inference.row_cache import CacheShape, RowCache


def cache(max_rows: int = 4, max_length: int = 1024, budget: int = 4096) -> RowCache:
    return RowCache(
        CacheShape(
            num_layers=2,
            num_kv_heads=1,
            head_dim=1,
            dtype=torch.float32,
            device=torch.device("cpu"),
            max_rows=max_rows,
            max_length=max_length,
            budget_tokens=budget,
        )
    )


def take(rows: RowCache, ids: list[int], weights: int = 0) -> tuple[int | None, int]:
    """Acquires a row and computes it: what stands for a key tells the weights and the ids up to its position."""
    array = np.asarray(ids)
    source, matched, _ = rows.match(array, weights)
    row = rows.acquire(array, source, matched, weights)
    if row is not None:
        computed = int(rows.num_computed[row])
        assert computed == (0 if matched < 4 and computed == 0 else matched)
        rows.store[:, :, row, 0, computed : len(ids), 0] = keys_of(array, weights)[computed:]
        rows.num_computed[row] = len(ids)
    return row, matched


def keys_of(ids: np.ndarray, weights: int) -> torch.Tensor:
    return torch.tensor(np.cumsum(ids) + 1000 * weights).float()


def assert_sound(rows: RowCache) -> None:
    for row in range(rows.num_rows):
        count = int(rows.num_computed[row])
        expected = keys_of(rows._ids[row, :count], rows._weights[row])
        assert torch.equal(rows.store[1, 1, row, 0, :count, 0], expected)
        assert (rows._ids[row, int(rows.num_known[row]) :] == -1).all()


def test_a_continuation_takes_over_its_row() -> None:
    rows = cache()
    row, _ = take(rows, [1, 2, 3, 4, 5])
    assert row is not None
    rows.release(row)
    again, matched = take(rows, [1, 2, 3, 4, 5, 6, 7])
    assert (again, matched) == (row, 5)
    assert_sound(rows)


def test_a_prefix_of_a_running_row_is_copied() -> None:
    rows = cache()
    first, _ = take(rows, [1, 2, 3, 4, 5, 6])
    second, matched = take(rows, [1, 2, 3, 4, 5, 9])
    assert first != second
    assert matched == 5
    assert_sound(rows)


def test_what_a_running_row_has_not_computed_is_known_but_not_matched() -> None:
    rows = cache()
    ids = np.asarray([1, 2, 3, 4, 5, 6])
    row = rows.acquire(ids, *rows.match(ids, 0)[:2], 0)
    assert row is not None
    rows.num_computed[row] = 2
    assert rows.match(np.asarray([1, 2, 3, 4, 9]), 0)[1:] == (2, 4)
    rows.release(row)
    assert rows.match(np.asarray([1, 2, 3, 4, 9]), 0)[1:] == (2, 0)


def test_an_idle_row_that_goes_on_otherwise_is_copied_and_kept() -> None:
    rows = cache(max_rows=2)
    row, _ = take(rows, [1, 2, 3, 4, 5, 6, 7])
    assert row is not None
    rows.release(row)
    _, matched = take(rows, [1, 2, 3, 4, 5, 9])
    assert matched == 5
    assert rows.match(np.asarray([1, 2, 3, 4, 5, 6, 7, 8]), 0)[1] == 7
    assert_sound(rows)


def test_a_continuation_moves_to_the_lowest_idle_row_and_what_lay_there_moves_up() -> None:
    rows = cache()
    for ids in ([1, 2, 3, 4, 5], [6, 7, 8, 9]):
        take(rows, ids)
    rows.release(0)
    rows.release(1)
    assert take(rows, [6, 7, 8, 9, 5, 5]) == (0, 4)
    assert rows.match(np.asarray([1, 2, 3, 4, 5, 6]), 0)[:2] == (1, 5)
    assert_sound(rows)


def test_rows_that_find_no_memory_to_grow_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = cache()
    take(rows, [1, 2, 3, 4, 5])

    def full(*_: object) -> np.ndarray:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(np, "zeros", full)
        with pytest.raises(MemoryError):
            rows.grow(300)
    assert rows.length == 256
    assert_sound(rows)
    rows.clear()


def test_the_old_store_is_let_go_before_a_new_one_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, allocate = cache(), RowCache._allocate
    old = [weakref.ref(tensor) for tensor in (rows.store, *rows.keys, *rows.values)]

    def checked(self: RowCache, length: int) -> None:
        assert not any(tensor() is not None for tensor in old)
        allocate(self, length)

    monkeypatch.setattr(RowCache, "_allocate", checked)
    rows.clear()
    assert rows.store.sum() == 0


def test_the_last_prompt_token_is_always_left_to_compute() -> None:
    rows = cache()
    take(rows, [1, 2, 3, 4, 5])
    assert rows.match(np.asarray([1, 2, 3, 4, 5]), 0)[1] == 4
    assert rows.match(np.asarray([1]), 0)[1] == 0


def test_the_row_unused_for_longest_goes_first() -> None:
    rows = cache(max_rows=3)
    held = [take(rows, [10 * index + step for step in range(5)])[0] for index in range(3)]
    for row in held:
        assert row is not None
        rows.release(row)
    take(rows, [90, 91, 92, 93, 94])
    assert rows.match(np.asarray([0, 1, 2, 3, 4, 5]), 0)[1] == 0
    assert rows.match(np.asarray([10, 11, 12, 13, 14, 5]), 0)[1] == 5
    assert_sound(rows)


def test_no_row_is_given_while_all_are_running() -> None:
    rows = cache(max_rows=2)
    assert take(rows, [1, 2])[0] is not None
    assert take(rows, [3, 4])[0] is not None
    assert take(rows, [5, 6])[0] is None


def test_growth_keeps_running_rows_and_drops_the_oldest_idle_ones() -> None:
    rows = cache(max_rows=4, max_length=1024, budget=1024)
    running = [take(rows, [index, 1, 2, 3, 4])[0] for index in range(4)]
    for row in running[:2]:
        assert row is not None
        rows.release(row)
    moved = rows.grow(300)
    assert (rows.length, rows.num_rows) == (512, 2)
    assert sorted(moved) == sorted(row for row in running[2:] if row is not None)
    assert rows.active.sum() == 2
    assert_sound(rows)


def test_nothing_is_left_after_clear() -> None:
    rows = cache()
    take(rows, [1, 2, 3, 4, 5])
    rows.clear()
    assert rows.num_cached_tokens == 0
    assert not rows.store.any()
    assert rows.match(np.asarray([1, 2, 3, 4, 5]), 0)[1] == 0


def test_a_row_of_other_weights_is_not_found() -> None:
    rows = cache()
    take(rows, [1, 2, 3, 4, 5], weights=0)
    rows.begin(1)
    assert take(rows, [1, 2, 3, 4, 5, 6], weights=1) == (1, 0)
    assert rows.match(np.asarray([1, 2, 3, 4, 5, 6, 7]), 0)[1] == 5
    assert rows.match(np.asarray([1, 2, 3, 4, 5, 6, 7]), 1)[1] == 6
    assert_sound(rows)


def test_only_rows_of_the_newest_weights_are_left_behind() -> None:
    rows = cache()
    idle, running = (take(rows, [index, 2, 3, 4, 5])[0] for index in range(2))
    assert idle is not None and running is not None
    rows.release(idle)
    rows.begin(1)
    assert rows.num_cached_tokens == 5
    rows.append(running, 6)
    rows.release(running)
    assert rows.num_cached_tokens == 0
    assert_sound(rows)


def test_growth_keeps_apart_rows_of_different_weights() -> None:
    rows = cache(max_rows=2)
    take(rows, [1, 2, 3, 4, 5], weights=0)
    rows.begin(1)
    take(rows, [1, 2, 3, 4, 5], weights=1)
    moved = rows.grow(300)
    longer = np.asarray([1, 2, 3, 4, 5, 6])
    assert [rows.match(longer, weights)[:2] for weights in (0, 1)] == [(moved[0], 5), (moved[1], 5)]
    assert rows.match(longer, 2)[1] == 0


@settings(max_examples=150)
@given(
    st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=12), st.booleans(), st.booleans()), max_size=25)
)
def test_whatever_comes_and_goes_rows_hold_what_their_ids_and_weights_say(
    steps: list[tuple[list[int], bool, bool]],
) -> None:
    rows = cache(max_rows=3)
    running: list[int] = []
    for ids, releases, renews in steps:
        before = {row: rows._ids[row].copy() for row in running}
        if renews:
            rows.begin(rows.newest + 1)
        row, _ = take(rows, ids, rows.newest)
        for other in running:
            assert (rows._ids[other] == before[other]).all()
        if row is not None:
            assert row not in running
            running.append(row)
        if releases and running:
            rows.release(running.pop(0))
        assert_sound(rows)
