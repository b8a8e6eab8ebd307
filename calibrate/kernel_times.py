"""What the operators of a step take at a GPU's prices, one by one.

It knows kernels, the groups of GPUs between which collectives run and the links that these cross; no host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from calibrate.engine import EngineSpec
from calibrate.layout import Parallelism
from calibrate.model import ModelSpec
from calibrate.operator_spec import Operator
from calibrate.operators import FIRST, LAST, AttentionGroup, attention_groups, attention_operators, step_operators
from calibrate.traffic import places

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from calibrate.kernels.chunks import ChunkPrices, Chunks
    from calibrate.kernels.heads import HeadShape
    from calibrate.kernels.routing import Skew
    from calibrate.prices import Prices

    Floats = NDArray[np.float64]


NETWORK_LATENCY_S = 20e-6
NETWORK_SHARE, SEND_SHARE = 0.95, 0.72
"""What crosses between nodes reaches of an adapter's bandwidth; one GPU's send to another does. docs/calibration.md"""
QUANTISED = ("fp8", "fp8_block", "nvfp4", "int8")
"""Weights that are multiplied with quantised activations."""
MANY_KEYS = 16384.0
"""Cached tokens of a chunk from which making their keys takes time in proportion to them."""


def head_shapes(group: AttentionGroup) -> tuple[HeadShape, HeadShape]:
    """The attention kernels of a group of layers: that of prompt chunks, and that of decoding sequences.

    Of latent attention these differ: chunks attend to 16-bit keys and values of every head, made from the latents,
    decoding tokens to the cached latents themselves. Ranks that share the tokens of a cache decode with the query heads
    of them all. Chunked attention runs the kernels of full attention, on each
    chunk of a sequence as if it were one (`make_local_attention_virtual_batches` of vLLM).
    """
    from calibrate.kernels.heads import HeadShape

    window = 0 if group.chunked else group.window
    heads, dtype, size = group.heads, group.kv_dtype, group.head_dim
    if (latent := group.latent) is None:
        same = HeadShape(dtype, heads, group.kv_heads, size, size, window)
        return same, replace(same, heads=heads * group.dcp)
    return (
        HeadShape("bf16", heads, heads, latent.key, latent.value, window),
        HeadShape(dtype, heads * group.dcp, 1, latent.cached, latent.kv_rank, window),
    )


def operator_s(op: Operator, rows: Floats, layout: Parallelism, prices: Prices, stage: int = 0) -> Floats:
    """Seconds of one of the operator's kernels for every number of rows (at least 1 is priced)."""
    import numpy as np

    rows = np.maximum(rows, 1.0)
    if op.family == "gemm":
        return prices.gemm_s(op.weights, rows, *op.shape)
    if op.family == "moe":
        return prices.moe_s(op.weights, *experts_point(op, rows, layout, prices))
    if op.family == "elementwise":
        return prices.elementwise_s(op.name, rows, *op.shape)
    size, gpus = buffer_bytes(op, rows), len(layout.ranks(op.group, stage))
    seconds = prices.collective_s(op.family, size, gpus)
    nodes = layout.nodes(op.group, prices.gpu, stage)
    return seconds if nodes == 1 else np.maximum(seconds, across_s(op, size, layout, gpus, nodes))


def experts_point(
    op: Operator, rows: Floats, layout: Parallelism, prices: Prices
) -> tuple[Floats, int, int, int, int, int, int, Skew]:
    """What `Prices.moe_s` is asked for a layer of routed experts, from its rows on.

    Where all tokens are gathered on every GPU, or lie there anyway, its kernel is given them all, as it was when it was
    timed, and leaves out what is not its own. DeepEP brings a GPU only the rows of its experts: a layer of these alone.
    """
    from calibrate.kernels.routing import loads

    hidden, inter, experts, topk = op.shape
    if op.rows == "tokens" or layout.all2all_backend == "allgather_reducescatter":
        return rows, hidden, inter, experts, topk, layout.expert_tp, layout.expert_ep, layout.skew
    _, fullest = loads(layout.skew or prices.skew(experts), rows, experts, topk, layout.expert_ep)
    return fullest, hidden, inter, layout.experts_here(experts), 1, 1, 1, "balanced"


def buffer_bytes(op: Operator, rows: Floats) -> Floats:
    """Bytes of a collective's whole buffer, as `measurements.py` counts them: what is reduced, or what was gathered; of
    an all-to-all what a GPU sends, to itself too."""
    from calibrate.kernels.gemm import ACTIVATION_BYTES

    if op.family.startswith(("dispatch", "combine")):
        return rows * op.bytes_per_row / op.kernels
    size: Floats = rows * ACTIVATION_BYTES * op.shape[0]
    return size


