"""The values of an axis as places on a scale: names in their order, numbers linear or logarithmic, many in bins."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import polars as pl

from reports import look
from reports.sweeping import words
from reports.sweeping.points import Shown

MANY = 12
"""Above so many different numbers, heat maps put them into BINS bins."""
BINS = 8
TICKS = 6

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Levels:
    """`names` are the cells of a heat map, between `edges` (float64[cells + 1]) where they are bins. `values` are all
    that occur: names, or numbers in order. `log`: on a logarithmic scale."""

    key: str
    name: str
    names: tuple[str, ...]
    values: tuple[str, ...] | tuple[float, ...]
    log: bool = False
    edges: tuple[float, ...] | None = None

    @property
    def _numbers(self) -> bool:
        return bool(self.values) and not isinstance(self.values[0], str)

    def cells(self, column: pl.Series) -> npt.NDArray[np.int64]:
        """int64[n]: the cell of each value of an axis."""
        if self.edges is not None:
            return np.searchsorted(np.array(self.edges[1:-1]), column.to_numpy(), side="right")
        if self._numbers:
            return np.searchsorted(np.array(self.values), column.to_numpy())
        return texts(column).replace_strict(self.values, range(len(self.values)), return_dtype=pl.Int64).to_numpy()

    def places(self, column: pl.Series) -> Floats:
        """float64[n]: where each value lies on a scale in a figure, NaN where there is none: numbers as they are, names
        counted."""
        if not self._numbers:
            return self.cells(column).astype(np.float64)
        numbers = column.cast(pl.Float64).fill_null(math.nan).to_numpy()
        return np.log10(numbers) if self.log else numbers

    def shares(self, column: pl.Series) -> Floats:
        """The same, from 0 (the least) to 1 (the most)."""
        low, high = self._ends()
        at = self.places(column)
        return np.full_like(at, 0.5) if high == low else (at - low) / (high - low)

    def _ends(self) -> tuple[float, float]:
        if not self._numbers:
            return 0.0, float(max(len(self.values) - 1, 0))
        low, high = float(self.values[0]), float(self.values[-1])
        return (math.log10(low), math.log10(high)) if self.log else (low, high)

    def ticks(self, *, shares: bool = False) -> tuple[list[float], list[str]]:
        """(places, or shares, and texts) of a few ticks."""
        if not self._numbers:
            at, said = [float(i) for i in range(len(self.values))], [words.value(v) for v in self.values]
        elif len(self.values) <= TICKS:
            said = [words.value(v) for v in self.values]
            at = [math.log10(float(v)) if self.log else float(v) for v in self.values]
        else:
            low, high = self._ends()
            at = np.linspace(low, high, 5).tolist()
            said = [look.tick_text(float(f"{10**a if self.log else a:.3g}")) for a in at]
        low, high = self._ends()
        return ([0.5 if high == low else (a - low) / (high - low) for a in at] if shares else at), said


def levels(axis: Shown, points: pl.DataFrame, name: str = "") -> Levels:
    """The levels of an axis, or of a figure, among the points."""
    column = points[axis.key]
    if not column.dtype.is_numeric():
        found = dict.fromkeys(texts(column).unique(maintain_order=True))
        values = tuple(v for v in axis.values or found if v in found)
        return Levels(axis.key, name, tuple(words.value(v) for v in values), tuple(values))
    numbers = column.drop_nulls().cast(pl.Float64).unique().sort().to_list()
    log = bool(numbers) and numbers[0] > 0 and numbers[-1] / numbers[0] >= look.SPREAD
    if len(numbers) <= MANY:
        return Levels(axis.key, name, tuple(words.value(_plain(v)) for v in numbers), tuple(numbers), log)
    low, high = numbers[0], numbers[-1]
    edges = np.geomspace(low, high, BINS + 1) if log else np.linspace(low, high, BINS + 1)
    names = tuple(f"{words.value(_round(a))}–{words.value(_round(b))}" for a, b in pairwise(edges))
    return Levels(axis.key, name, names, tuple(numbers), log, tuple(edges.tolist()))


def texts(column: pl.Series) -> pl.Series:
    """Values that are no numbers as texts: `true` of a bool."""
    return column.cast(pl.String)


def _plain(number: float) -> float | int:
    return int(number) if number.is_integer() and abs(number) < 1e15 else number


def _round(number: float) -> float | int:
    return _plain(float(f"{number:.3g}"))
