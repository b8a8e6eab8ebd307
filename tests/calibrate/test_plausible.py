"""Wrong units show against what FLOPs and bytes take; launches, caches, windows and links explain what is fine."""

from __future__ import annotations

import polars as pl
import pytest

from calibrate.hardware import load_gpu
from calibrate.importers.plausible import judge
from tests.calibrate.imported import H100

HEADS = {"heads": 32, "kv_heads": 8, "head_dim": 128, "value_dim": 128, "window": 0}
LARGE: dict[str, tuple[dict[str, object], float, float]] = {
    # a point, its FLOPs (of bf16 where nothing else is said) and its bytes, counted by hand
    "gemm": ({"weights": "bf16", "m": 8192, "n": 16384, "k": 8192}, 2 * 2.0**40, 0),
    "prefill_attention": (
        {"kv_dtype": "bf16", "sequences": 1, "q": 8192, "context": 8192, **HEADS},
        4 * 32 * 128 * (8192 * 8192 + 8192 * 8193 / 2),
        0,
    ),
    "decode_attention": (
        {"kv_dtype": "fp8", "sequences": 512, "context": 32767, **HEADS}, 0, 512 * 32768 * 2 * 8 * 128.0,
    ),
    "moe": (
        {"weights": "bf16", "tokens": 16384, "hidden": 7168, "inter": 2048, "experts": 256, "topk": 8, "tp": 1, "ep": 4}
        | {"skew": "balanced"},
        6 * 16384 * 8 / 4 * 7168 * 2048.0,
        0,
    ),
    "elementwise": ({"op": "norms", "rows": 65536, "elements": 32768}, 0, 2 * 65536 * 32768.0),
    "quantize": ({"op": "static", "weights": "fp8", "m": 32768, "k": 65536}, 0, 3 * 32768 * 65536.0),
    "step": (
        {"model": "llama2-70b", "tp": 8, "sequences": 4, "q": 2048, "context": 0, "decodes": 0, "kv_tokens": 0},
        2 * 70e9 * 4 * 2048 / 8,
        0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("gpu_id", ["a100-sxm", H100])
@pytest.mark.parametrize("family", LARGE)
def test_wrong_units_show_in_every_family(family: str, gpu_id: str) -> None:
    gpu, (point, flops, moved) = load_gpu(gpu_id), LARGE[family]
    bound = max(flops / gpu.flops["bf16"], moved / gpu.bandwidth_bytes_per_s)
    for efficiency in (1.0, 0.3, 0.1):
        real = bound / efficiency
        rows = [pl.DataFrame([{**point, "seconds": real * f, "file": "a/b.csv", "row": 2}]) for f in (1e-3, 1, 2e3)]
        fast, right, slow = (judge(family, table, gpu, "ms").problems for table in rows)
        assert right == ()
        assert len(fast) == len(slow) == 1
        assert fast[0].startswith(f"a/b.csv, row 2: {family} ")
        assert "faster than" in fast[0]
        assert fast[0].endswith("are they in s, or of another GPU?")
        assert "slower than" in slow[0]
        assert slow[0].endswith("are they in us, or of another GPU?")


def test_a_collective_is_bound_by_the_link() -> None:
    gpu = load_gpu(H100)
    point = {"op": "all_gather", "backend": "nccl", "gpus": 8, "bytes": 2**28, "file": "x", "row": 1}
    real = 2**28 * 7 / 8 / gpu.link.bandwidth_bytes_per_s
    verdicts = [
        judge("collective", pl.DataFrame([{**point, "seconds": real * f}]), gpu, "us") for f in (0.4, 2e-3, 2e3)
    ]
    assert [len(verdict.problems) for verdict in verdicts] == [0, 1, 1]
    assert "are they in ms" in verdicts[1].problems[0]
    assert "are they in ns" in verdicts[2].problems[0]


def test_launches_and_caches_explain_small_points() -> None:
    gpu = load_gpu(H100)
    for m, seconds in ((1, 1e-3), (1, 1e-6), (4096, 5e-6)):
        point = {"weights": "bf16", "m": m, "n": 256, "k": 256, "seconds": seconds, "file": "x", "row": 1}
        assert judge("gemm", pl.DataFrame([point]), gpu, "ms").problems == ()


def test_a_window_bounds_what_attention_must_do() -> None:
    size = LARGE["prefill_attention"][0] | {"q": 16384, "context": 0, "window": 128}
    size |= {"seconds": 1e-4, "file": "x", "row": 1}
    assert judge("prefill_attention", pl.DataFrame([size]), load_gpu(H100), "ms").problems == ()
    assert judge("prefill_attention", pl.DataFrame([size | {"window": 0}]), load_gpu(H100), "ms").problems != ()