def across_s(op: Operator, size: Floats, layout: Parallelism, gpus: int, nodes: int) -> Floats:
    """Seconds in which the adapters of one GPU bring what a collective on `nodes` nodes sends between them.

    Of a buffer that is gathered or scattered every node needs the other nodes' parts once, which its GPUs share. A
    token goes to each of its experts, or once to every node that has some (DeepEP for high throughput).
    """
    network = layout.network
    assert network is not None, "check_nodes"
    sharing = min(network.gpus, layout.tp) if op.group == "stage" else network.gpus
    share, crossing = NETWORK_SHARE, size * (nodes - 1) / gpus
    if op.family == "sendrecv":
        share, crossing = SEND_SHARE, size
    elif op.family.startswith(("dispatch", "combine")):
        crossing = size * (nodes - 1) / nodes
        if op.family.endswith("high_throughput"):
            crossing *= places(nodes, op.shape[1]) / places(gpus, op.shape[1])
    seconds: Floats = NETWORK_LATENCY_S + crossing * sharing / (share * network.bandwidth_bytes_per_s)
    return seconds


def fusion_saves(
    reduce: Operator, norm: Operator, rows: Floats, layout: Parallelism, engine: EngineSpec, prices: Prices
) -> Floats:
    """Seconds that one all-reduce and the norm after it take less in one kernel: the norm's launch, and what the other
    all-reduce takes more. Nothing for buffers beyond the engine's limit."""
    import numpy as np

    limit = engine.fi_allreduce_fusion_max_size_mb or engine.fused_mib.get(layout.tp, 0.0)
    size = buffer_bytes(reduce, np.maximum(rows, 1.0))
    fused = prices.fused_allreduce_s(size, layout.tp)
    if fused is None:
        return np.zeros_like(rows)
    launch = operator_s(norm, np.ones(1), layout, prices)
    saved = operator_s(reduce, rows, layout, prices) + launch - fused
    return np.where(size <= limit * 2**20, np.maximum(saved, 0.0), 0.0)


def with_keys(beside: Sequence[Operator], prices: Chunks, layout: Parallelism, each: Prices) -> ChunkPrices:
    """The chunks' prices of one layer with what makes keys and values of their own and of their cached tokens, and what
    brings the latents of these from other ranks (its latency spread over twice MANY_KEYS)."""
    import numpy as np

    from calibrate.kernels.chunks import ChunkPrices

    assert isinstance(prices, ChunkPrices), "no model has latent and chunked attention"

    def seconds(tokens: Floats) -> Floats:
        parts = [operator_s(op, tokens, layout, each) for op in beside if op.rows == "chunk_keys"]
        total: Floats = np.sum(parts, axis=0)
        return total

    few, many = seconds(np.array([MANY_KEYS, 2.0 * MANY_KEYS]))
    context = np.array([2.0 * MANY_KEYS])
    brought = sum(float(operator_s(op, context, layout, each)[0]) for op in beside if op.rows == "chunk_context")
    return prices.plus(seconds, float(many - few) / MANY_KEYS + brought / context[0])


def layer_launches(model: ModelSpec, layout: Parallelism, engine: EngineSpec, stage: int = 0) -> float:
    """Kernels that the host launches, one by one, for a layer of a pipeline stage of a step with prompts, on average.

    Activations are quantised by a kernel before a GEMM or experts that multiply them so; attention is two, one of which
    writes the cache. What one call launches together, like the kernels of a layer of experts, counts as one; an
    all-reduce that is fused with its norm counts beside it, as it did where the time of a launch was found.
    """
    operators = (*step_operators(model, layout, stage), *attention_operators(model, layout, stage))
    counted = [op for op in operators if op.rows != "decodes" and op.name not in (*FIRST, *LAST)]
    quantised = QUANTISED if not engine.fuses_quantisation else ("fp8_block", "int8")
    kernels = sum(op.kernels * (1 + (op.weights in quantised)) for op in counted)
    return kernels / layout.stages(model.layers)[stage] + 2


def kernels_s(
    model: ModelSpec,
    layout: Parallelism,
    prices: Prices,
    chunks: Sequence[tuple[int, int]],
    decodes: int,
    kv_tokens: int,
) -> float:
    """Seconds of the kernels of one step, without host, padding or gaps: to compare with measured steps. Behind windows
    as if all decodes were equally long."""
    import numpy as np

    from calibrate.kernels.chunks import LocalChunks

    new, beside = sum(q for q, _ in chunks), attention_operators(model, layout)
    rows = {"tokens": decodes + new, "samples": decodes + len(chunks), "decodes": decodes}
    total = 0.0
    for op in (*step_operators(model, layout), *(op for op in beside if op.rows == "decodes" and decodes)):
        total += op.kernels * float(operator_s(op, np.array([float(rows[op.rows])]), layout, prices)[0])
    for g in attention_groups(model, layout):
        of_chunks, decoding = head_shapes(g)
        if chunks:
            priced = prices.prefill(of_chunks, max(q for q, _ in chunks), len(chunks))
            priced = with_keys(beside, priced, layout, prices) if beside else priced
            total += g.layers * (LocalChunks(priced, g.window) if g.chunked else priced).together(chunks)
        if decodes:
            total += g.layers * prices.decode(decoding, decodes).seconds(decodes, g.seen(decodes, kv_tokens) / g.dcp)
    return total
