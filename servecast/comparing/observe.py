"""One run of a comparison: a scenario and a seed in, one row with all that is compared out, in whatever process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from reports.comparing.facts import METRICS, PERCENTS, STEADY
from reports.series import over_time
from servecast.comparing.scenarios import Candidate
from servecast.errors import ServecastError
from servecast.run import Result, simulate
from servecast.sweeping.runs import DONE, FAILED, INVALID, Row, Task, figures
from sim import metrics
from sim.metrics import Distribution, Floats
from sim.statistics import sections_of, warm_up
from sim.steplog import FINISHED

TRIMS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
"""Shares of the requests that may be left out as a warm-up."""
SERIES = ("running", "waiting", "kv", "output_tokens_per_s")


def tasks_of(count: int, seeds: Sequence[int], one_course: bool, draws: int) -> list[Task]:
    """A run for every scenario and seed, and one for every scenario with `draws` of the model's error."""
    found = [
        Task(f"{number}-{seed}", number, seed, {}, {"draws": 0, "sections": one_course})
        for seed in seeds
        for number in range(count)
    ]
    if draws:
        columns = {"draws": draws, "sections": False}
        found += [Task(f"{number}-draws", number, seeds[0], {}, columns) for number in range(count)]
    return found


def observe(candidates: Sequence[Candidate], task: Task) -> Row:
    """Simulate, and say what came of it; whatever goes wrong is in the row."""
    row: Row = {"id": task.id, "point": task.number, "seed": task.seed, "draws": task.columns["draws"], "error": None}
    status = INVALID
    try:
        setup = candidates[task.number].set_up(task.seed)
        status = FAILED
        if count := task.columns["draws"]:
            from servecast.intervals import results

            row["under_error"] = [_headline(result) for result in results(setup, count)]
        else:
            row |= _seen(simulate(setup), task.columns["sections"])
        return row | {"status": DONE}
    except ServecastError as error:
        return row | {"status": status, "error": "\n".join(error.problems)}
    except Exception as error:  # the other runs go on
        return row | {"status": FAILED, "error": f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"}


def _headline(result: Result) -> dict[str, float | None]:
    found = figures(result.summary())
    return {metric.key: found.get(metric.key) for metric in METRICS}


def _seen(result: Result, sections: bool) -> dict[str, Any]:
    from reports import words

    summary, series = result.summary(), over_time(result)
    latencies = _latencies(result)
    spent, classes = result.spent, summary.get("classes", {})
    return {
        "figures": figures(summary),
        "saturated": bool(summary["saturated"]),
        "undecided": result.saturation.undecided,
        "verdict": result.saturation.why,
        "setup": words.setup(result),
        "spent": {key: parts["mean"] for key, parts in spent["all"][""].items()},
        "classes": {
            name: {
                "queue_ms": found["spent"].get("ttft_ms", {}).get("mean", {}).get("queue"),
                "p50_ttft_ms": found["p50_ttft_ms"],
                "p99_ttft_ms": found["p99_ttft_ms"],
            }
            for name, found in classes.items()
        },
        "busy": (float(np.mean(series.prefill_share)), float(np.mean(series.decode_share))),
        "curves": {name: _at(values, PERCENTS) for name, values in _distributions(result, latencies).items()},
        "series": {"time_s": series.middles_s} | {name: getattr(series, name) for name in SERIES},
        "warm_up": _warm_up(latencies["e2el_ms"]),
        "trimmed": [_trimmed(latencies, share) for share in TRIMS],
        "sections": _sections(result) if sections else {},
    }


def _latencies(result: Result) -> dict[str, Floats]:
    """TTFT, TPOT and E2E in ms of finished requests, in order of arrival; NaN where undefined."""
    order = np.argsort(result.column("arrival_s", finished=True), kind="stable")
    columns = {"ttft_ms": "ttft_s", "tpot_ms": "tpot_s", "e2el_ms": "e2e_s"}
    return {key: 1e3 * result.column(name, finished=True)[order] for key, name in columns.items()}


def _distributions(result: Result, latencies: Mapping[str, Floats]) -> dict[str, Distribution]:
    found = {key: Distribution.of(values[~np.isnan(values)]) for key, values in latencies.items()}
    itl = result.itl
    return found | {"itl_ms": Distribution(1e3 * itl.values, itl.cumulative)}


def _at(distribution: Distribution, percents: Floats) -> Floats:
    if not distribution.count:
        return np.full(len(percents), np.nan)
    return np.array([distribution.percentile(q) for q in percents.tolist()])


def _warm_up(values: Floats) -> float | None:
    """The share of requests that belong to the warm-up, or None where the run does not settle."""
    found = warm_up(values)
    return None if found is None else found / len(values)


def _trimmed(latencies: Mapping[str, Floats], share: float) -> dict[str, float | None]:
    """The percentiles without the first `share` of the requests."""
    found: dict[str, float | None] = {}
    for metric in STEADY:
        which, _, key = metric.key.partition("_")
        values = latencies[key][int(share * len(latencies[key])) :]
        values = values[~np.isnan(values)]
        found[metric.key] = float(np.percentile(values, int(which[1:]))) if len(values) else None
    return found


def _sections(result: Result) -> dict[int, list[dict[str, float | None]]]:
    """The headline figures of consecutive sections of the run, by the number of sections."""
    return {number: list(_cut(result, number)) for number in sections_of(result.finished)}


def _cut(result: Result, number: int) -> Iterator[dict[str, float | None]]:
    """Latencies and what the cache found by requests, in order of their ids: the same ones in every scenario. Rates by
    the order of finishes: the tokens of a section over the time in which it finished. Token gaps by equal spans of
    time."""
    done = {name: result.column(name, finished=True) for name in ("id", "arrival_s", "first_token_s", "finish_s")}
    done |= {name: result.column(name, finished=True) for name in ("output_tokens", "samples", "network_s")}
    tpot, good = metrics.tpot_s(done), result.good()
    everyone = {n: result.column(n) for n in ("id", "preemptions", "cached_tokens", "prompt_tokens", "samples")}
    served = np.isin(result.column("outcome"), FINISHED)
    edges = np.linspace(0, result.manifest["workload"]["requests"], number + 1)
    finishes = np.array_split(np.argsort(done["finish_s"], kind="stable"), number)
    gaps = result.itl_within(np.linspace(0.0, result.duration_s, number + 1))
    price = figures(result.summary())["cost_per_hour"]
    before = 0.0
    for i in range(number):
        mine, some = ((ids >= edges[i]) & (ids < edges[i + 1]) for ids in (done["id"], everyone["id"]))
        found: dict[str, float | None] = {}
        for key, values in (("ttft_ms", metrics.ttft_s(done)), ("tpot_ms", tpot), ("e2el_ms", metrics.e2e_s(done))):
            found |= _percentiles(key, Distribution.of(values[mine & ~np.isnan(values)]))
        found |= _percentiles("itl_ms", gaps[i])
        last = float(done["finish_s"][finishes[i]].max())
        took, before = last - before, last
        rate = float(done["output_tokens"][finishes[i]].sum()) / took if took > 0 else None
        found["output_throughput"] = rate
        found["request_goodput"] = None if good is None or took <= 0 else float(good[finishes[i]].sum()) / took
        found["cost_per_million_output_tokens"] = price / (rate * 3600 / 1e6) if price and rate else None
        found["preemptions"] = number * float(everyone["preemptions"][some].sum())
        asked = float((everyone["prompt_tokens"] * everyone["samples"])[some].sum())
        found["prefix_cache_hit_rate"] = float(everyone["cached_tokens"][some].sum()) / asked if asked else None
        found["unserved"] = 1 - float(served[some].mean()) if some.any() else None
        yield found


def _percentiles(key: str, values: Distribution) -> dict[str, float | None]:
    return {f"p{q}_{key}": 1e3 * values.percentile(q) if values.count else None for q in (50, 99)}
