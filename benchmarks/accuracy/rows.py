"""Rows of measured against predicted, and what is said of many of them. It knows no data set."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, slots=True)
class Row:
    """One measured point: what ran (`model`, `gpu`, `layout`, `load`), by metric what was measured and what we predict,
    and what else is known by name. Times are in ms. `fitted` says what of our model was fitted to rows like it,
    `assumed` what of the measurement its source leaves open."""

    data: str
    model: str
    gpu: str
    layout: str
    load: str
    measured: Mapping[str, float]
    predicted: Mapping[str, float]
    others: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    fitted: str = ""
    assumed: str = ""

    def off(self, metric: str) -> float:
        """Signed relative error."""
        return self.predicted[metric] / self.measured[metric] - 1


@dataclass(frozen=True, slots=True)
class Uncovered:
    """Measured points that the simulator cannot run yet: how many, of what, and what is missing."""

    data: str
    what: str
    why: str
    points: int


@dataclass(frozen=True, slots=True)
class Errors:
    """Of |relative error|: median and p90; of the signed error the median; over `points`."""

    median: float
    p90: float
    signed: float
    points: int


def errors(rows: Iterable[Row], metric: str) -> Errors | None:
    """Errors of the rows that have the metric, or None."""
    off = np.array([row.off(metric) for row in rows if metric in row.measured and metric in row.predicted])
    if not off.size:
        return None
    size = np.abs(off)
    return Errors(float(np.median(size)), float(np.quantile(size, 0.9)), float(np.median(off)), len(off))


def grouped(rows: Iterable[Row], *by: str) -> dict[tuple[str, ...], list[Row]]:
    """Rows by some of their words, in order of appearance."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(getattr(row, name) for name in by), []).append(row)
    return found


def worst(rows: Sequence[Row], metrics: Sequence[str], count: int) -> list[tuple[Row, str]]:
    """The rows and metrics that are off the most, by |log(predicted / measured)|."""
    each = [(row, m) for row in rows for m in metrics if m in row.measured and m in row.predicted]
    return sorted(each, key=lambda pair: -abs(np.log(1 + pair[0].off(pair[1]))))[:count]
