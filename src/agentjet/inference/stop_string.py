"""Notices stop strings in a growing list of token ids.

Only a tail of ids is decoded at each token. Every token adds at least a character or completes one, so a tail of as
many tokens as the longest stop string has bytes, and a few more, always covers it, wherever token borders fall.
"""

from collections.abc import Sequence

from agentjet.inference.engine import Tokenizer

_MARGIN_TOKENS = 8


class StopWatcher:
    """Watches one reply."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = tuple(stop for stop in stops if stop)
        self._tail = max((len(stop.encode()) for stop in self._stops), default=0) + _MARGIN_TOKENS
        self._ids: list[int] = []

    def add(self, token: int) -> str | None:
        """The stop string that this token completes, if any: of several, the one that begins first."""
        if not self._stops:
            return None
        self._ids.append(token)
        del self._ids[: -self._tail]
        text = self._tokenizer.decode(self._ids, skip_special_tokens=False)
        found = [(place, stop) for stop in self._stops if (place := text.find(stop)) >= 0]
        return min(found)[1] if found else None
