"""A plain table of requests: CSV, JSONL or Parquet with one row a request and columns found by name.

Canonical: `arrival_s` (seconds), `input_tokens`, `output_tokens` and, when there is one, `max_tokens` (the client's
cap). Also accepted, with the same units: for arrival_s `arrived_at`, `arrival_time` and `timestamp`; for input_tokens
`prompt_tokens` and `num_prefill_tokens`; for output_tokens `completion_tokens` and `num_decode_tokens`. Names that
other formats use in other units (Mooncake's `input_length`, beside milliseconds) are left out on purpose. What else a
row may say (sessions, classes, prefix blocks, ...) is in `extras`; `workloads.write` writes all of it.
"""

from __future__ import annotations

from servecast.errors import nearest, one_of
from workloads.readers.clean import Requests, noted, to_trace
from workloads.readers.columns import read_columns, times, tokens
from workloads.readers.extras import Extras
from workloads.readers.files import TraceFile
from workloads.readers.options import ReadOptions
from workloads.readers.plausible import too_slow
from workloads.trace import Trace

OPTIONS: tuple[str, ...] = ()
NAMES = {
    "arrival_s": ("arrival_s", "arrived_at", "arrival_time", "timestamp"),
    "input_tokens": ("input_tokens", "prompt_tokens", "num_prefill_tokens"),
    "output_tokens": ("output_tokens", "completion_tokens", "num_decode_tokens"),
}


def lacks(file: TraceFile) -> list[str]:
    """What the header lacks to be of this format, in words; empty when it is."""
    problems = []
    for name, accepted in NAMES.items():
        found = [column for column in accepted if column in file.columns]
        if not found:
            hint = next((hint for word in accepted if (hint := nearest(word, file.columns))), "")
            problems.append(f"column {name!r} is missing{hint}; accepted names: {one_of(accepted)}")
        elif len(found) > 1 and name not in found:
            problems.append(f"columns {one_of(found)} all mean {name!r}; rename the one to use to {name!r}")
    return problems


def read(file: TraceFile, options: ReadOptions) -> Trace:
    """The trace of an opened file. Raises ServecastError by column and row."""
    used = [next(column for column in accepted if column in file.columns) for accepted in NAMES.values()]
    arrival, prompt, output = times(used[0]), tokens(used[1]), tokens(used[2])
    cap, extras = tokens("max_tokens", optional=True), Extras()
    blank = read_columns(file, [arrival, prompt, output, cap, *extras.columns])
    rest = extras.of(file, blank, arrival, prompt, output)
    requests = Requests(
        arrival.values,
        prompt,
        output,
        cap=cap if cap.seen else None,
        prefix=rest.prefix,
        turns=rest.turns,
        classes=rest.classes,
        patience_s=rest.patience_s,
        samples=rest.samples,
        notes=rest.notes,
    )
    trace = rest.restored(to_trace(file, blank, requests))
    known = {*used, *(column.name for column in (cap, *extras.columns) if column.seen)}
    unused = [name for name in file.columns if name and name not in known]
    return noted(trace, *([f"columns not used: {one_of(unused)}"] if unused else []), *too_slow(trace))
