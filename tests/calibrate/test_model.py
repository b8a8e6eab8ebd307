"""Model sizes: published counts and bytes, textbook KV sizes, sharding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from calibrate.catalog import read
from calibrate.layout import Parallelism
from calibrate.model import ModelSpec
from calibrate.models import load_model, model_names
from calibrate.weights import rank_weights
from servecast.errors import ServecastError

ENTRIES: dict[str, dict[str, Any]] = read("models")["models"]
LLAMA4_VISION = 871_932_416
"""Parameters of Llama 4's vision tower and projector: what both models' totals have beyond their text models'."""
ACTIVE = {  # billions, as the model cards and papers round them; with embeddings where nothing else is said
    "mixtral-8x7b": 12.9,
    "mixtral-8x22b": 39.1,
    "qwen1.5-moe-a2.7b": 2.7,
    "qwen3-30b-a3b": 3.35,
    "qwen3-235b-a22b": 22.2,
    "qwen3-coder-480b-a35b": 35.5,
    "llama-4-scout": 17.2,
    "llama-4-maverick": 17.2,
    "deepseek-v3": 37.6,
    "kimi-k2": 32.9,
}


def one_layer_of_experts(model: ModelSpec) -> ModelSpec:
    assert model.experts
    quantized = tuple(replace(q, layers=1) for q in model.quantized if q.kind not in ("gate_up", "down"))
    return replace(model, layers=1, experts=replace(model.experts, layers=1), quantized=quantized)


def prediction_layer(model: ModelSpec) -> int:
    """Parameters of a multi-token prediction layer: a layer of experts, embedding and output weights of its own, a
    projection of twice the hidden size and three norms (DeepSeek-V3, arXiv:2412.19437, section 2.2)."""
    return one_layer_of_experts(model).params + 2 * model.hidden**2 + 2 * model.hidden


