"""Opens a trace file as named columns with the row numbers people see: CSV or JSONL (also gzipped), or Parquet.

The kind is told from the content, not from the name. Values stay as they are in the file (text, or Parquet's types),
and come in batches, so that a large file is never in memory as text: what they mean is the readers' business.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from servecast.errors import ServecastError, nearest, one_of
from workloads.readers.chunks import chunks
from workloads.readers.jsonl import objects, strict_frame

if TYPE_CHECKING:
    import polars as pl

_LONGEST_HEADER = 2**26
_LONGEST_DOCUMENT = 2**30


@dataclass(frozen=True, slots=True)
class TraceFile:
    """A trace file whose header was read. columns: names in file order (JSONL: the first object's keys).
    first_row: the number in the file of the first data row (a CSV header is row 1). first: JSONL's first object.
    gzipped: whether it is packed. document: the whole content, where it is a single JSON object over several lines.
    """

    path: Path
    kind: str
    columns: tuple[str, ...]
    first_row: int
    first: Mapping[str, Any] = field(default_factory=dict)
    gzipped: bool = False
    document: bytes | None = None

    def load(self, names: Sequence[str]) -> Iterator[tuple[int, pl.DataFrame]]:
        """Batches (number in the file of their first row, the named columns): null where a value or the column is
        absent, in every column where a line is blank. Raises ServecastError with rows where the structure is broken.
        """
        with self._readable():
            if self.kind == "parquet":
                yield from self._load_parquet(names)
            elif self.kind == "jsonl":
                yield from self._load_jsonl(names)
            else:
                yield from self._load_csv(names)

    def sessions(self) -> Iterator[tuple[str, dict[str, Any] | str]]:
        """(row, the object of a JSONL line, or what is wrong with it); blank lines are left out."""
        with self._readable():
            for row, lines in self._lines():
                yield from ((str(row + i), found) for i, found in objects(lines))

    def mistakes(self, what: str, shown: Sequence[str], count: int) -> list[str]:
        """What is wrong with `count` of the sessions, of which the first few are `shown`, as sentences."""
        return [f"{self.path}: {what} in {self.rows(shown, count)}"]

    def rows(self, shown: Sequence[str], count: int) -> str:
        """`3 rows: 5 ('x'), 9 ('y'), ...` from the first few as text, and how many there are."""
        return f"{count:,} row{'s' * (count > 1)}: {', '.join(shown)}{', ...' if count > len(shown) else ''}"

    @contextmanager
    def _readable(self) -> Iterator[None]:
        import polars as pl

        try:
            yield
        except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
            reason = str(error).splitlines()[0]
            raise ServecastError(f"{self.path}: not readable as {self.kind}: {reason}") from None
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise _bad_gzip(self.path, error) from None
        except OSError as error:
            raise ServecastError(f"{self.path}: cannot be read: {error.strerror or error}") from None

    def _stream(self) -> IO[bytes]:
        if self.document is not None:
            return io.BytesIO(self.document)
        return _opened(self.path, self.gzipped)

    def _load_parquet(self, names: Sequence[str]) -> Iterator[tuple[int, pl.DataFrame]]:
        import polars as pl

        there = [name for name in names if name in self.columns]
        frame = pl.read_parquet(self.path, columns=there)
        absent = [pl.lit(None, dtype=pl.String).alias(name) for name in names if name not in there]
        yield self.first_row, frame.with_columns(absent).select(names)

    def _load_csv(self, names: Sequence[str]) -> Iterator[tuple[int, pl.DataFrame]]:
        import polars as pl

        places = {name: self.columns.index(name) for name in names if name in self.columns}
        header = ",".join(f"c{i}" for i in range(len(self.columns))).encode() + b"\n"
        row = self.first_row
        with self._stream() as stream:
            stream.readline()
            for chunk in chunks(stream, quotes=True):
                try:
                    # All columns, as text: polars reports a row with too many fields only when it reads every column.
                    frame = pl.read_csv(header + chunk, infer_schema=False)
                except pl.exceptions.PolarsError as error:
                    raise ServecastError(
                        f"{self.path}: not readable as csv: {self._why(chunk, row, str(error))}"
                    ) from None
                nothing = pl.Series([None], dtype=pl.String).new_from_index(0, len(frame))
                columns = [frame.to_series(places[name]) if name in places else nothing for name in names]
                yield row, pl.DataFrame([column.rename(name) for column, name in zip(columns, names, strict=True)])
                row += len(frame)

    def _load_jsonl(self, names: Sequence[str]) -> Iterator[tuple[int, pl.DataFrame]]:
        broken: list[str] = []
        count = 0
        for row, lines in self._lines():
            frame, bad = strict_frame(lines, names)
            broken += [str(row + i) for i in bad[: 5 - len(broken)]]
            count += len(bad)
            if not count:
                yield row, frame
        if count:
            raise ServecastError(
                f"{self.path}: no whole JSON object with the keys {one_of(names)} in {self.rows(broken, count)}; "
                "every line must hold one (is the file truncated?)"
            )

    def _lines(self) -> Iterator[tuple[int, list[str]]]:
        """(row of the first, lines) of each chunk of a JSONL file."""
        row = self.first_row
        with self._stream() as stream:
            for chunk in chunks(stream):
                try:
                    text = chunk.decode()
                except UnicodeDecodeError as error:
                    bad = row + chunk.count(b"\n", 0, error.start)
                    raise ServecastError(
                        f"{self.path}: not readable as {self.kind}: row {bad} is not UTF-8 text"
                    ) from None
                lines = text.removesuffix("\n").split("\n")
                if row == self.first_row:
                    lines[0] = lines[0].removeprefix("\ufeff")
                yield row, lines
                row += len(lines)

    def _why(self, chunk: bytes, row: int, reason: str) -> str:
        """polars' reason, or better: the row that explains it. Reads the chunk slowly, after an error only."""
        for i, line in enumerate(chunk.split(b"\n"), start=row):
            try:
                text = line.decode()
            except UnicodeDecodeError:
                return f"row {i} is not UTF-8 text"
            if '"' not in text and (fields := text.count(",") + 1) > len(self.columns):
                return f"row {i} has {fields} fields, the header has {len(self.columns)} columns"
        if "more fields" not in reason:
            return 'a quote (") is opened and never closed, or stands inside a value'
        return reason.splitlines()[0]


def open_trace(path: Path) -> TraceFile:
    """Reads the header. Raises ServecastError for whatever is not a trace file with one."""
    document = None
    try:
        _exists(path)
        with path.open("rb") as stream:
            magic = stream.read(4)
        if magic == b"PAR1":
            return _open_parquet(path)
        gzipped = magic[:2] == b"\x1f\x8b"
        with _opened(path, gzipped) as stream:
            header = stream.readline(_LONGEST_HEADER)
            head = header + stream.read(2**16)
            if header.lstrip(b"\xef\xbb\xbf").strip()[:1] == b"{" and header.strip()[-1:] != b"}":
                document = head + stream.read(_LONGEST_DOCUMENT)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _bad_gzip(path, error) from None
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
        first, whole = _first_object(path, text, document)
        return TraceFile(path, "jsonl", tuple(first), 1, first, gzipped, whole)
    return TraceFile(path, "csv", _csv_header(path, text), 2, gzipped=gzipped)


def missing(file: TraceFile, *names: str) -> list[str]:
    """In words, which of the named columns the file's header (or first object) lacks."""
    what = "key" if file.kind == "jsonl" else "column"
    return [f"{what} {name!r} is missing{nearest(name, file.columns)}" for name in names if name not in file.columns]


def _opened(path: Path, gzipped: bool) -> IO[bytes]:
    return gzip.open(path, "rb") if gzipped else path.open("rb")  # type: ignore[return-value]


def _bad_gzip(path: Path, error: Exception) -> ServecastError:
    return ServecastError(f"{path}: the gzip file is truncated or damaged ({error}); fetch it again")


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
    return TraceFile(path, "parquet", columns, 1)


def _csv_header(path: Path, text: str) -> tuple[str, ...]:
    if not text:
        raise ServecastError(f"{path}: row 1 is blank; the first row must be the header")
    if text.count('"') % 2:
        raise ServecastError(f"{path}: the header has a quoted name with a line break; rename that column")
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


def _first_object(path: Path, text: str, document: bytes | None) -> tuple[dict[str, Any], bytes | None]:
    """The object of row 1; or the one object that the whole file is (a session), with the file as one line."""
    for candidate in (text.encode(), document):
        try:
            found = json.loads(candidate) if candidate is not None else None
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict) and candidate is not document:
            return found, None
        if isinstance(found, dict) and isinstance(found.get("requests"), list):
            return found, json.dumps(found).encode()
        if isinstance(found, dict):
            raise ServecastError(
                f"{path}: row 1 is not a whole JSON object; an object over several lines must be a session, but this "
                "has no list 'requests'"
            )
    raise ServecastError(
        f"{path}: row 1 is not a whole JSON object; JSONL has one object a line, not an array (cut off?)"
    )
