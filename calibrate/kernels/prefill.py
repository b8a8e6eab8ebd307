"""Seconds of prefill attention (causal, of whole prompts or of chunks after cached tokens) on one GPU, by head shape.

Whole prompts are `fixed + roofline` times a factor: a sum of small tables fitted to measured times. What a chunk's
cached tokens add is derived, see `_History`, because published tables hold none. It knows no models, layers or steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from calibrate.kernels.additive import Axes, fit_tables, read_axes, write_axes
from calibrate.kernels.chunks import ChunkPrices, Riders, compile_chunks, pairs
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
from calibrate.kernels.plain import field, mapping, positive, rounded
from calibrate.kernels.roofline import Roofline
from servecast.errors import ServecastError

if TYPE_CHECKING:
    import polars as pl
    from numpy.typing import ArrayLike, NDArray

    Floats = NDArray[np.float64]

TILE = 64.0  # query rows of one tile: what FlashAttention 2 takes at head_dim 128; of 128, chunks differ below 1 %

Q = np.array([1, 16, 32, 64, 128, 256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 10240, 12288, 16384, 32768.0])
SEQUENCES = np.array([2.0**i for i in range(9)], np.float64)
"""Between these sizes a price is interpolated: the factor linearly in log q, the seconds linearly in sequences."""

KNOTS = np.log2([1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 16384])
UNITS = np.array([0, 2, 4, 5, 6, 7, 8, 9, 10, 12, 14, 15.0])
FEW = np.log2([16, 128, 512, 2048, 16384])
AXES = (
    Axes({"rows": np.array([0, *range(4, 16), 17.0]), "kv_units": UNITS}),  # a kernel that packs a KV head's queries
    Axes({"q": KNOTS, "units": UNITS}),  # one that does not
    Axes({"q": KNOTS, "sequences": np.array([0, 1, 2, 4, 6, 8.0])}),
    Axes({"kv_heads": np.array([0, 1, 2, 3, 6, 7.0]), "ratio": np.array([0, 1, 2, 3, 4, 6.0]), "q": FEW}),
    Axes({"q": FEW}, own=True, ridge=0.02),
)
"""What a factor depends on, in powers of two: rows = q x ratio, kv_units = sequences x KV heads, units = sequences x
heads, ratio = heads / KV heads; the last table is the measured head shapes' own."""
NAMES = ("q", "sequences", "rows", "units", "kv_units", "kv_heads", "ratio")
LONG = 2048  # tokens of prompts whose longest tile tells the time of a key


@dataclass(frozen=True, slots=True)
class PrefillKind:
    """One kind: its factors, and `key_s`, the least seconds that a tile of queries takes for one more key (`waves` in
    `PrefillShape`). `history` scales what cached tokens add: 1 unless that was measured."""

    fit: Kind
    key_s: float
    history: float


