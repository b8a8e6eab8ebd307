"""A few scalars fitted to measurements: what the data tell is taken, what they do not tell stays where it was.

`fit_anchor` asks for nothing but a function from the scalars to errors, and knows none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import exp

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Values = Mapping[str, float]

TOLD = 0.5
"""The data tell a scalar if they leave at most this share of the prior's standard deviation."""
OUTLIER = 2.0
"""Errors beyond so many times their noise count in proportion, not squared (pseudo-Huber)."""
PROBE = 0.5
"""Slopes are taken over this share of a prior's standard deviation: simulated figures are not smooth."""
NORMAL_80 = 1.2816
ROUNDS, MOVES, STILL = 6, 8, 0.02


@dataclass(frozen=True, slots=True)
class Scalar:
    """A positive number to fit. Prior: its logarithm is normal around `default`'s, with standard deviation `spread`.

    One that `stays` is not fitted: that it may be another widens the intervals of the others.
    """

    name: str
    default: float
    spread: float
    low: float
    high: float
    stays: bool = False


@dataclass(frozen=True, slots=True)
class Estimate:
    """What became of a scalar. sd: standard error of the value's logarithm; `low` to `high` is the 80 % interval.

    One that is not `told` kept its default, and its sd is the prior's. like: the scalar that it cannot be told from;
    empty where the data hardly depend on it, or it was not fitted.
    """

    scalar: Scalar
    value: float
    sd: float
    told: bool
    like: str = ""

    @property
    def low(self) -> float:
        """The lower end of the 80 % interval."""
        return self.value * exp(-NORMAL_80 * self.sd)

    @property
    def high(self) -> float:
        """The upper end of the 80 % interval."""
        return self.value * exp(NORMAL_80 * self.sd)


@dataclass(frozen=True, slots=True)
class Anchor:
    """The scalars after the fit, and how many times larger than their noise the errors that remain are (at least 1).

    correlation: of the logarithms of those that were told, by the pair of their names.
    """

    estimates: tuple[Estimate, ...]
    correlation: Mapping[tuple[str, str], float]
    scatter: float

    @property
    def values(self) -> dict[str, float]:
        """Name -> value, of every scalar."""
        return {each.scalar.name: each.value for each in self.estimates}


def fit_anchor(errors: Callable[[Values], Floats], noise: Floats, scalars: Sequence[Scalar]) -> Anchor:
    """The most probable scalars, given `errors` (of the values: log(predicted / measured), float64[n]) with `noise`
    (their standard deviations).

    Gauss-Newton with slopes by differences, in units of the priors' standard deviations. A scalar that the data do not
    tell is left at its default; intervals of the others include that it is not known (Schmidt's consider covariance).
    """
    defaults, spread = np.array([s.default for s in scalars]), np.array([s.spread for s in scalars])
    limits = np.log(np.array([[s.low for s in scalars], [s.high for s in scalars]]) / defaults) / spread

    def valued(x: Floats) -> dict[str, float]:
        return {s.name: float(v) for s, v in zip(scalars, defaults * np.exp(spread * x), strict=True)}

    def off(x: Floats) -> Floats:
        return errors(valued(x)) / noise

    x, told, moved = np.zeros(len(scalars)), list[int](), np.inf
    every = [i for i, scalar in enumerate(scalars) if not scalar.stays]
    for _ in range(ROUNDS):
        rest = off(x)
        slopes = _slopes(off, x, rest)
        before, told = told, _told(slopes, every, told)
        if not told or (told == before and moved < STILL):
            break
        start = np.where(np.isin(np.arange(len(x)), told), x, 0.0)
        there = _descend(off, start, slopes, told, limits)
        moved, x = float(np.abs(there - x).max()), there
    return _anchor(scalars, valued(x), told, slopes, rest)


