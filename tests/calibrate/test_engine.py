"""Presets, their defaults by GPU class, and every refusal; layouts."""

from __future__ import annotations

import pytest

from calibrate.engine import resolve_engine
from calibrate.hardware import load_gpu
from calibrate.layout import Parallelism, check_layout
from calibrate.models import load_model
from calibrate.options import FAMILIES, family, find_preset
from servecast.errors import ServecastError
from tests.calibrate.helpers import parts

MODEL = "llama-3.1-8b"


def refusal(**options: object) -> str:
    with pytest.raises(ServecastError) as error:
        resolve_engine({"preset": "vllm-0.19", **options}, load_gpu("h100-sxm"), load_model(MODEL))
    return str(error.value)


@pytest.mark.parametrize("preset", [p for p in family("vllm")["presets"] if p != "vllm-0.6"])
@pytest.mark.parametrize(
    ("gpu", "tokens", "seqs"),
    [("h100-sxm", 8192, 1024), ("h200-sxm", 8192, 1024), ("a100-sxm", 2048, 256), ("l4", 2048, 256),
     ("rtx-4090", 2048, 256), ("b200-sxm", 8192, 1024), ("mi300x", 8192, 1024)],
)  # fmt: skip
def test_defaults_by_version_and_gpu(preset: str, gpu: str, tokens: int, seqs: int) -> None:
    engine = parts(MODEL, gpu, preset=preset)[3]
    large = preset == "vllm-0.32" and gpu in ("b200-sxm", "mi300x")
    assert (engine.max_num_batched_tokens, engine.max_num_seqs) == (16384 if large else tokens, seqs)
    assert engine.gpu_memory_utilization == (0.92 if preset in ("vllm-0.24", "vllm-0.32") else 0.9)
    assert engine.async_scheduling is (preset != "vllm-0.10")
    assert engine.policy["scheduler_reserve_full_isl"] is (preset in ("vllm-0.19", "vllm-0.24", "vllm-0.32"))
    assert engine.policy["long_prefill_alone_exempt"] is (preset == "vllm-0.32")
    assert (engine.block_size, engine.max_model_len, engine.policy["enable_chunked_prefill"]) == (16, 131072, True)
    assert (engine.enable_prefix_caching, engine.blank_blocks_first) == (True, preset in ("vllm-0.24", "vllm-0.32"))


def test_sources_say_where_a_value_came_from() -> None:
    engine = parts(MODEL, "h100-sxm", max_num_seqs=64)[3]
    assert engine.sources["max_num_seqs"] == "user"
    assert "v0.19.1" in engine.sources["max_num_batched_tokens"]


def test_defaults_are_capped() -> None:
    assert parts(MODEL, "h100-sxm", max_num_batched_tokens=512)[3].max_num_seqs == 512
    assert parts(MODEL, "h100-sxm", max_num_seqs=2, max_model_len=1000)[3].max_num_batched_tokens == 2000
    whole = parts(MODEL, "h100-sxm", enable_chunked_prefill=False)[3]
    assert whole.max_num_batched_tokens == 131072


def test_unlisted_versions_resolve_downwards() -> None:
    assert parts(MODEL, "l4", preset="vllm-0.17")[3].preset == "vllm-0.15"
    engine = parts(MODEL, "l4", preset="vllm-0.23.1")[3]
    assert engine.preset == "vllm-0.19"
    assert "vllm-0.23.1" in engine.notes[0]
    assert parts(MODEL, "l4", preset="vllm-0.28")[3].preset == "vllm-0.24"
    assert parts(MODEL, "l4", preset="vllm-0.19.1")[3].preset == "vllm-0.19"
    assert "older than the oldest" in refusal(preset="vllm-0.5.4")
    assert "vllm-0.10" in refusal(preset="sglan-0.5")
    assert "engine.preset: missing" in refusal(preset=None)


def test_unmodelled_and_unknown_options() -> None:
    for option, value in {
        "enable_lora": True, "cpu_offload_gb": 10,
        "max_num_partial_prefills": 2,
        "long_prefill_token_threshold_adaptive": True,
    }.items():  # fmt: skip
        assert f"engine.{option}: {value!r} is not modelled yet" in refusal(**{option: value})
    assert not parts(MODEL, "h100-sxm", enable_prefix_caching=False)[3].enable_prefix_caching
    assert "is 'eagle'; expected a mapping of method, num_speculative_tokens" in refusal(speculative_config="eagle")
    found = refusal(speculative_config={"methods": "eagle"})
    assert "speculative_config.methods: unknown option (did you mean 'method'?); modelled: method, num_" in found
    assert "did you mean 'max_num_seqs'" in refusal(max_num_sequences=3)
    assert "vllm-0.10 does not have" in refusal(preset="vllm-0.10", scheduler_reserve_full_isl=True)
    assert "vllm-0.19 does not have" in refusal(watermark=0.05)
    assert "vllm-0.19 does not have this option; take it out or use another preset" in refusal(swap_space=4)
    for option, value in (("swap_space", 16), ("preemption_mode", "swap")):
        assert "V1 recomputes who is preempted" in refusal(preset="vllm-0.10", **{option: value})
    assert "watermark is 1; expected a number of at least 0 and at most 0.999" in refusal(
        preset="vllm-0.24", watermark=1
    )
    assert parts(MODEL, "l4", preset="vllm-0.24", watermark=0.05)[3].policy["watermark"] == 0.05
    assert "experimental" in refusal(preset="vllm-0.10", async_scheduling=True)
    assert "always chunks" in refusal(preset="vllm-0.10", enable_chunked_prefill=False)
    assert "cluster.tp" in refusal(tensor_parallel_size=2)
    assert "just preempted: not modelled" in refusal(preset="vllm-0.10", scheduling_policy="priority")
    assert "'lifo'; expected fcfs or priority" in refusal(scheduling_policy="lifo")


