"""Steps in two halves: the closed form against two streams of work, when steps are split, and what must hold."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibrate.connectors import load_transfer_link
from calibrate.datasheet import Datasheet
from calibrate.engine import EngineSpec, HostTime, Overlap, resolve_engine
from calibrate.group_cost import GroupCost, RankStep, group_cost
from calibrate.hardware import load_gpu
from calibrate.kernel_times import operator_s
from calibrate.layout import Parallelism
from calibrate.layout_rules import check_engine_layout
from calibrate.models import load_model
from calibrate.operators import step_operators
from calibrate.overlap import Halves, Parts, cut
from calibrate.profile import FOLDER, load_profile
from calibrate.serving import served
from servecast.errors import ServecastError

H200 = load_gpu("h200-sxm")
PRICES = load_profile(FOLDER / "h200-sxm.json")
NO_HOST = HostTime(*[0.0] * 8)
MODEL = "deepseek-v3"
LOW, HIGH = "deepep_low_latency", "deepep_high_throughput"
NAMES = ("outside", "before", "shared", "there", "experts", "back")


def streams(times: dict[str, float], attention: Sequence[float], layers: int, dense: int, way: str) -> float:
    """The end of a step on a stream that computes and one that sends, as vLLM's two threads queue the work of their
    halves, turn by turn; an event says what must be over before work starts."""
    compute = comm = 0.0  # when each stream is free
    done: dict[tuple[str, int], float] = {}

    def run(half: int, seconds: float, *after: float) -> float:
        nonlocal compute
        compute = max(compute, *after, 0.0) + seconds
        return compute

    def send(half: int, seconds: float, *after: float) -> float:
        nonlocal comm
        comm = max(comm, *after) + seconds
        return comm

    for layer in range(layers):
        for half in (0, 1):
            first = times["outside"] + dense * attention[half] if layer == 0 else 0.0
            done["before", half] = run(half, first + times["before"] + attention[half], done.get(("back", half), 0.0))
            if way == "hooks":  # the other half's transfer is received before this one's is sent
                other = done.get(("back", 1), 0.0) if half == 0 else done["there", 0]
                compute = max(compute, other)
                done["there", half] = compute + times["there"]
            if half == 1 and way == "early":
                for h in (0, 1):
                    done["there", h] = send(h, times["there"], done["before", h])
        for half in (0, 1):
            if way == "late":  # a transfer waits for all that was queued on the stream that computes
                done["there", half] = send(half, times["there"], compute)
            done["experts", half] = run(half, times["experts"], done["there", half])
            if way == "hooks":
                compute = max(compute, done["there", 1] if half == 0 else done["back", 0])
                done["back", half] = compute + times["back"]
                run(half, times["shared"])
        if way == "early":
            for half in (0, 1):
                done["back", half] = send(half, times["back"], done["experts", half])
                run(half, times["shared"])
        if way == "late":
            for half in (0, 1):
                done["back", half] = send(half, times["back"], compute)
                run(half, times["shared"])
    return max(compute, done["back", 0], done["back", 1])


some = st.floats(0.0, 10.0)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.fixed_dictionaries(dict.fromkeys(NAMES, some)),
    st.tuples(some, some),
    st.integers(1, 5),
    st.integers(0, 3),
    st.sampled_from(["hooks", "early", "late"]),
)
def test_the_closed_form_is_what_two_streams_take(
    times: dict[str, float], attention: tuple[float, float], layers: int, dense: int, way: str
) -> None:
    parts = Parts(**{name: array("d", [0.0, seconds]) for name, seconds in times.items()}, hooks=way == "hooks")
    halves = Halves(Overlap(2, 2, way == "late", False), layers, dense, parts, parts, 0, 0.0)
    found = halves.seconds(True, 2, *attention)
    assert found == pytest.approx(streams(times, attention, layers, dense, way))
    # never faster than all that is computed, nor than all that is sent
    computed = 2 * (times["outside"] + layers * (times["before"] + times["shared"] + times["experts"]))
    assert found >= computed + (layers + dense) * sum(attention) - 1e-9
    assert found >= 2 * layers * (times["there"] + times["back"]) - 1e-9


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.fixed_dictionaries(dict.fromkeys(NAMES, some)),
    st.sampled_from(["hooks", "early", "late"]),
    st.integers(0, 1000),
    st.floats(0.001, 0.1),
    st.floats(0.001, 0.1),
)
def test_lines_are_the_closed_form_as_far_as_they_say(
    times: dict[str, float], way: str, kv: int, slope: float, other: float
) -> None:
    parts = Parts(**{name: array("d", [0.0, seconds]) for name, seconds in times.items()}, hooks=way == "hooks")
    halves = Halves(Overlap(2, 2, way == "late", False), 4, 1, parts, parts, 0, 0.0)
    base, rise, _, upto = halves.line(2, kv, (1.0, slope, 1e6), (2.0, other, 1e6))
    assert upto >= kv
    for tokens in (kv, min(upto, kv + 100), upto):
        exact = halves.seconds(False, 2, 1.0 + slope * tokens, 2.0 + other * tokens)
        assert base + rise * tokens == pytest.approx(exact)


def test_a_batch_is_cut_by_tokens_decodes_first() -> None:
    assert cut([(300, 0), (500, 64)], 100, 450) == (([(300, 0), (50, 64)], 100), ([(450, 114)], 0))
    assert cut([(10, 7)], 100, 50) == (([], 50), ([(10, 7)], 50))
    assert cut((), 9, 5) == (([], 5), ([], 4))


def spec(preset: str = "vllm-0.24", **options: object) -> EngineSpec:
    options = {"max_num_seqs": 512, "max_num_batched_tokens": 8192, "max_model_len": 8192, **options}
    return resolve_engine({"preset": preset, **options}, H200, load_model(MODEL))


def group(dp: int, backend: str, engine: EngineSpec) -> GroupCost:
    network = load_transfer_link("rdma-400") if dp > 8 else None
    layout = Parallelism(1, dp=dp, ep=True, all2all_backend=backend, network=network)  # type: ignore[arg-type]
    return group_cost(served(load_model(MODEL), engine), layout, engine, PRICES)


def pair(dp: int, backend: str, preset: str = "vllm-0.24", **options: object) -> tuple[GroupCost, GroupCost]:
    """Without and with halves."""
    return group(dp, backend, spec(preset, **options)), group(dp, backend, spec(preset, enable_dbo=True, **options))


def gain(costs: tuple[GroupCost, GroupCost], step: RankStep) -> float:
    work = [step] * costs[0].ranks
    return costs[0].step_s(work) / costs[1].step_s(work) - 1


FAR, NEAR = pair(32, LOW), pair(8, LOW)


def decoding(n: int) -> RankStep:
    return RankStep((), n, 2000 * n)


def test_below_its_thresholds_nothing_changes() -> None:
    whole, halved = FAR
    assert halved.halves is not None
    for step in (decoding(1), decoding(31), RankStep([(511, 100)]), RankStep([(400, 0)], 50, 9000)):
        assert halved.step_s([step] * 32) == whole.step_s([step] * 32)
    assert halved.step_s([decoding(32)] * 32) != whole.step_s([decoding(32)] * 32)
    assert halved.step_s([RankStep([(512, 0)])] * 32) != whole.step_s([RankStep([(512, 0)])] * 32)
    lower = pair(32, LOW, dbo_decode_token_threshold=8)[1]
    assert lower.step_s([decoding(8)] * 32) != whole.step_s([decoding(8)] * 32)


def test_one_rank_that_has_too_few_keeps_all_whole() -> None:
    whole, halved = FAR
    many, few = decoding(200), decoding(20)
    assert halved.step_s([many] * 31 + [few]) == whole.step_s([many] * 31 + [few])
    # all wish it, but the second half of 100 tokens, of 200, would be empty on the last rank
    work = [many] * 31 + [decoding(100)]
    assert halved.step_s(work) == whole.step_s(work)
    newer = pair(32, LOW, "vllm-0.32")
    assert newer[1].step_s(work) != newer[0].step_s(work), "a dummy takes its place"
    # a rank that decodes has a threshold of its own, until 0.32, where the prompts' holds for all
    mixed = [RankStep([(600, 0)])] * 31 + [decoding(400)]
    assert halved.step_s(mixed) != whole.step_s(mixed)
    assert newer[1].step_s(mixed) == newer[0].step_s(mixed)


def test_far_away_it_pays_for_many_tokens_and_costs_for_few() -> None:
    """The direction of SGLang's measurements on 32 H100 and more (LMSYS, 2025-05-05), and of vLLM's developers, who
    expect nothing inside a node (vllm-project/vllm#23693)."""
    gains = [gain(FAR, decoding(n)) for n in (32, 128, 512)]
    assert gains == sorted(gains)
    assert gains[0] < 0 < gains[1]
    assert gain(FAR, RankStep([(4096, 0)])) > 0
    assert gain(NEAR, decoding(32)) < -0.2, "all weights are read twice"
    assert all(gain(NEAR, decoding(n)) < gain(FAR, decoding(n)) for n in (32, 128, 512))


def test_high_throughput_kernels_waited_for_the_other_half_once() -> None:
    late, early = pair(32, HIGH, "vllm-0.19"), pair(32, HIGH, "vllm-0.24")
    prompt = RankStep([(4096, 0)])
    assert gain(late, prompt) < gain(early, prompt)
    assert gain(early, prompt) > 0


def test_a_half_step_by_hand() -> None:
    """64 decodes a rank on 8 ranks: every part is that of 32, experts that of 256."""
    halves = NEAR[1].halves
    assert halves is not None
    engine = spec()
    model = served(load_model(MODEL), engine)
    layout = Parallelism(1, dp=8, ep=True, all2all_backend=LOW)  # type: ignore[arg-type]
    ops = {op.name: op for op in step_operators(model, layout)}

    def of(name: str, rows: float) -> float:
        return float(operator_s(ops[name], np.array([rows]), layout, PRICES)[0])

    assert halves.decode.there[32] == pytest.approx(of("dispatch", 32))
    assert halves.decode.back[32] == pytest.approx(of("combine", 32))
    assert halves.decode.experts[32] == pytest.approx(of("experts", 256))
    activation = float(PRICES.elementwise_s("activation", np.array([32.0]), 3 * 2048)[0])
    shared = sum(of(name, 32) for name in ("shared_gate_up", "shared_down", "shared_add"))
    assert halves.decode.shared[32] == pytest.approx(shared + activation)
    # all that a whole step of 32 has is somewhere
    whole = NEAR[0]
    total = 58 * (halves.decode.before[32] + halves.decode.shared[32] + halves.decode.there[32])
    total += 58 * halves.decode.back[32] + halves.decode.outside[32]
    assert total == pytest.approx(whole.own.decode_tokens_s[32])
    assert whole.decode_shared_s[256] == pytest.approx(58 * halves.decode.experts[32])


work = st.lists(
    st.builds(lambda n, each: RankStep((), n, n * each), st.integers(0, 400), st.integers(1, 5000)),
    min_size=8,
    max_size=8,
)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(work)
def test_a_run_of_steps_lies_on_its_lines(steps: list[RankStep]) -> None:
    cost = NEAR[1]
    if not any(step.decodes for step in steps):
        return
    lines = cost.decode_lines([(step.decodes, step.kv_tokens) for step in steps])
    seconds = cost.step_s(steps)
    assert seconds == max(
        max(floor, a + b * step.kv_tokens) for step, (a, b, floor, _) in zip(steps, lines, strict=True)
    )
    for step, (a, b, floor, upto) in zip(steps, lines, strict=True):
        assert upto >= step.kv_tokens
        if step.decodes and upto < float("inf"):
            there = cost.decode_lines([(s.decodes, int(upto) if s is step else s.kv_tokens) for s in steps])
            again = there[steps.index(step)]
            if int(upto) >= step.kv_tokens:
                assert max(again[2], again[0] + again[1] * int(upto)) == pytest.approx(max(floor, a + b * int(upto)))
    more = [replace(step, kv_tokens=step.kv_tokens + 10 * step.decodes) for step in steps]
    assert cost.step_s(more) >= seconds


def test_the_host_launches_both_halves_where_no_graph_does() -> None:
    host = replace(NO_HOST, layer_s=10e-3)
    halved = group(8, LOW, replace(spec(enable_dbo=True), host=host))
    assert halved.step_s([RankStep([(600, 0)])] * 8) >= 2 * 61 * 10e-3
    assert halved.step_s([decoding(64)] * 8) < 10e-3 * 61
    pieces = group(8, LOW, replace(spec(enable_dbo=True, cudagraph_mode="PIECEWISE"), host=host))
    assert pieces.step_s([decoding(64)] * 8) >= 2 * 61 * 10e-3


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        (Parallelism(8), "dp is 1; set cluster.dp"),
        (Parallelism(1, dp=8, ep=True), "only DeepEP's traffic overlaps; set cluster.ep, and cluster.experts.all2all"),
        (Parallelism(4, dp=2, ep=True, dcp=4, all2all_backend="deepep_low_latency"), "not modelled with dcp above 1"),
        (Parallelism(4, dp=2, ep=True, pp=2, all2all_backend="deepep_low_latency"), "not modelled with pp above 1"),
    ],
)
def test_what_is_missing_is_said(layout: Parallelism, said: str) -> None:
    engine = spec(enable_dbo=True)
    (problem,) = check_engine_layout(served(load_model(MODEL), engine), layout, engine)
    assert problem.startswith("engine.enable_dbo: ")
    assert said in problem


def test_versions_without_it_say_so() -> None:
    with pytest.raises(ServecastError, match=r"enable_dbo: vllm-0\.10 does not have this option"):
        spec("vllm-0.10", enable_dbo=True)
    with pytest.raises(ServecastError, match="dbo_decode_token_threshold is 1; expected a whole number of at least 2"):
        spec(dbo_decode_token_threshold=1)
    assert spec(enable_dbo=False).overlap is None


SHEET = Datasheet(H200)


def test_the_datasheet_prices_it_too() -> None:
    engine = spec(enable_dbo=True)
    layout = Parallelism(1, dp=8, ep=True, all2all_backend="deepep_high_throughput")
    cost = group_cost(served(load_model(MODEL), engine), layout, engine, SHEET)
    assert 0 < cost.step_s([decoding(64)] * 8) < 1
