"""servecast's own table of requests: a row a request, as `requests.parquet` of a result folder has them.

Every column of `Result.requests`, seconds and tokens; nothing where a time does not exist.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from reports.formats.content import ResultFile
from reports.formats.found import Found, request_table
from reports.simulated import SimulatedRun
from workloads.readers.columns import Numbers, Texts, read_columns
from workloads.trace import MAX_TIME_S, MAX_TOKENS

FILE = "requests.csv"
TIMES = ("arrival_s", "ttft_s", "e2e_s", "finish_s")
COUNTS = ("prompt_tokens", "output_tokens")
WORDS = ("status", "reason")
NOTES = (
    "simulated by servecast, not measured",
    "rates are over the time from 0 on the clock of the simulation to the last token",
    "no gaps between tokens are in the table",
)
ROWS = 2**16
"""Rows that are turned into text together."""


def lacks(file: ResultFile) -> list[str]:
    """What the file lacks to be of this format, in words; empty when it is."""
    return file.lacks(*TIMES, *COUNTS, *WORDS, table=True)


def read(file: ResultFile, problems: list[str]) -> list[Found]:
    """The one run of the file. Raises ServecastError with all mistakes, by column and row."""
    table = file.table
    if table is None:
        return []
    rule = f"seconds from {-MAX_TIME_S:g} to {MAX_TIME_S:g} were expected"
    times = {name: Numbers(name, rule, least=-MAX_TIME_S, most=MAX_TIME_S, gaps=name != "arrival_s") for name in TIMES}
    counts = {name: Numbers(name, "token counts are whole numbers", most=MAX_TOKENS, whole=True) for name in COUNTS}
    words = {name: Texts(name) for name in WORDS}
    rows = np.flatnonzero(~read_columns(table, [*times.values(), *counts.values(), *words.values()]))
    status, reason = ([words[name].words[code] for code in words[name].codes[rows]] for name in WORDS)
    done = np.array([each == "finished" for each in status])
    ends = times["finish_s"].values[rows][done]
    listed = {name: _nulls(column.values[rows]) for name, column in times.items()}
    columns = {
        "label": [f"row {table.first_row + i}" for i in rows.tolist()],
        "sent_s": listed["arrival_s"],
        "input_tokens": counts["prompt_tokens"].values[rows].astype(np.int64).tolist(),
        "output_tokens": np.where(done, counts["output_tokens"].values[rows], 0).astype(np.int64).tolist(),
        "ttft_s": listed["ttft_s"],
        "e2e_s": listed["e2e_s"],
        "error": [
            None if ok else said if said == why else f"{said}: {why}"
            for ok, said, why in zip(done, status, reason, strict=True)
        ],
    }
    return [
        Found(
            tool="servecast",
            source=str(file.path),
            requests=request_table(columns),
            duration_s=float(np.nanmax(ends)) if len(ends) and not np.isnan(ends).all() else None,
            unit="seconds",
            notes=NOTES,
        )
    ]


def write(run: SimulatedRun, notes: list[str]) -> Iterator[str]:
    """The table of requests, whatever became of them."""
    import polars as pl

    texts = pl.col(pl.Categorical).cast(pl.String)
    yield run.requests.clear().with_columns(texts).write_csv()
    for frame in run.requests.iter_slices(ROWS):
        yield frame.with_columns(texts).write_csv(include_header=False)


def _nulls(values: npt.NDArray[np.float64]) -> list[float | None]:
    return [None if np.isnan(value) else value for value in values.tolist()]
