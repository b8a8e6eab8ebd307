"""vLLM's defaults by device, its start-up checks, and what its options mean.

Sources of the defaults and rules: `catalog/engine-vllm.yaml`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from calibrate.hardware import GIB, Gpu
from calibrate.layout import Parallelism
from calibrate.model import ModelSpec
from calibrate.options import Chosen
from servecast.errors import ServecastError

POLICY = ("max_num_batched_tokens", "max_num_seqs", "enable_chunked_prefill", "long_prefill_token_threshold",
          "scheduler_reserve_full_isl", "scheduling_policy", "watermark")  # fmt: skip
"""Options that its scheduler takes by these names; of the version: `long_prefill_alone_exempt` (the threshold does not
bind the only request), `preemption_skips_one`, `pulled_queue` and `pulls_spare_prefills`."""
RULES = ("long_prefill_alone_exempt", "preemption_skips_one", "pulled_queue", "pulls_spare_prefills")
V0_POLICY = ("max_num_batched_tokens", "max_num_seqs", "enable_chunked_prefill", "preemption_mode")
DBO_DECODE_TOKENS, DBO_PREFILL_TOKENS = 32, 512
"""Tokens from which steps are computed in halves (vllm/config/parallel.py)."""
LONG = 32768
"""Tokens of the longest sequence above which vLLM 0.6 turns chunked prefill on by itself."""
SAME = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size", "enable_prefix_caching",
        "async_scheduling", "enforce_eager", "fuse_allreduce_rms", "fi_allreduce_fusion_max_size_mb",
        "dtype", "kv_cache_dtype", "quantization", "num_gpu_blocks_override")  # fmt: skip
"""Options that the simulator knows by vLLM's names."""
DRAFTS = tuple(f"speculative_config.{name}" for name in (
    "method", "num_speculative_tokens", "model", "prompt_lookup_max", "prompt_lookup_min",
    "draft_tensor_parallel_size"))  # fmt: skip


def resolve(
    chosen: Chosen, layout: Parallelism, gpu: Gpu, model: ModelSpec, preset: Mapping[str, Any]
) -> dict[str, Any]:
    """See `calibrate.families`."""
    values, default = chosen.values, chosen.default
    default("max_model_len", model.max_position, " (the model's longest sequence)")
    v0 = preset["scheduler"] == "vllm-v0"
    if v0:
        default("enable_chunked_prefill", values["max_model_len"] > LONG, f" ({LONG} tokens and less: off)")
    default("preemption_mode", None)
    default("swap_space", None)
    default("kv_offloading_size", None)
    default("kv_offloading_backend", None if "kv_offloading_backend" in preset["absent"] else "native")
    default("num_gpu_blocks_override", None)
    default("max_cudagraph_capture_size", None)
    default("quantization", None)
    default("enforce_eager", False)
    default("stream_interval", None if v0 else 1)
    default("disable_hybrid_kv_cache_manager", False)
    default("fi_allreduce_fusion_max_size_mb", None)
    has_halves = "dbo" in preset
    default("enable_dbo", False if has_halves else None)
    default("dbo_decode_token_threshold", DBO_DECODE_TOKENS if has_halves else None)
    default("dbo_prefill_token_threshold", DBO_PREFILL_TOKENS if has_halves else None)
    default("fuse_allreduce_rms", preset["fuse_allreduce"] and gpu.architecture in preset["fused_mib"])
    default("dtype", "auto")
    default("kv_cache_dtype", "auto")
    for name in DRAFTS:
        default(name, None)
    _batch_defaults(chosen, gpu, preset)
    undrafted = dict(values) | dict.fromkeys(DRAFTS)
    problems = _draft_checks(chosen, preset, layout)
    if problems := problems + _startup_checks(values, preset, model):
        raise ServecastError(*problems)
    eager = values["enforce_eager"]
    drafts = _speculation(values, preset)
    if drafts:
        drafts["undrafted_async"] = undrafted["async_scheduling"]
        drafts["undrafted_graphs"] = _graphs(undrafted, preset, gpu)
    policy = {name: values[name] for name in (V0_POLICY if v0 else POLICY)}
    policy |= {name: preset[name] for name in (() if v0 else RULES)}
    if drafts:
        policy |= {"pads_decodes": preset["drafts"]["pads"], "draft_slots": int(_slots(values, preset) == "step")}
    if _slots(values, preset) == "run":
        policy["max_num_batched_tokens"] = _beside_slots(values)
    return {name: values[name] for name in SAME} | {
        "policy": policy,
        "gpu_memory_utilization": float(values["gpu_memory_utilization"]),
        "strict_pool_check": preset["strict_pool_check"],
        "blank_blocks_first": preset["blank_blocks_first"],
        "follows_checkpoint_kv": preset["follows_checkpoint_kv"],
        "fused_mib": preset["fused_mib"].get(gpu.architecture, {}),
        "memory_rule": "total",
        "null_block": not v0,
        "names": {},
        "pipeline": _pipeline(values, preset, model),
        "fills_queue": preset.get("fills_queue", False),
        "graphs": _graphs(values, preset, gpu),
        "speculation": drafts,
        "cuda_graph_bytes": 0 if eager else round(preset["cuda_graph_gib"] * GIB),
        "overlap": _overlap(values, preset),
    }


