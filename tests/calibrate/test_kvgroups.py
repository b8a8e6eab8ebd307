"""What layers keep and how the block pool holds them, against vLLM's own log lines.

Facts of tokens per pool come from public logs; each names its source.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from calibrate.hardware import GIB
from calibrate.kvgroups import KVGroup, KVPool, kv_pool
from calibrate.model import ModelSpec
from calibrate.parts import Recurrent, Window
from calibrate.serving import unsimulated
from tests.calibrate.helpers import parts

# Qwen3.8-27B: 16 full layers (4 KV heads of 256), 48 gated delta nets (16 key and 48 value heads of 128)
DELTA = Recurrent(48, inputs=16_480, inner=6144, channels=10_240, kernel=4, state=48 * 128 * 128, state_bytes=4)


def pool(model: str, tp: int = 1, dcp: int = 1, pp: int = 1, **changes: object) -> KVPool:
    named = {k: changes.pop(k) for k in ("windows", "recurrent", "layers", "kv_heads", "head_dim") if k in changes}
    spec, _, _, engine = parts(model, "h100-sxm", **changes)  # type: ignore[arg-type]
    return kv_pool(replace(spec, **named), engine, tp, dcp, pp)  # type: ignore[arg-type]


def hybrid(tp: int, **options: object) -> KVPool:
    return pool("qwen3-32b", tp, preset="vllm-0.32", recurrent=DELTA, layers=64, kv_heads=4, head_dim=256, **options)


def test_one_group_of_full_layers() -> None:
    p = pool("llama-3.1-8b")
    assert [(g.kind, g.layers, g.block_size) for g in p.groups] == [("full", 32, 16)]
    assert p.block_bytes == 16 * 131_072
    assert (p.blocks(1), p.blocks(16), p.blocks(17)) == (1, 1, 2)


@pytest.mark.parametrize(
    ("model", "tp", "token_bytes"),
    [
        ("qwen3-235b-a22b", 4, 48_128),  # 4 KV heads on 4 GPUs (vllm-project/vllm#21348)
        ("qwen3-235b-a22b", 8, 48_128),  # ... and replicated on 8
        ("qwen2.5-7b", 1, 57_344),  # vllm-project/vllm#44594
        ("llama-2-7b", 1, 524_288),  # every head has its own
        ("kimi-k2", 8, 70_272),  # latents lie whole on every GPU (the recipe of Kimi-K2-Thinking)
        ("gemma-3-1b", 2, 26 * 2 * 256 * 2),  # one KV head
    ],
)
def test_bytes_of_a_token(model: str, tp: int, token_bytes: int) -> None:
    spec, _, _, engine = parts(model, "h100-sxm", max_model_len=512)
    assert kv_pool(spec, engine, tp).block_bytes == 16 * token_bytes


@pytest.mark.parametrize(
    ("dtype", "head_bytes"), [("fp8", 128), ("nvfp4", 72), ("int8_per_token_head", 132), ("int4_per_token_head", 68)]
)
def test_quantised_caches(dtype: str, head_bytes: int) -> None:
    spec, _, _, engine = parts("llama-3.1-8b", "h100-sxm", preset="vllm-0.32", kv_cache_dtype=dtype)
    assert kv_pool(spec, engine).block_bytes == 16 * 32 * 2 * 8 * head_bytes
    assert bool(unsimulated(spec)) == (dtype != "fp8")


def test_decode_context_parallel_ranks_share_the_tokens_of_a_block() -> None:
    # the same 46.80 GiB: 715,072 tokens, with 8 ranks 5,721,088 (the recipe of Kimi-K2-Thinking; blocks of 64)
    one, eight = pool("kimi-k2", 8, block_size=64), pool("kimi-k2", 8, dcp=8, block_size=64)
    assert one.block_bytes == eight.block_bytes
    blocks = round(46.80 * GIB) // one.block_bytes
    assert blocks * one.block_size == pytest.approx(715_072, rel=2e-4)  # 46.80 is rounded
    assert eight.block_size == 8 * one.block_size
    assert 715_072 % one.block_size == 5_721_088 % eight.block_size == 0


def test_windows_form_groups_of_their_own() -> None:
    # gpt-oss-120b: 5.38 GiB hold 78,384 tokens; every layer is charged, windowed or not (alvarobartt/hf-mem#60)
    p = pool("gpt-oss-120b", preset="vllm-0.10")
    assert [(g.kind, g.layers, g.size) for g in p.groups] == [("full", 18, 0), ("window", 18, 128)]
    assert int(5.38 * GIB) // p.block_bytes // len(p.groups) * 16 == pytest.approx(78_384, rel=1e-3)
    assert p.blocks(131_072) == 131_072 // 16 + -(-(127 + 8192) // 16) + 1
    assert p.blocks(100) == 7 + 7 + 1  # never more than the sequence, but for the block that a window begins in


def test_groups_are_cut_alike() -> None:
    two_to_one = Window(40, 1024)
    cut = pool("qwen3-32b", windows=(two_to_one,), layers=60)
    assert [(g.kind, g.layers) for g in cut.groups] == [("full", 20), ("window", 20), ("window", 20)]
    assert cut.block_bytes == 16 * 20 * 2 * 8 * 128 * 2
    uneven = pool("qwen3-32b", windows=(two_to_one,), layers=61)  # 21 and 40 layers: the second part is padded
    assert [(g.kind, g.layers) for g in uneven.groups] == [("full", 21), ("window", 20), ("window", 20)]
    near = {"windows": (Window(13, 1024),), "layers": 25}  # 12 and 13 layers
    assert [g.layers for g in pool("qwen3-32b", preset="vllm-0.10", **near).groups] == [12, 7, 6]
    assert [g.layers for g in pool("qwen3-32b", preset="vllm-0.15", **near).groups] == [12, 13]


def test_old_chunks_are_kept_before_0_15() -> None:
    assert [g.kind for g in pool("llama-4-scout", preset="vllm-0.10", max_model_len=32768).groups] == ["full"]
    groups = pool("llama-4-scout", max_model_len=32768).groups
    assert [(g.kind, g.layers) for g in groups] == [("full", 12)] + 3 * [("chunk", 12)]


def test_states_enlarge_the_block() -> None:
    """Qwen3.8-27B on two RTX 3090, fp8 KV (mitchross/talos-argocd-proxmox#1995): a block of 1568 tokens; 4.99 GiB hold
    302,921 tokens, 2.31 sequences of 131,072; one of 262,144 needs 168 blocks for its keys and values."""
    p = hybrid(2, kv_cache_dtype="fp8")
    assert {g.block_size for g in p.groups} == {1568}
    assert [(g.kind, g.layers) for g in p.groups] == [("full", 16)] + 3 * [("state", 16)]
    assert p.groups[0].most_blocks(262_144, 8192) == 168
    blocks = int(4.99 * GIB) // p.block_bytes
    assert int(blocks / p.blocks(131_072) * 131_072) == 302_921


@pytest.mark.parametrize(
    ("tp", "length", "kv", "tokens"),
    [  # Qwen3.8-27B on RTX 5090 (vllm-project/recipes#810): the log's tokens are whole numbers of these blocks
        (2, 262_144, "auto", 377_456),
        (2, 262_144, "auto", 445_875),
        (2, 262_144, "fp8", 920_517),
        (1, 32_768, "fp8", 91_022),
        (1, 32_768, "fp8", 135_926),
        (1, 32_768, "fp8", 152_917),
        (1, 32_768, "auto", 76_458),
    ],
)
def test_hybrid_pools_are_whole_blocks(tp: int, length: int, kv: str, tokens: int) -> None:
    p = hybrid(tp, kv_cache_dtype=kv)
    blocks = round(tokens / length * p.blocks(length))
    assert int(blocks / p.blocks(length) * length) == tokens


def test_without_prefix_caching_a_sequence_has_one_state() -> None:
    assert [g.states for g in hybrid(2).groups] == [0, 2, 2, 2]
    assert [g.states for g in hybrid(2, enable_prefix_caching=False).groups] == [0, 1, 1, 1]


def test_freed_as_windows_slide() -> None:
    window, chunk = KVGroup("window", 1, 4, 6), KVGroup("chunk", 1, 4, 8)
    assert [window.skipped_tokens(n) for n in (0, 5, 6, 9)] == [0, 0, 1, 4]
    assert [window.held_blocks(n, n + 1) for n in (5, 8, 9, 12)] == [2, 3, 2, 3]
    assert [chunk.held_blocks(n, n + 1) for n in (7, 8, 9, 15, 16)] == [2, 1, 1, 2, 1]
    assert KVGroup("full", 1, 4).held_blocks(16, 17) == 5


@pytest.mark.parametrize("model", ["llama-3.1-8b", "gpt-oss-20b"])
def test_the_longest_sequence_fills_the_pool(model: str) -> None:
    p = pool(model)
    for blocks in (5, 50, 500):
        longest = p.longest(blocks, 10_000_000)
        assert p.blocks(longest) <= blocks < p.blocks(longest + 1)
    assert p.longest(0, 100) == 0
    assert p.longest(10**9, 100) == 100


def test_the_largest_pipeline_stage_counts() -> None:
    assert pool("qwen3-32b", pp=3).block_bytes == 16 * 22 * 2 * 8 * 128 * 2


def test_a_model_that_keeps_states_only_in_some_layers_counts_its_attention_layers() -> None:
    spec: ModelSpec = replace(parts("qwen3-32b", "h100-sxm")[0], recurrent=DELTA)
    assert spec.attention_layers == 16
    assert spec.kv_bytes_per_token(1) == 16 * 2 * 8 * 128 * 2
