"""From measured expert layers to a `MoeModel`, and how far one is off on what it has not seen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from calibrate.kernels.gemm import WEIGHT_BYTES
from calibrate.kernels.heldout import split
from calibrate.kernels.moe import LAYOUT, SHAPE, MoeModel, Variant, layers_of
from calibrate.kernels.moe_law import Layers, Rates, fit_law, least_seconds, rates_of
from calibrate.kernels.roofline import Roofline
from calibrate.kernels.routing import loads
from calibrate.kernels.tally import Tally
from servecast.errors import ServecastError, one_of

if TYPE_CHECKING:
    import polars as pl
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

KNOT_RATIO = 4.0
LEVEL, BEND = 0.1, 0.05  # penalties on a curve's slope and bend between knots: decide where points are few or wild
FOLDS = 5
CACHE_BYTES = 512e6  # of weights: four times the largest L2
TOO_FAST = 0.9  # of the datasheet's bound: measured times of a gated layer do not lie below


def fit_moe(table: pl.DataFrame, roofline: Roofline) -> MoeModel:
    """Laws by kernel, and a curve for every measured layout; one that two kernels ran is the one's that ran more rows.

    Rows that are faster than the datasheet allows count as the bound: they found weights in the cache that the last
    call had left there, as no engine's step does (or their router was limited to fewer experts).
    """
    import polars as pl

    if strange := sorted(set(table["weights"].unique()) - set(WEIGHT_BYTES)):
        raise ServecastError(f"moe: weights {one_of(strange)} are not known; expected {one_of(WEIGHT_BYTES)}")
    most = table.group_by("weights", *LAYOUT).agg(pl.col("kernel").fill_null("").mode().min().alias("variant"))
    table = table.join(most, on=["weights", *LAYOUT]).sort("weights", "variant", *LAYOUT, "skew", "tokens")
    groups = [
        ((str(key[0]), str(key[1])), rows) for key, rows in table.group_by("weights", "variant", maintain_order=True)
    ]
    ungated = _ungated(table, roofline)
    counts = table["tokens"].to_numpy()
    steps = np.ceil(np.log(counts.max() / counts.min()) / np.log(KNOT_RATIO) - 1e-9)
    knots = counts.min() * KNOT_RATIO ** np.arange(steps + 1)
    return MoeModel(
        roofline,
        knots,
        ungated,
        tuple(_variant(*key, rows, rates_of(*key, roofline), ungated, knots) for key, rows in groups),
    )


def evaluate(table: pl.DataFrame, roofline: Roofline, seed: int = 0) -> list[tuple[str, str, float, float, int]]:
    """(what, weights, median, p90, points): |relative error| on what was held out of the fit.

    "rows": a fifth of the points, at random; "shapes": every model shape once, a fifth of them at a time (whether its
    experts are gated is told, as a model's config says it); "most tokens": more than a quarter of the most. Points
    that are faster than the datasheet allows are not counted; see `fit_moe`.
    """
    import polars as pl

    ungated = _ungated(table, roofline)
    possible = pl.Series(table["seconds"].to_numpy() >= _bound(table, roofline, ungated))
    table = table.with_columns(possible=possible)
    shapes = table.select(SHAPE).unique().sort(SHAPE)
    dealt = shapes.with_columns(fold=pl.Series(np.random.default_rng(seed).permutation(len(shapes)) % FOLDS))
    fold = table.join(dealt, on=SHAPE, how="left", maintain_order="left")["fold"]
    most = pl.col("tokens") * 4 > pl.col("tokens").max()
    folds = [("rows", *split(table, None, 0.2, seed))]
    folds += [("shapes", table.filter(fold != i), table.filter(fold == i)) for i in range(FOLDS)]
    folds += [("most tokens", table.filter(~most), table.filter(most))]
    tally, point = Tally(), ("weights", *LAYOUT, "skew")
    for what, kept, held in folds:
        if not len(kept) or not len(held):
            continue
        model = fit_moe(kept, roofline)
        there = {variant.weights for variant in model.variants}
        asked = held.filter(pl.col("possible") & pl.col("weights").is_in(there))
        for key, rows in asked.group_by(point, maintain_order=True):
            at: dict[str, Any] = dict(zip(point, key, strict=True))
            gated = tuple(at[name] for name in SHAPE) not in ungated
            priced = model.seconds(tokens=rows["tokens"].to_numpy(), gated=gated, **at)
            tally.add(what, at["weights"], priced, rows["seconds"].to_numpy())
    return tally.found()


def _rows_of(table: pl.DataFrame, ungated: frozenset[tuple[int, ...]]) -> Layers:
    tokens = table["tokens"].to_numpy().astype(np.float64)
    active, rows = np.empty(len(tokens)), np.empty(len(tokens))
    for (experts, topk, ep, skew), part in _groups(table, ("experts", "topk", "ep", "skew")):
        active[part], rows[part] = loads(skew, tokens[part], experts, topk, ep)
    shapes = table.select(SHAPE).rows()
    matrices = np.array([1.0 if shape in ungated else 2.0 for shape in shapes])
    return layers_of([table[c].to_numpy() for c in LAYOUT], matrices, active, rows, tokens)


def _groups(table: pl.DataFrame, by: tuple[str, ...]) -> Iterator[tuple[tuple[Any, ...], Ints]]:
    """(values of the columns `by`, the places of their rows)."""
    for key, rows in table.select(by).with_row_index("_place").group_by(by, maintain_order=True):
        yield key, rows["_place"].to_numpy().astype(np.int64)


def _ungated(table: pl.DataFrame, roofline: Roofline) -> frozenset[tuple[int, ...]]:
    """Shapes that are faster than the memory could deliver three matrices an expert: they have one up matrix.

    The tables do not say so. Even loads count only where there are no others: limits on routing, which the tables do
    not say either, leave some of them with fewer experts than they seem to need.
    """
    ratio = table["seconds"].to_numpy() / _bound(table, roofline, frozenset())
    large = _bound(table, roofline, frozenset()) * roofline.bandwidth_bytes_per_s > CACHE_BYTES
    skewed = table["skew"].str.starts_with("power_law").to_numpy()
    found = set()
    for shape, part in _groups(table, SHAPE):
        part = part[large[part]]
        part = part[skewed[part]] if skewed[part].any() else part
        if len(part) and np.quantile(ratio[part], 0.02) < TOO_FAST:
            found.add(shape)
    return frozenset(found)


def _bound(table: pl.DataFrame, roofline: Roofline, ungated: frozenset[tuple[int, ...]]) -> Floats:
    """The datasheet's bound of every row."""
    bound = np.empty(len(table))
    layers = _rows_of(table, ungated)
    for (weights, kernel), part in _groups(table, ("weights", "kernel")):
        bound[part] = least_seconds(layers.take(part), rates_of(weights, kernel or "", roofline))
    return bound


def _variant(
    weights: str, kernel: str, table: pl.DataFrame, rates: Rates, ungated: frozenset[tuple[int, ...]], knots: Floats
) -> Variant:
    layers = _rows_of(table, ungated)
    seconds = np.maximum(table["seconds"].to_numpy(), least_seconds(layers, rates))
    law = fit_law(layers, seconds, rates)
    off = np.log(seconds / law.seconds(layers, rates))
    x = np.log(layers.tokens)
    weight = np.stack([np.interp(x, np.log(knots), unit) for unit in np.eye(len(knots))], axis=1)
    smooth = np.concatenate(
        [LEVEL * np.diff(np.eye(len(knots)), 1, axis=0), BEND * np.diff(np.eye(len(knots)), 2, axis=0)]
    )
    even = ~table["skew"].str.starts_with("power_law").to_numpy()
    layouts, tokens, curves = [], [], []
    for layout, part in _groups(table, LAYOUT):
        both = np.full((2, len(knots)), np.nan)
        for kind, rows in enumerate((part[even[part]], part[~even[part]])):
            if len(rows):
                design = np.concatenate([weight[rows], smooth])
                both[kind] = np.linalg.lstsq(design, np.concatenate([off[rows], np.zeros(len(smooth))]), rcond=None)[0]
        layouts.append(layout)
        tokens.append((layers.tokens[part].min(), layers.tokens[part].max()))
        curves.append(both)
    return Variant(weights, kernel, law, np.array(layouts), np.array(tokens, np.int64), np.array(curves))
