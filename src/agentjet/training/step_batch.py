"""One step's batch on its way from the log to the loss: which terms train, with which advantage and weight.

Invariants: every rank makes the same one from the same samples; every denominator is that of a whole optimizer update;
a sample without a gradient counts in the denominators and is not computed.

It does not know the model: log-probs are given to it.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from agentjet.algorithm.advantage import batch_advantages, group_has_signal, has_call_rewards
from agentjet.algorithm.aggregation import term_weights
from agentjet.algorithm.correction import is_accepted
from agentjet.algorithm.metric import mean
from agentjet.algorithm.selection import keep_calls, kept_terms
from agentjet.algorithm.shaping import Shaped, shaped_rewards
from agentjet.config import AlgorithmSettings
from agentjet.merging.packing import Member, pack
from agentjet.merging.trim import trim
from agentjet.schemas.sample import Sample
from agentjet.training.objective import sequence_of_terms

Groups = Sequence[Sequence[Sample]]
ByMember = Mapping[Member, Tensor]
"""[terms] of each member."""


class StepBatch:
    """The groups that train.

    Args:
        batch: Groups of samples as the log has them.
        settings: Selection, advantages, weights.
        train_tokens: Longest branch that is trained; 0 has no limit.
    """

    def __init__(self, batch: Groups, settings: AlgorithmSettings, train_tokens: int) -> None:
        self._settings, self._num_groups = settings, len(batch)
        self._sampled = [
            group for group in batch if group_has_signal(group, settings) or not settings.drop_constant_groups
        ]
        cuts = [[trim(sample, train_tokens) for sample in group] for group in self._sampled]
        self._num_cut = sum(cut.num_lost for group in cuts for cut in group)
        self._num_shortened = sum(cut.num_shortened for group in cuts for cut in group)
        self._num_rejected = 0
        self.groups = [[self._masked(cut.sample) for cut in group] for group in cuts]
        """What trains of them."""
        self.advantages: list[list[list[float]]] = []
        """[groups][members][calls]; set by `score`."""

    @property
    def members(self) -> list[Member]:
        """All that have a term."""
        return [
            (place, member)
            for place, group in enumerate(self.groups)
            for member, sample in enumerate(group)
            if sample.term_logprob
        ]

    @property
    def live(self) -> list[Member]:
        """Members with a gradient."""
        has_other = self._settings.kl in {"k2", "k3"} or self._settings.entropy_coefficient > 0
        return [member for member in self.members if has_other or any(self.advantage(member))]

    def sample(self, member: Member) -> Sample:
        """What trains of a member."""
        return self.groups[member[0]][member[1]]

    def advantage(self, member: Member) -> list[float]:
        """[calls] of a member."""
        return self.advantages[member[0]][member[1]]

    def reject(self, proximal: ByMember) -> dict[Member, Tensor]:
        """Lets go of the sequences outside the band of ratios; returns the log-probs of the terms that stay."""
        kept: dict[Member, Tensor] = {}
        for member, logprob in proximal.items():
            sample = self.sample(member)
            sampler = torch.tensor(sample.term_logprob, device=logprob.device)
            sequence = sequence_of_terms([sample], self._settings, logprob.device)
            accepted = is_accepted(logprob, sampler, sequence, self._settings).tolist()
            firsts = _first_terms(sample)
            is_kept = [call.num_terms == 0 or accepted[first] for call, first in zip(sample.calls, firsts, strict=True)]
            places = kept_terms(sample, is_kept)
            self._num_rejected += len(accepted) - len(places)
            self.groups[member[0]][member[1]] = keep_calls(sample, is_kept)
            kept[member] = logprob[torch.tensor(places, dtype=torch.long, device=logprob.device)]
        return kept

    def score(self, reference: ByMember) -> None:
        """Gives every call its advantage.

        Args:
            reference: Log-probs of the frozen policy, for a divergence in the reward.
        """
        for place, sampled in enumerate(self._sampled):
            rows = [self._divergence(reference, (place, member)) for member in range(len(sampled))]
            for member, shaped in enumerate(shaped_rewards(sampled, rows, self._settings)):
                self.groups[place][member] = _with_rewards(self.groups[place][member], shaped)
        self.advantages = batch_advantages(self.groups, self._settings)

    def weights(self, chosen: Iterable[int]) -> dict[Member, list[float]]:
        """[calls] weight of a term, for each member of the groups of one optimizer update."""
        members = [(place, member) for place in chosen for member in range(len(self.groups[place]))]
        layout = [[call.num_terms for call in self.sample(member).calls] for member in members]
        return dict(zip(members, term_weights(layout, self._settings), strict=True))

    def packs(self, members: Iterable[Member], budget: int) -> list[list[Member]]:
        """Members that are computed together."""
        rows: dict[int, list[int]] = {}
        for place, member in members:
            rows.setdefault(place, []).append(member)
        names = list(rows)
        packs = pack([[self.groups[place][member] for member in rows[place]] for place in names], budget)
        return [[(names[group], rows[names[group]][place]) for group, place in packed] for packed in packs]

    def figures(self) -> dict[str, float]:
        """What became of the batch."""
        num_terms = sum(call.num_terms for group in self.groups for sample in group for call in sample.calls)
        num_idle = self._num_groups - sum(any(map(any, group)) for group in self.advantages)
        penalties = [
            before.reward - after.reward
            for sampled, group in zip(self._sampled, self.groups, strict=True)
            for before, after in zip(sampled, group, strict=True)
        ]
        return {
            "trained_tokens": float(num_terms),
            "cut_tokens": float(self._num_cut),
            "shortened_context_tokens": float(self._num_shortened),
            "rejected_ratio": self._num_rejected / max(1, self._num_rejected + num_terms),
            "zero_advantage_ratio": num_idle / max(1, self._num_groups),
            "reward_penalty_mean": mean(penalties),
            **self._credit(),
        }

    def _credit(self) -> dict[str, float]:
        """How many groups wanted rewards of single calls and had to do without."""
        if self._settings.credit == "episode":
            return {}
        return {"no_call_rewards_ratio": mean(float(not has_call_rewards(group)) for group in self._sampled)}

    def _masked(self, sample: Sample) -> Sample:
        if self._settings.overlong != "mask":
            return sample
        return keep_calls(sample, [not call.is_truncated for call in sample.calls])

    def _divergence(self, reference: ByMember, member: Member) -> list[float]:
        """[calls] sum over the terms of log sampler - log reference."""
        sample = self.sample(member)
        if member not in reference:
            return [0.0] * len(sample.calls)
        gap = torch.tensor(sample.term_logprob, dtype=torch.float64) - reference[member].double().cpu()
        return [float(part.sum()) for part in gap.split([call.num_terms for call in sample.calls])]


def _with_rewards(sample: Sample, shaped: Shaped) -> Sample:
    calls = tuple(
        call.model_copy(update={"reward": reward}) for call, reward in zip(sample.calls, shaped.calls, strict=True)
    )
    return sample.model_copy(update={"reward": shaped.episode, "agent_rewards": shaped.agents, "calls": calls})


def _first_terms(sample: Sample) -> list[int]:
    """[calls] place of each call's first term."""
    firsts = [0]
    for call in sample.calls:
        firsts.append(firsts[-1] + call.num_terms)
    return firsts[:-1]
