"""Hugging Face `config.json` -> `ModelSpec`, or the reasons why not.

Deliberately knows only architectures whose every layer is full attention plus a dense MLP: anything else is refused
with the field that showed it, never priced as if it were dense.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from calibrate.catalog import read
from calibrate.model import ModelSpec
from servecast.errors import ServecastError, nearest, one_of

DENSE_TYPES = ("llama", "mistral", "qwen2", "qwen3", "arcee")
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
UNSCALED_ROPE = ("default", "llama3", "longrope", "su", "mrope")  # their max_position_embeddings is already final
REASONS = {  # field -> why its presence (and truth) means that we would price the model wrongly
    "quantization_config": "quantised weights",
    "compression_config": "quantised weights",
    "vision_config": "a vision tower",
    "audio_config": "an audio tower",
    "is_encoder_decoder": "an encoder-decoder",
    "kv_lora_rank": "multi-head latent attention (MLA)",
    "attention_chunk_size": "chunked attention",
    "linear_num_value_heads": "linear attention layers",
    "hybrid_override_pattern": "hybrid (Mamba and attention) layers",
    "block_configs": "layers of different shapes",
    "num_nextn_predict_layers": "multi-token prediction layers",
    "num_experts": "mixture of experts",
    "num_local_experts": "mixture of experts",
    "n_routed_experts": "mixture of experts",
}


def read_config(path: Path) -> ModelSpec:
    """The model that `path` (a config.json or its folder) describes; its name is the folder's or the file's."""
    file = path / "config.json" if path.is_dir() else path
    config = _load(file)
    text = config.get("text_config")
    merged = {**config, **text} if isinstance(text, dict) else config
    reasons = _unpriced(merged)
    stem = file.name.removesuffix("config.json")
    if stem != file.name and file.with_name(f"{stem}hf_quant_config.json").exists():
        reasons.append("quantised weights (hf_quant_config.json lies beside it)")
    if reasons:
        raise ServecastError(*(f"{file}: not priced yet: {reason}" for reason in reasons))
    return _spec(file, path.resolve().name if path.is_dir() else path.stem, merged)


def _load(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        hint = nearest(file.name.lower(), read("models")["models"])
        raise ServecastError(
            f"{file}: no such file{hint}; a model is a catalogue name or a path to a config.json "
            "(nothing is downloaded)"
        ) from None
    except OSError as error:
        raise ServecastError(f"{file}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ServecastError(f"{file}: not a text file; expected a Hugging Face config.json") from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise ServecastError(f"{file}: not JSON ({error}); expected a Hugging Face config.json") from None
    if not isinstance(config, dict):
        raise ServecastError(f"{file}: expected a JSON object of model sizes, found {type(config).__name__}")
    return config


def _unpriced(config: dict[str, Any]) -> list[str]:
    """Why this architecture is not priced; empty when every layer is full attention plus a dense MLP."""
    reasons = [
        f"{why} ({field}: {value if isinstance(value, (int, str)) else '...'})"
        for field, why in REASONS.items()
        # one "expert" or zero prediction layers are a dense model written differently
        if (value := config.get(field)) and not (field.endswith("experts") and value == 1)
    ]
    layer_types = config.get("layer_types")
    others = {str(t) for t in layer_types} - {"full_attention"} if isinstance(layer_types, list) else set()
    if others:
        reasons.append(f"layers that are not full attention (layer_types: {one_of(sorted(others))})")
    window, reach = config.get("sliding_window"), config.get("max_position_embeddings")
    model_type = config.get("model_type")
    # Qwen configs carry a window that is off unless use_sliding_window says otherwise
    used = config.get("use_sliding_window", model_type not in ("qwen2", "qwen3"))
    if isinstance(window, int) and used and not (isinstance(reach, int) and window >= reach):
        reasons.append(f"sliding-window attention (sliding_window: {window})")
    if model_type is not None and model_type not in DENSE_TYPES:
        reasons.append(f"architecture of model_type {model_type!r} (priced: {one_of(DENSE_TYPES)})")
    return reasons


def _spec(file: Path, name: str, config: dict[str, Any]) -> ModelSpec:
    problems: list[str] = []

    def size(field: str, default: int | None = None) -> int:
        value = config.get(field)
        if value is None and default is not None:
            return default
        if value is None:
            problems.append(f"{file}: {field} is missing; expected a whole number of at least 1")
        elif not isinstance(value, int) or isinstance(value, bool) or value < 1:
            problems.append(f"{file}: {field} is {value!r}; expected a whole number of at least 1")
        else:
            return value
        return 1

    def flag(field: str, default: bool = False) -> bool:
        value = config.get(field, default)
        if not isinstance(value, bool):
            problems.append(f"{file}: {field} is {value!r}; expected true or false")
        return bool(value)

    kind = config.get("model_type")
    if kind is None:
        problems.append(f"{file}: model_type is missing; priced are {one_of(DENSE_TYPES)}")
    hidden, heads = size("hidden_size"), size("num_attention_heads")
    kv_heads = size("num_key_value_heads", default=heads)
    head_dim = size("head_dim", default=max(1, hidden // heads))
    if not problems and heads % kv_heads:
        problems.append(f"{file}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if not problems and config.get("head_dim") is None and hidden % heads:
        problems.append(
            f"{file}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}, and no head_dim"
        )
    dtype = config.get("torch_dtype") or config.get("dtype") or "float32"  # transformers' own default
    if str(dtype) not in DTYPES:
        problems.append(f"{file}: torch_dtype is {dtype!r}; expected one of {one_of(DTYPES)}")
    bias = flag("attention_bias")
    max_position = size("max_position_embeddings")
    spec = ModelSpec(
        name=name,
        hidden=hidden,
        layers=size("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=size("intermediate_size"),
        vocab=size("vocab_size"),
        max_position=_scaled(file, config, max_position, problems),
        dtype=DTYPES.get(str(dtype), "bf16"),
        tied_embeddings=flag("tie_word_embeddings"),
        gated_mlp=kind != "arcee",  # squared ReLU without a gate
        qkv_bias=bias or kind == "qwen2",  # Qwen2 has these three biases always, and none on the output
        o_bias=bias and kind != "qwen2",
        mlp_bias=flag("mlp_bias"),
        qk_norm=kind == "qwen3",
    )
    if problems:
        raise ServecastError(*problems)
    return spec


def _scaled(file: Path, config: dict[str, Any], max_position: int, problems: list[str]) -> int:
    """The longest sequence after rope scaling, by vLLM's rule (`_get_and_verify_max_len`)."""
    rope = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(rope, dict):
        return max_position
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind in UNSCALED_ROPE:
        return max_position
    factor = rope.get("factor", 1)
    original = rope.get("original_max_position_embeddings", max_position) if kind == "yarn" else max_position
    for field, value in (("factor", factor), ("original_max_position_embeddings", original)):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e9:
            problems.append(f"{file}: rope_scaling.{field} is {value!r}; expected a positive number")
            return max_position
    return int(original * factor)