def test_dtypes_and_quantization_are_words() -> None:
    assert "engine.dtype is 'bf16'; expected auto or bfloat16 or" in refusal(dtype="bf16")
    assert "engine.quantization is 'gguf'; expected fp8 or awq" in refusal(quantization="gguf")
    assert "engine.kv_cache_dtype is 'int8'; expected auto or bfloat16 or fp8" in refusal(kv_cache_dtype="int8")
    old = refusal(preset="vllm-0.10", kv_cache_dtype="bfloat16")
    assert "expected auto or fp8" in old
    engine = parts(MODEL, "h100-sxm", preset="vllm-0.10", dtype="bfloat16", kv_cache_dtype="fp8")[3]
    assert (engine.dtype, engine.kv_cache_dtype, engine.quantization) == ("bfloat16", "fp8", None)
    assert engine.sources["kv_cache_dtype"] == "user"


def test_values_are_checked_all_at_once() -> None:
    text = refusal(max_num_seqs=True, max_num_batched_tokens=1.5, max_model_len=0, block_size=7,
                   gpu_memory_utilization=1.2, async_scheduling=1)  # fmt: skip
    for option in ("max_num_seqs is True", "max_num_batched_tokens is 1.5", "max_model_len is 0", "block_size is 7",
                   "gpu_memory_utilization is 1.2", "async_scheduling is 1"):  # fmt: skip
        assert option in text
    assert "gpu_memory_utilization is nan" in refusal(gpu_memory_utilization=float("nan"))
    assert "gpu_memory_utilization is True" in refusal(gpu_memory_utilization=True)


def test_startup_checks() -> None:
    assert "below max_num_seqs" in refusal(max_num_seqs=1000, max_num_batched_tokens=500)
    assert "chunked prefill off" in refusal(enable_chunked_prefill=False, max_num_batched_tokens=2048)
    over = {"max_model_len": 1000, "long_prefill_token_threshold": 1001}
    assert "above max_model_len" in refusal(preset="vllm-0.32", **over)
    assert parts(MODEL, "h100-sxm", preset="vllm-0.19", **over)[3].policy["long_prefill_token_threshold"] == 1001
    assert parts(MODEL, "h100-sxm", preset="vllm-0.32", block_size=48)[3].block_size == 48
    assert "above the 131072" in refusal(max_model_len=131073)


def test_layouts() -> None:
    model, gpu = load_model(MODEL), load_gpu("h100-sxm")
    for tp in (1, 2, 4, 8):
        assert check_layout(model, Parallelism(tp), gpu) == []
    assert "whole number" in check_layout(model, Parallelism(0), gpu)[0]
    assert "allows tp 1, 2, 4, 8" in check_layout(model, Parallelism(3), gpu)[0]
    assert any("exceeds the 8" in problem for problem in check_layout(model, Parallelism(16), gpu))
    qwen = load_model("qwen2.5-7b")  # 28 heads, 4 KV heads
    assert any("28" in problem for problem in check_layout(qwen, Parallelism(8), gpu))
    assert Parallelism(4).gpus == 4


def test_an_option_set_to_none_is_not_given() -> None:
    options = {"preset": "vllm-0.19", "max_num_seqs": None, "gpu_memory_utilization": None}
    gpu, model = load_gpu("h100-sxm"), load_model(MODEL)
    assert resolve_engine(options, gpu, model) == resolve_engine({"preset": "vllm-0.19"}, gpu, model)


@pytest.mark.parametrize("option", ["max_num_seqs", "max_num_batched_tokens"])
def test_limits_that_would_exhaust_the_memory_are_refused(option: str) -> None:
    assert "at most 4,194,304" in refusal(**{option: 10**11})


@pytest.mark.parametrize("name", [name for name in FAMILIES if family(name)["presets"].keys() == {name}])
def test_a_preset_without_versions_has_none(name: str) -> None:
    with pytest.raises(ServecastError, match=f"'{name}-9' is not a preset.*did you mean '{name}'"):
        find_preset(f"{name}-9")


def test_tgi_takes_the_prefill_budget_from_the_gpu_and_the_model() -> None:
    """`compute_optimal` of its launcher: 900 and 121 TFLOP/s by its table, 15.032385536 GFLOP a token by its count."""
    budgets = {}
    for gpu, tp in (("h100-sxm", 1), ("h100-sxm", 2), ("l4", 1), ("h200-sxm", 1)):
        engine = parts(MODEL, gpu, tp, preset="tgi-3")[3]
        budgets[gpu, tp] = engine.policy["max_batch_prefill_tokens"]
        assert engine.block_size == 1
    assert budgets == {("h100-sxm", 1): 59870, ("h100-sxm", 2): 119741, ("l4", 1): 8049, ("h200-sxm", 1): 4096}
    said = parts(MODEL, "h100-sxm", preset="tgi-3", max_batch_prefill_tokens=5000)[3]
    assert said.max_num_batched_tokens == 5000


@pytest.mark.parametrize(("preset", "share"), [("sarathi", 0.8), ("mlc-llm", 0.85), ("tgi-3", 0.93), ("orca", 0.9)])
def test_shares_of_the_memory(preset: str, share: float) -> None:
    assert parts(MODEL, "h100-sxm", preset=preset)[3].gpu_memory_utilization == share
