"""Where a JSON value ends, found while its text arrives.

Only brackets and strings are looked at: broken JSON has an end as well, where its brackets are even, or none.
"""

import re

_NOTABLE = re.compile(r'["{}\[\]]')
_STRING_END = re.compile(r'["\\]')


class Nesting:
    """Depth of brackets; starts outside of every value, or inside `depth` brackets."""

    def __init__(self, depth: int = 0) -> None:
        self.depth = depth
        self.is_in_string = False
        self._is_escaped = False

    def read(self, text: str, until: int) -> int | None:
        """Reads on until the bracket that brings the depth to `until`; the position after it.

        None when that bracket is not in the text; then all of it has been read.
        """
        at = 0
        while at < len(text):
            if self._is_escaped:
                self._is_escaped = False
                at += 1
                continue
            found = (_STRING_END if self.is_in_string else _NOTABLE).search(text, at)
            if found is None:
                return None
            at = found.end()
            self._step(found.group())
            if self.depth == until and found.group() in "}]" and not self.is_in_string:
                return at
        return None

    def _step(self, character: str) -> None:
        if character == "\\":
            self._is_escaped = True
        elif character == '"':
            self.is_in_string = not self.is_in_string
        else:
            self.depth += 1 if character in "{[" else -1
