"""The quantisation that a Hugging Face config.json (or the hf_quant_config.json beside it) describes.

Reads the formats of vLLM's loaders: how weights are stored (`storage.py`), which modules are left out, and whether the
checkpoint asks for an 8-bit KV cache. Formats that it does not know are refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from calibrate.model import KINDS, ModelSpec
from calibrate.parts import Quantized
from calibrate.storage import FORMATS, Storage, bitsandbytes, grouped_int
from servecast.errors import ServecastError, one_of

WEIGHT_ONLY = "{} weights with 16-bit activations, whose kernels nobody's table holds"
MODELOPT = {"FP8": "fp8", "FP8_PER_CHANNEL_PER_TOKEN": "fp8_channel", "FP8_PB_WO": "fp8_block", "NVFP4": "nvfp4"}
MODULES: Mapping[str, Sequence[str]] = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "qkv_a": ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
    "q_b": ("self_attn.q_b_proj",),
    "kv_b": ("self_attn.kv_b_proj",),
    "o_proj": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
    "experts": ("mlp.experts.0.gate_proj", "mlp.experts.0.up_proj", "mlp.experts.0.down_proj"),
    "shared_gate_up": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    "shared_down": ("mlp.shared_experts.down_proj",),
    "recurrent_in": ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
    "recurrent_out": ("linear_attn.out_proj",),
}
"""Kind -> the modules of a layer that are multiplied as one, by the names that most checkpoints use."""
RENAMED = (("mlp.", "block_sparse_moe."), ("mlp.", "feed_forward."), ("shared_experts.", "shared_expert."),
           (".gate_proj", ".w1"), (".up_proj", ".w3"), (".down_proj", ".w2"))  # fmt: skip


@dataclass(frozen=True, slots=True)
class Scheme:
    """(targets, storage) in order, the first whose targets name a module wins; modules named in `left_out` are not
    quantised. `kv_dtype` is what the checkpoint asks of the KV cache ("" nothing)."""

    method: str
    groups: tuple[tuple[tuple[str, ...], Storage], ...]
    left_out: tuple[str, ...] = ()
    kv_dtype: str = ""


def quantization(
    spec: ModelSpec, file: Path, config: Any, routed: Collection[int], recurrent: Collection[int] = ()
) -> ModelSpec:
    """`spec` with what `config`, its `quantization_config`, says of its weights. `routed` are the layers that have
    experts, `recurrent` those without attention. Raises `ServecastError` for a format that is not known."""
    if not isinstance(config, dict):
        raise ServecastError(f"{file}: quantization_config is {config!r}; expected an object")
    try:
        scheme = _scheme(config)
        quantized = tuple(_quantized(spec, scheme, routed, recurrent))
    except _UnknownError as error:
        raise ServecastError(f"{file}: not priced yet: quantised weights: {error}") from None
    return replace(spec, quantized=quantized, method=scheme.method, kv_dtype=scheme.kv_dtype)


class _UnknownError(Exception):
    """Says what of the quantisation is not known."""


def _scheme(config: Mapping[str, Any]) -> Scheme:
    method = str(config.get("quant_method") or ("modelopt" if "quant_algo" in config else "compressed-tensors"))
    if config.get("quant_algo") == "MIXED_PRECISION":
        method = "modelopt"
    if method not in METHODS:
        raise _UnknownError(f"quant_method {method!r} (known: {one_of(METHODS)})")
    return METHODS[method](config)


def _fp8(config: Mapping[str, Any]) -> Scheme:
    block = config.get("weight_block_size")
    if block not in (None, [128, 128]):
        raise _UnknownError(f"fp8 with weight_block_size {block!r} (known: [128, 128])")
    left_out = _names(config, "ignored_layers") or _names(config, "modules_to_not_convert")
    return Scheme("fp8", _everywhere(FORMATS["fp8_block" if block else "fp8"]), left_out)


def _fbgemm(config: Mapping[str, Any]) -> Scheme:
    return Scheme("fbgemm_fp8", _everywhere(FORMATS["fp8_channel"]), _names(config, "modules_to_not_convert"))


def _awq(config: Mapping[str, Any]) -> Scheme:
    storage = grouped_int(_number(config, "bits", 4), _group(config), bool(config.get("zero_point", True)))
    return Scheme("awq", _everywhere(_four_or_eight(storage)), _names(config, "modules_to_not_convert"))


def _gptq(config: Mapping[str, Any]) -> Scheme:
    if config.get("lm_head"):
        raise _UnknownError("gptq with quantised output weights (lm_head: true)")
    rules = config.get("dynamic") or {}
    if not isinstance(rules, dict) or any(not str(rule).startswith("-:") for rule in rules):
        raise _UnknownError("gptq with other bits in some modules (dynamic)")
    # symmetric ones have no use for zero points, and the kernels drop them
    storage = grouped_int(_number(config, "bits", 4), _group(config), not config.get("sym", True))
    left_out = tuple(f"re:{str(rule)[2:]}" for rule in rules)
    return Scheme("gptq", _everywhere(_four_or_eight(storage)), left_out)


def _bitsandbytes(config: Mapping[str, Any]) -> Scheme:
    bits = 8 if config.get("load_in_8bit") else 4
    storage = bitsandbytes(bits, double=bool(config.get("bnb_4bit_use_double_quant")))
    return Scheme("bitsandbytes", _everywhere(storage), _names(config, "llm_int8_skip_modules"))


def _mxfp4(config: Mapping[str, Any]) -> Scheme:
    return Scheme("mxfp4", ((("experts",), FORMATS["mxfp4"]),), _names(config, "modules_to_not_convert"))


def _modelopt(config: Mapping[str, Any]) -> Scheme:
    inner = config.get("quantization", config)
    if not isinstance(inner, dict):
        raise _UnknownError(f"modelopt's quantization is {inner!r}; expected an object")
    algorithm = str(inner.get("quant_algo")).upper()
    if algorithm not in MODELOPT:
        raise _UnknownError(f"modelopt's quant_algo {algorithm} (known: {one_of(MODELOPT)})")
    kv = inner.get("kv_cache_quant_algo") or inner.get("kv_cache_scheme")
    left_out = _names(inner, "exclude_modules") or _names(inner, "ignore")
    return Scheme("modelopt", _everywhere(FORMATS[MODELOPT[algorithm]]), left_out, _kv_dtype(kv))


def _compressed(config: Mapping[str, Any]) -> Scheme:
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise _UnknownError("compressed-tensors without config_groups")
    if not all(isinstance(group, dict) for group in groups.values()):
        raise _UnknownError("config_groups that are not objects")
    found = tuple((_names(group, "targets") or ("Linear",), _compressed_storage(group)) for group in groups.values())
    return Scheme("compressed-tensors", found, _names(config, "ignore"), _kv_dtype(config.get("kv_cache_scheme")))


def _compressed_storage(group: Mapping[str, Any]) -> Storage:
    weights, inputs = group.get("weights") or {}, group.get("input_activations") or {}
    if not isinstance(weights, dict) or not isinstance(inputs, dict):
        raise _UnknownError("a config group whose weights or input_activations are not objects")
    bits, kind, strategy = weights.get("num_bits"), weights.get("type"), str(weights.get("strategy"))
    size, taken = weights.get("group_size"), inputs.get("num_bits")
    said = f"{bits}-bit {kind} weights (strategy {strategy}) with {taken or 16}-bit activations"
    if (kind, bits, taken) == ("float", 8, 8):
        blocks = {"tensor": "fp8", "channel": "fp8_channel", "block": "fp8_block"}
        if strategy not in blocks or (strategy == "block" and weights.get("block_structure") != [128, 128]):
            raise _UnknownError(said)
        return FORMATS[blocks[strategy]]
    if (kind, bits) == ("float", 8) and not taken:
        return replace(FORMATS["fp8_channel"], unpriced=WEIGHT_ONLY.format("fp8"))
    if (kind, bits, size) == ("float", 4, 16):
        storage = FORMATS["nvfp4"]
        return storage if taken == 4 else replace(storage, unpriced=WEIGHT_ONLY.format("nvfp4"))
    if (kind, bits, size) == ("float", 4, 32) and not taken:
        return FORMATS["mxfp4"]
    if (kind, bits, taken) == ("int", 8, 8) and strategy in ("channel", "tensor"):
        return FORMATS["int8"]
    if kind == "int" and bits in (4, 8) and not taken and strategy in ("group", "channel"):
        return grouped_int(bits, size if isinstance(size, int) and size > 0 else 0, not weights.get("symmetric", True))
    raise _UnknownError(said)


METHODS = {
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm,
    "awq": _awq,
    "gptq": _gptq,
    "bitsandbytes": _bitsandbytes,
    "mxfp4": _mxfp4,
    "modelopt": _modelopt,
    "compressed-tensors": _compressed,
}


def _quantized(
    spec: ModelSpec, scheme: Scheme, routed: Collection[int], recurrent: Collection[int]
) -> Iterator[Quantized]:
    """What of each kind is stored how, in how many layers."""
    left_out = Names(scheme.left_out)
    groups = [(Names(targets), storage) for targets, storage in scheme.groups]
    wrapper = next((w for w in ("language_model.model.", "model.language_model.") if left_out.hold(w)), "model.")
    present = {projection.name for projection in spec.projections(1)} | ({"experts"} if spec.experts else set())
    for kind in KINDS:
        if kind not in present:
            continue
        modules = MODULES[kind]
        if kind in ("qkv_a", "q_b") and spec.latent and not spec.latent.q_rank:
            modules = {"qkv_a": ("self_attn.kv_a_proj_with_mqa",), "q_b": ("self_attn.q_proj",)}[kind]
        counts: dict[Storage, int] = {}
        for layer in range(spec.layers):
            if (kind in ("gate_up", "down")) == (layer in routed) and "attn" not in modules[0]:
                continue
            if "attn" in modules[0] and (layer in recurrent) != kind.startswith("recurrent"):
                continue
            stored = {_of_module(f"{wrapper}layers.{layer}.{module}", left_out, groups) for module in modules}
            if len(stored) > 1:
                raise _UnknownError(f"some but not all of {one_of(modules)} in layer {layer}, which engines fuse")
            if storage := stored.pop():
                counts[storage] = counts.get(storage, 0) + 1
        for storage, layers in counts.items():
            yield Quantized(kind, storage, layers)


def _of_module(module: str, left_out: Names, groups: Sequence[tuple[Names, Storage]]) -> Storage | None:
    names = _spellings(module)
    if any(name in left_out for name in names):
        return None
    return next((storage for targets, storage in groups if any(name in targets for name in names)), None)


def _spellings(module: str) -> set[str]:
    """The names that a module has in the checkpoints of different model types."""
    names = {module}
    for usual, other in RENAMED:
        names |= {name.replace(usual, other) for name in names}
    return names


class Names:
    """Modules as quantisation configs name them: a whole name or any part of it between dots ("lm_head",
    "model.layers.0.self_attn"), wildcards, a regular expression after "re:", or "Linear" for all."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._all = "Linear" in patterns
        self._plain = {p for p in patterns if not p.startswith("re:") and not set("*?") & set(p)}
        globs = [p for p in patterns if not p.startswith("re:") and set("*?") & set(p)]
        translated = [re.escape(p).replace(r"\*", ".*").replace(r"\?", ".") for p in globs]
        self._globs = re.compile("|".join(rf"(?:.*\.)?{p}(?:\..*)?" for p in translated)) if globs else None
        try:
            self._regexes = [re.compile(p[3:]) for p in patterns if p.startswith("re:")]
        except re.error as error:
            raise _UnknownError(f"the pattern {error.pattern!r} is not a regular expression ({error})") from None
        self._patterns = patterns

    def __contains__(self, module: object) -> bool:
        name, parts = str(module), str(module).split(".")
        spans = (".".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1))
        return (
            self._all
            or any(span in self._plain for span in spans)
            or (self._globs is not None and self._globs.fullmatch(name) is not None)
            or any(regex.match(name) for regex in self._regexes)
        )

    def hold(self, start: str) -> bool:
        """Whether any pattern begins so."""
        return any(p.startswith(start) for p in self._patterns)


def _everywhere(storage: Storage) -> tuple[tuple[tuple[str, ...], Storage], ...]:
    return ((("Linear",), storage),)


def _four_or_eight(storage: Storage) -> Storage:
    if storage.bits not in (4, 8):
        raise _UnknownError(f"{storage.bits}-bit integers (known: 4, 8)")
    return storage


def _names(config: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = config.get(key) or ()
    if not isinstance(value, (list, tuple)) or not all(isinstance(name, str) for name in value):
        raise _UnknownError(f"{key} is {value!r}; expected a list of module names")
    return tuple(value)


def _number(config: Mapping[str, Any], key: str, default: int) -> int:
    value = config.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise _UnknownError(f"{key} is {value!r}; expected a whole number")
    return value


def _group(config: Mapping[str, Any]) -> int:
    return max(0, _number(config, "group_size", 128))  # -1: one scale an output


def _kv_dtype(said: Any) -> str:
    """ "fp8" where a checkpoint has scales for an 8-bit KV cache."""
    eight = isinstance(said, dict) and (said.get("num_bits"), said.get("type")) == (8, "float")
    return "fp8" if eight or (isinstance(said, str) and said.upper() == "FP8") else ""
