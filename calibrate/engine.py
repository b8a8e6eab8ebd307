"""The serving engine that is imitated: a preset's defaults (version and GPU class) plus what the user wrote.

Knows vLLM's option names, defaults and validations, and the source of each value; not how a scheduler uses them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from calibrate.catalog import read
from calibrate.hardware import GIB, Gpu
from calibrate.model import ModelSpec
from servecast.errors import ServecastError, nearest, one_of

INTEGERS = {"max_num_seqs": 1, "max_num_batched_tokens": 1, "max_model_len": 1, "block_size": 1,
            "long_prefill_token_threshold": 0, "num_gpu_blocks_override": 1}  # fmt: skip
MOST = {"max_num_seqs": 2**22, "max_num_batched_tokens": 2**22}  # a step of each size is priced beforehand
FLAGS = ("enable_chunked_prefill", "scheduler_reserve_full_isl", "async_scheduling", "enforce_eager",
         "enable_prefix_caching", "fuse_allreduce_rms")  # fmt: skip
SHARES = {"gpu_memory_utilization": 1.0, "fi_allreduce_fusion_max_size_mb": 1e6}
"""Numbers above 0 and at most these."""
WORDS = {
    "scheduling_policy": ("fcfs", "priority"),
    "cudagraph_mode": ("FULL_AND_PIECEWISE", "PIECEWISE", "FULL_DECODE_ONLY", "NONE"),
    "dtype": ("auto", "bfloat16", "half", "float16", "float", "float32"),
    "kv_cache_dtype": ("auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_per_token_head", "int8_per_token_head",
                       "int4_per_token_head", "nvfp4"),
    "quantization": ("fp8", "awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "modelopt",
                     "modelopt_fp4", "mxfp4", "bitsandbytes", "fbgemm_fp8"),
}  # fmt: skip
ELSEWHERE = {"tensor_parallel_size": "cluster.tp", "model": "model", "served_model_name": "model"}
MODELLED = ("preset", *INTEGERS, *SHARES, *FLAGS, *WORDS)


@dataclass(frozen=True, slots=True)
class HostTime:
    """CPU seconds of one step: a synchronous engine adds `sync_*` to the GPU time, an asynchronous one overlaps
    `async_*` with it and adds `bubble_s`. Where no captured graph runs, launching the kernels of a layer takes
    `compiled_layer_s`, `uncaptured_layer_s` in a `cudagraph_mode` that captures none of such steps, or `eager_layer_s`
    with `enforce_eager`. Evidence and assumptions: `engines.yaml`."""

    sync_base_s: float
    sync_per_sequence_s: float
    async_base_s: float
    async_per_sequence_s: float
    bubble_s: float
    compiled_layer_s: float
    uncaptured_layer_s: float
    eager_layer_s: float


@dataclass(frozen=True, slots=True)
class FrontEndTime:
    """Seconds that the API server takes: for every request, and for every token of its prompt, for which the requests
    after it wait. Evidence: `engines.yaml`."""

    request_s: float
    prompt_token_s: float


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Every engine option that matters here, resolved. Names are vLLM's own.

    `sources` says for each option where its value came from ("user", or the preset's source); `notes` what was
    resolved. Rules of the version, not options: `long_prefill_alone_exempt` (the threshold does not bind the only
    request), `preemption_skips_one` and `blank_blocks_first` (`engines.yaml` says what), `follows_checkpoint_kv` (KV
    cache dtype "auto" is the one that a quantised checkpoint has scales for) and `strict_pool_check` (at
    start-up one sequence of `max_model_len` tokens must fit the KV pool less its null block, and an overridden pool is
    checked too). `fused_mib`: GPUs in a group -> the buffers up to which an all-reduce is fused with its norm.
    `fp32_router_from`: the tokens from which a 32-bit router runs on the CUDA cores (None: never).
    """

    preset: str
    engine: str
    version: str
    scheduler: str
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    gpu_memory_utilization: float
    enable_chunked_prefill: bool
    long_prefill_token_threshold: int
    long_prefill_alone_exempt: bool
    scheduler_reserve_full_isl: bool
    scheduling_policy: Literal["fcfs", "priority"]
    preemption_skips_one: bool
    enable_prefix_caching: bool
    blank_blocks_first: bool
    async_scheduling: bool
    enforce_eager: bool
    cudagraph_mode: str
    fuse_allreduce_rms: bool
    fi_allreduce_fusion_max_size_mb: float | None
    dtype: str
    kv_cache_dtype: str
    quantization: str | None
    follows_checkpoint_kv: bool
    num_gpu_blocks_override: int | None
    strict_pool_check: bool
    host: HostTime
    front_end: FrontEndTime
    fused_mib: Mapping[int, float]
    graph_limit: int
    graph_stride: int
    fp32_router_from: int | None
    cuda_graph_bytes: int
    sources: Mapping[str, str]
    notes: tuple[str, ...]


