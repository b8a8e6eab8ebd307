"""Model sizes: published counts, textbook KV sizes, configs of public models, and bad config files."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

from calibrate.catalog import read
from calibrate.model import ModelSpec
from calibrate.models import load_model, model_names
from servecast.errors import ServecastError

CONFIGS = Path(os.environ.get("SERVECAST_REFERENCE", Path(__file__).parents[3] / "shared")) / "reference/model_configs"
GOOD: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip


def config(tmp_path: Path, **changes: object) -> str:
    """A config.json with `changes` (None removes a field)."""
    fields = {k: v for k, v in {**GOOD, **changes}.items() if v is not None}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(fields))
    return str(file)


@pytest.mark.parametrize("name", model_names())
def test_parameter_count_is_the_published_one(name: str) -> None:
    entry = read("models")["models"][name]
    computed = load_model(name).params
    if entry["count"] == "exact":
        assert computed == entry["params"]
    else:
        assert computed == pytest.approx(entry["params"], rel=0.005)
    assert entry["source"]


def test_textbook_sizes() -> None:
    assert load_model("llama-2-7b").kv_bytes_per_token(1) == 512 * 1024  # 0.5 MiB a token
    assert 512 * load_model("llama-3-8b").kv_bytes_per_token(1) == 64 * 2**20
    assert load_model("qwen3-0.6b").kv_bytes_per_token(1) == 114_688
    assert load_model("qwen2.5-7b").kv_bytes_per_token(1) == 57_344
    assert load_model("llama-3.1-8b").weight_bytes(1) == 2 * 8_030_261_248
    spec = dataclasses.replace(load_model("llama-3.1-8b"), dtype="fp32")
    assert spec.weight_bytes(1) == 4 * 8_030_261_248
    assert spec.kv_bytes_per_token(1) == 2 * 131_072


def test_sharding() -> None:
    model = load_model("llama-3.1-70b")
    assert model.kv_bytes_per_token(8) * 8 == model.kv_bytes_per_token(1)
    assert model.kv_bytes_per_token(16) == model.kv_bytes_per_token(8), "KV heads replicate beyond 8 GPUs"
    for tp in (2, 4, 8):
        norms = (2 * model.layers + 1) * model.hidden * 2
        assert model.weight_bytes(tp) * tp == model.weight_bytes(1) + (tp - 1) * norms, "only norms are replicated"
    small = load_model("qwen2.5-0.5b")
    assert small.weight_bytes(2) > small.weight_bytes(1) / 2


@pytest.mark.parametrize("name", sorted(read("models")["unpriced"]))
def test_unpriced_models_say_why(name: str) -> None:
    with pytest.raises(ServecastError, match="not priced yet: ") as error:
        load_model(name)
    assert read("models")["unpriced"][name] in str(error.value)


def test_misspelt_name() -> None:
    with pytest.raises(ServecastError, match=r"did you mean 'llama-3.1-8b'"):
        load_model("llama-31-8b")


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
    assert load_model(config(tmp_path, model_type="mistral", sliding_window=8192)).max_position == 8192
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert load_model(config(tmp_path, rope_scaling=yarn)).max_position == 131072
    llama3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}
    assert load_model(config(tmp_path, max_position_embeddings=131072, rope_scaling=llama3)).max_position == 131072


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_local_experts": 8}, r"mixture of experts \(num_local_experts: 8\)"),
        ({"kv_lora_rank": 512}, r"\(MLA\) \(kv_lora_rank: 512\)"),
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding_window: 4096"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types: linear_attention"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"vision_config": {"depth": 1}}, "vision tower"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised weights"),
        ({"model_type": "falcon"}, "model_type 'falcon'"),
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
    if not CONFIGS.exists():
        pytest.skip(f"no reference data at {CONFIGS}")
    loaded: list[ModelSpec] = []
    refused: list[str] = []
    for file in sorted(CONFIGS.glob("*.json")):
        try:
            loaded.append(load_model(str(file)))
        except ServecastError as error:
            refused.append(str(error))
    assert all("not priced yet" in text or "is missing" in text for text in refused)
    assert len(refused) + len(loaded) >= 130
    ours = {dataclasses.replace(load_model(name), name=""): name for name in model_names()}
    unknown = [spec.name for spec in loaded if dataclasses.replace(spec, name="") not in ours]
    assert len(loaded) >= 14
    assert not unknown, "every dense config there is in the catalogue and agrees with it"
