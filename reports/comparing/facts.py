"""What a comparison found: a line a metric, with a judgement of every scenario against the first one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from sim.statistics import Floats, Interval

Word = Literal["better", "worse", "equal", "noise", "model", "unknown", "unlike", "undefined"]
"""How a scenario stands to the first: beyond noise; the very same; not beyond noise; beyond noise, but not beyond the
error of the model; nothing says how large the noise is; not to be ranked; a value is missing."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure of the summary: its `key`, what it is called, how it is written, and which way is better."""

    key: str
    name: str
    kind: Literal["ms", "rate", "dollars", "share", "count"]
    better: Literal["lower", "higher"]


LATENCIES = {"TTFT": "ttft_ms", "TPOT": "tpot_ms", "ITL": "itl_ms", "E2E": "e2el_ms"}
METRICS = (
    *(Metric(f"{which}_{key}", f"{which} {name}", "ms", "lower")
      for name, key in LATENCIES.items() for which in ("p50", "p99")),
    Metric("output_throughput", "output tokens/s", "rate", "higher"),
    Metric("request_goodput", "goodput, requests/s", "rate", "higher"),
    Metric("cost_per_million_output_tokens", "$ per million output tokens", "dollars", "lower"),
    Metric("kv_peak_fraction", "KV cache, peak", "share", "lower"),
    Metric("preemptions", "preemptions", "count", "lower"),
    Metric("prefix_cache_hit_rate", "prefix hits", "share", "higher"),
    Metric("unserved", "requests not served", "share", "lower"),
)  # fmt: skip
STEADY = tuple(m for m in METRICS if m.kind == "ms" and "itl" not in m.key)
"""What can be said of some of the requests alone."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A scenario's figure less the first one's, paired by seed or section; `under_error` is the central range of the
    differences under the draws of the model's error."""

    word: Word
    interval: Interval | None = None
    under_error: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Line:
    """A metric of every scenario, in their order (None: undefined), and the differences to the first, whose own is
    None. `best`: the one that is better than every other beyond noise."""

    metric: Metric
    values: tuple[Interval | None, ...]
    differences: tuple[Difference | None, ...]
    best: int | None


@dataclass(frozen=True, slots=True)
class Class:
    """Of a request class: mean time in the queue, and p50 and p99 TTFT, in ms (None: none finished)."""

    queue_ms: float | None
    p50_ttft_ms: float | None
    p99_ttft_ms: float | None


@dataclass(frozen=True, slots=True)
class Ran:
    """One scenario. `changes` is (key, first's value, own value) of what differs from the first. `saturated` counts its
    runs in which work piles up, `undecided` those too short to tell. `spent` is metric -> part -> mean ms, `busy` the
    shares of time in steps with prompts, and in steps that only decode; `curves` metric -> values (ms) at PERCENTS, the
    mean over seeds; `series` what went on in the first seed's run."""

    label: str
    setup: str
    changes: tuple[tuple[str, str, str], ...]
    same: bool
    saturated: int
    undecided: int
    verdict: str
    figures: Mapping[str, float]
    spent: Mapping[str, Mapping[str, float]]
    classes: Mapping[str, Class]
    busy: tuple[float, float]
    curves: Mapping[str, Floats]
    series: Mapping[str, Floats]


PERCENTS = np.concatenate([np.linspace(0, 98, 99), np.linspace(98.1, 100, 20)])


@dataclass(frozen=True, slots=True)
class Compared:
    """Everything that was found. `lines` are of all requests; `steady` of those that arrived after the first
    `trimmed` of them (a share), or empty where some run does not settle (`trimmed` None). `failed` is (label, error) of
    scenarios that have no result. `one_course`: why there is one run a scenario, where seeds change nothing or only one
    was asked for. `draws` of the model's error were run, at that `level`."""

    title: str
    ran: tuple[Ran, ...]
    failed: tuple[tuple[str, str], ...]
    lines: tuple[Line, ...]
    steady: tuple[Line, ...]
    trimmed: float | None
    alike: bool
    seeds: tuple[int, ...]
    one_course: str
    requests: int
    draws: int
    level: float
    version: str

    @property
    def first(self) -> Ran:
        """What the others are compared with."""
        return self.ran[0]

    def plain(self) -> dict[str, Any]:
        """For JSON: what was found, without the curves."""

        def interval(found: Interval | None) -> Any:
            return None if found is None else {"mean": found.mean, "half_width": found.half}

        def lines(some: tuple[Line, ...]) -> list[dict[str, Any]]:
            return [
                {
                    "metric": line.metric.key,
                    "better": line.metric.better,
                    "values": {r.label: interval(v) for r, v in zip(self.ran, line.values, strict=True)},
                    "differences": {
                        r.label: {"verdict": d.word, "difference": interval(d.interval), "under_error": d.under_error}
                        for r, d in zip(self.ran, line.differences, strict=True)
                        if d is not None
                    },
                    "best": None if line.best is None else self.ran[line.best].label,
                }
                for line in some
            ]

        return {
            "servecast": self.version,
            "scenarios": [
                {
                    "label": r.label, "setup": r.setup, "same_as_first": r.same,
                    "changes": [{"key": key, "first": old, "own": new} for key, old, new in r.changes],
                    "saturated_runs": r.saturated, "undecided_runs": r.undecided, "spent_ms": r.spent,
                    "classes": {name: asdict(each) for name, each in r.classes.items()},
                    "time_in_prompt_steps": r.busy[0], "time_in_decode_steps": r.busy[1],
                }
                for r in self.ran
            ],
            "failed": [{"label": label, "error": error} for label, error in self.failed],
            "same_workload": self.alike, "seeds": list(self.seeds), "one_course": self.one_course or None,
            "level": self.level, "draws": self.draws,
            "metrics": lines(self.lines), "steady_from": self.trimmed, "steady": lines(self.steady),
        }  # fmt: skip
