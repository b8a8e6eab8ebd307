"""Opens a result file: JSON objects with the line in which each begins, or a table. It knows no tool.

One object over several lines, one a line, and objects appended to each other are all read alike; also gzipped.
"""

from __future__ import annotations

import gzip
import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from servecast.errors import ServecastError, nearest
from workloads.readers.files import TraceFile, open_trace

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class ResultFile:
    """objects: (line, JSON object) in the file's order; table: the header of a CSV or Parquet file, then no objects."""

    path: Path
    objects: tuple[tuple[int, dict[str, Any]], ...] = ()
    table: TraceFile | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The columns of the table, or the keys of the first object."""
        return self.table.columns if self.table else tuple(self.objects[0][1])

    def lacks(self, *names: str, table: bool = False) -> list[str]:
        """In words, why this is not a file with these columns (`table`) or keys; empty when it is."""
        if table != (self.table is not None):
            return ["a table is needed, this is JSON" if table else "JSON is needed, this is a table"]
        what = "column" if table else "key"
        return [f"{what} {n!r} is missing{nearest(n, self.names)}" for n in names if n not in self.names]

    def where(self, line: int) -> str:
        """The file, and the line where it holds several objects."""
        return f"{self.path}: line {line}" if len(self.objects) > 1 else str(self.path)


def open_result(path: Path) -> ResultFile:
    """The content of a file. Raises ServecastError where it is missing, empty, damaged or cut off, by line."""
    data = _bytes(path)
    if not data.strip():
        raise ServecastError(f"{path}: the file is empty; was the benchmark run to its end?")
    if data.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] not in (b"{", b"["):
        return ResultFile(path, table=open_trace(path))
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ServecastError(f"{path}: line {line}: not UTF-8 text; fetch the file again") from None
    return ResultFile(path, _objects(path, text))


def _bytes(path: Path) -> bytes:
    try:
        if path.is_dir():
            raise ServecastError(f"{path}: a folder; name the result file in it")
        if not path.is_file():
            here = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
            raise ServecastError(f"{path}: no such file{nearest(path.name, here)}")
        data = path.read_bytes()
        return gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ServecastError(f"{path}: the gzip file is truncated or damaged ({error}); fetch it again") from None
    except OSError as error:
        raise ServecastError(f"{path}: cannot be read: {error.strerror or error}") from None


def _objects(path: Path, text: str) -> tuple[tuple[int, dict[str, Any]], ...]:
    decoder = json.JSONDecoder()
    found: list[tuple[int, dict[str, Any]]] = []
    problems: list[str] = []
    at, line = 0, 1
    while (start := _past_blanks(text, at)) < len(text):
        line += text.count("\n", at, start)
        try:
            value, at = decoder.raw_decode(text, start)
            if isinstance(value, dict):
                found.append((line, value))
            else:
                what = "a list" if isinstance(value, list) else "a bare value"
                problems.append(f"{path}: line {line}: {what}, not a JSON object; give one object a run")
        except (ValueError, RecursionError):
            problems.append(f"{path}: line {line}: not a whole JSON object; is the file truncated?")
            following = text.find("\n{", start)
            at = following if following >= 0 else len(text)
        line += text.count("\n", start, at)
    if problems:
        more = len(problems) - _SHOWN
        raise ServecastError(*problems[:_SHOWN], *([f"{path}: {more:,} more lines like these"] if more > 0 else []))
    return tuple(found)


def _past_blanks(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at
