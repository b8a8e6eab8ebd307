"""What `cost.py` asks of whoever knows a GPU: seconds of kernels. `Datasheet` and `Profile` answer.

Sizes are those of one GPU of the replica, times those of one call, in seconds. It knows no models, layers or engines.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from calibrate.hardware import Gpu
from calibrate.kernels.chunks import ChunkPrices
from calibrate.kernels.heads import HeadShape
from calibrate.kernels.lines import KvLines

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from calibrate.kernels.routing import Skew

    Floats = NDArray[np.float64]


class Prices(Protocol):
    """Seconds of kernels on one GPU; those of a group between its GPUs."""

    @property
    def gpu(self) -> Gpu:
        """The GPU."""

    @property
    def provenance(self) -> Mapping[str, object]:
        """Where the prices come from: `kind`, `gpu`, `accuracy`, sources; for the manifest."""

    def gemm_s(self, weights: str, rows: Floats, n: int, k: int) -> Floats:
        """y[rows, n] = x[rows, k] W for every one of `rows` (each at least 1); of "fp32" weights on the CUDA cores."""

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
        """The routed experts of a layer, each `inter`/`tp` wide on the fullest of `ep` ranks between which they are
        dealt out, for every one of `rows` tokens (at least 1) that enter the layer. `skew`: how tokens spread over
        experts (`calibrate.kernels.routing`), empty where these prices are to say."""

    def skew(self, experts: int) -> str:
        """How tokens are taken to spread over so many experts where nobody says."""

    def elementwise_s(self, op: str, rows: Floats, elements: int) -> Floats:
        """`rows` rows of which each reads and writes `elements` elements."""

    def collective_s(self, op: str, size: Floats, gpus: int) -> Floats:
        """A collective of `traffic.Collective` between `gpus` GPUs, as if on one node; `size` as `measurements.py`
        counts its bytes."""

    def fused_allreduce_s(self, size: Floats, gpus: int) -> Floats | None:
        """An all-reduce in one kernel with the norm after it, the norm's own bytes not counted; None where nobody
        measured it."""

    def prefill(self, shape: HeadShape, max_q: int, max_chunks: int) -> ChunkPrices:
        """Attention of prompt chunks of up to `max_q` tokens, `max_chunks` of them in a step."""

    def decode(self, shape: HeadShape, max_sequences: int) -> KvLines:
        """Attention of up to `max_sequences` decoding sequences."""

    def inside(self, family: str, *point: object) -> NDArray[np.bool_]:
        """Which points lie within what was measured. `point`: the sizes of the family as its model's `inside` takes
        them; of a collective (as `collective_s`)."""
