"""Physics guards of the datasheet cost, and the exactness that the simulation relies on."""

from __future__ import annotations

import dataclasses
import math
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibrate.cost import CompiledCost, compile_cost
from calibrate.datasheet import Datasheet
from calibrate.hardware import load_gpu
from calibrate.kernel_times import kernels_s, layer_launches
from calibrate.operators import attention_operators, prefill_attention, step_operators, step_work
from servecast.errors import ServecastError
from tests.calibrate.helpers import cost, parts

CASES = [
    ("llama-3.1-8b", "h100-sxm", 1, "vllm-0.19"),
    ("llama-3.1-8b", "h100-sxm", 1, "vllm-0.10"),
    ("qwen2.5-0.5b", "rtx-3090", 1, "vllm-0.32"),
    ("llama-3.1-70b", "a100-sxm", 4, "vllm-0.15"),
    ("qwen3-32b", "mi300x", 2, "vllm-0.19"),
    ("deepseek-v2-lite", "h200-sxm", 1, "vllm-0.19"),
]
DENSE = 10
"""Kernels of a dense layer on one GPU: two norms, four GEMMs, rotary positions, the activation, two for attention."""
case = st.sampled_from(CASES)
chunk = st.tuples(st.integers(1, 512), st.integers(0, 100_000))
chunks = st.lists(chunk, max_size=3)
guard = settings(max_examples=100, deadline=None, derandomize=True)


@cache
def priced(model: str, gpu: str, tp: int, preset: str) -> CompiledCost:
    return cost(model, gpu, tp=tp, preset=preset)


@guard
@given(case, chunks, st.integers(0, 200), st.integers(0, 5_000_000))
def test_never_faster_than_the_hardware(
    c: tuple[str, str, int, str], work: list[tuple[int, int]], decodes: int, kv: int
) -> None:
    model, layout, gpu, _ = parts(c[0], c[1], tp=c[2], preset=c[3])
    seconds = priced(*c).step_s(work, decodes, kv if decodes else 0)
    assert math.isfinite(seconds)
    if work or decodes:
        done = step_work(model, layout, work, decodes, kv)
        assert seconds >= max(done.flops / gpu.flops["bf16"], done.hbm_bytes / gpu.bandwidth_bytes_per_s)


@guard
@given(case, chunks, st.integers(1, 200), st.integers(0, 5_000_000), chunk)
def test_more_work_never_costs_less(
    c: tuple[str, str, int, str], work: list[tuple[int, int]], decodes: int, kv: int, extra: tuple[int, int]
) -> None:
    model = priced(*c)
    base = model.step_s(work, decodes, kv)
    assert model.step_s([*work, extra], decodes, kv) >= base
    assert model.step_s(work, decodes + 1, kv) >= base
    assert model.step_s(work, decodes, kv + 1000) >= base
    for i, (q, context) in enumerate(work):
        assert model.step_s([*work[:i], (q + 1, context), *work[i + 1 :]], decodes, kv) >= base
        assert model.step_s([*work[:i], (q, context + 1), *work[i + 1 :]], decodes, kv) >= base


@guard
@given(case, st.integers(1, 256), st.integers(0, 10_000_000))
def test_pure_decode_is_the_line_bit_for_bit(c: tuple[str, str, int, str], decodes: int, kv: int) -> None:
    model = priced(*c)
    a, b, floor, upto = model.decode_line(decodes, kv)
    assert upto >= kv
    assert model.step_s((), decodes, kv) == max(floor, a + b * kv)
    assert type(a) is type(b) is type(floor) is float


def test_lookups_are_plain_floats_up_to_the_engine_s_limits() -> None:
    model = cost(max_num_seqs=8, max_num_batched_tokens=64)
    assert len(model.tokens_s) == 65
    assert len(model.samples_s) == len(model.decode) == len(model.floor_s) == 9
    assert type(model.tokens_s[3]) is float
    assert model.step_s((), 0, 0) == 0.0


def test_a_long_prompt_cannot_beat_the_tensor_cores() -> None:
    assert cost().step_s([(8192, 0)], 0, 0) >= 0.133


def test_chunks_of_a_prompt_do_the_prompt_s_work() -> None:
    model, layout, _, _ = parts("llama-3.1-8b", "h100-sxm")
    whole = prefill_attention(model, layout, 8192, 0).flops
    assert whole == 4 * 32 * 32 * 128 * 8192 * 8193 / 2
    assert sum(prefill_attention(model, layout, 2048, at).flops for at in range(0, 8192, 2048)) == whole


