import itertools
import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentjet.errors import MergeError
from agentjet.merging import Forest, merge_episode, plant, tombstone
from agentjet.merging.trie import leaf_paths
from agentjet.schemas.call import Call, FinishReason, ForkCause, Usage
from agentjet.schemas.codec import decode, encode
from agentjet.schemas.field import as_float32
from agentjet.schemas.ids import CallId, GroupId, RunId
from agentjet.schemas.sample import Sample, TombstoneReason
from agentjet.schemas.sampling import Sampling
from agentjet.schemas.score import Outcome, Score
from agentjet.schemas.task import Ticket

TICKET = Ticket(
    run=RunId("run-abcdef"),
    pool="p",
    group=GroupId("p-0"),
    member=1,
    group_size=4,
    models=("m",),
    ranks={"m": 3},
    seed=1,
    deadline_seconds=60.0,
)


def make_call(
    name: str, prompt: Sequence[int], completion: Sequence[int], parent: str | None = None, **more: object
) -> Call:
    fields: dict[str, object] = {
        "run": TICKET.run,
        "call": CallId(name),
        "ticket": TICKET.id,
        "attempt": 1,
        "model": "m",
        "engine": "e",
        "generation": "g",
        "parent": parent,
        "prompt_ids": tuple(prompt),
        "completion_ids": tuple(completion),
        "logprobs": tuple(-0.5 - index for index in range(len(completion))),
        "versions": ("1-0",),
        "sampling": Sampling(),
        "messages": (),
        "message": {},
        "finish_reason": FinishReason.STOP,
        "usage": Usage(prompt_tokens=0, completion_tokens=0),
    }
    return Call.model_validate({**fields, **more})


def make_score(*names: str, reward: float = 1.0) -> Score:
    return Score(run=TICKET.run, ticket=TICKET, attempt=1, outcome=Outcome.SCORED, reward=reward, calls={"m": names})


def merge(*calls: Call) -> Sample:
    return merge_episode(calls, ticket=TICKET, model="m", score=make_score(*(call.call for call in calls)))


def terms_of(sample: Sample) -> list[list[tuple[tuple[int, ...], int, float]]]:
    """For each call: (context, token, log-prob) of its terms, read back from the tree."""
    forest = plant([sample])
    parents = {}
    for index, segment in enumerate(sample.segments):
        for offset in range(len(segment.ids)):
            before = (index, offset - 1) if offset else None
            if before is None and segment.parent >= 0:
                before = (segment.parent, len(sample.segments[segment.parent].ids) - 1)
            parents[index, offset] = before
    found, place = [], 0
    for call in sample.calls:
        terms = []
        for term in range(place, place + call.num_terms):
            at = (sample.term_segment[term], sample.term_offset[term])
            token = sample.segments[at[0]].ids[at[1]]
            context = []
            while (at := parents[at]) is not None:
                context.append(sample.segments[at[0]].ids[at[1]])
            assert forest.depths[forest.term_target[term]] == len(context)
            terms.append((tuple(reversed(context)), token, sample.term_logprob[term]))
        place += call.num_terms
        found.append(terms)
    assert place == len(sample.term_segment) == len(sample.term_offset) == len(sample.term_logprob)
    return found


def test_t7_interleaved_agents_make_two_branches():
    calls = (
        make_call("A1", [1, 2], [3], agent="a"),
        make_call("B1", [1, 7], [8], agent="b"),
        make_call("A2", [4], [5], parent="A1", agent="a"),
        make_call("B2", [9], [6], parent="B1", agent="b"),
    )
    sample = merge(*calls)
    assert sample.report.num_branches == 2
    assert sample.report.compression_ratio == 2.0
    assert sorted(leaf_paths(sample.segments)) == [(1, 2, 3, 4, 5), (1, 7, 8, 9, 6)]
    assert (sample.report.num_row_tokens, sample.report.num_tree_tokens) == (3 + 3 + 5 + 5, 9)
    assert [call.agent for call in sample.calls] == ["a", "b", "a", "b"]
    assert {call.engine for call in sample.calls} == {"e"}


def test_a_call_keeps_its_own_reward_and_has_none_where_nobody_gave_one():
    calls = (make_call("c0", [1], [2]), make_call("c1", [3], [4], parent="c0"))
    score = make_score("c0", "c1").model_copy(update={"call_rewards": {"c1": 0.0, "c0": 2.0, "other": 1.0}})
    rewarded = merge_episode(calls, ticket=TICKET, model="m", score=score)
    assert [call.reward for call in rewarded.calls] == [2.0, 0.0]
    assert [call.reward for call in merge(*calls).calls] == [None, None]


