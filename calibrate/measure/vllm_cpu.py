"""vLLM's kernels on a CPU, called as vLLM 0.32 calls them where its CPU build is installed.

Sources: vllm/v1/attention/backends/cpu_attn.py (attention over its paged cache), vllm/model_executor/layers/utils.py
(weights packed for oneDNN or, small ones, for its own AMX kernel), forward_cpu and vllm/ir/ops of the rest. Importing
vLLM takes some ten seconds, once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from calibrate.measure.kit import Kit
from calibrate.measure.wrapped import EPS, Attention, Batch, Functions, Linear, Rope, pages

BLOCK = 128  # tokens of a block, vLLM's default there


def attend(kit: Kit, batch: Batch) -> Attention:
    """All sequences in one call; how they are split over the cores is planned once, as for all layers of a step."""
    from vllm import __version__, _custom_ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    torch = kit.torch
    count, table, lengths = pages(kit, batch, BLOCK)
    starts = kit.whole([batch.q * i for i in range(len(batch.lengths) + 1)])
    plan = _custom_ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(batch.lengths),
        num_heads=batch.heads,
        num_kv_heads=batch.kv_heads,
        head_dim=batch.dim,
        seq_lens=lengths,
        dtype=kit.dtype,
        query_start_loc=starts,
        causal=True,
        sliding_window_size=-1,
        isa=_get_attn_isa(kit.dtype, BLOCK, batch.dim),
        enable_kv_split=True,
    )

    def run(query: Any, cache: Any) -> Any:
        keys, values = cache[0].chunk(2, dim=2)
        out = torch.empty_like(query)
        _custom_ops.cpu_attention_with_kv_cache(
            query=query,
            key_cache=keys,
            value_cache=values,
            output=out,
            query_start_loc=starts,
            seq_lens=lengths,
            scale=batch.dim**-0.5,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=table,
            softcap=0.0,
            scheduler_metadata=plan,
            s_aux=None,
        )
        return out

    caches = kit.pool().sets((count, batch.kv_heads, 2 * BLOCK, batch.dim))
    return Attention(f"vllm {__version__} cpu_attn, paged", caches, run)


def linear(kit: Kit) -> Linear:
    """Multiplications with weights that are packed before, as a model's are when it is loaded."""
    from vllm import __version__
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    def bind(weight: Any, bias: Any = None) -> Callable[[Any], Any]:
        layer = SimpleNamespace(weight=weight, bias=bias)
        dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
        return partial(layer.cpu_linear, weight=weight, bias=layer.bias)

    return Linear(f"vllm {__version__}", "vllm linear", bind)


def functions(kit: Kit) -> Functions:
    """Norms and activations, which vLLM leaves to torch there, and its rotation."""
    from vllm import __version__, _custom_ops, ir

    silu = kit.torch.nn.functional.silu

    def add_norm(x: Any, residual: Any, weight: Any) -> tuple[Any, Any]:
        normed, total = ir.ops.fused_add_rms_norm.maybe_inplace(x, residual, weight, EPS, None)
        return normed, total

    def rope(heads: Any, state: Rope) -> Any:
        query, key = heads[:, :-1].flatten(1), heads[:, -1:].flatten(1)  # views: any split rotates the same
        _custom_ops.rotary_embedding(state.positions, query, key, heads.shape[-1], state.table, True)
        return heads

    def activate(x: Any) -> Any:
        half = x.shape[-1] // 2
        return silu(x[..., :half]) * x[..., half:]

    return Functions(f"vllm {__version__}", "vllm elementwise", add_norm, rope, activate)
