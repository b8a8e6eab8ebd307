"""Seconds of a matrix multiplication y[m, n] = x[m, k] W on one GPU, by dtype of W. Knows no models, layers or engines.

A kernel takes `fixed + roofline` times a factor: a smooth table over (m, n, k), fitted to measured times. Along m it is
linear in seconds between the table's nodes, which hold both sides of tile steps (m = 256 and 257).

Held-out medians (`evaluate`) on eight GPUs' published tables (aiconfigurator-core 0.12.0, Apache-2.0; vLLM's kernels):
bf16 2.6-4.1 % of single rows, 2.7-4.6 % of unseen (n, k); fp8 1.7-3.0 and 1.8-3.3 %; nvfp4 1.9-3.3 and 2.3-3.2 %. The
same bf16 kernels measured in two campaigns differ by 1-8 %. Tried and left out: counting waves of tiles (better for
Hopper's fp8, worse for bf16, whose library chooses among tiles); fitting shares of the peak and the bandwidth first (no
better inside, worse beyond); factors of low rank (0.1-0.3 points better, but of no meaning to a reader).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from calibrate.kernels.heldout import errors, split
from calibrate.kernels.plain import field, mapping, positive, rounded
from calibrate.kernels.roofline import Roofline
from calibrate.kernels.surface import Surface, fit_surface, read_surface, thin
from servecast.errors import ServecastError, nearest, one_of

if TYPE_CHECKING:
    import polars as pl
    from numpy.typing import ArrayLike, NDArray

    Floats = NDArray[np.float64]

AXES = ("m", "n", "k")
RATES = {
    "bf16": "bf16",
    "fp8": "fp8",
    "fp8_block": "fp8",
    "nvfp4": "fp4",
    "mxfp4": "bf16",
    "int8": "int8",
    "int4": "bf16",
}
"""In which dtype the multiplication of such weights runs; bf16 on a GPU without that rate (the weights are widened)."""
WEIGHT_BYTES = {
    "bf16": 2.0,
    "fp8": 1.0,
    "fp8_block": 1.0,
    "nvfp4": 0.5625,  # one 8-bit scale a 16 weights
    "mxfp4": 0.53125,  # one 8-bit scale a 32 weights
    "int8": 1.0,
    "int4": 0.53125,  # one 16-bit scale a 128 weights, and zero points
}
ACTIVATION_BYTES = 2.0  # bf16 in (what quantises it is part of the measured kernel) and out

# Nodes are at least this factor apart. It and the stiffness (of m, n, k; see `fit_surface`) hardly matter: 1.15 or 1.4,
# and ten times more or less, move held-out medians by 0.1 to 0.4 points.
NODE_RATIO = 1.3
STIFFNESS = (0.03, 0.3, 0.3)
UNCACHED_BYTES = 128e6  # weights larger than any GPU's last cache...
UNCACHED_M = 64  # ...and so few rows that reading them is all that takes time


@dataclass(frozen=True, slots=True)
class GemmTable:
    """One dtype. `factor` is log(seconds / (fixed_s + roofline time)) over (m, n, k)."""

    fixed_s: float
    factor: Surface


@dataclass(frozen=True, slots=True)
class GemmModel:
    """All dtypes of one GPU. Weights stream from memory at `stream_share` of its bandwidth at best: a serving step
    reads every layer's weights once, while a measuring loop over few small ones may find them in the L2 cache."""

    roofline: Roofline
    stream_share: float
    tables: Mapping[str, GemmTable]

    def has(self, weights: str) -> bool:
        """Whether this dtype was measured."""
        return weights in self.tables

    def seconds(self, weights: str, m: ArrayLike, n: ArrayLike, k: ArrayLike) -> Floats:
        """Seconds of one call; m, n, k >= 1 broadcast. Fast for many m of one (n, k).

        Beyond the measured range the factor at its edge holds, so times follow the roofline. A dtype that was not
        measured has its own roofline and the factors of one that was: of the same rate, else of another quantised
        one, else of bf16 (which makes fp8 and nvfp4 a quarter to a half too fast where both were measured: their
        times hold the quantisation of the activations).
        """
        _known(weights)
        rows, columns, inner = (np.asarray(x, np.float64) for x in (m, n, k))
        if columns.size == 1 and inner.size == 1:
            shape = np.broadcast_shapes(rows.shape, columns.shape, inner.shape)
            return self._of_shape(weights, rows.ravel(), columns.item(), inner.item()).reshape(shape)
        rows, columns, inner = np.broadcast_arrays(rows, columns, inner)
        out = np.empty(rows.shape)
        shapes, which = np.unique(columns + 1j * inner, return_inverse=True)
        for i, each in enumerate(shapes):
            here = which.reshape(rows.shape) == i
            out[here] = self._of_shape(weights, rows[here], each.real, each.imag)
        return out

    def inside(self, weights: str, m: ArrayLike, n: ArrayLike, k: ArrayLike) -> NDArray[np.bool_]:
        """Whether the dtype was measured, and m, n and k each lie in the measured range."""
        _known(weights)
        points = np.broadcast_arrays(*(np.asarray(x, np.float64) for x in (m, n, k)))
        found = np.full(points[0].shape, weights in self.tables)
        if weights in self.tables:
            for axis, x in zip(self.tables[weights].factor.axes, points, strict=True):
                found &= (x >= axis[0]) & (x <= axis[-1])
        return found

    def least(self, weights: str, m: ArrayLike, n: ArrayLike, k: ArrayLike) -> Floats:
        """The seconds that no price goes below: all FLOPs at the peak, or the weights read from memory."""
        return least_seconds(self.roofline, self.stream_share, weights, m, n, k)

    def to_json(self) -> dict[str, Any]:
        """The roofline, and a table a dtype whose rows, one an (n, k), hold 100 x factor at every m."""
        return {
            "flops": dict(self.roofline.flops),
            "bandwidth_bytes_per_s": self.roofline.bandwidth_bytes_per_s,
            "stream_share": rounded(self.stream_share, 3),
            "tables": {
                weights: {"fixed_us": rounded(1e6 * table.fixed_s), **table.factor.to_json(AXES)}
                for weights, table in self.tables.items()
            },
        }

    @classmethod
    def from_json(cls, data: Any, where: str = "gemm") -> GemmModel:
        """What `to_json` gave; `ServecastError` with the key where it is something else."""
        flops = field(data, "flops", where, mapping(positive))
        if "bf16" not in flops:
            raise ServecastError(f"{where}.flops: the key 'bf16' is missing")
        roofline = Roofline(flops, field(data, "bandwidth_bytes_per_s", where, positive))
        tables = field(data, "tables", where, mapping(_read_table))
        if not tables:
            raise ServecastError(f"{where}.tables: holds no dtype; expected at least one of {one_of(RATES)}")
        for weights in tables:
            _known(weights, f"{where}.tables: ")
        return cls(roofline, min(field(data, "stream_share", where, positive), 1.0), tables)

    def _of_shape(self, weights: str, m: Floats, n: float, k: float) -> Floats:
        table = self.tables[weights if weights in self.tables else self._sibling(weights)]
        nodes = table.factor.axes[0]
        ideal = table.fixed_s + roofline_seconds(self.roofline, weights, nodes, n, k)
        line = np.maximum(ideal * np.exp(table.factor.line(n, k)), self.least(weights, nodes, n, k))
        out = np.interp(m, nodes, line)
        beyond = (m < nodes[0]) | (m > nodes[-1])
        if beyond.any():
            edge = np.where(m[beyond] < nodes[0], 0, -1)
            there = table.fixed_s + roofline_seconds(self.roofline, weights, m[beyond], n, k)
            out[beyond] = np.maximum(there * (line / ideal)[edge], self.least(weights, m[beyond], n, k))
        return out

    def _sibling(self, weights: str) -> str:
        """The measured dtype whose factors stand for one that was not."""
        return min(self.tables, key=lambda other: (RATES[other] != RATES[weights], other == "bf16"))


