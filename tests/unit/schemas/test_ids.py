import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentjet.schemas import subject
from agentjet.schemas.ids import (
    GroupId,
    RunId,
    TicketName,
    Version,
    check_token,
    group_id,
    is_token,
    new_call_id,
    new_run_id,
    slot_id,
)
from agentjet.schemas.subject import Stream, stream_name, stream_subjects

TOKEN = st.from_regex(r"[A-Za-z0-9_-]{1,8}", fullmatch=True)


@given(TOKEN, st.integers(0, 10**6), st.integers(0, 1000), st.integers(0, 10))
def test_ticket_ids_parse_back(pool, index, member, offer):
    name = TicketName(group_id(pool, index), member, offer)
    assert TicketName.parse(name.id) == name
    assert name.id == f"{name.slot}.{offer}"
    assert name.slot == slot_id(name.group, member)


@given(st.integers(0, 10**9), st.integers(0, 10**9))
def test_versions_parse_back_and_sort_by_incarnation_first(incarnation, step):
    version = Version(incarnation, step)
    assert Version.parse(str(version)) == version
    assert Version(incarnation + 1, 0) > version


@pytest.mark.parametrize("text", ["", "a", "a.1", "a.1.2.3", "a.b.1", "a.1.-1", "a b.1.1", ".1.1"])
def test_other_text_is_no_ticket(text):
    with pytest.raises(ValueError, match="is not a ticket"):
        TicketName.parse(text)


@pytest.mark.parametrize("text", ["", "1", "1-", "a-1", "1-2-3", "1-2\n"])
def test_other_text_is_no_version(text):
    with pytest.raises(ValueError, match="is not a version"):
        Version.parse(text)


@given(st.text())
def test_tokens_never_hold_what_a_subject_reserves(text):
    assert not (is_token(text) and any(mark in text for mark in ".*> \n"))


def test_token_that_can_not_stand_in_a_subject_is_named():
    with pytest.raises(ValueError, match=r"pool 'a\.b' may hold"):
        check_token("a.b", "pool")


def test_run_ids_are_fresh_each_time():
    assert new_run_id("guess") != new_run_id("guess")
    assert new_run_id("guess").startswith("guess-")


def test_call_ids_are_ulids():
    first = new_call_id()
    assert len(first) == 26
    assert len({new_call_id() for _ in range(100)}) == 100
    assert first[:9] <= new_call_id()[:9]


@pytest.mark.parametrize("stream", Stream)
def test_streams_of_a_run_do_not_overlap(stream):
    run = RunId("r-1")
    assert stream_name(run, stream) == f"AJ_r-1_{stream.name}"
    others = {wildcard for other in Stream if other is not stream for wildcard in stream_subjects(run, other)}
    assert not others & set(stream_subjects(run, stream))


def test_subjects_lie_in_their_streams():
    run, group = RunId("r-1"), GroupId("guess-0")
    ticket = TicketName(group, 1, 0).id
    written = {
        Stream.TASKS: subject.task(run, "guess", ticket),
        Stream.CLAIMS: subject.claim(run, ticket),
        Stream.INFER: subject.infer(run, "m"),
        Stream.CALLS: subject.call(run, "m", ticket, 3, new_call_id()),
        Stream.EPISODES: subject.episode(run, ticket),
        Stream.JUDGEMENTS: subject.judgement(run, group),
        Stream.SCORES: subject.score(run, ticket),
        Stream.SAMPLES: subject.sample(run, "m", slot_id(group, 1)),
        Stream.LEDGER: subject.ledger(run, subject.CURRICULUM),
        Stream.WEIGHTS: subject.weights(run, "m", "1-0"),
        Stream.CHECKPOINTS: subject.checkpoint(run, "m", "1-0"),
        Stream.EVENTS: subject.event(run, "learner", "start"),
    }
    for stream in Stream:
        assert any(written[stream].startswith(wildcard[:-1]) for wildcard in stream_subjects(run, stream))
