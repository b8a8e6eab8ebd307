"""What a sweep found: its rows, a row a point over all seeds, and the points that no other one beats.

It knows nothing of pages; what a run is, and how it came to be, is the door's business.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

THROUGHPUT, INTERACTIVITY, TTFT = "output_throughput_per_gpu", "interactivity", "p50_ttft_ms"
FRONTS = {INTERACTIVITY: True, TTFT: False}
"""What throughput per GPU is traded against, and whether more of it is better."""
FLAGS = ("saturated", "undecided")
MEETS = 0.99
"""The share of requests within the SLO from which a configuration is said to meet it."""


@dataclass(frozen=True, slots=True)
class Column:
    """A figure of a run that people compare configurations by."""

    key: str
    name: str
    unit: str
    more_is_better: bool | None = None
    brief: str = ""


COLUMNS = (
    Column(THROUGHPUT, "Output", "tokens/s/GPU", True, "tok/s/GPU"),
    Column(INTERACTIVITY, "Interactivity", "tokens/s/user", True, "tok/s/user"),
    Column(TTFT, "TTFT p50", "ms", False),
    Column("p99_ttft_ms", "TTFT p99", "ms", False),
    Column("p99_tpot_ms", "TPOT p99", "ms", False),
    Column("p99_e2el_ms", "E2E p99", "ms", False),
    Column("request_throughput", "Requests", "per s", True),
    Column("slo_attainment", "Meet the SLO", "%", True, "SLO met %"),
    Column("unserved", "Not served", "%", False, "lost %"),
    Column("kv_peak_fraction", "KV peak", "%"),
    Column("preemptions", "Preemptions", ""),
    Column("gpus", "GPUs", "", False),
)


@dataclass(frozen=True, slots=True)
class Shown:
    """An axis: `key` is its column, `values` its texts, each once, in the order in which they were given; None where
    they are numbers."""

    key: str
    values: tuple[str, ...] | None


@dataclass(frozen=True)
class Swept:
    """A sweep. `rows` is what its folder holds: a row a run, with `point`, `seed`, a column an axis, `status` (done,
    invalid, failed), `error`, the figures of `Result.summary()`, and whether saturation is `undecided`. `total` runs
    were wanted, each under `seeds` seeds; `again` points were drawn twice. `complete` False: it was ended early.
    `texts` says what was varied."""

    title: str
    axes: tuple[Shown, ...]
    texts: tuple[tuple[str, str], ...]
    rows: pl.DataFrame
    total: int
    seeds: int
    again: int
    complete: bool
    version: str
    scenario: str

    @cached_property
    def points(self) -> pl.DataFrame:
        """A row a point with a result: its values, `runs` (how many seeds), `saturated` and `undecided` (in any of
        them), `steady` (neither), and the mean over the seeds of each figure of COLUMNS that there is; `_low` and
        `_high` of those that fronts are made of."""
        done = self.rows.filter(self.rows["status"] == "done")
        keys = [axis.key for axis in self.axes if axis.key != "seed"]
        figures = [c.key for c in COLUMNS if c.key in done.columns and done[c.key].dtype.is_numeric()]
        ends = [key for key in (THROUGHPUT, *FRONTS) if key in figures]
        flags = ((pl.col(key) if key in done.columns else pl.lit(None)).cast(pl.Boolean) for key in FLAGS)
        saturated, undecided = (flag.any(ignore_nulls=True).alias(key) for key, flag in zip(FLAGS, flags, strict=True))
        return done.group_by("point", maintain_order=True).agg(
            *(pl.col(key).first() for key in keys),
            *([pl.col("seed").first()] if len(keys) < len(self.axes) else []),
            pl.len().alias("runs"),
            saturated,
            undecided,
            (~(saturated | undecided)).alias("steady"),
            *(pl.col(key).mean() for key in figures),
            *(pl.col(key).min().alias(f"{key}_low") for key in ends),
            *(pl.col(key).max().alias(f"{key}_high") for key in ends),
        )

    @cached_property
    def columns(self) -> tuple[Column, ...]:
        """Those of COLUMNS that have figures here."""
        points = self.points
        found = (c for c in COLUMNS if c.key in points.columns and points[c.key].null_count() < points.height)
        return tuple(c for c in found if c.key not in ("unserved", "preemptions") or (points[c.key] > 0).any())

    def front(self, against: str) -> pl.DataFrame:
        """The points that no other one beats in both throughput per GPU and `against` (of FRONTS), most throughput
        first. Only steady ones count: latencies of others grow with the length of the run."""
        points = self.points
        if THROUGHPUT not in points.columns or against not in points.columns:
            return points.clear()
        points = points.filter(points["steady"]).drop_nulls([THROUGHPUT, against])
        sign = 1 if FRONTS[against] else -1
        kept = unbeaten(points[THROUGHPUT].to_numpy(), sign * points[against].to_numpy())
        return points.filter(pl.Series(kept, dtype=pl.Boolean)).sort(THROUGHPUT, descending=True)

    @cached_property
    def fronts(self) -> set[int]:
        """The numbers of the points on either front."""
        return {number for against in FRONTS for number in self.front(against)["point"]}

    def best(self, key: str, more: bool, among: pl.DataFrame | None = None) -> dict[str, Any] | None:
        """The point, as a mapping, with the most (or least) of a figure among steady ones; None where there is none."""
        points = self.points if among is None else among
        if key not in points.columns:
            return None
        points = points.filter(points["steady"]).drop_nulls(key)
        return points.sort(key, "point", descending=[more, False]).row(0, named=True) if points.height else None

    @property
    def meeting(self) -> pl.DataFrame | None:
        """The points that meet the SLO; None where the scenario has none."""
        if "slo_attainment" not in {column.key for column in self.columns}:
            return None
        return self.points.filter(self.points["slo_attainment"] >= MEETS)

    def count(self, status: str) -> int:
        """Runs of that status."""
        return int((self.rows["status"] == status).sum())

    def errors(self, status: str) -> list[tuple[str, int, pl.DataFrame]]:
        """(error, how many runs, their rows) of runs of that status, the most frequent first."""
        rows = self.rows.filter(self.rows["status"] == status)
        said = Counter(rows["error"].to_list())
        return [(str(error), count, rows.filter(rows["error"] == error)) for error, count in said.most_common()]


def unbeaten(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    """bool[n]: whether no other point has as much of both `a` and `b` (float64[n]) and more of one."""
    order = np.lexsort((-b, -a))
    kept = np.zeros(len(a), dtype=bool)
    most, last = -np.inf, None
    for i in order:
        pair = a[i], b[i]
        kept[i] = b[i] > most or pair == last
        if b[i] > most:
            most, last = b[i], pair
    return kept
