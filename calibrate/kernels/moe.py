"""Seconds of a fused expert layer on one rank: the law of its kernel, times what measured layouts were off it.

The router, shared experts and the traffic between ranks are not in it. It knows no models.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from calibrate.kernels.gemm import WEIGHT_BYTES
from calibrate.kernels.moe_law import NAMES, Law, Layers, least_seconds, rates_of
from calibrate.kernels.plain import field, many, mapping, positive, rounded, short, text, whole
from calibrate.kernels.roofline import Roofline
from calibrate.kernels.routing import loads
from servecast.errors import ServecastError, nearest, one_of

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from calibrate.kernels.routing import Skew

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

SHAPE = ("hidden", "inter", "experts", "topk")
LAYOUT = (*SHAPE, "tp", "ep")
AXES = np.array([1.0, 1.0, 0.5, 0.5, 0.5, 1.0])
"""How far apart layouts are: per log of hidden, inter/tp, experts/ep, topk and ep, and once if only one of them splits
the experts (engines pick other kernels then). Chosen, with both REACHes, by leaving shapes out of H100 and B200."""
GRID = 400  # token counts that are priced one by one
REACH = 0.3  # over which layouts count for a correction
REACH_KERNEL = 0.6  # and for the choice of the kernel, where one odd neighbour must not decide


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel on one kind of weights, with its law and the layouts that it ran.

    `layouts[i]` are the numbers of LAYOUT; `curves[i, kind]` the log of measured over law at the model's knots (kind 0:
    even loads, 1: a power law; nan: not measured), `tokens[i]` its least and most tokens.
    """

    weights: str
    kernel: str
    law: Law
    layouts: Ints
    tokens: Ints
    curves: Floats

    def curve(self, kind: int) -> Floats:
        """The corrections of a kind; of layouts without it, those of the other."""
        mine, other = self.curves[:, kind], self.curves[:, 1 - kind]
        return np.where(np.isnan(mine), other, mine)


