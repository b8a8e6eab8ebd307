"""A CSV row a run, with figures only: columns are named by our summary's keys or spelt as people do.

`ttft`, `mean_ttft`, `ttft_mean`, `avg_ttft_ms` are all the mean TTFT in milliseconds; a name that ends in `_s` has
seconds. A column that is not understood is a mistake, so that no figure is left out unseen.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Mapping

import numpy as np

from reports.formats import figures
from reports.formats.content import ResultFile
from reports.formats.fields import MOST
from reports.formats.found import Found
from reports.simulated import SimulatedRun
from servecast.errors import nearest, one_of
from workloads.readers.columns import Numbers, Texts, read_columns
from workloads.trace import MAX_TIME_S

FILE = "summary.csv"
LATENCIES = {
    "ttft": "ttft_ms",
    "tpot": "tpot_ms",
    "itl": "itl_ms",
    "e2e": "e2el_ms",
    "e2el": "e2el_ms",
    "e2e_latency": "e2el_ms",
}
STATS = {"avg": "mean", **{stat: stat for stat in figures.STATS}}
SPELT = {
    "duration_s": "duration",
    "req_per_s": "request_throughput",
    "requests_per_s": "request_throughput",
    "requests_per_second": "request_throughput",
    "output_tokens_per_s": "output_throughput",
    "output_tok_per_s": "output_throughput",
    "total_throughput": "total_token_throughput",
    "goodput": "request_goodput",
    "request_rate": "rate",
    "max_concurrency": "concurrency",
}
"""Other spellings -> our key."""
WORDS = ("name", "tool", "version", "model")
ALSO = ("failed", "rate", "concurrency")
NOTES = ("what the figures mean is not said in the file; they are taken as our definitions have them",)
_LATENCY = re.compile(rf"(?:({'|'.join(STATS)})_)?({'|'.join(LATENCIES)})(?:_({'|'.join(STATS)}))?(?:_(ms|s))?")


def lacks(file: ResultFile) -> list[str]:
    """What the file lacks to be of this format, in words; empty when it is."""
    missing = file.lacks(table=True)
    if not missing and not any(_meaning(column) in figures.KEYS for column in file.names):
        missing.append(f"no column is a figure, such as {one_of(figures.KEYS[8:12])}, ttft_ms")
    return missing


def read(file: ResultFile, problems: list[str]) -> list[Found]:
    """A run a row. Raises ServecastError with all mistakes, by column and row."""
    table = file.table
    if table is None:
        return []
    if strange := _strange(file):
        problems += [f"{file.path}: {problem}" for problem in strange]
        return []
    numbers = {key: _numbers(column) for column in file.names if (key := _meaning(column)) is not None}
    words = {name: Texts(name, optional=True, gaps=True) for name in WORDS if name in file.names}
    blank = read_columns(table, [*numbers.values(), *words.values()])
    return [
        _run(
            f"{file.path}: row {table.first_row + i}",
            {key: float(column.values[i]) for key, column in numbers.items() if not np.isnan(column.values[i])},
            {name: column.words[column.codes[i]] for name, column in words.items() if column.codes[i] >= 0},
        )
        for i in np.flatnonzero(~blank).tolist()
    ]


def write(run: SimulatedRun, notes: list[str]) -> Iterator[str]:
    """The summary's figures in one row; rows of several runs can be put below each other."""
    told = {key: run.summary.get(key) for key in figures.KEYS}
    failed = run.summary["submitted"] - run.summary["completed"]
    row = {"name": run.manifest["name"], "tool": "servecast", "version": run.manifest["servecast"], "model": run.model}
    row |= {"failed": failed, "rate": run.rate, "concurrency": run.concurrency} | told
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([row.keys(), row.values()])
    yield text.getvalue()


def _run(row: str, numbers: Mapping[str, float], words: Mapping[str, str]) -> Found:
    failed = numbers.get("failed")
    return Found(
        tool=words.get("tool", "table"),
        source=f"{row} ({words['name']})" if "name" in words else row,
        version=words.get("version", ""),
        model=words.get("model"),
        stated={key: value for key, value in numbers.items() if key in figures.KEYS and key != "duration"},
        duration_s=numbers.get("duration"),
        failed=None if failed is None else int(failed),
        rate=numbers.get("rate"),
        concurrency=numbers.get("concurrency"),
        notes=NOTES,
    )


def _meaning(column: str) -> str | None:
    """Our key for a column; None where it has none."""
    if column in SPELT or column in figures.KEYS or column in ALSO:
        return SPELT.get(column, column)
    match = _LATENCY.fullmatch(column)
    if match is None or (match[1] and match[3]):
        return None
    return f"{STATS[match[1] or match[3] or 'mean']}_{LATENCIES[match[2]]}"


def _strange(file: ResultFile) -> list[str]:
    """Problems with the header: columns that are not understood, or that say the same."""
    problems = []
    columns: dict[str, str] = {}
    known = (*WORDS, *ALSO, *SPELT, *figures.KEYS)
    for column in file.names:
        key = column if column in WORDS else _meaning(column)
        if key is None:
            problems.append(f"column {column!r} is not understood{nearest(column, known)}; rename it or take it out")
        elif key in columns:
            problems.append(f"columns {columns[key]!r} and {column!r} both mean {key}; take one out")
        else:
            columns[key] = column
    if any("not understood" in problem for problem in problems):
        plain = (*WORDS, "duration", *figures.COUNTS, *figures.RATES, *ALSO)
        problems.append(
            f"known columns are {one_of(plain)}; and {one_of(figures.LATENCIES)} with {one_of(figures.STATS)}, as in "
            "mean_ttft_ms, p99_ttft or e2e_s"
        )
    return problems


def _numbers(column: str) -> Numbers:
    key = _meaning(column) or ""
    if key.endswith(figures.LATENCIES):
        rule = f"times must be numbers up to {MAX_TIME_S:g}, or nothing"
        divisor = 1e-3 if column.endswith("_s") else 1.0
        return Numbers(column, rule, least=-MAX_TIME_S, most=MAX_TIME_S, divisor=divisor, gaps=True)
    if key in (*figures.COUNTS, "failed"):
        return Numbers(column, "counts must be whole numbers from 0, or nothing", most=MOST, whole=True, gaps=True)
    least = figures.SHORTEST_S if key in ("duration", "rate", "concurrency") else 0
    return Numbers(column, f"a number from {least:g} was expected, or nothing", least=least, most=MOST, gaps=True)
