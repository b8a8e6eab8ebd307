"""Attention of a batch over its cached keys and values, by the first library that is there and works.

Each library gives the same: `Attention`, whose `run(query, cache)` attends [tokens, heads, dim] queries to one of
`caches`. Single kernels and whole layers run it. FlashAttention, vLLM's copy of it and FlashInfer read paged caches;
they are called as their documentation says and were not run where this was written. vLLM's of a CPU (`vllm_cpu.py`)
were.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any

from calibrate.measure.kit import Kit, Prepared, each
from calibrate.measure.system import installed
from calibrate.measure.wrapped import Attention, Batch, pages

PAGE = 16  # tokens of a block, as vLLM's default
FLASH_PAGE = 256  # FlashAttention 2 takes multiples of this only
WORKSPACE = 256 * 2**20  # bytes that FlashInfer plans with


def attention(kit: Kit, batch: Batch) -> tuple[Attention, str]:
    """The batch's attention and the name of its library."""
    for name, make in (LIBRARIES if kit.cuda else CPU_LIBRARIES).items():
        if name == "torch" or (installed(name) and f"{name} attention" not in kit.failed):
            try:
                return make(kit, batch), name
            except (ImportError, AttributeError, NotImplementedError, OSError) as error:
                kit.failed[f"{name} attention"] = str(error)
    raise AssertionError("torch is always there")


def measured_attention(kit: Kit, sizes: Mapping[str, Any]) -> Prepared:
    """Calls of a row of prefill_attention, decode_attention or decode_skew."""
    groups: tuple[tuple[int, int], ...] = ((sizes["sequences"], sizes["context"]),)
    if "longer" in sizes:
        short = sizes["sequences"] - sizes["longer"]
        groups = ((short, sizes["context"]), (sizes["longer"], sizes["longer_context"]))
    groups = tuple(group for group in groups if group[0])
    batch = Batch(groups, sizes.get("q", 1), sizes["heads"], sizes["kv_heads"], sizes["head_dim"])
    chosen, name = attention(kit, batch)
    query = kit.random(len(batch.lengths) * batch.q, batch.heads, batch.dim)
    calls = each(chosen.run, [(query, cache) for cache in chosen.caches])
    return Prepared(calls, chosen.kernel, library=None if name == "torch" else f"{name} attention")


