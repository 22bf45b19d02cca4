"""Figures of a batch that need no forward pass: rewards, lengths, staleness."""

from collections.abc import Sequence

from agentjet.algorithm.advantage import group_has_signal
from agentjet.algorithm.metric import mean
from agentjet.schemas.ids import Version
from agentjet.schemas.sample import Sample, SampledCall


def batch_metrics(batch: Sequence[Sequence[Sample]], policy_step: int) -> dict[str, float]:
    """The figures by name; a metric that clients report is `episode/<name>`, the mean over those that report it."""
    samples = [sample for group in batch for sample in group]
    calls = [call for sample in samples for call in sample.calls]
    lags = [lag for call in calls for lag in _staleness(call, policy_step)]
    row_tokens = sum(sample.report.num_row_tokens for sample in samples)
    tree_tokens = sum(sample.report.num_tree_tokens for sample in samples)
    names = sorted({name for sample in samples for name in sample.metrics})
    return {
        "groups": float(len(batch)),
        "episodes": float(len(samples)),
        "calls": float(len(calls)),
        "trained_tokens": float(sum(call.num_terms for call in calls)),
        "reward_mean": mean(sample.reward for sample in samples),
        "zero_advantage_ratio": mean(float(not group_has_signal(group)) for group in batch),
        "truncation_ratio": mean(float(call.is_truncated) for call in calls),
        "row_tokens": float(row_tokens),
        "tree_tokens": float(tree_tokens),
        "staleness_mean": mean(lags),
        "staleness_max": max(lags, default=0.0),
        **{
            f"episode/{name}": mean(sample.metrics[name] for sample in samples if name in sample.metrics)
            for name in names
        },
    }


def _staleness(call: SampledCall, policy_step: int) -> list[float]:
    """Steps between the weights that drew each term and those that learn from it."""
    edges = [*call.version_starts[1:], call.num_terms]
    lags: list[float] = []
    for version, start, stop in zip(call.versions, call.version_starts, edges, strict=False):
        lags += [float(policy_step - Version.parse(version).step)] * max(0, stop - start)
    return lags
