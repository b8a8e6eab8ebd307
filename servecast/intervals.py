"""How sure a forecast is: the same scenario under a few draws of what may be wrong with it.

The draws are the same for every scenario of a seed, so that comparisons of two may subtract them draw by draw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from calibrate.scaled import Scaled
from calibrate.uncertainty import LEVEL, Draw, draws
from servecast.pools import PoolSetup, costs
from servecast.run import Result, simulate
from servecast.setup import Setup
from sim.statistics import central

DRAWS = 20
METRICS = (
    *(f"{which}_{time}_ms" for time in ("ttft", "tpot", "itl", "e2el") for which in ("mean", "p50", "p90", "p99")),
    "request_throughput", "output_throughput", "request_goodput", "slo_attainment", "duration",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Intervals:
    """`draws` holds every draw's value of the metrics that are defined in all of them (float64[draws]); `saturated`
    counts the draws in which work piles up."""

    draws: Mapping[str, np.ndarray]
    saturated: int
    level: float = LEVEL

    def of(self, metric: str) -> tuple[float, float] | None:
        """Lower and upper end of the central `level` of the draws, or None where the metric is not defined."""
        if metric not in self.draws:
            return None
        low, high = central(self.draws[metric], self.level).tolist()
        return low, high

    def summary(self) -> dict[str, object]:
        """Plain figures: metric -> [low, high]."""
        ends = {metric: list(self.of(metric) or ()) for metric in self.draws}
        count = len(next(iter(self.draws.values()), ()))
        return {"level": self.level, "draws": count, "saturated_draws": self.saturated, "intervals": ends}


def predict_intervals(setup: Setup, count: int = DRAWS, told: Callable[[int], None] = lambda done: None) -> Intervals:
    """Simulate `setup` once a draw; `told` hears how many are done."""
    found: dict[str, list[float]] = {metric: [] for metric in METRICS}
    saturated = 0
    for done, result in enumerate(results(setup, count), 1):
        summary = result.summary()
        saturated += bool(summary["saturated"])
        for metric in METRICS:
            if summary[metric] is not None:
                found[metric].append(float(summary[metric]))
        told(done)
    return Intervals({m: np.array(values) for m, values in found.items() if len(values) == count}, saturated)


def results(setup: Setup, count: int) -> Iterator[Result]:
    """The result of every draw, in order."""
    drawn = (draws(pool.prices, count, setup.scenario.seed) for pool in setup.pools)
    for each in zip(*drawn, strict=True):
        yield simulate(_drawn(setup, each))


def under(setup: Setup, number: int, seed: int) -> Setup:
    """`setup` as the `number`-th draw (from 1) of that seed has it: the same one however many are taken."""
    return _drawn(setup, [list(draws(pool.prices, number, seed))[-1] for pool in setup.pools])


def _drawn(setup: Setup, each: Iterable[Draw]) -> Setup:
    return replace(setup, pools=tuple(map(_under, setup.pools, each)))


def _under(pool: PoolSetup, draw: Draw) -> PoolSetup:
    engine, prices = draw.engine(pool.engine), Scaled(pool.prices, draw.factors)
    cost, group, pipeline, drafts = costs(pool.model, pool.layout, engine, prices)
    own = draw.cost(cost)
    if group is not None:
        group = replace(group, own=own)
    if pipeline is not None:
        stages = tuple(replace(stage, cost=draw.cost(stage.cost)) for stage in pipeline.stages)
        pipeline = replace(pipeline, stages=stages)
    if drafts is not None:
        drafts = draw.cost(drafts)
    return replace(pool, engine=engine, prices=prices, cost=own, group=group, pipeline=pipeline, drafts=drafts)
