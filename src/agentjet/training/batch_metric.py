"""Figures of a step: of its samples as they came (rewards, lengths, staleness), and of the work they were."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from agentjet.algorithm.metric import TermSums, mean
from agentjet.schemas.ids import Version
from agentjet.schemas.sample import MergeReport, Sample, SampledCall
from agentjet.training.cost import Cost


@dataclass(slots=True)
class Work:
    """Figures that build up while a step is computed."""

    sums: TermSums = field(default_factory=TermSums)
    num_tree_tokens: int = 0
    num_row_tokens: int = 0
    num_packs: int = 0
    cost: Cost = field(default_factory=Cost)

    def add(self, other: "Work") -> None:
        """Takes in what another rank computed."""
        self.sums.add(other.sums)
        self.num_tree_tokens += other.num_tree_tokens
        self.num_row_tokens += other.num_row_tokens
        self.num_packs += other.num_packs
        self.cost.add(other.cost)

    def figures(self, seconds: float) -> dict[str, float]:
        """Means over the terms, and the computed forests; nothing was computed where no sample had a gradient."""
        figures = {
            **self.sums.means(),
            **self.cost.figures(),
            "computed_tokens": float(self.num_tree_tokens),
            "saved_tokens": float(self.num_row_tokens - self.num_tree_tokens),
            "packs": float(self.num_packs),
            "train_seconds": seconds,
            "tokens_per_second": self.num_tree_tokens / seconds,
        }
        if self.num_tree_tokens:
            figures["merge_token_ratio"] = self.num_row_tokens / self.num_tree_tokens
        return figures


def batch_metrics(batch: Sequence[Sequence[Sample]], policy_step: int) -> dict[str, float]:
    """The figures by name; a metric that clients report is `episode/<name>`, the mean over those that report it."""
    samples = [sample for group in batch for sample in group]
    calls = [call for sample in samples for call in sample.calls]
    lags = [lag for call in calls for lag in _staleness(call, policy_step)]
    own = [call.reward for call in calls if call.reward is not None]
    names = sorted({name for sample in samples for name in sample.metrics})
    return {
        "groups": float(len(batch)),
        "episodes": float(len(samples)),
        "calls": float(len(calls)),
        "sampled_tokens": float(sum(call.num_terms for call in calls)),
        "reward_mean": mean(sample.reward for sample in samples),
        **({"call_reward_mean": mean(own)} if own else {}),
        "truncation_ratio": mean(float(call.is_truncated) for call in calls),
        **_merging([sample.report for sample in samples]),
        "staleness_mean": mean(lags),
        "staleness_max": max(lags, default=0.0),
        **{
            f"episode/{name}": mean(sample.metrics[name] for sample in samples if name in sample.metrics)
            for name in names
        },
    }


def _merging(reports: Sequence[MergeReport]) -> dict[str, float]:
    """What merging saved, and by which cause histories forked: `fork/<cause>` counts calls."""
    branches = sum(report.num_branches for report in reports)
    forks = sum((Counter(report.forks) for report in reports), Counter[str]())
    return {
        "row_tokens": float(sum(report.num_row_tokens for report in reports)),
        "tree_tokens": float(sum(report.num_tree_tokens for report in reports)),
        "branches": float(branches),
        "merge_compression_ratio": sum(report.num_calls for report in reports) / max(1, branches),
        "drifted_calls": float(sum(report.num_drifted for report in reports)),
        **{f"fork/{cause}": float(count) for cause, count in sorted(forks.items())},
    }


def _staleness(call: SampledCall, policy_step: int) -> list[float]:
    """Steps between the weights that drew each term and those that learn from it."""
    edges = [*call.version_starts[1:], call.num_terms]
    lags: list[float] = []
    for version, start, stop in zip(call.versions, call.version_starts, edges, strict=False):
        lags += [float(policy_step - Version.parse(version).step)] * max(0, stop - start)
    return lags
