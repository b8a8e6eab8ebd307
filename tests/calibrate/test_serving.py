"""A model as an engine serves it: dtype, quantisation, KV cache dtype and windows; what cannot be simulated yet."""

from __future__ import annotations

from dataclasses import replace

import pytest

from calibrate.engine import resolve_engine
from calibrate.hardware import load_gpu
from calibrate.layout import Parallelism, check_layout
from calibrate.model import ModelSpec
from calibrate.models import load_model
from calibrate.operators import attention_groups
from calibrate.serving import check_simulated, checked_windows, served
from calibrate.storage import FORMATS, WIDE_INT8, bitsandbytes, grouped_int
from calibrate.weights import weight_bytes
from servecast.errors import ServecastError
from tests.calibrate.helpers import plan


def serve(model: str | ModelSpec, preset: str = "vllm-0.19", **options: object) -> ModelSpec:
    spec = load_model(model) if isinstance(model, str) else model
    engine = resolve_engine({"preset": preset, **options}, load_gpu("h100-sxm"), spec)
    found = served(spec, engine)
    assert served(found, engine) == found, "applying it again changes nothing"
    return found


def test_nothing_asked_nothing_changed() -> None:
    for name in ("llama-3.1-8b", "llama-2-7b", "deepseek-v3", "qwen3-235b-a22b-nvfp4"):
        assert serve(name) == load_model(name)


def test_dtypes() -> None:
    wide = replace(load_model("llama-3-8b"), dtype="fp32")
    assert serve(wide).dtype == "bf16", "vLLM serves fp32 checkpoints in 16 bit"
    assert serve(wide, dtype="float32").dtype == serve(wide, dtype="float").dtype == "fp32"
    assert serve("llama-3-8b", dtype="half").dtype == serve("llama-3-8b", dtype="float16").dtype == "fp16"
    with pytest.raises(ServecastError, match=r"engine\.dtype: float32 does not go with quantised weights"):
        serve("qwen3-32b-fp8", dtype="float32")


def test_quantising_while_loading() -> None:
    model = serve("mixtral-8x7b", quantization="fp8")
    assert {q.storage for q in model.quantized} == {FORMATS["fp8"]}
    assert {q.kind for q in model.quantized} == {"qkv", "o_proj", "experts"}
    plain = load_model("mixtral-8x7b")
    assert weight_bytes(model, Parallelism(1)) == pytest.approx(weight_bytes(plain, Parallelism(1)) / 2, rel=0.01)
    assert plan("mixtral-8x7b", tp=2, quantization="fp8").kv_bytes > 1.8 * plan("mixtral-8x7b", tp=2).kv_bytes


def test_quantization_must_be_the_checkpoint_s() -> None:
    assert serve("qwen3-32b-fp8", quantization="fp8") == load_model("qwen3-32b-fp8")
    assert serve("qwen3-235b-a22b-nvfp4", quantization="modelopt_fp4").method == "modelopt"
    with pytest.raises(ServecastError, match="awq does not match qwen3-32b-fp8, whose weights are quantised by fp8"):
        serve("qwen3-32b-fp8", quantization="awq")
    with pytest.raises(ServecastError, match=r"gptq_marlin needs a checkpoint of that kind, and llama-3-8b is not"):
        serve("llama-3-8b", quantization="gptq_marlin")


def test_kv_cache_dtypes() -> None:
    for word in ("fp8", "fp8_e4m3", "fp8_e5m2"):
        assert serve("llama-3-8b", kv_cache_dtype=word).kv_dtype == "fp8"
    scaled = "llama-3.1-70b-fp8"
    assert serve(scaled).kv_dtype == "fp8", "the checkpoint has scales for it"
    assert serve(scaled, preset="vllm-0.10").kv_dtype == "", "which versions to 0.10 do not look for"
    assert serve(scaled, kv_cache_dtype="bfloat16").kv_dtype == ""
    half, whole = plan(kv_cache_dtype="fp8"), plan()
    assert half.num_gpu_blocks == pytest.approx(2 * whole.num_gpu_blocks, abs=1), "vllm-project/vllm#24577: doubles"


def test_windows_that_never_bind_are_full_attention() -> None:
    assert serve("mistral-7b-v0.1", max_model_len=4096).windows == ()
    assert serve("mistral-7b-v0.1", max_model_len=4097).windows == load_model("mistral-7b-v0.1").windows
    short = serve("llama-4-scout", max_model_len=8192)
    assert [g.window for g in attention_groups(short, Parallelism(8))] == [0]
    assert plan("mistral-7b-v0.1", max_model_len=4096).max_concurrency > 50