def scales(model: ModelSpec) -> int:
    """fp32 scales of weights in blocks of 128 x 128."""
    return sum(
        p.count * sum(-(-n // 128) * -(-p.k // 128) for n in p.parts)
        for p in model.projections(1)
        if p.storage.weights == "fp8_block"
    )


@pytest.mark.parametrize("name", model_names())
def test_parameter_count_is_the_published_one(name: str) -> None:
    entry, model = ENTRIES[name], load_model(name)
    computed, holds = model.params, entry["count"].split()
    if "prediction" in holds:
        computed += prediction_layer(model)
    if "scaled" in holds:
        computed += scales(model) + (scales(one_layer_of_experts(model)) if "prediction" in holds else 0)
    if "vision" in holds:
        computed += LLAMA4_VISION
    if holds == ["rounded"]:
        assert computed == pytest.approx(entry["params"], rel=0.005)
    else:
        assert set(holds) <= {"exact", "prediction", "scaled", "vision"}
        assert computed == entry["params"]
    assert entry["source"]


@pytest.mark.parametrize("name", [name for name, entry in ENTRIES.items() if entry.get("bytes")])
def test_checkpoints_are_as_large_as_published(name: str) -> None:
    assert load_model(name).checkpoint_bytes == ENTRIES[name]["bytes"]


def test_active_parameters() -> None:
    for name, billions in ACTIVE.items():
        assert load_model(name).active_params / 1e9 == pytest.approx(billions, abs=0.06), name
    # arXiv:2508.10925, table 1, counts the output weights only
    for name, billions in {"gpt-oss-20b": 3.61, "gpt-oss-120b": 5.13}.items():
        model = load_model(name)
        assert (model.active_params - model.vocab * model.hidden) / 1e9 == pytest.approx(billions, abs=0.005)
    assert load_model("llama-3.1-8b").active_params == load_model("llama-3.1-8b").params


def weights(model: ModelSpec, tp: int) -> int:
    """Bytes of the checkpoint's weights on one of `tp` GPUs: without rotary tables."""
    found = rank_weights(model, Parallelism(tp))
    return sum(found.values()) - found["rotary tables"]


def test_textbook_sizes() -> None:
    assert load_model("llama-2-7b").kv_bytes_per_token(1) == 512 * 1024  # 0.5 MiB a token
    assert 512 * load_model("llama-3-8b").kv_bytes_per_token(1) == 64 * 2**20
    assert load_model("qwen3-0.6b").kv_bytes_per_token(1) == 114_688
    assert load_model("qwen2.5-7b").kv_bytes_per_token(1) == 57_344
    assert weights(load_model("llama-3.1-8b"), 1) == 2 * 8_030_261_248
    spec = replace(load_model("llama-3.1-8b"), dtype="fp32")
    assert weights(spec, 1) == 4 * 8_030_261_248
    assert spec.kv_bytes_per_token(1) == 2 * 131_072
    assert replace(spec, dtype="bf16", kv_dtype="fp8").kv_bytes_per_token(1) == 65_536


def test_kv_sizes_that_engines_logged() -> None:
    assert load_model("kimi-k2").kv_bytes_per_token(1) == 70_272, "vllm-project/recipes, Kimi-K2-Thinking"
    assert load_model("deepseek-v3").kv_bytes_per_token(8) == 70_272, "latents are on every GPU"
    assert load_model("qwen3-235b-a22b-fp8").kv_bytes_per_token(4) == 48_128, "vllm-project/vllm#21348"
    assert load_model("gpt-oss-120b").kv_bytes_per_token(1) == 73_728, "alvarobartt/hf-mem#60: all 36 layers"


def test_sharding() -> None:
    model = load_model("llama-3.1-70b")
    assert model.kv_bytes_per_token(8) * 8 == model.kv_bytes_per_token(1)
    assert model.kv_bytes_per_token(16) == model.kv_bytes_per_token(8), "KV heads replicate beyond 8 GPUs"
    for tp in (2, 4, 8):
        norms = (2 * model.layers + 1) * model.hidden * 2
        assert weights(model, tp) * tp == weights(model, 1) + (tp - 1) * norms, "only norms are replicated"
    small = load_model("qwen2.5-0.5b")
    assert weights(small, 2) > weights(small, 1) / 2


def test_experts_are_sharded_and_routers_replicated() -> None:
    model = load_model("qwen3-30b-a3b")
    assert model.experts
    norms = 48 * (2 * 2048 + 2 * 128) + 2048
    routers = 48 * 128 * 2048
    assert weights(model, 4) * 4 == weights(model, 1) + 3 * 2 * (norms + routers)


def test_latent_attention_under_tensor_parallelism() -> None:
    model = load_model("deepseek-v3")
    replicated = {"qkv_a": 1536 + 576, "router": 256}
    for name, outputs in replicated.items():
        assert {p.n for p in model.projections(8) if p.name == name} == {outputs}
    kept = 2 * 61 * 512 * 128 * 256  # keys' and values' projections again in 16 bit, of quantised ones
    assert weights(model, 1) - model.checkpoint_bytes == kept
    plain = replace(model, quantized=())
    assert weights(plain, 1) == plain.checkpoint_bytes
    lite = load_model("deepseek-v2-lite")
    assert weights(lite, 1) == lite.checkpoint_bytes


def test_mxfp4_experts_are_padded_as_logged() -> None:
    """vllm-project/vllm#23278: "Model loading took 65.9651 GiB" for gpt-oss-120b on one H100; 60.8 GiB in its files."""
    assert weights(load_model("gpt-oss-120b"), 1) / 2**30 == pytest.approx(65.9651, rel=0.002)


@pytest.mark.parametrize("name", sorted(read("models")["unpriced"]))
def test_unpriced_models_say_why(name: str) -> None:
    with pytest.raises(ServecastError, match="not priced yet: ") as error:
        load_model(name)
    assert read("models")["unpriced"][name] in str(error.value)


def test_misspelt_name() -> None:
    with pytest.raises(ServecastError, match=r"did you mean 'llama-3.1-8b'"):
        load_model("llama-31-8b")
