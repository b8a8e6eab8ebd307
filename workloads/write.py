"""Writes a trace in the canonical form, with everything it knows: Parquet, or JSONL (also gzipped).

`workloads.readers` reads it back: columns, dropped rows and notes are the same, times to the last bit.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from servecast.errors import ServecastError, one_of
from workloads.chains import sessions
from workloads.trace import Trace

if TYPE_CHECKING:
    import polars as pl

ENDINGS = (".parquet", ".jsonl", ".jsonl.gz")
ROWS = 50_000
"""Rows that are in memory as text at a time."""


def write_trace(trace: Trace, path: Path | str) -> None:
    """Write the trace to `path`, whole or not at all; the ending says how. Raises ServecastError when it cannot."""
    path = Path(path)
    check_ending(path)
    part = path.with_name(path.name + ".part")
    try:
        if path.suffix == ".parquet":
            _frame(trace, 0, len(trace)).write_parquet(part)
        else:
            with gzip.open(part, "wb") if path.suffix == ".gz" else part.open("wb") as stream:
                for lines in _lines(trace):
                    stream.write(lines)
        part.replace(path)
    except OSError as error:
        raise ServecastError(f"{path}: cannot be written: {error.strerror or error}") from None
    finally:
        part.unlink(missing_ok=True)


def check_ending(path: Path) -> None:
    """Raises ServecastError for an ending that is not written."""
    if not path.name.endswith(ENDINGS):
        raise ServecastError(f"{path}: the ending says how to write it; use one of {one_of(ENDINGS)}")


def _frame(trace: Trace, start: int, end: int) -> pl.DataFrame:
    """The rows [start, end) as columns."""
    import polars as pl

    rows = slice(start, end)
    columns: dict[str, Any] = {
        "arrival_s": trace.arrival_s[rows],
        "input_tokens": trace.prompt_tokens[rows],
        "output_tokens": trace.output_tokens[rows],
        "max_tokens": trace.max_tokens[rows],
    }
    if trace.turns is not None:
        previous, goes_on = trace.turns.previous, trace.turns.goes_on
        first, depth = sessions(np.where(goes_on, previous, -1))
        columns |= {"session": first[rows], "turn": depth[rows], "think_s": trace.turns.think_s[rows]}
        if trace.turns.session is not None:
            spawned = ((previous >= 0) & ~goes_on)[rows]
            columns["parent"] = pl.Series(first[previous[rows]]).set(pl.Series(~spawned), None)
    if trace.classes is not None:
        index, names = trace.classes
        columns["class"] = pl.Series(names, dtype=pl.String).gather(index[rows])
    if trace.patience_s is not None:
        patience = pl.Series(trace.patience_s[rows])
        columns["patience_s"] = patience.set(patience.is_infinite(), None)
    if trace.samples is not None:
        columns["samples"] = trace.samples[rows]
    if trace.prefix is not None:
        offsets = trace.prefix.offsets[start : end + 1]
        counts = np.diff(offsets)
        ids = {"row": np.repeat(np.arange(counts.size), counts), "id": trace.prefix.ids[offsets[0] : offsets[-1]]}
        every = pl.DataFrame({"row": np.arange(counts.size)})  # also those without a block
        blocks = every.join(pl.DataFrame(ids), on="row", how="left", maintain_order="left_right")
        lists = blocks.group_by("row", maintain_order=True).agg(pl.col("id").drop_nulls())
        columns["block_ids"] = lists["id"]
        columns["block_tokens"] = np.full(counts.size, trace.prefix.block_tokens)
        columns["blocks_chained"] = np.full(counts.size, trace.prefix.chained)
    frame = pl.DataFrame(columns)
    said = [_provenance(trace) if start == 0 else None] + [None] * (len(frame) - 1)
    return frame.with_columns(pl.Series("provenance", said, dtype=pl.String))


def _lines(trace: Trace) -> Iterator[bytes]:
    """JSONL, without keys that have no value."""
    for start in range(0, len(trace), ROWS):
        rows = _frame(trace, start, min(start + ROWS, len(trace))).to_dicts()
        text = [json.dumps({key: v for key, v in row.items() if v is not None}, ensure_ascii=False) for row in rows]
        yield ("\n".join(text) + "\n").encode()


def _provenance(trace: Trace) -> str:
    said: dict[str, Any] = {"source": trace.source, "notes": list(trace.notes), "dropped": dict(trace.dropped)}
    if trace.classes is not None:
        said["classes"] = list(trace.classes[1])
    return json.dumps(said, ensure_ascii=False)
