"""Samples out of a few token ids or lengths, for tests of what comes after the merger."""

from collections.abc import Mapping, Sequence
from typing import Any

from agentjet.merging import TokenTrie
from agentjet.schemas.ids import GroupId, RunId
from agentjet.schemas.sample import MergeReport, Sample, SampledCall

Row = tuple[Sequence[int], Sequence[int]]
"""Prompt and sampled tokens of a call."""


def sample_of_rows(
    rows: Sequence[Row],
    *,
    logprobs: Sequence[float] | None = None,
    calls: Sequence[Mapping[str, Any]] | None = None,
    **fields: Any,
) -> Sample:
    """The tree of the rows.

    Args:
        rows: A call each.
        logprobs: [terms] of the sampler, 0 by default.
        calls: Further fields of each call.
        fields: Further fields of the sample, and `group` and `member` as numbers.
    """
    trie = TokenTrie()
    for prompt, reply in rows:
        trie.insert([*prompt, *reply])
    places = [place for prompt, reply in rows for place in trie.places([*prompt, *reply])[len(prompt) :]]
    return _sample(
        segments=trie.segments(),
        calls=tuple(
            SampledCall(call=str(index), **({"num_terms": len(reply), "versions": ("1-0",)} | dict(own)))
            for index, ((_, reply), own) in enumerate(zip(rows, calls or [{}] * len(rows), strict=True))
        ),
        term_segment=tuple(segment for segment, _ in places),
        term_offset=tuple(offset for _, offset in places),
        term_logprob=tuple(logprobs or [0.0] * len(places)),
        report=MergeReport(
            num_calls=len(rows),
            num_branches=1,
            num_row_tokens=sum(len(prompt) + len(reply) for prompt, reply in rows),
            num_tree_tokens=trie.num_tokens,
        ),
        **fields,
    )


def sample_of_lengths(
    reward: float, calls: Sequence[tuple[str, int]], *, call_rewards: Sequence[float | None] = (), **fields: Any
) -> Sample:
    """A sample without tokens: calls as agent and number of terms, and the rewards of single calls."""
    made = (
        SampledCall(call=str(i), agent=agent, num_terms=n, versions=(), reward=own)
        for i, ((agent, n), own) in enumerate(zip(calls, call_rewards or [None] * len(calls), strict=True))
    )
    report = MergeReport(num_calls=0, num_branches=0, num_row_tokens=0, num_tree_tokens=0)
    nothing = {"segments": (), "term_segment": (), "term_offset": (), "term_logprob": ()}
    return _sample(reward=reward, calls=tuple(made), report=report, **nothing, **fields)


def _sample(*, group: int = 0, member: int = 0, **fields: Any) -> Sample:
    place = {
        "run": RunId("run-abcdef"),
        "model": "m",
        "ticket": f"p-{group}.{member}.0",
        "group": GroupId(f"p-{group}"),
        "member": member,
        "rank": group,
        "group_size": 4,
        "reward": 0.0,
    }
    return Sample(**(place | fields))
