"""The reader of vLLM's outputs, on outputs made by hand: vLLM is not needed."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentjet.errors import EngineError
from agentjet.inference.adapter_shelf import Adapter
from agentjet.inference.engine import Draw
from agentjet.inference.stop_string import StopWatcher
from agentjet.inference.vllm_reader import DrawReader
from agentjet.inference.vllm_weights import Beginning
from agentjet.schemas.call import FinishReason
from agentjet.schemas.ids import Version

BEGINNING = Beginning(Version(1, 0))


class Letters:
    """Token 1 is `a`, 2 is `b`, and so on."""

    chat_template = None

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False) -> str:
        return "".join(chr(96 + token) for token in token_ids)


def output(ids: list[int], finish: str | None = None, spans: list[tuple[str, int]] | None = None) -> Any:
    completion = SimpleNamespace(
        token_ids=ids,
        logprobs=SimpleNamespace(logprobs=[-float(token) for token in ids]),
        finish_reason=finish,
        weight_versions=spans and [SimpleNamespace(version=version, start=start) for version, start in spans],
    )
    return SimpleNamespace(outputs=[completion], finished=finish is not None, num_cached_tokens=5)


def test_tokens_of_two_versions_in_one_output_become_two_draws():
    starts = [("1-0", 0)]
    reader = DrawReader(None, BEGINNING, lambda: starts)
    assert reader.read(output([7, 8])) == [Draw((7, 8), (-7.0, -8.0), Version(1, 0), num_cached_tokens=5)]
    starts.append(("1-1", 3))
    first, second = reader.read(output([9, 10, 11]))
    assert (first.ids, first.version, second.ids, second.version) == ((9,), Version(1, 0), (10, 11), Version(1, 1))
    assert not reader.is_over
    (last,) = reader.read(output([12], "length", [("1-0", 0), ("1-1", 3)]))
    assert (last.version, last.finish_reason, reader.is_over) == (Version(1, 1), FinishReason.LENGTH, True)


def test_what_was_drawn_after_a_stop_string_is_dropped():
    reader = DrawReader(StopWatcher(Letters(), ["cd"]), BEGINNING, lambda: [("1-0", 0)])
    reader.read(output([1, 2]))
    (draw,) = reader.read(output([3, 4, 5, 6], "length", [("1-0", 0)]))
    assert (draw.ids, draw.finish_reason, draw.stop_string) == ((3, 4), FinishReason.STOP, "cd")
    assert (reader.num_drawn, reader.is_over) == (4, True)


@pytest.mark.parametrize("finish", ["abort", "error"])
def test_a_generation_that_vllm_gave_up_is_an_error(finish: str):
    with pytest.raises(EngineError, match=f"early: {finish}"):
        DrawReader(None, BEGINNING, lambda: [("1-0", 0)]).read(output([], finish))


@given(st.lists(st.integers(1, 6), min_size=1, max_size=12), st.sets(st.integers(1, 60), max_size=5))
def test_every_token_carries_the_version_that_began_last_before_it(lengths: list[int], cuts: set[int]):
    """Spans are known up to the token that was drawn last, as vLLM tells them."""
    starts = [(f"1-{number}", start) for number, start in enumerate(sorted({0} | cuts))]
    drawn = 0
    reader = DrawReader(None, BEGINNING, lambda: [(version, start) for version, start in starts if start < drawn])
    versions: list[Version] = []
    for length in lengths:
        ids = list(range(drawn, drawn + length))
        drawn += length
        draws = reader.read(output(ids))
        assert [token for draw in draws for token in draw.ids] == ids
        versions += [draw.version for draw in draws for _ in draw.ids]
    expected = [max(number for number, (_, start) in enumerate(starts) if start <= index) for index in range(drawn)]
    assert [version.step for version in versions] == expected


def test_all_tokens_of_a_generation_with_an_adapter_have_its_version_whatever_vllm_says_of_its_own():
    reader = DrawReader(None, Beginning(Version(2, 7), adapter=Adapter(3, Version(2, 7))), lambda: [("1-0", 0)])
    draws = [*reader.read(output([7, 8])), *reader.read(output([9], "length", [("1-0", 0), ("1-1", 2)]))]
    assert [(draw.ids, draw.version, draw.is_mixed) for draw in draws] == [
        ((7, 8), Version(2, 7), False),
        ((9,), Version(2, 7), False),
    ]


def test_where_keys_are_kept_tokens_of_newer_weights_are_marked():
    starts = [("1-0", 0), ("1-1", 1)]
    for salt, is_mixed in (("0", [False, True]), (None, [False, False])):
        reader = DrawReader(None, Beginning(Version(1, 0), salt=salt), lambda: starts)
        assert [draw.is_mixed for draw in reader.read(output([7, 8]))] == is_mixed
