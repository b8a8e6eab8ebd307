"""Reads scrapes of vLLM's metrics: the text under /metrics, the JSON of Prometheus's HTTP API (`query`, `query_range`;
Grafana's proxy gives the same), or Grafana's own (`workloads.grafana`). It knows which metrics matter here and nothing
of what they say.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from workloads.grafana import One, queries_of, series_of

PROMPT, OUTPUT, FINISHED = "request_prompt_tokens", "request_generation_tokens", "request_success_total"
QUERY = '{__name__=~"vllm:request_(prompt|generation)_tokens_(bucket|sum|count)|vllm:request_success_total"}'
"""What to ask of Prometheus, at both ends of the interval or as a range."""

_NAME = re.compile(rf"vllm[:_](({PROMPT}|{OUTPUT})_(bucket|sum|count)|{FINISHED})")  # some collectors turn : into _
# A time stamp after the value is ignored: what joins several engines writes a different one for each.
_LINE = re.compile(r"([a-zA-Z_:][\w:]*)\s*(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?(?:\s+#.*)?\s*")
_LABEL = re.compile(r'\s*(\w+)\s*=\s*"((?:[^"\\]|\\.)*)"\s*(?:,|$)')

Labels = frozenset[tuple[str, str]]
Moment = tuple[int, float]
"""Number of the scrape, and its time in seconds where it says one, else 0."""

Series = dict[tuple[str, Labels], list[tuple[Moment, float]]]
"""Metric name without its vllm: and labels -> (moment, value), in order."""


def said(labels: Iterable[tuple[str, str]]) -> str:
    """The labels for people."""
    return ", ".join(f'{name}="{value}"' for name, value in sorted(labels))


def read_scrape(source: Path | str, number: int, problems: list[str]) -> Series:
    """The series that matter of one scrape, the number-th. A problem for every line or entry of theirs that cannot be
    read or stands there twice.
    """
    name = str(source) if isinstance(source, Path) else "scrape"
    try:
        text = source.read_text("utf-8") if isinstance(source, Path) else source
    except (OSError, UnicodeDecodeError) as error:
        problems.append(f"{name}: cannot be read: {error}")
        return {}
    found: dict[tuple[str, Labels], dict[Moment, float]] = {}
    rows = (
        _json_rows(name, text, problems) if text.lstrip().startswith(("{", "[")) else _text_rows(name, text, problems)
    )
    for where, metric, labels, stamp, value in rows:
        match = _NAME.fullmatch(metric)
        if match is None:
            continue
        try:
            count = float(value)
        except (TypeError, ValueError, OverflowError):
            count = math.nan
        points = found.setdefault((match[1], frozenset(labels.items())), {})
        if not (math.isfinite(count) and count >= 0):
            problems.append(f"{where}: {metric} is {value!r}; a count of 0 or more was expected")
        elif (number, stamp) in points:
            problems.append(f"{where}: {metric}{{{said(labels.items())}}} is there twice; give one scrape a file")
        else:
            points[number, stamp] = count
    return {key: sorted(points.items()) for key, points in found.items()}


_Row = tuple[str, str, Mapping[str, str], float, Any]
"""Where it stands, metric name, labels, time in s or 0, value as written."""


def _text_rows(name: str, text: str, problems: list[str]) -> list[_Row]:
    rows: list[_Row] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.startswith("vllm"):
            continue
        match = _LINE.fullmatch(line)
        labels = match[2] or "" if match else ""
        pairs = {found[1]: found[2] for found in _LABEL.finditer(labels)}
        if match is None or _LABEL.sub("", labels).strip():
            problems.append(f"{name}: line {number}: {line[:80]!r} is not `metric{{labels}} value`")
        else:
            rows.append((f"{name}: line {number}", match[1], pairs, 0.0, match[3]))
    return rows


def _json_rows(name: str, text: str, problems: list[str]) -> list[_Row]:
    rows: list[_Row] = []
    try:
        answer = json.loads(text)
        queries = queries_of(answer)
        if queries is None and answer.get("status") == "error":
            problems.append(f"{name}: Prometheus answered with an error: {answer.get('error')}")
            return []
        series = _prometheus(name, answer) if queries is None else series_of(name, queries, problems)
        for where, metric, points in series:
            labels = {str(key): str(value) for key, value in metric.items() if key != "__name__"}
            if "__name__" not in metric:
                also = "" if queries is None else " and sum(), and Grafana's formats Table and Heatmap,"
                problems.append(
                    f"{where} ({dict(metric)}) has no metric name; functions such as rate(){also} take it away, "
                    f"so query the counters as they are: {QUERY}"
                )
                return []
            rows += [(where, str(metric["__name__"]), labels, stamp, value) for stamp, value in points]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        problems.append(
            f"{name}: neither /metrics text nor an answer of Prometheus's query API with data.result[].metric and "
            f".value, nor data frames of Grafana ({type(error).__name__}: {error})"
        )
        return []
    return rows


def _prometheus(name: str, answer: Mapping[str, Any]) -> Iterator[One]:
    for i, entry in enumerate(answer["data"]["result"]):
        points = entry["values"] if "values" in entry else [entry["value"]]
        yield f"{name}: result {i}", entry["metric"], [(float(stamp), value) for stamp, value in points]
