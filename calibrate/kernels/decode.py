"""Seconds of decode attention (one new token a sequence) on one GPU, by head shape. It knows no models or steps.

Decode attention is affine in its cached tokens but for caches and split kernels, so it is linear in them between few
knots; at a knot it is `fixed + roofline` times a factor: a sum of small tables fitted to measured times.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from calibrate.kernels.additive import Axes, Problem, Tables, read_axes, robust, within, write_axes
from calibrate.kernels.heads import (
    COLUMNS,
    HeadShape,
    Kind,
    base_of,
    by_kind,
    by_shape,
    checked_kinds,
    closest_kind,
    extended,
    kernel_of,
    owners_of,
    read_kind,
    read_roofline,
    write_roofline,
)
from calibrate.kernels.heldout import errors, split
from calibrate.kernels.lines import KvLines, compile_lines, few_knots
from calibrate.kernels.plain import field, mapping, positive, rounded
from calibrate.kernels.roofline import Roofline
from servecast.errors import ServecastError

if TYPE_CHECKING:
    import polars as pl
    from numpy.typing import ArrayLike, NDArray

    Floats = NDArray[np.float64]

CONTEXTS = np.array([0, *(2.0 ** np.arange(6, 18) - 1), 2.0**20 - 1])
SEQUENCES = np.array([2.0**i for i in range(12)], np.float64)
"""The knots: with its own token each sequence sees 1, 64, 128, ... 131072 and, for what comes after, 2^20."""

UNITS = np.array([0, 2, 4, 6, 7, 8, 9, 10, 11, 12, 14, 17.0])
SEEN = np.log2([1, 64, 256, 1024, 8192, 131072])
AXES = (
    Axes({"kv_bytes": np.arange(14, 37.0), "ratio": np.array([0, 1, 6, 7.0])}),  # caches end at some size
    Axes({"seen": np.log2([1, 64, 128, 256, 512, 1024, 2048, 8192, 131072]), "kv_units": np.arange(0, 15.0)}),
    Axes({"ratio": np.array([0, 1.0]), "seen": SEEN, "units": UNITS}),  # without grouped queries some do not split KV
    Axes({"seen": SEEN, "sequences": np.arange(0, 12.0)}),
    Axes(
        {
            "kv_heads": np.array([0, 2, 3.0]),
            "ratio": np.array([0, 1, 2, 3, 4, 6, 7.0]),
            "seen": np.log2([1, 128, 1024, 8192, 131072]),
        }
    ),
    Axes(
        {
            "kv_heads": np.array([0, 1, 2, 3.0]),
            "ratio": np.array([0, 1, 3, 6, 7.0]),
            "sequences": np.array([0, 4, 7, 9, 10, 11.0]),
        }
    ),
    Axes({"seen": np.log2([1, 128, 1024, 8192, 131072])}, own=True, ridge=0.02),
)
"""What a factor depends on, in powers of two: seen tokens a sequence, kv_bytes of all that is read, kv_units =
sequences x KV heads, units = sequences x heads, ratio = heads / KV heads; the last is the measured head shapes' own."""
NAMES = ("seen", "sequences", "kv_bytes", "units", "kv_units", "kv_heads", "ratio")

UNCACHED_BYTES = 256e6  # more KV than any GPU's last cache holds
ROUNDS = 6  # of linearising and reweighting


@dataclass(frozen=True, slots=True)
class DecodeKind:
    """One kind: its factors, and the rate at which KV that lies in no cache is read at best."""

    fit: Kind
    stream_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """Prices of one head shape: `seconds_at[i, j]` of SEQUENCES[i] with `contexts[j]` cached tokens each."""

    shape: HeadShape
    contexts: Floats
    seconds_at: Floats

    def seconds(self, sequences: ArrayLike, context: ArrayLike) -> Floats:
        """Seconds at 1-D arrays of the same length; linear between the knots and beyond the last ones."""
        number, cached = np.asarray(sequences, np.float64), np.asarray(context, np.float64)
        seen: Floats = np.minimum(cached, self.contexts[-1]) if self.shape.window else cached
        (i, u), (j, v) = _cell(SEQUENCES, number), _cell(self.contexts, seen)
        at, k = self.seconds_at, np.minimum(j + 1, len(self.contexts) - 1)
        fewer, more = (at[row, j] * (1 - v) + at[row, k] * v for row in (i, i + 1))
        out: Floats = fewer * (1 - u) + more * u
        return out


