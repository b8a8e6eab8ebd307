"""From a file's columns to a Trace: what is wrong is reported by row, what is left out is counted, times start at 0.

Shared by the readers, which say what each column means. It knows no format.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from servecast.errors import ServecastError, one_of
from workloads.readers.files import TraceFile
from workloads.trace import MAX_TIME_S, MAX_TOKENS, Floats, Trace

if TYPE_CHECKING:
    import polars as pl

Mask = NDArray[np.bool_]


def numbers(values: pl.Series) -> pl.Series:
    """float64 of a column of numbers or of their text; null where the text is not a number."""
    import polars as pl

    text = values.dtype == pl.String
    if not (text or values.dtype.is_numeric() or values.dtype == pl.Null):
        return pl.Series([None] * len(values), dtype=pl.Float64)
    return (values.str.strip_chars() if text else values).cast(pl.Float64, strict=False)


def build_trace(
    file: TraceFile,
    arrival: str,
    prompt: str,
    output: str,
    *,
    cap: str | None = None,
    seconds: Callable[[pl.Series], pl.Series] = numbers,
    time_rule: str = "seconds as numbers",
) -> Trace:
    """The requests of the file, in order of arrival (stable), the first at 0.

    arrival, prompt, output, cap: column names; without a cap column max_tokens is the output length. seconds: turns
    the arrival column into float64 seconds, null where it cannot; time_rule says in words what it accepts.
    Blank rows and rows with 0 prompt or output tokens are dropped and counted. Raises ServecastError with the
    problems of every column, by row.
    """
    import polars as pl

    names = [arrival, prompt, output] + ([cap] if cap else [])
    frame = file.load(names)
    blank = frame.select(pl.all_horizontal(pl.all().is_null())).to_series().to_numpy()
    if blank.all():
        raise ServecastError(f"{file.path}: no requests: a header ({one_of(file.columns)}) without rows below it")

    problems: list[str] = []
    time_limit = f"from 0 to {MAX_TIME_S:g} (above that, are they milliseconds? divide by 1000)"
    checks = [(arrival, seconds, f"times must be {time_rule}", time_limit)]
    checks += [(name, numbers, "token counts must be whole numbers", f"from 0 to {MAX_TOKENS}") for name in names[1:]]
    columns: list[Floats] = []
    for name, convert, rule, limit in checks:
        raw = frame.drop_in_place(name)  # one text column at a time is freed: it outweighs its numbers
        values, found = _column(file, raw, convert, blank, whole=convert is numbers and name != arrival)
        columns.append(values)
        problems += [f"{file.path}: column {name!r} {what} in {rows}; {rule} {limit}" for what, rows in found]
    if problems:
        raise ServecastError(*problems)

    times, prompts, outputs = columns[:3]
    dropped, kept = _drop(blank, prompts, outputs)
    if not kept.any():
        counts = ", ".join(f"{count:,} because {reason}" for reason, count in dropped.items())
        raise ServecastError(f"{file.path}: no requests are left; dropped {counts}")
    if cap and (low := np.flatnonzero(kept & (columns[3] < outputs))).size:
        raise ServecastError(
            f"{file.path}: column {cap!r} is below {output!r} in {file.rows(low)}; a request cannot have produced more "
            "than its cap: correct the rows or leave the column out"
        )

    rows = np.flatnonzero(kept)
    notes = []
    if (back := int(np.count_nonzero(np.diff(times[rows]) < 0))) > 0:
        notes.append(f"not in order of arrival: {back:,} rows are earlier than the row above; sorted (stable)")
        rows = rows[np.argsort(times[rows], kind="stable")]
    lengths = [column[rows].astype(np.int64) for column in columns[1:]]
    return Trace(
        arrival_s=times[rows] - times[rows[0]],
        prompt_tokens=lengths[0],
        output_tokens=lengths[1],
        max_tokens=lengths[-1],
        source=str(file.path),
        dropped=dropped,
        notes=tuple(notes),
    )


def _drop(blank: Mask, prompts: Floats, outputs: Floats) -> tuple[dict[str, int], Mask]:
    """How many rows were left out for each reason (the first that applies), and which ones stay."""
    kept = ~blank
    dropped = {"blank row": int(blank.sum())}
    for reason, values in (("prompt_tokens is 0", prompts), ("output_tokens is 0", outputs)):
        zero = kept & (values == 0)
        dropped[reason] = int(zero.sum())
        kept &= ~zero
    return {reason: count for reason, count in dropped.items() if count}, kept


def _column(
    file: TraceFile, raw: pl.Series, convert: Callable[[pl.Series], pl.Series], blank: Mask, *, whole: bool
) -> tuple[Floats, list[tuple[str, str]]]:
    """The column's numbers (NaN where there is none), and (what is wrong, in which rows) for each kind of mistake."""
    read = convert(raw)
    values = read.to_numpy().astype(np.float64, copy=False)
    unread = read.is_null().to_numpy()
    absent = raw.is_null().to_numpy()
    finite = np.isfinite(values)
    most = MAX_TOKENS if whole else MAX_TIME_S
    mistakes = {
        "is empty": absent,
        "is not understood": unread & ~absent,
        "is not finite": ~finite & ~unread,
        "is negative": finite & (values < 0),
        "is too large": finite & (values > most),
    }
    if whole:
        mistakes["is fractional"] = finite & (values >= 0) & (values <= most) & (values != np.floor(values))
    found = []
    for what, mask in mistakes.items():
        if (where := np.flatnonzero(mask & ~blank)).size:
            found.append((what, file.rows(where, None if mask is absent else raw)))
    return values, found
