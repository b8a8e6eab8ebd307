"""Reads ServeGen client pools (Alibaba, arXiv 2505.09999): who sends how much, how unevenly and how long, by window.

A pool is a folder or a tar(.gz) with two files a client. `chunk-N-trace.csv`, without header: window start in s,
requests per second, CV of the gaps, family (Gamma, Weibull, or empty while idle), shape, scale. `chunk-N-dataset.json`:
window start -> field -> the text of a Python dict {value: probability}, empty while idle. Rate windows are 600 s,
length windows 6 h long. `workloads.clients` makes requests from them.
"""

from __future__ import annotations

import ast
import json
import math
import re
import tarfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from servecast.errors import ServecastError, nearest, one_of
from workloads.trace import MAX_TOKENS, Floats

FAMILIES = ("", "Gamma", "Weibull")
_MAX_FILE = 256 * 2**20
_MAX_TEXT = 8 * 2**20
_FILE = re.compile(r"chunk-(\d{1,9})-(trace\.csv|dataset\.json)")


@dataclass(frozen=True, slots=True)
class Distribution:
    """values: float64[k]; cumulative: float64[k], ends at 1."""

    values: Floats
    cumulative: Floats

    def at(self, quantile: Floats) -> Floats:
        """The value below which a share `quantile` (0 to below 1) of the requests lie."""
        last = self.values.size - 1
        found: Floats = self.values[np.minimum(np.searchsorted(self.cumulative, quantile, side="right"), last)]
        return found

    @property
    def mean(self) -> float:
        return float(self.values @ np.diff(self.cumulative, prepend=0.0))


@dataclass(frozen=True, slots=True, eq=False)
class Client:
    """One client. rate (requests per second), cv, family (index into FAMILIES), shape: one value a rate window; the
    scale of the gaps follows from the rate. lengths: length window start in s -> field -> text of a distribution;
    empty where the pool has no dataset file of the client.
    """

    name: str
    rate: Floats
    cv: Floats
    family: NDArray[np.int64]
    shape: Floats
    lengths: Mapping[float, Mapping[str, str]]


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """Clients that share rate windows: starts (s, equally spaced) of windows of width_s."""

    source: str
    starts: Floats
    width_s: float
    clients: tuple[Client, ...]

    @property
    def rate(self) -> Floats:
        """Requests per second of all clients together, one value a window."""
        total: Floats = np.sum([client.rate for client in self.clients], axis=0)
        return total


def read_servegen(path: Path) -> Pool:
    """The pool in a folder (with its subfolders) or a tar file. Nothing is unpacked to disk. Raises ServecastError with
    every problem, by file and row.
    """
    problems: list[str] = []
    traces: dict[str, str] = {}
    datasets: dict[str, str] = {}
    for name, number, what, text in _files(path, problems):
        where = traces if what == "trace.csv" else datasets
        if number in where:
            problems.append(f"{path}: client {number} is there twice ({name}); give one pool at a time")
        where[number] = text
    if not traces and not problems:
        problems.append(f"{path}: no chunk-N-trace.csv inside; this is not a ServeGen pool")
    clients, grids = [], {}
    for number in sorted(traces, key=int):
        rows = _rows(f"{path}: chunk-{number}-trace.csv", traces[number], problems)
        lengths = _lengths(f"{path}: chunk-{number}-dataset.json", datasets.get(number), problems)
        if rows is not None:
            starts, rate, cv, family, shape = rows
            grids[number] = starts
            clients.append(Client(number, rate, cv, family.astype(np.int64), shape, lengths))
    for number, starts in grids.items():
        first = next(iter(grids))
        if not np.array_equal(starts, grids[first]):
            problems.append(f"{path}: chunk-{number}-trace.csv has other windows than chunk-{first}-trace.csv")
    if problems:
        shown = problems[:20] + [f"{path}: {len(problems) - 20:,} more problems like these"] * (len(problems) > 20)
        raise ServecastError(*shown)
    starts = grids[next(iter(grids))]
    width = float(starts[1] - starts[0]) if starts.size > 1 else 600.0
    if (np.abs(np.diff(starts) - width) > 1e-6).any() or width <= 0:
        raise ServecastError(f"{path}: the windows of chunk-{clients[0].name}-trace.csv are not equally long")
    return Pool(str(path), starts, width, tuple(clients))


