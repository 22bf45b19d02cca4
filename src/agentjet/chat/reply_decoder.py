"""Sampled ids to text while they are drawn.

Invariants:

- A character is given out only when all its bytes are there.
- Special tokens are no text, and the tokens that end a reply never are; but the marks that the reply's parser looks for
  are text, special or not.
"""

from collections.abc import Sequence

from agentjet.chat.template import ChatTemplate

_BROKEN = "\ufffd"


class ReplyDecoder:
    """Of one reply, whose parser looks for `marks`."""

    def __init__(self, template: ChatTemplate, marks: Sequence[str], stop_ids: frozenset[int]) -> None:
        self._template = template
        self._marks = tuple(marks)
        self._stop_ids = stop_ids
        self._ids: list[int] = []
        self._prefix = self._read = 0

    def whole(self, ids: Sequence[int]) -> str:
        """Text of all the ids of a reply."""
        return self._template.decode(self._spoken(ids), with_specials=True)

    def feed(self, ids: Sequence[int]) -> str:
        """Takes drawn ids and returns the text that is certain by now."""
        self._ids += self._spoken(ids)
        text = self._new_text()
        if text.endswith(_BROKEN):
            return ""
        if text:
            self._prefix, self._read = self._read, len(self._ids)
        return text

    def finish(self) -> str:
        """The rest, a character that lacks bytes included."""
        return self._new_text()

    def _new_text(self) -> str:
        # The last token given out is decoded again with the new ones: some decoders join a token to the one before.
        before = self._template.decode(self._ids[self._prefix : self._read], with_specials=True)
        return self._template.decode(self._ids[self._prefix :], with_specials=True)[len(before) :]

    def _spoken(self, ids: Sequence[int]) -> list[int]:
        return [token for token in ids if token not in self._stop_ids and self._is_text(token)]

    def _is_text(self, token: int) -> bool:
        special = self._template.special_text(token).strip()
        return not special or any(special in mark for mark in self._marks)
