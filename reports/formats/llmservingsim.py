"""`requests.jsonl` of LLMServingSim's recorded vLLM runs: one JSON line a request, in seconds.

`arrival_time` is wall clock, the other stamps are the engine's monotonic clock, so the file does not say how long a
request waited before the engine took it. Source: bench/ in github.com/casys-kaist/LLMServingSim.
"""

from __future__ import annotations

from typing import Any

from reports.formats.content import ResultFile
from reports.formats.fields import Fields
from reports.formats.found import Found, request_table
from reports.words import requests

STAMPS = ("queued_ts", "first_token_ts", "last_token_ts")
NOTES = (
    "arrival_time is wall clock, the other times are the engine's monotonic clock; they are aligned by the smallest "
    "queued_ts - arrival_time of all requests, as if that one had been queued the moment it was sent: TTFT and E2E of "
    "all are short by that one's wait",
    "measured in the engine's process: no HTTP, and no gaps between tokens are recorded",
    "rates are over the time from the first send to the last token",
)
JUMP_S = 60.0
"""The engine takes a request between two steps; further apart, the clocks do not belong together."""


def lacks(file: ResultFile) -> list[str]:
    """What the file lacks to be of this format, in words; empty when it is."""
    return file.lacks("arrival_time", "input_toks", "output_toks", *STAMPS)


def read(file: ResultFile, problems: list[str]) -> list[Found]:
    """The one run of the file; mistakes by line and key."""
    rows = [_request(Fields(f"{file.path}: line {line}", found, problems)) for line, found in file.objects]
    labels = [f"line {line}" for line, _ in file.objects]
    waits = {
        label: row["queued_ts"] - row["arrival_time"]
        for label, row in zip(labels, rows, strict=True)
        if None not in (row["queued_ts"], row["arrival_time"])
    }
    offset = min(waits.values(), default=0.0)
    columns: dict[str, list[Any]] = {
        "label": labels,
        "sent_s": [row["arrival_time"] for row in rows],
        "input_tokens": [row["input_toks"] for row in rows],
        "output_tokens": [row["output_toks"] for row in rows],
        "ttft_s": [_since(row, "first_token_ts", offset) for row in rows],
        "e2e_s": [_since(row, "last_token_ts", offset) for row in rows],
        "error": [_error(row) for row in rows],
    }
    return [
        Found(
            tool="llmservingsim",
            source=str(file.path),
            requests=request_table(columns),
            unit="seconds",
            notes=NOTES,
            doubts=_jump(waits, offset),
        )
    ]


def _request(record: Fields) -> dict[str, Any]:
    out: dict[str, Any] = {name: record.count(name, need=True) for name in ("input_toks", "output_toks")}
    out["arrival_time"] = record.number("arrival_time", need=True)
    return out | {name: record.number(name) for name in STAMPS}


def _since(row: dict[str, Any], stamp: str, offset: float) -> float | None:
    if row[stamp] is None or row["arrival_time"] is None:
        return None
    return float(row[stamp] - (row["arrival_time"] + offset))


def _error(row: dict[str, Any]) -> str | None:
    absent = [name for name in STAMPS if row[name] is None]
    return f"no {absent[0]}: it did not get that far" if absent else None


def _jump(waits: dict[str, float], offset: float) -> tuple[str, ...]:
    late = {label: wait - offset for label, wait in waits.items() if wait - offset > JUMP_S}
    if not late:
        return ()
    label, wait = next(iter(late.items()))
    return (
        f"the clocks do not stay together in {requests(len(late))}: queued_ts - arrival_time is {wait:.6g} s larger "
        f"at {label} than where it is smallest: several runs in one file, or a clock that was set? TTFT and E2E are "
        "wrong then",
    )
