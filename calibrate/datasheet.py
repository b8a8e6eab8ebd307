"""Prices from a GPU's datasheet: a roofline with stated shares of the peaks, and a fixed time a kernel.

For GPUs that nobody's kernel table covers. Knows no models or engines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np

from calibrate.hardware import Gpu
from calibrate.kernels import simt
from calibrate.kernels.chunks import ChunkPrices, Riders, compile_chunks
from calibrate.kernels.gemm import ACTIVATION_BYTES, RATES, WEIGHT_BYTES
from calibrate.kernels.heads import HeadShape
from calibrate.kernels.lines import KvLines
from calibrate.kernels.routing import loads

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from calibrate.kernels.routing import Skew

    Floats = NDArray[np.float64]


LOGIT_BYTES = 8.0  # an fp32 logit read and written, which `operators.py` counts as one element


@dataclass(frozen=True, slots=True)
class Datasheet:
    """See `calibrate.prices.Prices`: the larger of FLOPs and bytes at the shares of `gpu.efficiency`, plus a fixed
    time."""

    gpu: Gpu

    @property
    def provenance(self) -> Mapping[str, object]:
        """See `Prices`."""
        gpu = self.gpu
        return {
            "kind": "datasheet",
            "gpu": gpu.id,
            "peak_flops": dict(gpu.flops),
            "bandwidth_bytes_per_s": gpu.bandwidth_bytes_per_s,
            "link": gpu.link.name,
            "efficiencies": {key: value for key, value in asdict(gpu.efficiency).items() if key != "source"},
            "sources": {"gpu": gpu.source, "efficiencies": gpu.efficiency.source},
            "accuracy": "not yet validated",
        }

    def gemm_s(self, weights: str, rows: Floats, n: int, k: int) -> Floats:
        """See `Prices`."""
        if weights == "fp32":
            return simt.seconds(self.gpu.fp32_flops, rows, n, k)
        moved = WEIGHT_BYTES[weights] * n * k + ACTIVATION_BYTES * (n + k) * rows
        return self._multiply_s(weights, 2.0 * n * k * rows, moved)

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
        """See `Prices`. Tokens draw their experts at random; one kernel for up and one for down."""
        size = 3.0 * hidden * inter / tp  # gate, up, down
        active, assigned = loads(skew or self.skew(experts), rows, experts, topk, ep)
        moved = WEIGHT_BYTES[weights] * size * active + 4 * ACTIVATION_BYTES * (hidden + inter / tp) * assigned
        return self._multiply_s(weights, 2.0 * size * assigned, moved) + self.gpu.efficiency.gemm_fixed_s

    def skew(self, experts: int) -> str:
        """See `Prices`: at random."""
        return "uniform"

    def elementwise_s(self, op: str, rows: Floats, elements: int) -> Floats:
        """See `Prices`."""
        share, bandwidth = self.gpu.efficiency, self.gpu.bandwidth_bytes_per_s
        moved = (LOGIT_BYTES if op == "sampling" else ACTIVATION_BYTES) * elements * rows
        seconds: Floats = share.elementwise_fixed_s + moved / (share.elementwise_bandwidth * bandwidth)
        return seconds

    def collective_s(self, op: str, size: Floats, gpus: int) -> Floats:
        """See `Prices`: a ring, in which each GPU sends 2 (g - 1) / g of an all-reduce's buffer, half of it to
        gather or scatter. What one GPU sends another takes the link of a ring of two."""
        link = self.gpu.link
        parts = {"allreduce": 2.0, "sendrecv": gpus / (gpus - 1)}
        sent = parts.get(op, 1.0) * (gpus - 1) / gpus * size
        seconds: Floats = link.latency_s + sent / (link.share(gpus) * link.bandwidth_bytes_per_s)
        return seconds

    def fused_allreduce_s(self, size: Floats, gpus: int) -> Floats | None:
        """See `Prices`: the ring's time, whose latency the norm shares."""
        return self.collective_s("allreduce", size, gpus)

    def prefill(self, shape: HeadShape, max_q: int, max_chunks: int) -> ChunkPrices:
        """See `Prices`."""
        no_riders = Riders(0.0, 1.0, 0.0, shape.heads, shape.kv_heads)  # decodes of mixed steps: a kernel of their own
        return compile_chunks(_Chunks(self.gpu, shape), no_riders, max_q, 1, shape.window)

    def decode(self, shape: HeadShape, max_sequences: int) -> KvLines:
        """See `Prices`. Few-headed KV on a card with little compute makes even decode attention compute-bound."""
        byte_s = 1 / (self.gpu.efficiency.decode_bandwidth * self.gpu.bandwidth_bytes_per_s)
        pair_s = shape.pair_flops / (self.gpu.efficiency.prefill_flops * self.gpu.flops["bf16"])
        token_s = max(shape.kv_token_bytes * byte_s, pair_s)
        fixed_s, query_s = self.gpu.efficiency.decode_fixed_s, shape.query_token_bytes * byte_s
        return KvLines([[(np.inf, fixed_s + n * (token_s + query_s), token_s)] for n in range(max_sequences + 1)])

    def inside(self, family: str, *point: object) -> NDArray[np.bool_]:
        """See `Prices`: nothing was measured."""
        return np.zeros(np.broadcast_shapes(*(np.asarray(x).shape for x in point)), np.bool_)

    def _multiply_s(self, weights: str, flops: Floats, moved: Floats) -> Floats:
        share = self.gpu.efficiency
        peak = self.gpu.flops.get(RATES[weights], self.gpu.flops["bf16"])
        bandwidth = share.gemm_bandwidth * self.gpu.bandwidth_bytes_per_s
        seconds: Floats = share.gemm_fixed_s + np.maximum(flops / (share.gemm_flops * peak), moved / bandwidth)
        return seconds


@dataclass(frozen=True, slots=True)
class _Chunks:
    """Prefill attention of one head shape, as `compile_chunks` asks for it."""

    gpu: Gpu
    shape: HeadShape

    def line(self, level: int, q: Floats) -> Floats:
        number, tokens = 2.0**level, q
        fixed = self.gpu.efficiency.prefill_fixed_s
        moved = (self.shape.kv_token_bytes + self.shape.query_token_bytes) * tokens
        return fixed + number * np.maximum(self._pair_s * tokens * (tokens + 1) / 2, self._byte_s * moved)

    def key(self, sequences: ArrayLike, q: ArrayLike) -> Floats:
        number, tokens = np.asarray(sequences, np.float64), np.asarray(q, np.float64)
        return number * np.maximum(self._pair_s * tokens, self._byte_s * self.shape.kv_token_bytes)

    @property
    def _pair_s(self) -> float:
        return self.shape.pair_flops / (self.gpu.efficiency.prefill_flops * self.gpu.flops["bf16"])

    @property
    def _byte_s(self) -> float:
        return 1 / (self.gpu.efficiency.decode_bandwidth * self.gpu.bandwidth_bytes_per_s)
