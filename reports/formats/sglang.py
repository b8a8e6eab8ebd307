"""sglang's serving benchmark: one JSON line a run, also `--output-details`.

Seconds in arrays, milliseconds in statistics. There are no send times; E2E per request is not recorded either, but the
last token follows from TTFT and ITLs. Source: python/sglang/benchmark/serving.py in github.com/sgl-project/sglang.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from reports.formats import figures
from reports.formats.content import ResultFile
from reports.formats.details import has_details, rate_of, requests_of, stated_of
from reports.formats.fields import Fields, dig, is_number, named
from reports.formats.found import Found
from reports.formats.seen import UNKNOWN_GAPS
from reports.formats.seen import seen as seen_of
from reports.formats.written import arrays, gap_statistics, peaks, statistics, totals
from reports.simulated import SimulatedRun

FILE = "sglang.jsonl"
PERCENTILES = (90, 95, 99)
NEEDED = ("duration", "completed", "total_input_tokens", "total_output_tokens", "total_output_tokens_retokenized")
_OURS = {"total_token_throughput": "total_throughput"}
STATED = {
    key: _OURS.get(key, key.replace("e2el_ms", "e2e_latency_ms"))
    for key in figures.KEYS
    if key not in ("duration", "submitted")
}
LOOSE = {key: 0.02 for key in figures.KEYS if key.endswith(("e2el_ms", "tpot_ms"))}
"""The tool's E2E, and with it its TPOT, ends with the last event of the stream, ours with the last token."""
NOTES = (
    "TTFT begins when the request is sent, the set-up of its connection (a new one each) included, and ends with the "
    "first text that is not empty",
    "E2E and TPOT end with the last token where they are computed from requests, with the last event of the stream "
    "where the file states them",
    "ITL is the gap between chunks divided by their tokens, once a token (endpoint /generate), or one gap a chunk",
    "rates are over the client's whole duration; output tokens are those the server counted, not retokenised",
    "every figure is over the requests that succeeded",
)


def lacks(file: ResultFile) -> list[str]:
    """What the file lacks to be of this format, in words; empty when it is."""
    return file.lacks(*NEEDED)


def read(file: ResultFile, problems: list[str]) -> list[Found]:
    """The runs of the file; mistakes by line and key."""
    return [_run(Fields(file.where(line), found, problems)) for line, found in file.objects]


def _run(run: Fields) -> Found:
    stated = stated_of(run, STATED, NEEDED)
    rate, notes = rate_of(run)
    retokenized = run.count("total_output_tokens_retokenized", need=True)
    server = run.found.get("server_info")
    run.used |= {"server_info"}
    if retokenized is not None and retokenized != stated.get("total_output_tokens"):
        notes.append(f"tokenised again, the answers have {retokenized:,} tokens")
    return Found(
        tool="sglang",
        source=run.where,
        version=named(dig(server, "version")) or "",
        model=named(dig(server, "served_model_name"), dig(server, "model_path")),
        requests=requests_of(run, "--output-details", _asked(run)) if has_details(run) else None,
        stated=stated,
        tolerance=LOOSE,
        duration_s=run.number("duration", least=figures.SHORTEST_S, need=True),
        rate=rate,
        concurrency=run.number("max_concurrency", least=1),
        unit="seconds in arrays and milliseconds in statistics",
        notes=(*NOTES, *notes, *run.unused()),
    )


def _asked(run: Fields) -> tuple[int, int] | None:
    """The least and most output tokens that the data set asked for, where the file says that."""
    if run.text("dataset_name") not in ("random", "random-ids"):
        return None
    most, ratio = run.count("random_output_len"), run.number("random_range_ratio", least=0, most=1)
    if most is None or ratio is None or not is_number(ratio):
        return None
    return max(1, math.floor(most * ratio)), most


def write(run: SimulatedRun, notes: list[str]) -> Iterator[str]:
    """The run as a line with `--output-details`; without details, which would lack the end of requests, where the gaps
    between tokens are not known."""
    seen = seen_of(run)
    done, prompt, output = totals(seen)
    duration = seen.duration_s
    written: dict[str, Any] = {
        "backend": run.made_by,
        "dataset_name": run.arrivals,
        "request_rate": run.rate or ("trace" if run.arrivals == "trace" else "inf"),
        "max_concurrency": run.concurrency,
        "server_info": {"version": run.made_by, "model_path": run.model},
        "duration": duration,
        "completed": done,
        "total_input_tokens": prompt,
        "total_input_text_tokens": prompt,
        "total_input_vision_tokens": 0,
        "total_output_tokens": output,
        "total_output_tokens_retokenized": output,
        "request_throughput": done / duration,
        "input_throughput": prompt / duration,
        "output_throughput": output / duration,
        "total_throughput": (prompt + output) / duration,
        "concurrency": float(np.nansum(seen.e2e_s)) / duration,
        "accept_length": None,
        **peaks(seen),
    }
    for name, values in (("e2e_latency", seen.e2e_s), ("ttft", seen.ttft_s), ("tpot", seen.tpot_s)):
        written |= statistics(name, values[seen.done & ~np.isnan(values)], PERCENTILES)
    written |= gap_statistics(seen, PERCENTILES)
    if seen.limits:
        sent, good = len(seen.done), seen.good(undefined=True)
        met = seen.meets(undefined=True)
        written["goodput_slos_ms"] = {_SLOS[name]: 1e3 * limit for name, limit in run.slo.items()}
        written |= {"request_goodput": good / duration, "slo_attainment": good / sent}
        written["slo_attainment_by_metric"] = {_SLOS[name]: int(ok.sum()) / sent for name, ok in met.items()}
    if seen.gaps_known:
        written |= arrays(seen)
    else:
        notes.append(f"the arrays of the requests are left out, and ITL figures are over all tokens: {UNKNOWN_GAPS}")
    yield json.dumps(written, allow_nan=False) + "\n"


_SLOS = {"ttft": "ttft", "tpot": "tpot", "e2e": "e2el"}
