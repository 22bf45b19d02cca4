from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from agentjet.inference.adapter_shelf import Adapter, AdapterShelf
from agentjet.schemas.ids import Version

LIMIT = 3


@pytest.fixture
def shelf() -> AdapterShelf:
    return AdapterShelf(Version(1, 0), LIMIT)


def put(shelf: AdapterShelf, step: int) -> Adapter:
    adapter = shelf.announce(Version(1, step))
    shelf.put(adapter)
    return adapter


def test_before_the_first_adapter_generations_get_the_model_alone(shelf: AdapterShelf):
    assert shelf.begin() == Adapter(0, Version(1, 0))
    assert shelf.held == frozenset()


def test_a_generation_keeps_its_adapter_until_it_ends(shelf: AdapterShelf):
    first = put(shelf, 1)
    assert shelf.begin() == shelf.begin() == first
    second = put(shelf, 2)
    assert shelf.begin() == second
    assert shelf.held == {first, second}
    assert shelf.end(first) is None
    assert shelf.end(first) == first
    assert shelf.held == {second}


def test_an_adapter_that_nobody_used_goes_when_the_next_comes(shelf: AdapterShelf):
    first, second = put(shelf, 1), shelf.announce(Version(1, 2))
    assert shelf.put(second) == first


def test_one_that_is_announced_is_given_to_nobody_and_the_model_alone_is_never_let_go(shelf: AdapterShelf):
    base = shelf.begin()
    adapter = shelf.announce(Version(1, 1))
    assert shelf.begin() == base
    assert shelf.put(adapter) is None
    assert shelf.end(base) is shelf.end(base) is None


def test_a_version_that_comes_twice_is_two_adapters(shelf: AdapterShelf):
    assert put(shelf, 1) != put(shelf, 1)


class Interleaving(RuleBasedStateMachine):
    """Updates and generations in any order, beside a plain account of who runs."""

    def __init__(self) -> None:
        super().__init__()
        self.shelf = AdapterShelf(Version(1, 0), LIMIT)
        self.running: list[Adapter] = []
        self.loaded: set[Adapter] = set()
        self.announced: Adapter | None = None
        self.newest = self.shelf.newest

    @rule()
    def begin(self) -> None:
        adapter = self.shelf.begin()
        assert adapter == self.newest
        self.running.append(adapter)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        adapter = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.let_go(self.shelf.end(adapter))

    @precondition(lambda self: self.announced is None and self.shelf.has_room)
    @rule()
    def load(self) -> None:
        self.announced = self.shelf.announce(Version(1, self.newest.version.step + 1))
        self.loaded.add(self.announced)

    @precondition(lambda self: self.announced is not None)
    @rule(fails=st.booleans())
    def loaded_or_not(self, fails: bool) -> None:
        assert self.announced is not None
        adapter, self.announced = self.announced, None
        if fails:
            self.loaded.discard(adapter)
        else:
            self.newest = adapter
            self.let_go(self.shelf.put(adapter))

    def let_go(self, adapter: Adapter | None) -> None:
        if adapter is not None:
            self.loaded.remove(adapter)

    @invariant()
    def just_those_in_use_and_the_newest_are_loaded(self) -> None:
        wanted = {one for one in (*Counter(self.running), self.newest) if one.id}
        assert self.shelf.held == wanted
        assert self.loaded - {self.announced} == wanted
        assert len(self.loaded) <= LIMIT

    @invariant()
    def whoever_waits_for_room_gets_it_once_the_others_have_ended(self) -> None:
        if not self.shelf.has_room:
            assert any(one.id and one != self.newest for one in self.running)


TestInterleaving = Interleaving.TestCase
