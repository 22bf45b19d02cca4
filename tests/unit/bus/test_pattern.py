import re

from hypothesis import given
from hypothesis import strategies as st

from agentjet.bus.pattern import matches, overlap

SUBJECTS = st.lists(st.sampled_from("ab"), min_size=1, max_size=4).map(".".join)
PATTERNS = st.tuples(st.lists(st.sampled_from("ab*"), min_size=1, max_size=4), st.booleans()).map(
    lambda p: ".".join([*p[0], ">"] if p[1] else p[0])
)


@given(PATTERNS, SUBJECTS)
def test_matching_agrees_with_a_regular_expression(pattern: str, subject: str):
    expression = pattern.replace(".", r"\.").replace("*", "[^.]+").replace(">", ".+")
    assert matches(pattern, subject) == bool(re.fullmatch(expression, subject))


@given(PATTERNS, PATTERNS, SUBJECTS)
def test_two_patterns_that_match_one_subject_overlap(first: str, second: str, subject: str):
    assert overlap(first, second) == overlap(second, first)
    if matches(first, subject) and matches(second, subject):
        assert overlap(first, second)


def test_a_tail_wildcard_needs_at_least_one_token():
    assert not matches("a.>", "a")
    assert matches(">", "a.b.c")
    assert not overlap("a.*", "a.b.c")
    assert overlap("a.>", "*.b")
