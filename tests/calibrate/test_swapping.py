"""Swapping: how many blocks the host holds, and what copying one takes."""

from __future__ import annotations

import pytest

from calibrate.fixes import require_fit
from calibrate.swapping import swap_block_s, swap_blocks
from tests.calibrate.helpers import parts


@pytest.mark.parametrize(
    ("gpu", "tp", "swap_space", "blocks", "block_s"),
    [
        ("a100-sxm", 1, 4, 2048, 64 * 5e-6 + 2**21 / 24.8e9),  # 16 tokens x 32 layers x 2 x 8 heads x 128 x 2 bytes
        ("a100-sxm", 2, 4, 4096, 64 * 5e-6 + 2**20 / 24.8e9),  # each GPU copies its half
        ("h100-sxm", 1, 0.5, 256, 64 * 5e-6 + 2**21 / 55.6e9),
        ("h100-sxm", 1, 0.0019, 0, 64 * 5e-6 + 2**21 / 55.6e9),
    ],
)
def test_blocks_and_their_price(gpu: str, tp: int, swap_space: float, blocks: int, block_s: float) -> None:
    options = {"max_model_len": 8192, "preemption_mode": "swap", "swap_space": swap_space}
    model, layout, card, engine = parts("llama-3.1-8b", gpu, tp, preset="vllm-0.6", **options)
    plan = require_fit(model, layout, card, engine)
    assert swap_blocks(engine, plan) == blocks
    assert swap_block_s(model, card, plan) == pytest.approx(block_s, rel=1e-12)
