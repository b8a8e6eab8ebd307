"""Readers of trace files: one module a format (`lacks(file)`, `read(file, options)`, `OPTIONS`) and one line here."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

from servecast.errors import ServecastError, nearest, one_of
from workloads.readers import (
    aiperf,
    azure,
    bailian,
    burstgpt,
    claude_code,
    mooncake,
    ragpulse,
    recognise,
    table,
    timed_trace,
)
from workloads.readers.clean import noted
from workloads.readers.files import TraceFile, open_trace
from workloads.readers.folder import is_folder, open_folder
from workloads.readers.options import ReadOptions, check_options
from workloads.trace import Trace


class _Format(Protocol):
    OPTIONS: tuple[str, ...]

    def lacks(self, file: TraceFile) -> list[str]: ...

    def read(self, file: TraceFile, options: ReadOptions) -> Trace: ...


_FORMATS: dict[str, _Format] = {
    "azure": azure,
    "burstgpt": burstgpt,
    "bailian": bailian,
    "ragpulse": ragpulse,
    "claude_code": claude_code,
    "aiperf": aiperf,
    "mooncake": mooncake,
    "timed_trace": timed_trace,
    "table": table,
}
"""In the order in which they are recognised: those that ask for more names first."""


def read_trace(path: Path | str, format: str | None = None, options: ReadOptions | None = None) -> Trace:
    """The requests of a trace file, or of a folder of Claude Code sessions, in order of arrival, the first at time 0.

    format: a key of `READERS`; None recognises it from the column names, which the trace's notes then say. options:
    what the file does not say itself. Raises ServecastError, naming file, column and rows, for whatever cannot be read
    as stated.
    """
    if format is not None and format not in _FORMATS:
        raise ServecastError(f"unknown trace format {format!r}{nearest(format, _FORMATS)}; formats: {one_of(_FORMATS)}")
    options, path = options or ReadOptions(), Path(path)
    if is_folder(path):
        return _read_folder(path, format, options)
    file = open_trace(path)
    lacking = {name: module.lacks(file) for name, module in _FORMATS.items() if format in (None, name)}
    note: tuple[str, ...] = ()
    if format is None:
        format, why = recognise.format_of(file, lacking)
        note = (why,)
    elif lacking[format]:
        raise ServecastError(*(f"{file.path}: as format {format}, {problem}" for problem in lacking[format]))
    check_options(options, format, _FORMATS[format].OPTIONS)
    trace = _FORMATS[format].read(file, options)
    return noted(trace, *note, first=True)


def _read_folder(path: Path, format: str | None, options: ReadOptions) -> Trace:
    if format not in (None, "claude_code"):
        raise ServecastError(
            f"{path}: a folder; only Claude Code sessions are read from folders: name the {format} file in it"
        )
    file = open_folder(path)
    check_options(options, "claude_code", claude_code.OPTIONS)
    return noted(claude_code.read(file, options), file.note(), first=True)


READERS: dict[str, Callable[[Path], Trace]] = {name: partial(read_trace, format=name) for name in _FORMATS}
