"""A plain table of requests: CSV, JSONL or Parquet with one row a request and columns found by name.

Canonical: `arrival_s` (seconds), `input_tokens`, `output_tokens` and, when there is one, `max_tokens` (the client's
cap). Also accepted, with the same units: for arrival_s `arrived_at`, `arrival_time` and `timestamp`; for input_tokens
`prompt_tokens` and `num_prefill_tokens`; for output_tokens `completion_tokens` and `num_decode_tokens`. Names that
other formats use in other units (Mooncake's `input_length`, beside milliseconds) are left out on purpose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from servecast.errors import ServecastError, nearest, one_of
from workloads.readers.clean import build_trace
from workloads.readers.files import TraceFile
from workloads.trace import Trace

NAMES = {
    "arrival_s": ("arrival_s", "arrived_at", "arrival_time", "timestamp"),
    "input_tokens": ("input_tokens", "prompt_tokens", "num_prefill_tokens"),
    "output_tokens": ("output_tokens", "completion_tokens", "num_decode_tokens"),
}


def lacks(columns: Sequence[str]) -> list[str]:
    """What the header lacks to be of this format, in words; empty when it is."""
    problems = []
    for name, accepted in NAMES.items():
        found = [column for column in accepted if column in columns]
        if not found:
            hint = next((hint for word in accepted if (hint := nearest(word, columns))), "")
            problems.append(f"column {name!r} is missing{hint}; accepted names: {one_of(accepted)}")
        elif len(found) > 1 and name not in found:
            problems.append(f"columns {one_of(found)} all mean {name!r}; rename the one to use to {name!r}")
    return problems


def read(file: TraceFile) -> Trace:
    """The trace of an opened file. Raises ServecastError by column and row."""
    if missing := lacks(file.columns):
        raise ServecastError(*(f"{file.path}: as format table, {problem}" for problem in missing))
    used = [next(column for column in accepted if column in file.columns) for accepted in NAMES.values()]
    cap = "max_tokens" if file.mentions("max_tokens") else None
    trace = build_trace(file, *used, cap=cap)
    notes = list(trace.notes)
    if unused := [name for name in file.columns if name and name not in (*used, cap)]:
        notes.append(f"columns not used: {one_of(unused)}")
    if note := _looks_like_milliseconds(trace):
        notes.append(note)
    return replace(trace, notes=tuple(notes))


def _looks_like_milliseconds(trace: Trace) -> str:
    """A note when whole-numbered times imply less than one request in 50 s. Real traces can be so slow, so it asks."""
    span = float(trace.arrival_s[-1])
    if len(trace) < 10 or span < 50 * (len(trace) - 1) or np.any(trace.arrival_s % 1):
        return ""
    rate = (len(trace) - 1) / span
    return (
        f"{rate:.2g} requests per second with whole-numbered times: if the file is in milliseconds, "
        "scale the rate by 1000 (read as seconds here)"
    )
