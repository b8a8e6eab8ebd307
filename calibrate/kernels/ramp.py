"""A quantity that never falls as its size grows: straight lines between knots. It knows numbers, not what they mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from calibrate.kernels.plain import field, many, positive, rounded
from servecast.errors import ServecastError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    Floats = NDArray[np.float64]

ROUNDS = 4  # of reweighting
TAIL = 4.0  # times: one interval of two noisy times gives no slope
OUTLIER = 0.02  # relative: beyond it a point counts by its distance, not by its square


@dataclass(frozen=True, slots=True)
class Ramp:
    """`seconds[i]` at the size `at[i]`: increasing sizes, seconds that do not fall. Below the first knot the first
    value holds; beyond the last one every further unit costs `tail` seconds."""

    at: tuple[float, ...]
    seconds: tuple[float, ...]
    tail: float

    def __call__(self, size: ArrayLike) -> Floats:
        """Seconds at every size; linear between the knots, so that a latency plus size/rate is met exactly."""
        x = np.asarray(size, np.float64)
        return np.interp(x, self.at, self.seconds) + self.tail * np.maximum(x - self.at[-1], 0.0)

    def times(self, fixed: float, moving: float) -> Ramp:
        """The ramp with its first value times `fixed`, and what comes on top of it times `moving`."""
        first = self.seconds[0]
        return Ramp(self.at, tuple(first * fixed + (s - first) * moving for s in self.seconds), self.tail * moving)

    def to_json(self) -> dict[str, Any]:
        """Sizes, microseconds to 4 digits, and the tail in picoseconds a unit."""
        return {
            "at": [rounded(x, 12) for x in self.at],
            "us": [rounded(1e6 * s) for s in self.seconds],
            "tail_ps": rounded(1e12 * self.tail),
        }


def read_ramp(data: Any, where: str) -> Ramp:
    """What `to_json` gave; `ServecastError` with the key where it is something else."""
    at = field(data, "at", where, many(positive))
    us = field(data, "us", where, many(positive))
    if not at or len(at) != len(us):
        raise ServecastError(f"{where}: {len(at)} sizes at, {len(us)} times us; expected as many, and at least one")
    if any(np.diff(at) <= 0) or any(np.diff(us) < 0):
        raise ServecastError(f"{where}: sizes at must increase and times us must not fall")
    return Ramp(at, tuple(1e-6 * t for t in us), 1e-12 * field(data, "tail_ps", where, positive))


def fit_ramp(size: Floats, seconds: Floats, knots: Floats, least_tail: float) -> Ramp:
    """The ramp on (at most) these increasing knots that is closest to the points in relative terms.

    Non-negative least squares of a constant and one slope an interval: so it cannot fall, and where the points do, it
    runs level between them. The tail is the slope from the largest size / TAIL on, at least `least_tail`.
    """
    from scipy.optimize import nnls

    used = knots[(knots >= size.min()) & (knots <= size.max())]
    at = np.unique(np.concatenate([[size.min()], used, [size.max()]]))
    widths = np.diff(at)
    design = np.ones((len(size), len(at)))
    for i, width in enumerate(widths):
        design[:, i + 1] = np.clip(size - at[i], 0.0, width) / width
    counts = np.ones(len(size))
    found = np.zeros(len(at))
    for _ in range(ROUNDS):
        rows = counts / seconds
        found, _ = nnls(design * rows[:, None], counts)
        off = np.abs(design @ found / seconds - 1)
        counts = np.sqrt(OUTLIER / np.maximum(off, OUTLIER))
    values = np.maximum(np.cumsum(found), seconds.min() / 2)
    start = float(max(at[-1] / TAIL, at[0]))
    tail = (values[-1] - np.interp(start, at, values)) / (at[-1] - start) if len(at) > 1 else 0.0
    return Ramp(tuple(at.tolist()), tuple(values.tolist()), max(float(tail), least_tail))


def octaves(size: Floats) -> Floats:
    """Knots a factor of two apart over the points' range."""
    low, high = np.floor(np.log2(size.min())), np.ceil(np.log2(size.max()))
    return np.asarray(2.0 ** np.arange(low, high + 1), np.float64)
