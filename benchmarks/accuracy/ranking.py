"""Is the better configuration named? Pairs of layouts and GPUs of one model at one load, and the regret of choosing.

The measure is output tokens a second and GPU, as closed loops give it: clients / (TTFT + (output - 1) TPOT).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np

from benchmarks.accuracy.rows import Row

BUCKETS = (0.05, 0.1, 0.2, np.inf)
"""Gaps between two measured throughputs; closer ones are no choice."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """Of `pairs` whose measured throughput a GPU differs by `least` to `most` (shares), how many are ordered right."""

    least: float
    most: float
    right: int
    pairs: int


@dataclass(frozen=True, slots=True)
class Regret:
    """Throughput a GPU that is lost by taking the configuration that the forecast likes best: mean and worst share."""

    mean: float
    worst: float
    choices: int


def rankings(rows: Iterable[Row]) -> list[Ranking]:
    """A row a bucket of BUCKETS."""
    gaps, right = [], []
    for _, group in _alike(rows):
        for a, b in combinations(group, 2):
            measured, predicted = (np.log(_rate(a, w) / _rate(b, w)) for w in ("measured", "predicted"))
            gaps.append(np.expm1(abs(measured)))
            right.append(measured * predicted > 0)
    gap, good = np.array(gaps), np.array(right)
    found = []
    for least, most in pairwise(BUCKETS):
        here = (gap >= least) & (gap < most)
        found.append(Ranking(least, float(most), int(good[here].sum()), int(here.sum())))
    return found


def regret(rows: Iterable[Row]) -> Regret:
    """Over every model and load with at least two configurations."""
    lost = []
    for _, group in _alike(rows):
        best = max(_rate(row, "measured") for row in group)
        chosen = max(group, key=lambda row: _rate(row, "predicted"))
        lost.append(1 - _rate(chosen, "measured") / best)
    return Regret(float(np.mean(lost)), float(np.max(lost)), len(lost))


def _alike(rows: Iterable[Row]) -> list[tuple[tuple[str, str], Sequence[Row]]]:
    """Rows of one model (whatever its precision) and load, one a configuration: the median of repeats."""
    found: dict[tuple[str, str], dict[tuple[str, str, str], list[Row]]] = {}
    for row in rows:
        same = found.setdefault((row.model.split(",")[0], row.load), {})
        same.setdefault((row.model, row.gpu, row.layout), []).append(row)
    return [
        (key, [sorted(each, key=lambda r: _rate(r, "measured"))[len(each) // 2] for each in by.values()])
        for key, by in found.items()
        if len(by) > 1
    ]


def _rate(row: Row, which: str) -> float:
    times: Mapping[str, float] = getattr(row, which)
    lengths, clients = row.load.split(", ")
    output = int(lengths.split("/")[1])
    seconds = (times["TTFT"] + (output - 1) * times["TPOT"]) / 1e3
    return int(clients.split()[0]) * output / seconds / _gpus(row.layout)


def _gpus(layout: str) -> int:
    """`tp 4, ep`, or `1 x tp 4 + 2 x tp 8`."""
    pools = (part.partition("tp ") for part in layout.split(" + "))
    return sum(int(times.removesuffix(" x ") or 1) * int(tp.split(",")[0]) for times, _, tp in pools)
