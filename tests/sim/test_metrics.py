"""Metrics mean what `sim.metrics` says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim import metrics
from sim.deployment import Deployment, PoolFacts
from sim.metrics import Distribution
from sim.result import Result
from sim.steplog import PROMPT_TOO_LONG, Log

NAN = float("nan")
DEPLOYMENT = Deployment((PoolFacts("gpu", 1, 1, 10**9, 100, 16, 1000),))


def result(rows, gaps=(), slo=(), open_loop=True, steps=()):
    """A Result of (id, arrival, scheduled, first token, finish, prompt, output, outcome, samples if not one) rows."""
    log = Log()
    for id, arrival, scheduled, first, finish, prompt, output, outcome, *several in rows:
        times, samples = (arrival, 0, 0, arrival, arrival, scheduled, first, finish), several[0] if several else 1
        log.requests.extend(log.requests.pack(id, 0, *times, prompt, 0, output, output, 0, 0, 0, samples, outcome))
    for step in steps:
        log.steps.extend(log.steps.pack(*step))
    for gap in gaps:
        log.gap(0.0, gap, 1)
    return Result(log, DEPLOYMENT, dict(slo), {}, open_loop=open_loop, complete=True)


THREE = [
    (0, 0.0, 0.0, 0.2, 0.4, 100, 4, 0),
    (1, 0.5, 0.5, 0.8, 0.8, 50, 1, 0),
    (2, 1.0, 1.0, 1.6, 1.7, 200, 3, 0),
]


def test_three_requests_as_vllm_bench_serve_counts_them():
    summary = result(THREE, [0.05, 0.05, 0.1, 0.04, 0.06], {"ttft": 0.5, "tpot": 0.05}).summary()
    expected = {
        "duration": 1.7, "completed": 3, "total_input_tokens": 350, "total_output_tokens": 8,
        "request_throughput": 1.7647, "request_goodput": 0.5882, "output_throughput": 4.7059,
        "total_token_throughput": 210.5882, "mean_ttft_ms": 366.6667, "median_ttft_ms": 300.0, "std_ttft_ms": 169.9673,
        "p99_ttft_ms": 594.0, "mean_tpot_ms": 58.3333, "std_tpot_ms": 8.3333, "p99_tpot_ms": 66.5, "mean_itl_ms": 60.0,
        "median_itl_ms": 50.0, "p99_itl_ms": 98.4, "mean_e2el_ms": 466.6667, "p99_e2el_ms": 694.0,
        "max_concurrent_requests": 0, "tpot_undefined": 1,
    }  # fmt: skip
    assert {key: summary[key] for key in expected} == pytest.approx(expected, abs=1e-4)


def test_the_samples_of_a_prompt_are_one_request():
    summary = result([(0, 0.0, 0.0, 0.2, 0.5, 100, 12, 0, 3), (1, 0.0, 0.0, 0.2, 0.3, 100, 2, 0, 2)]).summary()
    expected = {
        "completed": 2, "total_input_tokens": 200, "total_output_tokens": 14, "mean_ttft_ms": 200.0,
        "mean_e2el_ms": 400.0, "mean_tpot_ms": 100.0, "tpot_undefined": 1,
    }  # fmt: skip
    assert {key: summary[key] for key in expected} == pytest.approx(expected)


def test_an_undefined_tpot_meets_a_limit_and_limits_are_inclusive():
    assert result(THREE, slo={"tpot": 1e-9}).summary()["slo_attainment"] == pytest.approx(1 / 3)
    assert result(THREE[1:2], slo={"ttft": 0.8 - 0.5}).summary()["slo_attainment"] == 1


def test_nothing_finished_gives_no_number_that_is_not_one():
    summary = result([(0, 0.0, NAN, NAN, NAN, 100, 4, PROMPT_TOO_LONG)], slo={"ttft": 1.0}).summary()
    assert summary["mean_ttft_ms"] is None
    assert summary["request_throughput"] is None
    assert (summary["completed"], summary["rejected"], summary["slo_attainment"]) == (0, 1, 0)
    assert summary["rejected_reasons"] == {"prompt_too_long": 1}
    assert all(value == value for value in summary.values() if isinstance(value, float))


@given(
    st.lists(st.tuples(st.floats(0, 100), st.integers(1, 9)), min_size=1, max_size=30),
    st.sampled_from([0, 1, 50, 90, 99, 100]),
)
def test_weighted_percentiles_are_numpys(pairs, q):
    values, weights = (np.array(column, dtype=float) for column in zip(*pairs, strict=True))
    expected = np.percentile(np.repeat(values, weights.astype(int)), q)
    assert Distribution.of(values, weights).percentile(q) == pytest.approx(expected, rel=1e-12, abs=1e-12)


def steps(rows):
    """Step columns of (start, end, steps, first step, gaps) rows."""
    names = ("start_s", "end_s", "steps", "first_step_s", "gaps")
    return {name: np.array(column, dtype=float) for name, column in zip(names, zip(*rows, strict=True), strict=True)}


def test_token_gaps_come_from_the_steps_of_a_run():
    """Four steps of 1, 1.5, 2, 2.5 s with 3 tokens each, one of 0.5 s with 2, and a gap of 9 s."""
    got = metrics.itl(
        [steps([(0, 7, 4, 1, 3), (7, 8, 1, 1, 0), (8, 8.5, 1, 0.5, 2)])],
        {"since_s": np.array([1.0]), "end_s": np.array([10.0]), "tokens": np.ones(1)},
    )
    assert got.count == 15
    assert got.values.tolist() == [0.5, 1.0, 1.5, 2.0, 2.5, 9.0]
    assert np.diff(got.cumulative, prepend=0).tolist() == [2, 3, 3, 3, 3, 1]


def test_very_long_logs_are_summed_up_in_pieces_without_losing_a_token(monkeypatch):
    rows = [(0, 1000 * (1 + 0.5), 1000, 1.0, 3), (1500, 1501, 1, 1.0, 7)]
    none = {"since_s": np.array([]), "end_s": np.array([]), "tokens": np.array([])}
    exact = metrics.itl([steps(rows)], none)
    monkeypatch.setattr(metrics, "MANY_STEPS", 100)
    short = metrics.itl([steps(rows)], none)
    assert 90 < len(short.values) <= 101
    assert short.count == exact.count == 3007
    for q in (10, 50, 90, 99):
        assert short.percentile(q) == pytest.approx(exact.percentile(q), rel=0.01)


def arrivals(load, n=4000, seed=0):
    """An M/D/1 queue with service 1 s: request rows under that load."""
    times = np.cumsum(np.random.default_rng(seed).exponential(1 / load, n))
    end, rows = 0.0, []
    for i, t in enumerate(times):
        start = max(t, end)
        end = start + 1.0
        rows.append((i, t, start, end, end, 1, 1, 0))
    return rows


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("load", "saturated"), [(0.5, False), (0.8, False), (0.95, False), (1.1, True), (2.0, True)])
def test_saturation_is_a_growing_backlog(load, saturated, seed):
    assert result(arrivals(load, seed=seed)).summary()["saturated"] is saturated


def test_saturation_does_not_apply_where_it_cannot():
    at_once = [(i, 0.0, i, i + 1.0, i + 1.0, 1, 1, 0) for i in range(50)]
    assert result(at_once).saturation.saturated is None
    assert "at once" in result(at_once).saturation.why
    assert "closed loop" in result(THREE, open_loop=False).saturation.why
    slow = [(i, i * 0.1, i * 0.1, 50.0, 60.0, 1, 2, 0) for i in range(50)]
    assert "undecided" in result(slow).saturation.why