@dataclass(frozen=True, slots=True)
class PrefillShape:
    """Prices of one head shape: `factor[i, j]` is log(seconds / base) of SEQUENCES[i] prompts of Q[j] tokens."""

    shape: HeadShape
    roofline: Roofline
    kind: PrefillKind
    factor: Floats
    pairs_per_s: float

    @property
    def wave(self) -> float:
        """How many tiles of TILE query rows of one head the GPU works on at a time."""
        return max(self.pairs_per_s * self.kind.key_s / TILE, 1e-9)

    @property
    def riders_wave(self) -> float:
        """As `wave`, at the rate of one prompt of LONG tokens, whose tiles have as many keys as decoding sequences."""
        q = np.array([min(LONG, 2.0 ** self.kind.fit.extent["q"][1])])
        tiles = float(pairs(q, np.zeros(1), 0)[0]) * self.shape.heads / TILE
        busy = float(self.fresh(np.ones(1), q)[0]) - self.kind.fit.fixed_s
        return max(tiles * self.kind.history * self.kind.key_s / max(busy, 1e-9), 1e-9)

    def base(self, sequences: ArrayLike, q: ArrayLike) -> Floats:
        """Seconds before the factor."""
        return self.kind.fit.fixed_s + self.work(sequences, q) / self.kind.fit.share

    def work(self, sequences: ArrayLike, q: ArrayLike) -> Floats:
        """Seconds of the roofline without cached tokens."""
        return work_seconds(self.shape, self.roofline, np.asarray(sequences, np.float64), np.asarray(q, np.float64))

    def least(self, sequences: ArrayLike, q: ArrayLike) -> Floats:
        """What no price without cached tokens goes below."""
        return self.work(sequences, q) / self.kind.fit.floor

    def fresh(self, sequences: ArrayLike, q: ArrayLike) -> Floats:
        """Seconds without cached tokens; 1-D arrays of the same length."""
        number, tokens = np.asarray(sequences, np.float64), np.asarray(q, np.float64)
        place = np.interp(np.log2(tokens), np.log2(Q), np.arange(len(Q), dtype=np.float64))
        low = np.minimum(place.astype(np.int64), len(Q) - 2)
        share = place - low
        row = np.clip(np.log2(number).astype(np.int64), 0, len(SEQUENCES) - 1)
        beyond = np.maximum(number, SEQUENCES[-1])  # more sequences than the last knot: all of the last factor
        upper = np.minimum(row + 1, len(SEQUENCES) - 1)
        first, second = (np.where(row + 1 < len(SEQUENCES), SEQUENCES[i], beyond) for i in (row, upper))
        ends = [
            self.base(of, tokens) * np.exp(self.factor[i, low] * (1 - share) + self.factor[i, low + 1] * share)
            for i, of in ((row, first), (upper, second))
        ]
        weight = np.where(second > first, (number - first) / np.maximum(second - first, 1.0), 0.0)
        out: Floats = np.maximum(ends[0] * (1 - weight) + ends[1] * weight, self.least(number, tokens))
        return out

    def line(self, level: int, q: Floats) -> Floats:
        """`fresh` of SEQUENCES[level] prompts of every `q`, faster."""
        work = self.work(SEQUENCES[level], q)
        factor = np.exp(np.interp(np.log2(q), np.log2(Q), self.factor[level]))
        fit = self.kind.fit
        out: Floats = np.maximum((fit.fixed_s + work / fit.share) * factor, work / fit.floor)
        return out

    def key(self, sequences: ArrayLike, q: ArrayLike) -> Floats:
        """Seconds of one more cached token in every sequence.

        A tile of TILE query rows of one head goes through its keys at `key_s` each, and a GPU works on as many tiles
        at a time as its best rate says (one wave). So whole waves count: 1.1 waves take as long as 2. Checked, not
        fitted: 6-8 % median on RTX PRO 6000 (vLLM, FlashAttention 2), 3-11 % on H800, 14 % on A800 (FlashInfer).
        Never faster than reading the keys and values from memory, or than the peak.
        """
        number, tokens = np.asarray(sequences, np.float64), np.asarray(q, np.float64)
        tiles = np.ceil(tokens / TILE) * self.shape.heads * number
        seconds = self.kind.history * self.kind.key_s * np.maximum(np.ceil(tiles / self.wave - 0.05), 1.0)
        read = number * self.shape.kv_token_bytes / self.roofline.bandwidth_bytes_per_s
        compute = number * tokens * self.shape.pair_flops / self.shape.peak(self.roofline) / self.kind.fit.floor
        return np.maximum(seconds, np.maximum(read, compute))

    def seconds(self, sequences: ArrayLike, q: ArrayLike, context: ArrayLike) -> Floats:
        """Seconds of sequences of `q` tokens each after `context` cached ones; 1-D arrays of the same length."""
        number, tokens, cached = (np.asarray(x, np.float64) for x in (sequences, q, context))
        window = self.shape.window
        more = (pairs(tokens, cached, window) - pairs(tokens, np.zeros_like(tokens), window)) / tokens
        return self.fresh(number, tokens) + self.key(number, tokens) * more


