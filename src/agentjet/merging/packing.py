"""Splits a batch's samples into packs under a budget of unique tokens.

Invariants: every sample is in exactly one pack; a pack exceeds the budget only where a single sample does; a group that
fits stays together; the result depends on the samples and the budget only, never on time or memory.
"""

from collections.abc import Sequence

from agentjet.merging.trie import TokenTrie, leaf_paths
from agentjet.schemas.sample import Sample

Member = tuple[int, int]
"""(group, place in the group) of a sample of the batch."""


def pack(groups: Sequence[Sequence[Sample]], budget: int) -> list[list[Member]]:
    """Packs of samples whose joined forest holds at most `budget` unique tokens.

    Groups go into the first pack with room, largest first; a group above the budget is cut into runs of members that
    fit.
    """
    bundles: list[tuple[int, list[Member]]] = []
    for index, group in enumerate(groups):
        bundles += [(size, [(index, member) for member in members]) for size, members in _cut(group, budget)]
    bundles.sort(key=lambda bundle: (-bundle[0], bundle[1]))
    packs: list[tuple[TokenTrie, list[Member]]] = []
    for _, members in bundles:
        paths = [path for group, member in members for path in leaf_paths(groups[group][member].segments)]
        fitting = (found for found in packs if found[0].num_tokens + _num_new(found[0], paths) <= budget)
        chosen = next(fitting, None)
        if chosen is None:
            chosen = (TokenTrie(), [])
            packs.append(chosen)
        for path in paths:
            chosen[0].insert(path)
        chosen[1].extend(members)
    return [sorted(members) for _, members in packs]


def _num_new(trie: TokenTrie, paths: Sequence[tuple[int, ...]]) -> int:
    """Unique tokens of the paths that the trie lacks."""
    fresh = TokenTrie()
    # A path's last tokens are new to the trie, and its last tokens are new among the paths: the shorter run is both.
    return sum(min(trie.count_new(path), fresh.insert(path)) for path in paths)


def _cut(group: Sequence[Sample], budget: int) -> list[tuple[int, list[int]]]:
    """Runs of members with their unique tokens, each within the budget where a single member is."""
    runs: list[tuple[int, list[int]]] = []
    trie, members = TokenTrie(), []
    for member, sample in enumerate(group):
        paths = leaf_paths(sample.segments)
        if members and trie.num_tokens + _num_new(trie, paths) > budget:
            runs.append((trie.num_tokens, members))
            trie, members = TokenTrie(), []
        for path in paths:
            trie.insert(path)
        members.append(member)
    return [*runs, (trie.num_tokens, members)] if members else runs