def test_t9_linear_turns_are_one_branch_with_four_spans():
    calls = [make_call("c0", [10, 11], [12, 13])]
    for turn in range(1, 4):
        calls.append(make_call(f"c{turn}", [20 + turn], [30 + turn, 40 + turn], parent=f"c{turn - 1}"))
    sample = merge(*calls)
    assert sample.report.num_branches == 1
    assert len(sample.segments) == 1
    assert [[token for _, token, _ in terms] for terms in terms_of(sample)] == [
        list(call.completion_ids) for call in calls
    ]
    assert [[logprob for *_, logprob in terms] for terms in terms_of(sample)] == [list(call.logprobs) for call in calls]


def test_t2_a_rewritten_history_forks_where_it_differs():
    sample = merge(
        make_call("c0", [1, 2], [50, 51, 3]),
        make_call("c1", [1, 2, 3, 4], [5], fork=ForkCause.TEMPLATE_REWROTE),
        make_call("c2", [1, 2, 3, 4, 5, 6], [7], fork=ForkCause.HISTORY_EDITED),
    )
    assert sorted(leaf_paths(sample.segments)) == [(1, 2, 3, 4, 5, 6, 7), (1, 2, 50, 51, 3)]
    assert [len(terms) for terms in terms_of(sample)] == [3, 1, 1]
    assert sample.report.forks == {"history_edited": 1, "template_rewrote": 1}


def test_t11_an_end_token_added_by_the_template_is_no_term():
    end = 99
    sample = merge(
        make_call("c0", [1, 2], [3], finish_reason=FinishReason.LENGTH),
        make_call("c1", [end, 4], [5, end], parent="c0"),
    )
    assert [[token for _, token, _ in terms] for terms in terms_of(sample)] == [[3], [5, end]]
    assert sample.calls[0].is_truncated
    assert not sample.calls[1].is_truncated


def test_two_identical_replies_stay_two_terms():
    sample = merge(
        make_call("c0", [1], [2, 3], logprobs=(-1.0, -2.0)), make_call("c1", [1], [2, 3], logprobs=(-3.0, -4.0))
    )
    assert sample.report.num_tree_tokens == 3
    assert sample.term_segment == (0, 0, 0, 0)
    assert sample.term_logprob == (-1.0, -2.0, -3.0, -4.0)


def test_only_the_calls_of_the_score_are_trained():
    calls = [make_call("lost", [1], [2]), make_call("kept", [3], [4], parent="lost")]
    sample = merge_episode(calls, ticket=TICKET, model="m", score=make_score("kept"))
    assert terms_of(sample) == [[((1, 2, 3), 4, -0.5)]]


def test_a_greedy_call_is_context_only():
    sample = merge(make_call("c0", [1], [2, 3], sampling=Sampling(temperature=0.0)))
    assert not sample.calls[0].is_trained
    assert sample.calls[0].num_terms == 0
    assert sample.term_segment == ()


@pytest.mark.parametrize(
    ("calls", "names", "message"),
    [
        ([make_call("c1", [2], [3], parent="gone")], ["c1"], "call gone is missing"),
        ([], ["c1"], "call c1 is missing"),
        ([make_call("c1", [2], [3], logprobs=(float("nan"),))], ["c1"], "c1: a log-prob is not finite"),
        ([make_call("c1", [2], [3], logprobs=())], ["c1"], "c1: 0 log-probs for 1"),
        ([make_call("c1", [], [3])], ["c1"], "c1: the prompt is empty"),
        ([make_call("c1", [2], [3], parent="c1")], ["c1"], "c1 is its own ancestor"),
        (
            [
                make_call("c1", [2], [3], parent="c2"),
                make_call("c2", [2], [3], parent="c3"),
                make_call("c3", [2], [3], parent="c2"),
            ],
            ["c1"],
            "c2 is its own ancestor",
        ),
        ([make_call("c1", [2], [3], model="n")], ["c1"], "model 'n'"),
        ([make_call("c1", [2], [3])], [], "write a tombstone"),
    ],
)
def test_a_broken_episode_is_refused_by_name(calls, names, message):
    with pytest.raises(MergeError, match=message):
        merge_episode(calls, ticket=TICKET, model="m", score=make_score(*names))


def test_a_tombstone_names_its_slot():
    stone = tombstone(TICKET, "m", TombstoneReason.UNUSED, "never asked")
    assert (stone.slot, stone.rank, stone.group_size, stone.ticket) == ("p-0.1", 3, 4, "p-0.1.0")
    with pytest.raises(MergeError, match="does not train 'x'"):
        tombstone(TICKET, "x", TombstoneReason.DEAD)


def test_a_sample_survives_the_wire():
    sample = merge(make_call("c0", [1, 2], [3, 4]), make_call("c1", [1, 5], [6]))
    assert decode(*encode(sample)) == sample


