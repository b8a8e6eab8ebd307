"""GPUs that share the tokens of a KV cache (dcp) or of a step (pcp): sums by hand, vLLM's rules, what must hold."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibrate.connectors import load_transfer_link
from calibrate.cost import CompiledCost, compile_cost
from calibrate.coverage import outside_shares
from calibrate.datasheet import Datasheet
from calibrate.engine import EngineSpec, HostTime, resolve_engine
from calibrate.hardware import load_gpu
from calibrate.kernel_times import kernels_s
from calibrate.kernels.chunks import DealtChunks
from calibrate.kernels.heads import HeadShape
from calibrate.kvgroups import kv_pool
from calibrate.layout import Parallelism, check_layout
from calibrate.layout_rules import check_engine_layout
from calibrate.memory import plan_memory
from calibrate.model import ModelSpec
from calibrate.models import load_model
from calibrate.operator_spec import Operator
from calibrate.operators import attention_operators, decode_attention, step_operators
from calibrate.pipeline import stage_costs
from calibrate.profile import FOLDER, load_profile
from calibrate.serving import served
from calibrate.weights import rank_weights

H100, H200 = load_gpu("h100-sxm"), load_gpu("h200-sxm")
SHEET = Datasheet(H200)
NO_HOST = HostTime(*[0.0] * 8)


def engine(model: str, preset: str = "vllm-0.32", **options: object) -> EngineSpec:
    options = {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "max_model_len": 32768, **options}
    return replace(resolve_engine({"preset": preset, **options}, H200, load_model(model)), host=NO_HOST)


def cost(model: str, layout: Parallelism, **options: object) -> CompiledCost:
    spec = engine(model, **options)
    return compile_cost(served(load_model(model), spec), layout, spec, SHEET)


def named(model: ModelSpec, layout: Parallelism) -> dict[str, Operator]:
    return {op.name: op for op in (*step_operators(model, layout), *attention_operators(model, layout))}


LATENT = served(load_model("deepseek-v3"), engine("deepseek-v3"))  # 61 layers, 128 heads, latents of 512 + 64
GROUPED = served(load_model("qwen3-235b-a22b"), engine("qwen3-235b-a22b"))  # 94 layers, 64 heads over 4 KV heads of 128


def test_what_ranks_of_a_cache_send_each_other_for_grouped_heads() -> None:
    """On 8 GPUs, 4 KV heads: two ranks have the same one, and 8 query heads each."""
    ops = named(GROUPED, Parallelism(8, dcp=2))
    alone = named(GROUPED, Parallelism(8))
    assert set(ops) - set(alone) == {"dcp_query", "dcp_lse", "dcp_correct", "dcp_out", "dcp_merge"}
    assert all(ops[name] == alone[name] for name in alone)
    # queries of both ranks, 16-bit; a rank sends its 8 heads to the other
    assert ops["dcp_query"].shape == (2 * 8 * 128,)
    assert ops["dcp_query"].bytes_per_row == 94 * 8 * 128 * 2
    # two 32-bit sums of 16 heads: counted in 16-bit elements
    assert ops["dcp_lse"].shape == (2 * 16 * 4 // 2,)
    assert ops["dcp_lse"].bytes_per_row == 94 * 16 * 4
    assert ops["dcp_out"].shape == (16 * 128,)
    assert ops["dcp_out"].bytes_per_row == 94 * 16 * 128 * 2 / 2
    assert {op.group for name, op in ops.items() if name.startswith("dcp") and op.family != "elementwise"} == {"dcp"}
    assert {op.rows for name, op in ops.items() if name.startswith("dcp")} == {"tokens"}
    layout = Parallelism(8, dcp=2, pp=2)
    assert (layout.ranks("dcp"), layout.ranks("dcp", 1)) == ([0, 1], [8, 9])


def test_what_they_send_each_other_for_latents() -> None:
    """16 heads a rank, whose queries are 576 wide and outputs 512; of decoding tokens, and of prompts' cached ones."""
    ops = named(LATENT, Parallelism(8, dcp=8))
    assert ops["dcp_query"].shape == (128 * 576,)
    assert ops["dcp_query"].bytes_per_row == 61 * 7 * 16 * 576 * 2
    assert ops["dcp_lse"].bytes_per_row == 61 * 7 * 128 * 4
    assert ops["dcp_out"].bytes_per_row == 61 * 128 * 512 * 2 * 7 / 8
    assert ops["dcp_context"].shape == (576,)
    assert {name: op.rows for name, op in ops.items() if name.startswith("dcp")} == {
        "dcp_query": "decodes", "dcp_lse": "decodes", "dcp_correct": "decodes", "dcp_out": "decodes",
        "dcp_context": "chunk_context",
    }  # fmt: skip