def _slots(values: Mapping[str, Any], preset: Mapping[str, Any]) -> str | None:
    """For whom a draft model takes a token of the budget (`max_num_new_slots_for_drafting`)."""
    return preset["drafts"]["slots"] if values["speculative_config.method"] == "draft_model" else None


def _beside_slots(values: Mapping[str, Any]) -> int:
    """The step's tokens beside which a draft model has a slot for every sequence (`_set_max_num_scheduled_tokens`)."""
    most, sequences = values["max_num_batched_tokens"], values["max_num_seqs"]
    if most <= sequences:
        raise ServecastError(
            f"engine.max_num_batched_tokens: {most:,} leaves no token to compute beside the slots of a draft model for "
            f"each of max_num_seqs {sequences:,}; raise it to {sequences + 2048:,} or so, or lower max_num_seqs"
        )
    return int(most - sequences)


def _pipeline(values: Mapping[str, Any], preset: Mapping[str, Any], model: ModelSpec) -> str:
    """How batches follow each other through pipeline stages: `catalog/engine-vllm.yaml`."""
    way = preset["pipeline"]
    if isinstance(way, str):
        return way
    return str(way["in_turn" if not values["async_scheduling"] else "moe" if model.experts else "dense"])


def _overlap(values: Mapping[str, Any], preset: Mapping[str, Any]) -> dict[str, Any] | None:
    """What `calibrate.engine.Overlap` is made of."""
    if not values["enable_dbo"]:
        return None
    thresholds = {"decode_tokens": "dbo_decode_token_threshold", "prefill_tokens": "dbo_prefill_token_threshold"}
    return {field: values[option] for field, option in thresholds.items()} | dict(preset["dbo"])


def _speculation(values: Mapping[str, Any], preset: Mapping[str, Any]) -> dict[str, Any] | None:
    """What `calibrate.engine.Speculation` is made of."""
    method, tokens, model = (
        values[f"speculative_config.{name}"] for name in ("method", "num_speculative_tokens", "model")
    )
    if method is None:
        return None
    return {
        "method": "mtp" if method == "deepseek_mtp" else method,
        "tokens": tokens,
        "model": model,
        "at_admission": preset["drafts"]["at_admission"],
    }


def _draft_checks(chosen: Chosen, preset: Mapping[str, Any], layout: Parallelism) -> list[str]:
    """What is missing of the speculative config, or wrong with it, and whether drafting leaves the engine asynchronous:
    the lookup of n-grams runs on the CPU, which knows the last tokens only when a step is over."""
    values, key = chosen.values, "engine.speculative_config"
    method, tokens, model = (
        values[f"speculative_config.{name}"] for name in ("method", "num_speculative_tokens", "model")
    )
    if method is None:
        given = [name for name in DRAFTS if values[name] is not None]
        return [f"{key}.method: missing, beside {n}; one of ngram, eagle, eagle3, mtp, draft_model" for n in given[:1]]
    problems = []
    if tokens is None:
        problems.append(f"{key}.num_speculative_tokens: missing; how many tokens are drafted in a step, for example 3")
    if method == "draft_model" and model is None:
        problems.append(f"{key}.model: missing; which model drafts, for example llama-3.2-1b")
    if model is not None and method in ("ngram", "mtp", "deepseek_mtp"):
        problems.append(f"{key}.model: {model!r} given, and {method} drafts without a model of its own; take it out")
    if (apart := values["speculative_config.draft_tensor_parallel_size"]) not in (None, layout.tp):
        problems.append(
            f"{key}.draft_tensor_parallel_size: {apart}, where the model has cluster.tp {layout.tp}: drafts of other "
            "GPUs than all of the model's are not modelled; take it out"
        )
    least, most = (values[f"speculative_config.prompt_lookup_{name}"] for name in ("min", "max"))
    if least and most and least > most:
        problems.append(f"{key}.prompt_lookup_min: {least} is above prompt_lookup_max {most}; lower it")
    if tokens is not None and preset["drafts"]["pads"]:
        problems += _padding_checks(values, tokens, 1 + tokens + (_slots(values, preset) == "step"))
    if method == "ngram":
        if values["async_scheduling"] and chosen.sources["async_scheduling"] == "user":
            problems.append("engine.async_scheduling: true, which vLLM refuses with ngram; take it out")
        elif values["async_scheduling"]:
            values["async_scheduling"] = False
            chosen.sources["async_scheduling"] = "off with ngram, as in vLLM"
    return problems


