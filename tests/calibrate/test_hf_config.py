"""config.json files: every kind of part, public models, and files that cannot be read."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from calibrate.model import ModelSpec
from calibrate.models import load_model, model_names
from calibrate.parts import Experts, Latent, Window
from servecast.errors import ServecastError
from tests.calibrate.configs import DEEPSEEK, GOOD, MIXTRAL, QWEN_MOE, config
from tests.reference import reference

NOT_CATALOGUED = {
    "XiaomiMiMo--MiMo-7B-Base_config",
    "Qwen--Qwen3-32B-FP8-Static-PerTensor_config",
    "Qwen--Qwen3.5-35B-A3B_config",
    "Qwen--Qwen3.5-122B-A10B_config",
    "nvidia--Qwen3.5-122B-A10B-NVFP4_config",
    "nvidia--Qwen3.5-397B-A17B-NVFP4_config",
}


def test_config_file_or_folder(tmp_path: Path) -> None:
    file = config(tmp_path)
    assert load_model(file).params == load_model("llama-3-8b").params
    assert load_model(str(tmp_path)).name == tmp_path.name


def test_config_details(tmp_path: Path) -> None:
    nested = tmp_path / "nested.json"
    nested.write_text(json.dumps({"model_type": "wrapper", "text_config": GOOD}))
    assert load_model(str(nested)).params == load_model("llama-3-8b").params
    assert load_model(config(tmp_path, torch_dtype=None, dtype="float16")).dtype == "fp16"
    assert load_model(config(tmp_path, torch_dtype=None)).dtype == "fp32"
    assert load_model(config(tmp_path, num_key_value_heads=None)).kv_heads == 32
    assert load_model(config(tmp_path, head_dim=64)).head_dim == 64
    assert load_model(config(tmp_path, model_type="qwen2", sliding_window=131072, use_sliding_window=False)).qkv_bias
    assert load_model(config(tmp_path, num_nextn_predict_layers=1)).layers == 32, "not loaded unless it speculates"
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert load_model(config(tmp_path, rope_scaling=yarn)).max_position == 131072
    llama3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}
    assert load_model(config(tmp_path, max_position_embeddings=131072, rope_scaling=llama3)).max_position == 131072
    linear = {"rope_type": "linear", "factor": 8.0}
    assert load_model(config(tmp_path, model_type="gemma3_text", rope_scaling=linear)).max_position == 8192


@pytest.mark.parametrize(
    ("changes", "layers", "size"),
    [
        ({"model_type": "mistral", "sliding_window": 4096}, 32, 4096),
        ({"model_type": "mistral", "sliding_window": None}, 0, 0),
        ({"model_type": "gemma2", "sliding_window": 4096}, 16, 4096),
        ({"model_type": "gemma3_text", "sliding_window": 512}, 27, 512),  # every 6th of 32 layers sees everything
        ({"model_type": "gemma3_text", "sliding_window": 512, "sliding_window_pattern": 4}, 24, 512),
        ({"model_type": "gemma2", "sliding_window": 64, "layer_types": ["sliding_attention"] + ["full_attention"] * 31},
         1, 64),
        ({"model_type": "qwen2", "sliding_window": 4096}, 0, 0),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 28}, 4, 4096),
    ],
)  # fmt: skip
def test_windows(tmp_path: Path, changes: dict[str, object], layers: int, size: int) -> None:
    assert load_model(config(tmp_path, **changes)).windows == ((Window(layers, size),) if layers else ())


def test_chunks(tmp_path: Path) -> None:
    scout = {**MIXTRAL, "model_type": "llama4_text", "attention_chunk_size": 8192, "intermediate_size_mlp": 16384}
    model = load_model(config(tmp_path, scout, interleave_moe_layer_step=2, no_rope_layers=[]))
    assert model.windows == (Window(24, 8192, chunked=True),)
    assert (model.experts, model.intermediate) == (Experts(8, 2, 14336, 16, shared_inter=14336), 16384)
    some = load_model(config(tmp_path, scout, no_rope_layers=[1, 0] * 16))
    assert some.windows == (Window(16, 8192, chunked=True),)


def test_experts(tmp_path: Path) -> None:
    assert load_model(config(tmp_path, MIXTRAL)).experts == Experts(8, 2, 14336, 32)
    only = {"mlp_only_layers": [0, 3, 31], "decoder_sparse_step": 2, "shared_expert_intermediate_size": 2048}
    model = load_model(config(tmp_path, QWEN_MOE, **only))
    assert model.experts == Experts(64, 4, 1024, 14, shared_inter=2048, shared_gate=True)
    assert model.dense_layers == 18
    deep = load_model(config(tmp_path, DEEPSEEK))
    assert deep.experts == Experts(64, 4, 1024, 29, shared_inter=2048, score_bias=True)
    assert deep.latent == Latent(1536, 512, 128, 64, 128)
    assert load_model(config(tmp_path, DEEPSEEK, moe_layer_freq=2)).dense_layers == 32 - 14
    direct = load_model(config(tmp_path, DEEPSEEK, q_lora_rank=None))
    assert {p.name: p.k for p in direct.projections(1)}["q_b"] == 4096
    dense = load_model(config(tmp_path, DEEPSEEK, n_routed_experts=None))
    assert dense.experts is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_local_experts": 8}, r"mixture of experts \(num_local_experts: 8\)"),
        ({"kv_lora_rank": 512}, r"\(MLA\) \(kv_lora_rank: 512\)"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types: linear_attention"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"vision_config": {"depth": 1}}, "vision tower"),
        ({"model_type": "falcon"}, "model_type 'falcon'"),
        ({"model_type": "deepseek_v3", "index_topk": 2048}, r"sparse attention with an indexer \(index_topk: 2048\)"),
    ],
)
def test_unpriced_configs_say_why(tmp_path: Path, changes: dict[str, object], reason: str) -> None:
    with pytest.raises(ServecastError, match=f"not priced yet: .*{reason}"):
        load_model(config(tmp_path, **changes))


def test_all_problems_at_once(tmp_path: Path) -> None:
    file = config(tmp_path, hidden_size=True, num_hidden_layers=-1, vocab_size=float("nan"), intermediate_size=None,
                  torch_dtype="int4")  # fmt: skip
    with pytest.raises(ServecastError) as error:
        load_model(file)
    text = str(error.value)
    for field in (
        "hidden_size is True",
        "num_hidden_layers is -1",
        "vocab_size is nan",
        "intermediate_size is missing",
    ):
        assert field in text
    assert "'int4'" in text
    with pytest.raises(ServecastError, match="32 is not a multiple of num_key_value_heads 5"):
        load_model(config(tmp_path, num_key_value_heads=5))


@pytest.mark.parametrize(
    ("base", "changes", "said"),
    [
        (MIXTRAL, {"num_experts_per_tok": 9}, "a token chooses 9 experts of 8"),
        (MIXTRAL, {"num_local_experts": None}, "num_local_experts is missing"),
        (QWEN_MOE, {"mlp_only_layers": 3}, "mlp_only_layers is 3; expected a list of layers"),
        (DEEPSEEK, {"qk_rope_head_dim": "64"}, "qk_rope_head_dim is '64'"),
        (DEEPSEEK, {"first_k_dense_replace": -1}, "first_k_dense_replace is -1; expected a whole number of at least 0"),
        (GOOD, {"model_type": "mistral", "sliding_window": 0}, "sliding_window is 0"),
        (GOOD, {"model_type": "gemma2", "sliding_window": 9, "layer_types": ["full_attention"]}, "32 entries, one a"),
    ],
)
def test_bad_parts(tmp_path: Path, base: dict[str, Any], changes: dict[str, object], said: str) -> None:
    with pytest.raises(ServecastError, match=said):
        load_model(config(tmp_path, base, **changes))


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "no such file"), (b"", "not JSON"), (b"\xff\xfe\x00\x81", "not a text file"), (b"[1]", "JSON object"),
     (b"{", "not JSON"), (b"{}", "hidden_size is missing")],
)  # fmt: skip
def test_bad_files(tmp_path: Path, content: bytes | None, said: str) -> None:
    file = tmp_path / "config.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ServecastError, match=said):
        load_model(str(file))


def test_public_configs_load_or_are_refused_with_a_reason() -> None:
    loaded: list[ModelSpec] = []
    refused: list[str] = []
    for file in sorted(reference("reference", "model_configs").glob("*_config.json")):
        if file.name.endswith("hf_quant_config.json"):
            continue
        try:
            loaded.append(load_model(str(file)))
        except ServecastError as error:
            refused.append(str(error))
    assert (len(loaded), len(refused)) == (48, 54)
    assert all("not priced yet" in text for text in refused)
    why = Counter(text.split("not priced yet: ")[1].split(" (")[0].split(" '")[0] for text in refused)
    assert why == {
        "architecture of model_type": 8,
        "a vision tower": 17,
        "sparse attention with an indexer": 21,
        "layers of different shapes": 1,
        "hybrid": 5,
        "quantised weights: modelopt's quant_algo MIXED_PRECISION": 2,
    }
    ours = {replace(load_model(name), name=""): name for name in model_names()}
    unknown = {spec.name for spec in loaded if replace(spec, name="") not in ours}
    assert unknown == NOT_CATALOGUED, "every other config there is in the catalogue and agrees with it"