def preset_names() -> list[str]:
    """The presets of the catalogue, oldest first."""
    return list(read("engines")["presets"])


def resolve_engine(options: Mapping[str, object], gpu: Gpu, model: ModelSpec) -> EngineSpec:
    """The engine that `options` (only what the user wrote, 'preset' included) describe on this GPU and model.

    Raises `ServecastError` with every problem: unknown preset or option, an option that is not modelled or that the
    version does not have, a value of the wrong kind, and vLLM's own start-up checks.
    """
    check_options(options)
    name, notes = _resolve_preset(options["preset"])
    preset = read("engines")["presets"][name]
    user = {key: value for key, value in options.items() if key != "preset"}
    values: dict[str, Any] = {key: value for key, value in user.items() if key in MODELLED and value is not None}
    sources = dict.fromkeys(values, "user")

    def default(key: str, value: object, why: str = "") -> None:
        if key not in values:
            values[key] = value
            sources[key] = f"{preset['source']} default{why}"

    for key, value in preset["defaults"].items():
        default(key, value)
    default("max_model_len", model.max_position, " (the model's longest sequence)")
    default("num_gpu_blocks_override", None)
    default("quantization", None)
    default("enforce_eager", False)
    default("fi_allreduce_fusion_max_size_mb", None)
    default("fuse_allreduce_rms", preset["fuse_allreduce"] and gpu.architecture in preset["fused_mib"])
    default("dtype", "auto")
    default("kv_cache_dtype", "auto")
    _batch_defaults(values, default, gpu, preset)
    problems = _startup_checks(values, preset, model)
    if problems:
        raise ServecastError(*problems)
    return EngineSpec(
        preset=name,
        engine="vllm",
        version=preset["source"].removeprefix("vLLM v"),
        scheduler=preset["scheduler"],
        strict_pool_check=preset["strict_pool_check"],
        long_prefill_alone_exempt=preset["long_prefill_alone_exempt"],
        preemption_skips_one=preset["preemption_skips_one"],
        blank_blocks_first=preset["blank_blocks_first"],
        follows_checkpoint_kv=preset["follows_checkpoint_kv"],
        host=HostTime(**{f"{key}_s": value for key, value in preset["host"].items()}),
        fused_mib=preset["fused_mib"].get(gpu.architecture, {}),
        front_end=FrontEndTime(**{f"{key}_s": value for key, value in preset["front_end"].items()}),
        graph_limit=preset["graph"].get(gpu.architecture, preset["graph"]["limit"]),
        graph_stride=preset["graph"]["stride"],
        fp32_router_from=preset.get("fp32_router", {}).get(gpu.architecture, 1),
        cuda_graph_bytes=0 if values["enforce_eager"] else round(preset["cuda_graph_gib"] * GIB),
        sources=sources,
        notes=tuple(notes),
        **{**values, "gpu_memory_utilization": float(values["gpu_memory_utilization"])},
    )


def check_options(options: Mapping[str, object]) -> None:
    """Raises `ServecastError` with every problem of the options that shows without a model and a GPU. An option set to
    None is not given: the preset's default holds."""
    name, _ = _resolve_preset(options.get("preset"))
    preset = read("engines")["presets"][name]
    rest = {key: value for key, value in options.items() if key != "preset"}
    problems = [problem for key, value in rest.items() if (problem := _refusal(key, value, name, preset))]
    if problems:
        raise ServecastError(*problems)


def _resolve_preset(word: object) -> tuple[str, list[str]]:
    """The preset for `word`, and a note when its version is not listed and the nearest lower one stands in."""
    known = preset_names()
    if word in known:
        return str(word), []
    match = re.fullmatch(r"vllm-(\d+)\.(\d+)(?:\.\d+)?", word) if isinstance(word, str) else None
    if not match:
        hint = nearest(word, known) if isinstance(word, str) else ""
        found = "missing" if word is None else f"{word!r} is not a preset{hint}"
        raise ServecastError(f"engine.preset: {found}; known: {one_of(known)}")
    wanted = (int(match[1]), int(match[2]))
    lower = [name for name in known if _version(name) <= wanted]
    if not lower:
        raise ServecastError(f"engine.preset: {word!r} is older than the oldest preset; known: {one_of(known)}")
    if _version(lower[-1]) == wanted:
        return lower[-1], [f"{word} uses the preset {lower[-1]}"]
    return lower[-1], [f"{word} is not a preset: resolved to {lower[-1]}, the nearest lower version"]


