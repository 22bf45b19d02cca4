"""What others do with the same episodes: rows of tokens, one per call or one per chain of calls.

The baseline is as good as it gets without a tree: Transformers' own model with causal SDPA and no mask (padding stands
on the right, where no token sees it), only scored positions meet the vocabulary, in the chunked head that the tree uses
too, master weights are cast once per step, and rows are packed by length so that padding and the number of backward
passes cost least.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from merge_workload import Episode, Ids
from torch import Tensor

from agentjet.algorithm.advantage import call_advantages
from agentjet.algorithm.aggregation import term_weights
from agentjet.schemas.sample import Sample
from agentjet.training.head import rounded, scored_logprobs
from agentjet.training.precision import autocast
from agentjet.training.trainer import Trainer

PASS_TOKENS = 64
"""What a further backward pass costs, in tokens: it adds to every weight's gradient once more."""


@dataclass(slots=True)
class Row:
    """One sequence and the sampled tokens in it."""

    ids: Ids
    targets: list[int]
    """Positions of sampled tokens; each is predicted at the position before it."""
    calls: list[int]
    """[targets] the call it belongs to, counted over the whole batch."""


def unmerged_rows(groups: Sequence[Sequence[Episode]]) -> list[Row]:
    """Each call a row of its own."""
    turns = [turn for episodes in groups for episode in episodes for turn in episode.turns]
    rows: list[Row] = []
    for call, turn in enumerate(turns):
        start, length = len(turn.prompt), len(turn.completion)
        rows.append(Row([*turn.prompt, *turn.completion], list(range(start, start + length)), [call] * length))
    return rows


def linear_rows(groups: Sequence[Sequence[Episode]]) -> list[Row]:
    """Calls of an episode that extend an earlier one whole are joined to it, others are rows of their own."""
    rows: list[Row] = []
    unmerged = iter(unmerged_rows(groups))
    for episode in (episode for episodes in groups for episode in episodes):
        own: list[Row] = []
        for _ in episode.turns:
            row = next(unmerged)
            fitting = [old for old in own if len(old.ids) <= row.targets[0] and row.ids[: len(old.ids)] == old.ids]
            if fitting:
                base = max(fitting, key=lambda old: len(old.ids))
                own.remove(base)
                row = Row(row.ids, base.targets + row.targets, base.calls + row.calls)
            own.append(row)
        rows += own
    return rows


def micro_batches(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Rows of similar length side by side, at most `budget` tokens with padding; a longer row stands alone.

    The cut of the sorted rows with the fewest padded tokens, a further batch counting `PASS_TOKENS`. A budget of 0 is
    one row after the other.
    """
    order = sorted(range(len(lengths)), key=lambda index: lengths[index])
    best: list[tuple[int, int]] = [(0, 0)]
    for stop in range(1, len(order) + 1):
        longest = lengths[order[stop - 1]]
        starts = [start for start in range(stop) if stop - start == 1 or (stop - start) * longest <= budget]
        best.append(min((best[start][0] + (stop - start) * longest + PASS_TOKENS, start) for start in starts))
    cuts, stop = list[list[int]](), len(order)
    while stop:
        start = best[stop][1]
        cuts.append(order[start:stop])
        stop = start
    return cuts[::-1]


class RowStep:
    """The same optimizer step as a trainer's, on rows, with the trainer's own model and optimizer."""

    def __init__(self, trainer: Trainer, samples: Sequence[Sequence[Sample]]) -> None:
        self._trainer = trainer
        members = [sample for group in samples for sample in group]
        advantages = [row for group in samples for row in call_advantages(group, trainer.algorithm)]
        weights = term_weights([[call.num_terms for call in sample.calls] for sample in members], trainer.algorithm)
        self._factors = torch.tensor(
            [a * w for one, other in zip(advantages, weights, strict=True) for a, w in zip(one, other, strict=True)]
        )

    def __call__(self, rows: Sequence[Row], batches: Sequence[Sequence[int]]) -> None:
        """Forward, loss and backward of every batch, then the update."""
        with autocast(self._trainer.dtype, self._trainer.device):
            for batch in batches:
                self._loss([rows[index] for index in batch]).backward()
        self._trainer.optimizer.update()

    def _loss(self, rows: Sequence[Row]) -> Tensor:
        model, width = self._trainer.model, max(len(row.ids) for row in rows)
        ids = torch.tensor([row.ids + [0] * (width - len(row.ids)) for row in rows])
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1)
        weight: Tensor = model.get_output_embeddings().weight  # type: ignore[assignment]
        is_narrow = self._trainer.dtype != torch.float32
        if is_narrow:
            weight = rounded(weight, self._trainer.engine_dtype)
        places = [(line, target) for line, row in enumerate(rows) for target in row.targets]
        logprob, _ = scored_logprobs(
            hidden.index_select(0, torch.tensor([line * width + target - 1 for line, target in places])),
            weight,
            torch.ones(len(places)),
            torch.arange(len(places)),
            torch.tensor([rows[line].ids[target] for line, target in places]),
            grad_dtype=self._trainer.dtype if is_narrow else None,
        )
        factor = self._factors[torch.tensor([call for row in rows for call in row.calls])]
        return -(factor * (logprob - logprob.detach()).exp()).sum()