@pytest.mark.parametrize(("name", "own"), [("qwen3-235b-a22b", 8), ("deepseek-v3", 16)])
def test_a_decode_step_by_hand(name: str, own: int) -> None:
    """Each of two ranks reads half of the tokens, for twice its query heads; the rest is what is sent and merged."""
    model = GROUPED if name.startswith("qwen") else LATENT
    shared, alone = (cost(name, Parallelism(8, dcp=dcp)) for dcp in (2, 1))
    kv, n = 40000, 8
    beside = [op for op in named(model, Parallelism(8, dcp=2)).values() if op.name.startswith("dcp")]
    link, rate = H200.link, H200.link.share(2) * H200.link.bandwidth_bytes_per_s
    more = 0.0
    for op in beside:
        if op.family == "elementwise":
            more += op.kernels * float(SHEET.elementwise_s(op.name, np.array([float(n)]), *op.shape)[0])
        elif op.rows != "chunk_context":
            more += op.kernels * (link.latency_s + n * op.shape[0] * 2 / 2 / rate)
    size = (model.latent.cached, model.latent.kv_rank) if model.latent else (128, 128)

    def read_s(heads: int, tokens: int) -> float:
        kernel = SHEET.decode(HeadShape("bf16", heads, 1, *size), 64)
        return model.layers * kernel.seconds(n, tokens)

    expected = read_s(2 * own, kv // 2) - read_s(own, kv) + more
    assert shared.step_s((), n, kv) == pytest.approx(alone.step_s((), n, kv) + expected)
    kernels = [kernels_s(model, Parallelism(8, dcp=dcp), SHEET, (), n, kv) for dcp in (2, 1)]
    assert kernels[0] - kernels[1] == pytest.approx(expected)


def test_chunks_of_prompts_bring_the_latents_of_what_they_follow() -> None:
    """All heads of all cached tokens as without sharing, once they are there."""
    shared, alone = (cost("deepseek-v3", Parallelism(8, dcp=dcp)) for dcp in (8, 1))
    assert shared.attention_s([(1000, 0)], 0, 0) == alone.attention_s([(1000, 0)], 0, 0)
    brought = SHEET.collective_s("allgather", np.array([32768.0 * 576 * 2]), 8)[0]
    more = shared.attention_s([(1000, 32768)], 0, 0) - alone.attention_s([(1000, 32768)], 0, 0)
    assert more == pytest.approx(61 * float(brought))


@pytest.mark.parametrize("name", ["qwen3-235b-a22b", "deepseek-v3"])
def test_sharing_among_one_is_none_and_more_ranks_read_less(name: str) -> None:
    model = GROUPED if name.startswith("qwen") else LATENT
    assert cost(name, Parallelism(8, dcp=1)).decode == cost(name, Parallelism(8)).decode
    sizes = (1, 2) if name.startswith("qwen") else (1, 2, 4, 8)
    works = [decode_attention(model, Parallelism(8, dcp=n), 16, 10**7) for n in sizes]
    for less, more in pairwise(works):
        assert more.hbm_bytes < less.hbm_bytes
        assert more.flops == less.flops
    steps = [cost(name, Parallelism(8, dcp=n)).step_s((), 16, 16 * 30000) for n in sizes]
    assert steps[-1] < steps[0], "long contexts are what it is for"
    short = [cost(name, Parallelism(8, dcp=n)).step_s((), 16, 16) for n in sizes]
    assert short[-1] > short[0], "short ones pay for what is sent"


def test_memory_is_vllms_rule() -> None:
    """As many blocks, which hold dcp times the tokens (`num_tokens *= dcp_world_size` of v1/core/kv_cache_utils.py);
    a sequence of max_model_len needs ceil(max_model_len / dcp) of them on a rank (v1/kv_cache_interface.py)."""
    spec = engine("deepseek-v3", kv_cache_dtype="bfloat16")
    one, eight = (plan_memory(LATENT, Parallelism(8, dcp=n), H200, spec) for n in (1, 8))
    assert eight.num_gpu_blocks == one.num_gpu_blocks
    assert eight.size_by_blocks() == 8 * one.size_by_blocks()
    assert eight.block_size == 8 * one.block_size == 128
    assert kv_pool(LATENT, spec, 8, 8).blocks(32768) == 32768 // 8 // 16
    assert eight.kv_bytes_per_token * 8 == one.kv_bytes_per_token


def test_ranks_of_a_step_compute_their_part_of_it() -> None:
    """With pcp 2 and 4 GPUs of tp: experts are cut over 8, the KV of all is on each, hidden states are gathered."""
    layout = Parallelism(4, pcp=2, pp=2)
    assert (layout.gpus, layout.sharing_experts, layout.expert_tp) == (16, 8, 8)
    assert (layout.ranks("tp", 1), layout.ranks("pcp", 1)) == ([8, 9, 10, 11], [8, 12])
    assert (layout.ranks("stage", 1), len(layout.ranks("experts"))) == ([8, 16], 8)
    ops, alone = named(LATENT, Parallelism(4, pcp=2)), named(LATENT, Parallelism(4))
    assert set(ops) - set(alone) == {"pcp_kv", "pcp_hidden", "dispatch", "combine"}
    gathered = [op for op in step_operators(LATENT, Parallelism(4, pcp=2)) if op.name == "pcp_kv"]
    assert [(op.shape, op.kernels) for op in gathered] == [((512,), 61), ((64,), 61)]
    assert sum(op.bytes_per_row for op in gathered) == 61 * 576 * 2 / 2
    assert {name for name in ops if ops[name].rows == "group"} == {
        "pcp_kv", "pcp_hidden", "dispatch", "combine", "experts",
    }  # fmt: skip
    assert (ops["combine"].shape, ops["combine"].group) == ((7168,), "pcp")
    assert ops["experts"].flops_per_row == alone["experts"].flops_per_row / 2
    weights = [rank_weights(LATENT, Parallelism(4, pcp=n)) for n in (1, 2)]
    assert weights[1]["experts"] * 2 == weights[0]["experts"]
    assert weights[1]["attention"] == weights[0]["attention"]
    plans = [plan_memory(LATENT, Parallelism(4, pcp=n), H200, engine("deepseek-v3")) for n in (1, 2)]
    assert plans[0].kv_bytes_per_token == plans[1].kv_bytes_per_token
    assert plans[1].kv_tokens > plans[0].kv_tokens, "half of the experts"


def test_a_step_of_prompts_by_hand() -> None:
    """4 parts of 250 tokens on two ranks: the second and third follow 250 and 500 tokens, in the cache by then."""
    shared = cost("deepseek-v3", Parallelism(4, pcp=2), enforce_eager=True)
    alone = cost("deepseek-v3", Parallelism(4), enforce_eager=True)
    assert shared.attention_s([(1000, 100)], 0, 0) == alone.attention_s([(250, 350), (250, 600)], 0, 0)
    ops = step_operators(LATENT, Parallelism(4, pcp=2))
    by_hand = 0.0
    for op in ops:
        rows = np.array([{"tokens": 500.0, "group": 1000.0}.get(op.rows, 0.0)])
        if op.family == "moe":
            by_hand += op.kernels * float(SHEET.moe_s(op.weights, rows, 7168, 2048, 256, 8, 8)[0])
        elif op.rows == "samples":
            continue
        elif op.family == "gemm":
            by_hand += op.kernels * float(SHEET.gemm_s(op.weights, rows, *op.shape)[0])
        elif op.family == "elementwise" and op.name != "router_input":
            by_hand += op.kernels * float(SHEET.elementwise_s(op.name, rows, *op.shape)[0])
        elif op.family != "elementwise":
            size, gpus = rows * 2 * op.shape[0], 2 if op.group == "pcp" else 4
            by_hand += op.kernels * float(SHEET.collective_s(op.family, size, gpus)[0])
    assert shared.tokens_s[1000] == pytest.approx(by_hand, rel=0.01)
    # of 7 sequences that decode the fuller rank has 4, and 4/7 of the KV tokens
    upto, a, b = alone.decode[4][0]
    assert shared.decode[7][0] == pytest.approx((upto * 7 / 4, a, b * 4 / 7))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 5000), st.integers(0, 5000), st.integers(2, 8))
