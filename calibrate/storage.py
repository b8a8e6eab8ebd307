"""How the weights of a projection lie in memory: the bits, scales and zero points of the formats that engines load.

Knows matrices, not models: which of a model's projections lie how is said by `ModelSpec.quantized`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Storage:
    """A format of weights.

    `weights` names the kernels that multiply them (`measurements.WEIGHTS`), `experts` those of experts where these are
    others ("": the same). An n x k matrix takes `bits` an element,
    `scale_bytes` (scales and zero points) for each block of `rows` x `columns` elements (0: the matrix's whole side),
    and `matrix_bytes` once. `unpriced` says why no prices fit its kernels; empty where some do.
    """

    weights: str
    bits: int
    scale_bytes: float = 0.0
    rows: int = 0
    columns: int = 0
    matrix_bytes: int = 0
    unpriced: str = ""
    experts: str = ""

    def size(self, n: int, k: int) -> int:
        """Bytes of an n x k matrix (n outputs, k inputs), with its scales."""
        blocks = -(-n // (self.rows or n)) * -(-k // (self.columns or k))
        return math.ceil(n * k * self.bits / 8 + blocks * self.scale_bytes) + self.matrix_bytes


PLAIN = {"bf16": Storage("bf16", 16), "fp16": Storage("bf16", 16), "fp32": Storage("fp32", 32)}
"""Unquantised weights by the model's dtype; kernels for the two 16-bit floats cost the same."""

FORMATS = {
    "fp8": Storage("fp8", 8, scale_bytes=4, matrix_bytes=4),  # one scale, and one of the activations
    # vLLM's own kernels multiply such experts, which no table holds: those of block scales read as much, while the ones
    # of one scale a matrix (FlashInfer's CUTLASS, on Hopper) take five times as long
    "fp8_channel": Storage("fp8", 8, scale_bytes=4, rows=1, experts="fp8_block"),
    "fp8_block": Storage("fp8_block", 8, scale_bytes=4, rows=128, columns=128),
    "int8": Storage("int8", 8, scale_bytes=4, rows=1),
    "nvfp4": Storage("nvfp4", 4, scale_bytes=1, rows=1, columns=16, matrix_bytes=8),  # two scales of the whole matrix
    "mxfp4": Storage("mxfp4", 4, scale_bytes=1, rows=1, columns=32),
}
"""Formats by the name that the catalogue gives them; scales are fp32, of the 4-bit floats 8 bits."""

KV_FORMATS: dict[str, Callable[[int], int]] = {
    "bf16": lambda n: 2 * n,
    "fp16": lambda n: 2 * n,
    "fp32": lambda n: 4 * n,
    "fp8": lambda n: n,
    "nvfp4": lambda n: n // 2 + n // 16,  # an 8-bit scale for 16 elements
    "int8_per_token_head": lambda n: n + 4,  # an fp32 scale
    "fp8_per_token_head": lambda n: n + 4,
    "int4_per_token_head": lambda n: n // 2 + 4,
}
"""Format of the KV cache -> bytes of a vector of n elements: one head's key or value, or a cached latent
(vllm/v1/kv_cache_interface.py, `customize_spec` of the attention backends)."""

WIDE_INT8 = "8-bit weights with 16-bit activations, whose kernels nobody's table holds"
BITSANDBYTES = "bitsandbytes weights, whose kernels nobody's table holds"


def grouped_int(bits: int, group: int, zeros: bool) -> Storage:
    """Weight-only integers (AWQ, GPTQ, compressed-tensors): a 16-bit scale, and perhaps a zero point of `bits`, for
    each `group` inputs of an output (0: all of them)."""
    scales = 2 + (bits / 8 if zeros else 0)
    unpriced = "" if bits == 4 else WIDE_INT8
    return Storage(f"int{bits}", bits, scale_bytes=scales, rows=1, columns=group, unpriced=unpriced)


def bitsandbytes(bits: int, double: bool) -> Storage:
    """NF4 with an absolute maximum for 64 weights (fp32, or in 8 bits with an fp32 one for 256 of them when quantised
    twice), or 8-bit integers with an fp32 scale an output."""
    if bits == 8:
        return Storage("int8", 8, scale_bytes=4, rows=1, unpriced=BITSANDBYTES)
    scale = 1 + 4 / 256 if double else 4
    return Storage("int4", 4, scale_bytes=scale, rows=1, columns=64, unpriced=BITSANDBYTES)