def roofline_seconds(roofline: Roofline, weights: str, m: ArrayLike, n: ArrayLike, k: ArrayLike) -> Floats:
    """The larger of all FLOPs at the peak and all bytes (weights, activations in and out) at the bandwidth."""
    rows, columns, inner = (np.asarray(x, np.float64) for x in (m, n, k))
    moved = WEIGHT_BYTES[weights] * columns * inner + ACTIVATION_BYTES * rows * (columns + inner)
    return np.maximum(2.0 * rows * columns * inner / _rate(roofline, weights), moved / roofline.bandwidth_bytes_per_s)


def least_seconds(
    roofline: Roofline, stream_share: float, weights: str, m: ArrayLike, n: ArrayLike, k: ArrayLike
) -> Floats:
    """See `GemmModel.least`. Activations may come out of a cache, where the kernel before left them."""
    rows, columns, inner = (np.asarray(x, np.float64) for x in (m, n, k))
    stream = WEIGHT_BYTES[weights] * columns * inner / (stream_share * roofline.bandwidth_bytes_per_s)
    return np.maximum(2.0 * rows * columns * inner / _rate(roofline, weights), stream)


def fit_gemm(table: pl.DataFrame, roofline: Roofline) -> GemmModel:
    """The model of a table of measurements (columns as in FAMILIES["gemm"]). Times that beat `least_seconds` are
    raised to it."""
    if not len(table):
        raise ServecastError("gemm: the table holds no rows to fit")
    share = _stream_share(table, roofline)
    tables = {}
    for (weights,), rows in table.sort("weights", *AXES).group_by("weights", maintain_order=True):
        tables[str(weights)] = _fit_table(str(weights), rows, roofline, share)
    return GemmModel(roofline, share, tables)


