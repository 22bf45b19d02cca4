"""One request's outputs, as vLLM gives them, turned into draws.

Invariants:

- vLLM hands over what came since the last look: several tokens where the reader was slow. Of these, tokens of other
  weights become a draw of their own.
- A stop string ends the reply with the token that completes it; what vLLM drew after that is dropped.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from agentjet.errors import EngineError
from agentjet.inference.engine import Draw
from agentjet.inference.stop_string import StopWatcher
from agentjet.inference.vllm_weights import Beginning
from agentjet.schemas.call import FinishReason
from agentjet.schemas.ids import Version

_FINISHES = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}

Start = tuple[str, int]
"""A version, and the index of the first token that it drew."""


class DrawReader:
    """Reads one request.

    Args:
        stop: Watches for stop strings; None where there are none.
        beginning: With what the request began.
        starts: Where versions begin in all that vLLM has drawn for the request so far.
    """

    def __init__(self, stop: StopWatcher | None, beginning: Beginning, starts: Callable[[], Sequence[Start]]) -> None:
        self._stop, self._beginning, self._starts = stop, beginning, starts
        self.num_drawn = 0
        self.is_over = False
        """Whether the last draw was read."""

    def read(self, output: Any) -> list[Draw]:
        """The draws of a `RequestOutput`, with flat log-probs and in deltas. EngineError when vLLM gave up."""
        completion = output.outputs[0]
        finish = _FINISHES.get(completion.finish_reason)
        if output.finished and finish is None:
            raise EngineError(f"vLLM ended a generation early: {completion.finish_reason}")
        starts = self._version_starts(completion)
        ids, logprobs = list(completion.token_ids), list(completion.logprobs.logprobs)
        length, stop_string = self._find_stop(ids)
        if stop_string is not None:
            finish = FinishReason.STOP
        self.is_over = finish is not None
        draws = self._split(ids[:length], logprobs[:length], starts, output.num_cached_tokens or 0)
        if finish is not None:
            draws[-1] = replace(draws[-1], finish_reason=finish, stop_string=stop_string)
        return draws

    def _version_starts(self, completion: Any) -> Sequence[Start]:
        if self._beginning.adapter is not None:
            return [(str(self._beginning.version), 0)]
        spans = completion.weight_versions
        return self._starts() if spans is None else [(span.version, span.start) for span in spans]

    def _find_stop(self, ids: Sequence[int]) -> tuple[int, str | None]:
        """How many of the ids belong to the reply, and the stop string that the last of them completes."""
        if self._stop is not None:
            for index, token in enumerate(ids):
                if (found := self._stop.add(token)) is not None:
                    return index + 1, found
        return len(ids), None

    def _split(
        self, ids: Sequence[int], logprobs: Sequence[float], starts: Sequence[Start], num_cached: int
    ) -> list[Draw]:
        """A draw for each version among the next ids."""
        first, self.num_drawn = self.num_drawn, self.num_drawn + len(ids)
        edges = [first, *(start for _, start in starts if first < start < self.num_drawn), self.num_drawn]
        return [
            self._draw(
                ids[begin - first : end - first], logprobs[begin - first : end - first], starts, begin, num_cached
            )
            for begin, end in pairwise(edges)
        ]

    def _draw(
        self, ids: Sequence[int], logprobs: Sequence[float], starts: Sequence[Start], begin: int, num_cached: int
    ) -> Draw:
        version = _version_at(starts, begin)
        is_mixed = self._beginning.is_mixed(version)
        return Draw(tuple(ids), tuple(logprobs), version, num_cached_tokens=num_cached, is_mixed=is_mixed)


def _version_at(starts: Sequence[Start], index: int) -> Version:
    return Version.parse([version for version, start in starts if start <= index][-1])
