"""How many tokens, when no trace says it: one function a distribution and one line in `LENGTHS`.

A function takes n, a random generator and keyword-only parameters, whose types and ranges are their annotations
(`workloads.kinds` reads them, so a scenario's parameters are checked before the call). It returns int64[n], all >= 1.
Rules between parameters are the function's own: it raises ServecastError, for any n. It does not know whether the
lengths are prompts or outputs.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from servecast.errors import ServecastError
from workloads.kinds import Fraction, Positive, Registry, Tokens, TokensMean
from workloads.trace import MAX_TOKENS, Ints, Trace


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


def lognormal(n: int, rng: np.random.Generator, *, mean: TokensMean, cv: Positive, max: Tokens | None = None) -> Ints:
    """Lognormal with the given mean and coefficient of variation of the distribution itself (not of its logarithm):
    sigma^2 = ln(1 + cv^2), mu = ln(mean) - sigma^2/2. Draws are rounded, and one below half a token counts as 1.

    Draws above `max` (or above MAX_TOKENS without one) are drawn again, so the lengths follow the distribution below
    the cap, without a heap at it, and their mean falls below `mean`. Raises ServecastError when more than half of the
    draws would be repeated: then the cap, not mean and cv, would decide the result.
    """
    sigma = math.sqrt(math.log1p(cv * cv))
    mu = math.log(mean) - sigma * sigma / 2
    cap = MAX_TOKENS if max is None else max
    repeated = 0.5 * math.erfc((math.log(cap + 0.5) - mu) / (sigma * math.sqrt(2)))
    if repeated > 0.5:
        raise ServecastError(
            f"max {cap} is so low that {repeated:.0%} of the draws of mean {mean:g} and cv {cv:g} would be repeated "
            "(at most 50 % is allowed); raise max or lower mean"
        )
    lengths = np.empty(0, dtype=np.int64)
    # Rejecting in the order of the stream, rather than filling holes, keeps the first k of n draws the same for any n.
    while lengths.size < n:
        draws = np.rint(rng.lognormal(mu, sigma, n))
        lengths = np.concatenate([lengths, np.maximum(draws[draws <= cap], 1).astype(np.int64)])
    return lengths[:n]


LENGTHS: Registry[Any] = {
    "fixed": fixed,
    "uniform": uniform,
    "range-ratio": range_ratio,
    "lognormal": lognormal,
}


def pairs_from_trace(n: int, rng: np.random.Generator, trace: Trace) -> tuple[Ints, Ints]:
    """n (prompt, output) pairs drawn from the trace's requests with replacement, each pair kept together, so that
    the correlation of the two lengths survives. Returns two int64[n].
    """
    chosen = rng.integers(0, len(trace), size=n)
    return trace.prompt_tokens[chosen], trace.output_tokens[chosen]
