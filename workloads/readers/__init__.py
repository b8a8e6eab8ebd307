"""Readers of trace files: one module a format (`lacks(columns)`, `read(file)`) and one line here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

from servecast.errors import ServecastError, nearest, one_of
from workloads.readers import azure, table
from workloads.readers.files import TraceFile, open_trace
from workloads.trace import Trace


class _Format(Protocol):
    def lacks(self, columns: Sequence[str]) -> list[str]: ...

    def read(self, file: TraceFile) -> Trace: ...


_FORMATS: dict[str, _Format] = {
    "azure": azure,
    "table": table,
}


def read_trace(path: Path | str, format: str | None = None) -> Trace:
    """The requests of a trace file, in order of arrival, the first at time 0.

    format: a key of `READERS`; None recognises it from the column names, which the trace's notes then say. Raises
    ServecastError, naming file, column and rows, for whatever cannot be read as stated.
    """
    if format is not None and format not in _FORMATS:
        raise ServecastError(f"unknown trace format {format!r}{nearest(format, _FORMATS)}; formats: {one_of(_FORMATS)}")
    file = open_trace(Path(path))
    if format is not None:
        return _FORMATS[format].read(file)
    lacking = {name: module.lacks(file.columns) for name, module in _FORMATS.items()}
    for name, missing in lacking.items():
        if not missing:
            trace = _FORMATS[name].read(file)
            note = f"format {name} recognised from the columns {one_of(file.columns)}"
            return replace(trace, notes=(note, *trace.notes))
    raise ServecastError(
        f"{file.path}: the columns {one_of(file.columns)} are of no known trace format",
        *(f"{file.path}: as format {name}, {problem}" for name, missing in lacking.items() for problem in missing),
    )


READERS: dict[str, Callable[[Path], Trace]] = {name: partial(read_trace, format=name) for name in _FORMATS}
