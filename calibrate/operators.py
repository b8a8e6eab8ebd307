"""THE list of kernels that one engine step of a transformer runs on one GPU, with their FLOPs and bytes.

Measuring, fitting and pricing all use this list. It knows shapes and sharding, nothing of GPUs or time.
All figures are per rank and for the whole step (already times the number of layers).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

from calibrate.context import latent_sharing, sharing
from calibrate.layout import Parallelism
from calibrate.model import DTYPE_BYTES, ModelSpec
from calibrate.operator_spec import Operator, Rows
from calibrate.parts import Latent, Projection
from calibrate.stages import stage_model
from calibrate.traffic import collectives

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FIRST = ("embedding",)
LAST = ("final_norm", "lm_head", "sampling", "logits_allgather", "pcp_hidden")
"""What only the first and the last pipeline stage do."""
LOGIT_BYTES = 4  # logits are sampled in fp32
SAMPLING_PASSES = (
    3  # over the vocabulary: convert, softmax, draw. Assumed: greedy needs fewer, top-k/top-p sorting more
)


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Layers with the same attention, as one rank runs it: `layers` times a kernel.

    "gqa": `heads` query heads over `kv_heads` KV heads of `head_dim` elements. `window` is the number of tokens that a
    query sees, itself included (0: all); when `chunked` it sees those of its own chunk of `window` tokens instead.
    "mla": `kv_heads` is 1 and `head_dim` what a token has in the cache; `latent` has the other sizes. A prompt chunk
    attends with `heads` heads to keys of `latent.key` and values of `latent.value` elements, a decoding token to the
    cached latents themselves. `kv_dtype` is the cache's ("bf16" for both 16-bit floats, "fp8"). `dcp` ranks share the
    tokens of the cache: a decoding token meets those of this rank, with the query heads of them all.
    """

    kind: Literal["gqa", "mla"]
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int
    kv_dtype: str
    chunked: bool = False
    latent: Latent | None = None
    dcp: int = 1

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of one token in the cache of one layer."""
        return (1 if self.latent else 2) * self.kv_heads * self.head_dim * DTYPE_BYTES[self.kv_dtype]

    def pair_flops(self, decode: bool) -> int:
        """FLOPs of one query token meeting one key in one layer: QK^T and PV, 2 a multiply-add."""
        if self.latent is None:
            return 4 * self.heads * self.head_dim
        latent = self.latent
        return 2 * self.heads * (latent.cached + latent.kv_rank if decode else latent.key + latent.value)

    def query_elements(self, decode: bool) -> int:
        """Elements of a token's queries in and attention outputs out, in one layer."""
        if self.latent is None:
            return 2 * self.heads * self.head_dim
        latent = self.latent
        return self.heads * (latent.cached + latent.kv_rank if decode else latent.key + latent.value)

    def seen(self, decodes: int, kv_tokens: int) -> int:
        """Of `kv_tokens` cached tokens of so many sequences, which are equally long, those that their next ones see."""
        each = kv_tokens // decodes
        if not self.window or (each < self.window and not self.chunked):
            return kv_tokens
        return decodes * (each % self.window if self.chunked else self.window)

    def pairs(self, q: int, context: int) -> float:
        """Query-key pairs of one chunk: `q` new tokens after `context` cached ones."""
        size = self.window
        if not size:
            return q * context + q * (q + 1) / 2
        if self.chunked:
            return _chunked_pairs(context + q, size) - _chunked_pairs(context, size)
        growing = min(max(size - context, 0), q)
        return growing * context + growing * (growing + 1) / 2 + (q - growing) * size

    def keys(self, q: int, context: int) -> int:
        """How many tokens' keys one chunk meets."""
        if not self.window:
            return q + context
        return q + (context % self.window if self.chunked else min(context, self.window - 1))


@dataclass(frozen=True, slots=True)
class Work:
    """FLOPs and HBM bytes."""

    flops: float
    hbm_bytes: float


