"""Seconds of whole layers of multi-head latent attention (MLA), projections and norms included, on one GPU.

Published tables time such layers of one model, not their kernels. A layer is `fixed + roofline` times a factor: a sum
of small tables fitted to measured times. It knows no engines or steps, and no model but DeepSeek-V3's sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from calibrate.kernels.additive import Axes, fit_tables, read_axes, write_axes
from calibrate.kernels.heads import Kind, base_of, extended, kernel_of, read_kind, read_roofline, write_roofline
from calibrate.kernels.heldout import errors, split
from calibrate.kernels.lines import KvLines, compile_lines, few_knots
from calibrate.kernels.plain import field, mapping
from calibrate.kernels.roofline import Roofline
from servecast.errors import ServecastError, nearest, one_of

if TYPE_CHECKING:
    import polars as pl
    from numpy.typing import ArrayLike, NDArray

    Floats = NDArray[np.float64]

Phase = Literal["prefill", "decode"]

# DeepSeek-V3 (arXiv:2412.19437): hidden size, widths of the latents, elements of a head's parts
HIDDEN, Q_RANK, KV_RANK, NOPE, ROPE, VALUE = 7168, 1536, 512, 128, 64, 128
BYTES = {"bf16": 2.0, "fp8": 1.0, "fp8_block": 1.0, "nvfp4": 0.5625}
RATES = {"bf16": "bf16", "fp8": "fp8", "fp8_block": "fp8", "nvfp4": "fp4"}

SEQUENCES = np.array([2.0**i for i in range(11)], np.float64)
Q = np.array([1, 16, 32, 64, 128, 256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 10240, 12288, 16384, 32768.0])
CONTEXTS = np.array([0, *(2.0 ** np.arange(6, 18) - 1), 2.0**20 - 1])
FEW = np.array([0, 7, 9, 11, 13, 17.0])
AXES: Mapping[Phase, tuple[Axes, ...]] = {
    "prefill": (
        Axes({"tokens": np.log2(Q), "units": np.arange(0, 15.0)}),
        Axes({"tokens": np.log2(Q), "sequences": np.array([0, 1, 2, 3, 4, 6, 8.0])}),
        Axes({"tokens": np.array([0, 4, 7, 9, 11, 14.0]), "heads": np.arange(0, 8.0)}),
    ),
    "decode": (
        Axes({"tokens": np.array([0, *range(6, 18)], np.float64), "sequences": np.arange(0, 11.0)}),
        Axes({"tokens": FEW, "heads": np.arange(0, 8.0)}),
        Axes({"sequences": np.array([0, 2, 4, 5, 6, 7, 8, 9, 10.0]), "heads": np.arange(0, 8.0)}),
    ),
}
"""In powers of two; tokens: of a prompt, or that a decoding sequence sees; units: sequences x heads."""
NAMES = ("tokens", "sequences", "heads", "units")


@dataclass(frozen=True, slots=True)
class Layer:
    """One rank's layer: dtypes of the projections' weights, of attention and of the cache, and its heads."""

    weights: str
    attn_dtype: str
    kv_dtype: str
    heads: int

    def __post_init__(self) -> None:
        for name in (self.weights, self.attn_dtype, self.kv_dtype):
            if name not in BYTES:
                raise ServecastError(f"dtype {name!r} is not known{nearest(name, BYTES)}; known: {one_of(BYTES)}")

    @property
    def kind(self) -> str:
        """The name of the kind, as a profile writes it."""
        return f"{self.weights}/{self.attn_dtype}/{self.kv_dtype}"

    def work(self, phase: Phase, roofline: Roofline, sequences: Floats, tokens: Floats) -> Floats:
        """Seconds of the roofline: `tokens` of each of the prompts, or seen by each of the decoding sequences.

        Weights are read once. A decoding token meets the cached latents themselves (its query and its output go through
        a head's part of the up-projection instead of all keys and values).
        """
        rate = roofline.flops.get(RATES[self.weights], roofline.flops["bf16"])
        attention_rate = roofline.flops.get(self.attn_dtype, roofline.flops["bf16"])
        down, up = (
            HIDDEN * (Q_RANK + KV_RANK + ROPE),
            Q_RANK * (NOPE + ROPE) + KV_RANK * (NOPE + VALUE) + VALUE * HIDDEN,
        )
        matrices = down + self.heads * up
        if phase == "prefill":
            rows, pairs, wide = sequences * tokens, sequences * tokens * (tokens + 1) / 2, NOPE + ROPE + VALUE
        else:
            rows, pairs, wide = sequences, sequences * tokens, 2 * KV_RANK + ROPE
        compute = 2.0 * rows * matrices / rate + 2.0 * self.heads * wide * pairs / attention_rate
        cached = sequences * tokens * (KV_RANK + ROPE) * BYTES[self.kv_dtype]
        moved = matrices * BYTES[self.weights] + cached + 4.0 * rows * HIDDEN
        return np.maximum(compute, moved / roofline.bandwidth_bytes_per_s)


@dataclass(frozen=True, slots=True)
class MlaModel:
    """All kinds of one phase on one GPU, by name."""

    phase: Phase
    roofline: Roofline
    kinds: Mapping[str, Kind]

    def seconds(
        self, weights: str, attn_dtype: str, kv_dtype: str, sequences: ArrayLike, tokens: ArrayLike, heads: ArrayLike
    ) -> Floats:
        """Seconds of one layer: of prompts of `tokens` each, or of decoding sequences with `tokens` cached ones each.

        Sizes broadcast. Beyond the measured range the factor at its edge holds, so times follow the roofline. A kind
        that was not measured has its own roofline and the factors of one that was.
        """
        points = np.broadcast_arrays(*(np.asarray(x, np.float64) for x in (sequences, tokens, heads)))
        number, size, each = (x.ravel() for x in points)
        out = np.empty(number.shape)
        for h in np.unique(each):
            here = each == h
            layer = Layer(weights, attn_dtype, kv_dtype, int(h))
            out[here] = self._of_layer(layer, number[here], size[here])
        return out.reshape(points[0].shape)

    def inside(
        self, weights: str, attn_dtype: str, kv_dtype: str, sequences: ArrayLike, tokens: ArrayLike, heads: ArrayLike
    ) -> NDArray[np.bool_]:
        """Whether the kind was measured, and every size lies in the measured range."""
        number, size, each = np.broadcast_arrays(*(np.asarray(x, np.float64) for x in (sequences, tokens, heads)))
        kind = self.kinds.get(Layer(weights, attn_dtype, kv_dtype, 1).kind)
        found = _points(self.phase, number, size, each)
        ok = np.full(number.shape, kind is not None)
        for name, x in found.items():
            low, high = kind.extent[name] if kind else (0.0, 0.0)
            ok &= (x >= low - 1e-9) & (x <= high + 1e-9)
        return ok

    def compile(self, layer: Layer, max_sequences: int) -> KvLines:
        """Decoding layers only: for 0..`max_sequences` sequences, seconds as few straight lines in their KV tokens."""
        at = self._grid(layer, CONTEXTS)
        kept = few_knots(CONTEXTS, at)
        number = np.arange(1, max_sequences + 1, dtype=np.float64)
        rows = np.stack([_between(number, at[:, j]) for j in kept], axis=1)
        return compile_lines(CONTEXTS[kept], rows, level=False)

    def to_json(self) -> dict[str, Any]:
        """The roofline, the axes and every kind."""
        kinds = {name: kind.to_json(AXES[self.phase]) for name, kind in self.kinds.items()}
        return write_roofline(self.roofline) | {"axes": write_axes(AXES[self.phase]), "kinds": kinds}

    @classmethod
    def from_json(cls, phase: Phase, data: Any, where: str) -> MlaModel:
        """What `to_json` gave; `ServecastError` with the key where it is something else."""
        axes = field(data, "axes", where, lambda value, at: read_axes(value, NAMES, at))
        for name in field(data, "kinds", where, mapping(lambda value, _: value)) or [""]:
            if len(name.split("/")) != 3 or not set(name.split("/")) <= set(BYTES):
                raise ServecastError(f"{where}.kinds: {name!r} is no kind; expected weights/attention/KV dtype")
        kinds = field(data, "kinds", where, mapping(lambda value, at: read_kind(value, axes, at)))
        return cls(phase, read_roofline(data, where), kinds)

    def _of_layer(self, layer: Layer, sequences: Floats, tokens: Floats) -> Floats:
        if self.phase == "decode":
            at = self._grid(layer, CONTEXTS)
            columns = np.stack([_between(sequences, at[:, j]) for j in range(len(CONTEXTS))], axis=1)
            low = np.clip(np.searchsorted(CONTEXTS, tokens, side="right") - 1, 0, len(CONTEXTS) - 2)
            share = (tokens - CONTEXTS[low]) / (CONTEXTS[low + 1] - CONTEXTS[low])
            row = np.arange(len(tokens))
            between: Floats = columns[row, low] * (1 - share) + columns[row, low + 1] * share
            return between
        kind = self.kinds[self._closest(layer)]
        work = layer.work("prefill", self.roofline, sequences, tokens)
        heads = np.full_like(tokens, layer.heads)
        factor = kind.tables.at(_points("prefill", sequences, tokens, heads), "")
        return np.maximum((kind.fixed_s + work / kind.share) * np.exp(factor), work / kind.floor)

    def _grid(self, layer: Layer, contexts: Floats) -> Floats:
        """Decode seconds at SEQUENCES x `contexts`; they never fall along either."""
        kind = self.kinds[self._closest(layer)]
        number, cached = (x.ravel() for x in np.meshgrid(SEQUENCES, contexts, indexing="ij"))
        work = layer.work("decode", self.roofline, number, cached + 1)
        factor = kind.tables.at(_points("decode", number, cached, np.full_like(number, layer.heads)), "")
        seconds = np.maximum((kind.fixed_s + work / kind.share) * np.exp(factor), work / kind.floor)
        seconds = extended(seconds.reshape(len(SEQUENCES), -1), SEQUENCES, 2.0 ** kind.extent["sequences"][1])
        out: Floats = np.maximum.accumulate(np.maximum.accumulate(seconds, axis=0), axis=1)
        return out

    def _closest(self, layer: Layer) -> str:
        wanted = layer.kind.split("/")
        return min(self.kinds, key=lambda name: [a != b for a, b in zip(name.split("/"), wanted, strict=True)])


def fit_mla(phase: Phase, table: pl.DataFrame, roofline: Roofline) -> MlaModel:
    """The model of a table of measurements (columns as in FAMILIES["mla_prefill_module"] or "mla_decode_module")."""
    kinds = {}
    for (weights, attn, kv), rows in table.sort("weights", "attn_dtype", "kv_dtype").group_by(
        "weights", "attn_dtype", "kv_dtype", maintain_order=True
    ):
        fresh = rows.filter(rows["context"] == 0) if phase == "prefill" else rows
        if not len(fresh):
            continue
        number, tokens, heads = (
            fresh[name].to_numpy().astype(np.float64) for name in ("sequences", _size(phase), "heads")
        )
        work = np.empty(len(fresh))
        for h in np.unique(heads):
            here = heads == h
            layer = Layer(str(weights), str(attn), str(kv), int(h))
            work[here] = layer.work(phase, roofline, number[here], tokens[here] + (phase == "decode"))
        seconds = fresh["seconds"].to_numpy()
        fixed, share, floor = base_of(work, seconds)
        points = _points(phase, number, tokens, heads)
        tables = fit_tables(AXES[phase], points, [""] * len(fresh), np.log(seconds / (fixed + work / share)))
        extent = {name: (float(x.min()), float(x.max())) for name, x in points.items()}
        kinds[f"{weights}/{attn}/{kv}"] = Kind(kernel_of(fresh), fixed, share, floor, tables, extent)
    if not kinds:
        raise ServecastError(f"mla_{phase}_module: the table holds no rows to fit")
    return MlaModel(phase, roofline, kinds)


def evaluate(
    phase: Phase, table: pl.DataFrame, roofline: Roofline, seed: int = 0
) -> list[tuple[str, str, float, float, int]]:
    """(what, which, median, p90, points): |relative error| of prices of points that were held out of the fit.

    "rows": a fifth of the points, at random; "heads": all points of one number of heads, each but the ends held out
    once; "longest": prompts or contexts beyond half of the longest; "most": more than half of the most sequences.
    """
    found = []
    for what, folds in _held_out(phase, table, seed):
        predicted, measured = [], []
        for kept, held in folds:
            if not len(kept) or not len(held):
                continue
            model = fit_mla(phase, kept, roofline)
            for (weights, attn, kv), rows in held.group_by("weights", "attn_dtype", "kv_dtype", maintain_order=True):
                sizes = [rows[name].to_numpy() for name in ("sequences", _size(phase), "heads")]
                predicted.append(model.seconds(str(weights), str(attn), str(kv), *sizes))
                measured.append(rows["seconds"].to_numpy())
        if measured:
            ours, theirs = np.concatenate(predicted), np.concatenate(measured)
            found.append((what, "all", *errors(ours, theirs), len(theirs)))
    return found


def _held_out(
    phase: Phase, table: pl.DataFrame, seed: int
) -> Iterator[tuple[str, list[tuple[pl.DataFrame, pl.DataFrame]]]]:
    import polars as pl

    table = table.filter(table["context"] == 0) if phase == "prefill" else table
    yield "rows", [split(table, None, 0.2, seed)]
    inner = sorted(table["heads"].unique())[1:-1]
    yield "heads", [(table.filter(pl.col("heads") != h), table.filter(pl.col("heads") == h)) for h in inner]
    for what, column in (("longest", _size(phase)), ("most", "sequences")):
        edge = pl.col(column) > pl.col(column).max() / 2
        yield what, [(table.filter(~edge), table.filter(edge))]


def _size(phase: Phase) -> str:
    return "q" if phase == "prefill" else "context"


def _points(phase: Phase, sequences: Floats, tokens: Floats, heads: Floats) -> dict[str, Floats]:
    """The coordinates of AXES."""
    number, h = np.log2(sequences), np.log2(heads)
    found = (np.log2(tokens + (phase == "decode")), number, h, number + h)
    return dict(zip(NAMES, found, strict=True))


def _between(sequences: Floats, at: Floats) -> Floats:
    """`at` SEQUENCES, linear between and beyond."""
    low = np.clip(np.searchsorted(SEQUENCES, sequences, side="right") - 1, 0, len(SEQUENCES) - 2)
    share = (sequences - SEQUENCES[low]) / (SEQUENCES[low + 1] - SEQUENCES[low])
    out: Floats = at[low] * (1 - share) + at[low + 1] * share
    return out
