"""Quantised checkpoints: what is stored how, in how many bytes; formats that are refused; engines' options."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibrate.hf_quant import Names, quantization
from calibrate.measurements import WEIGHTS
from calibrate.model import ModelSpec
from calibrate.models import load_model, model_names
from calibrate.storage import FORMATS, Storage, bitsandbytes, grouped_int
from servecast.errors import ServecastError
from tests.calibrate.configs import DEEPSEEK, GOOD, MIXTRAL, QWEN_MOE, config

LINEAR = 6_979_321_856  # weights of Llama-3.1-8B's projections
OTHERS = 8_030_261_248 - LINEAR


def compressed(weights: dict[str, Any], inputs: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"], **more}


def load(tmp_path: Path, quantized: dict[str, Any], base: dict[str, Any] = GOOD, **changes: object) -> ModelSpec:
    return load_model(config(tmp_path, base, quantization_config=quantized, **changes))


FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "tensor"}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}


@pytest.mark.parametrize(
    ("quantized", "weights", "bits", "per_matrix"),
    [
        ({"quant_method": "fp8", "activation_scheme": "static"}, "fp8", 8, 8),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8_block", 8 + 32 / 128**2, 0),
        (compressed(FLOAT8, {"num_bits": 8, "dynamic": False}), "fp8", 8, 8),
        (compressed({"num_bits": 8, "type": "int", "strategy": "channel"}, {"num_bits": 8}), "int8", None, 0),
        (compressed(INT4), "int4", 4 + 16 / 32, 0),
        (compressed({**INT4, "symmetric": False, "group_size": 128}), "int4", 4 + 20 / 128, 0),
        (compressed(NVFP4, {"num_bits": 4}), "nvfp4", 4 + 8 / 16, 8),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, "int4", 4 + 20 / 128, 0),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}, "int4", 4 + 16 / 128, 0),
        ({"quant_method": "gptq", "bits": 8, "group_size": 32, "sym": False}, "int8", 8 + 24 / 32, 0),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4"}}, "nvfp4", 4 + 8 / 16, 8),
        ({"quant_method": "modelopt", "quant_algo": "fp8"}, "fp8", 8, 8),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "int4", 4 + 32 / 64, 0),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True}, "int4",
         4 + 8 / 64 + 32 / 64 / 256, 0),
    ],
)  # fmt: skip
def test_bytes_with_scales(
    tmp_path: Path, quantized: dict[str, Any], weights: str, bits: float | None, per_matrix: int
) -> None:
    model = load(tmp_path, quantized)
    assert {q.kind for q in model.quantized} == {"qkv", "o_proj", "gate_up", "down"}
    assert {(q.storage.weights, q.layers) for q in model.quantized} == {(weights, 32)}
    assert weights in WEIGHTS
    assert model.params == 8_030_261_248
    if bits is None:  # an fp32 scale an output
        stored = LINEAR + 4 * 32 * (4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096)
    else:
        stored = int(LINEAR * bits / 8) + per_matrix * 32 * 7
    assert model.checkpoint_bytes == stored + 2 * OTHERS
    assert model.method == quantized["quant_method"]


def test_published_file_sizes(tmp_path: Path) -> None:
    """In 10^9 bytes, as the model pages round them: RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8 9.08,
    Qwen/Qwen2.5-7B-Instruct-AWQ 5.57 (3.99 + 1.58)."""
    fp8 = load(tmp_path, {"quant_method": "fp8"})
    assert fp8.checkpoint_bytes / 1e9 == pytest.approx(9.08, abs=0.006)
    awq = quantization(load_model("qwen2.5-7b"), Path("config.json"), {"quant_method": "awq", "group_size": 128}, [])
    assert awq.checkpoint_bytes / 1e9 == pytest.approx(5.57, abs=0.01)


def test_modules_that_are_left_out(tmp_path: Path) -> None:
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    gates = load(tmp_path, {**fp8, "modules_to_not_convert": ["gate", "lm_head", "model.layers.0.mlp.gate"]}, MIXTRAL)
    assert {(q.kind, q.layers) for q in gates.quantized} == {("qkv", 32), ("o_proj", 32), ("experts", 32)}
    some = load(tmp_path, {**fp8, "modules_to_not_convert": ["model.layers.0", "model.layers.3.mlp", "o_proj"]})
    assert {(q.kind, q.layers) for q in some.quantized} == {("qkv", 31), ("gate_up", 30), ("down", 30)}
    sizes = {(p.name, p.storage.weights, p.count) for p in some.projections(1)}
    assert {("down", "fp8_block", 30), ("down", "bf16", 2), ("o_proj", "bf16", 32)} <= sizes
    with pytest.raises(ServecastError, match=r"some but not all of self_attn\.q_proj.* in layer 0, which engines fuse"):
        load(tmp_path, {**fp8, "modules_to_not_convert": ["q_proj"]})


def test_kimi_s_and_nvidia_s_ways_of_leaving_out(tmp_path: Path) -> None:
    ignore = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"]
    kimi = load(tmp_path, compressed(INT4, ignore=ignore), DEEPSEEK)
    assert [(q.kind, q.layers) for q in kimi.quantized] == [("experts", 29)]
    wrapped = [f"language_model.model.layers.{i}.self_attn*" for i in range(32)]
    wrapped += ["language_model.lm_head", "language_model.model.layers.0*", "*.mlp.shared_experts.*"]
    nvidia = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": wrapped,
              "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}}  # fmt: skip
    model = load(tmp_path, nvidia, DEEPSEEK)
    assert {(q.kind, q.layers) for q in model.quantized} == {("gate_up", 2), ("down", 2), ("experts", 29)}
    assert model.kv_dtype == "fp8"
    parts = [f"model.layers.{i}.self_attn.{p}_proj" for i in range(32) for p in ("q_a", "q_b", "kv_b")]
    parts += [f"model.layers.{i}.self_attn.kv_a_proj_with_mqa" for i in range(32)]
    left = {"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4", "exclude_modules": parts}}
    assert {q.kind for q in load(tmp_path, left, DEEPSEEK).quantized} == {
        "o_proj", "gate_up", "down", "experts", "shared_gate_up", "shared_down",
    }  # fmt: skip


def test_different_formats_in_one_model(tmp_path: Path) -> None:
    groups = {
        "a": {"targets": ["re:.*mlp.experts.*"], "weights": NVFP4, "input_activations": {"num_bits": 4}},
        "b": {
            "targets": ["Linear"],
            "weights": {**FLOAT8, "strategy": "channel"},
            "input_activations": {"num_bits": 8},
        },
    }
    model = load(tmp_path, {"quant_method": "compressed-tensors", "config_groups": groups}, QWEN_MOE)
    assert {q.kind: q.storage for q in model.quantized} == {
        "qkv": FORMATS["fp8_channel"], "o_proj": FORMATS["fp8_channel"], "experts": FORMATS["nvfp4"],
    }  # fmt: skip


def test_mxfp4_is_for_experts_only(tmp_path: Path) -> None:
    oss = {**MIXTRAL, "model_type": "gpt_oss", "torch_dtype": None}
    model = load(tmp_path, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}, oss)
    assert [(q.kind, q.storage, q.layers) for q in model.quantized] == [("experts", FORMATS["mxfp4"], 32)]
    assert model.dtype == "bf16", "a quantised checkpoint that does not say is of a bf16 model"


def test_hf_quant_config_beside(tmp_path: Path) -> None:
    file = config(tmp_path)
    (tmp_path / "hf_quant_config.json").write_text(
        '{"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}}'
    )
    model = load_model(file)
    assert (model.method, model.kv_dtype, len(model.quantized)) == ("modelopt", "fp8", 4)


@pytest.mark.parametrize(
    ("quantized", "said"),
    [
        ({"quant_method": "gguf"}, r"quant_method 'gguf' \(known: fp8, .*compressed-tensors"),
        ({"quant_method": "fp8", "weight_block_size": [1, 32]}, r"weight_block_size \[1, 32\]"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "quant_algo MIXED_PRECISION"),
        ({"quant_method": "gptq", "bits": 3}, "3-bit integers"),
        ({"quant_method": "gptq", "bits": 4, "lm_head": True}, "quantised output weights"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*down": {"bits": 8}}}, "other bits in some modules"),
        ({"quant_method": "awq", "bits": "4"}, "bits is '4'; expected a whole number"),
        (compressed({"num_bits": 4, "type": "int", "strategy": "channel"}, {"num_bits": 8}), "with 8-bit activations"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "without config_groups"),
        ({"quant_method": "fp8", "modules_to_not_convert": ["re:("]}, "not a regular expression"),
        ({"quant_method": "fp8", "ignored_layers": "lm_head"}, "expected a list of module names"),
    ],
)
def test_unknown_formats_are_refused_by_name(tmp_path: Path, quantized: dict[str, Any], said: str) -> None:
    with pytest.raises(ServecastError, match=f"not priced yet: quantised weights: .*{said}"):
        load(tmp_path, quantized)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 200) | st.sampled_from(["", "fp8", "Linear", "re:[", "*", "channel"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["weights", "num_bits", "x"]), inner),
    max_leaves=6,
)
KEYS = (
    "bits", "group_size", "weight_block_size", "modules_to_not_convert", "ignore", "config_groups", "quant_algo",
    "quantization", "kv_cache_scheme", "dynamic", "exclude_modules", "zero_point", "load_in_8bit",
)  # fmt: skip


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.sampled_from(["fp8", "awq", "gptq", "modelopt", "compressed-tensors", "bitsandbytes", "mxfp4", None, []]),
    st.dictionaries(st.sampled_from(KEYS), json_values, max_size=5),
)
def test_any_config_is_read_or_refused(method: object, rest: dict[str, Any]) -> None:
    said = "c.json"
    try:
        model = quantization(load_model("deepseek-v2-lite"), Path("c.json"), {"quant_method": method, **rest}, [1, 2])
        assert model.checkpoint_bytes > 0
    except ServecastError as error:
        said = str(error)
    assert said.startswith("c.json")


def test_names() -> None:
    name = "model.layers.10.self_attn.q_proj"
    for pattern in ("q_proj", "layers.10", "model.layers.10.self_attn", "model.layers.1*", "*.self_attn.*",
                    "re:.*attn", "Linear"):  # fmt: skip
        assert name in Names([pattern]), pattern
    for pattern in ("q", "layers.1", "lm_head", "model.layers.0*", "re:attn", "*.mlp.*", "proj"):
        assert name not in Names([pattern]), pattern


def test_every_format_is_one_that_kernels_have() -> None:
    known = [*FORMATS.values(), grouped_int(4, 128, True), grouped_int(8, 0, False), bitsandbytes(4, True)]
    assert {storage.weights for storage in known} <= set(WEIGHTS)
    assert grouped_int(4, 128, True).size(128, 256) == 128 * 256 // 2 + 128 * 2 * 2.5
    assert Storage("fp8_block", 8, 4, 128, 128).size(129, 100) == 12_900 + 2 * 4
    quantized = {name for name in model_names() if load_model(name).quantized}
    assert all(replace(load_model(name), quantized=()).params == load_model(name).params for name in quantized)
    assert all(load_model(name).checkpoint_bytes < 1.2 * load_model(name).params for name in quantized)
