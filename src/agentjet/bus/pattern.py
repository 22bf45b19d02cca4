"""Subjects and wildcards as NATS reads them: `*` is one token, a final `>` is one or more."""

from itertools import zip_longest


def matches(pattern: str, subject: str) -> bool:
    """Whether a subject (no wildcards) falls under a pattern."""
    wanted = pattern.split(".")
    tokens = subject.split(".")
    if wanted[-1] == ">":
        wanted.pop()
        return len(tokens) > len(wanted) and all(w in ("*", t) for w, t in zip(wanted, tokens, strict=False))
    return len(tokens) == len(wanted) and all(w in ("*", t) for w, t in zip(wanted, tokens, strict=True))


def overlap(first: str, second: str) -> bool:
    """Whether some subject falls under both patterns."""
    for a, b in zip_longest(first.split("."), second.split(".")):
        if a is None or b is None:
            return False
        if ">" in (a, b):
            return True
        if a != b and "*" not in (a, b):
            return False
    return True
