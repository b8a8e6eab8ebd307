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

    def cells(self, column: pl.Series) -> list[int | None]:
        """The cell of each value."""
        if self.edges is not None:
            inner = np.array(self.edges[1:-1])
            return [None if v is None else int(np.searchsorted(inner, v, side="right")) for v in column]
        index = {value: i for i, value in enumerate(self.values)}
        return [index.get(value if self._numbers else words_of(value)) for value in column.to_list()]

    def places(self, column: pl.Series) -> list[float | None]:
        """Where each value lies on a scale in a figure: numbers as they are, names counted."""
        if self._numbers and not self.log:
            return [None if v is None else float(v) for v in column]
        if self._numbers:
            return [None if v is None else math.log10(v) for v in column]
        return [None if i is None else float(i) for i in self.cells(column)]

    def shares(self, column: pl.Series) -> Floats:
        """The same, from 0 (the least) to 1 (the most); NaN where there is no value."""
        at = np.array([np.nan if p is None else p for p in self.places(column)], dtype=np.float64)
        low, high = self._ends()
        return np.full_like(at, 0.5) if high == low else (at - low) / (high - low)

    def _ends(self) -> tuple[float, float]:
        if not self._numbers:
            return 0.0, float(max(len(self.values) - 1, 0))
        low, high = float(self.values[0]), float(self.values[-1])
        return (math.log10(low), math.log10(high)) if self.log else (low, high)

    def ticks(self, *, shares: bool = False) -> tuple[list[float], list[str]]:
        """(places, or shares, and texts) of a few ticks."""
        if not self._numbers:
            at, texts = [float(i) for i in range(len(self.values))], [words.value(v) for v in self.values]
        elif len(self.values) <= TICKS:
            texts = [words.value(v) for v in self.values]
            at = [math.log10(float(v)) if self.log else float(v) for v in self.values]
        else:
            low, high = self._ends()
            at = np.linspace(low, high, 5).tolist()
            texts = [look.tick_text(float(f"{10**a if self.log else a:.3g}")) for a in at]
        low, high = self._ends()
        return ([0.5 if high == low else (a - low) / (high - low) for a in at] if shares else at), texts


def levels(axis: Shown, points: pl.DataFrame, name: str = "") -> Levels:
    """The levels of an axis, or of a figure, among the points."""
    column = points[axis.key]
    if not column.dtype.is_numeric():
        found = {words_of(value): None for value in column.to_list()}
        values = tuple(v for v in axis.values or found if v in found)
        return Levels(axis.key, name, tuple(words.value(v) for v in values), tuple(values))
    numbers = sorted(float(v) for v in column.drop_nulls().unique())
    log = bool(numbers) and numbers[0] > 0 and numbers[-1] / numbers[0] >= look.SPREAD
    if len(numbers) <= MANY:
        return Levels(axis.key, name, tuple(words.value(_plain(v)) for v in numbers), tuple(numbers), log)
    low, high = numbers[0], numbers[-1]
    edges = np.geomspace(low, high, BINS + 1) if log else np.linspace(low, high, BINS + 1)
    names = tuple(f"{words.value(_round(a))}–{words.value(_round(b))}" for a, b in pairwise(edges))
    return Levels(axis.key, name, names, tuple(numbers), log, tuple(edges.tolist()))


def words_of(value: object) -> str:
    """A value that is no number as its column of texts would have it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _plain(number: float) -> float | int:
    return int(number) if number.is_integer() and abs(number) < 1e15 else number


def _round(number: float) -> float | int:
    return _plain(float(f"{number:.3g}"))