@dataclass(frozen=True, slots=True)
class PrefillModel:
    """All kinds of one GPU, by name."""

    roofline: Roofline
    kinds: Mapping[str, PrefillKind]

    def seconds(
        self,
        kv_dtype: str,
        sequences: ArrayLike,
        q: ArrayLike,
        context: ArrayLike,
        heads: ArrayLike,
        kv_heads: ArrayLike,
        head_dim: ArrayLike,
        value_dim: ArrayLike,
        window: ArrayLike = 0,
    ) -> Floats:
        """Seconds of one kernel: `sequences` of `q` new tokens each after `context` cached ones, all in one call.

        Sizes broadcast. Beyond the measured range the factor at its edge holds, so times follow the roofline. A kind
        that was not measured has its own roofline and the factors of the closest one that was.
        """
        sizes = (sequences, q, context, heads, kv_heads, head_dim, value_dim, window)
        points = [np.asarray(x, np.float64) for x in sizes]
        size = np.broadcast_shapes(*(x.shape for x in points))
        number, tokens, cached, *shape = (np.broadcast_to(x, size).ravel() for x in points)
        out = np.empty(number.shape)
        for each, here in by_shape(kv_dtype, *shape):
            out[here] = self.of_shape(each).seconds(number[here], tokens[here], cached[here])
        return out.reshape(size)

    def inside(
        self,
        kv_dtype: str,
        sequences: ArrayLike,
        q: ArrayLike,
        heads: ArrayLike,
        kv_heads: ArrayLike,
        head_dim: ArrayLike,
        value_dim: ArrayLike,
        window: ArrayLike = 0,
    ) -> NDArray[np.bool_]:
        """Whether the kind was measured, and prompts, their number and the heads each lie in the measured range."""
        points = [np.asarray(x, np.float64) for x in (sequences, q, heads, kv_heads, head_dim, value_dim, window)]
        size = np.broadcast_shapes(*(x.shape for x in points))
        number, tokens, *shape = (np.broadcast_to(x, size).ravel() for x in points)
        out = np.zeros(number.shape, bool)
        for each, here in by_shape(kv_dtype, *shape):
            if each.kind in self.kinds:
                found = _points(each.heads, each.kv_heads, number[here], tokens[here])
                extent = self.kinds[each.kind].fit.extent
                ok = [(x >= extent[n][0] - 1e-9) & (x <= extent[n][1] + 1e-9) for n, x in found.items()]
                out[here] = np.logical_and.reduce(ok)
        return out.reshape(size)

    def compile(self, shape: HeadShape, max_q: int, max_chunks: int = 16) -> ChunkPrices:
        """Prices of chunks of 1..`max_q` tokens of one head shape, up to `max_chunks` in one kernel, as look-ups."""
        prices = self.of_shape(shape)
        key = prices.kind.history * prices.kind.key_s
        read = shape.kv_token_bytes / self.roofline.bandwidth_bytes_per_s
        riders = Riders(key, prices.riders_wave, read, shape.heads, shape.kv_heads)
        return compile_chunks(prices, riders, max_q, max_chunks, shape.window)

    def of_shape(self, shape: HeadShape) -> PrefillShape:
        """The prices of one head shape. They never fall with tokens or sequences (on the knots), nor below the
        roofline (times the fastest measured kernel)."""
        kind = self.kinds[closest_kind(list(self.kinds), shape)]
        number, tokens = (x.ravel() for x in np.meshgrid(SEQUENCES, Q, indexing="ij"))
        work = work_seconds(shape, self.roofline, number, tokens)
        base = kind.fit.fixed_s + work / kind.fit.share
        factor = kind.fit.tables.at(_points(shape.heads, shape.kv_heads, number, tokens), shape.owner)
        seconds = np.maximum(base * np.exp(factor), work / kind.fit.floor).reshape(len(SEQUENCES), len(Q))
        seconds = extended(seconds, SEQUENCES, 2.0 ** kind.fit.extent["sequences"][1])
        seconds = np.maximum.accumulate(np.maximum.accumulate(seconds, axis=0), axis=1)
        every = pairs(tokens, np.zeros_like(tokens), shape.window) * number * shape.heads
        rate = every.reshape(seconds.shape) / np.maximum(seconds - kind.fit.fixed_s, 0.1 * seconds)
        factor = np.log(seconds / base.reshape(seconds.shape))
        return PrefillShape(shape, self.roofline, kind, factor, float(rate.max()))

    def to_json(self) -> dict[str, Any]:
        """The roofline and every kind."""
        kinds = {
            name: {"key_ns": rounded(1e9 * kind.key_s), "history": rounded(kind.history), **kind.fit.to_json(AXES)}
            for name, kind in self.kinds.items()
        }
        return write_roofline(self.roofline) | {"axes": write_axes(AXES), "kinds": kinds}

    @classmethod
    def from_json(cls, data: Any, where: str = "prefill_attention") -> PrefillModel:
        """What `to_json` gave; `ServecastError` with the key where it is something else."""
        axes = field(data, "axes", where, lambda value, at: read_axes(value, NAMES, at))
        kinds = field(data, "kinds", where, mapping(lambda value, at: _read_kind(value, axes, at)))
        checked_kinds(list(kinds), f"{where}.kinds")
        return cls(read_roofline(data, where), kinds)


