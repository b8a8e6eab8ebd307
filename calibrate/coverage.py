"""How much of a run's time was priced outside what had been measured. Knows steps as columns, nothing of requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from calibrate.cost import CompiledCost, local_tokens, padded_tokens
from calibrate.engine import EngineSpec
from calibrate.kernel_times import buffer_bytes, experts_point, head_shapes, operator_s
from calibrate.layout import Parallelism
from calibrate.model import ModelSpec
from calibrate.operator_spec import Operator
from calibrate.operators import attention_groups, step_operators
from calibrate.prices import Prices

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]


def outside_shares(
    model: ModelSpec,
    layout: Parallelism,
    engine: EngineSpec,
    prices: Prices,
    cost: CompiledCost,
    steps: Iterable[Mapping[str, Floats]],
    stage: int = 0,
) -> dict[str, float]:
    """Family -> the share (0..1, 4 digits) of all step time that its kernels took outside the measured range, if any.

    `steps` are columns of equal length: start_s, end_s, steps, prefill_requests, prefill_tokens, decodes, kv_tokens and
    draft_tokens, of runs of equal steps of one pipeline stage. A step's attention is judged by its mean context and
    mean chunk, what data parallel ranks do together as if all had as many tokens; what a draft model does is not.
    """
    layout, tokens = layout.all2all(decoding=True), np.arange(engine.max_num_batched_tokens + 1)
    rows = {
        "tokens": padded_tokens(engine, local_tokens(layout, tokens)).astype(np.float64),
        "samples": np.arange(len(cost.samples_s), dtype=np.float64),
    }
    rows["group"] = layout.dp * layout.pcp * rows["tokens"]
    outside: dict[str, dict[str, Floats]] = {name: {} for name in rows}
    for op in step_operators(model, layout, stage):
        n = rows[op.rows]
        seconds = np.where(_inside(op, n, layout, prices), 0.0, op.kernels * operator_s(op, n, layout, prices))
        seconds[0] = 0.0
        table = outside[op.rows]
        kind = op.family if op.family in ("gemm", "moe", "elementwise") else "collective"
        table[kind] = table.get(kind, 0.0) + seconds
    total, lost = 0.0, {family: 0.0 for tables in outside.values() for family in tables}
    lost |= dict.fromkeys(("prefill_attention", "decode_attention"), 0.0)
    for block in steps:
        names = ("decodes", "prefill_requests", "steps", "draft_tokens")
        decodes, chunks, repeats, drafts = (block[c].astype(np.int64) for c in names)
        verified = decodes + drafts
        at = {"tokens": verified + block["prefill_tokens"].astype(np.int64), "samples": verified + chunks}
        at["group"] = at["tokens"]
        total += float((block["end_s"] - block["start_s"]).sum())
        for name, tables in outside.items():
            for family, seconds in tables.items():
                lost[family] += float((seconds[at[name]] * repeats).sum())
        for family, seconds in _attention(model, layout, prices, cost, block, at, stage).items():
            lost[family] += float(seconds.sum())
    shares = {family: round(seconds / total, 4) for family, seconds in lost.items()} if total else {}
    return {family: share for family, share in shares.items() if share}


def _attention(
    model: ModelSpec,
    layout: Parallelism,
    prices: Prices,
    cost: CompiledCost,
    block: Mapping[str, Floats],
    at: Mapping[str, NDArray[np.int64]],
    stage: int,
) -> dict[str, Floats]:
    """Seconds of attention outside the measured range in every row. What decodes and other kernels leave of a step with
    chunks is their attention."""
    decodes, chunks, repeats = block["decodes"], np.maximum(block["prefill_requests"], 1.0), block["steps"]
    kv_tokens = block["kv_tokens"] + decodes * (repeats - 1) / 2
    decode_s = np.zeros(len(decodes))
    for n in np.unique(decodes[decodes > 0]).astype(int):
        here = decodes == n
        upto, a, b = (np.array(column) for column in zip(*cost.decode[n], strict=True))
        piece = np.searchsorted(upto, kv_tokens[here])
        decode_s[here] = a[piece] + b[piece] * kv_tokens[here]
        for window, reads in zip(model.windows, cost.windows, strict=True):
            each = kv_tokens[here] / n
            seen = n * (each % window.size if window.chunked else np.minimum(each, window.size))
            upto, a, b = (np.array(column) for column in zip(*reads.lines[n], strict=True))
            piece = np.searchsorted(upto, seen)
            decode_s[here] += a[piece] + b[piece] * seen
    duration = (block["end_s"] - block["start_s"]) / repeats
    lookups = np.array(cost.tokens_s)[at["tokens"]] + np.array(cost.samples_s)[at["samples"]]
    lookups += np.array(cost.after_s)[(decodes + block["prefill_requests"]).astype(np.int64)]
    prefill_s = np.where(block["prefill_requests"] > 0, np.maximum(duration - lookups - decode_s, 0.0), 0.0)
    out = {"decode_attention": np.zeros(len(decodes)), "prefill_attention": np.zeros(len(decodes))}
    groups = attention_groups(model, layout, stage)
    layers = sum(g.layers for g in groups)
    mean_q = np.maximum(block["prefill_tokens"] / chunks, 1.0)
    n = np.maximum(decodes, 1.0)
    for g in groups:
        of_chunks, decoding = head_shapes(g)
        for family, seconds, shape, point in (
            ("decode_attention", decode_s, decoding, (n, kv_tokens / n / g.dcp)),
            ("prefill_attention", prefill_s, of_chunks, (chunks, mean_q)),
        ):
            sizes = (shape.heads, shape.kv_heads, shape.head_dim, shape.value_dim, shape.window)
            inside = prices.inside(family, shape.kv_dtype, *point, *sizes)
            out[family] += np.where(inside, 0.0, g.layers / layers * seconds * repeats)
    return out


def _inside(op: Operator, rows: Floats, layout: Parallelism, prices: Prices) -> NDArray[np.bool_]:
    rows = np.maximum(rows, 1.0)
    if op.family == "gemm":
        return prices.inside("gemm", op.weights, rows, *op.shape)
    if op.family == "moe":
        return prices.inside("moe", op.weights, *experts_point(op, rows, layout, prices)[:-1])
    if op.family == "elementwise":
        return prices.inside("elementwise", op.name, rows, *op.shape)
    return prices.inside("collective", op.family, buffer_bytes(op, rows), len(layout.ranks(op.group)))
