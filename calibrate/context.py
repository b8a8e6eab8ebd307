"""Context parallelism: GPUs that share the tokens of a KV cache (decode: `dcp`) or of a step (prefill: `pcp`). What
they send each other, and compute, beside what all layouts do, as operators.

Rules of vLLM 0.10.2 to 0.32.0: `_forward_with_dcp` of vllm/v1/attention/backends/flash_attn.py, `MLAAttention` of
vllm/model_executor/layers/attention/mla_attention.py, `cp_lse_ag_out_rs` of vllm/v1/attention/ops (dcp.py, common.py),
vllm/v1/attention/ops/pcp.py, vllm/v1/worker/gpu/pcp_manager.py. It knows no prices and no engines.
"""

from __future__ import annotations

from calibrate.layout import Group, Parallelism
from calibrate.model import ModelSpec
from calibrate.operator_spec import Operator, Rows

LSE_BYTES = 4


def sharing(model: ModelSpec, layout: Parallelism) -> list[Operator]:
    """Of all tokens of a step. With `dcp` and grouped heads: queries are gathered, attend to the rank's part of the
    cached tokens, and the parts' outputs are put together; new tokens attend to each other in a kernel of their own,
    whose result is merged. With `pcp` and latents: every rank keeps those of all tokens, and samples all sequences."""
    layers, size = model.layers, model.dtype_bytes
    found = []
    if layout.dcp > 1 and not model.latent:
        own = model.heads_per_rank(layout.tp)
        found += _put_together(layout, layers, own, model.head_dim, model.head_dim, size, "tokens")
        merge = 3 * own * model.head_dim  # two outputs in, one out; as a second kernel the one of the new tokens
        found.append(Operator("dcp_merge", "elementwise", "tokens", 2 * layers, (merge,), 0, 0, layers * merge * size))
    if layout.pcp > 1 and (latent := model.latent):
        for part in (latent.kv_rank, latent.rope):
            found.append(_gather("pcp_kv", layers, part, size, "group", "pcp", layout.pcp))
        found.append(_gather("pcp_hidden", 1, model.hidden, size, "group", "pcp", layout.pcp))
    return found


def latent_sharing(model: ModelSpec, layout: Parallelism) -> list[Operator]:
    """The same of latent attention with `dcp`: decoding tokens are dealt with as above, in the space of the latents;
    prompt chunks gather the latents of all their cached tokens."""
    if layout.dcp == 1 or model.latent is None:
        return []
    latent, layers, size = model.latent, model.layers, model.dtype_bytes
    heads = model.heads_per_rank(layout.tp)
    return [
        *_put_together(layout, layers, heads, latent.cached, latent.kv_rank, size, "decodes"),
        _gather("dcp_context", layers, latent.cached, size, "chunk_context", "dcp", layout.dcp),
    ]


def _put_together(
    layout: Parallelism, layers: int, heads: int, key: int, value: int, size: int, rows: Rows
) -> list[Operator]:
    """Queries of all ranks' heads, and outputs that are weighed by their log-sum-exp, summed, and scattered again."""
    ranks = layout.dcp
    outputs = ranks * heads * value
    sums = ranks * ranks * heads * LSE_BYTES // size
    moved = layers * outputs * size * (ranks - 1) / ranks
    return [
        _gather("dcp_query", layers, ranks * heads * key, size, rows, "dcp", ranks),
        _gather("dcp_lse", layers, sums, size, rows, "dcp", ranks),
        Operator("dcp_correct", "elementwise", rows, layers, (2 * outputs,), 0, 0, layers * 2 * outputs * size),
        Operator("dcp_out", "reducescatter", rows, layers, (outputs,), 0, 0, moved, group="dcp"),
    ]


def _gather(name: str, kernels: int, elements: int, size: int, rows: Rows, group: Group, ranks: int) -> Operator:
    """An all-gather whose whole buffer has `elements` a row."""
    moved = kernels * elements * size * (ranks - 1) / ranks
    return Operator(name, "allgather", rows, kernels, (elements,), 0, 0, moved, group=group)