def evaluate(table: pl.DataFrame, roofline: Roofline, seed: int = 0) -> list[tuple[str, str, float, float, int]]:
    """(what, weights, median, p90, points): |relative error| of prices of points that were held out of the fit.

    "rows": a tenth of the points, at random; "shapes": all points of a tenth of the (n, k); "largest m": beyond a
    quarter of the largest; "largest n or k": beyond half of it. Points that beat `least_seconds` are not counted.
    """
    import polars as pl

    found = []
    for weights in table["weights"].unique().sort():
        rows = table.filter(table["weights"] == weights)
        priced: dict[str, list[tuple[Floats, Floats]]] = {}
        for what, kept, held in _held_out(rows, seed):
            share = _stream_share(pl.concat([table.filter(table["weights"] != weights), kept]), roofline)
            model = GemmModel(roofline, share, {weights: _fit_table(weights, kept, roofline, share)})
            points = [held[axis].to_numpy() for axis in AXES]
            seconds = held["seconds"].to_numpy()
            real = seconds >= model.least(weights, *points)
            priced.setdefault(what, []).append((model.seconds(weights, *points)[real], seconds[real]))
        for what, pairs in priced.items():
            predicted, measured = (np.concatenate(side) for side in zip(*pairs, strict=True))
            found.append((what, weights, *errors(predicted, measured), len(measured)))
    return found


def _held_out(rows: pl.DataFrame, seed: int) -> Iterator[tuple[str, pl.DataFrame, pl.DataFrame]]:
    import polars as pl

    repeats = min(10, -(-2000 // len(rows)))  # a small table is split several times
    for what, by in (("rows", None), ("shapes", ("n", "k"))):
        for again in range(repeats):
            kept, held = split(rows, by, 0.1, seed + again)
            if len(kept) and len(held):
                yield what, kept, held
    m, n, k = (pl.col(axis) for axis in AXES)
    for what, edge in (
        ("largest m", m > m.max() / 4),
        ("largest n or k", (n > n.max() / 2) | (k > k.max() / 2)),
    ):
        kept, held = rows.filter(~edge), rows.filter(edge)
        if len(kept) and len(held):
            yield what, kept, held


def _fit_table(weights: str, rows: pl.DataFrame, roofline: Roofline, share: float) -> GemmTable:
    m, n, k = (rows[axis].to_numpy().astype(np.float64) for axis in AXES)
    least = least_seconds(roofline, share, weights, m, n, k)
    seconds = np.maximum(rows["seconds"].to_numpy(), least)
    ideal = roofline_seconds(roofline, weights, m, n, k)
    # What a kernel takes beside its work, from those that mostly wait; not the least, which is one lucky time.
    idle = seconds > 2 * ideal
    fixed = float(np.quantile((seconds - ideal)[idle], 0.01)) if idle.any() else 0.05 * float(seconds.min())
    factor = np.log(seconds / (fixed + ideal))
    axes = [thin(rows[axis], NODE_RATIO) for axis in AXES]
    return GemmTable(fixed, fit_surface(axes, (m, n, k), factor, STIFFNESS))


def _stream_share(table: pl.DataFrame, roofline: Roofline) -> float:
    """The best share of the bandwidth at which weights larger than any cache were read; 1 where none were."""
    best = 0.0
    for (weights,), rows in table.filter(table["m"] <= UNCACHED_M).group_by("weights"):
        _known(str(weights), "gemm: ")
        size = WEIGHT_BYTES[str(weights)] * (rows["n"] * rows["k"]).to_numpy()
        rates = (size / rows["seconds"].to_numpy())[size >= UNCACHED_BYTES]
        best = max(best, float(np.quantile(rates, 0.99))) if len(rates) else best
    return min(best / roofline.bandwidth_bytes_per_s, 1.0) if best else 1.0


def _rate(roofline: Roofline, weights: str) -> float:
    return roofline.flops.get(RATES[weights], roofline.flops["bf16"])


def _read_table(data: Any, where: str) -> GemmTable:
    return GemmTable(1e-6 * field(data, "fixed_us", where, positive), read_surface(data, AXES, where))


def _known(weights: str, where: str = "") -> None:
    if weights not in RATES:
        raise ServecastError(
            f"{where}weights {weights!r} are not known{nearest(weights, RATES)}; known: {one_of(RATES)}"
        )