@dataclass(frozen=True, slots=True)
class MoeModel:
    """The variants of a GPU. `ungated` are the shapes (of SHAPE) whose experts have one up matrix, not two."""

    roofline: Roofline
    knots: Floats
    ungated: frozenset[tuple[int, ...]]
    variants: tuple[Variant, ...]

    def seconds(
        self,
        weights: str,
        tokens: ArrayLike,
        hidden: int,
        inter: int,
        experts: int,
        topk: int,
        tp: int = 1,
        ep: int = 1,
        skew: Skew = "balanced",
        gated: bool = True,
    ) -> Floats:
        """Seconds of one call for every count of `tokens` (an array; 0 counts as 1) that enter the layer; never below
        the bound that the datasheet sets to reading the weights and multiplying the rows.

        `gated` says whether the experts have two up matrices; left out, they have. Measured shapes know better.
        `ServecastError` for weights that were not measured on this GPU and for a skew of no known name.
        """
        x = np.maximum(np.asarray(tokens, np.float64), 1.0)
        layout = (hidden, inter, experts, topk, tp, ep)
        law = isinstance(skew, str) and skew.startswith("power_law")
        variant, curve, known = self._nearest(weights, layout, 1 if law else 0)
        if known or layout[: len(SHAPE)] in self.ungated:
            gated = layout[: len(SHAPE)] not in self.ungated
        # the law is smooth: a few hundred counts carry it, and the rest lies on straight lines between them
        grid = np.rint(np.geomspace(1.0, x.max(), GRID))
        grid = np.unique(grid if x.size > GRID else np.concatenate([grid, x.ravel()]))
        active, rows = loads(skew, grid, experts, topk, ep)
        layers = layers_of(layout, 2.0 if gated else 1.0, active, rows, grid)
        rates = rates_of(variant.weights, variant.kernel, self.roofline)
        s = variant.law.seconds(layers, rates) * np.exp(np.interp(np.log(grid), np.log(self.knots), curve))
        s = np.maximum(s, least_seconds(layers, rates))
        if not known:  # where the engine goes over to another kernel more tokens may be cheaper, but only there
            s = np.maximum.accumulate(s)
        return np.asarray(np.interp(x, grid, s))

    def inside(
        self,
        weights: str,
        tokens: ArrayLike,
        hidden: int,
        inter: int,
        experts: int,
        topk: int,
        tp: int = 1,
        ep: int = 1,
    ) -> NDArray[np.bool_]:
        """Whether this layout was measured with so few and so many tokens, whatever the skew."""
        x = np.asarray(tokens, np.float64)
        low, high = np.inf, -np.inf
        for variant in self._of(weights):
            here = (variant.layouts == (hidden, inter, experts, topk, tp, ep)).all(1)
            if here.any():
                low, high = variant.tokens[here, 0].min(), variant.tokens[here, 1].max()
        return np.asarray((x >= low) & (x <= high))

    def to_json(self) -> dict[str, Any]:
        """Laws by name; a row a layout: tp, ep, then in per cent what it is off the law, even loads and power law
        apart, and its least and most tokens where they are not the model's."""
        ends = np.concatenate([v.tokens for v in self.variants])
        usual = [int(ends[:, 0].min()), int(ends[:, 1].max())]
        return {
            "bandwidth": rounded(self.roofline.bandwidth_bytes_per_s),
            "flops": {dtype: rounded(rate) for dtype, rate in self.roofline.flops.items()},
            "knots": [rounded(knot, 9) for knot in self.knots],
            "tokens": usual,
            "ungated": [list(shape) for shape in sorted(self.ungated)],
            "variants": [_variant_json(variant, usual) for variant in self.variants],
        }

    @classmethod
    def from_json(cls, data: Any, where: str = "moe") -> MoeModel:
        """What `to_json` gave; `ServecastError` with the key where it is something else."""
        flops = field(data, "flops", where, mapping(positive))
        if "bf16" not in flops:
            raise ServecastError(f"{where}.flops: no rate of bf16; found {one_of(flops)}")
        knots = np.array(field(data, "knots", where, many(positive)))
        if not len(knots) or (np.diff(knots) <= 0).any():
            raise ServecastError(f"{where}.knots: expected increasing numbers of tokens")
        usual = field(data, "tokens", where, many(whole))
        ungated = frozenset(field(data, "ungated", where, many(many(whole))))
        variants = field(data, "variants", where, many(lambda value, at: _read_variant(value, at, len(knots), usual)))
        return cls(Roofline(flops, field(data, "bandwidth", where, positive)), knots, ungated, variants)

    def has(self, weights: str) -> bool:
        """Whether experts of this dtype were measured."""
        return any(variant.weights == weights for variant in self.variants)

    def _of(self, weights: str) -> list[Variant]:
        found = [variant for variant in self.variants if variant.weights == weights]
        if not found:
            known = sorted({variant.weights for variant in self.variants})
            raise ServecastError(
                f"moe: weights {weights!r} were not measured{nearest(weights, known)}; known: {one_of(known)}"
            )
        return found

    def _nearest(self, weights: str, layout: tuple[int, ...], kind: int) -> tuple[Variant, Floats, bool]:
        """(kernel, its correction at the knots, whether the layout itself was measured).

        Of a measured layout its own. Else the kernel that most layouts ran, and of the kernel's corrections the mean;
        in both the further ones count less.
        """
        variants = self._of(weights)
        for variant in variants:
            exact = np.flatnonzero((variant.layouts == layout).all(1))
            if len(exact):
                return variant, variant.curve(kind)[exact[0]], True
        far = [_distances(variant.layouts, layout) for variant in variants]
        least = min(d.min() for d in far)
        best = int(np.argmax([np.exp((least - d) / REACH_KERNEL).sum() for d in far]))
        near = np.exp((far[best].min() - far[best]) / REACH)
        return variants[best], np.asarray(near @ variants[best].curve(kind) / near.sum()), False


def layers_of(layout: Any, matrices: Any, active: Any, rows: Any, tokens: Any) -> Layers:
    """A rank's layers under layouts (numbers, or a column each, of LAYOUT)."""
    hidden, inter, _, topk, tp, _ = layout
    return Layers(
        *(np.asarray(x, np.float64) for x in (hidden, np.asarray(inter) / tp, matrices, active, rows, tokens, topk))
    )