def _descend(off: Callable[[Floats], Floats], x: Floats, slopes: Floats, free: Sequence[int], limits: Floats) -> Floats:
    """From `x` downhill in the scalars `free`. The slopes are corrected with every move (Broyden)."""
    slopes, damping = slopes.copy(), 0.0
    rest = off(x)
    for _ in range(MOVES if free else 0):
        weight, j = _weights(rest) ** 2, slopes[:, free]
        normal = (j.T * weight) @ j + (1 + damping) * np.eye(len(free))
        move = np.clip(-np.linalg.solve(normal, (j.T * weight) @ rest + x[free]), -2, 2)
        new = x.copy()
        new[free] = np.clip(x[free] + move, *limits[:, free])
        moved = new - x
        if not moved.any():
            break
        there = off(new)
        slopes += np.outer(there - rest - slopes @ moved, moved) / (moved @ moved)
        if _cost(there, new) < _cost(rest, x):
            x, rest, damping = new, there, damping / 4
        else:
            damping = max(1.0, 4 * damping)
        if np.abs(moved).max() < STILL:
            break
    return x


def _slopes(off: Callable[[Floats], Floats], x: Floats, here: Floats) -> Floats:
    return np.stack([(off(x + PROBE * row) - here) / PROBE for row in np.eye(len(x))], axis=1)


def _weights(off: Floats) -> Floats:
    """Square roots of the pseudo-Huber weights."""
    return (1 + (off / OUTLIER) ** 2) ** -0.25


def _cost(off: Floats, x: Floats) -> float:
    return float(2 * OUTLIER**2 * (np.sqrt(1 + (off / OUTLIER) ** 2) - 1).sum() + x @ x)


def _scatter(off: Floats, free: int) -> float:
    """How many times their noise the errors are, at least 1."""
    weighted = (_weights(off) * off) ** 2
    return max(1.0, float(np.sqrt(weighted.sum() / max(1, len(off) - free))))


def _told(slopes: Floats, every: Sequence[int], before: Sequence[int]) -> list[int]:
    """Those of `every` that the data tell: while one is not told, the one that they tell least is left where it is.

    What was told `before`, from where it was then, stays told: the data moved it, even to where they tell it less.
    """
    free = list(every)
    while asked := [i for i in free if i not in before]:
        j = slopes[:, free]
        sd = dict(zip(free, np.sqrt(np.diag(np.linalg.inv(j.T @ j + np.eye(len(free))))), strict=True))
        worst = max(asked, key=lambda i: sd[i])
        if sd[worst] <= TOLD:
            break
        free.remove(worst)
    return free


def _covariance(slopes: Floats, free: Sequence[int]) -> Floats:
    """Of the scalars `free`, in units of the priors; the others stay where they are and are as uncertain as before."""
    j, stay = slopes[:, free], np.delete(slopes, free, axis=1)
    inner = np.linalg.inv(j.T @ j + np.eye(len(free)))
    gain = inner @ j.T @ stay
    return np.asarray(inner + gain @ gain.T)


def _anchor(scalars: Sequence[Scalar], values: Values, told: Sequence[int], slopes: Floats, rest: Floats) -> Anchor:
    scatter = _scatter(rest, len(told))
    own = _covariance(slopes * _weights(rest)[:, None] / scatter, told)
    sd = np.sqrt(np.diag(own))
    estimates = []
    for i, scalar in enumerate(scalars):
        if i in told:
            estimates.append(Estimate(scalar, values[scalar.name], float(sd[told.index(i)]) * scalar.spread, True))
        else:
            estimates.append(Estimate(scalar, scalar.default, scalar.spread, False, _like(slopes, scalars, told, i)))
    names = [scalars[i].name for i in told]
    pairs = [(a, b) for b in range(len(told)) for a in range(b)]
    correlation = {(names[a], names[b]): float(own[a, b] / (sd[a] * sd[b])) for a, b in pairs}
    return Anchor(tuple(estimates), correlation, scatter)


def _like(slopes: Floats, scalars: Sequence[Scalar], told: Sequence[int], i: int) -> str:
    """The one of `told` that makes `i` unknown, which the data would tell alone; empty where they would not."""
    if scalars[i].stays or (1 + (slopes[:, i] ** 2).sum()) ** -0.5 > TOLD or not told:
        return ""
    rows = [i, *told]
    joint = _covariance(slopes[:, rows], range(len(rows)))
    return scalars[told[int(np.argmax(np.abs(joint[0, 1:]) / np.sqrt(np.diag(joint)[1:])))]].name
