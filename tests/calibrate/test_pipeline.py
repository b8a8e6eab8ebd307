"""Stages of a pipeline: together they do what the whole model does, and hand on what they must."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

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
from calibrate.pipeline import StageCost, stage_costs
from calibrate.serving import served
from calibrate.stages import stage_model
from servecast.errors import ServecastError

WHOLE = Parallelism(2)
NO_HOST = HostTime(*[0.0] * 8)


def engine(gpu: str = "h100-sxm", model: str = "llama-3.1-70b", **options: object) -> EngineSpec:
    return resolve_engine({"preset": "vllm-0.19", **options}, load_gpu(gpu), load_model(model), WHOLE)


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


def test_the_host_plans_once_a_step_and_launches_what_a_stage_runs() -> None:
    spec = engine(async_scheduling=False)
    first, last = stages(Parallelism(2, 2), spec)
    assert not any(first.cost.after_s)
    assert last.cost.after_s[8] == spec.host.sync_base_s + 8 * spec.host.sync_per_sequence_s
    eager = engine(enforce_eager=True, async_scheduling=False)
    parts = stages(Parallelism(2, 2), eager)
    assert [part.cost.launch_s[100] for part in parts] == [pytest.approx(40 * eager.host.eager_layer_s)] * 2


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
