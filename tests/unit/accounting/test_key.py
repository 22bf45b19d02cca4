import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentjet.accounting.key import Key, peek, sign, verify
from agentjet.errors import ForeignKeyError, KeyRejectedError

SECRET = bytes(range(32))
KEY = Key(run="guess-abc", ticket="guess-3.0.1", attempt=17, expires=1000.0)


def test_a_signed_key_says_what_was_signed():
    text = sign(SECRET, KEY)
    assert text.startswith("aj-")
    assert verify(SECRET, text, run="guess-abc", now=900.0) == KEY
    assert peek(text) == KEY


def test_a_key_of_another_secret_is_refused():
    with pytest.raises(KeyRejectedError, match="not signed by this run"):
        verify(bytes(32), sign(SECRET, KEY), run="guess-abc", now=0.0)


def test_a_key_of_another_run_is_refused_by_name():
    with pytest.raises(ForeignKeyError, match="of run guess-abc, not of other"):
        verify(SECRET, sign(SECRET, KEY), run="other", now=0.0)


def test_a_key_of_another_role_plays_no_episode():
    with pytest.raises(ForeignKeyError, match="for the role 'reader', not for an episode"):
        verify(SECRET, sign(SECRET, dataclasses.replace(KEY, role="reader")), run="guess-abc", now=0.0)


def test_expiry_tolerates_a_minute_of_skew():
    text = sign(SECRET, KEY)
    assert verify(SECRET, text, run="guess-abc", now=1060.0) == KEY
    with pytest.raises(KeyRejectedError, match="expired 61 s ago"):
        verify(SECRET, text, run="guess-abc", now=1061.0)


def test_another_payload_under_the_same_signature_is_refused():
    mac = sign(SECRET, KEY).partition(".")[2]
    payload = sign(SECRET, dataclasses.replace(KEY, attempt=18)).partition(".")[0]
    with pytest.raises(KeyRejectedError):
        verify(SECRET, f"{payload}.{mac}", run="guess-abc", now=0.0)


def test_a_short_secret_is_refused():
    with pytest.raises(ValueError, match="at least 16 bytes"):
        sign(b"short", KEY)


@given(st.text(max_size=80) | st.text(max_size=60).map(lambda text: "aj-" + text))
def test_strange_text_is_refused_and_nothing_else_is_raised(text):
    with pytest.raises(KeyRejectedError):
        verify(SECRET, text, run="guess-abc", now=0.0)


@given(st.data())
def test_any_changed_character_breaks_a_key(data):
    text = sign(SECRET, KEY)
    place = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.characters(codec="ascii").filter(lambda char: char != text[place]))
    with pytest.raises(KeyRejectedError):
        verify(SECRET, text[:place] + other + text[place + 1 :], run="guess-abc", now=0.0)
