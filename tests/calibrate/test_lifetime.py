"""One request's memory: the blocks it holds, where it must end, and how many like it the pool takes."""

from __future__ import annotations

import pytest

from calibrate.lifetime import Life, request_life
from calibrate.memory import plan_memory
from tests.calibrate.helpers import parts


def life(model: str, gpu: str, prompt: int, output: int, **options: object) -> Life:
    spec, layout, card, engine = parts(model, gpu, **options)
    return request_life(spec, layout, engine, plan_memory(spec, layout, card, engine), prompt, output)


def test_prefill_pulses_and_kv_grows() -> None:
    found = life("llama-3.1-8b", "l4", 3000, 100, max_model_len=8192)
    chunks = [m for m in found.moments if m.prefill]
    assert [(m.tokens, m.blocks) for m in chunks] == [(2048, 128), (3000, 188)]
    assert chunks[0].activation_bytes > chunks[1].activation_bytes > 20 * found.moments[-1].activation_bytes
    decodes = [m for m in found.moments if not m.prefill]
    assert [m.tokens for m in decodes] == list(range(3001, 3101))
    assert all(m.blocks == -(-m.tokens // 16) for m in decodes)
    assert found.most_blocks == 194


def test_where_it_must_end() -> None:
    at_length = life("llama-3.1-8b", "l4", 8000, 500, max_model_len=8192)
    assert (at_length.last, at_length.stopped_by) == (192, "max_model_len")
    small = life("llama-3.1-8b", "l4", 100, 500, max_model_len=8192, num_gpu_blocks_override=9)
    assert (small.last, small.stopped_by) == (8 * 16 - 100, "the KV pool")


@pytest.mark.parametrize("blocks", [50, 51, 400])
def test_one_more_fills_the_pool(blocks: int) -> None:
    found = life("llama-3.1-8b", "l4", 100, 60, max_model_len=8192, num_gpu_blocks_override=blocks)
    usable, crowd = blocks - 1, found.at_once + 1

    def held(output: int) -> int:
        return -(-(100 + output) // 16)

    assert held(60) * found.at_once <= usable < held(60) * crowd
    assert found.full_at is not None
    assert held(found.full_at) * crowd <= usable < held(found.full_at + 1) * crowd


def test_a_pool_that_the_prompts_alone_fill() -> None:
    assert life("llama-3.1-8b", "l4", 160, 1, max_model_len=8192, num_gpu_blocks_override=25).full_at is None


def test_windows_give_blocks_back() -> None:
    found = life("gpt-oss-20b", "h100-sxm", 4096, 64, max_num_batched_tokens=1024)
    # 12 full layers keep all; 12 windowed ones the chunk's 64 blocks and 8 for the 127 tokens before it
    assert [m.blocks for m in found.moments if m.prefill] == [64 + 64, 128 + 72, 192 + 72, 256 + 72]
    assert found.moments[-1].blocks == 260 + 8
