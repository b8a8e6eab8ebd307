"""From checked columns to a Trace: what is left out is counted, requests stand in order of arrival, times start at 0.

Shared by the readers, which say what each column means. It knows no format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from servecast.errors import ServecastError
from workloads.prefix import Prefix
from workloads.readers.columns import Mask, Numbers
from workloads.readers.files import TraceFile
from workloads.trace import Floats, Ints, Trace, Turns


@dataclass(frozen=True, slots=True)
class Requests:
    """The requests of a file, one entry a row of it, before rows are dropped and sorted.

    arrival_s: seconds on any clock. prefix: blocks of every row. turns: given the rows that stay, in their final order
    (intp[k]), what follows what. skip: rows to leave out, by reason, before those with 0 tokens.
    """

    arrival_s: Floats
    prompt: Numbers
    output: Numbers
    cap: Numbers | None = None
    prefix: Prefix | None = None
    turns: Callable[[Ints], Turns] | None = None
    classes: tuple[Ints, tuple[str, ...]] | None = None
    patience_s: Floats | None = None
    samples: Ints | None = None
    skip: Mapping[str, Mask] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def to_trace(file: TraceFile, blank: Mask, requests: Requests) -> Trace:
    """Drops and counts blank rows, those to skip and those with 0 tokens; sorts (stable); the first arrives at 0."""
    prompts, outputs, cap = requests.prompt.values, requests.output.values, requests.cap
    kept = ~blank
    dropped: dict[str, int] = {"blank row": int(blank.sum())}
    zeros = {"prompt_tokens is 0": prompts == 0, "output_tokens is 0": outputs == 0}
    for reason, mask in {**requests.skip, **zeros}.items():
        dropped[reason] = int((kept & mask).sum())
        kept &= ~mask
    dropped = {reason: count for reason, count in dropped.items() if count}
    if not kept.any():
        counts = ", ".join(f"{count:,} because {reason}" for reason, count in dropped.items())
        raise ServecastError(f"{file.path}: no requests are left; dropped {counts}")
    if cap is not None and (low := np.flatnonzero(kept & (cap.values < outputs))).size:
        said = file.rows([str(file.first_row + i) for i in low[:5]], low.size)
        raise ServecastError(
            f"{file.path}: column {cap.name!r} is below {requests.output.name!r} in {said}; a request cannot have "
            "produced more than its cap: correct the rows or leave the column out"
        )
    rows, notes = in_order(requests.arrival_s, kept)
    times = requests.arrival_s[rows]
    output_tokens = outputs[rows].astype(np.int64)
    return Trace(
        arrival_s=times - times[0],
        prompt_tokens=prompts[rows].astype(np.int64),
        output_tokens=output_tokens,
        max_tokens=output_tokens if cap is None else cap.values[rows].astype(np.int64),
        source=str(file.path),
        prefix=None if requests.prefix is None else requests.prefix.rows(rows),
        turns=None if requests.turns is None else requests.turns(rows),
        classes=None if requests.classes is None else (requests.classes[0][rows], requests.classes[1]),
        patience_s=None if requests.patience_s is None else requests.patience_s[rows],
        samples=None if requests.samples is None else requests.samples[rows],
        dropped=dropped,
        notes=(*notes, *requests.notes),
    )


def in_order(times: Floats, kept: Mask) -> tuple[Ints, list[str]]:
    """The kept rows in order of arrival (stable), and a note where the file has another order."""
    rows = np.flatnonzero(kept)
    back = int(np.count_nonzero(np.diff(times[rows]) < 0))
    if not back:
        return rows, []
    rows = rows[np.argsort(times[rows], kind="stable")]
    return rows, [f"not in order of arrival: {back:,} rows are earlier than the row above; sorted (stable)"]


def noted(trace: Trace, *notes: str, first: bool = False) -> Trace:
    """The trace with further notes, before or behind those it has."""
    said = (*notes, *trace.notes) if first else (*trace.notes, *notes)
    return replace(trace, notes=said) if notes else trace
