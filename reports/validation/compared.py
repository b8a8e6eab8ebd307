"""A forecast beside the run that it forecasts: figures of both, errors, and the same requests on both sides.

It knows results and measured runs, and nothing of scenarios: `servecast/validation/validate.py` makes a Validation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from reports.words import METRICS
from sim.metrics import Distribution, Floats

if TYPE_CHECKING:
    import polars as pl

    from reports.measured import MeasuredRun
    from reports.validation.causes import Causes
    from sim.result import Result

Ints = np.typing.NDArray[np.int64]
Figures = Mapping[str, float]

STATS = ("mean", "p50", "p90", "p99")
TIMES = {"ttft_ms": "ttft_s", "tpot_ms": "tpot_s", "e2el_ms": "e2e_s"}
"""The latencies that every request has: the end of their keys -> their column."""
LATENCIES = tuple(f"{stat}_{name}" for name in METRICS.values() for stat in STATS)
OTHERS = ("request_throughput", "output_throughput", "duration", "kv_mean_fraction", "kv_peak_fraction")
SCORED = (*LATENCIES, "output_throughput")
"""What the mean error is over, as far as both sides have it."""
PREDICTED = "predicted_"
GAPS = 0.9
"""Least share of the tokens after the first whose gaps must be in a file; the last one often has no chunk."""


@dataclass(frozen=True, slots=True, eq=False)
class Validation:
    """A forecast, the measured run, and how far they are apart. No figure is NaN; one that does not exist has no key.

    predicted, measured: figures under the keys of `Result.summary` (milliseconds where the key says so). Where requests
    are matched, TTFT, TPOT and E2E of both sides are over those that both have.
    matched: a row a request in the order of arrival, with `sent_s` (seconds from the first send), `input_tokens`,
    `output_tokens`, the measured `ttft_s`, `tpot_s`, `e2e_s`, and ours as `predicted_ttft_s` and so on, null where a
    request has none; None where requests do not correspond.
    replayed: what was simulated, in a sentence. warnings: what may make the comparison unfair.
    """

    run: MeasuredRun
    result: Result
    replayed: str
    warnings: tuple[str, ...]
    predicted: Figures
    measured: Figures
    matched: pl.DataFrame | None
    causes: Causes

    @property
    def errors(self) -> dict[str, float]:
        """Signed: predicted / measured - 1, of every figure that both have."""
        return errors(self.predicted, self.measured)

    @property
    def mean_error(self) -> float | None:
        """See `mean_error`."""
        return mean_error(self.predicted, self.measured)

    @property
    def per_request(self) -> dict[str, dict[str, float]]:
        """Metric (`ttft`, `tpot`, `e2e`) -> `count` of requests that have it on both sides, `mape` (the mean of
        |predicted / measured - 1|) and, where both vary, Pearson's `correlation`."""
        if self.matched is None:
            return {}
        found = {column.removesuffix("_s"): _agreement(*both(self.matched, column)) for column in TIMES.values()}
        return {name: agreement for name, agreement in found.items() if agreement}


def match(result: Result, run: MeasuredRun, rows: Ints) -> pl.DataFrame:
    """The requests that finished in the simulation beside the measured ones: request i is row `rows[i]` of the run's
    table. See `Validation.matched`."""
    import polars as pl

    assert run.requests is not None
    measured = run.requests.select("sent_s", "input_tokens", "output_tokens", *TIMES.values())
    ours = {PREDICTED + name: result.column(name, finished=True) for name in TIMES.values()}
    here = measured[rows[result.column("id", finished=True).astype(np.int64)]]
    return here.hstack(pl.DataFrame(ours).fill_nan(None))


def both(matched: pl.DataFrame, column: str) -> tuple[Floats, Floats]:
    """(predicted, measured) seconds of the requests that have the time on both sides, a measured one above 0."""
    pair = matched.select(PREDICTED + column, column).drop_nulls()
    pair = pair.filter(pair[column] > 0)
    return pair[PREDICTED + column].to_numpy(), pair[column].to_numpy()


def figures(result: Result, run: MeasuredRun, matched: pl.DataFrame | None) -> tuple[Figures, Figures]:
    """(predicted, measured) figures; see `Validation`."""
    predicted, measured = result.summary(), dict[str, Any](run.summary)
    if not itl_is_known(run):
        measured = {key: value for key, value in measured.items() if not key.endswith("_itl_ms")}
    if matched is not None:
        ours, theirs = matched_figures(matched)
        predicted, measured = predicted | ours, measured | theirs
    return _known(predicted), _known(measured)


def itl_is_known(run: MeasuredRun) -> bool:
    """Whether the gaps of the file are those between tokens, and not between chunks of several tokens."""
    if run.requests is None or not run.requests["itl_s"].count():
        return True
    rows = run.requests.drop_nulls(["itl_s", "output_tokens"]).filter(run.requests["output_tokens"] > 1)
    gaps, tokens = int(rows["itl_s"].list.len().sum()), int((rows["output_tokens"] - 1).sum())
    return gaps >= GAPS * tokens


def matched_figures(matched: pl.DataFrame) -> tuple[dict[str, float], dict[str, float]]:
    """(predicted, measured) TTFT, TPOT and E2E over the requests that have them on both sides."""
    ours: dict[str, Any] = {}
    theirs: dict[str, Any] = {}
    for name, column in TIMES.items():
        predicted, measured = both(matched, column)
        if len(measured):
            ours |= Distribution.of(predicted).summary(name, 1e3)
            theirs |= Distribution.of(measured).summary(name, 1e3)
    return ours, theirs


def _known(summary: Mapping[str, Any]) -> dict[str, float]:
    return {key: float(summary[key]) for key in (*LATENCIES, *OTHERS) if summary.get(key) is not None}


def errors(predicted: Figures, measured: Figures) -> dict[str, float]:
    """Signed: predicted / measured - 1, of every figure that both have; one measured as 0 has none."""
    return {key: predicted[key] / value - 1 for key, value in measured.items() if value > 0 and key in predicted}


def mean_error(predicted: Figures, measured: Figures) -> float | None:
    """How far off the latencies and the throughput that were measured are on average, as a factor less 1: the
    exponential of the mean |log(predicted / measured)|, less 1. None where nothing can be compared."""
    ratios = [predicted[k] / measured[k] for k in SCORED if measured.get(k, 0) > 0 and predicted.get(k, 0) > 0]
    return math.expm1(float(np.mean(np.abs(np.log(ratios))))) if ratios else None


def _agreement(predicted: Floats, measured: Floats) -> dict[str, float]:
    if not len(measured):
        return {}
    out = {"count": float(len(measured)), "mape": float(np.mean(np.abs(predicted / measured - 1)))}
    if len(measured) > 1 and predicted.std() > 0 and measured.std() > 0:
        correlation = float(np.corrcoef(predicted, measured)[0, 1])
        out |= {"correlation": correlation} if math.isfinite(correlation) else {}
    return out
