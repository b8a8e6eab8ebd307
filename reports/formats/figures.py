"""The summary of a measured run under the keys of `Result.summary`: computed from requests, or stated and judged.

It knows our definitions (those of `sim.metrics`) and no tool's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from servecast.errors import one_of
from sim.metrics import PERCENTILES, Distribution

if TYPE_CHECKING:
    import polars as pl

LATENCIES = ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms")
LENGTHS = ("input_tokens_per_request", "output_tokens_per_request")
STATS = ("mean", "median", "std", *(f"p{q}" for q in PERCENTILES))
COUNTS = ("submitted", "completed", "total_input_tokens", "total_output_tokens")
RATES = ("request_throughput", "input_throughput", "output_throughput", "total_token_throughput", "request_goodput")
KEYS = ("duration", *COUNTS, *RATES, *(f"{stat}_{name}" for name in (*LATENCIES, *LENGTHS) for stat in STATS))
"""All that a measured run's summary may have, as in `Result.summary`."""

_PARTS = {
    "request_throughput": ["completed"],
    "input_throughput": ["total_input_tokens"],
    "output_throughput": ["total_output_tokens"],
    "total_token_throughput": ["total_input_tokens", "total_output_tokens"],
}
"""Rate -> what is divided by the duration."""

ROUNDING = 0.002
"""Share by which a stated figure may differ from the computed one: files round to two or three digits."""
SHORTEST_S = 1e-6
"""No run is shorter: what is divided by must not be 0."""


def last_end_s(requests: pl.DataFrame) -> float | None:
    """When the last request that succeeded ended, in seconds from the first send; None where that is not known."""
    ends = (requests["sent_s"] + requests["e2e_s"]).filter(requests["error"].is_null()).drop_nulls().to_numpy()
    return float(ends.max()) if len(ends) else None


def of(requests: pl.DataFrame, duration_s: float | None) -> dict[str, float]:
    """The figures that follow from the requests; rates need the duration. Undefined ones have no key."""
    done = requests.filter(requests["error"].is_null())
    out: dict[str, float | None] = {"submitted": len(requests), "completed": len(done)}
    totals = {"total_input_tokens": "input_tokens", "total_output_tokens": "output_tokens"}
    out |= {key: int(done[name].sum()) for key, name in totals.items() if not done[name].null_count()}
    if duration_s is not None:
        out["duration"] = duration_s
    for name, column in (("ttft_ms", "ttft_s"), ("tpot_ms", "tpot_s"), ("e2el_ms", "e2e_s")):
        out |= Distribution.of(done[column].drop_nulls().to_numpy()).summary(name, 1e3)
    out |= _itl(done)
    for name in LENGTHS:
        lengths = done[name.removesuffix("_per_request")].drop_nulls().to_numpy().astype(np.float64)
        out |= Distribution.of(lengths).summary(name)
    return completed({key: value for key, value in out.items() if value is not None})


def completed(figures: Mapping[str, float]) -> dict[str, float]:
    """The figures, and those that follow from them exactly: the median as p50, rates from totals and duration."""
    out = dict(figures)
    for name in (*LATENCIES, *LENGTHS):
        for one, other in ((f"median_{name}", f"p50_{name}"), (f"p50_{name}", f"median_{name}")):
            if one in out:
                out.setdefault(other, out[one])
    for rate, implied in _implied_rates(out):
        out.setdefault(rate, implied)
    return out


def disagreements(
    stated: Mapping[str, float], computed: Mapping[str, float], tolerance: Mapping[str, float]
) -> list[str]:
    """A doubt that lists what the file states otherwise than its requests give; counts must agree exactly."""
    differing = [
        f"{key} {value:.6g} (its requests give {computed[key]:.6g})"
        for key, value in stated.items()
        if key in computed and _differ(value, computed[key], 0.0 if key in COUNTS else tolerance.get(key, ROUNDING))
    ]
    return [f"stated figures do not follow from the requests: {'; '.join(differing)}"] if differing else []