@dataclass(frozen=True, slots=True)
class DecodeModel:
    """All kinds of one GPU, by name."""

    roofline: Roofline
    kinds: Mapping[str, DecodeKind]

    def seconds(
        self,
        kv_dtype: str,
        sequences: ArrayLike,
        context: ArrayLike,
        heads: ArrayLike,
        kv_heads: ArrayLike,
        head_dim: ArrayLike,
        value_dim: ArrayLike,
        window: ArrayLike = 0,
        *,
        resident: bool = False,
    ) -> Floats:
        """Seconds of one kernel: `sequences` add one token each to `context` cached ones. Sizes broadcast.

        `resident`: as a loop over this one kernel measures it, which finds the KV that fits the L2 cache there. In a
        serving step it does not: all other layers' weights and KV were read since. So by default what is cheaper than
        reading the KV from memory is raised to that.
        """
        points = [np.asarray(x, np.float64) for x in (sequences, context, heads, kv_heads, head_dim, value_dim, window)]
        size = np.broadcast_shapes(*(x.shape for x in points))
        number, cached, *shape = (np.broadcast_to(x, size).ravel() for x in points)
        out = np.empty(number.shape)
        for each, here in by_shape(kv_dtype, *shape):
            out[here] = self.of_shape(each, resident).seconds(number[here], cached[here])
        return out.reshape(size)

    def inside(
        self,
        kv_dtype: str,
        sequences: ArrayLike,
        context: ArrayLike,
        heads: ArrayLike,
        kv_heads: ArrayLike,
        head_dim: ArrayLike,
        value_dim: ArrayLike,
        window: ArrayLike = 0,
    ) -> NDArray[np.bool_]:
        """Whether the kind was measured, and tokens seen, KV bytes, sequences and heads lie in the measured range."""
        points = [np.asarray(x, np.float64) for x in (sequences, context, heads, kv_heads, head_dim, value_dim, window)]
        size = np.broadcast_shapes(*(x.shape for x in points))
        number, cached, *shape = (np.broadcast_to(x, size).ravel() for x in points)
        out = np.zeros(number.shape, bool)
        for each, here in by_shape(kv_dtype, *shape):
            if each.kind in self.kinds:
                found = _points(each, number[here], cached[here])
                extent = self.kinds[each.kind].fit.extent
                ok = [(x >= extent[n][0] - 1e-9) & (x <= extent[n][1] + 1e-9) for n, x in found.items()]
                out[here] = np.logical_and.reduce(ok)
        return out.reshape(size)

    def compile(self, shape: HeadShape, max_sequences: int) -> KvLines:
        """For 0..`max_sequences` sequences of one head shape, seconds as few straight lines in all their KV tokens."""
        prices = self.of_shape(shape)
        number = np.arange(1, max_sequences + 1, dtype=np.float64)
        at = np.stack([prices.seconds(number, np.full(max_sequences, c)) for c in prices.contexts], axis=1)
        return compile_lines(prices.contexts, at, level=bool(shape.window))

    def of_shape(self, shape: HeadShape, resident: bool = False) -> DecodeShape:
        """The prices of one head shape; see `seconds`. They never fall with KV tokens or sequences, nor below the
        roofline: `resident` ones below what the fastest measured kernel made of it."""
        kind = self.kinds[closest_kind(list(self.kinds), shape)]
        contexts = _contexts(shape.window)
        number, cached = (x.ravel() for x in np.meshgrid(SEQUENCES, contexts, indexing="ij"))
        work = work_seconds(shape, self.roofline, number, cached)
        factor = kind.fit.tables.at(_points(shape, number, cached), shape.owner)
        seconds = (kind.fit.fixed_s + work / kind.fit.share) * np.exp(factor)
        seconds = np.maximum(seconds, work / kind.fit.floor).reshape(len(SEQUENCES), len(contexts))
        seconds = extended(seconds, SEQUENCES, 2.0 ** kind.fit.extent["sequences"][1])
        if not resident:
            read = (number * cached * shape.kv_token_bytes / kind.stream_bytes_per_s).reshape(seconds.shape)
            seconds = np.maximum(seconds, seconds[:, :1] + read)
        seconds = np.maximum.accumulate(np.maximum.accumulate(seconds, axis=0), axis=1)
        if resident:
            return DecodeShape(shape, contexts, seconds)
        kept = few_knots(contexts, seconds)
        return DecodeShape(shape, contexts[kept], seconds[:, kept])

    def to_json(self) -> dict[str, Any]:
        """The roofline and every kind."""
        kinds = {
            name: {"stream_bytes_per_s": rounded(kind.stream_bytes_per_s), **kind.fit.to_json(AXES)}
            for name, kind in self.kinds.items()
        }
        return write_roofline(self.roofline) | {"axes": write_axes(AXES), "kinds": kinds}

    @classmethod
    def from_json(cls, data: Any, where: str = "decode_attention") -> DecodeModel:
        """What `to_json` gave; `ServecastError` with the key where it is something else."""
        axes = field(data, "axes", where, lambda value, at: read_axes(value, NAMES, at))
        kinds = field(data, "kinds", where, mapping(lambda value, at: _read_kind(value, axes, at)))
        checked_kinds(list(kinds), f"{where}.kinds")
        return cls(read_roofline(data, where), kinds)


