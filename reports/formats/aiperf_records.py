"""aiperf's `profile_export.jsonl`: one JSON line a request, {metadata, metrics, error}.

Time stamps in nanoseconds, metrics in the unit that stands beside them. Records of the warm-up are left out, and
counted in the notes. Source: docs/tutorials/working-with-profile-exports.md in github.com/ai-dynamo/aiperf.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from reports.formats import aiperf
from reports.formats.aiperf import error_of, scale_of, seconds_of
from reports.formats.content import ResultFile
from reports.formats.fields import NUMBER, Fields, dig, is_number
from reports.formats.found import Found, request_table
from reports.formats.seen import UNKNOWN_GAPS, Seen
from reports.formats.seen import seen as seen_of
from reports.simulated import SimulatedRun
from reports.words import requests

FILE = "profile_export.jsonl"
LAST_NS = 1e19
NOTES = (*aiperf.NOTES[:3], "sent_s is when the request was sent, not when it was due (credit_issued_ns)")


def lacks(file: ResultFile) -> list[str]:
    """What the file lacks to be of this format, in words; empty when it is."""
    missing = file.lacks("metadata", "metrics")
    if not missing and dig(file.objects[0][1], "metadata", "request_start_ns") is None:
        missing.append("'metadata' has no request_start_ns")
    return missing


def read(file: ResultFile, problems: list[str]) -> list[Found]:
    """The one run of the file; mistakes by line and key."""
    starts: list[int] = []
    rows: list[dict[str, Any]] = []
    warmup = 0
    for line, found in file.objects:
        record = Fields(f"{file.path}: line {line}", found, problems)
        metadata = record.fields("metadata", need=True)
        if metadata.text("benchmark_phase") == "warmup":
            warmup += 1
            continue
        starts.append(metadata.count("request_start_ns", need=True, most=int(LAST_NS)) or 0)
        rows.append({"label": f"line {line}", **_request(record, metadata)})
    if not rows:
        problems.append(
            f"{file.path}: {requests(warmup)} of the warm-up and no other: nothing was measured; repeat the run"
        )
        return []
    first = min(starts)  # subtracted as integers: a float cannot hold nanoseconds since 1970
    columns = {key: [row[key] for row in rows] for key in rows[0]}
    columns["sent_s"] = [(start - first) / 1e9 for start in starts]
    left_out = [f"left out: {requests(warmup)} of the warm-up"] if warmup else []
    return [
        Found(
            tool="aiperf",
            source=str(file.path),
            requests=request_table(columns),
            unit="in the unit that stands beside them",
            notes=(*NOTES, *left_out),
        )
    ]


def write(run: SimulatedRun, notes: list[str]) -> Iterator[str]:
    """A line a request; time stamps are those of the simulation, in whole ns from its time 0."""
    seen = seen_of(run)
    if not seen.gaps_known:
        notes.append(f"some inter_chunk_latency are left out: {UNKNOWN_GAPS}")
    finish = run.requests["finish_s"].to_list()
    for i, error in enumerate(seen.errors):
        start = round(seen.sent_s[i] * 1e9)
        record = {
            "metadata": {
                "session_num": i,
                "x_request_id": str(seen.ids[i]),
                "credit_issued_ns": start,
                "request_start_ns": start,
                "request_end_ns": None if finish[i] is None else round(finish[i] * 1e9),
                "worker_id": run.made_by,
                "benchmark_phase": "profiling",
                "was_cancelled": error == "cancelled",
            },
            "metrics": _metrics(seen, i),
            "error": None if error is None else error_of(error),
        }
        yield json.dumps(record, allow_nan=False) + "\n"


def _metrics(seen: Seen, i: int) -> dict[str, Any]:
    if not seen.done[i]:
        return {"error_isl": {"value": int(seen.input[i]), "unit": "tokens"}}
    found: dict[str, Any] = {
        "input_sequence_length": {"value": int(seen.input[i]), "unit": "tokens"},
        "output_sequence_length": {"value": int(seen.output[i]), "unit": "tokens"},
        "time_to_first_token": {"value": 1e3 * float(seen.ttft_s[i]), "unit": "ms"},
        "request_latency": {"value": 1e3 * float(seen.e2e_s[i]), "unit": "ms"},
    }
    if not math.isnan(seen.tpot_s[i]):
        found["inter_token_latency"] = {"value": 1e3 * float(seen.tpot_s[i]), "unit": "ms"}
    gaps = seen.gaps[i]
    if gaps is not None and len(gaps):
        found["inter_chunk_latency"] = {"value": (1e3 * gaps).tolist(), "unit": "ms"}
    return found


def _request(record: Fields, metadata: Fields) -> dict[str, Any]:
    metrics = record.fields("metrics")
    error = _error(record, metadata)
    lengths = "error_isl" if error and "error_isl" in metrics.found else "input_sequence_length"
    chunks = metrics.fields("inter_chunk_latency")
    gaps = chunks.array("value", is_number, NUMBER)
    scale = scale_of(chunks) if gaps else 1.0
    output = metrics.fields("output_sequence_length").count("value")
    if error is None and seconds_of(metrics, "request_latency") is None:
        error = "no request_latency, and no error either"
    return {
        "input_tokens": metrics.fields(lengths).count("value"),
        "output_tokens": output,
        "ttft_s": seconds_of(metrics, "time_to_first_token"),
        "e2e_s": seconds_of(metrics, "request_latency"),
        "said_tpot_s": seconds_of(metrics, "inter_token_latency"),
        "error": error,
        "itl_s": [] if gaps is None and output == 1 else gaps and [gap * scale for gap in gaps],
    }


def _error(record: Fields, metadata: Fields) -> str | None:
    if record.found.get("error") is not None:
        error = record.fields("error")
        return ": ".join(filter(None, (error.text("type"), error.text("message")))) or "an error without a message"
    return "cancelled" if metadata.found.get("was_cancelled") is True else None