def possible(stated: Mapping[str, float]) -> dict[str, float]:
    """Without those that cannot be: negative ones, and times of 0 (but for a spread, or some of the gaps)."""
    return {key: value for key, value in stated.items() if not _cannot_be(key, value)}


def impossible(stated: Mapping[str, float]) -> list[str]:
    """Doubts about stated figures that contradict each other or cannot be."""
    wrong = [f"{key} {value:.6g}" for key, value in stated.items() if _cannot_be(key, value)]
    out = [f"no run has such figures, so they are left out: {one_of(wrong)}"] if wrong else []
    figures = possible(stated)
    for name in LATENCIES:
        rising = [key for key in (f"p{q}_{name}" for q in PERCENTILES) if key in figures]
        for low, high in [*pairwise(rising), (f"mean_{name}", f"p99_{name}")]:
            if low in figures and high in figures and figures[low] > figures[high]:
                out.append(f"{low} {figures[low]:.6g} is above {high} {figures[high]:.6g}")
        median, p50 = figures.get(f"median_{name}"), figures.get(f"p50_{name}")
        if median is not None and p50 is not None and _differ(median, p50, ROUNDING):
            out.append(f"median_{name} {median:.6g} is not p50_{name} {p50:.6g}")
    out += [
        f"{rate} is {figures[rate]:.6g}, but total and duration give {implied:.6g}"
        for rate, implied in _implied_rates(figures)
        if rate in figures and _differ(figures[rate], implied, 0.01)
    ]
    return out + _unlike_whole(figures)


def _unlike_whole(figures: Mapping[str, float]) -> list[str]:
    """TTFT and TPOT against E2E, as far as means can tell."""
    ttft, tpot, whole = (figures.get(f"mean_{name}") for name in ("ttft_ms", "tpot_ms", "e2el_ms"))
    if ttft is None or whole is None:
        return []
    if ttft > whole * (1 + ROUNDING):
        return [f"mean_ttft_ms {ttft:.6g} is above mean_e2el_ms {whole:.6g}"]
    done, tokens = figures.get("completed"), figures.get("total_output_tokens")
    if tpot is None or not done or not tokens or tokens <= done:
        return []
    parts = ttft + tpot * (tokens / done - 1)
    if abs(parts - whole) <= 0.5 * whole:  # lengths and speeds may go together
        return []
    return [f"mean TTFT + mean TPOT x (tokens - 1) is {parts:.6g} ms, but mean_e2el_ms is {whole:.6g}"]


def _itl(done: pl.DataFrame) -> dict[str, float | None]:
    several = done.filter(done["output_tokens"] > 1)
    if done["itl_s"].count():
        gaps = done["itl_s"].explode().drop_nulls().to_numpy()
        return Distribution.of(gaps).summary("itl_ms", 1e3) if not several["itl_s"].null_count() else {}
    if not len(several) or several["tpot_s"].null_count():
        return {}
    # the mean of all gaps follows from each request's mean
    gaps = (several["output_tokens"] - 1).to_numpy()
    return {"mean_itl_ms": 1e3 * float(np.average(several["tpot_s"].to_numpy(), weights=gaps))}


def _implied_rates(figures: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    duration = figures.get("duration", 0.0)
    if duration <= SHORTEST_S:
        return
    for rate, totals in _PARTS.items():
        if all(key in figures for key in totals):
            yield rate, sum(figures[key] for key in totals) / duration


def _cannot_be(key: str, value: float) -> bool:
    may_be_zero = key.startswith("std") or not key.endswith(LATENCIES) or key in ("median_itl_ms", "p50_itl_ms")
    return value < 0 or (value == 0 and not may_be_zero)


def _differ(one: float, other: float, share: float) -> bool:
    return abs(one - other) > share * max(abs(one), abs(other)) + (1e-9 if share else 0)