def distribution(where: str, text: str) -> Distribution | None:
    """What the text of a dict {value: probability} says; None for an empty one. It is read as data, never run."""
    if len(text) > _MAX_TEXT:
        raise ServecastError(f"{where}: {len(text):,} characters; at most {_MAX_TEXT:,} are read")
    try:
        table = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise ServecastError(f"{where}: {text[:60]!r} is not the text of a dict ({type(error).__name__})") from None
    if not isinstance(table, dict) or not all(
        _is_number(value) and 0 <= value <= MAX_TOKENS and _is_number(p) and 0 <= p < math.inf
        for value, p in table.items()
    ):
        raise ServecastError(f"{where}: {text[:60]!r} is not a dict of values (0 to {MAX_TOKENS}) and probabilities")
    values = np.array(sorted(table), dtype=np.float64)
    cumulative = np.cumsum(np.array([table[value] for value in sorted(table)], dtype=np.float64))
    if not values.size or cumulative[-1] == 0:
        return None
    return Distribution(values, cumulative / cumulative[-1])


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _files(path: Path, problems: list[str]) -> Iterator[tuple[str, str, str, str]]:
    """(name, client number, trace.csv or dataset.json, text) of every file of a pool; sorted by name."""
    if not path.exists():
        folder = path.parent
        near = nearest(path.name, [file.name for file in folder.iterdir()]) if folder.is_dir() else ""
        problems.append(f"{path}: no such file or folder{near}")
        return
    try:
        if path.is_dir():
            for file in sorted(path.rglob("chunk-*")):
                if (match := _FILE.fullmatch(file.name)) and _fits(str(file), file.stat().st_size, problems):
                    yield str(file), match[1], match[2], file.read_text("utf-8")
            return
        with tarfile.open(path) as archive:
            for member in sorted(archive, key=lambda one: one.name):
                match = _FILE.fullmatch(member.name.rpartition("/")[2])
                if match and member.isfile() and _fits(f"{path}: {member.name}", member.size, problems):
                    content = archive.extractfile(member)
                    assert content is not None
                    yield member.name, match[1], match[2], content.read().decode("utf-8")
    except (OSError, EOFError, tarfile.TarError, UnicodeDecodeError, ValueError) as error:
        problems.append(f"{path}: cannot be read as a folder or tar file of a ServeGen pool: {error}")


def _fits(name: str, size: int, problems: list[str]) -> bool:
    if size > _MAX_FILE:
        problems.append(f"{name}: {size:,} bytes; at most {_MAX_FILE:,} are read")
    return size <= _MAX_FILE


def _rows(where: str, text: str, problems: list[str]) -> tuple[Floats, Floats, Floats, Floats, Floats] | None:
    """Columns of a trace.csv: start, rate, CV, family (as index), shape. None when rows are broken."""
    rows: list[tuple[float, ...]] = []
    found = len(problems)
    for number, line in enumerate(text.splitlines(), 1):
        cells = [cell.strip() for cell in line.split(",")]
        if not line.strip():
            continue
        if len(cells) != 6:
            problems.append(
                f"{where}: row {number}: {len(cells)} values; start, rate, CV, family, shape, scale expected"
            )
            continue
        if cells[3] not in FAMILIES:
            problems.append(
                f"{where}: row {number}: unknown family {cells[3]!r}; known: {one_of(FAMILIES[1:])}, or empty"
            )
            continue
        try:
            start, rate, cv, shape = (float(cells[i]) for i in (0, 1, 2, 4))
        except ValueError:
            start = rate = cv = shape = math.nan
        family = FAMILIES.index(cells[3])
        if not all(0 <= value < 1e12 for value in (start, rate, cv, shape)) or (family and not 0.01 <= shape <= 1e6):
            problems.append(f"{where}: row {number}: {line[:80]!r} has a value that is no number or out of range")
        elif rate > 0 and not family:
            problems.append(f"{where}: row {number}: a rate of {rate:g} without a family")
        else:
            rows.append((start, rate, cv, family, shape))
    if not rows and len(problems) == found:
        problems.append(f"{where}: no rows")
    if len(problems) > found:
        return None
    start, rate, cv, family, shape = np.array(rows, dtype=np.float64).T
    return start, rate, cv, family, shape


def _lengths(where: str, text: str | None, problems: list[str]) -> Mapping[float, Mapping[str, str]]:
    if text is None:
        return {}
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        problems.append(f"{where}: is not JSON: {error}")
        return {}
    windows: defaultdict[float, dict[str, str]] = defaultdict(dict)
    try:
        for window, fields in data.items():
            start = float(window)
            for field, value in fields.items():
                if not isinstance(value, str):
                    raise TypeError(f"window {window}, field {field}: {type(value).__name__}")
                windows[start][str(field)] = value
    except (AttributeError, TypeError, ValueError) as error:
        problems.append(f"{where}: is not window start -> field -> text ({error})")
        return {}
    return dict(sorted(windows.items()))