@st.composite
def episodes(draw):
    """Calls that extend, fork and repeat one another over a tiny alphabet."""
    tokens = st.lists(st.integers(0, 2), min_size=1, max_size=4)
    calls: list[Call] = []
    for index in range(draw(st.integers(1, 7))):
        parent = draw(st.sampled_from([None, *(call.call for call in calls)]))
        completion = draw(tokens)
        logprobs = tuple(as_float32(-draw(st.floats(0, 9))) for _ in completion)
        calls.append(make_call(f"c{index}", draw(tokens), completion, parent=parent, logprobs=logprobs))
    return calls


def whole(call: Call, calls: dict[str, Call]) -> tuple[int, ...]:
    before = whole(calls[call.parent], calls) if call.parent else ()
    return (*before, *call.prompt_ids, *call.completion_ids)


@given(episodes(), st.randoms(use_true_random=False))
@settings(max_examples=150)
def test_every_sampled_token_is_one_term_with_its_own_context(calls, rng: random.Random):
    by_id = {call.call: call for call in calls}
    sample = merge(*calls)
    for call, terms in zip(calls, terms_of(sample), strict=True):
        sequence = whole(call, by_id)
        first = len(sequence) - len(call.completion_ids)
        assert [(*context, token) for context, token, _ in terms] == [
            sequence[: first + index + 1] for index in range(len(call.completion_ids))
        ]
        assert tuple(logprob for *_, logprob in terms) == call.logprobs
    shuffled = list(calls)
    rng.shuffle(shuffled)
    assert merge_episode(shuffled, ticket=TICKET, model="m", score=make_score(*by_id)) == sample


@given(episodes())
@settings(max_examples=100)
def test_the_tree_holds_each_prefix_once(calls):
    by_id = {call.call: call for call in calls}
    sequences = [whole(call, by_id) for call in calls]
    prefixes = {sequence[:length] for sequence in sequences for length in range(1, len(sequence) + 1)}
    sample = merge(*calls)
    assert sample.report.num_tree_tokens == len(prefixes) == sum(len(segment.ids) for segment in sample.segments)
    paths = leaf_paths(sample.segments)
    assert sample.report.num_branches == len(paths)
    assert set(paths) == {s for s in sequences if not any(t != s and t[: len(s)] == s for t in sequences)}
    for one, other in itertools.combinations(sample.segments, 2):
        assert one.parent != other.parent or one.ids[0] != other.ids[0]


@given(st.lists(episodes(), min_size=1, max_size=3), st.randoms(use_true_random=False))
@settings(max_examples=100)
def test_a_group_s_forest_holds_the_unmerged_contexts_whatever_came_first(group, rng: random.Random):
    expected = Counter(
        (sequence[: len(sequence) - len(call.completion_ids) + index + 1], call.logprobs[index])
        for calls in group
        for call in calls
        for sequence in [whole(call, {call.call: call for call in calls})]
        for index in range(len(call.completion_ids))
    )
    samples = [merge(*calls) for calls in group]
    forests = [plant(samples), plant(rng.sample(samples, len(samples)))]
    assert forests[0].segments == forests[1].segments
    paths = path_of_each_token(forests[0])
    logprobs = [logprob for sample in samples for logprob in sample.term_logprob]
    assert Counter(zip((paths[at] for at in forests[0].term_target), logprobs, strict=True)) == expected
    leaves = {whole(call, {call.call: call for call in calls}) for calls in group for call in calls}
    assert set(leaf_paths(forests[0].segments)) == {
        leaf for leaf in leaves if not any(other != leaf and other[: len(leaf)] == leaf for other in leaves)
    }


def path_of_each_token(forest: Forest) -> list[tuple[int, ...]]:
    """[tokens] its ancestors' ids and its own."""
    paths: list[tuple[int, ...]] = []
    for segment in forest.segments:
        parent = segment.parent
        end = forest.starts[parent] + len(forest.segments[parent].ids) - 1 if parent >= 0 else -1
        for token in segment.ids:
            paths.append((*(paths[end] if end >= 0 else ()), token))
            end = len(paths) - 1
    return paths


def test_a_long_conversation_is_one_segment():
    rng = random.Random(0)
    calls = [make_call("c000", [rng.randrange(50_000) for _ in range(2000)], [1] * 200)]
    for turn in range(1, 20):
        calls.append(
            make_call(f"c{turn:03}", [rng.randrange(50_000) for _ in range(200)], [2] * 200, parent=f"c{turn - 1:03}")
        )
    sample = merge(*calls)
    assert [len(segment.ids) for segment in sample.segments] == [2000 + 20 * 200 + 19 * 200]
    assert sample.report.num_row_tokens == sum(2200 + 400 * turn for turn in range(20))
