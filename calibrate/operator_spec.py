"""One operator of an engine step: kernels that are alike, with their FLOPs and bytes. `operators.py` lists them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from calibrate.layout import Group

Collective = Literal[
    "allreduce",
    "allgather",
    "reducescatter",
    "sendrecv",
    "dispatch_low_latency",
    "combine_low_latency",
    "dispatch_high_throughput",
    "combine_high_throughput",
]
Rows = Literal["tokens", "samples", "chunk_keys", "chunk_context", "decodes", "group"]
"""The step's tokens; its sampled sequences; new and cached tokens of its prompt chunks; the cached ones alone; its
decoding sequences; the tokens of all data parallel or prefill context parallel ranks that share experts."""


@dataclass(frozen=True, slots=True)
class Operator:
    """A kernel whose work is affine in its rows.

    `kernels` of them run in a step; together they do `flops_per_row x rows` FLOPs and move
    `fixed_bytes + bytes_per_row x rows` bytes: of HBM, for a collective between GPUs (what one rank sends).
    `shape` is (n, k) of one GEMM y[rows, n] = x[rows, k] W, (hidden, inter, experts, topk) of a layer of gated experts
    (whole model), or (elements a row,): of a collective those of the whole buffer, see `measurements.py`; a collective
    runs in each `group` of GPUs. `weights` is the dtype of a GEMM's or of experts' weights, one of
    `measurements.WEIGHTS` ("fp32" besides); "" where it has none. Of a layer of experts, `fixed_bytes` are those of
    all experts: how many of them a step reads depends on its tokens (`touched_share`).
    """

    name: str
    family: Literal["gemm", "elementwise", "moe"] | Collective
    rows: Rows
    kernels: int
    shape: tuple[int, ...]
    flops_per_row: float
    fixed_bytes: int
    bytes_per_row: float
    weights: str = ""
    group: Group = "tp"
