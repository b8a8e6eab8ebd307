"""What a fused expert layer costs by its FLOPs and bytes: the law that measured layers are corrected against.

It knows a layer's sizes on one rank and how many experts and rows it works on, not how tokens are routed.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from calibrate.kernels.gemm import ACTIVATION_BYTES, RATES, WEIGHT_BYTES
from calibrate.kernels.roofline import Roofline

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

MOST_POINTS = 1500  # of a kernel: the law has 8 numbers
PRIOR = 0.03  # log error that moving a number by a factor e away from START costs: decides only where points are few
CLOSE = 0.1  # log error beyond which a point counts by its distance, not by its square


@dataclass(frozen=True, slots=True)
class Layers:
    """Layers on one rank, one an entry (arrays that broadcast): `matrices` of the up projections (2 gated, 1 not), of
    `inner` columns each; `active` experts get `rows` rows between them, of `tokens` with `topk` assignments each."""

    hidden: Floats
    inner: Floats
    matrices: Floats
    active: Floats
    rows: Floats
    tokens: Floats
    topk: Floats

    def take(self, which: NDArray[np.int64]) -> Layers:
        """These entries (of full-length arrays)."""
        return Layers(*(column[which] for column in astuple(self)))


@dataclass(frozen=True, slots=True)
class Rates:
    """What bounds a kernel: bytes of a weight, FLOP/s of the dtype that multiplies, bytes/s of the memory."""

    weight_bytes: float
    flops: float
    bandwidth: float


@dataclass(frozen=True, slots=True)
class Law:
    """fixed + assignments x tokens x topk + moved bytes + the p-norm of weights read and FLOPs done.

    Shares are of the datasheet's rates. Each active expert does `tile_rows` more rows than it has (its last tile is
    part empty, its launch not free), each multiplication `tile_depth` more elements (a tile's start and end).
    """

    fixed_s: float
    weights_share: float
    flops_share: float
    norm: float
    tile_rows: float
    tile_depth: float
    moved_share: float
    assignment_s: float

    def seconds(self, layers: Layers, rates: Rates) -> Floats:
        """Seconds of one call for each layer."""
        x = layers
        read = x.active * (x.matrices + 1) * x.hidden * x.inner * rates.weight_bytes
        depth = x.matrices * x.inner * (x.hidden + self.tile_depth) + x.hidden * (x.inner + self.tile_depth)
        done = 2 * (x.rows + self.tile_rows * x.active) * depth
        memory = read / (self.weights_share * rates.bandwidth)
        compute = done / (self.flops_share * rates.flops)
        larger, smaller = np.maximum(memory, compute), np.minimum(memory, compute)
        both = larger * (1 + (smaller / larger) ** self.norm) ** (1 / self.norm)
        moved = _moved(x) / (self.moved_share * rates.bandwidth)
        return np.asarray(self.fixed_s + both + moved + self.assignment_s * x.tokens * x.topk)


START = Law(20e-6, 0.85, 0.6, 2.0, 16.0, 100.0, 0.5, 5e-11)
LEAST = Law(1e-6, 0.02, 0.02, 1.0, 0.5, 1.0, 0.02, 1e-12)
MOST = Law(2e-4, 1.0, 1.0, 8.0, 256.0, 2000.0, 1.0, 5e-8)
NAMES = tuple(field.name for field in fields(Law))


def least_seconds(layers: Layers, rates: Rates) -> Floats:
    """The datasheet's bound: the active experts' weights once, the rows' FLOPs."""
    weights = (layers.matrices + 1) * layers.hidden * layers.inner
    read = layers.active * weights * rates.weight_bytes / rates.bandwidth
    return np.asarray(np.maximum(read, 2 * layers.rows * weights / rates.flops))


def rates_of(weights: str, kernel: str, roofline: Roofline) -> Rates:
    """The rates of a kernel on these weights; one that a datasheet does not state is taken as bf16's."""
    math = "fp8" if "mxfp8" in kernel else RATES[weights]
    flops = roofline.flops.get(math, roofline.flops["bf16"])
    return Rates(WEIGHT_BYTES[weights], flops, roofline.bandwidth_bytes_per_s)


def fit_law(layers: Layers, seconds: Floats, rates: Rates) -> Law:
    """The law closest to the points in log error, robustly; within LEAST and MOST, so that it extrapolates sanely."""
    from scipy.optimize import least_squares

    if len(seconds) > MOST_POINTS:
        some = np.random.default_rng(0).choice(len(seconds), MOST_POINTS, replace=False)
        layers, seconds = layers.take(some), seconds[some]
    start, low, high = (np.log(astuple(law)) for law in (START, LEAST, MOST))

    def off(x: Floats) -> Floats:
        errors = np.log(Law(*np.exp(x)).seconds(layers, rates) / seconds)
        return np.concatenate([errors, PRIOR * (x - start)])

    found = least_squares(off, start, bounds=(low, high), loss="soft_l1", f_scale=CLOSE, max_nfev=60)
    return Law(*(float(value) for value in np.exp(found.x)))


def _moved(x: Layers) -> Floats:
    """Activation bytes: tokens in and out, rows gathered, up-projected, activated, down-projected."""
    return np.asarray(
        ACTIVATION_BYTES * (2 * x.tokens * x.hidden + x.rows * (2 * x.hidden + (2 * x.matrices + 2) * x.inner))
    )
