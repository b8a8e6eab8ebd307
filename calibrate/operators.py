"""THE list of kernels that one engine step of a dense transformer runs on one GPU, with their FLOPs and bytes.

Measuring, fitting and pricing all use this list. It knows shapes and sharding, nothing of GPUs or time.
All figures are per rank and for the whole step (already times the number of layers).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from calibrate.layout import Parallelism
from calibrate.model import ModelSpec

LOGIT_BYTES = 4  # logits are sampled in fp32
SAMPLING_PASSES = (
    3  # over the vocabulary: convert, softmax, draw. Assumed: greedy needs fewer, top-k/top-p sorting more
)


@dataclass(frozen=True, slots=True)
class Operator:
    """A kernel whose work is affine in its rows: the step's tokens, or its sampled sequences.

    `kernels` of them run in a step; together they do `flops_per_row x rows` FLOPs and move
    `fixed_bytes + bytes_per_row x rows` bytes: of HBM, for a collective between GPUs (what one rank sends).
    `shape` is (n, k) of one GEMM y[rows, n] = x[rows, k] W, or (elements a row,).
    """

    name: str
    family: Literal["gemm", "elementwise", "allreduce", "allgather"]
    rows: Literal["tokens", "samples"]
    kernels: int
    shape: tuple[int, ...]
    flops_per_row: int
    fixed_bytes: int
    bytes_per_row: float


@dataclass(frozen=True, slots=True)
class Work:
    """FLOPs and HBM bytes."""

    flops: float
    hbm_bytes: float


def step_operators(model: ModelSpec, layout: Parallelism) -> tuple[Operator, ...]:
    """Everything but attention, in the order it runs in a layer."""
    tp, size, layers = layout.tp, model.dtype_bytes, model.layers
    hidden, inner = model.hidden, model.intermediate // tp
    q = model.heads_per_rank(tp) * model.head_dim
    kv = model.kv_heads_per_rank(tp) * model.head_dim
    ups = 2 if model.gated_mlp else 1
    vocab = model.padded_vocab // tp

    def gemm(
        name: str, n: int, k: int, kernels: int = layers, rows: Literal["tokens", "samples"] = "tokens"
    ) -> Operator:
        return Operator(
            name, "gemm", rows, kernels, (n, k), kernels * 2 * n * k, kernels * n * k * size, kernels * (n + k) * size
        )

    def move(
        name: str,
        elements: int,
        kernels: int = layers,
        bytes_each: int = size,
        rows: Literal["tokens", "samples"] = "tokens",
    ) -> Operator:
        return Operator(name, "elementwise", rows, kernels, (elements,), 0, 0, kernels * elements * bytes_each)

    operators = [
        move("embedding", 2 * hidden, kernels=1),
        move("norms", 4 * hidden, kernels=2 * layers),  # read and write the activation and the residual
        gemm("qkv", q + 2 * kv, hidden),
        move("rope", 2 * (q + kv) * (2 if model.qk_norm else 1)),  # query/key norm is one more read and write
        gemm("o_proj", hidden, q),
        gemm("gate_up", ups * inner, hidden),
        move("activation", (ups + 1) * inner),
        gemm("down", hidden, inner),
        move("final_norm", 4 * hidden, kernels=1),
        gemm("lm_head", vocab, hidden, kernels=1, rows="samples"),
        move("sampling", SAMPLING_PASSES * model.padded_vocab, kernels=1, bytes_each=2 * LOGIT_BYTES, rows="samples"),
    ]
    if tp > 1:
        ring = 2 * (tp - 1) / tp  # of the buffer: what each rank sends in an all-reduce
        operators += [
            Operator(
                "allreduce", "allreduce", "tokens", 2 * layers, (hidden,), 0, 0, 2 * layers * hidden * size * ring
            ),
            Operator("logits_allgather", "allgather", "samples", 1, (vocab,), 0, 0, vocab * size * (tp - 1)),
        ]
    return tuple(operators)


def prefill_attention(model: ModelSpec, layout: Parallelism, q: int, context: int) -> Work:
    """Causal attention of one chunk: `q` new tokens after `context` cached ones.

    FLOPs count the unmasked half only: 4 x heads x head_dim x (q context + q (q + 1) / 2) a layer (QK^T and PV,
    2 FLOPs a multiply-add). Bytes: the KV of every token once, queries in and outputs out.
    """
    pairs = q * context + q * (q + 1) / 2
    return Work(
        attention_flops_per_pair(model, layout) * pairs,
        model.kv_bytes_per_token(layout.tp) * (context + q) + query_bytes_per_token(model, layout) * q,
    )


def decode_attention(model: ModelSpec, layout: Parallelism, decodes: int, kv_tokens: int) -> Work:
    """Attention of `decodes` sequences that add one token each to `kv_tokens` cached ones (their sum)."""
    seen = kv_tokens + decodes
    return Work(
        attention_flops_per_pair(model, layout) * seen,
        model.kv_bytes_per_token(layout.tp) * seen + query_bytes_per_token(model, layout) * decodes,
    )


def attention_flops_per_pair(model: ModelSpec, layout: Parallelism) -> int:
    """FLOPs of one query token meeting one cached token, over all layers."""
    return 4 * model.layers * model.heads_per_rank(layout.tp) * model.head_dim


def query_bytes_per_token(model: ModelSpec, layout: Parallelism) -> int:
    """Bytes of a token's queries in and attention outputs out, over all layers."""
    return 2 * model.layers * model.heads_per_rank(layout.tp) * model.head_dim * model.dtype_bytes


def step_work(
    model: ModelSpec, layout: Parallelism, chunks: Sequence[tuple[int, int]], decodes: int, kv_tokens: int
) -> Work:
    """FLOPs and HBM bytes of a whole step on one rank (collectives' bytes are not HBM bytes)."""
    rows = {"tokens": decodes + sum(q for q, _ in chunks), "samples": decodes + len(chunks)}
    flops, moved = 0.0, 0.0
    for op in step_operators(model, layout):
        flops += op.flops_per_row * rows[op.rows]
        if op.family in ("gemm", "elementwise"):
            moved += op.fixed_bytes + op.bytes_per_row * rows[op.rows]
    parts = [prefill_attention(model, layout, q, context) for q, context in chunks]
    parts += [decode_attention(model, layout, decodes, kv_tokens)] if decodes else []
    return Work(flops + sum(part.flops for part in parts), moved + sum(part.hbm_bytes for part in parts))
