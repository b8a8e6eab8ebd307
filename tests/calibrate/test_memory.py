"""The KV pool against published start-up logs, and what is said when a model does not fit."""

from __future__ import annotations

import pytest

from calibrate.hardware import GIB
from servecast.errors import ServecastError
from tests.calibrate.helpers import plan


def test_terms_add_up() -> None:
    p = plan()
    fixed = p.weight_bytes + p.activation_bytes + p.cuda_graph_bytes + p.communication_bytes + p.non_torch_bytes
    assert p.kv_bytes == p.budget_bytes - fixed
    assert p.block_bytes == 16 * 131072
    assert p.num_gpu_blocks == p.kv_bytes // p.block_bytes
    assert p.kv_tokens == (p.num_gpu_blocks - 1) * 16
    assert p.max_concurrency == p.num_gpu_blocks / (131072 / 16)


def test_a_fixed_pool_wins() -> None:
    # vllm-project/vllm#44594: a pool of 16 GiB is 18,724 blocks, 299,584 tokens
    p = plan("qwen2.5-7b", "gb200", num_gpu_blocks_override=18_724, max_model_len=8192)
    assert p.overridden
    assert p.num_gpu_blocks * 16 == 299_584
    assert p.kv_bytes == pytest.approx(16 * GIB, rel=1e-4)


def test_overrides_are_checked() -> None:
    # inference-sim's "empirical" 132,139 blocks for a TP2 replica would need 129 GiB on each 80 GB GPU
    with pytest.raises(ServecastError, match=r"129.04 GiB of KV cache.*never times tp"):
        plan(num_gpu_blocks_override=132_139, tp=2)
    assert plan(num_gpu_blocks_override=100).num_gpu_blocks == 100
    with pytest.raises(
        ServecastError, match=r"below the 8193 blocks.*at least 8193.*lower max_model_len to at most 1584"
    ):
        plan(num_gpu_blocks_override=100, preset="vllm-0.32")


def test_a_model_that_does_not_fit() -> None:
    # vllm-project/vllm#10517: 140 GB of weights on two 80 GB GPUs at 131,072 tokens
    with pytest.raises(ServecastError) as error:
        plan("llama-3.1-70b", tp=2)
    text = str(error.value)
    assert "weights 65.74 GiB" in text
    assert "needs 20.00 GiB" in text
    assert "raise tp to 4" in text
    longest = int(text.split("lower max_model_len to at most ")[1].split(",")[0])
    assert plan("llama-3.1-70b", tp=2, max_model_len=longest).max_concurrency == 1.0
    with pytest.raises(ServecastError, match=r"raise gpu_memory_utilization to 0\.78"):
        plan("llama-3-8b", "l4", gpu_memory_utilization=0.7)
    with pytest.raises(ServecastError, match=r"nothing is left for KV cache.*use a GPU with more memory"):
        plan("llama-3.1-405b", tp=8)


def test_budget_and_sequences_cost_activation_memory() -> None:
    base = plan(max_num_batched_tokens=2048, max_num_seqs=128)
    assert plan(max_num_batched_tokens=16384, max_num_seqs=128).kv_bytes < base.kv_bytes
    assert plan(max_num_batched_tokens=2048, max_num_seqs=1024).kv_bytes < base.kv_bytes


def test_two_cards_hold_more_than_twice_the_tokens() -> None:
    one, two = plan("qwen3-32b", max_model_len=8192), plan("qwen3-32b", tp=2, max_model_len=8192)
    assert two.num_gpu_blocks > 8 * one.num_gpu_blocks


def test_the_start_up_check_of_0_32_leaves_room_for_the_null_block() -> None:
    """vLLM 0.32 compares one sequence with the pool less one block; earlier versions with the whole pool."""
    assert plan(preset="vllm-0.19", max_model_len=4096, num_gpu_blocks_override=2).num_gpu_blocks == 2
    assert plan(preset="vllm-0.32", max_model_len=4096, num_gpu_blocks_override=257).num_gpu_blocks == 257
    with pytest.raises(ServecastError, match="below the 257 blocks"):
        plan(preset="vllm-0.32", max_model_len=4096, num_gpu_blocks_override=256)


def test_an_override_must_leave_room_for_everything_else() -> None:
    with pytest.raises(ServecastError, match=r"lower num_gpu_blocks_override to at most \d+ blocks") as caught:
        plan(num_gpu_blocks_override=32_887)
    room = int(str(caught.value).split("at most ")[1].split()[0])
    fits = plan(num_gpu_blocks_override=room)
    others = fits.activation_bytes + fits.cuda_graph_bytes + fits.communication_bytes + fits.non_torch_bytes
    assert fits.weight_bytes + others + fits.kv_bytes <= fits.visible_bytes
