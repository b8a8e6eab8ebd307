"""Binning: whatever the log holds is in the bins, no more and no less."""

from __future__ import annotations

import numpy as np
import pytest

from reports.series import BINS, CDF_POINTS, cdf, integrate, over_time
from sim.metrics import Distribution
from tests.reports.helpers import run, tokens


def test_ramp_is_integrated_exactly() -> None:
    edges = np.array([0.0, 1.0, 2.0, 3.0, 4.0])
    rows = (np.array([0.5, 3.0]), np.array([2.5, 3.5]), np.array([0.0, 7.0]), np.array([4.0, 7.0]))
    assert integrate(edges, *rows) == pytest.approx([0.25, 2.0, 1.75, 3.5])


def test_row_without_duration_adds_nothing() -> None:
    one = np.array([1.0])
    assert integrate(np.array([0.0, 1.0, 2.0]), one, one, one, one).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("replicas", [1, 3])
def test_bins_hold_all_of_the_log(replicas: int) -> None:
    result = run(300, 25.0, replicas=replicas, kv_blocks=900)
    series, summary, steps = over_time(result), result.summary(), result.steps
    width = series.edges_s[1]
    assert len(series.running) == BINS <= 600
    assert series.output_tokens_per_s.sum() * width == pytest.approx(summary["total_output_tokens"])
    assert series.prefill_tokens_per_s.sum() * width == pytest.approx(tokens(result, "prefill_tokens"))
    busy_s = float((steps["end_s"] - steps["start_s"]).sum())
    assert (series.prefill_share + series.decode_share).sum() * width * replicas == pytest.approx(busy_s)
    lasted = (steps["end_s"] - steps["start_s"]).to_numpy()
    assert series.running.sum() * width == pytest.approx(np.dot(lasted, steps["running"].to_numpy()))
    assert series.waiting.mean() == pytest.approx(summary["mean_queue_size"])
    assert series.preempted.sum() == summary["preemptions"] > 0
    assert series.kv_peak.max() == pytest.approx(steps["kv_blocks_end"].max() / result.deployment.pools[0].kv_blocks)
    assert (series.kv_peak >= series.kv - 1e-9).all()
    mean_fraction = series.kv.mean()
    assert mean_fraction == pytest.approx(
        summary["kv_mean_fraction"], rel=0.01
    )  # one counts the step after the last token


def test_cdf_is_reduced_and_keeps_percentiles() -> None:
    values = np.random.default_rng(1).lognormal(0.0, 1.0, 200_000)
    distribution = Distribution.of(values)
    x, y = cdf(distribution)
    assert len(x) <= CDF_POINTS + 1
    assert (x[0], x[-1], y[0], y[-1]) == (values.min(), values.max(), 0.0, 100.0)
    for q in (50, 90, 99, 99.9):
        assert np.interp(q, y, x) == pytest.approx(distribution.percentile(q), rel=0.02)


def test_cdf_of_few_and_of_none() -> None:
    assert cdf(Distribution.of(np.array([2.0])))[1].tolist() == [0.0, 100.0]
    assert len(cdf(Distribution.of(np.array([])))[0]) == 0
