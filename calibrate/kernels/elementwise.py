"""Seconds of kernels bound by memory: norms, rope, activation, embedding, sampling. Knows no models.

An op that was not measured on a GPU has a default: a launch and a share of the memory's bandwidth, as GPUs that were
measured reach them. What an op reads and writes is counted by `calibrate/operators.py`, at 2 bytes an element here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from calibrate.kernels.heldout import split
from calibrate.kernels.plain import field, many, positive, rounded, text, whole
from calibrate.kernels.ramp import Ramp, fit_ramp, octaves, read_ramp
from calibrate.kernels.roofline import Roofline
from calibrate.kernels.tally import Tally

if TYPE_CHECKING:
    import polars as pl
    from numpy.typing import ArrayLike, NDArray

    Floats = NDArray[np.float64]

ELEMENT_BYTES = 2.0
KEY = ("op", "elements")
DEFAULTS = {
    "embedding": (2.9e-6, 0.41),
    "norms": (2.0e-6, 0.64),
    "final_norm": (2.3e-6, 0.64),
    "qk_norm": (2.0e-6, 0.70),
    "rope": (2.1e-6, 0.69),
    "activation": (2.0e-6, 0.73),
    "sampling": (17e-6, 0.70),
}
"""Op -> (seconds of an empty call, share of the bandwidth).

