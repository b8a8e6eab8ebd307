"""32-bit routers: against cuBLAS's published times, and in the cost of a step."""

from __future__ import annotations

import numpy as np
import pytest

from calibrate.hardware import load_gpu
from calibrate.kernels import simt
from calibrate.profile import FOLDER, load_profile
from tests.calibrate.helpers import cost

PUBLISHED_US = {32: 63.2, 48: 63.4, 64: 63.3, 96: 64.1, 128: 69.3, 256: 77.8, 512: 96.8, 1024: 111.0}
"""n = 256, k = 6144 on GB200: vllm-project/vllm#47973."""


def test_against_cublas() -> None:
    rows = np.array(list(PUBLISHED_US), np.float64)
    ours = 1e6 * simt.seconds(load_gpu("gb200").fp32_flops, rows, 256, 6144)
    assert ours == pytest.approx(np.array(list(PUBLISHED_US.values())), rel=0.08)
    one = 1e6 * simt.seconds(load_gpu("gb200").fp32_flops, np.ones(1), 256, 6144)
    assert one == pytest.approx(7.5, rel=0.02)


def test_more_rows_never_take_less() -> None:
    assert np.all(np.diff(simt.seconds(67e12, np.arange(1.0, 9000.0), 256, 3072)) >= 0)


def test_steps_of_a_model_that_keeps_its_router_in_32_bits() -> None:
    """62 layers, 30 us more each, until the engine has a kernel of its own for them."""
    before, after = (cost("minimax-m2.5", "b200-sxm", tp=4, preset=preset) for preset in ("vllm-0.19", "vllm-0.32"))
    more = before.step_s((), 64, 64_000) - after.step_s((), 64, 64_000)
    assert 62 * 20e-6 < more < 62 * 50e-6
    hopper, newer = (cost("minimax-m2.5", "h100-sxm", tp=8, preset=preset) for preset in ("vllm-0.19", "vllm-0.32"))
    assert hopper.step_s((), 32, 32_000) > newer.step_s((), 32, 32_000) + 62 * 20e-6
    own = cost("minimax-m2.5", "b200-sxm", tp=4, preset="vllm-0.24")
    assert own.step_s((), 32, 32_000) == after.step_s((), 32, 32_000), "0.24's own kernel is for up to 32 tokens"
    assert own.step_s((), 64, 64_000) == before.step_s((), 64, 64_000)
    assert hopper.tokens_s[256] == pytest.approx(newer.tokens_s[256], rel=0.01), "cuBLAS again, from 33 tokens on"


def test_profiles_price_them_from_the_datasheet_and_say_so() -> None:
    profile = load_profile(FOLDER / "b200-sxm.json")
    rows = np.array([64.0])
    assert profile.gemm_s("fp32", rows, 256, 3072) == simt.seconds(profile.gpu.fp32_flops, rows, 256, 3072)
    assert not profile.inside("gemm", "fp32", rows, 256, 3072).any()
