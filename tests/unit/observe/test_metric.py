import pytest

from agentjet.observe.metric import Registry


def test_a_snapshot_is_flat_and_sorted():
    metrics = Registry()
    metrics.counter("num_calls").add()
    metrics.counter("num_calls").add(2)
    metrics.gauge("queue_tokens").set(7)
    metrics.gauge("lag_seconds", lambda: 0.5)
    for value in range(1, 101):
        metrics.summary("call_seconds").observe(value)
    snapshot = metrics.snapshot()
    assert snapshot["num_calls"] == 3
    assert snapshot["queue_tokens"] == 7
    assert snapshot["lag_seconds"] == 0.5
    assert snapshot["call_seconds_count"] == 100 and snapshot["call_seconds_sum"] == 5050
    assert snapshot["call_seconds_p50"] == 50 and snapshot["call_seconds_p99"] == 99
    assert snapshot["call_seconds_max"] == 100


@pytest.mark.parametrize("name", ["calls", "Lag_seconds", "lag_percent", ""])
def test_a_name_without_a_unit_is_refused(name: str):
    with pytest.raises(ValueError, match="no unit"):
        Registry().counter(name)


def test_a_name_has_one_kind():
    metrics = Registry()
    metrics.counter("num_calls")
    with pytest.raises(ValueError, match="is a Counter"):
        metrics.gauge("num_calls")


def test_a_counter_never_goes_down():
    with pytest.raises(ValueError, match="go down"):
        Registry().counter("num_calls").add(-1)


def test_non_finite_observations_do_not_spoil_the_sum():
    summary = Registry().summary("loss_ratio")
    summary.observe(float("nan"))
    summary.observe(2.0)
    assert (summary.count, summary.sum, summary.quantile(0.5)) == (2, 2.0, 2.0)


def test_an_empty_summary_is_zero_and_a_block_can_be_timed():
    summary = Registry().summary("step_seconds")
    assert summary.quantile(0.99) == 0.0
    with summary.time():
        pass
    assert summary.count == 1 and 0 <= summary.sum < 1
