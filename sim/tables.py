"""From log rows to the tables that people read, and to Parquet files, a block of rows at a time.

It knows what the columns of a table mean and nothing of summaries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sim import metrics
from sim.deployment import Deployment
from sim.metrics import Floats
from sim.steplog import BLOCK, CANCELLED, CHANGES, FAILED, FINISHED, OUTCOMES, REJECTED

if TYPE_CHECKING:
    import polars as pl

SMALL = {
    "replica", "requests", "prefill_replica", "decode_replica", "tokens", "prompt_tokens", "cached_tokens",
    "max_tokens", "preemptions", "samples", "steps", "prefill_requests", "prefill_tokens", "decodes", "gaps", "running",
    "waiting", "kv_blocks", "kv_blocks_end", "preempted", "draft_tokens",
}  # fmt: skip
LARGE = {"id", "kv_tokens", "output_tokens", "step", "first_step", "last_step"}
"""Whole-numbered columns, kept in 32 and 64 bits: a table of a million requests should stay small."""


def _if_finished(measure: Callable[[Mapping[str, Floats]], Floats]) -> Callable[[Mapping[str, Floats]], Floats]:
    """The others have no last token: no TPOT, no E2E."""
    return lambda rows: np.where(np.isin(rows["outcome"], FINISHED), measure(rows), np.nan)


DERIVED: dict[str, Callable[[Mapping[str, Floats]], Floats]] = {
    "queue_s": metrics.queue_s,
    "ttft_s": metrics.ttft_s,
    "tpot_s": _if_finished(metrics.tpot_s),
    "e2e_s": _if_finished(metrics.e2e_s),
}
"""Columns of the table of requests that follow from others: NaN where they do not exist."""


def request_frame(rows: Mapping[str, Floats], more: Mapping[str, Floats], classes: Any) -> pl.DataFrame:
    """The table of requests, of some rows of the log with `more` columns; `classes` are the words of their classes,
    where there are any."""
    import polars as pl

    columns: dict[str, Any] = {"id": rows["id"], "replica": rows["replica"]}
    outcome = rows["outcome"]
    columns["status"] = np.select(
        [np.isin(outcome, FINISHED), np.isin(outcome, REJECTED), outcome == CANCELLED, outcome == FAILED],
        ["finished", "rejected", "cancelled", "failed"],
        "unfinished",
    )
    columns["reason"] = np.array(OUTCOMES)[outcome.astype(int)]
    columns |= {name: derive(rows) for name, derive in DERIVED.items()} | dict(more)
    if classes is not None:
        columns["class"] = classes
    columns |= {name: rows[name] for name in rows if name not in columns and name != "outcome"}
    frame = pl.DataFrame(columns).with_columns(pl.col(pl.Float64).fill_nan(None))
    steps = [pl.when(pl.col(c) >= 0).then(pl.col(c)) for c in ("replica", "first_step", "last_step")]
    frame = frame.with_columns(*steps).with_columns(_integers(frame.columns))
    text = [c for c in ("status", "reason", "class") if c in frame.columns]
    return frame.with_columns(pl.col(text).cast(pl.Categorical))


def step_frame(rows: Mapping[str, Floats], block_bytes: Floats) -> pl.DataFrame:
    """The table of steps, of some rows of the log; a KV block of each replica has `block_bytes` on each GPU."""
    import polars as pl

    frame = pl.DataFrame(dict(rows))
    frame = frame.with_columns(_integers(frame.columns))
    size = pl.Series(block_bytes.astype(np.int64)).gather(frame["replica"])
    return frame.with_columns(kv_cache_bytes=pl.col("kv_blocks").cast(pl.Int64) * size)


def transfer_frame(rows: Mapping[str, Floats]) -> pl.DataFrame:
    """The table of transfers, of some rows of the log."""
    import polars as pl

    frame = pl.DataFrame(dict(rows))
    return frame.with_columns(_integers(frame.columns))


def gap_frame(rows: Mapping[str, Floats]) -> pl.DataFrame:
    """The table of gaps in which requests were left out, of some rows of the log."""
    import polars as pl

    return pl.DataFrame({name: rows[name] for name in ("id", "since_s", "end_s")}).with_columns(_integers(["id"]))


def change_frame(rows: Mapping[str, Floats], deployment: Deployment) -> pl.DataFrame:
    """The table of replicas that come and go."""
    import polars as pl

    names = [pool.name for pool in deployment.pools]
    of = np.searchsorted(deployment.first, rows["replica"], side="right") - 1
    columns = {
        "time_s": rows["time_s"],
        "replica": rows["replica"],
        "pool": [names[i] for i in of],
        "change": [CHANGES[int(change)] for change in rows["change"]],
        "requests": rows["requests"],
    }
    frame = pl.DataFrame(columns)
    return frame.with_columns(_integers(frame.columns))


def write_parquet(path: Path, frames: Iterator[pl.DataFrame]) -> None:
    """Write the frames (one at least) below each other into one file, with only a few of them in memory."""
    from polars.io.plugins import register_io_source

    first = next(frames)
    table = register_io_source(lambda *pushed_down: chain([first], frames), schema=first.schema)
    table.sink_parquet(path, row_group_size=BLOCK)


def _integers(columns: list[str]) -> list[pl.Expr]:
    """Casts of the whole-numbered ones of `columns`."""
    import polars as pl

    sizes = [(SMALL, pl.Int32), (LARGE, pl.Int64)]
    return [pl.col(column).cast(size) for names, size in sizes for column in columns if column in names]


def write_folder(folder: Path, frames: Mapping[str, Iterator[pl.DataFrame]], texts: Mapping[str, str]) -> Path:
    """Write Parquet files of `frames` and text files, by their names. All are written before any takes its name."""
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []

    def part(name: str) -> Path:
        written.append(folder / f"{name}.part")
        return written[-1]

    try:
        for name, blocks in frames.items():
            write_parquet(part(name), blocks)
        for name, text in texts.items():
            part(name).write_text(text, encoding="utf-8")
        for path in written:
            path.replace(path.with_suffix(""))
    except BaseException:
        for path in written:
            path.unlink(missing_ok=True)
        raise
    return folder
