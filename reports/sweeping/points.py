"""What a sweep found: its rows, a row a point over all seeds, and the points that no other one beats.

It knows nothing of pages; what a run is, and how it came to be, is the door's business.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from calibrate.uncertainty import LEVEL
from sim.statistics import Floats, central, less

THROUGHPUT, INTERACTIVITY, TTFT = "output_throughput_per_gpu", "interactivity", "p50_ttft_ms"
FRONTS = {INTERACTIVITY: True, TTFT: False}
"""What throughput per GPU is traded against, and whether more of it is better."""
FLAGS = ("saturated", "undecided")
LEAST = 5
"""Draws that make a range."""
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
    """`key` is the axis's column, `values` its texts, each once, in the order in which they were given; None where they
    are numbers."""

    key: str
    values: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class UnderError:
    """Points in the draws of the model's error that all of them were run under, the same error for all in each draw.
    `places` has a point's column by its number; `figures` are float64[draws, points], NaN where undefined;
    `saturated` and `steady`, as of points, bool[draws, points]."""

    places: dict[int, int]
    figures: dict[str, Floats]
    saturated: npt.NDArray[np.bool_]
    steady: npt.NDArray[np.bool_]

    @property
    def draws(self) -> int:
        """How many."""
        return len(self.steady)

    def ranges(self, key: str) -> list[list[float] | None]:
        """Of each point the ends of the central LEVEL of the draws; None where a draw lacks the figure."""
        ends: list[list[float]] = central(self.figures[key], LEVEL).T.tolist()
        return [None if np.isnan(pair).any() else pair for pair in ends]

    def on_front(self, against: str) -> list[int]:
        """In how many draws each point is on that front."""
        count = np.zeros(len(self.places), dtype=int)
        sign = 1 if FRONTS[against] else -1
        for a, b, steady in zip(self.figures[THROUGHPUT], sign * self.figures[against], self.steady, strict=True):
            there = np.flatnonzero(steady & ~np.isnan(a) & ~np.isnan(b))
            count[there[unbeaten(a[there], b[there])]] += 1
        return [int(n) for n in count]

    def ahead(self, key: str, more: bool, one: int, others: list[int]) -> list[bool]:
        """Whether point `one` is better than each of the others in the central LEVEL of the draws: what is wrong with
        both alike is in no difference."""
        figures = self.figures[key] if more else -self.figures[key]
        at = [self.places[number] for number in others]
        low, _ = central(less(figures[:, [self.places[one]]], figures[:, at]), LEVEL)
        return [bool(found) for found in low > 0]


@dataclass(frozen=True)
class Swept:
    """A sweep. `rows` is what its folder holds: a row a run, with `point`, `seed`, `draw` (of the model's error; 0: the
    forecast), a column an axis, `status` (done, invalid, failed), `error`, the figures of `Result.summary()`, and
    whether saturation is `undecided`. `total` runs were wanted: every point under `seeds` seeds, and these again
    under `draws` draws; `again` points were drawn twice. `complete` False: it was ended early. `texts` says what
    was varied."""

    title: str
    axes: tuple[Shown, ...]
    texts: tuple[tuple[str, str], ...]
    rows: pl.DataFrame
    total: int
    seeds: int
    draws: int
    again: int
    complete: bool
    version: str
    scenario: str

    @cached_property
    def points(self) -> pl.DataFrame:
        """A row a point with a result: its values, `runs` (how many seeds), `saturated` and `undecided` (in any of
        them), `steady` (neither), and the mean over the seeds of each figure of COLUMNS that there is; `_low` and
        `_high` of those that fronts are made of. Of what was drawn: the range `_under_error` of each figure, and in
        how many draws the point is `saturated_under_error` and `_front_under_error`."""
        keys = [axis.key for axis in self.axes if axis.key != "seed"]
        ends = [key for key in (THROUGHPUT, *FRONTS) if key in self._figures]
        points = self._means(
            self._forecasts,
            ["point"],
            *(pl.col(key).first() for key in keys),
            *([pl.col("seed").first()] if len(keys) < len(self.axes) else []),
            pl.len().alias("runs"),
            *(pl.col(key).min().alias(f"{key}_low") for key in ends),
            *(pl.col(key).max().alias(f"{key}_high") for key in ends),
        )
        found = self.under_error
        if found is None:
            return points
        ranges = {
            f"{key}_under_error": pl.Series(found.ranges(key), dtype=pl.List(pl.Float64)) for key in found.figures
        }
        fronts = {f"{key}_front_under_error": pl.Series(found.on_front(key)) for key in FRONTS if key in found.figures}
        piled_up = pl.Series(found.saturated.sum(axis=0))
        return points.with_columns(saturated_under_error=piled_up, **fronts, **ranges)

    @cached_property
    def under_error(self) -> UnderError | None:
        """The points in those draws that all of them have; None where these are too few for a range."""
        forecasts = self._forecasts
        found = self.rows.filter((self.rows["draw"] > 0) & (self.rows["status"] == "done"))
        found = found.join(forecasts, on=["point", "seed"], how="semi")
        found = found.filter(pl.len().over("draw") == forecasts.height)
        if found["draw"].n_unique() < LEAST:
            return None
        means = self._means(found, ["draw", "point"])
        numbers = means["point"].unique().sort().to_list()

        def table(key: str) -> npt.NDArray[Any]:
            return means[key].to_numpy().reshape(-1, len(numbers))

        figures = {key: table(key).astype(np.float64) for key in self._figures}
        places = {number: at for at, number in enumerate(numbers)}
        return UnderError(places, figures, table("saturated"), table("steady"))

    @cached_property
    def _forecasts(self) -> pl.DataFrame:
        return self.rows.filter((self.rows["status"] == "done") & (self.rows["draw"] == 0))

    @cached_property
    def _figures(self) -> list[str]:
        return [c.key for c in COLUMNS if c.key in self.rows.columns and self.rows[c.key].dtype.is_numeric()]

    def _means(self, rows: pl.DataFrame, by: list[str], *more: pl.Expr) -> pl.DataFrame:
        """Over seeds, sorted."""
        flags = ((pl.col(key) if key in rows.columns else pl.lit(None)).cast(pl.Boolean) for key in FLAGS)
        saturated, undecided = (flag.any(ignore_nulls=True).alias(key) for key, flag in zip(FLAGS, flags, strict=True))
        steady = (~(saturated | undecided)).alias("steady")
        means = (pl.col(key).mean() for key in self._figures)
        return rows.group_by(by).agg(*more, saturated, undecided, steady, *means).sort(by)

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

    def rivals(self, key: str, more: bool, best: Mapping[str, Any]) -> pl.DataFrame:
        """The other steady points that the best one is not ahead of beyond the model's error; none where it was not
        drawn."""
        others = self.points.filter(self.points["steady"] & (self.points["point"] != best["point"])).drop_nulls(key)
        if self.under_error is None:
            return others.clear()
        behind = self.under_error.ahead(key, more, best["point"], others["point"].to_list())
        return others.filter(~pl.Series(behind, dtype=pl.Boolean)).sort(key, "point", descending=[more, False])

    def next_differs(self, against: str, numbers: list[int]) -> list[list[str]]:
        """Of points in the order of a front: in which of its two figures each has or lacks more than the next one,
        beyond the model's error. Only of what was drawn."""
        assert self.under_error is not None
        ahead = self.under_error.ahead
        return [
            [THROUGHPUT] * ahead(THROUGHPUT, True, a, [b])[0] + [against] * ahead(against, FRONTS[against], b, [a])[0]
            for a, b in pairwise(numbers)
        ]

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
