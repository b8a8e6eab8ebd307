"""When requests arrive, when no trace says it: one function a process and one line in `ARRIVALS`.

A function takes n, a random generator and keyword-only parameters, whose types and ranges are their annotations
(`workloads.kinds` reads them, so a scenario's parameters are checked before the call). It returns float64[n] seconds,
ascending, from time 0, the start of the workload, of which the first k are the same for every n >= k. It knows nothing
of token lengths.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from servecast.errors import ServecastError
from workloads.kinds import Registry, Spec, parameters
from workloads.parameters import Cv, Duration, DurationOrNone, Flag, Peak, PerSecond, RateSteps
from workloads.trace import Floats

DAY_S = 86_400.0


def poisson(n: int, rng: np.random.Generator, *, rate: PerSecond) -> Floats:
    """Independent exponential gaps. The first gap is drawn too, so the first arrival is after 0."""
    return np.cumsum(rng.exponential(1.0 / rate, n))


def constant(n: int, rng: np.random.Generator, *, rate: PerSecond) -> Floats:
    """One request every 1/rate seconds, the first at 0."""
    return np.arange(n) / rate


def all_at_once(n: int, rng: np.random.Generator) -> Floats:
    """Everything at time 0: an offline batch."""
    return np.zeros(n)


def gamma(n: int, rng: np.random.Generator, *, rate: PerSecond, cv: Cv) -> Floats:
    """Independent Gamma gaps with mean 1/rate and coefficient of variation cv: burstier than Poisson above 1, more
    even below. vLLM's `--burstiness b` is cv = 1/sqrt(b) (its benchmark also stretches the times to a fixed end; this
    does not). The first gap is drawn too.
    """
    shape = 1.0 / (cv * cv)
    return np.cumsum(rng.gamma(shape, 1.0 / (rate * shape), n))


def weibull(n: int, rng: np.random.Generator, *, rate: PerSecond, cv: Cv) -> Floats:
    """Independent Weibull gaps with mean 1/rate and coefficient of variation cv. The first gap is drawn too."""
    shape = weibull_shape(cv)
    return np.cumsum(rng.weibull(shape, n) / (rate * math.gamma(1 + 1 / shape)))


def steps(n: int, rng: np.random.Generator, *, rates: RateSteps, repeat: Flag = True) -> Floats:
    """Poisson with a rate that changes in steps: `rates` lists (seconds, requests per second), 0 for a pause. After the
    last step the list begins again, or, with repeat false, the last rate goes on until there are n requests.
    """
    lengths, heights = (np.array(column, dtype=np.float64) for column in zip(*rates, strict=True))
    if not heights.any():
        raise ServecastError("rates are all 0, so that no request would ever arrive; give one above 0")
    if not repeat:
        if heights[-1] == 0:
            raise ServecastError("the last rate is 0 and goes on forever; end with one above 0, or repeat")
        lengths[-1] = math.inf
    return _poisson_along(n, rng, lengths, heights)


def diurnal(
    n: int,
    rng: np.random.Generator,
    *,
    rate: PerSecond,
    peak_to_mean: Peak,
    period: Duration = DAY_S,
    start: DurationOrNone = 0.0,
) -> Floats:
    """Poisson with a rate that rises and falls once a period (a day unless given): `rate` on average, peak_to_mean
    times that at the peak. Time 0 is the quietest moment; `start` is how long after it the workload begins.

    The curve is exp(k cos(angle)), a von Mises density: unlike a sine it can peak above twice its mean, and it never
    falls to 0. It is followed in 2,880 equal steps a period (30 s of a day).
    """
    lengths, heights = _diurnal(rate, peak_to_mean, period, start)
    return _poisson_along(n, rng, lengths, heights)


def spikes(
    n: int, rng: np.random.Generator, *, rate: PerSecond, spike_rate: PerSecond, every: Duration, length: Duration
) -> Floats:
    """Poisson at `rate`, and at spike_rate for the last `length` of every `every`: the first spike begins `length`
    before the time `every`.
    """
    if length >= every:
        raise ServecastError(f"length {length:g} s is not below every {every:g} s, so that the spikes would never end")
    return _poisson_along(n, rng, np.array([every - length, length]), np.array([rate, spike_rate]))


ARRIVALS: Registry[Any] = {
    "poisson": poisson,
    "constant": constant,
    "all-at-once": all_at_once,
    "gamma": gamma,
    "weibull": weibull,
    "steps": steps,
    "diurnal": diurnal,
    "spikes": spikes,
}


def rates_of(arrivals: Spec) -> tuple[Floats, Floats] | None:
    """(seconds, requests per second) of the steps in which the rate changes over and over, from the beginning of the
    workload; None where it does not. The spec has been checked."""
    given = parameters(ARRIVALS, arrivals)
    match arrivals["kind"]:
        case "diurnal":
            return _diurnal(**given)
        case "steps" if given.get("repeat", True):
            lengths, heights = zip(*given["rates"], strict=True)
            return np.array(lengths, dtype=np.float64), np.array(heights, dtype=np.float64)
        case "spikes":
            every, length = given["every"], given["length"]
            return np.array([every - length, length]), np.array([given["rate"], given["spike_rate"]])
    return None


@cache
def weibull_shape(cv: float) -> float:
    """The shape k of the Weibull distribution with this coefficient of variation (0.01 to 100):
    cv^2 = gamma(1 + 2/k) / gamma(1 + 1/k)^2 - 1, which falls as k rises.
    """
    target = math.log1p(cv * cv)
    return math.exp(
        _bisect(
            lambda log_k: target - math.lgamma(1 + 2 / math.exp(log_k)) + 2 * math.lgamma(1 + 1 / math.exp(log_k)),
            math.log(0.05),
            math.log(1000),
        )
    )


def _diurnal(rate: float, peak_to_mean: float, period: float = DAY_S, start: float = 0) -> tuple[Floats, Floats]:
    """(seconds, requests per second) of the steps of a period, from where the workload begins."""
    angle = (np.arange(2880) + 0.5) / 2880 * 2 * np.pi - np.pi

    def relative(k: float) -> Floats:
        """The curve with a mean of 1."""
        curve: Floats = np.exp(k * (np.cos(angle) - 1))
        return curve / float(curve.mean())

    heights = rate * relative(_bisect(lambda k: float(relative(k).max()) - peak_to_mean, 0.0, 1e3))
    lengths = np.full(heights.size, period / heights.size)
    ends = np.cumsum(lengths)
    begin = start % period
    i = int(np.searchsorted(ends, begin, side="right"))
    if i == heights.size:  # `begin` lies within a rounding error of the period's end
        i, begin = 0, 0.0
    # The step in which it begins is split: its rest comes first, what was cut off comes last.
    first, last = ends[i] - begin, begin - (ends[i] - lengths[i])
    lengths = np.concatenate([[first], lengths[i + 1 :], lengths[:i], [last]])
    heights = np.concatenate([heights[i:], heights[: i + 1]])
    return lengths, heights


def _poisson_along(n: int, rng: np.random.Generator, lengths: Floats, heights: Floats) -> Floats:
    """A Poisson process whose rate is heights[i] for lengths[i] seconds, over and over: arrivals of rate 1, stretched
    by the inverse of the expected number of arrivals until a time.
    """
    expected = heights * lengths
    ends, begins = np.cumsum(expected), np.concatenate([[0.0], np.cumsum(lengths)[:-1]])
    count = np.cumsum(rng.exponential(1.0, n))
    if math.isinf(ends[-1]):
        rounds, within = np.zeros(n), count
    else:
        rounds, within = np.divmod(count, ends[-1])
    # side="right" passes over steps in which nothing is expected
    step = np.minimum(np.searchsorted(ends, within, side="right"), np.flatnonzero(heights)[-1])
    before = np.where(step > 0, ends[step - 1], 0.0)
    inside = begins[step] + (within - before) / heights[step]
    period = float(lengths.sum())
    times = inside if math.isinf(period) else rounds * period + inside
    return np.maximum.accumulate(times) if n else times  # rounding must not turn two arrivals round


def _bisect(rising: Callable[[float], float], low: float, high: float) -> float:
    """Where a rising function is 0, between low and high, to the last bit that halving reaches."""
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return (low + high) / 2