def test_mixed_batches_are_one_gemm() -> None:
    model = cost()
    mixed = model.step_s([(256, 0)], 64, 64_000)
    assert mixed < model.step_s([(256, 0)], 0, 0) + model.step_s((), 64, 64_000), "the weights are read once"


def test_decode_becomes_compute_bound_at_large_batch() -> None:
    model = cost()

    def per_sequence(n: int) -> float:
        return model.step_s((), n, 0) / n

    assert per_sequence(1) > 25 * per_sequence(32)  # bandwidth-bound: nearly free to batch
    assert per_sequence(1024) > 0.75 * per_sequence(512)  # compute-bound: no longer
    spec, layout, gpu, _ = parts("llama-3.1-8b", "h100-sxm")
    gemms = [op for op in step_operators(spec, layout) if op.name == "gate_up"]
    assert gemms[0].flops_per_row * 1024 / gpu.flops["bf16"] > gemms[0].fixed_bytes / gpu.bandwidth_bytes_per_s


def test_weights_read_are_the_model_s() -> None:
    spec, layout, _, _ = parts("llama-3.1-8b", "h100-sxm")
    read = sum(op.fixed_bytes for op in step_operators(spec, layout))
    norms = (2 * spec.layers + 1) * spec.hidden
    assert read == 2 * (spec.params - spec.vocab * spec.hidden - norms), "all but the embedding table and the norms"


def test_synchronous_engines_add_the_host_and_asynchronous_ones_overlap_it() -> None:
    sync, overlapped = cost(preset="vllm-0.10"), cost(preset="vllm-0.15")
    assert sync.step_s((), 64, 1000) > overlapped.step_s((), 64, 1000)
    assert sync.decode_line(8, 0)[2] == sync.after_s[8], "less than the host's time no step takes"
    tiny = cost("qwen2.5-0.5b")
    assert tiny.step_s((), 1, 10) == tiny.decode_line(1, 10)[2], "a small model on a fast GPU waits for the host"


def test_steps_without_a_captured_graph_wait_for_the_host_s_launches() -> None:
    """vllm-project/vllm#20469: 20.6 ms a token, where the kernels take 6; only long steps are beyond the graphs."""
    spec, _, _, engine = parts("qwen2.5-14b", "a100-sxm", preset="vllm-0.10")
    eager, graphs = (cost("qwen2.5-14b", "a100-sxm", preset="vllm-0.10", enforce_eager=each) for each in (True, False))
    launches = spec.layers * engine.host.eager_launch_s * DENSE
    assert eager.step_s((), 1, 100) == max(eager.floor_s[1] + launches, graphs.step_s((), 1, 100))
    assert eager.tokens_s[130] < graphs.tokens_s[130], "nothing is padded"
    small = cost("qwen2.5-0.5b", max_num_seqs=256)
    host = parts("qwen2.5-0.5b", "h100-sxm")[3].host
    assert small.step_s([(512, 0)], 0, 0) < small.step_s([(513, 0)], 0, 0)
    assert small.launch_s[512] == 0.0 < small.launch_s[513] == pytest.approx(24 * host.compiled_launch_s * DENSE)
    assert small.decode_line(256, 100)[2] == small.floor_s[256]


@pytest.mark.parametrize(
    ("model", "tp", "preset", "kernels"),
    [
        ("llama-3.1-8b", 1, "vllm-0.19", DENSE),
        ("llama-3.1-8b", 2, "vllm-0.19", DENSE + 2),  # all-reduces
        ("llama-3.1-70b-fp8", 1, "vllm-0.19", DENSE + 4),  # what its GEMMs multiply is quantised
        ("llama-3.1-70b-fp8", 1, "tensorrt-llm-1", DENSE),  # by the kernels before them
        ("qwen3-30b-a3b", 1, "vllm-0.19", DENSE + 1),  # norms of queries and keys; router, top k and experts
    ],
)
def test_a_layer_s_launches_are_its_kernels(model: str, tp: int, preset: str, kernels: int) -> None:
    spec, layout, _, engine = parts(model, "h100-sxm", tp, preset)
    assert layer_launches(spec, layout, engine) == kernels