def work_seconds(shape: HeadShape, roofline: Roofline, sequences: Floats, q: Floats) -> Floats:
    """The larger of all FLOPs (the causal half) at the peak, and queries, keys, values and outputs at the bandwidth."""
    flops = shape.pair_flops * sequences * pairs(q, np.zeros_like(q), shape.window)
    moved = sequences * q * (shape.query_token_bytes + shape.kv_token_bytes)
    return np.maximum(flops / shape.peak(roofline), moved / roofline.bandwidth_bytes_per_s)


def fit_prefill(table: pl.DataFrame, roofline: Roofline) -> PrefillModel:
    """The model of a table of measurements (columns as in FAMILIES["prefill_attention"]). Rows with cached tokens only
    scale the derived history of their kind; a kind with no other rows is left out."""
    kinds = {}
    for name, rows in by_kind(table):
        fresh = rows.filter(rows["context"] == 0).sort("heads", "kv_heads", "sequences", "q")
        if len(fresh):
            kinds[name] = _fit_kind(fresh, roofline)
            cached = rows.filter(rows["context"] > 0)
            if len(cached):
                kinds[name] = _with_history(PrefillModel(roofline, {name: kinds[name]}), name, cached)
    if not kinds:
        raise ServecastError("prefill_attention: the table holds no rows without cached tokens (context 0) to fit")
    return PrefillModel(roofline, kinds)


def evaluate(table: pl.DataFrame, roofline: Roofline, seed: int = 0) -> list[tuple[str, str, float, float, int]]:
    """(what, times, median, p90, points): |relative error| of prices of points that were held out of the fit.

    "rows": a fifth of the points, at random; "shapes": all points of a fifth of the head shapes, each once; "longest":
    prompts of more than half of the longest; "most": more than a quarter of the most sequences. `times` says whether
    all points are counted or those of 0.1 ms and more.
    """
    found = []
    for what, folds in _held_out(table.filter(table["context"] == 0), seed):
        predicted, measured = [], []
        for kept, held in folds:
            if not len(kept) or not len(held):
                continue
            model = fit_prefill(kept, roofline)
            for dtype in held["kv_dtype"].unique().sort():
                rows = held.filter(held["kv_dtype"] == dtype)
                sizes = [rows[name].to_numpy() for name in ("sequences", "q", "context", *COLUMNS)]
                predicted.append(model.seconds(dtype, *sizes))
                measured.append(rows["seconds"].to_numpy())
        if not measured:
            continue
        ours, theirs = np.concatenate(predicted), np.concatenate(measured)
        for times, least in (("all", 0.0), ("0.1 ms and more", 1e-4)):
            here = theirs >= least
            if not here.any():
                continue
            found.append((what, times, *errors(ours[here], theirs[here]), int(here.sum())))
    return found