def _padding_checks(values: Mapping[str, Any], tokens: int, least: int) -> list[str]:
    """Where vLLM that pads does not go on once all of a prompt but a token is found: it waits for ever, or stops at an
    assertion (`pad_spec_decode` in v1/core/sched/scheduler.py)."""
    most, threshold = values["max_num_batched_tokens"], values["long_prefill_token_threshold"]
    problems, key = [], "engine.speculative_config.num_speculative_tokens"
    if most < least:
        problems.append(
            f"{key}: {tokens} make a step of one sequence {least} tokens, above max_num_batched_tokens {most}, and "
            f"vLLM would wait for ever; raise max_num_batched_tokens to {least} or more"
        )
    if 0 < threshold <= tokens:
        problems.append(
            f"{key}: {tokens} do not fit into long_prefill_token_threshold {threshold}, where vLLM stops at an "
            f"assertion; raise the threshold to {tokens + 1} or more, or take it out"
        )
    return problems


def _graphs(values: Mapping[str, Any], preset: Mapping[str, Any], gpu: Gpu) -> dict[str, Any]:
    """The batches of tokens for which vLLM captures CUDA graphs: none with `enforce_eager`, nor, for steps with
    prompts, with `cudagraph_mode` FULL_DECODE_ONLY.

    1, 2, 4, multiples of 8 below 256 and of the stride from there, up to `max_cudagraph_capture_size`, which is twice
    `max_num_seqs` or the limit unless it is given; from 0.24 `max_num_batched_tokens` too, where it is no larger
    (`_set_cudagraph_sizes` in vllm/config of each version). With drafts the steps of decodes alone are of whole
    sequences, each with its drafts, and the sizes are rounded up to such (`adjust_cudagraph_sizes_for_spec_decode`).
    """
    rule, queries = preset["graph"], 1 + (values["speculative_config.num_speculative_tokens"] or 0)
    rounds = queries > 1 and preset["drafts"]["rounds_graphs"]
    mode = values["cudagraph_mode"]
    if values["enforce_eager"] or mode == "NONE":
        return {"decode": (), "mixed": ()}
    limit = rule.get(gpu.architecture, rule["limit"])
    asked = values["max_cudagraph_capture_size"] or min(2 * values["max_num_seqs"] * (queries if rounds else 1), limit)
    most = min(asked, values["max_num_batched_tokens"])
    budget = [most] if rule.get("budget") and most == values["max_num_batched_tokens"] else []
    every = {1, 2, 4, *range(8, 256, 8), *range(256, most + 1, rule["stride"]), *budget}
    if rounds:
        every = {-(-n // queries) * queries for n in every if n <= most} | {queries}
    sizes = tuple(sorted(n for n in every if n <= most))
    if not sizes:
        raise ServecastError(
            f"engine.max_cudagraph_capture_size {most} is below the {queries} tokens of one sequence with its drafts: "
            f"raise it to {queries}, or "
            + (f"lower {DRAFTS[1]} to {most - 1}" if most > 1 else "take speculative_config out")
        )
    return {"decode": sizes, "mixed": () if "DECODE_ONLY" in mode else sizes, "compiled": True}


def _batch_defaults(chosen: Chosen, gpu: Gpu, preset: Mapping[str, Any]) -> None:
    """vLLM's defaults for max_num_batched_tokens and max_num_seqs, with the caps it puts on its own defaults only."""
    values = chosen.values
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
    chosen.default("max_num_batched_tokens", tokens, why)
    chosen.default("max_num_seqs", min(seqs, values["max_num_batched_tokens"]), why)


def _startup_checks(values: Mapping[str, Any], preset: Mapping[str, Any], model: ModelSpec) -> list[str]:
    """vLLM's checks of one option against another, each with what to change."""
    tokens, seqs, length = values["max_num_batched_tokens"], values["max_num_seqs"], values["max_model_len"]
    threshold = values["long_prefill_token_threshold"]
    problems = []
    if values["preemption_mode"] == "swap" and values["enable_chunked_prefill"]:
        problems.append(
            "engine.preemption_mode: swap is not modelled with chunked prefill, where who comes back goes before all "
            f"others; set enable_chunked_prefill to false (it is on by default above {LONG} tokens of max_model_len)"
        )
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
