"""Prices of held-out points, collected by what was held out and by kind of point, and how far they are off."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from calibrate.kernels.heldout import errors

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    Floats = NDArray[np.float64]

ALL = "all"  # the kind that every point is of


@dataclass(slots=True)
class Tally:
    """`pairs[what, kind]`: (predicted, measured) seconds."""

    pairs: dict[tuple[str, str], list[tuple[Floats, Floats]]] = field(default_factory=dict)

    def add(self, what: str, kind: str, predicted: ArrayLike, measured: ArrayLike) -> None:
        """Points of one kind."""
        pair = np.asarray(predicted, np.float64), np.asarray(measured, np.float64)
        if pair[0].size:
            for each in (ALL, kind):
                self.pairs.setdefault((what, each), []).append(pair)

    def found(self) -> list[tuple[str, str, float, float, int]]:
        """(what, kind, median, p90, points), of |relative error|."""
        rows = []
        for (what, kind), pairs in self.pairs.items():
            predicted, measured = (np.concatenate(side) for side in zip(*pairs, strict=True))
            rows.append((what, kind, *errors(predicted, measured), len(measured)))
        return sorted(rows, key=lambda row: (row[0], row[1] != ALL, row[1]))
