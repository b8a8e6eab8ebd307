"""What load generators measured: one module a format (`lacks(file)`, `read(file, problems)`), a line in FORMATS; and
simulated runs in the same formats (`FILE`, `write(run, notes)`), a line in WRITERS.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from reports.formats import (
    aiperf,
    aiperf_records,
    guidellm,
    llmservingsim,
    requests_csv,
    sglang,
    table,
    vllm,
    vllm_cpu,
)
from reports.formats.content import ResultFile, open_result
from reports.formats.found import Found
from reports.formats.judge import measured
from reports.measured import MeasuredRun
from reports.simulated import SimulatedRun
from reports.words import requests
from servecast.errors import ServecastError, nearest, one_of

_CLOSEST = 3
_LISTED = 20


class Format(Protocol):
    """What a module of a format has."""

    def lacks(self, file: ResultFile) -> list[str]:
        """In words, why the file is not of this format; empty when it is."""

    def read(self, file: ResultFile, problems: list[str]) -> list[Found]:
        """The runs of the file. Appends to `problems`, or raises ServecastError, whatever cannot be read."""


FORMATS: dict[str, Format] = {
    "vllm": vllm,
    "sglang": sglang,
    "guidellm": guidellm,
    "aiperf": aiperf,
    "aiperf_records": aiperf_records,
    "llmservingsim": llmservingsim,
    "vllm_cpu": vllm_cpu,
    "csv": requests_csv,
    "table": table,
}
"""In the order in which they are recognised."""


class Writer(Protocol):
    """What a module of a format has that can be written."""

    FILE: str
    """How such a file is called."""

    def write(self, run: SimulatedRun, notes: list[str]) -> Iterator[str]:
        """The text of the file, in pieces. Appends to `notes` what is left out of it; raises ServecastError where the
        run has nothing that the format could hold."""


WRITERS: dict[str, Writer] = {
    "vllm": vllm,
    "sglang": sglang,
    "guidellm": guidellm,
    "aiperf": aiperf,
    "aiperf_records": aiperf_records,
    "csv": requests_csv,
    "table": table,
}
"""In the order in which they are offered."""


def read_measured(path: Path | str, format: str | None = None, run: int | None = None) -> MeasuredRun:
    """One measured run of a result file; `run` counts from 1 and is needed where the file holds several.

    format: a key of `FORMATS`; None recognises it from the content. Raises ServecastError with all mistakes of the
    file, and where `run` is missing or not there, with the list of its runs.
    """
    runs = read_all(path, format)
    if run is None and len(runs) == 1:
        return runs[0]
    if run is not None and 1 <= run <= len(runs):
        return runs[run - 1]
    told = f"{path}: there is no run {run}" if run is not None else f"{path}: several runs"
    listed = [f"run {i}: {_described(found, path)}" for i, found in enumerate(runs[:_LISTED], start=1)]
    more = [f"and {len(runs) - _LISTED} more"] if len(runs) > _LISTED else []
    raise ServecastError(f"{told}; say which, from 1 to {len(runs)}: {'; '.join(listed + more)}")


def read_all(path: Path | str, format: str | None = None) -> list[MeasuredRun]:
    """All measured runs of a result file, in its order, at least one; as `read_measured`."""
    if format is not None and format not in FORMATS:
        raise ServecastError(f"unknown result format {format!r}{nearest(format, FORMATS)}; formats: {one_of(FORMATS)}")
    file = open_result(Path(path))
    module = FORMATS[_format_of(file, format)]
    problems: list[str] = []
    runs = [run for found in module.read(file, problems) if (run := measured(found, problems)) is not None]
    if problems:
        raise ServecastError(*problems)
    return runs


def _format_of(file: ResultFile, format: str | None) -> str:
    lacking = {name: module.lacks(file) for name, module in FORMATS.items() if format in (None, name)}
    if found := [name for name, missing in lacking.items() if not missing]:
        return found[0]
    closest = sorted(lacking, key=lambda name: len(lacking[name]))[:_CLOSEST]
    why = [f"{file.path}: as format {name}, {problem}" for name in closest for problem in lacking[name]]
    if format is None:
        kind = "columns" if file.table else "keys"
        said = one_of(map(repr, file.names[:_LISTED])) or "none"
        why.insert(0, f"{file.path}: the {kind} ({said}) are of no known result format; formats: {one_of(FORMATS)}")
    raise ServecastError(*why)


def _described(run: MeasuredRun, path: Path | str) -> str:
    """What tells a run from the others of its file."""
    facts = [
        run.source.removeprefix(f"{path}: "),
        run.model,
        None if run.completed is None else f"{requests(run.completed)} completed",
        None if run.rate is None else f"rate {run.rate:g}",
        None if run.concurrency is None else f"concurrency {run.concurrency:g}",
    ]
    return ", ".join(fact for fact in facts if fact)
