"""What is timed computes what it says."""

from __future__ import annotations

import sys
import types
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest

from calibrate.measure.attention import (
    _flash_attn,
    _flashinfer,
    _vllm,
    naive_attention,
    torch_attention,
)
from calibrate.measure.collectives import operation
from calibrate.measure.experts import _grouped, _loop, moe, routing
from calibrate.measure.kit import ROTATE, Kit, NoRoomError, Pool
from calibrate.measure.layers import functions
from calibrate.measure.stack import Stack
from calibrate.measure.wrapped import Batch
from tests.calibrate.measure.tiny import TINY, close


def test_rotation_reads_more_than_the_cache_holds(torch: Any) -> None:
    pool = Pool(torch.arange(100_000), 5_000)
    sets = pool.sets((10, 30), (7,))
    assert [t.shape for t in sets[0]] == [(10, 30), (7,)]
    assert sum(t.numel() for one in sets for t in one) > ROTATE * 5_000 * 0.5
    starts = [int(t.flatten()[0]) for one in sets for t in one]
    assert all(a < b for a, b in pairwise(starts))  # none overlaps the one before
    assert starts[1] >= 300
    assert len(pool.sets((60_000,))) == 1
    with pytest.raises(NoRoomError):
        pool.sets((60_000,), (60_000,))
    assert int(pool.following(70_000)[0]) == 0
    assert int(pool.following(40_000)[0]) == 0  # the end is too near: from the start again
    assert int(pool.following(10)[0]) == 40_064  # aligned


BATCHES = [
    Batch(((2, 0),), 7, 4, 2, 16),
    Batch(((1, 21),), 5, 4, 4, 16),
    Batch(((3, 33),), 1, 8, 2, 16),
    Batch(((3, 4), (2, 300)), 1, 4, 1, 16),
    Batch(((1, 3), (2, 40)), 6, 4, 2, 16),
]


@pytest.mark.parametrize("batch", BATCHES)
def test_attention_attends(kit: Kit, batch: Batch) -> None:
    """Against a loop over tokens and heads."""
    chosen = torch_attention(kit, batch)
    query, cache = kit.random(len(batch.lengths) * batch.q, batch.heads, batch.dim) * 20, chosen.caches[0]
    out = chosen.run(query, cache)
    token = 0
    for group, (sequences, context) in enumerate(batch.groups):
        for sequence in range(sequences):
            keys, values = cache[2 * group][sequence], cache[2 * group + 1][sequence]
            assert len(keys) == context + batch.q
            for new in range(batch.q):
                seen = context + new + 1
                for head in range(batch.heads):
                    shared = head // (batch.heads // batch.kv_heads)
                    scores = keys[:seen, shared] @ query[token, head] / batch.dim**0.5
                    expected = scores.softmax(0) @ values[:seen, shared]
                    close(out[token, head], expected)
                token += 1
    close(naive_attention(kit, batch).run(query, cache), out)