def test_a_layer_of_latent_attention_and_experts_takes_twice_as_many_launches() -> None:
    spec, layout, _, engine = parts("deepseek-r1", "h200-sxm", 8, "sglang-0.5")
    assert 25 < layer_launches(spec, layout, engine) < 28
    given = dataclasses.replace(engine.host, layer_s=1e-3)
    assert given.launching_s(False, False, 27.0) == 1e-3, "a time of one's own is that of a layer"


def test_on_a_cpu_launches_add_to_the_kernels() -> None:
    """The thread that launches a kernel runs it; vLLM 0.32, 6 layers: 9.9 ms a token where the kernels take 5.8."""
    spec, _, _, engine = parts("qwen2.5-0.5b", "cpu", preset="vllm-0.32", async_scheduling=False)
    eager, graphs = (
        cost("qwen2.5-0.5b", "cpu", preset="vllm-0.32", async_scheduling=False, enforce_eager=each)
        for each in (True, False)
    )
    launches = spec.layers * engine.host.eager_launch_s * DENSE
    assert eager.step_s((), 1, 100) == pytest.approx(graphs.step_s((), 1, 100) + launches)
    assert eager.step_s([(6, 0)], 2, 100) == pytest.approx(graphs.step_s([(6, 0)], 2, 100) + launches)


def test_decode_graphs_alone_leave_steps_with_chunks_to_the_host() -> None:
    both, alone = (cost(cudagraph_mode=mode) for mode in ("FULL_AND_PIECEWISE", "FULL_DECODE_ONLY"))
    host, layers = parts("llama-3.1-8b", "h100-sxm")[3].host, 32
    assert alone.decode_line(130, 100) == both.decode_line(130, 100)
    assert alone.tokens_s[130] < both.tokens_s[130] == both.tokens_s[136], "and to no padding"
    launches = layers * DENSE * host.uncaptured_launch_s
    assert alone.step_s([(8, 0)], 0, 0) == pytest.approx(alone.floor_s[1] + launches)
    nothing = cost(cudagraph_mode="NONE")
    assert nothing.decode_line(130, 100)[2] == pytest.approx(nothing.floor_s[130] + launches)


def test_all_reduces_are_fused_with_their_norms_up_to_a_size() -> None:
    apart, fused, larger = (
        cost("llama-3.1-70b", "h100-sxm", tp=4, **options)
        for options in ({"fuse_allreduce_rms": False}, {}, {"fi_allreduce_fusion_max_size_mb": 8})
    )
    launch = load_gpu("h100-sxm").efficiency.elementwise_fixed_s
    assert apart.tokens_s[64] - fused.tokens_s[64] == pytest.approx(160 * launch, rel=0.02), "a launch a fused pair"
    assert fused.tokens_s[129] == apart.tokens_s[129], "beyond 2 MiB of 8,192 bf16 a token"
    assert larger.tokens_s[512] < fused.tokens_s[512]
    assert cost("llama-3.1-70b", "a100-sxm", tp=4).tokens_s == cost(
        "llama-3.1-70b", "a100-sxm", tp=4, fuse_allreduce_rms=False
    ).tokens_s  # fmt: skip
    assert cost("llama-3.1-70b", tp=4, preset="vllm-0.10").tokens_s != cost("llama-3.1-70b", tp=4).tokens_s


def test_sampling_scales_with_sequences_not_tokens() -> None:
    model = cost()
    one, many = model.step_s([(512, 0)], 0, 0), model.step_s([(8, 0)] * 64, 0, 0)
    assert model.samples_s[64] > model.samples_s[1]
    assert many != one


def test_measured_single_request_decode() -> None:
    # vLLM blog 2026-04-22, one request, ms + ms a token; they also set the bubble
    for gpu, at_zero, slope in (("h100-sxm", 6.44, 4.37e-5), ("b200-sxm", 3.93, 1.80e-5)):
        a, b, _, _ = cost(gpu=gpu).decode_line(1, 1000)
        assert a * 1e3 == pytest.approx(at_zero, rel=0.1)
        assert b * 1e3 == pytest.approx(slope, rel=0.1)


