"""How many tokens, when no trace says it: one function a distribution and one line in `LENGTHS`.

A function takes n, a random generator and keyword-only parameters, whose types and ranges are their annotations
(`workloads.kinds` reads them, so a scenario's parameters are checked before the call). It returns int64[n], all >= 1.
Rules between parameters are the function's own: it raises ServecastError, for any n. It does not know whether the
lengths are prompts or outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from servecast.errors import ServecastError
from workloads.histogram import draw_histogram
from workloads.kinds import Registry
from workloads.parameters import Cv, Fraction, Tokens, TokensList, TokensMean, Weights
from workloads.trace import MAX_TOKENS, Floats, Ints, Trace


def fixed(n: int, rng: np.random.Generator, *, tokens: Tokens) -> Ints:
    """The same length every time."""
    return np.full(n, tokens, dtype=np.int64)


def uniform(n: int, rng: np.random.Generator, *, low: Tokens, high: Tokens) -> Ints:
    """Every whole number from low to high, both included, is equally likely."""
    if low > high:
        raise ServecastError(f"low {low} is above high {high}; swap them")
    return rng.integers(low, high, size=n, endpoint=True)


def range_ratio(n: int, rng: np.random.Generator, *, nominal: Tokens, ratio: Fraction) -> Ints:
    """Uniform in [ratio * nominal, nominal], the lower end rounded down (and at least 1): the `random` dataset of
    InferenceX's benchmark and of older vLLM ones, where --random-range-ratio is `ratio`. The mean is below nominal.
    """
    return rng.integers(max(1, int(nominal * ratio)), nominal, size=n, endpoint=True)


def lognormal(n: int, rng: np.random.Generator, *, mean: TokensMean, cv: Cv, max: Tokens | None = None) -> Ints:
    """Lognormal with the given mean and coefficient of variation of the distribution itself (not of its logarithm):
    sigma^2 = ln(1 + cv^2), mu = ln(mean) - sigma^2/2. Draws are rounded, and one below half a token counts as 1.

    Draws above `max` (or above MAX_TOKENS without one) are drawn again, so the lengths follow the distribution below
    the cap, without a heap at it, and their mean falls below `mean`. Raises ServecastError when more than half of the
    draws would be repeated: then the cap, not mean and cv, would decide the result.
    """
    sigma = math.sqrt(math.log1p(cv * cv))
    mu = math.log(mean) - sigma * sigma / 2
    cap = MAX_TOKENS if max is None else max
    above = 0.5 * math.erfc((math.log(cap + 0.5) - mu) / (sigma * math.sqrt(2)))
    return _capped(n, lambda: rng.lognormal(mu, sigma, n), cap, above, f"mean {mean:g} and cv {cv:g}")


def gamma(n: int, rng: np.random.Generator, *, mean: TokensMean, cv: Cv, max: Tokens | None = None) -> Ints:
    """Gamma with the given mean and coefficient of variation; a lighter tail than lognormal. Rounding and `max` as
    there: what is above is drawn again, and more than half of that is an error.
    """
    from scipy.special import gammaincc  # here, so that nobody else waits for scipy

    shape = 1 / (cv * cv)
    scale = mean / shape
    cap = MAX_TOKENS if max is None else max
    above = float(gammaincc(shape, (cap + 0.5) / scale))
    return _capped(n, lambda: rng.gamma(shape, scale, n), cap, above, f"mean {mean:g} and cv {cv:g}")


def exponential(n: int, rng: np.random.Generator, *, mean: TokensMean, max: Tokens | None = None) -> Ints:
    """Exponential with the given mean. Rounding and `max` as for lognormal."""
    cap = MAX_TOKENS if max is None else max
    return _capped(n, lambda: rng.exponential(mean, n), cap, math.exp(-(cap + 0.5) / mean), f"mean {mean:g}")


def empirical(n: int, rng: np.random.Generator, *, values: TokensList, weights: Weights | None = None) -> Ints:
    """One of the listed lengths, each equally likely or as likely as its weight (which need not sum to 1)."""
    return draw_weighted(n, rng, values, weights)


def histogram(
    n: int,
    rng: np.random.Generator,
    *,
    edges: TokensList,
    counts: Weights,
    mean: TokensMean | None = None,
    max: Tokens | None = None,
) -> Ints:
    """Lengths known by bucket: counts[i] requests had more than edges[i - 1] tokens (1 or more in the first) and at
    most edges[i]. One more count than edges is an open last bucket, whose end is `max`; it may be left out when nobody
    is there. Inside a bucket every length is equally likely, or, where the `mean` of all lengths is known, leans to one
    end so that it is met (`workloads.histogram`).
    """
    return draw_histogram(n, rng, edges, counts, mean, max)


LENGTHS: Registry[Any] = {
    "fixed": fixed,
    "uniform": uniform,
    "range-ratio": range_ratio,
    "lognormal": lognormal,
    "gamma": gamma,
    "exponential": exponential,
    "empirical": empirical,
    "histogram": histogram,
}


def pairs_from_trace(n: int, rng: np.random.Generator, trace: Trace) -> tuple[Ints, Ints]:
    """n (prompt, output) pairs drawn from the trace's requests with replacement, each pair kept together, so that
    the correlation of the two lengths survives. Returns two int64[n].
    """
    chosen = rng.integers(0, len(trace), size=n)
    return trace.prompt_tokens[chosen], trace.output_tokens[chosen]


def draw_weighted(n: int, rng: np.random.Generator, values: list[int], weights: list[float] | None) -> Ints:
    """int64[n] of the listed whole numbers, each equally likely or as likely as its weight."""
    if weights is None:
        return np.array(values, dtype=np.int64)[rng.integers(0, len(values), size=n)]
    if len(weights) != len(values):
        raise ServecastError(f"{len(weights)} weights for {len(values)} values; give one each")
    if not any(weights):
        raise ServecastError("weights are all 0; give at least one above 0")
    total = np.cumsum(np.array(weights, dtype=np.float64))
    # side="right": a value of weight 0 has no width, and a draw never lands on it
    chosen: Ints = np.array(values, dtype=np.int64)[np.searchsorted(total, rng.random(n) * total[-1], side="right")]
    return chosen


def _capped(n: int, draw: Callable[[], Floats], cap: int, above: float, of: str) -> Ints:
    """n rounded draws of at least 1, those above `cap` drawn again; `above` is their share, `of` the distribution."""
    if above > 0.5:
        raise ServecastError(
            f"max {cap} is so low that {above:.0%} of the draws of {of} would be repeated "
            "(at most 50 % is allowed); raise max or lower mean"
        )
    lengths = np.empty(0, dtype=np.int64)
    # Rejecting in the order of the stream, rather than filling holes, keeps the first k of n draws the same for any n.
    while lengths.size < n:
        draws = np.rint(draw())
        lengths = np.concatenate([lengths, np.maximum(draws[draws <= cap], 1).astype(np.int64)])
    return lengths[:n]
