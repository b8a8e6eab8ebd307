"""GuideLLM's report, written: the statistics of a benchmark by its own rules. `guidellm` reads it.

A percentile is the smallest value that enough of the weight does not exceed; times per token are weighted by tokens,
concurrency by time. Time stamps are those of the simulation, as if it had begun in 1970. Source:
src/guidellm/schemas/statistics.py and src/guidellm/benchmark/schemas in github.com/vllm-project/guidellm (0.8).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from reports.formats.seen import Floats, Seen
from reports.simulated import SimulatedRun

Bools = npt.NDArray[np.bool_]

QUANTILES = {
    "p001": 0.001, "p01": 0.01, "p05": 0.05, "p10": 0.1, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p90": 0.9,
    "p95": 0.95, "p99": 0.99, "p999": 0.999,
}  # fmt: skip
STRATEGIES = {"closed_loop": "concurrent", "trace": "replay"}
"""Where its name for how requests are sent is not ours."""


def report(seen: Seen) -> dict[str, Any]:
    """The whole file: one benchmark, whose window is the run from time 0 to the last token."""
    run = seen.run
    lists = {name: np.flatnonzero(mask).tolist() for name, mask in _statuses(seen).items()}
    return {
        "metadata": {"version": 2, "guidellm_version": run.made_by},
        "config": {"spec": {"backend": {"model": run.model}}},
        "benchmarks": [
            {
                "type_": "generative_benchmark",
                "config": {"strategy": _strategy(run), "backend": {"model": run.model}},
                "start_time": 0.0,
                "end_time": seen.duration_s,
                "duration": seen.duration_s,
                "warmup_duration": 0.0,
                "cooldown_duration": 0.0,
                "metrics": _metrics(seen),
                "requests": {name: list(_requests(seen, name, rows)) for name, rows in lists.items()},
            }
        ],
    }


def spread(values: Floats, weights: Floats | None = None, count: int | None = None) -> dict[str, Any]:
    """A distribution summary of [n] values, with weights of any sum; zeros where there are none."""
    if not len(values):
        names = ("mean", "median", "mode", "variance", "std_dev", "min", "max", "count", "total_sum")
        return dict.fromkeys(names, 0) | {"percentiles": dict.fromkeys(QUANTILES, 0.0)}
    unique, of = np.unique(values, return_inverse=True)
    share = np.bincount(of, weights=weights).astype(np.float64)
    unique, share = unique[share > 0], share[share > 0]
    total = float(np.dot(unique, share)) if count is None else None  # of tokens a whole number
    count = round(float(share.sum())) if count is None else count
    share /= share.sum()
    mean = float(np.dot(unique, share))
    variance = float(np.dot((unique - mean) ** 2, share))
    places = np.searchsorted(np.cumsum(share), list(QUANTILES.values())).clip(max=len(unique) - 1)
    percentiles = dict(zip(QUANTILES, unique[places].tolist(), strict=True))
    return {
        "mean": mean,
        "median": percentiles["p50"],
        "mode": float(unique[np.argmax(share)]),
        "variance": variance,
        "std_dev": math.sqrt(variance),
        "min": float(unique[0]),
        "max": float(unique[-1]),
        "count": count,
        "total_sum": mean * count if total is None else total,
        "percentiles": percentiles,
    }


def _statuses(seen: Seen) -> dict[str, Bools]:
    cut = np.array([error in ("cancelled", "unfinished") for error in seen.errors])
    return {"successful": seen.done, "incomplete": cut, "errored": ~seen.done & ~cut}


def _strategy(run: SimulatedRun) -> dict[str, Any]:
    kind = {"kind": STRATEGIES.get(run.arrivals, run.arrivals)}
    return kind | {key: told for key, told in (("rate", run.rate), ("streams", run.concurrency)) if told is not None}


def _metrics(seen: Seen) -> dict[str, Any]:
    statuses = _statuses(seen)
    counts = {name: int(mask.sum()) for name, mask in statuses.items()}

    def by_status(values: Floats, weights: Floats | None = None) -> dict[str, Any]:
        known = ~np.isnan(values)
        masks = {name: mask & known for name, mask in statuses.items()} | {"total": known}
        return {name: spread(values[mask], None if weights is None else weights[mask]) for name, mask in masks.items()}

    def rate(of: npt.NDArray[np.int64]) -> dict[str, Any]:
        return {"successful": {"mean": float(of[seen.done].sum()) / seen.duration_s}}

    output, prompt = seen.output.astype(np.float64), seen.input.astype(np.float64)
    per_token = np.where(output > 0, seen.e2e_s / np.maximum(output, 1), np.nan)
    found = {
        "request_totals": counts | {"total": len(seen.done)},
        "requests_per_second": rate(np.ones_like(seen.output)),
        "prompt_tokens_per_second": rate(seen.input),
        "output_tokens_per_second": rate(seen.output),
        "tokens_per_second": rate(seen.input + seen.output),
        "request_concurrency": {"successful": spread(*_concurrency(seen), count=counts["successful"])},
        "request_latency": by_status(seen.e2e_s),
        "prompt_token_count": by_status(prompt),
        "output_token_count": by_status(np.where(seen.done, output, np.nan)),
        "total_token_count": by_status(np.where(seen.done, prompt + output, np.nan)),
        "time_to_first_token_ms": by_status(1e3 * seen.ttft_s),
        "time_per_output_token_ms": by_status(1e3 * per_token, output),
        "inter_token_latency_ms": by_status(1e3 * seen.tpot_s, output - 1),
    }
    if seen.limits:
        found |= _goodput(seen, counts["errored"])
    return found


def _concurrency(seen: Seen) -> tuple[Floats, Floats]:
    """(requests in flight, for how many seconds), of those that succeeded, within the window."""
    sent = seen.sent_s[seen.done]
    times = np.concatenate([[0.0], sent, sent + seen.e2e_s[seen.done]])
    change = np.concatenate([[0.0], np.ones(len(sent)), -np.ones(len(sent))])
    order = np.argsort(times, kind="stable")
    return np.cumsum(change[order])[:-1], np.diff(times[order])


def _goodput(seen: Seen, errored: int) -> dict[str, Any]:
    """A request with one token has no inter-token latency: with a limit on it, it is left out, even if it misses
    another; one that failed counts as bad, one that was cut off not at all."""
    tokens, limited = seen.output[seen.done], seen.limits.get("tpot")
    determined = (
        np.ones(len(tokens), dtype=bool) if limited is None else (tokens > 1) | ~np.isfinite(limited[seen.done])
    )
    good = determined.copy()
    for within in seen.meets(undefined=False).values():
        good &= within
    verdicts = int(determined.sum()) + errored
    slo = {{"ttft": "ttft_ms", "tpot": "tpot_ms", "e2e": "e2el_ms"}[k]: 1e3 * v for k, v in seen.run.slo.items()}
    return {
        "slo": slo,
        "slo_attainment": int(good.sum()) / verdicts if verdicts else None,
        "slo_determined_requests": verdicts,
        "request_goodput": {"successful": {"mean": int(good.sum()) / seen.duration_s}},
    }


def _requests(seen: Seen, status: str, rows: list[int]) -> Iterator[Mapping[str, Any]]:
    words = {"successful": "completed", "incomplete": "cancelled", "errored": "errored"}
    frame = seen.run.requests
    first, finish = frame["first_token_s"], frame["finish_s"]
    for i in rows:
        sent, n = float(seen.sent_s[i]), int(seen.output[i])
        whole, ttft, gap = _number(seen.e2e_s[i]), _number(seen.ttft_s[i]), _number(seen.tpot_s[i])
        timings = {
            "targeted_start": sent,
            "request_start": sent,
            "first_token_iteration": first[i],
            "last_token_iteration": finish[i] if seen.done[i] else None,
            "request_end": finish[i],
            "token_iterations": n,
        }
        yield {
            "request_id": str(seen.ids[i]),
            "info": {"status": words[status], "timings": timings, "error": seen.errors[i]},
            "prompt_tokens": int(seen.input[i]),
            "output_tokens": n,
            "request_latency": whole,
            "time_to_first_token_ms": None if ttft is None else 1e3 * ttft,
            "time_per_output_token_ms": None if whole is None or not n else 1e3 * whole / n,
            "inter_token_latency_ms": None if gap is None else 1e3 * gap,
        }


def _number(value: float) -> float | None:
    return None if math.isnan(value) else float(value)
