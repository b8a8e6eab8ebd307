"""From the rows of all runs to a judgement a metric: paired differences, and whether they exceed the noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from calibrate.uncertainty import LEVEL
from reports.comparing.facts import METRICS, STEADY, Difference, Line, Metric
from servecast.comparing.observe import TRIMS
from servecast.sweeping.runs import Row
from sim.statistics import Floats, Interval, central, less, section_interval, t_interval

Rows = Mapping[int, Sequence[Row]]
"""Scenario -> its runs, in order of seeds."""


def lines_of(runs: Rows, under_error: Mapping[int, Sequence[Mapping[str, Any]]], unlike: frozenset[str]) -> list[Line]:
    """A line for every metric that some scenario has. `under_error`: scenario -> its figures, draw by draw. `unlike`
    has the keys of metrics that must not be ranked."""
    figures = {i: [row["figures"] for row in rows] for i, rows in runs.items()}
    sections = {i: rows[0]["sections"] for i, rows in runs.items()}
    lines = [_line(metric, figures, sections, under_error, unlike) for metric in METRICS]
    return [line for line in lines if any(line.values)]


def trim_of(runs: Rows) -> float | None:
    """The share of the requests that is left out as the warm-up: the longest of all runs, rounded up to one of TRIMS.
    None where a run does not settle."""
    shares = [row["warm_up"] for rows in runs.values() for row in rows]
    if any(share is None for share in shares):
        return None
    return next(trim for trim in TRIMS if trim >= max(shares))


def steady_of(runs: Rows, trim: float, unlike: frozenset[str]) -> list[Line]:
    """The percentiles of the requests after the warm-up."""
    figures = {i: [row["trimmed"][TRIMS.index(trim)] for row in rows] for i, rows in runs.items()}
    return [_line(metric, figures, {}, {}, unlike) for metric in STEADY]


def _line(
    metric: Metric,
    figures: Mapping[int, Sequence[Mapping[str, Any]]],
    sections: Mapping[int, Mapping[int, Sequence[Mapping[str, Any]]]],
    under_error: Mapping[int, Sequence[Mapping[str, Any]]],
    unlike: frozenset[str],
) -> Line:
    values = {i: _column(some, metric.key) for i, some in figures.items()}
    cut = {
        i: {number: _column(some, metric.key) for number, some in by_number.items()}
        for i, by_number in sections.items()
    }
    drawn = {i: _column(some, metric.key) for i, some in under_error.items()}

    def difference(i: int, j: int) -> Difference:
        a, b = values[i], values[j]
        if a is None or b is None:
            return Difference("undefined")
        interval = _interval(metric, less(b, a), {
            number: less(theirs, mine)
            for number in cut.get(i, {})
            if (mine := cut[i][number]) is not None and (theirs := cut[j].get(number)) is not None
        })  # fmt: skip
        ends, x, y = None, drawn.get(i), drawn.get(j)
        if x is not None and y is not None:
            low, high = central(less(y, x), LEVEL).tolist()
            ends = (low, high)
        if not np.any(less(b, a)):
            return Difference("equal", interval, ends)
        if metric.key in unlike:
            return Difference("unlike", interval, ends)
        if not interval.excludes_zero:
            return Difference("unknown" if interval.half is None else "noise", interval, ends)
        if ends is not None and not (ends[0] > 0 if interval.mean > 0 else ends[1] < 0):
            return Difference("model", interval, ends)
        good = (interval.mean < 0) == (metric.better == "lower")
        return Difference("better" if good else "worse", interval, ends)

    order = sorted(values)
    best = next(
        (n for n, j in enumerate(order) if all(difference(i, j).word == "better" for i in order if i != j)), None
    )
    return Line(
        metric,
        tuple(None if (v := values[i]) is None else _interval(metric, v, _there(cut.get(i, {}))) for i in order),
        (None, *(difference(order[0], j) for j in order[1:])),
        best,
    )


def _interval(metric: Metric, values: Floats, sections: Mapping[int, Floats]) -> Interval:
    """Over seeds; of one run, over its sections."""
    if len(values) > 1:
        return t_interval(values)
    return section_interval(float(values[0]), sections, tail=metric.key.startswith("p99"))


def _there(sections: Mapping[int, Floats | None]) -> dict[int, Floats]:
    return {number: values for number, values in sections.items() if values is not None}


def _column(some: Sequence[Mapping[str, Any]], key: str) -> Floats | None:
    """float64[n] of a figure, or None where one of them is undefined."""
    found = [each.get(key) for each in some]
    return None if not found or any(value is None for value in found) else np.array(found, dtype=float)
