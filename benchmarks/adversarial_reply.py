"""Replies that tempt a trainer to lose or change tokens, in the ids of one family; and what users say to them.

Every kind of reply is one that models do give while they are trained. `scripts` takes them in turn.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from chat_family import Family

STOP = "STOP"
"""Stop string of every request; it ends inside the token STOPPED."""
QUESTIONS = (
    "what is the weather in the town?",
    "🙂 👩‍👩‍👧 e\u0301a\u030a مرحبا 你好 \u200d\ufeff",
    "the log says END and BEGIN; go on",
    "nul \x00, replacement \ufffd, tab\tand\r\nlines\n\n",
    "",
    " low  lower   lowest ",
)
"""END and BEGIN stand for the family's special tokens, spelt out."""


@dataclass(frozen=True, slots=True)
class Script:
    """What the engine draws."""

    kind: str
    ids: tuple[int, ...]
    finish: str = "end"
    """`end` at an end-of-turn token, `length`, or `stop` at the stop string."""


class Author:
    """Writes the replies of one family."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self.tokenizer = family.tokenizer()
        self.end = self._special(family.end)
        self.other_end = self._special(family.other_end) if family.other_end else self.end
        self._other = self._special(next(token for token in family.specials if token != family.end))

    def scripts(self) -> Iterator[Script]:
        """For ever, all kinds in turn."""
        for number in itertools.count():
            yield from self._round(number)

    def question(self, number: int) -> str:
        """What the user says next."""
        text = QUESTIONS[number % len(QUESTIONS)]
        return text.replace("END", self.family.end).replace("BEGIN", self.family.specials[0])

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids as the tokenizer gives them, special tokens included."""
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def spelt(self, text: str) -> tuple[int, ...]:
        """Ids letter by letter: other ids than `encode` gives, and special tokens as plain text."""
        gap = self.tokenizer.convert_tokens_to_ids("▁") if self.family.is_sentencepiece else None
        letters = (self.encode(letter) for letter in text)
        return tuple(token for ids in letters for token in (ids[1:] if ids[0] == gap and len(ids) > 1 else ids))

    def _round(self, number: int) -> Iterator[Script]:
        family, town = self.family, {"town": "low river", "days": number}
        thought = "<think>\nis it low?\n</think>\n\n" if family.thinks else "is it low? "
        rocket = self.encode("🚀")
        once = family.say_calls([("weather", town)])
        twice = family.say_calls([("weather", town), ("weather", {"town": "wide 🙂", "days": number})])
        yield self._ended("plain", self.encode(f"the weather is cold {number}"))
        yield self._ended("call", self.encode(once))
        yield self._ended("spelt_special", self.spelt(f"say {family.end} and {family.specials[0]}user"))
        yield self._ended("thinking", self.encode(f"{thought}it is low"))
        yield self._ended("retokenizing", self.spelt("lower and lowest town"))
        yield self._ended("thinking_call", self.encode(thought + once))
        yield self._ended("unicode", self.encode("naïve 🙂 e\u0301 مرحبا \x00 \ufffd 你好"))
        yield self._ended("broken_character", (*self.encode("cold "), rocket[0], *self.encode(" low"), *rocket[:-1]))
        yield self._ended("parallel_calls", self.spelt(twice) if number % 2 else self.encode(twice))
        yield self._ended("special_inside", (*self.encode("the "), self._other, *self.encode("town")))
        yield Script("empty", (self.end,))
        yield Script("cut_short", self.encode(f"{thought}and then"), "length")
        yield Script("stop_string", self.encode(f"the town {STOP}PED"), "stop")
        yield Script("other_end", (*self.encode("so it is"), self.other_end))
        yield self._ended("white_space", self.encode("  \n the river\n\n "))

    def _ended(self, kind: str, ids: tuple[int, ...]) -> Script:
        return Script(kind, (*ids, self.end))

    def _special(self, token: str) -> int:
        return self.tokenizer.convert_tokens_to_ids(token)
