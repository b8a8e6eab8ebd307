"""SGLang's and TensorRT-LLM's options: defaults by device, what they mean, every refusal."""

from __future__ import annotations

import pytest

from calibrate.engine import resolve_engine
from calibrate.hardware import load_gpu
from calibrate.memory import plan_memory
from calibrate.models import load_model
from calibrate.options import flat, nested, preset_names
from servecast.errors import ServecastError
from tests.calibrate.helpers import parts

MODEL = "llama-3.1-8b"


def refusal(preset: str, **options: object) -> str:
    with pytest.raises(ServecastError) as error:
        resolve_engine({"preset": preset, **options}, load_gpu("h100-sxm"), load_model(MODEL))
    return str(error.value)


@pytest.mark.parametrize(
    ("gpu", "tp", "chunk", "graphs", "share"),
    [
        ("h100-sxm", 1, 8192, 256, 1 - (512 + 12288 + 512 + 128) / 81080),
        ("h100-sxm", 8, 8192, 512, 1 - (512 + 12288 + 1024 + 1024) / 81080),
        ("l4", 1, 2048, 24, 1 - (512 + 3072 + 48 + 128) / 22700),
        ("b200-sxm", 4, 16384, 512, 1 - (512 + 24576 + 1024 + 512) / 183000),
    ],
)
def test_sglang_sizes_itself_by_the_gpus_memory(gpu: str, tp: int, chunk: int, graphs: int, share: float) -> None:
    engine = parts(MODEL, gpu, tp, preset="sglang-0.5")[3]
    assert engine.options["chunked_prefill_size"] == engine.max_num_batched_tokens == chunk
    assert engine.graphs.decode[-1] == graphs
    assert engine.options["mem_fraction_static"] == pytest.approx(share, abs=0.002)
    assert engine.block_size == (64 if gpu == "b200-sxm" else 1)
    assert engine.sources["mem_fraction_static"].startswith("SGLang v0.5.9 default for ")


def test_sglangs_pool_is_its_share_less_the_weights() -> None:
    model, layout, gpu, engine = parts(MODEL, "h100-sxm", preset="sglang-0.5", mem_fraction_static=0.8)
    plan = plan_memory(model, layout, gpu, engine)
    left = int(0.8 * gpu.visible_bytes) - plan.weight_bytes
    assert plan.kv_tokens == plan.num_gpu_blocks == left // plan.kv_bytes_per_token
    pinned = parts(MODEL, "h100-sxm", preset="sglang-0.5", max_total_tokens=371587)
    assert plan_memory(*pinned).kv_tokens == 371587


def test_what_sglangs_options_mean() -> None:
    engine = parts(MODEL, "h100-sxm", preset="sglang-0.5", disable_radix_cache=True, schedule_policy="lpm")[3]
    assert (engine.enable_prefix_caching, engine.policy["schedule_policy"]) == (False, "fcfs")
    assert engine.async_scheduling
    assert not engine.graphs.mixed
    assert parts(MODEL, "h100-sxm", preset="sglang-0.5", disable_cuda_graph=True)[3].graphs.decode == ()
    whole = parts(MODEL, "h100-sxm", preset="sglang-0.5", chunked_prefill_size=-1, context_length=20000)[3]
    assert whole.max_num_batched_tokens == 20000
    assert "not a multiple of page_size 64" in refusal("sglang-0.5", page_size=64, chunked_prefill_size=1000)
    mixed = {"enable_mixed_chunk": True, "chunked_prefill_size": 64}
    assert "is not above max_running_requests" in refusal("sglang-0.5", **mixed)
    assert "not modelled yet" in refusal("sglang-0.5", speculative_algorithm="EAGLE")
    assert "expected fcfs or lpm" in refusal("sglang-0.5", schedule_policy="dfs-weight")
    assert "set it as cluster.tp" in refusal("sglang-0.5", tp_size=2)
    assert "unknown option" in refusal("sglang-0.5", max_num_seqs=3)


def test_tensorrt_llms_pool_is_a_share_of_what_is_free() -> None:
    model, layout, gpu, engine = parts(MODEL, "h100-sxm", preset="tensorrt-llm-1")
    plan = plan_memory(model, layout, gpu, engine)
    fixed = plan.weight_bytes + plan.activation_bytes + plan.communication_bytes + plan.non_torch_bytes
    assert plan.kv_bytes == int((gpu.visible_bytes - fixed) * 0.9)
    assert plan.kv_tokens == plan.num_gpu_blocks * 32


def test_what_tensorrt_llms_options_mean() -> None:
    engine = parts(MODEL, "h100-sxm", preset="tensorrt-llm-1")[3]
    assert (engine.max_num_seqs, engine.max_num_batched_tokens, engine.block_size) == (2048, 8192, 32)
    assert engine.graphs.decode == (*range(1, 32), 32, 64, 128)
    assert (engine.graphs.mixed, engine.graphs.padded, engine.async_scheduling) == ((), False, True)
    graphs = {"enable_padding": True, "max_batch_size": 1024}
    kv = {"dtype": "fp8", "enable_block_reuse": False, "max_tokens": 3200}
    engine = parts(MODEL, "h100-sxm", preset="tensorrt-llm-1", cuda_graph_config=graphs, kv_cache_config=kv)[3]
    assert engine.graphs.decode[-4:] == (128, 256, 512, 1024)
    assert (engine.kv_cache_dtype, engine.enable_prefix_caching, engine.num_gpu_blocks_override) == ("fp8", False, 100)
    assert engine.sources["kv_cache_config.dtype"] == "user"
    assert flat(nested(engine.options), engine.options) == engine.options
    preset = "tensorrt-llm-1"
    assert "expected GUARANTEED_NO_EVICT or" in refusal(
        preset, scheduler_config={"capacity_scheduler_policy": "STATIC_BATCH"}
    )
    assert "could never be resumed" in refusal(
        preset, scheduler_config={"capacity_scheduler_policy": "MAX_UTILIZATION"}
    )
    assert "is below 2048, max_batch_size" in refusal(preset, max_num_tokens=1024)
    assert "expected a mapping of" in refusal(preset, kv_cache_config=3)
    assert "dtyp: unknown option (did you mean 'dtype'?)" in refusal(preset, kv_cache_config={"dtyp": "fp8"})
    assert "not modelled yet" in refusal(preset, enable_attention_dp=True)


def test_presets_by_family_and_version() -> None:
    assert {"sglang-0.5", "tensorrt-llm-1"} <= set(preset_names())
    assert parts(MODEL, "h100-sxm", preset="tensorrt-llm-1.2.0")[3].notes[0] == (
        "tensorrt-llm-1.2.0 uses the preset tensorrt-llm-1"
    )
    assert "sglang-0.5.9 uses the preset sglang-0.5" in parts(MODEL, "h100-sxm", preset="sglang-0.5.9")[3].notes
    assert "older than the oldest" in refusal("sglang-0.4")