def _chunked_pairs(tokens: int, size: int) -> float:
    """Query-key pairs of the first `tokens` tokens in chunks of `size`."""
    whole, rest = divmod(tokens, size)
    return whole * size * (size + 1) / 2 + rest * (rest + 1) / 2


def attention_groups(model: ModelSpec, layout: Parallelism, stage: int = 0) -> tuple[AttentionGroup, ...]:
    """The attention of all layers of a pipeline stage, on one rank: those that see everything first."""
    model = stage_model(model, layout, stage)
    tp, latent = layout.tp, model.latent
    kv_dtype = model.kv_dtype or ("fp32" if model.dtype == "fp32" else "bf16")

    def group(layers: int, window: int = 0, chunked: bool = False) -> AttentionGroup:
        heads = model.heads_per_rank(tp)
        if latent:
            return AttentionGroup("mla", layers, heads, 1, latent.cached, window, kv_dtype, chunked, latent, layout.dcp)
        kv_heads, dcp = model.kv_heads_per_rank(tp), layout.dcp
        return AttentionGroup("gqa", layers, heads, kv_heads, model.head_dim, window, kv_dtype, chunked, dcp=dcp)

    everything = model.layers - sum(window.layers for window in model.windows)
    return (*([group(everything)] if everything else []), *(group(w.layers, w.size, w.chunked) for w in model.windows))


def step_operators(model: ModelSpec, layout: Parallelism, stage: int = 0) -> tuple[Operator, ...]:
    """Everything but attention of a pipeline stage, in the order it runs in a layer. Rows are tokens or samples."""
    model = stage_model(model, layout, stage)
    tp, layers, hidden = layout.tp, model.layers, model.hidden
    vocab = model.padded_vocab // tp
    projections = model.projections(tp)
    gemms = [_gemm(model, p) for p in projections if not p.name.startswith(("kv_b", "experts"))]
    operators = [
        _move(model, "embedding", 2 * hidden, 1),
        _move(model, "norms", 4 * hidden, 2 * layers),  # read and write the activation and the residual
        *([_move(model, "post_norms", 2 * hidden, (model.norms - 2) * layers)] if model.norms > 2 else []),
        *_named(gemms, "qkv", "qkv_a", "q_b"),
        *_on_queries_and_keys(model, tp),
        *_named(gemms, "o_proj", "gate_up"),
        *_activations(model, "gate_up", tp),
        *_named(gemms, "down"),
        *_experts(model, gemms, layout),
        _move(model, "final_norm", 4 * hidden, 1),
        _gemm(model, Projection("lm_head", (vocab,), hidden, 1, model.plain), "samples"),
        _move(model, "sampling", SAMPLING_PASSES * model.padded_vocab, 1, "samples", bytes_each=2 * LOGIT_BYTES),
    ]
    operators += [*collectives(model, layout), *sharing(model, layout)]
    missing = (*(FIRST if stage else ()), *(LAST if stage < layout.pp - 1 else ()))
    return tuple(op for op in operators if op.kernels and op.name not in missing)


def attention_operators(model: ModelSpec, layout: Parallelism, stage: int = 0) -> tuple[Operator, ...]:
    """What latent attention does beside its projections and its attention kernels; nothing for other models.
    With decode context parallelism, what `calibrate.context` says besides.

    A prompt chunk makes the keys and values of its own tokens, and again those of all its cached ones, from latents:
    `kv_b` and `mla_keys`, whose rows are "chunk_keys" (one kernel more a layer when there are cached ones). A decoding
    token's queries are moved into the space of the latents, and its outputs back, with the same weights in 16 bit:
    `mla_absorb` and `mla_values`, whose rows are "decodes" and which are one small GEMM a head; `shape` is that of
    all heads together. vLLM's `MLAAttention` of 0.19.
    """
    model = stage_model(model, layout, stage)
    if model.latent is None:
        return ()
    latent, heads, layers, size = model.latent, model.heads_per_rank(layout.tp), model.layers, model.dtype_bytes

    def per_head(name: str, n: int, k: int) -> Operator:
        weights = layers * heads * n * k
        moved = layers * heads * (n + k) * size
        return Operator(name, "gemm", "decodes", layers, (heads * n, k), 2 * weights, weights * size, moved, "bf16")

    return (
        *(_gemm(model, p, "chunk_keys") for p in model.projections(layout.tp) if p.name == "kv_b"),
        _move(model, "mla_keys", heads * (latent.nope + latent.key) + latent.rope, layers, "chunk_keys"),
        per_head("mla_absorb", latent.kv_rank, latent.nope),
        per_head("mla_values", latent.value, latent.kv_rank),
        *latent_sharing(model, layout),
    )


