"""Columns of a CSV (also gzipped) or Parquet file as they are asked for; every problem with file and row.

It knows no format: who calls says which columns hold whole numbers, numbers or text.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from servecast.errors import one_of

if TYPE_CHECKING:
    import polars as pl

Kind = type[int] | type[float] | type[str]


def read_rows(
    path: Path, columns: Mapping[str, Kind], problems: list[str], nullable: Collection[str] = ()
) -> pl.DataFrame | None:
    """The rows of `path` with `columns` (Int64, finite Float64 or String), and `file` and `row`: where each stood.

    Rows count from 1, a CSV's header being row 1. Columns in `nullable` may be empty or absent (null then). Appends to
    `problems` and returns None when the file cannot be read, lacks a column, holds no rows or a value is of no use.
    """
    import polars as pl

    try:
        raw = _raw(path)
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError, EOFError, zlib.error) as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        problems.append(f"{path}: cannot be read ({why}); is the file complete?")
        return None
    if missing := [c for c in columns if c not in raw.columns and c not in nullable]:
        problems.append(f"{path}: no column {one_of(missing)}; found {one_of(raw.columns)}")
        return None
    if not len(raw):
        problems.append(f"{path}: holds no rows")
        return None
    absent = [pl.lit(None, pl.String).alias(c) for c in columns if c not in raw.columns]
    raw = (
        raw.with_columns(absent)
        .select(list(columns))
        .with_row_index("row", offset=1 if path.suffix == ".parquet" else 2)
    )
    before = len(problems)
    for column, kind in columns.items():
        problems += _useless(raw, column, kind, column in nullable, path)
    if len(problems) > before:
        return None
    return raw.with_columns(*(_cast(column, kind) for column, kind in columns.items()), pl.lit(str(path)).alias("file"))


def _raw(path: Path) -> pl.DataFrame:
    import polars as pl

    if path.suffix == ".parquet":
        return pl.read_parquet(path)
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    # as text, so that a value that is no number can be shown with its row
    return pl.read_csv(data, infer_schema=False)


def _useless(raw: pl.DataFrame, column: str, kind: Kind, may_be_null: bool, path: Path) -> list[str]:
    import polars as pl

    value = pl.col(column)
    if kind is str:
        bad, expected = value.is_null(), "text"
    else:
        number = value.cast(pl.Float64, strict=False)
        bad = number.is_null() | ~number.is_finite()
        expected = "a number"
        if kind is int:
            bad, expected = bad | (number != number.floor()), "a whole number"
    rows = raw.filter(bad & value.is_not_null() if may_be_null else bad)
    if not len(rows):
        return []
    found = "missing" if rows[column][0] is None else repr(rows[column][0])
    more = f" (and {len(rows) - 1:,} more rows)" if len(rows) > 1 else ""
    return [f"{path}, row {rows['row'][0]}: {column} is {found}; expected {expected}{more}"]


def _cast(column: str, kind: Kind) -> pl.Expr:
    import polars as pl

    if kind is str:
        return pl.col(column).cast(pl.String)
    number = pl.col(column).cast(pl.Float64)
    return number.cast(pl.Int64) if kind is int else number
