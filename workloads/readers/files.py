"""Opens a trace file as named columns with the row numbers people see: CSV or JSONL (also gzipped), or Parquet.

The kind is told from the content, not from the name. Values stay as they are in the file (text, or Parquet's types):
what the columns mean is the readers' business.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from servecast.errors import ServecastError, nearest, one_of

if TYPE_CHECKING:
    import polars as pl

_LONGEST_HEADER = 2**24


@dataclass(frozen=True, slots=True)
class TraceFile:
    """A trace file whose header was read. columns: names in file order (JSONL: the first object's keys).
    first_row: the number in the file of the first data row (a CSV header is row 1). content: where the data are read
    from, the path itself or the decompressed bytes.
    """

    path: Path
    kind: str
    columns: tuple[str, ...]
    first_row: int
    content: Path | bytes

    def load(self, names: Sequence[str]) -> pl.DataFrame:
        """The named columns, one row for each row of the file; null where a value is absent, in every column where a
        line is blank. Raises ServecastError with rows where the file's structure is broken.
        """
        with self._readable():
            if self.kind == "parquet":
                import polars as pl

                return pl.read_parquet(self.path, columns=list(names)).select(names)
            return self._load_jsonl(names) if self.kind == "jsonl" else self._load_csv(names)

    def mentions(self, name: str) -> bool:
        """Whether any row may hold the column (JSONL rows may have keys that the first one lacks)."""
        if self.kind != "jsonl":
            return name in self.columns
        with self._readable():
            return bool(self._lines().str.json_path_match(f"$.{name}").is_not_null().any())

    @contextmanager
    def _readable(self) -> Iterator[None]:
        import polars as pl

        try:
            yield
        except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as error:
            raise ServecastError(f"{self.path}: not readable as {self.kind}: {self._why(str(error))}") from None

    def rows(self, where: NDArray[np.intp], values: pl.Series | None = None) -> str:
        """`3 rows: 5 ('x'), 9 ('y'), ...`: the count and the first few of the data rows, with their values."""
        shown = [str(i + self.first_row) + (f" ({values[int(i)]!r})" if values is not None else "") for i in where[:5]]
        return f"{where.size:,} row{'s' * (where.size > 1)}: {', '.join(shown)}{', ...' if where.size > 5 else ''}"

    def _load_csv(self, names: Sequence[str]) -> pl.DataFrame:
        import polars as pl

        # All columns, as text: polars reports a row with too many fields only when it reads every column.
        frame = pl.read_csv(self.content, infer_schema=False)
        if frame.width != len(self.columns):
            raise ServecastError(f"{self.path}: the header has a quoted name with a line break; rename that column")
        return pl.DataFrame([frame.to_series(self.columns.index(name)).rename(name) for name in names])

    def _load_jsonl(self, names: Sequence[str]) -> pl.DataFrame:
        import polars as pl

        lines = self._lines().str.strip_chars()
        frame = pl.DataFrame({"line": lines}).select(
            pl.col("line").str.json_path_match(f"$.{n}").alias(n) for n in names
        )
        empty = frame.select(pl.all_horizontal(pl.all().is_null())).to_series()
        broken = np.flatnonzero((empty & lines.is_not_null() & (lines != "")).to_numpy())
        if broken.size:
            raise ServecastError(
                f"{self.path}: no whole JSON object with the keys {one_of(names)} in {self.rows(broken)}; "
                "every line must hold one (is the file truncated?)"
            )
        return frame

    def _lines(self) -> pl.Series:
        import polars as pl

        # JSON text never holds a raw control character, so this separator keeps each line in one piece.
        one_column = pl.read_csv(
            self.content, separator="\x01", quote_char=None, has_header=False, new_columns=["line"], infer_schema=False
        )
        return one_column.to_series()

    def _why(self, reason: str) -> str:
        """polars' reason, or better: the row that explains it. Reads the file slowly, after an error only."""
        stream = io.BytesIO(self.content) if isinstance(self.content, bytes) else self.path.open("rb")
        with stream:
            if self.kind == "parquet":
                return reason.splitlines()[0]
            for row, line in enumerate(stream, start=1):
                try:
                    text = line.decode()
                except UnicodeDecodeError:
                    return f"row {row} is not UTF-8 text"
                if self.kind == "csv" and '"' not in text and (fields := text.count(",") + 1) > len(self.columns):
                    return f"row {row} has {fields} fields, the header has {len(self.columns)} columns"
        if self.kind == "csv" and "more fields" not in reason:
            return 'a quote (") is opened and never closed, or stands inside a value'
        return reason.splitlines()[0]


def open_trace(path: Path) -> TraceFile:
    """Reads the header. Raises ServecastError for whatever is not a trace file with one."""
    content: Path | bytes = path
    try:
        _exists(path)
        with path.open("rb") as stream:
            magic = stream.read(4)
        if magic == b"PAR1":
            return _open_parquet(path)
        if magic[:2] == b"\x1f\x8b":
            content = gzip.decompress(path.read_bytes())
        with io.BytesIO(content) if isinstance(content, bytes) else path.open("rb") as stream:
            header = stream.readline(_LONGEST_HEADER)
            head = header + stream.read(2**16)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ServecastError(f"{path}: the gzip file is truncated or damaged ({error}); fetch it again") from None
    except OSError as error:
        raise ServecastError(f"{path}: cannot be read: {error.strerror or error}") from None
    if not head.strip():
        raise ServecastError(f"{path}: the file is empty; a header and one row a request are needed")
    try:
        text = header.decode("utf-8-sig").strip()
        if b"\0" in head:
            raise ValueError
    except ValueError:
        raise ServecastError(
            f"{path}: binary or not UTF-8 text; CSV, JSONL (both also gzipped) and Parquet are read"
        ) from None
    if text.startswith(("{", "[")):
        return TraceFile(path, "jsonl", _jsonl_keys(path, text), 1, content)
    return TraceFile(path, "csv", _csv_header(path, text), 2, content)


def _exists(path: Path) -> None:
    if path.is_dir():
        raise ServecastError(f"{path}: a folder; name the trace file in it")
    if path.is_file():
        return
    if not path.parent.is_dir():
        raise ServecastError(f"{path}: no such file, and no folder {path.parent}")
    if path.exists():
        raise ServecastError(f"{path}: not a regular file; copy its content to one (it is read more than once)")
    here = [entry.name for entry in path.parent.iterdir()]
    raise ServecastError(f"{path}: no such file{nearest(path.name, here)}")


def _open_parquet(path: Path) -> TraceFile:
    import polars as pl

    try:
        columns = tuple(pl.read_parquet_schema(path))
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ServecastError(f"{path}: a damaged or truncated Parquet file ({reason})") from None
    return TraceFile(path, "parquet", columns, 1, path)


def _csv_header(path: Path, text: str) -> tuple[str, ...]:
    if not text:
        raise ServecastError(f"{path}: row 1 is blank; the first row must be the header")
    try:
        names = tuple(name.strip() for name in next(csv.reader([text])))
    except csv.Error as error:
        raise ServecastError(f"{path}: the header (row 1) is not CSV: {error}") from None
    if len(names) == 1:
        for separator, said in ((";", "';'"), ("\t", "tabs"), ("|", "'|'")):
            if separator in text:
                raise ServecastError(f"{path}: the columns are separated by {said}; commas are needed")
    twice = sorted({name for name in names if name and names.count(name) > 1})
    if twice:
        raise ServecastError(f"{path}: the header (row 1) names a column twice: {one_of(twice)}; rename or remove one")
    return names


def _jsonl_keys(path: Path, text: str) -> tuple[str, ...]:
    try:
        first = json.loads(text)
    except (ValueError, RecursionError):
        first = None
    if not isinstance(first, dict):
        raise ServecastError(f"{path}: row 1 is not a whole JSON object; JSONL has one object a line, not an array")
    return tuple(first)
