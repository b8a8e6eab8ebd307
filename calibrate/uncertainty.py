"""How far prices and host times may be off, as correlated draws: the same for every scenario, so that what is common to
two of them cancels in their difference. It knows no requests and no results.

What is drawn, with where its width comes from (`docs/accuracy.md` has the errors that they must explain):
- each family of kernels: the profile's median error inside its grid; a datasheet's 25 %;
- all kernels together (COMPOSITION): what sums of kernels miss or count twice;
- long steps (CLOCKS): what they take longer than their kernels differs between machines and engines;
- experts (EXPERTS): their loads differ, and what runs around them is in no table;
- the host's and the front end's times (HOST, FRONT_END): machines differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from calibrate.cost import CompiledCost
from calibrate.engine import EngineSpec
from calibrate.prices import Prices
from calibrate.profile import Profile
from calibrate.scaled import PRICED, Scaled

if TYPE_CHECKING:
    from numpy.random import Generator

    from calibrate.speculative_cost import SpeculativeCost

T = TypeVar("T", "CompiledCost", "SpeculativeCost")
LEVEL = 0.8
"""The central share of the draws that a figure's range holds, and in which a difference has to be on one side of 0."""
QUARTILE = 0.6745  # of a normal law: its median |error| in standard deviations
DATASHEET = 0.25
COMPOSITION = 0.045
CLOCKS = (-0.25, 0.35)
EXPERTS = 0.2
HOST = 0.4
FRONT_END = 1.0


@dataclass(frozen=True, slots=True)
class Draw:
    """One possible truth: factors on families of kernels, on steps of many tokens, on host and front-end times."""

    factors: Mapping[str, float]
    long_steps: float
    host: float
    front_end: float

    def engine(self, engine: EngineSpec) -> EngineSpec:
        """The engine with its host and front end this fast."""
        names = ("sync_base_s", "sync_per_sequence_s", "async_base_s", "async_per_sequence_s", "bubble_s",
                 "compiled_launch_s", "uncaptured_launch_s", "eager_launch_s", "layer_s")  # fmt: skip
        given = {name: seconds for name in names if (seconds := getattr(engine.host, name)) is not None}
        host = replace(engine.host, **{name: self.host * seconds for name, seconds in given.items()})
        front = engine.front_end
        times = {"request_s": front.request_s, "prompt_token_s": front.prompt_token_s}
        return replace(
            engine,
            host=host,
            front_end=replace(front, **{name: self.front_end * s for name, s in times.items()}),
        )

    def cost(self, cost: T) -> T:
        """A compiled cost with long steps this much longer."""
        return cost.slowed(self.long_steps)


def draws(prices: Prices, count: int, seed: int) -> Iterator[Draw]:
    """`count` draws, the same for the same seed whatever the prices' widths are."""
    widths = _widths(prices)
    random = np.random.default_rng([seed, 20_07])
    for _ in range(count):
        yield _draw(widths, random)


def _draw(widths: Mapping[str, float], random: Generator) -> Draw:
    common, host, front_end, experts = random.standard_normal(4)
    own = random.standard_normal(len(PRICED))
    clocks = random.uniform(*CLOCKS)
    logs = {family: COMPOSITION * common + widths[family] * z for family, z in zip(PRICED, own, strict=True)}
    logs["moe"] += EXPERTS * experts
    factors = {family: float(np.exp(log)) for family, log in logs.items()}
    return Draw(factors, 1 + clocks, float(np.exp(HOST * host)), float(np.exp(FRONT_END * front_end)))


def _widths(prices: Prices) -> dict[str, float]:
    """Family -> the standard deviation of its factor's logarithm."""
    found = dict.fromkeys(PRICED, DATASHEET)
    while isinstance(prices, Scaled):
        prices = prices.prices
    if isinstance(prices, Profile):
        for family in prices.families:
            off = [r.median for r in prices.residuals if r.family == family and r.what == "rows"]
            found[family] = max(off, default=DATASHEET) / QUARTILE
    return found
