"""What the winner takes while its traffic grows: replicas month by month, and the traffic that each fleet carries."""

from __future__ import annotations

import re
from dataclasses import dataclass

from servecast.errors import ServecastError
from servecast.planning.ladder import Ladder

MOST_GROWTH = 10.0
"""The largest growth a month, 1,000 %, that is no slip of the pen."""


@dataclass(frozen=True, slots=True)
class Growth:
    """The traffic is `1 + rate` times as much every month. `replicas` of each month (the first has the scenario's
    traffic), the spare ones not among them; None from where on it takes more than there may be. `carried`: the
    largest factor on the traffic that each of these numbers carries, and whether a little more is too much. `runs`:
    simulations."""

    rate: float
    replicas: tuple[int | None, ...]
    carried: dict[int, tuple[float, bool]]
    runs: int

    def factor(self, month: int) -> float:
        """The traffic of a month, counted from 0, over the scenario's."""
        return float((1 + self.rate) ** month)


def growth_rate(text: str) -> float:
    """`10%/month`, `100%/year` (which compounds) as a share a month. Raises ServecastError."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*(?:/|a|per)?\s*(month|year)?\s*", text)
    rate = float(match[1]) / 100 if match else 0.0
    if match and match[2] == "year":
        rate = (1 + rate) ** (1 / 12) - 1
    if not 0 < rate <= MOST_GROWTH:
        raise ServecastError(f"--growth {text!r}: expected a percentage a month or a year, 10%/month or 100%/year")
    return rate


def grown(ladder: Ladder, rate: float, months: int) -> Growth:
    """The growth of a candidate whose `ladder`, of the scenario's traffic, that is."""
    before = ladder.runs
    factors = [(1 + rate) ** month for month in range(months)]
    found = ladder.fewest(factors)
    each = tuple(found[factor] for factor in factors)
    carried = ladder.largest({n for n in each if n is not None})
    return Growth(rate, each, carried, ladder.runs - before)