def test_tensor_parallelism_pays_for_its_all_reduce() -> None:
    one, two = cost("llama-3.1-8b", "l40s"), cost("llama-3.1-8b", "l40s", tp=2)
    assert one.step_s((), 1, 100) / 2 < two.step_s((), 1, 100) < one.step_s((), 1, 100)
    assert two.step_s([(2048, 0)], 0, 0) > one.step_s([(2048, 0)], 0, 0) / 2


def test_latent_attention_makes_keys_of_cached_tokens_again() -> None:
    spec, layout, gpu, engine = parts("deepseek-v2-lite", "h100-sxm")
    prices, model = Datasheet(gpu), cost("deepseek-v2-lite")
    beside = {op.name: op for op in attention_operators(spec, layout)}
    latent = spec.latent
    assert latent
    for chunks, decodes, kv in (([(512, 0)], 0, 0), ([(512, 4000)], 0, 0), ([], 24, 24_000), ([(512, 0)] * 4, 8, 800)):
        whole = kernels_s(spec, layout, prices, chunks, decodes, kv)
        assert model.step_s(chunks, decodes, kv) == pytest.approx(whole + engine.host.bubble_s, rel=2e-3)
    cached = model.step_s([(512, 60_000)], 0, 0) - model.step_s([(512, 50_000)], 0, 0)
    again = 10_000 * (beside["kv_b"].flops_per_row / gpu.flops["bf16"] + beside["mla_keys"].bytes_per_row / 3.35e12)
    assert cached > again + 10_000 * 512 * 2 * spec.layers * spec.heads * (latent.key + latent.value) / 989e12
    _, slope, _, _ = model.decode_line(64, 64_000)
    assert slope == pytest.approx(spec.layers * latent.cached * 2 / (3.35e12 * gpu.efficiency.decode_bandwidth))


def test_provenance_and_refusal() -> None:
    provenance = cost().provenance
    assert provenance["kind"] == "datasheet"
    assert provenance["accuracy"] == "not yet validated"
    spec, layout, gpu, engine = parts("llama-3.1-8b", "h100-sxm")
    with pytest.raises(ServecastError, match="fp32 is not priced"):
        compile_cost(dataclasses.replace(spec, dtype="fp32"), layout, engine, Datasheet(gpu))


def test_batches_are_padded_to_the_captured_graphs() -> None:
    model = cost()
    assert model.tokens_s[130] == model.tokens_s[136] < model.tokens_s[137] == model.tokens_s[144]
    assert model.tokens_s[513] < model.tokens_s[514], "beyond the largest graph nothing is padded"
    for preset, gpu, seqs, sizes in (
        ("vllm-0.10", "h100-sxm", 256, (1, 2, 4, *range(8, 513, 8))),
        ("vllm-0.19", "h100-sxm", 256, (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))),
        ("vllm-0.19", "h100-sxm", 20, (1, 2, 4, 8, 16, 24, 32, 40)),
        ("vllm-0.24", "b200-sxm", 1024, (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))),
        ("vllm-0.32", "b200-sxm", 1024, (1, 2, 4, *range(8, 256, 8), *range(256, 1025, 16))),
    ):
        engine = parts("llama-3.1-8b", gpu, preset=preset, max_num_seqs=seqs)[3]
        assert list(engine.graphs.decode) == list(sizes)
    for preset, largest in (("vllm-0.19", 288), ("vllm-0.24", 300), ("vllm-0.32", 300)):
        options = {"max_num_seqs": 256, "max_num_batched_tokens": 300, "max_cudagraph_capture_size": 400}
        engine = parts("llama-3.1-8b", "h100-sxm", preset=preset, **options)[3]
        assert engine.graphs.decode[-1] == largest, "from 0.24 the budget has a graph of its own"


def test_long_steps_take_longer_than_their_kernels_in_bursts() -> None:
    """Of a GPU for which that is known; decoding alone does not."""
    slow = cost("llama-3.1-8b", "b200-sxm")
    burst = slow.slowed(1 / slow.provenance["long_step_factor"])  # type: ignore[operator]
    assert slow.step_s([(2048, 0)], 0, 0) > 1.2 * burst.step_s([(2048, 0)], 0, 0)
    assert slow.decode_line(64, 64_000) == burst.decode_line(64, 64_000)
    other = cost("llama-3.1-8b", "h100-sxm")
    assert other.slowed(1.0) is other
    assert cost("llama-3.1-8b", "b200-sxm", preset="tensorrt-llm-1").provenance["long_step_factor"] == 1.0
