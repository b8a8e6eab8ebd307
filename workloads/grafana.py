"""Grafana's data frames as series of numbers: what its query API answers, and what its panel inspector shows.

Four texts hold frames: the answer of `POST /api/ds/query`, `{"results": {refId: {"frames": [...]}}}`; the same under
`response` (inspector, tab Query); a list of frames (tab JSON, "DataFrame JSON"); `{"series": [...]}`, whose fields hold
their own values (tab JSON, "Panel data"). A frame is `{"schema": {"refId", "meta", "fields"}, "data": {"values"}}`: one
field of times in ms and one or more of numbers, each with the labels of its series. Sources: Grafana's "Data source
HTTP API"; grafana/grafana, in which promlib/converter, grafana-data's DataFrameJSON.ts and features/inspector.
It does not know what the numbers mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from servecast.errors import one_of

One = tuple[str, Mapping[str, Any], list[tuple[float, Any]]]
"""A series: where it stands, its labels, (time in s, value as written)."""


def queries_of(answer: Any) -> Mapping[str, Any] | None:
    """refId -> what Grafana answered to it, as in `results`; None for what is not Grafana's."""
    if isinstance(answer, dict) and isinstance(answer.get("response"), dict):
        answer = answer["response"]
    if isinstance(answer, dict) and isinstance(answer.get("results"), dict):
        return dict(answer["results"])
    frames = answer.get("series") if isinstance(answer, dict) else answer
    if not (isinstance(frames, list) and frames):
        return None
    queries: dict[str, dict[str, list[Any]]] = {}
    for frame in frames:
        schema = frame.get("schema", frame) if isinstance(frame, dict) else None
        if not isinstance(schema, dict) or "fields" not in schema:
            return None
        queries.setdefault(str(schema.get("refId", "unknown")), {"frames": []})["frames"].append(frame)
    return queries


def series_of(name: str, queries: Mapping[str, Any], problems: list[str]) -> Iterator[One]:
    """Every series of every query. A problem for every query that failed and every frame that is no time series."""
    for ref, query in queries.items():
        where = f"{name}: refId {ref}"
        if isinstance(query, dict) and query.get("error"):
            problems.append(f"{where}: Grafana's query failed: {query['error']}")
        elif not isinstance(query, dict) or not isinstance(query.get("frames") or [], list):
            problems.append(f"{where}: {str(query)[:60]!r} where an object with a list of frames was expected")
        else:
            for i, frame in enumerate(query.get("frames") or []):
                try:
                    yield from _frame(f"{where}, frame {i}", frame, problems)
                except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
                    problems.append(
                        f"{where}, frame {i}: not a data frame with schema.fields and data.values "
                        f"({type(error).__name__}: {error})"
                    )


def _frame(where: str, frame: Mapping[str, Any], problems: list[str]) -> list[One]:
    schema, data = frame.get("schema", frame), frame.get("data") or {}
    fields: Sequence[Mapping[str, Any]] = schema.get("fields") or []
    meta = schema.get("meta") or {}
    exemplars = (meta.get("custom") or {}).get("resultType") == "exemplar" or meta.get("dataTopic") == "annotations"
    if exemplars or not fields:
        return []
    types, shape = [str(field.get("type")) for field in fields], str(meta.get("type"))
    if types.count("time") != 1 or set(types) != {"time", "number"} or shape.startswith("heatmap") or "long" in shape:
        found = one_of(f"{field.get('name')} ({kind})" for field, kind in zip(fields, types, strict=True))
        problems.append(
            f"{where} is a table or a heatmap (meta.type {shape}; fields {found}); a time and numbers are needed: set "
            "the query's format to Time series"
        )
        return []
    columns = data["values"] if data else [field["values"] for field in fields]
    if len(columns) != len(fields) or len({len(column) for column in columns}) > 1:
        lengths = one_of(str(len(column)) for column in columns)
        problems.append(f"{where}: {len(fields)} fields, but columns of {lengths} values")
        return []
    odd = data.get("entities") or [field.get("entities") for field in fields]
    times = [float(time) / 1000 for time in columns[types.index("time")]]
    if not all(map(math.isfinite, times)):
        raise ValueError("a time is not finite")
    return [
        (where, field.get("labels") or {}, _points(times, columns[k], odd[k] or {}))
        for k, field in enumerate(fields)
        if types[k] == "number"
    ]


def _points(times: Sequence[float], values: Sequence[Any], odd: Mapping[str, list[int]]) -> list[tuple[float, Any]]:
    """Without nulls, which are times without a sample, but with NaN and infinity: null as well, and listed in `odd`."""
    words = {place: word for word, places in odd.items() for place in places}
    points = [(time, words.get(i, value)) for i, (time, value) in enumerate(zip(times, values, strict=True))]
    return [(time, value) for time, value in points if value is not None]
