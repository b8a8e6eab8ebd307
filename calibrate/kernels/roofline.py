"""The two rates that bound every kernel of a GPU. Knows nothing of kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from calibrate.hardware import Gpu


@dataclass(frozen=True, slots=True)
class Roofline:
    """Dense peak FLOP/s by dtype of the multiplication (bf16, fp8, int8, fp4), and the memory's bytes/s."""

    flops: Mapping[str, float]
    bandwidth_bytes_per_s: float


def from_gpu(gpu: Gpu) -> Roofline:
    """The roofline of a GPU of the catalogue."""
    return Roofline(gpu.flops, gpu.bandwidth_bytes_per_s)