def prefill_attention(model: ModelSpec, layout: Parallelism, q: int, context: int, stage: int = 0) -> Work:
    """Causal attention of one chunk: `q` new tokens after `context` cached ones.

    FLOPs count the unmasked half only: 4 x heads x head_dim x (q context + q (q + 1) / 2) a layer (QK^T and PV,
    2 FLOPs a multiply-add). Bytes: the cached KV of every token it sees once, queries in and outputs out.
    """
    flops = moved = 0.0
    for group in attention_groups(model, layout, stage):
        flops += group.layers * group.pair_flops(decode=False) * group.pairs(q, context)
        moved += group.layers * group.kv_token_bytes * group.keys(q, context)
        moved += group.layers * group.query_elements(decode=False) * model.dtype_bytes * q
    return Work(flops, moved)


def decode_attention(model: ModelSpec, layout: Parallelism, decodes: int, kv_tokens: int, stage: int = 0) -> Work:
    """Attention of `decodes` sequences that add one token each to `kv_tokens` cached ones (their sum). Behind windows
    as if all were equally long."""
    flops = moved = 0.0
    for group in attention_groups(model, layout, stage):
        seen = kv_tokens + decodes
        if group.window and decodes:
            seen = min(seen, decodes * group.keys(1, kv_tokens // decodes))
        flops += group.layers * group.pair_flops(decode=True) * seen
        moved += group.layers * group.kv_token_bytes * seen / group.dcp
        moved += group.layers * group.query_elements(decode=True) * group.dcp * model.dtype_bytes * decodes
    return Work(flops, moved)


Tokens = TypeVar("Tokens", float, "NDArray[np.float64]")


def touched_share(experts: int, topk: int, tokens: Tokens) -> Tokens:
    """The share of a layer's experts that `tokens` tokens need when each draws its own at random."""
    share: Tokens = 1.0 - (1.0 - topk / experts) ** tokens
    return share


def step_work(
    model: ModelSpec,
    layout: Parallelism,
    chunks: Sequence[tuple[int, int]],
    decodes: int,
    kv_tokens: int,
    stage: int = 0,
) -> Work:
    """FLOPs and HBM bytes of a whole step on one rank of a pipeline stage (collectives' bytes are not HBM bytes)."""
    new = sum(q for q, _ in chunks)
    rows = {
        "tokens": decodes + new,
        "samples": decodes + len(chunks),
        "chunk_keys": new + sum(context for _, context in chunks),
        "chunk_context": sum(context for _, context in chunks),
        "decodes": decodes,
    }
    flops, moved = 0.0, 0.0
    for op in (*step_operators(model, layout, stage), *attention_operators(model, layout, stage)):
        flops += op.flops_per_row * rows[op.rows]
        if op.family in ("gemm", "elementwise", "moe") and rows[op.rows]:
            read = touched_share(op.shape[2], op.shape[3], rows[op.rows]) if op.family == "moe" else 1.0
            moved += op.fixed_bytes * read + op.bytes_per_row * rows[op.rows]
    parts = [prefill_attention(model, layout, q, context, stage) for q, context in chunks]
    parts += [decode_attention(model, layout, decodes, kv_tokens, stage)] if decodes else []
    return Work(flops + sum(part.flops for part in parts), moved + sum(part.hbm_bytes for part in parts))


def _named(operators: Sequence[Operator], *names: str) -> list[Operator]:
    return [op for name in names for op in operators if op.name == name]


def _gemm(model: ModelSpec, projection: Projection, rows: Rows = "tokens") -> Operator:
    p, n, k = projection, projection.n, projection.k
    read = p.count * sum(p.storage.size(part, k) for part in p.parts)
    moved = p.count * (n + k) * model.dtype_bytes
    return Operator(p.name, "gemm", rows, p.count, (n, k), p.count * 2 * n * k, read, moved, p.storage.weights)


def _move(
    model: ModelSpec, name: str, elements: int, kernels: int, rows: Rows = "tokens", bytes_each: int = 0
) -> Operator:
    moved = kernels * elements * (bytes_each or model.dtype_bytes)
    return Operator(name, "elementwise", rows, kernels, (elements,), 0, 0, moved)


def _on_queries_and_keys(model: ModelSpec, tp: int) -> list[Operator]:
    """Norms and rotary positions of queries and keys, each read and written."""
    heads, layers = model.heads_per_rank(tp), model.layers
    if latent := model.latent:
        # both latents are normalised, and the rotary parts of the queries and of the one key turned
        return [
            _move(model, "latent_norms", 2 * (latent.q_rank + latent.kv_rank), layers),
            _move(model, "rope", 2 * (heads + 1) * latent.rope, layers),
        ]
    both = (heads + model.kv_heads_per_rank(tp)) * model.head_dim
    norm = [_move(model, "qk_norm", 2 * both, layers)] if model.qk_norm else []
    if model.qk_norm == "all" and tp > 1:  # the sums of squares are a kernel of their own: all ranks add theirs up
        norm.insert(0, _move(model, "qk_norm_squares", both, layers))
    return [*norm, _move(model, "rope", 2 * both, layers)]


def _activations(model: ModelSpec, name: str, tp: int) -> list[Operator]:
    """What lies between the up projections `name` and the down projection."""
    found = [p for p in model.projections(tp) if p.name == name]
    layers = sum(p.count for p in found)
    return [_move(model, "activation", found[0].n + found[0].parts[0], layers)] if found else []


def _experts(model: ModelSpec, gemms: Sequence[Operator], layout: Parallelism) -> list[Operator]:
    """Router, routed and shared experts. A GPU has those rows of the routed ones that fall to it on average."""
    if (experts := model.experts) is None:
        return []
    tp, topk = layout.tp, experts.topk / layout.expert_ep
    size, hidden, inner = model.dtype_bytes, model.hidden, experts.inter // layout.expert_tp
    routed = []
    projections = model.projections(layout.expert_tp)
    for up, down in zip(
        (p for p in projections if p.name == "experts_up"),
        (p for p in projections if p.name == "experts_down"),
        strict=True,
    ):
        layers = up.count // experts.count
        each = sum(up.storage.size(n, up.k) for n in up.parts) + down.storage.size(down.n, down.k)
        read = layers * layout.experts_here(experts.count) * each
        flops = layers * topk * 2 * (up.n * up.k + down.n * down.k)
        moved = layers * (2 * hidden + topk * 3 * inner) * size
        shape = (hidden, experts.inter, experts.count, experts.topk)
        weights = up.storage.experts or up.storage.weights
        rows: Rows = "tokens" if layout.dp * layout.pcp == 1 else "group"
        routed.append(Operator("experts", "moe", rows, layers, shape, flops, read, moved, weights))
    widened = _move(model, "router_input", 3 * hidden, experts.layers)  # 16 bit in, 32 bit out
    return [
        *([widened] if experts.router_bytes > size else []),
        *_named(gemms, "router"),
        _move(
            model, "router_topk", 2 * experts.count + 4 * experts.topk, experts.layers
        ),  # fp32 scores in, choices out
        *routed,
        *_named(gemms, "shared_gate_up"),
        *_activations(model, "shared_gate_up", tp),
        *_named(gemms, "shared_down", "shared_gate"),
        *([_move(model, "shared_add", 3 * hidden, experts.layers)] if experts.shared_inter else []),
    ]
