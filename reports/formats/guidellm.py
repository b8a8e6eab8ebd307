"""GuideLLM's JSON report, versions 1 and 2: `benchmarks` holds a run each, every one with its requests.

Time stamps are Unix seconds, most statistics milliseconds. Source: src/guidellm/benchmark/schemas and
src/guidellm/schemas in github.com/vllm-project/guidellm (0.5 to 0.8).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from reports.formats import figures
from reports.formats.content import ResultFile
from reports.formats.fields import Fields, dig, named, positive, shown
from reports.formats.found import Found, request_table
from reports.formats.guidellm_report import report as report_of
from reports.formats.seen import seen
from reports.simulated import SimulatedRun
from servecast.errors import one_of

if TYPE_CHECKING:
    import polars as pl

FILE = "guidellm.json"
VERSIONS = (1, 2)
STATUSES = {"successful": None, "incomplete": "incomplete: cut off when the benchmark ended", "errored": "errored"}
"""Lists of requests -> why they count as failed, unless they say it themselves."""
NOTES = (
    "TTFT ends with the first token; E2E with the last one, where the tool's request latency ends with the request",
    "stated percentiles are the smallest value that enough requests do not exceed (not interpolated)",
    "the tool's inter-token latency is a request's mean gap, weighted by its gaps: its mean is that of ITL; its "
    "time per output token includes the first token and is no TPOT",
    "rates are over the measured window: warm-up and cool-down are cut off",
    "no gaps between chunks are recorded",
    "every figure is over the requests that succeeded, not those that the end of the benchmark cut off",
)
LOOSE = {"mean_e2el_ms": 0.05}


def lacks(file: ResultFile) -> list[str]:
    """What the file lacks to be of this format, in words; empty when it is."""
    missing = file.lacks("metadata", "benchmarks")
    if not missing and not isinstance(file.objects[0][1]["benchmarks"], list):
        missing.append("'benchmarks' is not a list")
    return missing


def read(file: ResultFile, problems: list[str]) -> list[Found]:
    """The runs of the file; mistakes by benchmark and key. An unknown version is one."""
    runs: list[Found] = []
    for line, found in file.objects:
        report = Fields(file.where(line), found, problems)
        version = dig(found, "metadata", "version")
        if version not in VERSIONS:
            report.problem(
                f"metadata.version is {shown(version)}; known are {one_of(map(str, VERSIONS))}: write the report "
                "again with a GuideLLM from 0.5 to 0.8"
            )
            continue
        entries = report.array("benchmarks", lambda entry: isinstance(entry, dict), "an object a benchmark") or []
        if not entries:
            report.problem("benchmarks is empty: no run was completed")
        for i, entry in enumerate(entries):
            where = report.where if len(entries) == 1 else f"{report.where}: benchmarks[{i}]"
            runs.append(_run(Fields(where, entry, problems), found))
    return runs


def write(run: SimulatedRun, notes: list[str]) -> Iterator[str]:
    """The run as a report of version 2 with one benchmark."""
    notes.append(
        "of rates the report has means only, and no rows of GuideLLM's scheduler: it is for scripts that read it"
    )
    yield json.dumps(report_of(seen(run)), allow_nan=False)


def _run(run: Fields, report: Mapping[str, Any]) -> Found:
    strategy = dig(run.found, "config", "strategy")
    kind = named(dig(strategy, "kind"), dig(strategy, "type_"))
    metrics = run.fields("metrics", need=True)
    counts = metrics.fields("request_totals")
    version = named(dig(report, "metadata", "guidellm_version"))
    done = counts.count("successful")
    failed = [n for n in (counts.count("incomplete"), counts.count("errored")) if n is not None]
    stated, fallback = _figures(metrics)
    if done is not None:
        stated["completed"] = done
    table = _requests(run.fields("requests"))
    return Found(
        tool="guidellm",
        source=run.where,
        version=f"{version or 'unknown'} (report {dig(report, 'metadata', 'version')})",
        model=named(
            dig(run.found, "config", "backend", "model"),
            dig(report, "config", "spec", "backend", "model"),
            dig(report, "args", "model"),
        ),
        requests=table,
        sampled=table is not None and done is not None and table["error"].null_count() < done,
        stated=stated,
        fallback=fallback,
        tolerance=LOOSE,
        duration_s=run.number("duration", least=figures.SHORTEST_S, need=True),
        failed=sum(failed) if failed else None,
        rate=positive(dig(strategy, "rate")),
        concurrency=positive(dig(strategy, "streams"), dig(strategy, "max_concurrency")),
        unit="seconds in time stamps, milliseconds in keys that end in _ms",
        notes=(*NOTES, *([f"requests were sent by the strategy {kind}"] if kind else []), *metrics.unused()),
    )


def _requests(lists: Fields) -> pl.DataFrame | None:
    rows: list[dict[str, Any]] = []
    for status, why in STATUSES.items():
        for i, found in enumerate(lists.array(status, lambda entry: isinstance(entry, dict), "an object") or ()):
            request = Fields(f"{lists.where}.{status}[{i}]", found, lists.problems)
            rows.append({"label": f"{status}[{i}]", **_request(request, why)})
    return request_table({key: [row[key] for row in rows] for key in rows[0]}) if rows else None


def _request(request: Fields, why: str | None) -> dict[str, Any]:
    """Times as our definitions have them, from the time stamps; from the tool's own figures where those are missing."""
    info = request.fields("info")
    timings = info.fields("timings")
    start, first = timings.number("request_start"), timings.number("first_token_iteration")
    last = timings.number("last_token_iteration")
    end = timings.number("request_end") if last is None else last
    ttft, gap = request.number("time_to_first_token_ms"), request.number("inter_token_latency_ms")
    whole = request.number("request_latency")
    return {
        "sent_s": start,
        "input_tokens": request.count("prompt_tokens"),
        "output_tokens": request.count("output_tokens"),
        "ttft_s": first - start if first is not None and start is not None else _seconds(ttft),
        "e2e_s": end - start if end is not None and start is not None else whole,
        "said_tpot_s": _seconds(gap),
        "error": why and (info.text("error") or why),
    }


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def _figures(metrics: Fields) -> tuple[dict[str, float], dict[str, float]]:
    """(figures with our definition, percentiles by the tool's own rule) over the requests that succeeded."""
    same: dict[str, float | None] = {}
    ruled: dict[str, float | None] = {}
    names = {
        "ttft_ms": ("time_to_first_token_ms", 1.0),
        "e2el_ms": ("request_latency", 1e3),
        "itl_ms": ("inter_token_latency_ms", 1.0),
    }
    for ours, (theirs, scale) in names.items():
        values = metrics.fields(theirs).fields("successful")
        same[f"mean_{ours}"] = _scaled(values.number("mean"), scale)
        if ours != "itl_ms":
            ruled |= {
                f"{q}_{ours}": _scaled(values.fields("percentiles").number(q), scale) for q in ("p50", "p90", "p99")
            }
    for ours, theirs in (("total_input_tokens", "prompt_token_count"), ("total_output_tokens", "output_token_count")):
        same[ours] = metrics.fields(theirs).fields("successful").number("total_sum", least=0)
    known = ({key: value for key, value in figures.items() if value is not None} for figures in (same, ruled))
    return next(known), next(known)


def _scaled(value: float | None, scale: float) -> float | None:
    return None if value is None else value * scale
