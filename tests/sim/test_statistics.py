"""Intervals hold what they promise, on data whose mean is known; the warm-up is found where it is."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from sim.statistics import Floats, Interval, lag_1, section_interval, sections_of, t_interval, warm_up

RUNS = 400


def sectioned(values: Floats, figure: Callable[[Floats], float], *, tail: bool = False) -> Interval:
    cut = {n: np.array([figure(s) for s in np.array_split(values, n)]) for n in sections_of(len(values))}
    return section_interval(figure(values), cut, tail=tail)


def mean(values: Floats) -> float:
    return float(np.mean(values))


def p99(values: Floats) -> float:
    return float(np.quantile(values, 0.99))


def held(interval: Interval, truth: float) -> bool:
    assert interval.half is not None
    return abs(interval.mean - truth) <= interval.half


def autoregression(rng: np.random.Generator, count: int, phi: float) -> Floats:
    """Mean 0, correlation `phi` between neighbours, begun in its stationary state."""
    from scipy.signal import lfilter

    noise = rng.normal(size=count)
    noise[0] /= math.sqrt(1 - phi**2)
    return np.asarray(lfilter([1], [1, -phi], noise))


def waits(rng: np.random.Generator, count: int, load: float) -> Floats:
    """Times in an M/M/1 system (service 1 s) of consecutive customers, begun in the stationary state."""
    gaps, service = rng.exponential(1 / load, count), rng.exponential(1.0, count)
    # Lindley: W[i+1] = max(0, W[i] + S[i] - A[i]), as the walk less its running minimum
    begun = 0.0 if rng.random() > load else rng.exponential(1 / (1 - load))
    walk = np.concatenate([[begun], begun + np.cumsum(service[:-1] - gaps[:-1])])
    return np.asarray(walk - np.minimum(np.minimum.accumulate(walk), 0.0) + service)


@pytest.mark.parametrize("count", [2, 5, 20])
def test_t_intervals_hold_the_mean_as_often_as_they_say(count: int) -> None:
    rng = np.random.default_rng(1)
    share = np.mean([held(t_interval(rng.normal(3.0, 2.0, count)), 3.0) for _ in range(2000)])
    assert share == pytest.approx(0.95, abs=0.02)


@pytest.mark.parametrize(("phi", "count"), [(0.0, 2000), (0.5, 2000), (0.9, 5000), (0.98, 20000)])
def test_sections_of_an_autoregression(phi: float, count: int) -> None:
    rng = np.random.default_rng(2)
    share = np.mean([held(sectioned(autoregression(rng, count, phi), mean), 0.0) for _ in range(RUNS)])
    assert 0.90 <= share <= 0.99
    if phi:  # where independence is assumed instead, far fewer hold
        naive = np.mean([held(t_interval(autoregression(rng, count, phi)), 0.0) for _ in range(RUNS)])
        assert naive < share - 0.1


@pytest.mark.parametrize(("load", "count"), [(0.5, 5000), (0.8, 40000)])
def test_sections_of_a_queue(load: float, count: int) -> None:
    rng = np.random.default_rng(3)
    share = np.mean([held(sectioned(waits(rng, count, load), mean), 1 / (1 - load)) for _ in range(RUNS)])
    assert 0.88 <= share <= 0.99


@pytest.mark.parametrize(("count", "load"), [(2000, 0.0), (5000, 0.5), (40000, 0.8)])
def test_sections_of_a_percentile(count: int, load: float) -> None:
    """p99 of exponential values: alone, and of the times in a queue, which are exponential too."""
    rng, truth = np.random.default_rng(4), -math.log(0.01) / (1 - load)
    made = [waits(rng, count, load) if load else rng.exponential(size=count) for _ in range(RUNS)]
    share = np.mean([held(sectioned(values, p99, tail=True), truth) for values in made])
    assert 0.88 <= share <= 0.99


def test_without_enough_values_there_is_no_width() -> None:
    assert sections_of(124) == ()
    assert section_interval(3.0, {}) == Interval(3.0, None)
    assert t_interval(np.array([3.0])) == Interval(3.0, None)
    assert not Interval(3.0, None).excludes_zero


def test_equal_sections_have_no_width_and_no_correlation() -> None:
    assert lag_1(np.ones(8)) == 0.0
    assert section_interval(1.0, {8: np.ones(8)}) == Interval(1.0, 0.0)


def test_the_warm_up_is_found() -> None:
    rng = np.random.default_rng(5)
    ramp = np.minimum(np.arange(2000) / 300, 1.0) * 10 + rng.normal(size=2000)
    found = warm_up(ramp)
    assert found is not None
    assert 150 <= found <= 450


def test_a_steady_run_has_hardly_any_and_a_growing_one_never_settles() -> None:
    rng = np.random.default_rng(6)
    found = [warm_up(rng.normal(size=2000)) for _ in range(50)]
    assert np.median([2000 if f is None else f for f in found]) <= 400
    assert warm_up(np.arange(2000.0) + rng.normal(size=2000)) is None
    assert warm_up(np.ones(10)) is None