def _held_out(table: pl.DataFrame, seed: int) -> Iterator[tuple[str, list[tuple[pl.DataFrame, pl.DataFrame]]]]:
    import polars as pl

    yield "rows", [split(table, None, 0.2, seed)]
    shapes = table.select("heads", "kv_heads", "head_dim").unique().sort("heads", "kv_heads", "head_dim")
    fold = pl.Series("fold", np.random.default_rng(seed).permutation(len(shapes)) % 5)
    dealt = table.join(shapes.with_columns(fold), on=shapes.columns, how="left", maintain_order="left")
    yield "shapes", [(dealt.filter(pl.col("fold") != i), dealt.filter(pl.col("fold") == i)) for i in range(5)]
    edges = {
        "longest": pl.col("q") > pl.col("q").max() / 2,
        "most": pl.col("sequences") > pl.col("sequences").max() / 4,
    }
    for what, edge in edges.items():
        yield what, [(table.filter(~edge), table.filter(edge))]


def _fit_kind(rows: pl.DataFrame, roofline: Roofline) -> PrefillKind:
    number, tokens, heads, kv_heads = (
        rows[name].to_numpy().astype(np.float64) for name in ("sequences", "q", "heads", "kv_heads")
    )
    seconds = rows["seconds"].to_numpy()
    shapes = by_shape(rows["kv_dtype"][0], *(rows[name].to_numpy().astype(np.float64) for name in COLUMNS))
    work = np.empty(len(rows))
    for shape, here in shapes:
        work[here] = work_seconds(shape, roofline, number[here], tokens[here])
    fixed, share, floor = base_of(work, seconds)
    points = _points(heads, kv_heads, number, tokens)
    tables = fit_tables(AXES, points, owners_of(rows), np.log(seconds / (fixed + work / share)))
    window = rows["window"][0] or np.inf
    long = tokens >= min(LONG, tokens.max())
    key = float((np.maximum(seconds - fixed, 0.1 * seconds) / np.minimum(tokens, window))[long].min())
    extent = {name: (float(x.min()), float(x.max())) for name, x in points.items()}
    return PrefillKind(Kind(kernel_of(rows), fixed, share, floor, tables, extent), key, 1.0)


def _with_history(model: PrefillModel, name: str, rows: pl.DataFrame) -> PrefillKind:
    """The kind with the median of measured over derived seconds of cached tokens, where these are at least half."""
    kind = model.kinds[name]
    sizes = [rows[column].to_numpy() for column in ("sequences", "q", "context", *COLUMNS)]
    whole = model.seconds(rows["kv_dtype"][0], *sizes)
    fresh = model.seconds(rows["kv_dtype"][0], sizes[0], sizes[1], 0, *sizes[3:])
    seconds = rows["seconds"].to_numpy()
    told = (whole > 2 * fresh) & (seconds > fresh)
    if not told.any():
        return kind
    ratio = (seconds[told] - fresh[told]) / (whole[told] - fresh[told])
    return PrefillKind(kind.fit, kind.key_s, float(np.median(ratio)))


def _points(heads: ArrayLike, kv_heads: ArrayLike, sequences: Floats, q: Floats) -> dict[str, Floats]:
    """The coordinates of AXES."""
    h, k = (np.log2(np.broadcast_to(np.asarray(x, np.float64), q.shape)) for x in (heads, kv_heads))
    number, tokens = np.log2(sequences), np.log2(q)
    found = (tokens, number, tokens + h - k, number + h, number + k, k, h - k)
    return dict(zip(NAMES, found, strict=True))


def _read_kind(data: Any, axes: tuple[Axes, ...], where: str) -> PrefillKind:
    return PrefillKind(
        read_kind(data, axes, where),
        1e-9 * field(data, "key_ns", where, positive),
        field(data, "history", where, positive),
    )