def _version(preset: str) -> tuple[int, int]:
    major, minor = preset.removeprefix("vllm-").split(".")
    return int(major), int(minor)


def _refusal(key: str, value: object, name: str, preset: Mapping[str, Any]) -> str | None:
    """Why this option or its value cannot be taken, or None."""
    unmodelled = read("engines")["unmodelled"]
    where = f"engine.{key}"
    if key in unmodelled:
        neutral = unmodelled[key]["neutral"]
        if any(value == n and isinstance(value, bool) == isinstance(n, bool) for n in neutral):
            return None
        words = one_of("null" if n is None else str(n).lower() for n in neutral)
        return f"{where}: {value!r} is not modelled yet; {f'only {words} is accepted' if words else 'leave it out'}"
    if key in ELSEWHERE:
        return f"{where}: set it as {ELSEWHERE[key]} in the scenario"
    if key in MODELLED and value is None:
        return None
    if key not in MODELLED:
        return f"{where}: unknown option{nearest(key, [*MODELLED, *unmodelled])}; modelled: {one_of(MODELLED)}"
    if key in preset["absent"]:
        return f"{where}: {name} does not have this option; take it out or use a later preset"
    if key in preset["fixed"] and value != preset["defaults"][key]:
        return f"{where}: {value!r} cannot be set in {name}: {preset['fixed'][key]}"
    if key in FLAGS:
        return None if isinstance(value, bool) else f"{where} is {value!r}; expected true or false"
    if key in WORDS:
        known = [word for word in WORDS[key] if word not in preset["absent_words"].get(key, ())]
        return None if value in known else f"{where} is {value!r}; expected {' or '.join(known)}"
    if isinstance(value, bool):
        return f"{where} is {value!r}; expected a number"
    if key in SHARES:
        good = isinstance(value, (int, float)) and 0 < value <= SHARES[key]
        return None if good else f"{where} is {value!r}; expected a number above 0 and at most {SHARES[key]:g}"
    if not isinstance(value, int) or not INTEGERS[key] <= value <= MOST.get(key, 2**31 - 1):
        most = f" and at most {MOST[key]:,}" if key in MOST else ""
        return f"{where} is {value!r}; expected a whole number of at least {INTEGERS[key]}{most}"
    if key == "block_size" and preset["block_sizes"] and value not in preset["block_sizes"]:
        return f"{where} is {value}; {name} allows {one_of(map(str, preset['block_sizes']))}"
    return None


def _batch_defaults(values: dict[str, Any], default: Callable[..., None], gpu: Gpu, preset: Mapping[str, Any]) -> None:
    """vLLM's defaults for max_num_batched_tokens and max_num_seqs, with the caps it puts on its own defaults only."""
    rule = next(
        rule
        for rule in preset["batch_defaults"]
        if gpu.visible_bytes >= rule["min_memory_gib"] * GIB
        and not ("except" in rule and rule["except"] in gpu.name.lower())
    )
    tokens, seqs = rule["max_num_batched_tokens"], rule["max_num_seqs"]
    why = f" for {gpu.visible_bytes / GIB:.0f} GiB"
    if not values["enable_chunked_prefill"]:
        tokens = max(tokens, values["max_model_len"])
    if preset["default_tokens_fit_sequences"]:
        tokens = min(tokens, values.get("max_num_seqs", seqs) * values["max_model_len"])
    default("max_num_batched_tokens", tokens, why)
    default("max_num_seqs", min(seqs, values["max_num_batched_tokens"]), why)


def _startup_checks(values: Mapping[str, Any], preset: Mapping[str, Any], model: ModelSpec) -> list[str]:
    """vLLM's checks of one option against another, each with what to change."""
    tokens, seqs, length = values["max_num_batched_tokens"], values["max_num_seqs"], values["max_model_len"]
    threshold = values["long_prefill_token_threshold"]
    problems = []
    if tokens < seqs:
        problems.append(
            f"engine.max_num_batched_tokens {tokens} is below max_num_seqs {seqs}: "
            f"raise it to at least {seqs}, or lower max_num_seqs to {tokens}"
        )
    if not values["enable_chunked_prefill"] and tokens < length:
        problems.append(
            f"engine.max_num_batched_tokens {tokens} is below max_model_len {length} with chunked prefill off: "
            f"raise it to {length}, lower max_model_len to {tokens}, or leave chunked prefill on"
        )
    if preset["checks_threshold"] and threshold > length:
        problems.append(
            f"engine.long_prefill_token_threshold {threshold} is above max_model_len {length}: lower it (0 is off)"
        )
    if length > model.max_position:
        problems.append(
            f"engine.max_model_len {length} is above the {model.max_position} tokens that {model.name} allows"
        )
    return problems