def unpaged(query: Any, pages: tuple[Any, Any], rows: list[list[int]], lengths: list[int], q: int) -> Any:
    """What a paged kernel has to give: [tokens, heads, dim]."""
    out = []
    for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        keys, values = (
            kept[row].flatten(0, 1)[:length].repeat_interleave(query.shape[1] // kept.shape[2], 1) for kept in pages
        )
        mine = query[i * q : (i + 1) * q]
        scores = (mine.transpose(0, 1) @ keys.permute(1, 2, 0)) / query.shape[2] ** 0.5
        hidden = mine.new_ones(q, length).tril(length - q) == 0
        out.append((scores.masked_fill(hidden, float("-inf")).softmax(-1) @ values.transpose(0, 1)).transpose(0, 1))
    return mine.new_tensor([]) if not out else __import__("torch").cat(out)


class Wrapper:
    """FlashInfer's batch wrappers, as documented: CSR page tables."""

    def __init__(self, space: Any, layout: str, use_tensor_cores: bool = False) -> None:
        assert layout == "NHD"

    def run(self, query: Any, cache: tuple[Any, Any]) -> Any:
        starts, pages, last, (heads, kv_heads, dim, page) = self.planned
        assert query.shape[1:] == (heads, dim)
        assert cache[0].shape[1:] == (page, kv_heads, dim)
        rows = [pages[a:b].tolist() for a, b in pairwise(starts.tolist())]
        lengths = [(len(row) - 1) * page + int(end) for row, end in zip(rows, last, strict=True)]
        return unpaged(query, cache, rows, lengths, len(query) // len(rows))


class Decode(Wrapper):
    def plan(self, starts: Any, pages: Any, last: Any, *shape: int, q_data_type: Any, kv_data_type: Any) -> None:
        self.planned = starts, pages, last, shape


class Prefill(Wrapper):
    def plan(
        self,
        queries: Any,
        starts: Any,
        pages: Any,
        last: Any,
        *shape: int,
        causal: bool,
        q_data_type: Any,
        kv_data_type: Any,
    ) -> None:
        assert causal
        assert len({b - a for a, b in pairwise(queries.tolist())}) == 1
        self.planned = starts, pages, last, shape


def flash_attn_with_kvcache(
    q: Any, k_cache: Any, v_cache: Any, cache_seqlens: Any, block_table: Any, causal: bool
) -> Any:
    assert causal
    assert k_cache.shape[1] % 256 == 0
    out = unpaged(q.flatten(0, 1), (k_cache, v_cache), block_table.tolist(), cache_seqlens.tolist(), q.shape[1])
    return out.view(q.shape)


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    max_seqlen_q: int,
    cu_seqlens_q: Any,
    max_seqlen_k: int,
    seqused_k: Any,
    causal: bool,
    block_table: Any,
    fa_version: int,
) -> Any:
    assert causal
    assert fa_version == 2
    assert cu_seqlens_q.diff().tolist() == [max_seqlen_q] * len(seqused_k)
    assert max_seqlen_k == int(seqused_k.max())
    return unpaged(q, (k, v), block_table.tolist(), seqused_k.tolist(), max_seqlen_q)


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch, torch: Any) -> None:
    """Stand-ins with the documented signatures of kernel libraries that need a GPU."""

    def module(name: str, **members: Any) -> None:
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(__version__="9.9", **members))

    module("flash_attn", flash_attn_with_kvcache=flash_attn_with_kvcache)
    module("flashinfer", BatchDecodeWithPagedKVCacheWrapper=Decode, BatchPrefillWithPagedKVCacheWrapper=Prefill)
    module("vllm")
    module("vllm.vllm_flash_attn", flash_attn_varlen_func=flash_attn_varlen_func)
    module("vllm.vllm_flash_attn.flash_attn_interface", is_fa_version_supported=lambda version: version == 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr("calibrate.measure.attention.WORKSPACE", 16)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.usefixtures("libraries")
def test_paged_libraries_get_the_pages_of_every_sequence(kit: Kit, batch: Batch) -> None:
    query = kit.random(len(batch.lengths) * batch.q, batch.heads, batch.dim) * 20
    for make, page in ((_flash_attn, 256), (_vllm, 16), (_flashinfer, 16)):
        chosen = make(kit, batch)
        keys, values = cache = chosen.caches[0]
        starts = [0, *accumulate(-(-length // page) for length in batch.lengths)]
        rows = [list(range(a, b)) for a, b in pairwise(starts)]
        assert keys.shape == values.shape == (starts[-1], page, batch.kv_heads, batch.dim)
        expected = unpaged(query, (keys, values), rows, batch.lengths, batch.q)
        close(chosen.run(query, cache), expected)


def test_experts_are_routed_as_the_skew_says(torch: Any) -> None:
    def counts(skew: str) -> list[int]:
        chosen = routing(torch, 96, 16, 4, skew)
        assert all(len(set(row)) == 4 for row in chosen.tolist())
        return chosen.flatten().bincount(minlength=16).tolist()

    assert counts("balanced") == [24] * 16
    assert counts("touched=4") == [96] * 4 + [0] * 12
    assert sum(counts("uniform")) == 384
    assert 24 < max(counts("uniform")) < 60


@pytest.mark.parametrize("skew", ["balanced", "uniform", "touched=2"])
def test_layers_of_experts_agree(kit: Kit, skew: str) -> None:
    """The loop and the grouped kernel against each token's experts one by one."""
    torch, functional = kit.torch, kit.torch.nn.functional
    sizes = {"tokens": 6, "hidden": 32, "inter": 32, "experts": 8, "topk": 2, "tp": 2, "ep": 1, "skew": skew}
    loop = _loop(kit, sizes).calls[0]
    x, (up, down) = loop.func.__closure__ and _activations(loop), loop.args
    chosen = routing(torch, 6, 8, 2, skew)
    expected = torch.zeros_like(x)
    for token, experts in enumerate(chosen.tolist()):
        for expert in experts:
            gate, linear = functional.linear(x[token], up[expert]).chunk(2)
            expected[token] += functional.linear(functional.silu(gate) * linear, down[expert]) / 2
    close(loop(), expected)
    grouped = _grouped(kit, sizes).calls[0]
    mine = _activations(grouped)
    mine.copy_(x)
    close(grouped(), expected)
    assert moe(kit, sizes).kernel.endswith("loop of experts")  # on a CPU


def _activations(call: Any) -> Any:
    """The tensor that a layer's call closes over."""
    free = dict(zip(call.func.__code__.co_freevars, call.func.__closure__, strict=True))
    return free["x"].cell_contents


def test_a_layer_norms_rotates_and_activates(kit: Kit) -> None:
    torch, run = kit.torch, functions(kit)
    x, residual, weight = kit.random(3, 8), kit.random(3, 8), kit.random(8)
    normed, total = run.add_norm(x, residual, weight)
    close(total, x + residual)
    close(normed, total / (total.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight)
    close(run.activate(x), torch.nn.functional.silu(x[:, :4]) * x[:, 4:])


@pytest.mark.parametrize("batch", [(2, 8, 0, 0, 0), (0, 0, 0, 3, 30), (1, 4, 12, 2, 20)])
def test_a_step_yields_a_token_for_every_sequence(kit: Kit, batch: tuple[int, int, int, int, int]) -> None:
    before = kit.pool().data.clone()
    stack = Stack(kit, TINY, batch)
    tokens = stack.step()
    assert tokens.shape == (batch[0] + batch[3],)
    assert int(tokens.max()) < 128
    assert len(stack.layers) == 2
    layer = Stack(kit, TINY, batch, layers=1).step()
    assert layer.shape == (batch[0] * batch[1] + batch[3], 64)
    assert bool(layer.isfinite().all())
    assert bool((kit.pool().data == before).all())  # what others read is not written to


def test_collectives_move_what_they_say(torch: Any, tmp_path: Path) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    try:
        for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
            operation(torch, dist, torch.device("cpu"), 1, op, 4096)()
    finally:
        dist.destroy_process_group()
