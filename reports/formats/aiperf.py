"""aiperf's and genai-perf's summary, `profile_export_aiperf.json` and `profile_export_genai_perf.json`: metric ->
{unit, avg, p50, ...}. The unit is as the file says.

Source: docs/reference/json-export-schema.md in github.com/ai-dynamo/aiperf (schema 1).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from reports.formats.content import ResultFile
from reports.formats.fields import MOST, Fields, dig, named, positive, shown
from reports.formats.figures import COUNTS, SHORTEST_S
from reports.formats.found import Found
from reports.formats.seen import UNKNOWN_GAPS, Floats, Seen
from reports.formats.seen import seen as seen_of
from reports.simulated import SimulatedRun
from servecast.errors import one_of

FILE = "profile_export_aiperf.json"
SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0, "seconds": 1.0, "min": 60.0}
"""Units of time -> seconds."""
TIMES = {
    "time_to_first_token": "ttft_ms",
    "inter_token_latency": "tpot_ms",
    "inter_chunk_latency": "itl_ms",
    "request_latency": "e2el_ms",
}
LENGTHS = {
    "input_sequence_length": "input_tokens_per_request",
    "output_sequence_length": "output_tokens_per_request",
}
TOTALS = {
    "request_count": "completed",
    "total_isl": "total_input_tokens",
    "total_osl": "total_output_tokens",
    "request_throughput": "request_throughput",
    "output_token_throughput": "output_throughput",
    "total_token_throughput": "total_token_throughput",
    "goodput": "request_goodput",
}
"""Its metric -> our key; all are single values under `avg`."""
STATS = {"avg": "mean", "p50": "p50", "p90": "p90", "p99": "p99"}
"""Its statistic -> ours; `std` is the sample's in some versions and the population's in others."""
NOTES = (
    "TTFT ends with the first response that has content",
    "the tool's inter-token latency is our TPOT (it may subtract the tokens of the first chunk instead of 1), its "
    "inter-chunk latency our ITL, in which a chunk may hold several tokens",
    "rates are over the time from the first request to the last response",
    "a one-token answer counts as bad for goodput with a limit on inter-token latency",
    "every figure is over the requests that succeeded; standard deviations are not taken over",
)


def lacks(file: ResultFile) -> list[str]:
    """What the file lacks to be of this format, in words; empty when it is."""
    missing = file.lacks("request_latency", "request_throughput")
    if not missing and not isinstance(file.objects[0][1]["request_latency"], dict):
        missing.append("'request_latency' is not an object with unit and avg")
    return missing


def read(file: ResultFile, problems: list[str]) -> list[Found]:
    """The run of the file; mistakes by metric."""
    return [_run(Fields(file.where(line), found, problems)) for line, found in file.objects]


def write(run: SimulatedRun, notes: list[str]) -> Iterator[str]:
    """The summary in schema 1.4, over the time from the first request to the last response."""
    seen = seen_of(run)
    done = seen.done
    first, end = seen.sent_s[done].min(), (seen.sent_s + seen.e2e_s)[done].max()
    duration, prompt, output = float(end - first), seen.input[done].sum(), seen.output[done].sum()
    told = {"rate": run.rate, "concurrency": run.concurrency}
    written: dict[str, Any] = {
        "schema_version": "1.4",
        "aiperf_version": run.made_by,
        "input_config": {
            "models": {"items": [{"name": run.model}]},
            "phases": [{"name": "profiling"} | {key: value for key, value in told.items() if value is not None}],
        },
        "was_cancelled": not run.summary["complete"],
        "error_summary": [
            {"error_details": error_of(error), "count": count}
            for error, count in Counter(filter(None, seen.errors)).items()
        ],
    }
    several = done & ~np.isnan(seen.tpot_s)
    values = {
        "time_to_first_token": ("ms", 1e3 * seen.ttft_s[done]),
        "inter_token_latency": ("ms", 1e3 * seen.tpot_s[several]),
        "request_latency": ("ms", 1e3 * seen.e2e_s[done]),
        "input_sequence_length": ("tokens", seen.input[done].astype(np.float64)),
        "output_sequence_length": ("tokens", seen.output[done].astype(np.float64)),
        "output_token_throughput_per_user": ("tokens/sec/user", 1 / seen.tpot_s[several]),
    }
    values |= _of_gaps(seen, notes)
    written |= {name: _stats(unit, of) for name, (unit, of) in values.items() if len(of)}
    single = {
        "request_count": ("requests", float(done.sum())),
        "error_request_count": ("requests", float((~done).sum())),
        "benchmark_duration": ("sec", duration),
        "total_isl": ("tokens", float(prompt)),
        "total_osl": ("tokens", float(output)),
        "request_throughput": ("requests/sec", float(done.sum()) / duration),
        "output_token_throughput": ("tokens/sec", float(output) / duration),
        "total_token_throughput": ("tokens/sec", float(prompt + output) / duration),
    }
    if seen.limits:
        good = seen.good(undefined=False)
        single |= {"good_request_count": ("requests", float(good)), "goodput": ("requests/sec", good / duration)}
    written |= {name: {"unit": unit, "avg": value} for name, (unit, value) in single.items()}
    yield json.dumps(written, indent=2, allow_nan=False)


def error_of(error: str) -> dict[str, Any]:
    """Why a request did not succeed, as the tool's error."""
    kind, _, message = error.partition(": ")
    return {"code": 499 if kind == "cancelled" else None, "type": kind, "message": message}


