"""Hugging Face `config.json` -> `ModelSpec`, or the reasons why not.

Knows the model types of FAMILIES. Anything else is refused with the field that showed it, never read as if it were
something simpler.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from calibrate import hf_parts
from calibrate.catalog import read
from calibrate.hf_fields import Fields
from calibrate.hf_quant import quantization
from calibrate.model import ModelSpec
from calibrate.parts import Experts, Latent, Recurrent, Window
from servecast.errors import ServecastError, nearest, one_of

DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
UNSCALED_ROPE = ("default", "llama3", "longrope", "su", "mrope")  # their max_position_embeddings is already final
REASONS = {  # field -> why its presence (and truth) means that we would read the model wrongly
    "vision_config": "a vision tower",
    "audio_config": "an audio tower",
    "is_encoder_decoder": "an encoder-decoder",
    "index_topk": "sparse attention with an indexer",
    "linear_num_value_heads": "linear attention layers",
    "hybrid_override_pattern": "hybrid (Mamba and attention) layers",
    "block_configs": "layers of different shapes",
}
DENSE_REASONS = {  # the same, where the model type has no such part
    "kv_lora_rank": "multi-head latent attention (MLA)",
    "attention_chunk_size": "chunked attention",
    "num_experts": "mixture of experts",
    "num_local_experts": "mixture of experts",
    "n_routed_experts": "mixture of experts",
}


@dataclass(frozen=True, slots=True)
class Family:
    """How a model type is written. Biases are "always", "never" or by the config's `attention_bias` ("asked");
    `norm_flag` is the field that turns the query and key norm on, if there is one."""

    qkv_bias: Literal["always", "never", "asked"] = "asked"
    o_bias: Literal["always", "never", "asked"] = "asked"
    qk_norm: Literal["", "head", "all", "plain"] = ""
    norm_flag: str = ""
    norms: int = 2
    tied: bool = False
    experts: Callable[[Fields, int], tuple[Experts, list[int]] | None] | None = None
    latent: Callable[[Fields, int], Latent] | None = None
    windows: Callable[[Fields, int], tuple[Window, ...]] = hf_parts.sliding
    recurrent: Callable[[Fields, int], tuple[Recurrent, list[int]]] | None = None


_DELTA = Family("asked", "never", qk_norm="head", recurrent=hf_parts.delta_nets)
_DELTA_MOE = replace(_DELTA, experts=hf_parts.qwen_experts)
_LATENT = Family("never", "never", experts=hf_parts.deepseek_experts, latent=hf_parts.latent)
FAMILIES = {
    "llama": Family(),
    "mistral": Family(),
    "arcee": Family(),
    "qwen2": Family("always", "never"),
    "qwen3": Family(qk_norm="head"),
    "mimo": Family("always", "never"),
    "gemma2": Family(norms=4, tied=True),
    "gemma3_text": Family(qk_norm="head", norms=4, tied=True),
    "mixtral": Family("never", "never", experts=hf_parts.mixtral_experts),
    "qwen2_moe": Family("always", "never", experts=hf_parts.qwen_experts),
    "qwen3_moe": Family("asked", "never", qk_norm="head", experts=hf_parts.qwen_experts),
    "glm4_moe": Family("asked", "never", "head", norm_flag="use_qk_norm", experts=hf_parts.deepseek_experts),
    "minimax_m2": Family("asked", "never", "all", norm_flag="use_qk_norm", experts=hf_parts.mixtral_experts),
    "gpt_oss": Family("always", "always", experts=hf_parts.mixtral_experts),
    "llama4_text": Family(
        "never", "never", "plain", "use_qk_norm", experts=hf_parts.llama4_experts, windows=hf_parts.llama4_chunks
    ),
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "kimi_k2": _LATENT,
    "qwen3_next": _DELTA_MOE,
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": _DELTA_MOE,
}


def read_config(path: Path) -> ModelSpec:
    """The model that `path` (a config.json or its folder) describes; its name is the folder's or the file's."""
    file = path / "config.json" if path.is_dir() else path
    config = _load(file)
    text = config.get("text_config")
    merged = {**config, **text} if isinstance(text, dict) else config
    beside = file.with_name(f"{file.name.removesuffix('config.json')}hf_quant_config.json")
    if file.name.endswith("config.json") and not merged.get("quantization_config") and beside.exists():
        merged["quantization_config"] = {"quant_method": "modelopt", **_load(beside)}
    reasons = _unpriced(merged)
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
    """Why this architecture cannot be read; empty when it can."""
    kind = config.get("model_type")
    family = FAMILIES.get(str(kind))
    dense = family and not family.experts and not family.latent
    fields = REASONS | DENSE_REASONS if dense else dict(REASONS)
    if family and family.recurrent:  # read for the memory plan; a vision tower beside them is left out, and said
        fields = {name: why for name, why in fields.items() if name not in ("linear_num_value_heads", "vision_config")}
    reasons = [
        f"{why} ({field}: {value if isinstance(value, (int, str)) else '...'})"
        for field, why in fields.items()
        # one "expert" is a dense model written differently
        if (value := config.get(field)) and not (field.endswith("experts") and value == 1)
    ]
    layer_types = config.get("layer_types")
    known = {"full_attention", "sliding_attention", "chunked_attention"}
    known |= {"linear_attention"} if family and family.recurrent else set()
    others = {str(t) for t in layer_types} - known if isinstance(layer_types, list) else set()
    if others:
        reasons.append(f"layers of unknown attention (layer_types: {one_of(sorted(others))})")
    if kind is not None and family is None:
        reasons.append(f"architecture of model_type {kind!r} (priced: {one_of(FAMILIES)})")
    return reasons


def _spec(file: Path, name: str, config: dict[str, Any]) -> ModelSpec:
    fields = Fields(file, config)
    problems, kind = fields.problems, str(config.get("model_type"))
    if config.get("model_type") is None:
        problems.append(f"{file}: model_type is missing; priced are {one_of(FAMILIES)}")
    family = FAMILIES.get(kind, Family())
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    layers = fields.size("num_hidden_layers", most=10_000)
    kv_heads = fields.size("num_key_value_heads", default=heads)
    head_dim = fields.size("head_dim", default=max(1, hidden // heads))
    if not problems and heads % kv_heads:
        problems.append(f"{file}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if not problems and config.get("head_dim") is None and hidden % heads and not family.latent:
        problems.append(
            f"{file}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}, and no head_dim"
        )
    # transformers' own default is float32; checkpoints that are quantised and do not say are of bf16 models
    quantised = config.get("quantization_config") or config.get("compression_config")
    dtype = config.get("torch_dtype") or config.get("dtype") or ("bfloat16" if quantised else "float32")
    if str(dtype) not in DTYPES:
        problems.append(f"{file}: torch_dtype is {dtype!r}; expected one of {one_of(DTYPES)}")
    asked = {"always": True, "never": False, "asked": fields.flag("attention_bias")}
    experts, routed = (family.experts and family.experts(fields, layers)) or (None, [])
    if experts and not experts.layers:
        experts = None
    if experts and not problems and experts.topk > experts.count:
        problems.append(f"{file}: a token chooses {experts.topk} experts of {experts.count}")
    recurrent, linear = family.recurrent(fields, layers) if family.recurrent else (None, [])
    inter = "intermediate_size_mlp" if kind == "llama4_text" and experts and experts.layers < layers else ""
    spec = ModelSpec(
        name=name,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=fields.size(inter or "intermediate_size", default=_no_dense(experts, layers)),
        vocab=fields.size("vocab_size"),
        max_position=_scaled(fields, fields.size("max_position_embeddings")),
        dtype=DTYPES.get(str(dtype), "bf16"),
        tied_embeddings=fields.flag("tie_word_embeddings", family.tied),
        gated_mlp=kind != "arcee",  # squared ReLU without a gate
        qkv_bias=asked[family.qkv_bias],
        o_bias=asked[family.o_bias],
        mlp_bias=fields.flag("mlp_bias"),
        qk_norm=family.qk_norm if not family.norm_flag or fields.flag(family.norm_flag) else "",
        norms=family.norms,
        sinks=kind == "gpt_oss",
        experts=experts,
        latent=family.latent(fields, layers) if family.latent else None,
        windows=family.windows(fields, layers),
        recurrent=recurrent,
        attn_gate=bool(family.recurrent) and fields.flag("attn_output_gate", True),
        left_out="a vision tower" if config.get("vision_config") else "",
    )
    if problems:
        raise ServecastError(*problems)
    return quantization(spec, file, quantised, routed, linear) if quantised else spec


def _no_dense(experts: Experts | None, layers: int) -> int | None:
    """A stand-in for the width of dense MLPs where no layer has one."""
    return experts.inter if experts and experts.layers == layers else None


def _scaled(fields: Fields, max_position: int) -> int:
    """The longest sequence after rope scaling, by vLLM's rule (`_get_and_verify_max_len`)."""
    rope = fields.get("rope_scaling") or fields.get("rope_parameters")
    if not isinstance(rope, dict) or fields.get("model_type") == "gemma3_text":
        return max_position
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind in UNSCALED_ROPE:
        return max_position
    factor = rope.get("factor", 1)
    original = rope.get("original_max_position_embeddings", max_position) if kind == "yarn" else max_position
    for name, value in (("factor", factor), ("original_max_position_embeddings", original)):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e9:
            fields.problems.append(f"{fields.file}: rope_scaling.{name} is {value!r}; expected a positive number")
            return max_position
    return int(original * factor)
