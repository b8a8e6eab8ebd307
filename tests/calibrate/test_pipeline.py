"""Stages of a pipeline: together they do what the whole model does, and hand on what they must."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibrate.connectors import load_transfer_link
from calibrate.cost import compile_cost
from calibrate.datasheet import Datasheet
from calibrate.engine import EngineSpec, HostTime, resolve_engine
from calibrate.hardware import load_gpu
from calibrate.layout import Parallelism
from calibrate.models import load_model, model_names
from calibrate.operators import attention_groups, attention_operators, step_operators, step_work
from calibrate.pipeline import InSeries, PipelineCost, StageCost, pipeline_cost, stage_costs
from calibrate.serving import served
from calibrate.stages import stage_model
from servecast.errors import ServecastError

WHOLE = Parallelism(2)
NO_HOST = HostTime(*[0.0] * 8)


def engine(gpu: str = "h100-sxm", model: str = "llama-3.1-70b", **options: object) -> EngineSpec:
    return resolve_engine({"preset": "vllm-0.19"} | options, load_gpu(gpu), load_model(model), WHOLE)


def stages(layout: Parallelism, spec: EngineSpec, model: str = "llama-3.1-70b") -> tuple[StageCost, ...]:
    return stage_costs(served(load_model(model), spec), layout, spec, Datasheet(load_gpu("h100-sxm")))


@pytest.mark.parametrize("name", model_names())
@pytest.mark.parametrize("pp", [2, 3, 7])
def test_the_stages_of_every_model_do_what_the_whole_does(name: str, pp: int) -> None:
    model, tp = load_model(name), 1
    layout = Parallelism(tp, pp)
    whole, parts, keys = Counter[object](), Counter[object](), Counter[object]()
    for op in (*step_operators(model, Parallelism(tp)), *attention_operators(model, Parallelism(tp))):
        whole[op.name, op.shape, op.weights] += op.kernels
        keys[op.name, op.shape, op.weights, "bytes"] += op.fixed_bytes
    for group in attention_groups(model, Parallelism(tp)):
        whole[replace(group, layers=0)] += group.layers
    for stage in range(pp):
        for op in (*step_operators(model, layout, stage), *attention_operators(model, layout, stage)):
            parts[op.name, op.shape, op.weights] += op.kernels
            keys[op.name, op.shape, op.weights, "bytes"] -= op.fixed_bytes
        for group in attention_groups(model, layout, stage):
            parts[replace(group, layers=0)] += group.layers
    assert parts == whole
    assert not any(keys.values())


def test_layers_of_all_kinds_are_dealt_evenly() -> None:
    parts = [stage_model(load_model("deepseek-v3"), Parallelism(1, 4), stage) for stage in range(4)]
    assert [part.layers for part in parts] == [15, 15, 16, 15]
    assert sorted(part.dense_layers for part in parts) == [0, 1, 1, 1]
    parts = [stage_model(load_model("gpt-oss-120b"), Parallelism(1, 2), stage) for stage in range(2)]
    assert [part.windows[0].layers for part in parts] == [9, 9]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.sampled_from([2, 4]),
    st.lists(st.tuples(st.integers(1, 512), st.integers(0, 50_000)), max_size=3),
    st.integers(0, 200),
    st.integers(0, 1_000_000),
)
def test_without_a_host_the_stages_add_up_to_the_whole_step(
    pp: int, chunks: list[tuple[int, int]], decodes: int, kv: int
) -> None:
    spec = replace(engine(), host=NO_HOST)
    kv = kv if decodes else 0
    parts = [stage.step_s(chunks, decodes, kv) for stage in _stages(pp)]
    whole = compile_cost(served(load_model("llama-3.1-70b"), spec), WHOLE, spec, Datasheet(load_gpu("h100-sxm")))
    assert sum(parts) == pytest.approx(whole.step_s(chunks, decodes, kv), rel=1e-9)
    for number, (stage, part) in enumerate(zip(_stages(pp), parts, strict=True)):
        done = step_work(load_model("llama-3.1-70b"), Parallelism(2, pp), chunks, decodes, kv, number)
        assert part >= max(done.flops / 989e12, done.hbm_bytes / 3.35e12)
        if decodes and not chunks:
            a, b, floor, upto = stage.decode_line(decodes, kv)
            assert part == max(floor, a + b * kv)
            assert kv <= upto


_KEPT: dict[int, tuple[StageCost, ...]] = {}


def _stages(pp: int) -> tuple[StageCost, ...]:
    if pp not in _KEPT:
        _KEPT[pp] = stages(Parallelism(2, pp), replace(engine(), host=NO_HOST))
    return _KEPT[pp]


def test_one_stage_is_the_whole_bit_for_bit() -> None:
    spec = engine()
    (only,) = stages(WHOLE, spec)
    model = served(load_model("llama-3.1-70b"), spec)
    whole = compile_cost(model, WHOLE, spec, Datasheet(load_gpu("h100-sxm")))
    tables = ("tokens_s", "samples_s", "after_s", "floor_s", "launch_s", "decode_base_s", "decode_floor_s", "decode")
    assert all(getattr(only.cost, name) == getattr(whole, name) for name in tables)
    assert only.step_s([(700, 40)], 30, 9000) == whole.step_s([(700, 40)], 30, 9000)
    assert only.send_s(512) == 0.0


def test_the_host_plans_once_a_batch_and_launches_what_a_stage_runs() -> None:
    """One process plans for all stages, so none of them is busy with it; each of their workers launches its kernels."""
    model = served(load_model("llama-3.1-70b"), engine())

    def cost(preset: str, **options: Any) -> PipelineCost | InSeries:
        spec = engine(preset=preset, **options)
        return pipeline_cost(model, Parallelism(2, 2), spec, Datasheet(load_gpu("h100-sxm")))

    in_turn, staggered = cost("vllm-0.10"), cost("vllm-0.32")
    host = engine().host
    assert isinstance(in_turn, PipelineCost)
    assert isinstance(staggered, PipelineCost)
    assert in_turn.host_s[8] == host.sync_base_s + 8 * host.sync_per_sequence_s
    assert staggered.host_s[8] == host.async_base_s + 8 * host.async_per_sequence_s
    assert not any(any(stage.cost.after_s) for stage in in_turn.stages)
    assert all(stage.cost.after_s[8] == host.bubble_s for stage in staggered.stages)
    eager = cost("vllm-0.10", enforce_eager=True)
    assert [part.cost.launch_s[100] for part in eager.stages] == [pytest.approx(40 * 12 * host.eager_launch_s)] * 2


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.sampled_from([2, 4]),
    st.booleans(),
    st.lists(st.tuples(st.integers(1, 512), st.integers(0, 50_000)), max_size=3),
    st.integers(1, 200),
    st.integers(1, 400_000),
)
def test_in_series_a_step_takes_what_its_stages_take(
    pp: int, eager: bool, chunks: list[tuple[int, int]], decodes: int, kv: int
) -> None:
    serial = _serial(pp, eager)
    tokens = decodes + sum(q for q, _ in chunks)
    each = [stage.step_s(chunks, decodes, kv) + stage.send_s(tokens) for stage in serial.stages]
    host, samples = engine().host, decodes + len(chunks)
    floor = host.async_base_s + host.async_per_sequence_s * samples + host.bubble_s
    assert serial.step_s(chunks, decodes, kv) == pytest.approx(max(sum(each) + host.bubble_s, floor), rel=1e-9)
    a, b, least, upto = serial.decode_line(decodes, kv)
    for at in (kv, int(min(upto, kv + 3000))):
        assert serial.step_s((), decodes, at) == pytest.approx(max(least, a + b * at), rel=1e-9)


_SERIAL: dict[tuple[int, bool], InSeries] = {}


def _serial(pp: int, eager: bool) -> InSeries:
    if (pp, eager) not in _SERIAL:
        spec = engine(enforce_eager=eager)
        model = served(load_model("llama-3.1-70b"), spec)
        found = pipeline_cost(model, Parallelism(2, pp), spec, Datasheet(load_gpu("h100-sxm")))
        assert isinstance(found, InSeries)
        _SERIAL[pp, eager] = found
    return _SERIAL[pp, eager]


def test_what_is_handed_on_and_over_which_link() -> None:
    """8,192 elements a token, twice, in 16 bit: half from each of two GPUs, then put together."""
    spec = engine()
    first, _ = stages(Parallelism(2, 2), spec)
    link, tokens = load_gpu("h100-sxm").link, 2048
    rate = link.share(2) * link.bandwidth_bytes_per_s
    one = tokens * 8192 * 2 / 2 / rate
    assert first.send_s(tokens) == pytest.approx(4 * link.latency_s + 4 * one)
    network = load_transfer_link("rdma-400")
    first, _ = stages(Parallelism(8, 2, network=network), spec)
    share = tokens * 8192 * 2 / 8
    across = 20e-6 + share / (0.72 * 50e9)
    gather = link.latency_s + 7 / 8 * 8 * share / (link.share(8) * link.bandwidth_bytes_per_s)
    assert first.send_s(tokens) == pytest.approx(2 * across + 2 * gather)
    # four stages of four GPUs on nodes of eight: only the second of three hand-overs leaves its node
    sends = [stage.send_s(tokens) for stage in stages(Parallelism(4, 4, network=network), spec)]
    assert sends[0] == sends[2] < sends[1] < 1e-3
    assert sends[3] == 0.0


def test_a_pipeline_over_nodes_needs_a_network() -> None:
    with pytest.raises(
        ServecastError, match=r"16 GPUs \(tp 8 x pp 2 x dp 1\) are more than the 8 h100-sxm that NVLink 4"
    ):
        stages(Parallelism(8, 2), engine())
