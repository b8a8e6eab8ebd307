"""Experts that are dealt out, and data parallel ranks that share them: limits, sums worked by hand, lockstep."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from calibrate.connectors import load_transfer_link
from calibrate.cost import compile_cost
from calibrate.coverage import outside_shares
from calibrate.datasheet import Datasheet
from calibrate.engine import EngineSpec, HostTime, resolve_engine
from calibrate.group_cost import GroupCost, RankStep, group_cost
from calibrate.hardware import load_gpu
from calibrate.kernels.routing import loads
from calibrate.layout import Parallelism, check_layout
from calibrate.model import ModelSpec
from calibrate.models import load_model
from calibrate.operator_spec import Operator
from calibrate.operators import step_operators
from calibrate.profile import FOLDER, load_profile
from calibrate.serving import served
from calibrate.weights import rank_weights
from servecast.errors import ServecastError

H100 = load_gpu("h100-sxm")
SHEET = Datasheet(H100)
NO_HOST = HostTime(*[0.0] * 8)
MODEL = "qwen3-30b-a3b"


def engine(**options: object) -> EngineSpec:
    spec = resolve_engine({"preset": "vllm-0.19", **options}, H100, load_model(MODEL), Parallelism(1))
    return replace(spec, host=NO_HOST)


SPEC = engine()
QWEN = served(load_model(MODEL), SPEC)  # 48 layers of 128 experts, of which a token runs 8; hidden size 2048


def group(dp: int, spec: EngineSpec = SPEC, **layout: object) -> GroupCost:
    return group_cost(QWEN, Parallelism(**{"tp": 1, "dp": dp, "ep": True, **layout}), spec, SHEET)  # type: ignore[arg-type]


def named(layout: Parallelism, model: ModelSpec = QWEN) -> dict[str, Operator]:
    return {op.name: op for op in step_operators(model, layout)}


def test_whole_experts_of_one_gpu_are_the_experts_cut_over_one() -> None:
    prices = load_profile(FOLDER / "h100-sxm.json")
    for at in (SHEET, prices):
        plain, dealt = (compile_cost(QWEN, Parallelism(1, ep=ep), SPEC, at) for ep in (False, True))
        assert plain.tokens_s == dealt.tokens_s
        assert plain.decode_base_s == dealt.decode_base_s


def test_a_gpu_of_four_has_a_quarter_of_the_experts_and_of_their_rows() -> None:
    cut, dealt = (named(Parallelism(4, ep=ep)) for ep in (False, True))
    assert set(cut) == set(dealt)
    for name in cut:
        if name != "experts":
            assert cut[name] == dealt[name]
    assert dealt["experts"].fixed_bytes == cut["experts"].fixed_bytes == 48 * 32 * 3 * 2048 * 768 * 2
    assert dealt["experts"].flops_per_row == cut["experts"].flops_per_row == 48 * 2 * 2 * 3 * 2048 * 768


def test_the_fullest_rank_sets_the_time_of_dealt_out_experts() -> None:
    """Uneven loads cost more, and more so on many ranks; where copies of experts balance them they do not."""
    prices = load_profile(FOLDER / "h100-sxm.json")

    def seconds(**layout: object) -> float:
        spread = Parallelism(8, ep=True, **layout)  # type: ignore[arg-type]
        return compile_cost(QWEN, spread, SPEC, prices).tokens_s[4096]

    balanced, skewed = seconds(expert_load="balanced"), seconds(expert_load="power_law_1.2")
    assert balanced < seconds() < skewed
    assert seconds(redundant_experts=16) == balanced
    with pytest.raises(ServecastError, match="skew: found 'even'; expected balanced"):
        seconds(expert_load="even")


def test_loads_of_experts_may_be_a_table() -> None:
    """Expert 0 gets an eighth of all rows, which is every token; the others share the rest."""
    even, uneven = (1.0,) * 128, (127 / 7,) + (1.0,) * 127
    active, rows = loads(uneven, _one(1000), 128, 8, 4)
    assert rows[0] == pytest.approx(1000 * (1 + 31 * 7 / 127))
    assert active[0] == pytest.approx(32)
    assert loads(even, _one(1000), 128, 8, 4)[1][0] == pytest.approx(loads("balanced", _one(1000), 128, 8, 4)[1][0])
    costs = [
        compile_cost(QWEN, Parallelism(4, ep=True, expert_load=load), SPEC, SHEET).tokens_s[8000]
        for load in (even, uneven)
    ]
    assert costs[0] < costs[1]
    with pytest.raises(ServecastError, match="found a table of 3 shares; expected 128"):
        loads((1.0, 1.0, 1.0), _one(1), 128, 8, 1)
    with pytest.raises(ServecastError, match=r"expert 1 has 50.0% of the rows.* 12.5% at most"):
        loads((1.0, 127.0) + (1.0,) * 126, _one(1), 128, 8, 1)


def test_copies_of_experts_take_memory() -> None:
    plain, copies = (rank_weights(QWEN, Parallelism(1, dp=8, ep=True, redundant_experts=n)) for n in (0, 32))
    assert plain["experts"] == 48 * 16 * 3 * 2048 * 768 * 2
    assert copies["experts"] == 48 * 20 * 3 * 2048 * 768 * 2
    deepseek = load_model("deepseek-v2-lite")  # 64 experts in 26 layers: of 24 GPUs the first hold 3
    assert rank_weights(deepseek, Parallelism(1, dp=24, ep=True))["experts"] == 26 * 3 * 3 * 2048 * 1408 * 2


def test_what_ranks_send_to_bring_tokens_to_experts_and_back() -> None:
    """Of a token 2048 elements and 8 choices of 8 bytes are gathered on all ranks, and 2048 sums scattered."""
    ops = named(Parallelism(1, dp=8, ep=True))
    assert ops["dispatch"].shape == (2048 + 32,)
    assert ops["combine"].shape == (2048,)
    assert {ops[name].rows for name in ("experts", "dispatch", "combine")} == {"group"}
    low = named(Parallelism(1, dp=8, ep=True, all2all_backend="deepep_low_latency"))
    assert low["dispatch"].bytes_per_row == low["combine"].bytes_per_row == 48 * 8 * 2048 * 2
    high = named(Parallelism(1, dp=8, ep=True, all2all_backend="deepep_high_throughput"))
    assert high["combine"].bytes_per_row == pytest.approx(48 * 8 * (1 - (7 / 8) ** 8) * 2048 * 2)
    deepseek = named(Parallelism(1, dp=8, ep=True, all2all_backend="deepep_low_latency"), load_model("deepseek-v3"))
    assert deepseek["dispatch"].bytes_per_row == 58 * 8 * (7168 + 56 * 4)  # its experts are fp8 in blocks
    # each of two GPUs with the same tokens takes half of them to the experts, and gets the rest back at the end
    halves = named(Parallelism(2, dp=4, ep=True, all2all_backend="deepep_low_latency"))
    assert halves["dispatch"].bytes_per_row == low["dispatch"].bytes_per_row / 2
    assert (halves["allreduce"].kernels, halves["experts_allgather"].kernels) == (48, 48)
    cut = named(Parallelism(2, dp=4))  # experts cut over all eight: nothing to take turns with
    assert (cut["allreduce"].kernels, cut["dispatch"].group) == (96, "dp")


def test_a_step_by_hand() -> None:
    """Two ranks with 3 and 5 tokens: both compute 8 (the next captured batch), and the experts 16."""
    cost = group(2)
    link, rate = H100.link, 450e9 * H100.link.share(2)
    moved = [link.latency_s + 16 * elements * 2 / 2 / rate for elements in (2048 + 32, 2048)]
    shared = 48 * (sum(moved) + float(SHEET.moe_s("bf16", _one(16), 2048, 768, 128, 8, 1, 2)[0]))
    assert cost.decode_shared_s[16] == pytest.approx(shared)
    alone = compile_cost(QWEN, Parallelism(1), SPEC, SHEET)
    experts = 48 * float(SHEET.moe_s("bf16", _one(8), 2048, 768, 128, 8, 1)[0])
    steps = [RankStep((), 3, 3000), RankStep((), 5, 100)]
    for step, (a, b, floor, _) in zip(steps, cost.decode_lines([(3, 3000), (5, 100)]), strict=True):
        own = alone.decode_tokens_s[5] - experts + alone.samples_s[step.decodes]
        kernel = alone.decode[step.decodes][0]
        assert a == pytest.approx(own + shared + kernel[1])
        assert (b, floor) == (kernel[2], 0.0)
    assert cost.step_s(steps) == max(
        a + b * kv for (a, b, _, _), kv in zip(cost.decode_lines([(3, 3000), (5, 100)]), (3000, 100), strict=True)
    )


def test_stages_of_a_group_add_up_to_it() -> None:
    layout = Parallelism(1, pp=3, dp=2, ep=True)
    parts = [group_cost(QWEN, layout, SPEC, SHEET, stage) for stage in range(3)]
    whole, work = group(2), [RankStep([(300, 40)], 3, 3000), RankStep((), 50, 9000)]
    assert sum(part.decode_shared_s[64] for part in parts) == pytest.approx(whole.decode_shared_s[64])
    assert sum(part.step_s(work) for part in parts) == pytest.approx(whole.step_s(work))


def test_one_rank_s_prompt_holds_up_all() -> None:
    cost = group(4)
    busy, idle = RankStep([(400, 0)]), RankStep()
    alone = cost.step_s([busy, idle, idle, idle])
    assert cost.step_s([busy, RankStep((), 100, 100), idle, idle]) == pytest.approx(alone, rel=0.01)
    # all compute as many tokens as the largest while a graph holds them; beyond it each its own
    assert cost.graph == 512
    assert cost.step_s([busy] * 4) == pytest.approx(alone)
    long = RankStep([(4000, 0)])
    assert cost.step_s([long] * 4) > 1.5 * cost.step_s([long, idle, idle, idle])


def test_without_graphs_nobody_is_padded() -> None:
    cost = group(2, replace(engine(enforce_eager=True), host=NO_HOST))
    assert cost.graph == cost.decode_graph == 0
    few, many = RankStep((), 1, 1), RankStep((), 64, 64)
    assert cost.step_s([few, many]) < cost.step_s([many, many])


step = st.builds(
    lambda chunks, decodes, each: RankStep(chunks, decodes, decodes * each),
    st.lists(st.tuples(st.integers(1, 400), st.integers(0, 5000)), max_size=2),
    st.integers(0, 200),
    st.integers(1, 5000),
)
FOUR = group(4, replace(SPEC, host=resolve_engine({"preset": "vllm-0.19"}, H100, load_model(MODEL)).host))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(step, min_size=4, max_size=4))
def test_a_step_is_as_long_as_its_slowest_rank(work: list[RankStep]) -> None:
    seconds = FOUR.step_s(work)
    assert FOUR.step_s(work[::-1]) == seconds
    assert FOUR.step_s([replace(work[0], kv_tokens=work[0].kv_tokens + 10 * work[0].decodes), *work[1:]]) >= seconds
    if not any(each.chunks for each in work):
        lines = FOUR.decode_lines([(each.decodes, each.kv_tokens) for each in work])
        assert seconds == max(
            max(floor, a + b * each.kv_tokens) for each, (a, b, floor, _) in zip(work, lines, strict=True)
        )


def test_groups_over_several_nodes_cross_the_network() -> None:
    with pytest.raises(
        ServecastError, match=r"16 GPUs \(tp 1 x pp 1 x dp 16\) are more than the 8 h100-sxm that NVLink 4"
    ):
        group(16)
    fast, slow = (group(16, network=load_transfer_link(name)) for name in ("rdma-400", "rdma-100"))
    assert slow.decode_shared_s[1024] > fast.decode_shared_s[1024]
    # each node needs the other's 512 tokens, which 8 adapters of 12.5 GB/s bring, 48 times there and back
    across = 48 * (2 * 20e-6 + 512 * (4096 + 64 + 4096) / 8 / (0.95 * 12.5e9))
    experts = 48 * float(SHEET.moe_s("bf16", _one(1024), 2048, 768, 128, 8, 1, 16)[0])
    assert slow.decode_shared_s[1024] == pytest.approx(across + experts)


def test_what_was_priced_outside_the_tables_is_said_of_every_layout() -> None:
    """Kernels were timed with all tokens on up to 256 GPUs, with the rows of 16 experts alone never."""
    prices = load_profile(FOLDER / "h100-sxm.json")
    steps = {"start_s": [0.0], "end_s": [1.0], "steps": [1], "prefill_requests": [0], "prefill_tokens": [0]}
    steps |= {"decodes": [64], "kv_tokens": [64000], "draft_tokens": [0]}
    block = {name: np.array(values, np.float64) for name, values in steps.items()}
    found = []
    for backend in ("allgather_reducescatter", "deepep_low_latency"):
        layout = Parallelism(1, dp=8, ep=True, all2all_backend=backend)  # type: ignore[arg-type]
        own = group_cost(QWEN, layout, SPEC, prices).own
        found.append(outside_shares(QWEN, layout, SPEC, prices, own, [block]))
    assert "moe" not in found[0]
    assert found[1]["moe"] > 0
    staged = Parallelism(1, pp=2)
    last = compile_cost(QWEN, staged, SPEC, prices, 1)
    assert "collective" not in outside_shares(QWEN, staged, SPEC, prices, last, [block], 1)
    with pytest.raises(ServecastError, match="dp 8: ranks that share the experts of qwen3-30b-a3b step together"):
        compile_cost(QWEN, Parallelism(1, dp=8, ep=True), SPEC, prices)


def test_a_rack_whose_nodes_share_a_link_needs_no_network() -> None:
    gb200 = load_gpu("gb200")
    assert group_cost(QWEN, Parallelism(4, dp=16, ep=True), SPEC, Datasheet(gb200)).ranks == 16
    with pytest.raises(ServecastError, match=r"128 GPUs .* are more than the 72 gb200 that NVLink 5 joins"):
        group_cost(QWEN, Parallelism(4, dp=32, ep=True), SPEC, Datasheet(gb200))


def test_deepep_is_priced_where_it_was_measured() -> None:
    prices = load_profile(FOLDER / "h100-sxm.json")
    sent = _one(64 * 8 * 7168 * 2)
    assert prices.collective_s("combine_low_latency", sent, 8)[0] == pytest.approx(39.7e-6, rel=0.05)
    assert prices.inside("collective", "combine_low_latency", sent, 8)[0]
    assert not load_profile(FOLDER / "a100-sxm.json").inside("collective", "combine_low_latency", sent, 8)[0]
    auto = Parallelism(1, dp=8, ep=True, all2all_backend="deepep_auto")
    costs = {
        name: group_cost(QWEN, replace(auto, all2all_backend=name), SPEC, prices).own
        for name in ("deepep_auto", "deepep_low_latency", "deepep_high_throughput")
    }
    assert costs["deepep_auto"].tokens_s == costs["deepep_high_throughput"].tokens_s
    assert costs["deepep_auto"].decode_tokens_s == costs["deepep_low_latency"].decode_tokens_s


def test_deepep_gives_a_gpu_the_rows_of_its_experts_alone() -> None:
    """Of 512 tokens' 4,096 rows the fullest of eight GPUs has so many, in a layer of 16 experts."""
    cost = group(8, all2all_backend="deepep_low_latency", expert_load="uniform")
    rows = loads("uniform", _one(512), 128, 8, 8)[1]
    assert 512 < rows[0] < 600
    alone = SHEET.moe_s("bf16", rows, 2048, 768, 16, 1, 1, 1, "balanced")[0]
    assert cost.decode_shared_s[512] == pytest.approx(48 * float(alone))


def test_ranks_without_experts_are_replicas() -> None:
    llama = load_model("llama-3.1-8b")
    with pytest.raises(ServecastError, match=r"dp 2: llama-3\.1-8b has no experts.*use replicas"):
        group_cost(served(llama, SPEC), Parallelism(1, dp=2), SPEC, SHEET)


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        (Parallelism(1, dp=8, redundant_experts=8), "only dealt out experts have copies"),
        (Parallelism(1, dp=8, ep=True, redundant_experts=-1), "redundant_experts is -1"),
        (Parallelism(1, dp=8, ep=True, redundant_experts=4), "8 GPUs .* do not divide the 132 experts"),
        (Parallelism(1, dp=8, all2all_backend="deepep_auto"), "brings tokens to experts dealt out whole; set ep"),
        (Parallelism(1, dp=8, all2all_backend="naive"), "'naive'; expected allgather_reducescatter"),  # type: ignore[arg-type]
    ],
)
def test_wrong_layouts_are_refused_with_the_reason(layout: Parallelism, said: str) -> None:
    (problem,) = check_layout(QWEN, layout, H100)
    assert re.search(said, problem)


def _one(value: float) -> NDArray[np.float64]:
    return np.array([float(value)])