Geometric means over `seconds = fixed + bytes / (share x bandwidth)` fitted to RTX 4090 and RTX PRO 6000
(LLMServingSim's profiles of vLLM 0.19, MIT; shares above 1, hits of the L2 cache, taken as 1) and A100 and H100
(vidur's of 2024's torch kernels, MIT; their norm stands for norms). They spread from 1.5 to 3.5 us (sampling, on the
RTX two: 12 to 23), and in share from 0.37 to 1 for norms, 0.44 to 1 for rope, 0.49 to 1 for activation, 0.15 to 1 for
the embedding. Against their own tables the defaults are off by a median of 20 to 33 % on A100 and H100, and 100 to
200 % too slow on the RTX two, whose caches hold what was measured.
"""
OTHER = (2.0e-6, 0.65)  # for an op that none of the four tables holds


@dataclass(frozen=True, slots=True)
class ElementwiseModel:
    """`curves[op, elements]`: seconds over the bytes that all rows of so many elements move."""

    bandwidth_bytes_per_s: float
    curves: Mapping[tuple[str, int], Ramp]

    def seconds(self, op: str, rows: ArrayLike, elements: ArrayLike) -> Floats:
        """Seconds of one call on `rows` (an array) of `elements` each; the two broadcast.

        Rows of a width that was not measured: at the same bytes, on the straight line in log(width), log(seconds)
        between the neighbouring widths; beyond them as the nearest one.
        """
        r, e = np.broadcast_arrays(np.asarray(rows, np.float64), np.asarray(elements, np.float64))
        moved = ELEMENT_BYTES * r * e
        widths = self._widths(op)
        if not widths:
            fixed, share = DEFAULTS.get(op, OTHER)
            return np.asarray(fixed + moved / (share * self.bandwidth_bytes_per_s))
        out = np.empty(r.shape)
        for width in np.unique(e):
            here = e == width
            out[here] = self._of_width(op, widths, float(width), moved[here])
        return out

    def inside(self, op: str, rows: ArrayLike, elements: ArrayLike) -> NDArray[np.bool_]:
        """Whether the op was measured with rows at least as wide and as narrow, and the bytes lie in its range."""
        r, e = np.broadcast_arrays(np.asarray(rows, np.float64), np.asarray(elements, np.float64))
        widths = self._widths(op)
        if not widths:
            return np.zeros(r.shape, np.bool_)
        moved = ELEMENT_BYTES * r * e
        low = np.interp(e, widths, [self.curves[op, w].at[0] for w in widths])
        high = np.interp(e, widths, [self.curves[op, w].at[-1] for w in widths])
        return np.asarray((e >= widths[0]) & (e <= widths[-1]) & (moved >= low) & (moved <= high))

    def to_json(self) -> dict[str, Any]:
        """The bandwidth and one row a curve."""
        rows = [{"op": op, "elements": width} | curve.to_json() for (op, width), curve in self.curves.items()]
        return {"bandwidth": rounded(self.bandwidth_bytes_per_s), "curves": rows}

    @classmethod
    def from_json(cls, data: Any, where: str = "elementwise") -> ElementwiseModel:
        """What `to_json` gave; `ServecastError` with the key where it is something else."""
        return cls(field(data, "bandwidth", where, positive), dict(field(data, "curves", where, many(_curve))))

    def _widths(self, op: str) -> list[int]:
        return sorted(width for name, width in self.curves if name == op)

    def _of_width(self, op: str, widths: list[int], width: float, moved: Floats) -> Floats:
        i = int(np.searchsorted(widths, width))
        low, high = widths[max(i - 1, 0)], widths[min(i, len(widths) - 1)]
        if width == high or low == high or i in (0, len(widths)):
            return self.curves[op, low if i == len(widths) else high](moved)
        share = np.log(width / low) / np.log(high / low)
        logs = [np.log(self.curves[op, w](moved)) for w in (low, high)]
        return np.asarray(np.exp((1 - share) * logs[0] + share * logs[1]))


def fit_elementwise(table: pl.DataFrame, roofline: Roofline) -> ElementwiseModel:
    """A curve for every op and width; beyond the largest, bytes cost at least what the memory's bandwidth allows,
    for what fits the cache at the sizes that were measured need not fit it there."""
    curves = {}
    for key, rows in table.sort(*KEY, "rows").group_by(KEY, maintain_order=True):
        op, width = str(key[0]), int(key[1])
        moved = ELEMENT_BYTES * width * rows["rows"].to_numpy().astype(np.float64)
        seconds = rows["seconds"].to_numpy()
        curves[op, width] = fit_ramp(moved, seconds, octaves(moved), least_tail=1 / roofline.bandwidth_bytes_per_s)
    return ElementwiseModel(roofline.bandwidth_bytes_per_s, curves)


def default_elementwise(roofline: Roofline) -> ElementwiseModel:
    """For a GPU that no table covers: nothing is `inside` it."""
    return ElementwiseModel(roofline.bandwidth_bytes_per_s, {})


def evaluate(table: pl.DataFrame, roofline: Roofline, seed: int = 0) -> list[tuple[str, str, float, float, int]]:
    """(what, op, median, p90, points): |relative error| on what was held out of the fit.

    "rows": a fifth of the points, at random; "widths": each width of an op that has several, in turn; "most rows":
    more than a quarter of the most; "default": all of them, priced as on a GPU that no table covers.
    """
    import polars as pl

    tally = Tally()

    def ask(what: str, model: ElementwiseModel, held: pl.DataFrame) -> None:
        for (op,), rows in held.group_by("op", maintain_order=True):
            priced = model.seconds(str(op), rows["rows"].to_numpy(), rows["elements"].to_numpy())
            tally.add(what, str(op), priced, rows["seconds"].to_numpy())

    kept, held = split(table, None, 0.2, seed)
    ask("rows", fit_elementwise(kept, roofline), held)
    several = table.filter(pl.col("elements").n_unique().over("op") > 1)
    place = pl.col("elements").rank("dense").over("op")
    for i in range(1, several["elements"].n_unique() + 1):
        if len(held := several.filter(place == i)):
            ask("widths", fit_elementwise(several.filter(place != i), roofline), held)
    most = pl.col("rows") * 4 > pl.col("rows").max().over(KEY)
    ask("most rows", fit_elementwise(table.filter(~most), roofline), table.filter(most))
    ask("default", default_elementwise(roofline), table)
    return tally.found()


def _curve(data: Any, where: str) -> tuple[tuple[str, int], Ramp]:
    key = field(data, "op", where, text), field(data, "elements", where, whole)
    return key, read_ramp(data, where)