def test_parts_of_a_prompt_are_those_that_vllm_deals_out(q: int, context: int, ranks: int) -> None:
    """`_iter_rank_chunks` of pcp_manager.py: of 2 x ranks parts rank r has the r-th and the r-th from the end."""
    size = -(-q // (2 * ranks))
    found: list[list[tuple[int, int]]] = []
    for rank in range(ranks):
        mine = []
        for part in (rank, 2 * ranks - 1 - rank):
            length = min(size, q - part * size)
            if length > 0:
                mine.append((length, context + part * size))
        found.append(mine)
    assert sum(length for mine in found for length, _ in mine) == q

    class Whole:
        def together(self, chunks: list[tuple[int, int]]) -> float:
            self.chunks = list(chunks)
            return 0.0

    whole = Whole()
    DealtChunks(whole, ranks).together([(q, context)])  # type: ignore[arg-type]
    if q >= 2 * ranks and found[-1][-1][0] == size:
        assert sorted(whole.chunks) == sorted(found[-1])
    assert whole.chunks
    assert set(whole.chunks) <= {piece for mine in found for piece in mine}


def test_more_ranks_of_a_step_are_no_slower_and_stages_add_up() -> None:
    steps = [cost("deepseek-v3", Parallelism(8 // n, pcp=n, ep=True)).step_s([(2048, 4000)], 0, 0) for n in (1, 2, 4)]
    spec = engine("deepseek-v3")
    both = stage_costs(LATENT, Parallelism(4, pcp=2, pp=2, network=load_transfer_link("rdma-400")), spec, SHEET)
    whole = compile_cost(LATENT, Parallelism(4, pcp=2), spec, SHEET)
    assert sum(stage.step_s([(2048, 4000)], 0, 0) for stage in both) == pytest.approx(
        whole.step_s([(2048, 4000)], 0, 0)
    )
    assert both[0].send_s(2048) > both[0].send_s(64)
    assert steps[1] < 1.5 * steps[0]
    four = cost("deepseek-v3", Parallelism(4, ep=True)).step_s([(2048, 4000)], 0, 0)
    assert steps[1] < four, "twice the GPUs"


def test_what_was_outside_the_tables_is_said() -> None:
    prices = load_profile(FOLDER / "h200-sxm.json")
    columns = {"start_s": [0.0], "end_s": [1.0], "steps": [1], "prefill_requests": [1], "prefill_tokens": [999]}
    columns |= {"decodes": [8], "kv_tokens": [9000], "draft_tokens": [0]}
    block = {k: np.array(v, np.float64) for k, v in columns.items()}
    spec = engine("deepseek-v3")
    for layout in (Parallelism(8, dcp=8), Parallelism(4, pcp=2)):
        own = compile_cost(LATENT, layout, spec, prices)
        assert all(0 <= share <= 1 for share in outside_shares(LATENT, layout, spec, prices, own, [block]).values())


@pytest.mark.parametrize(
    ("model", "layout", "said"),
    [
        ("deepseek-v3", Parallelism(8, dcp=3), "dcp 3 does not divide tp 8"),
        ("llama-3.1-70b", Parallelism(8, dcp=2), "only 1 of 8 GPUs hold the same KV heads; at most 1"),
        ("qwen3-235b-a22b", Parallelism(8, dcp=4), "only 2 of 8 GPUs"),
        ("deepseek-v3", Parallelism(4, dcp=2, pcp=2), "sparse latent attention only; set dcp or pcp to 1"),
        ("deepseek-v3", Parallelism(1, pcp=2, dp=4, ep=True), "data parallel ranks are not modelled; use dp 1"),
        ("deepseek-v3", Parallelism(4, pcp=3), "12 GPUs .tp x pcp x dp. do not divide the experts' intermediate size"),
        ("deepseek-v3", Parallelism(4, pcp=0), "pcp is 0; expected a whole number"),
        (
            "deepseek-v3",
            Parallelism(4, pcp=2, ep=True, all2all_backend="deepep_low_latency"),
            "with pcp only allgather_reducescatter is modelled",
        ),
    ],
)
def test_wrong_layouts_are_refused_with_the_reason(model: str, layout: Parallelism, said: str) -> None:
    (problem,) = check_layout(load_model(model), layout, H200)
    assert re.search(said, problem)


@pytest.mark.parametrize(
    ("model", "preset", "layout", "said"),
    [
        ("deepseek-v3", "vllm-0.6", {"dcp": 2}, r"dcp 2: vllm-0\.6 cannot run it .*vllm-0\.10 is the first"),
        ("qwen3-235b-a22b", "vllm-0.10", {"dcp": 2}, r"models with latent attention \(MLA\).*vllm-0\.15 is the first"),
        ("deepseek-v3", "vllm-0.24", {"pcp": 2}, r"pcp 2: vllm-0\.24 cannot run it .*vllm-0\.32 is the first"),
        (
            "qwen3-235b-a22b",
            "vllm-0.32",
            {"pcp": 2},
            r"has it for models with latent attention \(MLA\) .*set pcp to 1$",
        ),
        ("deepseek-v3.1-nvfp4", "vllm-0.24", {"dcp": 8}, "shares no latents in fp8; set engine.kv_cache_dtype to bfl"),
        ("gpt-oss-120b", "vllm-0.32", {"dcp": 1, "tp": 8}, ""),
        ("deepseek-v3.1-nvfp4", "vllm-0.32", {"dcp": 8}, ""),
    ],
)
def test_versions_that_do_not_share_tokens_say_so(model: str, preset: str, layout: dict[str, int], said: str) -> None:
    spec = resolve_engine({"preset": preset}, H200, load_model(model))
    problems = check_engine_layout(served(load_model(model), spec), Parallelism(**{"tp": 8, **layout}), spec)
    assert (len(problems) == 1 and re.search(said, problems[0])) if said else not problems


def test_windows_are_not_shared() -> None:
    spec = resolve_engine({"preset": "vllm-0.32"}, H200, load_model("gemma-3-1b"))
    problems = check_engine_layout(served(load_model("gemma-3-1b"), spec), Parallelism(4, dcp=4), spec)
    assert ["see only a part of a sequence, which no ranks share" in problem for problem in problems] == [True]