def test_windows_of_other_engines_are_refused() -> None:
    spec = load_model("gpt-oss-20b")
    engine = resolve_engine({"preset": "vllm-0.19"}, load_gpu("h100-sxm"), spec)
    checked_windows(served(spec, engine), engine)
    other = replace(engine, scheduler="another")
    with pytest.raises(
        ServecastError, match="as gpt-oss-20b's do, is not simulated yet; with max_model_len at most 128 "
    ):
        checked_windows(served(spec, other), other)
    checked_windows(served(load_model("llama-3-8b"), other), other)


@pytest.mark.parametrize("preset", ["vllm-0.10", "vllm-0.32"])
def test_prefixes_of_windows_are_cached_by_default(preset: str) -> None:
    for model in ("gpt-oss-20b", "llama-4-scout", "mistral-7b-v0.1"):
        assert resolve_engine({"preset": preset}, load_gpu("h100-sxm"), load_model(model)).enable_prefix_caching
    with pytest.raises(ServecastError, match=r"disable_hybrid_kv_cache_manager is 1; expected true or false"):
        serve("gpt-oss-20b", preset=preset, disable_hybrid_kv_cache_manager=1)


def test_blocks_of_windows() -> None:
    """A block holds a group's layers, so there are more of them; a sequence takes one of each group."""
    hybrid, whole = (plan("gpt-oss-20b", disable_hybrid_kv_cache_manager=off) for off in (False, True))
    assert [(g.kind, g.layers) for g in hybrid.pool.groups] == [("full", 12), ("window", 12)]
    assert hybrid.num_gpu_blocks == pytest.approx(2 * whole.num_gpu_blocks, abs=1)
    assert hybrid.kv_tokens == pytest.approx(whole.kv_tokens, abs=16)
    assert hybrid.max_concurrency > 1.8 * whole.max_concurrency


@pytest.mark.parametrize(
    ("storage", "reason"),
    [(grouped_int(8, 128, False), WIDE_INT8), (bitsandbytes(4, False), "bitsandbytes weights")],
)
def test_kernels_without_prices_are_said(storage: object, reason: str) -> None:
    base = serve("llama-3-8b", quantization="fp8")
    model = replace(base, quantized=tuple(replace(q, storage=storage) for q in base.quantized))
    with pytest.raises(ServecastError, match=reason):
        check_simulated(model)
    check_simulated(base)


def test_layouts_that_cut_blocks() -> None:
    """vLLM refuses to load these: "not divisible by weight quantization block_n = 128"."""
    gpu = load_gpu("h100-sxm")
    for name, tp in (("qwen3-235b-a22b-fp8", 8), ("qwen3-30b-a3b-fp8", 4), ("minimax-m2.5", 8)):
        (problem,) = check_layout(load_model(name), Parallelism(tp), gpu)
        assert "cuts experts_up to" in problem
        assert "no multiple of the 128 weights that share a scale" in problem
        assert not check_layout(load_model(name), Parallelism(tp // 2), gpu)
    assert not check_layout(load_model("qwen3-235b-a22b"), Parallelism(8), gpu)
    assert not check_layout(load_model("gpt-oss-20b"), Parallelism(8), gpu), "mxfp4 is padded"
    awq = replace(load_model("qwen2.5-72b"), quantized=())
    grouped = serve(awq, quantization="fp8")
    four = replace(grouped, quantized=tuple(replace(q, storage=grouped_int(4, 128, True)) for q in grouped.quantized))
    (problem,) = check_layout(four, Parallelism(2), gpu)
    assert "cuts down to 14784 a GPU, no multiple of the 128" in problem  # 29,568 / 128 is odd


def test_layouts_of_experts() -> None:
    gpu = load_gpu("h100-sxm")
    model = load_model("qwen1.5-moe-a2.7b")
    assert model.experts
    odd = replace(model, experts=replace(model.experts, inter=1404))
    (problem,) = check_layout(odd, Parallelism(8), gpu)
    assert "does not divide the experts' intermediate size 1404" in problem
    latent = load_model("deepseek-v2-lite")
    assert not check_layout(replace(latent, kv_heads=3), Parallelism(2), gpu), "there are no KV heads to share"