def work_seconds(shape: HeadShape, roofline: Roofline, sequences: Floats, context: Floats) -> Floats:
    """The larger of all FLOPs at the peak, and keys, values, queries and outputs at the memory's bandwidth."""
    seen = np.minimum(context + 1, shape.window or np.inf)
    moved = sequences * (seen * shape.kv_token_bytes + shape.query_token_bytes)
    flops = sequences * seen * shape.pair_flops
    return np.maximum(flops / shape.peak(roofline), moved / roofline.bandwidth_bytes_per_s)


def fit_decode(table: pl.DataFrame, roofline: Roofline) -> DecodeModel:
    """The model of a table of measurements (columns as in FAMILIES["decode_attention"])."""
    if not len(table):
        raise ServecastError("decode_attention: the table holds no rows to fit")
    rates = {name: _stream_rate(rows, roofline) for name, rows in by_kind(table)}
    best = max((rate for rate in rates.values() if rate), default=roofline.bandwidth_bytes_per_s)
    kinds = {}
    for name, rows in by_kind(table.sort("heads", "kv_heads", "sequences", "context")):
        kinds[name] = DecodeKind(_fit_kind(_steady(rows), roofline), rates[name] or best)
    return DecodeModel(roofline, kinds)


def evaluate(table: pl.DataFrame, roofline: Roofline, seed: int = 0) -> list[tuple[str, str, float, float, int]]:
    """(what, which, median, p90, points): |relative error| of `resident` prices of points held out of the fit.

    "rows": a fifth of the points, at random; "shapes": all of a fifth of the head shapes, each once; "batches": all
    of 4, 64 and 512 sequences; "longest": contexts beyond a quarter of the longest; "most": more than a quarter of the
    most sequences. `which` says whether all points are counted or those with more KV than a cache holds ("uncached").
    """
    found = []
    for what, folds in _held_out(table, seed):
        predicted, measured, moved = [], [], []
        for kept, held in folds:
            if not len(kept) or not len(held):
                continue
            model = fit_decode(kept, roofline)
            for dtype in held["kv_dtype"].unique().sort():
                rows = held.filter(held["kv_dtype"] == dtype)
                sizes = [rows[name].to_numpy() for name in ("sequences", "context", *COLUMNS)]
                predicted.append(model.seconds(dtype, *sizes, resident=True))
                measured.append(rows["seconds"].to_numpy())
                moved.append(_kv_bytes(rows))
        if not measured:
            continue
        ours, theirs, size = np.concatenate(predicted), np.concatenate(measured), np.concatenate(moved)
        for which, here in (("all", size >= 0), ("uncached", size >= UNCACHED_BYTES)):
            if not here.any():
                continue
            found.append((what, which, *errors(ours[here], theirs[here]), int(here.sum())))
    return found


def _held_out(table: pl.DataFrame, seed: int) -> Iterator[tuple[str, list[tuple[pl.DataFrame, pl.DataFrame]]]]:
    import polars as pl

    yield "rows", [split(table, None, 0.2, seed)]
    shapes = table.select("heads", "kv_heads", "head_dim").unique().sort("heads", "kv_heads", "head_dim")
    fold = pl.Series("fold", np.random.default_rng(seed).permutation(len(shapes)) % 5)
    dealt = table.join(shapes.with_columns(fold), on=shapes.columns, how="left", maintain_order="left")
    yield "shapes", [(dealt.filter(pl.col("fold") != i), dealt.filter(pl.col("fold") == i)) for i in range(5)]
    edges = {
        "batches": pl.col("sequences").is_in([4, 64, 512]),
        "longest": pl.col("context") > pl.col("context").max() / 4,
        "most": pl.col("sequences") > pl.col("sequences").max() / 4,
    }
    for what, edge in edges.items():
        yield what, [(table.filter(~edge), table.filter(edge))]


def _steady(rows: pl.DataFrame) -> pl.DataFrame:
    """Without a window's first fill: a kernel that sees exactly `window` tokens and skips none is faster than any
    later step, and only one step of a sequence is like it."""
    import polars as pl

    steady = rows.filter((pl.col("window") == 0) | (pl.col("context") + 1 != pl.col("window")))
    return steady if len(steady) else rows


