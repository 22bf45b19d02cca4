import pytest

from agentjet.schemas.sample import MergeReport
from agentjet.training.batch_metric import batch_metrics


def with_reports(batch, *reports: MergeReport):
    return [[sample.model_copy(update={"report": report}) for sample, report in zip(batch[0], reports, strict=False)]]


def test_merging_is_reported_over_the_whole_batch(make_batch):
    forked = MergeReport(
        num_calls=4, num_branches=2, num_row_tokens=100, num_tree_tokens=40, forks={"first": 1, "history_edited": 1}
    )
    linear = MergeReport(
        num_calls=6, num_branches=1, num_row_tokens=200, num_tree_tokens=20, forks={"first": 1}, num_drifted=2
    )
    found = batch_metrics(with_reports(make_batch(0, groups=1), forked, linear), policy_step=3)
    assert found["merge_compression_ratio"] == pytest.approx(10 / 3)
    assert (found["branches"], found["row_tokens"], found["tree_tokens"]) == (3.0, 300.0, 60.0)
    assert (found["fork/first"], found["fork/history_edited"], found["drifted_calls"]) == (2.0, 1.0, 2.0)
    assert "fork/template_rewrote" not in found


def test_an_empty_batch_has_figures_all_the_same():
    assert batch_metrics([], policy_step=0)["merge_compression_ratio"] == 0.0


def test_rewards_of_single_calls_have_a_mean_where_there_are_any(make_batch):
    (first, *_) = make_batch(0, groups=1)[0]
    calls = tuple(call.model_copy(update={"reward": 0.5 + place}) for place, call in enumerate(first.calls))
    found = batch_metrics([[first.model_copy(update={"calls": calls}), first]], policy_step=3)
    assert found["call_reward_mean"] == 0.5 + (len(calls) - 1) / 2
    assert "call_reward_mean" not in batch_metrics([[first]], policy_step=3)


def test_t7_two_interleaved_agents_compress_by_two():
    report = MergeReport(num_calls=4, num_branches=2, num_row_tokens=16, num_tree_tokens=9)
    assert report.compression_ratio == 2.0
