"""The kernels of a step: FLOPs against active parameters, bytes against weights, attention with windows and latents."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibrate.hardware import load_gpu
from calibrate.layout import Parallelism, check_layout
from calibrate.measurements import WEIGHTS
from calibrate.models import load_model, model_names
from calibrate.operators import (
    AttentionGroup,
    attention_groups,
    attention_operators,
    decode_attention,
    prefill_attention,
    step_operators,
    step_work,
    touched_share,
)
from calibrate.parts import Window

ONE = Parallelism(1)
PRICED = [name for name in model_names() if not load_model(name).recurrent]


def layouts(name: str) -> list[Parallelism]:
    model, gpu = load_model(name), load_gpu("h200-sxm")
    return [Parallelism(tp) for tp in (1, 2, 4, 8) if not check_layout(model, Parallelism(tp), gpu)]


@pytest.mark.parametrize("name", PRICED)
def test_flops_are_twice_the_active_parameters(name: str) -> None:
    """Of the weights that are multiplied: all but the embedding table, norms, biases and the experts not chosen."""
    model = load_model(name)
    spent = sum(op.flops_per_row for op in (*step_operators(model, ONE), *attention_operators(model, ONE))
                if op.rows != "decodes")  # fmt: skip
    # the table is also the output weights where they are tied
    multiplied = model.active_params - (0 if model.tied_embeddings else model.vocab * model.hidden)
    padding = (model.padded_vocab - model.vocab) * model.hidden
    assert spent == pytest.approx(2 * (multiplied + padding), rel=2e-3)


@pytest.mark.parametrize("name", PRICED)
def test_ranks_share_the_flops(name: str) -> None:
    model = load_model(name)
    whole = step_work(model, ONE, [(512, 0)], 8, 8000)
    for layout in layouts(name):
        rank = step_work(model, layout, [(512, 0)], 8, 8000)
        assert whole.flops / layout.tp <= rank.flops * 1.0001
        # small models with few KV heads and replicated latents or routers do more than their share
        assert rank.flops < 1.6 * whole.flops / layout.tp + 0.05 * whole.flops


@pytest.mark.parametrize("name", PRICED)
def test_bytes_read_are_the_weights(name: str) -> None:
    """All GEMMs and experts together read what is stored of the projections and the output weights."""
    model = load_model(name)
    for layout in layouts(name):
        operators = [*step_operators(model, layout)]
        operators += [op for op in attention_operators(model, layout) if op.rows == "chunk_keys"]
        read = sum(op.fixed_bytes for op in operators)
        head = model.padded_vocab // layout.tp * model.hidden * model.dtype_bytes
        stored = sum(p.count * sum(p.storage.size(n, p.k) for n in p.parts) for p in model.projections(layout.tp))
        assert read == stored + head
        assert {op.weights for op in operators if op.family in ("gemm", "moe")} <= {*WEIGHTS}
        assert all((op.weights == "") == (op.family not in ("gemm", "moe")) for op in operators)
        assert all(op.kernels > 0 and min(op.shape) > 0 for op in operators)


def test_dense_operators_in_order() -> None:
    model = load_model("qwen3-8b")
    names = [op.name for op in step_operators(model, Parallelism(2))]
    assert names == [
        "embedding", "norms", "qkv", "qk_norm", "rope", "o_proj", "gate_up", "activation", "down", "final_norm",
        "lm_head", "sampling", "allreduce", "logits_allgather",
    ]  # fmt: skip
    quantized = load_model("qwen3-32b-fp8")
    weights = {op.name: op.weights for op in step_operators(quantized, ONE) if op.family == "gemm"}
    assert weights.pop("lm_head") == "bf16"
    assert set(weights.values()) == {"fp8_block"}


def test_experts() -> None:
    model = load_model("deepseek-v3")
    operators = {op.name: op for op in step_operators(model, Parallelism(8))}
    experts = operators["experts"]
    assert (experts.family, experts.shape, experts.kernels) == ("moe", (7168, 2048, 256, 8), 58)
    assert experts.flops_per_row == 58 * 8 * 2 * 3 * 7168 * 256
    assert experts.weights == "fp8_block"
    assert operators["router"].shape == (256, 7168)
    assert operators["router"].weights == "bf16"
    assert operators["shared_gate_up"].shape == (512, 7168)
    assert operators["gate_up"].kernels == 3
    assert operators["allreduce"].kernels == 2 * 61, "shared and routed experts are added before"
    gated = {op.name: op.shape for op in step_operators(load_model("qwen1.5-moe-a2.7b"), ONE)}
    assert gated["shared_gate"] == (1, 2048)
    assert "gate_up" not in gated
    minimax = {op.name: op for op in step_operators(load_model("minimax-m2.5"), Parallelism(4))}
    assert minimax["qk_norm_allreduce"].shape == (4,), "two fp32 sums of squares"


def test_partly_quantised_kinds_are_two_operators() -> None:
    model = load_model("qwen3-30b-a3b-fp8")
    kept = replace(model, quantized=tuple(replace(q, layers=46) for q in model.quantized))
    found = {(op.name, op.weights): op.kernels for op in step_operators(kept, ONE) if op.family in ("gemm", "moe")}
    for name in ("qkv", "o_proj", "experts"):
        assert (found[name, "fp8_block"], found[name, "bf16"]) == (46, 2)


def test_touched_experts() -> None:
    assert touched_share(128, 8, 1) == pytest.approx(8 / 128)
    assert touched_share(8, 2, 64) == pytest.approx(1.0, abs=1e-7)
    model = load_model("qwen3-30b-a3b")
    one, many = (step_work(model, ONE, [], n, 0).hbm_bytes for n in (1, 64))
    assert one == pytest.approx(2 * (model.active_params - model.vocab * model.hidden), rel=0.01)
    assert many > 9 * one, "64 tokens need nearly all experts"


def test_latent_attention() -> None:
    model = load_model("deepseek-v3")
    (group,) = attention_groups(model, Parallelism(8))
    assert (group.kind, group.layers, group.heads, group.kv_heads, group.head_dim) == ("mla", 61, 16, 1, 576)
    assert group.kv_token_bytes == 1152
    assert group.pair_flops(decode=False) == 2 * 16 * (192 + 128)
    assert group.pair_flops(decode=True) == 2 * 16 * (576 + 512)
    operators = {op.name: op for op in attention_operators(model, Parallelism(8))}
    assert operators["kv_b"].shape == (16 * 256, 512)
    assert operators["kv_b"].weights == "fp8_block"
    assert (operators["mla_absorb"].weights, operators["mla_absorb"].rows) == ("bf16", "decodes")
    absorbed = operators["mla_absorb"].flops_per_row + operators["mla_values"].flops_per_row
    assert absorbed == operators["kv_b"].flops_per_row, "moving a query and an output costs what one key and value do"
    assert attention_operators(load_model("llama-3-8b"), ONE) == ()
    assert replace(model, kv_dtype="fp8").kv_bytes_per_token(1) == 61 * 576


def test_cached_latents_are_projected_again_in_every_chunk() -> None:
    model = load_model("deepseek-v2-lite")
    (kv_b,) = (op for op in attention_operators(model, ONE) if op.name == "kv_b")
    new, after = step_work(model, ONE, [(256, 0)], 0, 0), step_work(model, ONE, [(256, 4096)], 0, 0)
    attended = prefill_attention(model, ONE, 256, 4096).flops - prefill_attention(model, ONE, 256, 0).flops
    assert after.flops - new.flops == pytest.approx(attended + kv_b.flops_per_row * 4096)


def test_windows_are_groups() -> None:
    groups = attention_groups(load_model("gpt-oss-20b"), ONE)
    assert [(g.layers, g.window, g.heads, g.kv_heads, g.head_dim) for g in groups] == [
        (12, 0, 64, 8, 64), (12, 128, 64, 8, 64),
    ]  # fmt: skip
    assert [(g.layers, g.window, g.chunked) for g in attention_groups(load_model("llama-4-scout"), ONE)] == [
        (12, 0, False), (36, 8192, True),
    ]  # fmt: skip
    assert [(g.layers, g.window) for g in attention_groups(load_model("mistral-7b-v0.1"), ONE)] == [(32, 4096)]
    assert [g.kv_dtype for g in attention_groups(load_model("llama-2-7b"), ONE)] == ["bf16"]
    assert attention_groups(load_model("qwen3-235b-a22b-nvfp4"), ONE)[0].kv_dtype == "fp8"


def seen(position: int, window: int, chunked: bool) -> int:
    """Tokens that the query at `position` sees, itself included."""
    if not window:
        return position + 1
    return position % window + 1 if chunked else min(position + 1, window)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(1, 60), st.integers(0, 60), st.integers(0, 20), st.booleans())
def test_pairs_are_counted_one_by_one(q: int, context: int, window: int, chunked: bool) -> None:
    group = AttentionGroup("gqa", 1, 1, 1, 8, window, "bf16", chunked and window > 0)
    assert group.pairs(q, context) == sum(seen(p, window, chunked) for p in range(context, context + q))
    first = context + 1 - seen(context, window, chunked)
    assert group.keys(q, context) == context + q - first


def test_decoding_behind_a_window() -> None:
    model = replace(load_model("llama-3-8b"), windows=(Window(16, 512),))
    far, near = decode_attention(model, ONE, 4, 40_000), decode_attention(model, ONE, 4, 400)
    full = decode_attention(load_model("llama-3-8b"), ONE, 4, 40_000)
    assert far.flops == full.flops / 2 + 16 * 4 * 32 * 128 * 4 * 512
    assert near == decode_attention(load_model("llama-3-8b"), ONE, 4, 400)
