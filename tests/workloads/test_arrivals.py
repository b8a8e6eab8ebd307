"""Arrival processes: rates, burstiness, shapes, the same beginning for every n, and every way to misspell them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servecast.errors import ServecastError
from workloads.arrivals import ARRIVALS, weibull_shape
from workloads.generate import stream
from workloads.kinds import call_kind, check_kind
from workloads.trace import Floats

STEPS = {"kind": "steps", "rates": [["10s", 5], ["5s", 0], ["1s", 50]]}
DIURNAL = {"kind": "diurnal", "rate": 10, "peak_to_mean": 3.5, "period": "1h"}
SPIKES = {"kind": "spikes", "rate": 1, "spike_rate": 20, "every": "1min", "length": "6s"}


def times(spec: dict[str, Any], n: int = 200_000, seed: int = 1) -> Floats:
    assert check_kind(ARRIVALS, spec, "x") == []
    return call_kind(ARRIVALS, spec, n, stream(seed, "test"))


@pytest.mark.parametrize("kind", ["gamma", "weibull"])
@pytest.mark.parametrize("cv", [0.05, 0.5, 1.0, 3.0])
def test_gaps_have_the_stated_mean_and_cv(kind: str, cv: float) -> None:
    gaps = np.diff(times({"kind": kind, "rate": 5, "cv": cv}, 400_000), prepend=0)
    assert gaps.mean() == pytest.approx(0.2, rel=0.02)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.02)


@pytest.mark.parametrize("cv", [0.01, 0.3, 1.0, 2.5, 20.0, 100.0])
def test_weibull_shape_inverts_the_cv(cv: float) -> None:
    k = weibull_shape(cv)
    found = math.sqrt(math.expm1(math.lgamma(1 + 2 / k) - 2 * math.lgamma(1 + 1 / k)))
    assert found == pytest.approx(cv, rel=1e-6)


def test_cv_1_is_poisson() -> None:
    assert weibull_shape(1.0) == pytest.approx(1, rel=1e-9)
    gaps = np.diff(times({"kind": "gamma", "rate": 2, "cv": 1}))
    assert np.mean(gaps > 0.5) == pytest.approx(math.exp(-1), rel=0.02)


def test_steps_keep_their_rates_and_begin_again() -> None:
    count = np.histogram(times(STEPS, 100_000) % 16, 16, range=(0, 16))[0]
    cycles = 100_000 / 100
    assert count[:10] / cycles == pytest.approx(5, rel=0.1)
    assert count[10:15].tolist() == [0] * 5
    assert count[15] / cycles == pytest.approx(50, rel=0.02)


def test_steps_without_repeat_go_on_with_the_last_rate() -> None:
    found = times({**STEPS, "repeat": False}, 5000)
    assert np.sum(found < 10) == pytest.approx(50, abs=25)
    assert found[-1] == pytest.approx(15 + 4950 / 50, rel=0.05)
    assert not ((found > 10) & (found < 15)).any()


def test_one_step_is_poisson_with_its_rate() -> None:
    gaps = np.diff(times({"kind": "steps", "rates": [["7s", 3]]}), prepend=0)
    assert gaps.mean() == pytest.approx(1 / 3, rel=0.02)
    assert gaps.std() == pytest.approx(1 / 3, rel=0.02)


@pytest.mark.parametrize(("peak", "start"), [(1.0, "0s"), (1.5, "0s"), (3.5, "0s"), (3.5, "30min"), (8.0, "90min")])
def test_diurnal_has_its_mean_and_its_peak_where_it_belongs(peak: float, start: str) -> None:
    found = times({**DIURNAL, "peak_to_mean": peak, "start": start}, 720_000)
    hours = int(found[-1] // 3600)
    count = np.histogram(found[found < hours * 3600] % 3600, 60)[0] / hours / 60
    assert count.mean() == pytest.approx(10, rel=0.02)
    assert count.max() == pytest.approx(10 * peak, rel=0.1)
    if peak > 1:
        middle = {"0s": 30, "30min": 0, "90min": 0}[start]
        assert min(abs(count.argmax() - middle), 60 - abs(count.argmax() - middle)) <= 6


def test_spikes_come_at_the_end_of_each_round() -> None:
    count = np.histogram(times(SPIKES, 100_000) % 60, 10, range=(0, 60))[0]
    assert count[:9].sum() / count.sum() == pytest.approx(54 / 174, rel=0.05)
    assert count[9] / count.sum() == pytest.approx(120 / 174, rel=0.02)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(
        [
            STEPS,
            {**STEPS, "repeat": False},
            DIURNAL,
            SPIKES,
            {"kind": "gamma", "rate": 3, "cv": 4},
            {"kind": "weibull", "rate": 3, "cv": 4},
        ]
    ),
    st.integers(0, 2**40),
    st.integers(0, 60),
    st.integers(0, 60),
)
def test_a_longer_run_begins_the_same_and_time_never_turns_back(
    spec: dict[str, Any], seed: int, n: int, more: int
) -> None:
    short, long = (times(spec, size, seed) for size in (n, n + more))
    assert short.tobytes() == long[:n].tobytes()
    assert long.dtype == np.float64
    assert (np.diff(long, prepend=0) >= 0).all()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(1e-3, 1e4).map(lambda s: f"{s:.6f}s"), st.one_of(st.just(0.0), st.floats(1e-3, 1e3))),
        min_size=1,
        max_size=6,
    )
)
def test_any_steps_with_a_rate_give_n_finite_times_outside_the_pauses(rates: list[tuple[str, float]]) -> None:
    spec = {"kind": "steps", "rates": [list(pair) for pair in rates]}
    if not any(rate for _, rate in rates):
        assert "rates are all 0" in check_kind(ARRIVALS, spec, "x")[0]
        return
    found = times(spec, 50)
    assert np.isfinite(found).all()
    lengths = np.array([float(text[:-1]) for text, _ in rates])
    begins, period = np.cumsum(lengths) - lengths, lengths.sum()
    for i, (_, rate) in enumerate(rates):
        if rate == 0:
            place = found % period
            inside = (place > begins[i] + 1e-6 * period) & (place < begins[i] + lengths[i] - 1e-6 * period)
            assert not inside.any()


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"kind": "gamma", "rate": 1}, "x.cv: missing; gamma takes rate, cv"),
        ({"kind": "gamma", "rate": 1, "cv": 0}, "x.cv: 0 is not a number from 0.01 to 100"),
        ({"kind": "weibull", "rate": 1, "cv": "1"}, "x.cv: '1' is not"),
        ({"kind": "gama", "rate": 1, "cv": 1}, "did you mean 'gamma'?"),
        ({"kind": "steps"}, "x.rates: missing"),
        ({"kind": "steps", "rates": 5}, "x.rates: 5 is not a list of [duration, rate] pairs, such as [[10min, 5]"),
        ({"kind": "steps", "rates": []}, "x.rates: [] is not a list"),
        ({"kind": "steps", "rates": "10s"}, "x.rates: '10s' is not a list"),
        ({"kind": "steps", "rates": [["10s", 5], ["10s"]]}, "x.rates.1: ['10s'] is not a [duration, rate] pair"),
        ({"kind": "steps", "rates": [[10, 5]]}, "x.rates.0.0: 10 is not a duration such as 500ms"),
        ({"kind": "steps", "rates": [["0s", 5]]}, "x.rates.0.0: '0s' is no time; give a duration above 0"),
        ({"kind": "steps", "rates": [["10s", -1]]}, "x.rates.0.1: -1 is not a number of requests per second from 0"),
        ({"kind": "steps", "rates": [["10s", True]]}, "x.rates.0.1: True is not"),
        ({"kind": "steps", "rates": [["1s", 0], ["2s", 0]]}, "x: rates are all 0"),
        ({"kind": "steps", "rates": [["1s", 1], ["2s", 0]], "repeat": False}, "x: the last rate is 0"),
        ({"kind": "steps", "rates": [["1s", 1]], "repeat": "no"}, "x.repeat: 'no' is neither true nor false"),
        ({"kind": "steps", "rates": [["1s", 1]], "repeat": 1}, "x.repeat: 1 is neither true nor false"),
        ({**DIURNAL, "peak_to_mean": 0.5}, "x.peak_to_mean: 0.5 is not a number from 1 to 20"),
        (
            {**DIURNAL, "period": 86400},
            "x.period: 86400 is not a duration such as 500ms, 1.5s, 10min or 2h; write 86400s",
        ),
        ({**DIURNAL, "period": "1 day"}, "x.period: '1 day' is not a duration"),
        ({**DIURNAL, "period": "-1h"}, "x.period: '-1h' is negative"),
        ({**DIURNAL, "period": "1e9d"}, "x.period: '1e9d' is above 1000000000s"),
        ({**SPIKES, "length": "60s"}, "x: length 60 s is not below every 60 s"),
        ({**SPIKES, "spike_rate": 0}, "x.spike_rate: 0 is not"),
    ],
)
def test_misspelt(spec: dict[str, Any], said: str) -> None:
    assert said in "\n".join(check_kind(ARRIVALS, spec, "x"))


def test_every_problem_of_a_list_is_named_and_many_are_counted() -> None:
    problems = check_kind(ARRIVALS, {"kind": "steps", "rates": [["1", "a"]] * 10, "repeat": 3}, "arrivals")
    assert [problem.split(":")[0] for problem in problems] == [
        *(f"arrivals.rates.{i}.{j}" for i, j in ((0, 0), (0, 1), (1, 0), (1, 1), (2, 0))),
        "arrivals.rates",
        "arrivals.repeat",
    ]
    assert "15 more like these" in problems[5]


def test_defaults_stay_and_null_takes_them() -> None:
    assert check_kind(ARRIVALS, {"kind": "diurnal", "rate": 1, "peak_to_mean": 2, "period": None}, "x") == []
    day = times({"kind": "diurnal", "rate": 1, "peak_to_mean": 2}, 300_000)
    count = np.histogram(day[day < 3 * 86_400] % 86_400, 24)[0]
    assert 10 <= count.argmax() <= 13


def test_times_beyond_the_limit_are_an_error() -> None:
    from workloads.generate import generate

    slow = {"kind": "steps", "rates": [["1e9s", 1e-9]]}
    with pytest.raises(ServecastError, match="arrival_s"):
        generate(200, 1, slow, ({"kind": "fixed", "tokens": 1},) * 2)
