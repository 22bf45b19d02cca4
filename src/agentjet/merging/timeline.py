"""Timeline merging: the answered calls of a scored episode become one token prefix tree per model.

Invariants:

- Exact and independent of the order of arrival: the tree is a function of the calls, their order in the sample that of
  the episode's end.
- One term for each sampled occurrence: two independent identical replies share tokens and stay two terms.
- Only sampled tokens become terms; what a template or the agent added later is context.
- Exactly the calls that the score names are trained; other calls serve only to rebuild prompts.

It does not know groups, advantages or weights.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from agentjet.errors import MergeError
from agentjet.merging.trie import TokenTrie, num_leaves
from agentjet.schemas.call import Call, FinishReason, ForkCause
from agentjet.schemas.sample import MergeReport, Sample, SampledCall, Tombstone, TombstoneReason
from agentjet.schemas.score import Score
from agentjet.schemas.task import Ticket


def merge_episode(calls: Sequence[Call], *, ticket: Ticket, model: str, score: Score) -> Sample:
    """The sample of one scored episode for one model.

    Args:
        calls: In any order; those that `score.calls[model]` names and, where a prompt needs them, their ancestors.
        ticket: The episode's ticket; its task is not used.
        model: Whose calls are merged.
        score: Scored, with the calls that count, in order. With none of this model, write a `tombstone`.

    Raises:
        MergeError: A call is missing, belongs elsewhere, or has broken log-probs; the message names it.
    """
    by_id: dict[str, Call] = {call.call: call for call in calls}
    wanted = [_find(by_id, call, ticket) for call in dict.fromkeys(score.calls.get(model, ()))]
    if score.reward is None or not wanted:
        raise MergeError(
            f"ticket {ticket.id}: a sample of {model!r} needs a reward and a call; write a tombstone instead"
        )
    for call in wanted:
        _check(call, ticket, model)
    prompts = [_prompt(call, by_id, ticket) for call in wanted]
    sequences = [(*prompt, *call.completion_ids) for prompt, call in zip(prompts, wanted, strict=True)]
    trie = TokenTrie()
    for sequence in sequences:
        trie.insert(sequence)
    trained = [
        (call, trie.places(sequence)[len(prompt) :])
        for call, prompt, sequence in zip(wanted, prompts, sequences, strict=True)
        if _has_ratio(call)
    ]
    places = [place for _, call_places in trained for place in call_places]
    return Sample(
        **_slot_fields(ticket, model),
        reward=score.reward,
        agent_rewards=score.agent_rewards,
        metrics=score.metrics,
        segments=trie.segments(),
        calls=tuple(_sampled(call, score.call_rewards.get(call.call)) for call in wanted),
        term_segment=tuple(segment for segment, _ in places),
        term_offset=tuple(offset for _, offset in places),
        term_logprob=tuple(logprob for call, _ in trained for logprob in call.logprobs),
        report=_report(wanted, trie, sum(map(len, sequences))),
    )


def tombstone(ticket: Ticket, model: str, reason: TombstoneReason, detail: str = "") -> Tombstone:
    """The record that settles a slot without a sample."""
    return Tombstone(**_slot_fields(ticket, model), reason=reason, detail=detail)


def _slot_fields(ticket: Ticket, model: str) -> dict[str, Any]:
    if model not in ticket.ranks:
        raise MergeError(f"ticket {ticket.id} does not train {model!r}: it lists {sorted(ticket.ranks)}")
    return {
        "run": ticket.run,
        "model": model,
        "ticket": ticket.id,
        "group": ticket.group,
        "member": ticket.member,
        "rank": ticket.ranks[model],
        "group_size": ticket.group_size,
    }


def _find(by_id: Mapping[str, Call], call: str, ticket: Ticket) -> Call:
    if call not in by_id:
        raise MergeError(f"ticket {ticket.id}: call {call} is missing from CALLS; wait for it and merge again")
    return by_id[call]


def _check(call: Call, ticket: Ticket, model: str) -> None:
    where = f"ticket {ticket.id}, call {call.call}"
    if call.ticket != ticket.id or call.model != model:
        raise MergeError(f"{where}: it belongs to ticket {call.ticket} and model {call.model!r}, not to {model!r} here")
    if len(call.logprobs) != len(call.completion_ids):
        raise MergeError(f"{where}: {len(call.logprobs)} log-probs for {len(call.completion_ids)} sampled tokens")
    if not all(math.isfinite(logprob) for logprob in call.logprobs):
        raise MergeError(f"{where}: a log-prob is not finite; the engine's output is broken")


def _prompt(call: Call, by_id: Mapping[str, Call], ticket: Ticket) -> tuple[int, ...]:
    runs = [call.prompt_ids]
    seen = {call.call}
    while call.parent is not None:
        if call.parent in seen:
            raise MergeError(f"ticket {ticket.id}: call {call.parent} is its own ancestor")
        seen.add(call.parent)
        call = _find(by_id, call.parent, ticket)
        runs += [call.completion_ids, call.prompt_ids]
    prompt = tuple(token for run in reversed(runs) for token in run)
    if not prompt:
        raise MergeError(
            f"ticket {ticket.id}, call {call.call}: the prompt is empty, so nothing predicts its first token"
        )
    return prompt


def _has_ratio(call: Call) -> bool:
    """Greedy or cut distributions draw tokens whose full-vocabulary log-prob is not their probability."""
    sampling = call.sampling
    return sampling.temperature > 0 and sampling.top_p == 1 and sampling.top_k == 0


def _sampled(call: Call, reward: float | None) -> SampledCall:
    is_trained = _has_ratio(call)
    return SampledCall(
        call=call.call,
        agent=call.agent,
        engine=call.engine,
        num_terms=len(call.completion_ids) if is_trained else 0,
        temperature=call.sampling.temperature,
        versions=call.versions,
        version_starts=call.version_starts,
        is_mixed=call.is_mixed,
        is_truncated=call.finish_reason is FinishReason.LENGTH,
        is_trained=is_trained,
        reward=reward,
    )


def _report(calls: Sequence[Call], trie: TokenTrie, num_row_tokens: int) -> MergeReport:
    return MergeReport(
        num_calls=len(calls),
        num_branches=num_leaves(trie.segments()),
        num_row_tokens=num_row_tokens,
        num_tree_tokens=trie.num_tokens,
        forks=dict(sorted(Counter(call.fork.value for call in calls if call.fork is not ForkCause.NONE).items())),
        num_drifted=sum(call.is_drifted for call in calls),
    )
