"""How long clients think and how many turns they take: one function a distribution, one line in `THINK` or `TURNS`.

As in `workloads.lengths`, a function takes n, a random generator and keyword-only parameters. THINK gives float64[n]
seconds of 0 or more, TURNS int64[n] of 1 or more. It does not know what is said in a turn.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from servecast.errors import ServecastError
from workloads.kinds import Registry
from workloads.lengths import draw_weighted
from workloads.parameters import Count, CountList, CountMean, Cv, Duration, DurationOrNone, Weights
from workloads.trace import Floats, Ints


def fixed_time(n: int, rng: np.random.Generator, *, time: DurationOrNone) -> Floats:
    """The same time every time; 0s for programs that answer at once."""
    return np.full(n, time)


def exponential_time(n: int, rng: np.random.Generator, *, mean: Duration) -> Floats:
    """Exponential with the given mean."""
    return rng.exponential(mean, n)


def lognormal_time(n: int, rng: np.random.Generator, *, mean: Duration, cv: Cv) -> Floats:
    """Lognormal with the given mean and coefficient of variation of the distribution itself: short as a rule, sometimes
    very long, as people and tools are.
    """
    sigma = math.sqrt(math.log1p(cv * cv))
    return rng.lognormal(math.log(mean) - sigma * sigma / 2, sigma, n)


THINK: Registry[Any] = {
    "fixed": fixed_time,
    "exponential": exponential_time,
    "lognormal": lognormal_time,
}


def fixed_turns(n: int, rng: np.random.Generator, *, turns: Count) -> Ints:
    """The same number of turns in every session."""
    return np.full(n, turns, dtype=np.int64)


def uniform_turns(n: int, rng: np.random.Generator, *, low: Count, high: Count) -> Ints:
    """Every whole number from low to high, both included, is equally likely."""
    if low > high:
        raise ServecastError(f"low {low} is above high {high}; swap them")
    return rng.integers(low, high, size=n, endpoint=True)


def geometric_turns(n: int, rng: np.random.Generator, *, mean: CountMean) -> Ints:
    """After each turn the session goes on with the same probability, 1 - 1/mean."""
    return rng.geometric(1 / mean, n)


def empirical_turns(n: int, rng: np.random.Generator, *, values: CountList, weights: Weights | None = None) -> Ints:
    """One of the listed numbers, each equally likely or as likely as its weight."""
    return draw_weighted(n, rng, values, weights)


TURNS: Registry[Any] = {
    "fixed": fixed_turns,
    "uniform": uniform_turns,
    "geometric": geometric_turns,
    "empirical": empirical_turns,
}