def _distances(layouts: Ints, layout: tuple[int, ...]) -> Floats:
    """How far each of `layouts` is from `layout`, on AXES."""

    def axes(rows: Any) -> Floats:
        hidden, inter, experts, topk, tp, ep = np.asarray(rows, np.float64).T
        logs = [np.log(x) for x in (hidden, inter / tp, np.maximum(experts / ep, 1.0), topk, ep)]
        return np.asarray(np.stack([*logs, ep > 1.0], axis=-1) * AXES, np.float64)

    found: Floats = np.sqrt(((axes(layouts) - axes(layout)) ** 2).sum(-1))
    return found


def _variant_json(variant: Variant, usual: list[int]) -> dict[str, Any]:
    shapes: dict[tuple[int, ...], list[Any]] = {}
    for layout, tokens, curves in zip(variant.layouts, variant.tokens, variant.curves, strict=True):
        per_cent = [[] if np.isnan(curve[0]) else [round(100 * float(x)) for x in curve] for curve in curves]
        ends = [int(x) for x in tokens]
        row = [int(layout[4]), int(layout[5]), *per_cent, *([] if ends == usual else [ends])]
        shapes.setdefault(tuple(int(x) for x in layout[:4]), []).append(row)
    return {
        "weights": variant.weights,
        "kernel": variant.kernel,
        "law": {name: rounded(value) for name, value in asdict(variant.law).items()},
        "shapes": [{"shape": list(shape), "layouts": rows} for shape, rows in shapes.items()],
    }


def _read_variant(data: Any, where: str, knots: int, usual: tuple[int, ...]) -> Variant:
    weights = field(data, "weights", where, text)
    if weights not in WEIGHT_BYTES:
        raise ServecastError(f"{where}.weights: found {weights!r}; expected {one_of(WEIGHT_BYTES)}")
    numbers = field(data, "law", where, lambda law, at: [field(law, name, at, positive) for name in NAMES])
    layouts, tokens, curves = [], [], []
    for at, shape, row in field(data, "shapes", where, _read_rows):
        if not isinstance(row, list) or len(row) not in (4, 5):
            raise ServecastError(f"{at}: expected tp, ep, two curves and perhaps two numbers of tokens")
        layouts.append((*shape, whole(row[0], at), whole(row[1], at)))
        ends = many(whole)(row[4], at) if len(row) == 5 else usual
        if len(ends) != 2 or row[2] == row[3] == []:
            raise ServecastError(f"{at}: expected two numbers of tokens, and a curve at least of one kind")
        tokens.append(ends)
        curves.append([_read_curve(curve, at, knots) for curve in row[2:4]])
    if not layouts:
        raise ServecastError(f"{where}.shapes: holds no layout")
    kernel = field(data, "kernel", where, text)
    return Variant(weights, kernel, Law(*numbers), np.array(layouts), np.array(tokens), np.array(curves) / 100)


def _read_rows(value: Any, where: str) -> list[tuple[str, tuple[int, ...], Any]]:
    """(where it stands, shape, row) of every layout."""
    rows = []
    for i, each in enumerate(many(lambda x, _: x)(value, where)):
        at = f"{where}[{i}]"
        shape = field(each, "shape", at, many(whole))
        if len(shape) != len(SHAPE):
            raise ServecastError(f"{at}.shape: found {short(list(shape))}; expected {one_of(SHAPE)}")
        layouts = field(each, "layouts", at, many(lambda x, _: x))
        rows += [(f"{at}.layouts[{j}]", shape, row) for j, row in enumerate(layouts)]
    return rows


def _read_curve(value: Any, where: str, knots: int) -> list[float]:
    """As many numbers as there are knots, or nan for an empty list; thousands of them are read at every start."""
    if value == []:
        return [np.nan] * knots
    numbers = isinstance(value, list) and all(type(x) in (int, float) for x in value)
    if not numbers or len(value) != knots or not all(-1e4 < x < 1e4 for x in value):
        raise ServecastError(f"{where}: found {short(value)}; expected {knots} numbers, or none")
    return list(value)
