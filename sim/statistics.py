"""How sure a figure of a simulation is: t-intervals over independent runs, sections of one run, and its warm-up.

It knows nothing of requests: numbers in, intervals out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

LEVEL = 0.95
SECTIONS = (32, 16, 8, 5)
"""Into how many sections one run is cut: as many as are independent of each other."""
SECTION_LEAST = 25
"""Values that a section needs."""
BATCH = 5
"""Values that MSER averages first (White 1997)."""


ROUNDING = 1e-9
"""Relative difference that sums in another order may make."""


@dataclass(frozen=True, slots=True)
class Interval:
    """`mean` plus and minus `half`; None where nothing says how wide it is."""

    mean: float
    half: float | None

    @property
    def excludes_zero(self) -> bool:
        """Whether it is known to lie on one side of 0."""
        return self.half is not None and abs(self.mean) > self.half


def less(b: Floats, a: Floats) -> Floats:
    """b - a; 0 where only rounding differs."""
    found: Floats = np.where(np.isclose(a, b, rtol=ROUNDING, atol=0.0), 0.0, b - a)
    return found


def central(values: Floats, share: float) -> Floats:
    """float64[2, ...]: lower and upper end of the central `share` of `values` [n, ...]; NaN where one of them is."""
    found: Floats = np.quantile(values, [(1 - share) / 2, (1 + share) / 2], axis=0)
    return found


def t_interval(values: Floats, level: float = LEVEL) -> Interval:
    """The mean of independent `values` [n], with Student's t; of one value, without a width."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return Interval(mean, None)
    return Interval(mean, _t(len(values), level) * float(np.std(values, ddof=1)) / math.sqrt(len(values)))


def section_interval(
    whole: float, sections: Mapping[int, Floats], *, tail: bool = False, level: float = LEVEL
) -> Interval:
    """A figure of one correlated run, `whole`, from the same figure of its consecutive `sections`: by their number,
    float64[number].

    Sectioning (Asmussen and Glynn 2007, III.5): batch means, but about the figure of the whole run, so that it holds
    for percentiles too, whose mean over short sections is biased. Of the numbers of sections the largest is taken whose
    lag-1 autocorrelation is within one standard error (1 / sqrt(number)) of 0; where none is, the smallest number,
    widened by what a first-order autoregression of that correlation hides: sqrt((1 + r) / (1 - r)). Of percentiles in
    the `tail`, which few and long excursions make, the smallest number is taken at once. Without sections there is no
    width.
    """
    for number in [min(sections)] if tail and sections else sorted(sections, reverse=True):
        values, widened = sections[number], 1.0
        r = lag_1(values)
        if r > 1 / math.sqrt(number):
            if number > min(sections):
                continue
            widened = math.sqrt((1 + r) / (1 - r))
        spread = math.sqrt(float(np.sum((values - whole) ** 2)) / (number * (number - 1)))
        return Interval(whole, widened * _t(number, level) * spread)
    return Interval(whole, None)


def sections_of(count: int) -> tuple[int, ...]:
    """The numbers of sections that `count` values are enough for."""
    return tuple(number for number in SECTIONS if count >= number * SECTION_LEAST)


def lag_1(values: Floats) -> float:
    """The correlation of values with the one before each, below 1; 0 where all are equal."""
    centred = values - np.mean(values)
    power = float(np.dot(centred, centred))
    return float(np.dot(centred[1:], centred[:-1])) / power if power > 0 else 0.0


def warm_up(values: Floats) -> int | None:
    """How many of the first `values` [n], in order of time, belong to the warm-up; None where the run does not settle.

    MSER-5 (White 1997): means of 5 values; of all beginnings up to half of the run, the one without which the standard
    error of the mean of the rest is the smallest. That it lies at the half says that the run never settles, or is too
    short to tell.
    """
    batches = len(values) // BATCH
    if batches < 4:
        return None
    means = np.reshape(values[: batches * BATCH], (batches, BATCH)).mean(axis=1)
    left = np.arange(batches, 0, -1)
    sums, squares = np.cumsum(means[::-1])[::-1], np.cumsum(means[::-1] ** 2)[::-1]
    error = (squares - sums**2 / left) / left**2
    least = int(np.argmin(error[: batches // 2 + 1]))
    return None if least == batches // 2 else least * BATCH


def _t(count: int, level: float) -> float:
    from scipy.stats import t

    return float(t.ppf((1 + level) / 2, count - 1))
