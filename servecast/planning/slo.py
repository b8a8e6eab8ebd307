"""Requirements on a run, as people write them: `p99 ttft < 1s`, `chat: p95 tpot < 50ms`, `goodput > 99 %`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from servecast.errors import ServecastError, nearest, one_of
from workloads.units import parse_duration

if TYPE_CHECKING:
    from servecast.run import Result

COLUMNS = {"ttft": "ttft_s", "tpot": "tpot_s", "e2e": "e2e_s", "queue": "queue_s", "gap": "longest_gap_s",
           "answer": "first_answer_s"}  # fmt: skip
METRICS = (*COLUMNS, "itl", "goodput")
_ONE = re.compile(
    r"\s*(?:(?P<group>[^:<>]+):)?\s*(?:(?P<stat>[a-z]+[0-9.]*)\s+)?(?P<metric>[a-z0-9]+)\s*"
    r"(?P<op><=|>=|<|>|=+|≤|≥)\s*(?P<value>[^<>]+?)\s*"
)
EXAMPLE = "for example p99 ttft < 1s, p95 tpot < 50ms, mean e2e < 20s, goodput > 99 %, or chat: p99 ttft < 500ms"


@dataclass(frozen=True, slots=True)
class Requirement:
    """A limit on a figure of a run: `stat` ("mean", or a percentile in percent) of a latency in seconds, over the
    finished requests of class `group` (all, where empty); or the share of the requests that met their SLO, among all
    that are over (`metric` "goodput", at least `limit`)."""

    metric: str
    stat: float | str
    limit: float
    group: str = ""

    @property
    def tail(self) -> float:
        """The share of requests beyond the percentile; 1 where it is none."""
        if self.metric == "goodput":
            return 1 - self.limit
        return 1 - self.stat / 100 if isinstance(self.stat, float) else 1.0

    def value(self, result: Result) -> float | None:
        """The figure; None where no request has one."""
        if self.metric == "goodput":
            summary = result.summary()
            share = (summary["classes"][self.group] if self.group else summary)["slo_attainment"]
            return None if share is None else float(share)
        if self.metric == "itl":
            gaps = result.itl
            if not gaps.count:
                return None
            return gaps.percentile(self.stat) if isinstance(self.stat, float) else _mean(gaps.values, gaps.cumulative)
        values = result.column(COLUMNS[self.metric], finished=True)
        if self.group:
            assert result.classes is not None
            of = result.classes.index[result.column("id", finished=True).astype(np.int64)]
            values = values[of == result.classes.names.index(self.group)]
        values = values[~np.isnan(values)]
        if not len(values):
            return None
        return float(np.percentile(values, self.stat) if isinstance(self.stat, float) else values.mean())

    def missed(self, result: Result) -> int:
        """How many requests are beyond the limit of a percentile, or miss their SLO; 0 of other figures."""
        if self.metric == "goodput":
            share, summary = self.value(result), result.summary()
            over = summary["classes"][self.group]["submitted"] if self.group else summary["submitted"]
            return 0 if share is None else round((1 - share) * over)
        if not isinstance(self.stat, float) or self.metric == "itl" or self.group:
            return 0
        return int((result.column(COLUMNS[self.metric], finished=True) > self.limit).sum())

    def met(self, value: float | None) -> bool:
        """Whether a figure is within the limit; where nobody has one (all answers are one token long, say) it is."""
        if value is None:
            return self.metric != "goodput"
        return value >= self.limit if self.metric == "goodput" else value <= self.limit

    def excess(self, value: float | None) -> float:
        """How far beyond the limit: 0.2 is 20 % too long, or a fifth of the allowed misses too many; below 0 within."""
        if value is None:
            return 0.0 if self.met(None) else float("inf")
        if self.metric == "goodput":
            allowed = max(1 - self.limit, 1e-9)
            return (1 - value) / allowed - 1
        return value / self.limit - 1

    def __str__(self) -> str:
        of = f"{self.group}: " if self.group else ""
        if self.metric == "goodput":
            return f"{of}goodput >= {100 * self.limit:.12g} %"
        stat = self.stat if isinstance(self.stat, str) else f"p{self.stat:.12g}"
        return f"{of}{stat} {self.metric} <= {time_text(self.limit)}"

    def shown(self, value: float | None) -> str:
        """A value of this figure for people."""
        if value is None:
            return "none"
        return f"{100 * value:.4g} %" if self.metric == "goodput" else time_text(value)


def time_text(seconds: float) -> str:
    """`350 ms`, `1.2 s`."""
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.4g} s"


def _mean(values: np.ndarray, cumulative: np.ndarray) -> float:
    return float(np.average(values, weights=np.diff(cumulative, prepend=0.0)))


def parse_requirements(texts: Iterable[str], groups: Iterable[str] = ()) -> tuple[Requirement, ...]:
    """Requirements, several of one text separated by commas; `groups` are the classes of the workload. Raises
    ServecastError with everything that is wrong."""
    found, problems, groups = list[Requirement](), list[str](), list(groups)
    for text in (part for whole in texts for part in whole.split(",")):
        try:
            found.append(_parse(text, groups))
        except ValueError as error:
            problems.append(f"--slo {text.strip()!r}: {error}")
    if problems:
        raise ServecastError(*problems)
    return tuple(dict.fromkeys(found))


def _parse(text: str, groups: list[str]) -> Requirement:
    match = _ONE.fullmatch(text)
    if match is None:
        raise ValueError(f"not a requirement; {EXAMPLE}")
    group, stat, metric, op, value = (match[name] for name in ("group", "stat", "metric", "op", "value"))
    group = (group or "").strip()
    if group and group not in groups:
        known = f"its classes are {one_of(groups)}" if groups else "it has no classes"
        raise ValueError(f"the workload has no class {group!r}{nearest(group, groups)}; {known}")
    metric = {"e2el": "e2e", "latency": "e2e"}.get(metric, metric)
    if metric not in METRICS:
        raise ValueError(f"{metric!r} is not a metric{nearest(metric, METRICS)}; known: {one_of(METRICS)}")
    if metric == "itl" and group:
        raise ValueError("gaps between tokens are not known by class; take tpot")
    if metric == "goodput":
        return _goodput(stat, op, value, group)
    if op in (">", ">=", "≥") or op.startswith("="):
        raise ValueError(f"latencies have an upper limit; write <, as in {stat or 'p99'} {metric} < {value}")
    try:
        limit = parse_duration(value)
    except ValueError as error:
        raise ValueError(str(error)) from None
    if limit == 0:
        raise ValueError("nothing takes no time")
    return Requirement(metric, _stat(stat, metric), limit, group)


def _goodput(stat: str | None, op: str, value: str, group: str) -> Requirement:
    if stat or op not in (">", ">=", "≥"):
        raise ValueError("the share of requests that meet their SLO has a lower limit; write goodput > 99 %")
    match = re.fullmatch(r"([0-9.]+)\s*(%?)", value)
    share = float(match[1]) / (100 if match[2] else 1) if match and match[1].count(".") < 2 else -1.0
    if not 0 < share <= 1:
        raise ValueError(f"{value!r} is not a share; write goodput > 99 % (or 0.99)")
    return Requirement("goodput", "share", share, group)


def _stat(stat: str | None, metric: str) -> float | str:
    if stat in ("mean", "avg", "average"):
        return "mean"
    if stat == "median":
        return 50.0
    match = re.fullmatch(r"p(\d+(?:\.\d+)?)", stat or "")
    if match is None or not 0 < float(match[1]) < 100:
        said = "which figure is meant is missing" if stat is None else f"{stat!r} is not a figure"
        raise ValueError(f"{said}; write p99 {metric}, p50 {metric} or mean {metric}")
    return float(match[1])
