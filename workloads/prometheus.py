"""A workload from what monitoring keeps: vLLM's token histograms and request counter.

What comes out are two `histogram` length specs and a request rate: when within the interval requests came, and which
prompt had which answer, a histogram does not know. How scrapes are read is `workloads.scrapes`'.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from servecast.errors import ServecastError, one_of
from workloads.kinds import Spec, check_kind
from workloads.lengths import LENGTHS
from workloads.scrapes import FINISHED, OUTPUT, PROMPT, Labels, Moment, Series, read_scrape, said

_Counts = Mapping[tuple[str, Labels], float]


@dataclass(frozen=True, slots=True)
class Measured:
    """What the metrics say. prompt, output: `histogram` specs, see `workloads.lengths`. rate: finished requests per
    second, None where no interval is known. requests: how many are behind it. notes: what people should know.
    """

    prompt: Spec
    output: Spec
    rate: float | None
    requests: float
    notes: tuple[str, ...]


def read_prometheus(
    scrape: Path | str,
    earlier: Path | str | None = None,
    *,
    interval_s: float | None = None,
    model: str | None = None,
    max_model_len: int | None = None,
) -> Measured:
    """The workload between two scrapes, or since the engine started when there is one.

    scrape, earlier: files (a Path) or their text (a str). interval_s: seconds between them, needed for a rate where
    the scrapes have no time stamps. model: the model_name to keep when there are several. max_model_len: ends the open
    last bucket when someone is in it. Series of several engines are added up. Counters that fell were reset: what they
    count since then is taken, as Prometheus's increase() does.
    Raises ServecastError with every problem: missing metrics, buckets that do not add up, unknown ends.
    """
    problems: list[str] = []
    series: Series = {}
    for number, source in enumerate([source for source in (earlier, scrape) if source is not None]):
        for key, points in read_scrape(source, number, problems).items():
            series.setdefault(key, []).extend(points)
    series = _of_model(series, model, problems)
    moments = sorted({moment for points in series.values() for moment, _ in points})
    if [time for _, time in moments if time] != sorted({time for _, time in moments if time}):
        problems.append("earlier: is not of an earlier time than scrape")
    if interval_s is not None and not 0 < interval_s < math.inf:
        problems.append(f"interval: {interval_s!r} is not a number of seconds above 0")
    if problems:
        raise ServecastError(*problems)

    notes: list[str] = []
    counts = _increases(series, moments, notes)
    prompt = _histogram(PROMPT, counts, max_model_len, problems, notes)
    output = _histogram(OUTPUT, counts, max_model_len, problems, notes)
    if problems:
        raise ServecastError(*problems)
    finished, rate = _rate(counts, moments, interval_s, notes)
    return Measured(prompt, output, rate, finished, tuple(dict.fromkeys(notes)))


def _of_model(series: Series, model: str | None, problems: list[str]) -> Series:
    names = sorted({dict(labels).get("model_name", "") for _, labels in series})
    if model is not None:
        if names and model not in names:
            problems.append(f"model: {model!r} is not among the model_name labels: {one_of(names)}")
        return {key: points for key, points in series.items() if dict(key[1]).get("model_name") == model}
    if len(names) > 1:
        problems.append(f"model: the metrics are of several models ({one_of(names)}); name the one that is meant")
    return series


def _increases(series: Series, moments: list[Moment], notes: list[str]) -> dict[tuple[str, Labels], float]:
    """How far each counter rose over the moments; its value, where there is one moment only.

    An engine's counters are reset together, so that one which fell shows it for all of them, also for those that have
    already passed their old value. One that begins later began at 0.
    """
    fell = {
        (_engine(key), moment)
        for key, points in series.items()
        for (_, before), (moment, value) in itertools.pairwise(points)
        if value < before
    }
    notes.extend(
        f"counters were reset between the scrapes ({engine}): what came before is not counted"
        for engine in sorted({said(engine) for engine, _ in fell})
    )
    rose = {}
    for key, points in series.items():
        late = len(moments) > 1 and points[0][0] != moments[0]
        if late:
            notes.append("an engine was started between the scrapes: counted from 0")
        if points[-1][0] != moments[-1]:
            notes.append("an engine was stopped between the scrapes: what it did since is not counted")
        rose[key] = points[0][1] if late or len(moments) == 1 else 0.0
        for (_, before), (moment, value) in itertools.pairwise(points):
            rose[key] += value if (_engine(key), moment) in fell else value - before
    return rose


def _engine(key: tuple[str, Labels]) -> Labels:
    return frozenset(pair for pair in key[1] if pair[0] not in ("le", "finished_reason"))


def _histogram(
    metric: str,
    counts: _Counts,
    max_model_len: int | None,
    problems: list[str],
    notes: list[str],
) -> dict[str, Any]:
    """The `histogram` spec of one metric, all engines together."""
    engines: defaultdict[Labels, dict[float, float]] = defaultdict(dict)
    found = len(problems)
    for (name, labels), count in counts.items():
        if name == f"{metric}_bucket":
            le = dict(labels).get("le", "none")
            try:
                edge = float(le)
            except ValueError:
                edge = math.nan
            if math.isnan(edge):
                problems.append(f"vllm:{metric}_bucket: le={le!r} is not a number")
            else:
                engines[frozenset(pair for pair in labels if pair[0] != "le")][edge] = count
    if not engines and len(problems) == found:
        known = sorted({name for name, _ in counts})
        problems.append(f"vllm:{metric}_bucket is missing; found: {one_of(known) or 'none of the needed metrics'}")
    for labels, buckets in engines.items():
        _check_buckets(metric, labels, buckets, counts.get((f"{metric}_count", labels)), problems)
    edges = sorted({edge for buckets in engines.values() for edge in buckets})
    for labels, buckets in engines.items():
        problems += _unknown_between(metric, labels, buckets, edges)
    if len(problems) > found:
        return {}

    cumulative = [sum(buckets.get(edge, buckets[math.inf]) for buckets in engines.values()) for edge in edges]
    ends: list[int | None] = []
    numbers: list[float] = []
    below = 0.0
    for edge, count in zip(edges, cumulative, strict=True):
        end = math.floor(edge) if edge < math.inf else None
        if end is not None and end < 1:
            if count:
                notes.append(f"vllm:{metric}: {count:,.0f} requests with 0 tokens were left out")
        elif ends and end == ends[-1]:
            numbers[-1] += count - below  # 1.0 and 1.5 hold the same whole numbers
        else:
            ends.append(end)
            numbers.append(count - below)
        below = count
    spec = _spec(metric, ends, numbers, max_model_len)
    sums = [counts.get((f"{metric}_sum", labels)) for labels in engines]
    if any(one is None for one in sums):
        notes.append(f"vllm:{metric}_sum is missing: lengths are spread evenly in their buckets")
    elif total := sum(numbers):
        spec["mean"] = sum(one or 0.0 for one in sums) / total
    problems += [f"vllm:{metric}{problem}" for problem in check_kind(LENGTHS, spec, "")]
    return spec


def _check_buckets(
    metric: str, labels: Labels, buckets: Mapping[float, float], count: float | None, problems: list[str]
) -> None:
    where = f"vllm:{metric}_bucket{{{said(labels)}}}"
    if math.inf not in buckets:
        problems.append(f'{where}: the bucket le="+Inf" is missing')
        return
    edges = sorted(buckets)
    if len(edges) == 1:
        problems.append(f'{where}: there is no bucket beside le="+Inf", so nothing is known of the lengths')
    for low, high in itertools.pairwise(edges):
        if buckets[high] < buckets[low]:
            problems.append(
                f"{where}: falls from {buckets[low]:g} at le={low:g} to {buckets[high]:g} at le={high:g}; Prometheus's "
                "buckets are cumulative (is this a heatmap's count per bucket?)"
            )
            return
    if count is not None and not math.isclose(count, buckets[math.inf], rel_tol=1e-6):
        problems.append(f'{where}: le="+Inf" counts {buckets[math.inf]:g}, vllm:{metric}_count {count:g}')


def _unknown_between(metric: str, labels: Labels, buckets: Mapping[float, float], edges: list[float]) -> list[str]:
    """Engines of another max_model_len have fewer buckets; that is fine while nobody is above their last one."""
    absent = [edge for edge in edges if edge not in buckets]
    if not absent or math.inf not in buckets:
        return []
    last = max((edge for edge in buckets if edge < math.inf), default=0.0)
    if min(absent) > last and buckets.get(last) == buckets[math.inf]:
        return []
    return [f"vllm:{metric}_bucket{{{said(labels)}}}: has no bucket le={min(absent):g}, which other engines have"]


def _spec(metric: str, ends: list[int | None], numbers: list[float], max_model_len: int | None) -> dict[str, Any]:
    """Cut after the last bucket that anyone is in."""
    used = [i for i, number in enumerate(numbers) if number > 0]
    last = used[-1] if used else 0
    spec: dict[str, Any] = {"kind": "histogram", "edges": ends[: last + 1], "counts": numbers[: last + 1]}
    if ends[last] is None:
        spec["edges"] = ends[:last]
        if max_model_len is not None:
            spec["max"] = max_model_len
    return spec


def _rate(
    counts: _Counts, moments: list[Moment], interval_s: float | None, notes: list[str]
) -> tuple[float, float | None]:
    """(finished requests, their rate per second or None)."""
    by_reason: defaultdict[str, float] = defaultdict(float)
    for (name, labels), count in counts.items():
        if name == FINISHED:
            by_reason[dict(labels).get("finished_reason", "")] += count
    finished = sum(by_reason.values())
    if not by_reason:
        finished = sum(
            count for (name, labels), count in counts.items() if name == f"{PROMPT}_bucket" and ("le", "+Inf") in labels
        )
        notes.append(f"vllm:{FINISHED} is missing: requests are counted by the prompt histogram")
    if aborted := by_reason.get("abort", 0.0):
        notes.append(f"{aborted / finished:.1%} of the requests were aborted by their clients; they are counted too")
    seconds = interval_s
    if seconds is None and len(moments) > 1 and all(time for _, time in moments):
        seconds = moments[-1][1] - moments[0][1]
    if len(moments) == 1:
        notes.append("one scrape: the lengths of all requests since the engine started")
        seconds = None
    if seconds is None or finished == 0:
        return finished, None
    notes.append(
        f"{finished:,.0f} requests finished in {seconds:,.0f} s; as many arrived only if the queue did not grow"
    )
    return finished, finished / seconds
