"""Azure LLM inference traces of 2023 and 2024: `TIMESTAMP,ContextTokens,GeneratedTokens`.

2023 writes naive stamps with 7 decimals; 2024 a UTC offset, 6 decimals, and none on whole seconds: each row is read by
itself. Times are exact to the microsecond. Source: github.com/Azure/AzurePublicDataset (cite Splitwise, ISCA'24).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from servecast.errors import ServecastError, nearest
from workloads.readers.clean import build_trace
from workloads.readers.files import TraceFile
from workloads.trace import Trace

if TYPE_CHECKING:
    import polars as pl

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def lacks(columns: Sequence[str]) -> list[str]:
    """What the header lacks to be of this format, in words; empty when it is."""
    return [f"column {name!r} is missing{nearest(name, columns)}" for name in COLUMNS if name not in columns]


def read(file: TraceFile) -> Trace:
    """The trace of an opened file. Raises ServecastError by column and row."""
    if missing := lacks(file.columns):
        raise ServecastError(*(f"{file.path}: as format azure, {problem}" for problem in missing))
    rule = "dates with a time in UTC, like 2023-11-16 18:17:03.9799600 or 2024-05-10 00:00:00+00:00,"
    return build_trace(file, *COLUMNS, seconds=_seconds, time_rule=rule)


def _seconds(stamps: pl.Series) -> pl.Series:
    import polars as pl

    utc = stamps.cast(pl.String).str.strip_chars().str.replace(r"(Z|\+00:00)$", "").str.replace("T", " ", literal=True)
    micros = utc.str.to_datetime("%Y-%m-%d %H:%M:%S%.f", time_unit="us", strict=False).dt.epoch("us")
    # Subtracting whole microseconds first keeps what a float64 of seconds since 1970 would round away.
    return (micros - micros.min()) / 1e6 if micros.count() else micros.cast(pl.Float64)