def torch_attention(kit: Kit, batch: Batch) -> Attention:
    """scaled_dot_product_attention over caches [sequences, keys, kv_heads, dim]: a call a length, results joined."""
    torch = kit.torch
    sdpa = torch.nn.functional.scaled_dot_product_attention
    q, heads, kv_heads, dim = batch.q, batch.heads, batch.kv_heads, batch.dim
    shapes = [(n, context + q, kv_heads, dim) for n, context in batch.groups for _ in "kv"]
    masks = [_mask(kit, q, context) for _, context in batch.groups]
    tokens = [n * q for n, _ in batch.groups]

    def one(query: Any, keys: Any, values: Any, context: int, mask: Any) -> Any:
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        if q == 1:  # the heads that share a KV head are its rows: read once
            query = query.view(-1, kv_heads, heads // kv_heads, dim)
            return sdpa(query, keys, values).reshape(-1, heads, dim)
        query = query.view(-1, q, heads, dim).transpose(1, 2)
        grouped = heads != kv_heads
        out = sdpa(query, keys, values, attn_mask=mask, is_causal=context == 0, enable_gqa=grouped)
        return out.transpose(1, 2).reshape(-1, heads, dim)

    def run(query: Any, cache: Any) -> Any:
        parts = [
            one(part, cache[2 * i], cache[2 * i + 1], batch.groups[i][1], masks[i])
            for i, part in enumerate(query.split(tokens))
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    return Attention(f"{kit.library} SDPA", kit.pool().sets(*shapes), run)


def _mask(kit: Kit, q: int, context: int) -> Any:
    """What a chunk with history needs: causal from the lower right corner. On a GPU as the bias that Flash knows."""
    if q == 1 or context == 0:
        return None
    if kit.cuda:
        from torch.nn.attention.bias import causal_lower_right

        return causal_lower_right(q, context + q)
    ones = kit.torch.ones(q, context + q, dtype=kit.torch.bool, device=kit.device)
    return ones.tril(context)


def naive_attention(kit: Kit, batch: Batch) -> Attention:
    """Two multiplications and a softmax, the scores in memory, KV heads repeated: what fused kernels avoid."""
    torch, q, dim = kit.torch, batch.q, batch.dim
    fused = torch_attention(kit, batch)
    repeat = batch.heads // batch.kv_heads
    masks = [torch.ones(q, c + q, dtype=torch.bool, device=kit.device).tril(c) for _, c in batch.groups]

    def one(query: Any, keys: Any, values: Any, mask: Any) -> Any:
        query = query.view(-1, q, batch.heads, dim).transpose(1, 2)
        keys, values = (kept.repeat_interleave(repeat, 2).transpose(1, 2) for kept in (keys, values))
        scores = (query @ keys.transpose(-1, -2) * dim**-0.5).masked_fill(~mask, float("-inf"))
        return (scores.softmax(-1) @ values).transpose(1, 2).reshape(-1, batch.heads, dim)

    def run(query: Any, cache: Any) -> Any:
        split = query.split([n * q for n, _ in batch.groups])
        return torch.cat([one(p, cache[2 * i], cache[2 * i + 1], masks[i]) for i, p in enumerate(split)])

    return Attention(f"{kit.library} matmul and softmax", fused.caches, run)


def _flash_attn(kit: Kit, batch: Batch) -> Attention:
    """flash_attn.flash_attn_with_kvcache: all sequences in one call, paged by 256 tokens."""
    import flash_attn

    caches, table, lengths = _paged(kit, batch, FLASH_PAGE)
    call, sequences = flash_attn.flash_attn_with_kvcache, len(batch.lengths)

    def run(query: Any, cache: Any) -> Any:
        query = query.view(sequences, batch.q, batch.heads, batch.dim)
        out = call(query, cache[0], cache[1], cache_seqlens=lengths, block_table=table, causal=True)
        return out.view(-1, batch.heads, batch.dim)

    return Attention(f"flash_attn {flash_attn.__version__}, paged", caches, run)


def _vllm(kit: Kit, batch: Batch) -> Attention:
    """vllm.vllm_flash_attn.flash_attn_varlen_func, in the version that vLLM takes on this device."""
    import vllm
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    version = _vllm_version(kit)
    caches, table, lengths = _paged(kit, batch, PAGE)
    starts = kit.whole([batch.q * i for i in range(len(batch.lengths) + 1)])

    def run(query: Any, cache: Any) -> Any:
        return flash_attn_varlen_func(
            query,
            cache[0],
            cache[1],
            max_seqlen_q=batch.q,
            cu_seqlens_q=starts,
            max_seqlen_k=max(batch.lengths),
            seqused_k=lengths,
            block_table=table,
            causal=True,
            fa_version=version,
        )

    return Attention(f"vllm {vllm.__version__} flash_attn {version}, paged", caches, run)


def _vllm_cpu(kit: Kit, batch: Batch) -> Attention:
    from calibrate.measure.vllm_cpu import attend

    return attend(kit, batch)


def _vllm_version(kit: Kit) -> int:
    from vllm.vllm_flash_attn.flash_attn_interface import is_fa_version_supported

    hopper = kit.torch.cuda.get_device_capability()[0] == 9
    return 3 if hopper and is_fa_version_supported(3) else 2


def _flashinfer(kit: Kit, batch: Batch) -> Attention:
    """FlashInfer's batch wrappers; decode on tensor cores. The plan is made once, as an engine does for all layers."""
    import flashinfer

    torch = kit.torch
    caches, _, _ = _paged(kit, batch, PAGE)
    pages = [-(-length // PAGE) for length in batch.lengths]
    starts = kit.whole([0, *accumulate(pages)])
    used = kit.whole(range(sum(pages)))
    last = kit.whole([(length - 1) % PAGE + 1 for length in batch.lengths])
    space = torch.empty(WORKSPACE, dtype=torch.uint8, device=kit.device)
    shape = (batch.heads, batch.kv_heads, batch.dim, PAGE)
    kinds = {"q_data_type": kit.dtype, "kv_data_type": kit.dtype}
    wrapper: Any
    if batch.q == 1:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(space, "NHD", use_tensor_cores=True)
        wrapper.plan(starts, used, last, *shape, **kinds)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(space, "NHD")
        queries = kit.whole([batch.q * i for i in range(len(pages) + 1)])
        wrapper.plan(queries, starts, used, last, *shape, causal=True, **kinds)
    name = f"flashinfer {flashinfer.__version__}, paged"
    return Attention(name, caches, lambda query, cache: wrapper.run(query, (cache[0], cache[1])))


def _paged(kit: Kit, batch: Batch, page: int) -> tuple[list[Any], Any, Any]:
    """Caches [pages, page, kv_heads, dim] twice, the pages of every sequence in a row, and the lengths."""
    count, table, lengths = pages(kit, batch, page)
    shape = (count, page, batch.kv_heads, batch.dim)
    return kit.pool().sets(shape, shape), table, lengths


LIBRARIES: dict[str, Callable[[Kit, Batch], Attention]] = {
    "vllm": _vllm,
    "flash_attn": _flash_attn,
    "flashinfer": _flashinfer,
    "torch": torch_attention,
}
"""In order of preference: what vLLM itself runs first."""
CPU_LIBRARIES: dict[str, Callable[[Kit, Batch], Attention]] = {"vllm": _vllm_cpu, "torch": torch_attention}
