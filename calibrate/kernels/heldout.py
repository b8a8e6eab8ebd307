"""Honest errors: what of a table is held out of a fit, and how far a prediction is off on it. Knows no family."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import polars as pl
    from numpy.typing import ArrayLike


def errors(predicted: ArrayLike, measured: ArrayLike) -> tuple[float, float]:
    """Median and p90 of |predicted / measured - 1| over the points; (nan, nan) where there are none."""
    off = np.abs(np.asarray(predicted, np.float64) / np.asarray(measured, np.float64) - 1)
    return (float(np.median(off)), float(np.quantile(off, 0.9))) if off.size else (np.nan, np.nan)


def split(table: pl.DataFrame, by: Sequence[str] | None, share: float, seed: int) -> tuple[pl.DataFrame, pl.DataFrame]:
    """(kept, held out): about `share` of the rows (`by` None), or of the distinct values of the columns `by` with all
    their rows, drawn with `seed`. Both keep the table's order of rows."""
    import polars as pl

    draw = np.random.default_rng(seed)
    if by is None:
        held = pl.Series(draw.random(len(table)) < share)
    else:
        units = table.select(by).unique().sort(by)
        chosen = units.filter(pl.Series(draw.random(len(units)) < share))
        held = table.select(by).join(chosen.with_columns(held=True), on=by, how="left", maintain_order="left")["held"]
        held = held.fill_null(False)
    return table.filter(~held), table.filter(held)
