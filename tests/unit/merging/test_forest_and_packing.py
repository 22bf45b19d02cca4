import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_sample import sample_of_rows

from agentjet.errors import MergeError
from agentjet.merging import TokenTrie, pack, plant
from agentjet.merging.trie import leaf_paths
from agentjet.schemas.sample import Sample

rows = st.tuples(
    st.lists(st.integers(0, 2), min_size=1, max_size=5), st.lists(st.integers(0, 2), min_size=1, max_size=4)
)
samples = st.lists(rows, min_size=1, max_size=4).map(sample_of_rows)


def contexts(sample: Sample) -> list[tuple[int, ...]]:
    """The path up to and with each term's token, straight from the sample."""
    found = []
    for index, offset in zip(sample.term_segment, sample.term_offset, strict=True):
        path = sample.segments[index].ids[: offset + 1]
        while (index := sample.segments[index].parent) >= 0:
            path = sample.segments[index].ids + path
        found.append(path)
    return found


def unique_tokens(group: list[Sample]) -> int:
    return len({path[:n] for sample in group for path in leaf_paths(sample.segments) for n in range(1, len(path) + 1)})


@given(st.lists(samples, min_size=1, max_size=4))
@settings(max_examples=150)
def test_a_forest_keeps_every_term_and_its_context(group):
    forest = plant(group)
    assert forest.num_tokens == unique_tokens(group)
    ancestors = {}
    for segment, start in zip(forest.segments, forest.starts, strict=True):
        assert segment.parent < len(forest.segments)
        parent = forest.segments[segment.parent] if segment.parent >= 0 else None
        before = ancestors[forest.starts[segment.parent] + len(parent.ids) - 1] if parent else []
        for offset in range(len(segment.ids)):
            ancestors[start + offset] = before = [*before, start + offset]
    found = iter(zip(forest.term_sample, forest.term_target, forest.term_predictor, strict=True))
    for index, sample in enumerate(group):
        for context in contexts(sample):
            owner, target, predictor = next(found)
            assert owner == index
            assert tuple(forest.ids[ancestors[target]]) == context
            assert forest.depths[target] == len(context) - 1
            assert ancestors[target][-2] == predictor
    assert next(found, None) is None


def test_a_group_computes_its_shared_prompt_once():
    group = [
        sample_of_rows([([1, 2, 3], [4, 5])]),
        sample_of_rows([([1, 2, 3], [4, 6])]),
        sample_of_rows([([1, 2, 3], [7])]),
    ]
    forest = plant(group)
    assert forest.num_tokens == 3 + 1 + 1 + 1 + 1
    assert forest.term_sample.tolist() == [0, 0, 1, 1, 2]


def test_a_term_without_a_token_before_it_is_refused():
    broken = sample_of_rows([([1], [2])]).model_copy(update={"term_offset": (0,)})
    with pytest.raises(MergeError, match="nothing predicts it"):
        plant([broken])


def test_a_frozen_trie_takes_no_more():
    trie = TokenTrie()
    assert trie.insert([1, 2]) == 2
    assert trie.count_new([1, 3]) == 1
    trie.segments()
    with pytest.raises(RuntimeError, match="frozen"):
        trie.insert([3])
    with pytest.raises(KeyError):
        trie.places([1, 3])


@given(st.lists(st.lists(samples, min_size=1, max_size=4), max_size=4), st.integers(1, 40))
@settings(max_examples=150)
def test_packs_hold_every_sample_once_within_the_budget(groups, budget):
    packs = pack(groups, budget)
    assert sorted(member for packed in packs for member in packed) == [
        (index, member) for index, group in enumerate(groups) for member in range(len(group))
    ]
    for packed in packs:
        chosen = [groups[group][member] for group, member in packed]
        assert len(packed) == 1 or unique_tokens(chosen) <= budget
    for index, group in enumerate(groups):
        if unique_tokens(group) <= budget:
            assert sum(any(owner == index for owner, _ in packed) for packed in packs) == 1
    assert packs == pack(groups, budget)


def test_a_group_above_the_budget_is_cut_into_runs():
    group = [sample_of_rows([([1, 2], [index, index])]) for index in range(10, 16)]
    assert pack([group], 6) == [[(0, 0), (0, 1)], [(0, 2), (0, 3)], [(0, 4), (0, 5)]]


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=8), st.randoms())
@settings(max_examples=150)
def test_a_trie_does_not_depend_on_the_order_of_arrival(sequences, rng):
    shuffled = list(sequences)
    rng.shuffle(shuffled)
    tries = [TokenTrie(), TokenTrie()]
    for trie, found in zip(tries, (sequences, shuffled), strict=True):
        assert sum(trie.insert(sequence) for sequence in found) == trie.num_tokens
    assert tries[0].segments() == tries[1].segments()
    assert [tries[0].places(sequence) for sequence in sequences] == [
        tries[1].places(sequence) for sequence in sequences
    ]
