"""Prices of a GPU with whole families of kernels made dearer or cheaper: what an anchor found, or what an error may be.

It knows no models, engines or measurements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from calibrate.hardware import Gpu
from calibrate.kernels.chunks import ChunkPrices
from calibrate.kernels.heads import HeadShape
from calibrate.kernels.lines import KvLines
from calibrate.prices import Prices

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from calibrate.kernels.routing import Skew

    Floats = NDArray[np.float64]

PRICED = ("gemm", "moe", "elementwise", "collective", "prefill_attention", "decode_attention")
"""The families that prices are asked for."""


@dataclass(frozen=True, slots=True)
class Scaled:
    """See `calibrate.prices.Prices`: those of `prices` times the family's factor (1 where none is given)."""

    prices: Prices
    factors: Mapping[str, float]

    @property
    def gpu(self) -> Gpu:
        """See `Prices`."""
        return self.prices.gpu

    @property
    def provenance(self) -> Mapping[str, object]:
        """See `Prices`."""
        return {**self.prices.provenance, "factors": dict(self.factors)}

    def gemm_s(self, weights: str, rows: Floats, n: int, k: int) -> Floats:
        """See `Prices`."""
        return self._of("gemm") * self.prices.gemm_s(weights, rows, n, k)

    def moe_s(
        self,
        weights: str,
        rows: Floats,
        hidden: int,
        inter: int,
        experts: int,
        topk: int,
        tp: int,
        ep: int = 1,
        skew: Skew = "",
    ) -> Floats:
        """See `Prices`."""
        return self._of("moe") * self.prices.moe_s(weights, rows, hidden, inter, experts, topk, tp, ep, skew)

    def skew(self, experts: int) -> str:
        """See `Prices`."""
        return self.prices.skew(experts)

    def elementwise_s(self, op: str, rows: Floats, elements: int) -> Floats:
        """See `Prices`."""
        return self._of("elementwise") * self.prices.elementwise_s(op, rows, elements)

    def collective_s(self, op: str, size: Floats, gpus: int) -> Floats:
        """See `Prices`."""
        return self._of("collective") * self.prices.collective_s(op, size, gpus)

    def fused_allreduce_s(self, size: Floats, gpus: int) -> Floats | None:
        """See `Prices`."""
        seconds = self.prices.fused_allreduce_s(size, gpus)
        return None if seconds is None else self._of("collective") * seconds

    def prefill(self, shape: HeadShape, max_q: int, max_chunks: int) -> ChunkPrices:
        """See `Prices`."""
        return self.prices.prefill(shape, max_q, max_chunks).times(self._of("prefill_attention"))

    def decode(self, shape: HeadShape, max_sequences: int) -> KvLines:
        """See `Prices`."""
        return self.prices.decode(shape, max_sequences).times(self._of("decode_attention"))

    def inside(self, family: str, *point: object) -> NDArray[np.bool_]:
        """See `Prices`."""
        return self.prices.inside(family, *point)

    def _of(self, family: str) -> float:
        return self.factors.get(family, 1.0)