def _of_gaps(seen: Seen, notes: list[str]) -> Mapping[str, tuple[str, Floats]]:
    if not seen.gaps_known:
        notes.append(f"inter_chunk_latency and time_to_second_token are left out: {UNKNOWN_GAPS}")
        return {}
    second = [gaps[0] for gaps in seen.gaps if gaps is not None and len(gaps)]
    return {
        "inter_chunk_latency": ("ms", 1e3 * seen.all_gaps),
        "time_to_second_token": ("ms", 1e3 * np.array(second)),
    }


def _stats(unit: str, values: Floats) -> dict[str, Any]:
    """Percentiles interpolated; the standard deviation is the population's."""
    levels = (1, 5, 10, 25, 50, 75, 90, 95, 99)
    percentiles = np.percentile(values, levels).tolist()
    return {
        "unit": unit,
        "avg": float(values.mean()),
        **{f"p{q}": value for q, value in zip(levels, percentiles, strict=True)},
        "min": float(values.min()),
        "max": float(values.max()),
        "std": float(values.std()),
        "count": len(values),
        "sum": float(values.sum()),
    }


def _run(run: Fields) -> Found:
    schema, release = run.text("schema_version"), run.text("aiperf_version")
    if schema is not None and schema.partition(".")[0] != "1":
        run.problem(f"schema_version is {shown(schema)}; 1.x is known: export again with a release of that schema")
    config = run.found.get("input_config")
    run.used |= {"input_config", "was_cancelled"}
    stated = {ours: _single(run, theirs) for theirs, ours in TOTALS.items()}
    for theirs, ours in (TIMES | LENGTHS).items():
        stated |= _distribution(run, theirs, ours)
    took = run.fields("benchmark_duration")
    duration, failed = took.number("avg", least=SHORTEST_S), run.fields("error_request_count").count("avg")
    doubts = ["the run was cancelled before its end"] if run.found.get("was_cancelled") is True else []
    return Found(
        tool="aiperf" if schema or release else "genai-perf",
        source=run.where,
        version=release or (f"schema {schema}" if schema else ""),
        model=named(dig(config, "models", "items", 0, "name"), dig(config, "endpoint", "model_names", 0)),
        stated={key: value for key, value in stated.items() if value is not None},
        duration_s=None if duration is None else duration * scale_of(took),
        failed=failed,
        rate=positive(
            *_phases(config, "rate"), *_phases(config, "request_rate"), dig(config, "loadgen", "request_rate")
        ),
        concurrency=positive(*_phases(config, "concurrency"), dig(config, "loadgen", "concurrency")),
        unit="in the unit that stands beside them",
        notes=(*NOTES, *run.unused()),
        doubts=tuple(doubts),
    )


def _single(run: Fields, name: str) -> float | None:
    """A value that is not a distribution; counts are whole."""
    metric = run.fields(name)
    return metric.count("avg", most=int(MOST)) if TOTALS[name] in COUNTS else metric.number("avg", least=0)


def _distribution(run: Fields, theirs: str, ours: str) -> dict[str, float | None]:
    metric = run.fields(theirs)
    if not metric.found:
        return {}
    scale = 1e3 * scale_of(metric) if theirs in TIMES else 1.0
    values = {f"{stat}_{ours}": metric.number(name) for name, stat in STATS.items()}
    return {key: None if value is None else value * scale for key, value in values.items()}


def _phases(config: Any, key: str) -> list[Any]:
    """What the phases that were measured were told, in newer files."""
    phases = dig(config, "phases")
    listed: list[Any] = phases if isinstance(phases, list) else []
    return [dig(phase, key) for phase in listed if "profiling" in (dig(phase, "name"), dig(phase, "kind"))]


def seconds_of(metrics: Fields, name: str) -> float | None:
    """A time of one record, in seconds; None where it has none."""
    metric = metrics.fields(name)
    value = metric.number("value")
    return None if value is None else value * scale_of(metric)


def scale_of(metric: Fields) -> float:
    """Its unit in seconds; a problem where that is unknown."""
    unit = metric.text("unit")
    if unit not in SECONDS:
        metric.problem(f"unit is {shown(unit)}; one of {one_of(SECONDS)} was expected")
    return SECONDS.get(unit or "", 1.0)