def _fit_kind(rows: pl.DataFrame, roofline: Roofline) -> Kind:
    """Least squares of log seconds over tables that are given at the knots: linearised, a few rounds."""
    number, cached = (rows[name].to_numpy().astype(np.float64) for name in ("sequences", "context"))
    seconds = rows["seconds"].to_numpy()
    contexts = _contexts(rows["window"][0])
    cached = np.minimum(cached, contexts[-1]) if rows["window"][0] else cached
    j, v = _cell(contexts, cached)
    ends = contexts[j], contexts[np.minimum(j + 1, len(contexts) - 1)]
    work, low, high = (np.empty(len(rows)) for _ in range(3))
    points: dict[str, Floats] = {name: np.empty(len(rows)) for name in NAMES}
    sides: list[dict[str, Floats]] = [{name: np.empty(len(rows)) for name in NAMES} for _ in ends]
    for shape, here in by_shape(rows["kv_dtype"][0], *(rows[name].to_numpy().astype(np.float64) for name in COLUMNS)):
        work[here] = work_seconds(shape, roofline, number[here], cached[here])
        for into, c in zip((points, *sides), (cached, *ends), strict=True):
            for name, x in _points(shape, number[here], c[here]).items():
                into[name][here] = x
        for into_work, c in zip((low, high), ends, strict=True):
            into_work[here] = work_seconds(shape, roofline, number[here], c[here])
    fixed, share, floor = base_of(work, seconds)
    extent = {name: (float(x.min()), float(x.max())) for name, x in points.items()}
    tables = _fit_tables(sides, fixed + low / share, fixed + high / share, v, owners_of(rows), np.log(seconds))
    return Kind(kernel_of(rows), fixed, share, floor, tables, extent)


def _fit_tables(
    sides: list[dict[str, Floats]], low: Floats, high: Floats, share: Floats, owners: list[str], y: Floats
) -> Tables:
    both = {name: np.concatenate([side[name] for side in sides]) for name in NAMES}
    problem = Problem(within(AXES, both), owners)
    first, second = (problem.design(side) for side in sides)
    flat, counts = np.zeros(first.shape[1]), np.ones(len(y))
    for _ in range(ROUNDS):
        below, above = low * np.exp(first @ flat) * (1 - share), high * np.exp(second @ flat) * share
        total = np.maximum(below + above, 0.1 * np.abs(below))  # beyond the last knot a term may be negative
        weight = below / total
        design = (first.multiply(weight[:, None]) + second.multiply((1 - weight)[:, None])).tocsr()
        residual = y - np.log(total)
        counts = robust(residual)
        flat = problem.solve(design, residual + design @ flat, counts)
    return problem.tables(flat)


def _stream_rate(rows: pl.DataFrame, roofline: Roofline) -> float | None:
    """The best rate at which more KV than a cache holds was read; None where none was."""
    moved = _kv_bytes(rows)
    large = moved >= UNCACHED_BYTES
    if not large.any():
        return None
    return float(np.quantile(moved[large] / rows["seconds"].to_numpy()[large], 0.99))


def _kv_bytes(rows: pl.DataFrame) -> Floats:
    """Bytes of keys and values that every row reads."""
    out = np.empty(len(rows))
    for shape, here in by_shape(rows["kv_dtype"][0], *(rows[name].to_numpy().astype(np.float64) for name in COLUMNS)):
        seen = np.minimum(rows["context"].to_numpy()[here] + 1.0, shape.window or np.inf)
        out[here] = rows["sequences"].to_numpy()[here] * seen * shape.kv_token_bytes
    return out


def _contexts(window: int) -> Floats:
    """The knots of a kind: up to where its window is full."""
    if not window:
        return CONTEXTS
    shorter = CONTEXTS[: np.searchsorted(CONTEXTS, window - 1)]
    return np.array([*shorter, window - 1.0])


def _cell(knots: Floats, x: Floats) -> tuple[NDArray[np.int64], Floats]:
    """The interval of every x and its place in it: above 1 (below 0) beyond the last (first) knot."""
    low = np.clip(np.searchsorted(knots, x, side="right") - 1, 0, max(len(knots) - 2, 0))
    if len(knots) == 1:
        return low, np.zeros(len(x))
    return low, (x - knots[low]) / (knots[low + 1] - knots[low])


def _points(shape: HeadShape, sequences: Floats, context: Floats) -> dict[str, Floats]:
    """The coordinates of AXES."""
    h, k = float(np.log2(shape.heads)), float(np.log2(shape.kv_heads))
    number, seen = np.log2(sequences), np.log2(np.minimum(context + 1, shape.window or np.inf))
    moved = seen + number + float(np.log2(shape.kv_token_bytes))
    same = np.ones_like(number)
    found = (seen, number, moved, number + h, number + k, k * same, (h - k) * same)
    return dict(zip(NAMES, found, strict=True))


def _read_kind(data: Any, axes: tuple[Axes, ...], where: str) -> DecodeKind:
    return DecodeKind(read_kind(data, axes, where), field(data, "stream_bytes_per_s", where, positive))
