"""Lengths from bucket counts, as monitoring keeps them. It does not know where the counts come from.

A histogram forgets where in its bucket a length lay. Without more, every whole length of a bucket is equally likely.
Where the overall mean is known (Prometheus keeps `_sum` and `_count`), all buckets lean alike, so that the mean is met:
the j-th of a bucket's w lengths has a probability in proportion to exp(-lean * j / w), with one lean for all buckets.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from servecast.errors import ServecastError
from workloads.trace import Floats, Ints

_STEEPEST = 1e6
"""At this lean, or minus it, a bucket's lengths all stand on its first or last one."""


def draw_histogram(
    n: int,
    rng: np.random.Generator,
    edges: Sequence[int],
    counts: Sequence[float],
    mean: float | None = None,
    longest: int | None = None,
) -> Ints:
    """int64[n] lengths. edges: ascending upper ends of the buckets, included; counts: one a bucket, or one more for an
    open last bucket, which ends at `longest`. Raises ServecastError with every contradiction.
    """
    low, high, weight = _buckets(edges, counts, longest)
    width = high - low
    lean = 0.0 if mean is None else _lean(low, width, weight, mean)
    total = np.cumsum(weight)
    draws = rng.random((n, 2))  # one row a length, so that the first k of n draws are the same for any n
    bucket = np.searchsorted(total, draws[:, 0] * total[-1], side="right")
    inside = np.floor(width[bucket] * _position(draws[:, 1], lean)).astype(np.int64)
    lengths: Ints = low[bucket] + 1 + np.minimum(inside, width[bucket] - 1)
    return lengths


def _buckets(edges: Sequence[int], counts: Sequence[float], longest: int | None) -> tuple[Ints, Ints, Floats]:
    """Of each bucket: the length below its first, its last length, its count."""
    problems = []
    high = np.array(edges, dtype=np.int64)
    weight = np.array(counts, dtype=np.float64)
    if (np.diff(high) <= 0).any():
        problems.append("edges do not ascend; each is the longest length of its bucket")
    if weight.size not in (high.size, high.size + 1):
        problems.append(
            f"{weight.size} counts for {high.size} edges; give one a bucket, or one more for lengths above the last"
        )
    if not weight.any():
        problems.append("counts are all 0; give at least one above 0")
    if longest is not None and longest <= high[-1]:
        problems.append(f"max {longest} is not above the last edge {high[-1]}; it is the end of the open last bucket")
    if weight.size == high.size + 1:
        if longest is not None:
            high = np.append(high, longest)
        elif weight[-1] == 0:
            weight = weight[:-1]
        else:
            share = weight[-1] / weight.sum()
            problems.append(
                f"{share:.2%} of the counts lie above the last edge {high[-1]} and how far is not known; give max, the "
                "longest length that occurs (for an engine's own metrics: at most its max_model_len)"
            )
    if problems:
        raise ServecastError(*problems)
    return np.concatenate([[0], high[:-1]]), high, weight


def _position(u: Floats, lean: float) -> Floats:
    """Where in its bucket a uniform draw lands, 0 to 1: the inverse of the distribution with density exp(-lean v)."""
    if abs(lean) < 1e-9:
        return u
    steep = abs(lean)
    position: Floats = -np.log1p(u * np.expm1(-steep)) / steep
    return position if lean > 0 else 1 - position


def _lean(low: Ints, width: Ints, weight: Floats, mean: float) -> float:
    """The lean with which the mean is `mean`."""
    share = weight / weight.sum()
    least, most = float(share @ (low + 1)), float(share @ (low + width))
    if not least * (1 - 1e-6) <= mean <= most * (1 + 1e-6):  # sums of counts are rounded
        raise ServecastError(
            f"mean {mean:g} contradicts the counts, whose lengths average between {least:.6g} and {most:.6g}"
        )
    below, above = -_STEEPEST, _STEEPEST  # the mean falls as the lean rises
    for _ in range(100):
        middle = (below + above) / 2
        reached = float(share @ (low + 1 + _mean_inside(width, middle)))
        below, above = (middle, above) if reached > mean else (below, middle)
    return (below + above) / 2


def _mean_inside(width: Ints, lean: float) -> Floats:
    """The mean of j in 0..w-1 for each width w: that of a truncated geometric distribution, ratio exp(-lean / w)."""
    w, steep = width.astype(np.float64), abs(lean)
    if steep < 1e-4:  # where the exact form loses its digits, its first terms
        mean = (w - 1) / 2 - steep * (w * w - 1) / (12 * w)
    else:
        mean = 1 / np.expm1(np.minimum(steep / w, 700.0)) - w / np.expm1(min(steep, 700.0))
    return mean if lean >= 0 else w - 1 - mean
