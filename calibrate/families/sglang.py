"""What SGLang's options mean, and its defaults by GPU memory. Sources: `catalog/engine-sglang.yaml`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from calibrate.hardware import Gpu
from calibrate.layout import Parallelism
from calibrate.model import ModelSpec
from calibrate.options import Chosen
from servecast.errors import ServecastError

MIB = 2**20
NAMES = {
    "max_num_seqs": "max_running_requests",
    "max_model_len": "context_length",
    "block_size": "page_size",
    "gpu_memory_utilization": "mem_fraction_static",
    "num_gpu_blocks_override": "max_total_tokens",
    "enforce_eager": "disable_cuda_graph",
    "dtype": "dtype",
    "kv_cache_dtype": "kv_cache_dtype",
    "quantization": "quantization",
}
"""Fields of `EngineSpec` -> options that say the same."""
POLICY = ("max_running_requests", "chunked_prefill_size", "max_prefill_tokens", "schedule_policy",
          "schedule_conservativeness", "enable_mixed_chunk", "disable_overlap_schedule",
          "num_reserved_decode_tokens", "scheduler_recv_interval")  # fmt: skip


def resolve(
    chosen: Chosen, layout: Parallelism, gpu: Gpu, model: ModelSpec, preset: Mapping[str, Any]
) -> dict[str, Any]:
    """See `calibrate.families`."""
    values = chosen.values
    chosen.default("context_length", model.max_position, " (the model's longest sequence)")
    chosen.default("max_total_tokens", None)
    chosen.default("quantization", None)
    chosen.default("page_size", preset["page_size"].get(gpu.architecture, 1), f" for {gpu.architecture}")
    _memory_defaults(chosen, layout, gpu, preset)
    problems = _problems(values, model)
    if layout.dp > 1 and values["scheduler_recv_interval"] > 1:
        problems.append(
            f"engine.scheduler_recv_interval: {values['scheduler_recv_interval']}, and dp {layout.dp}: SGLang does not "
            "start with both (enable_dp_attention); leave the interval at 1"
        )
    if problems:
        raise ServecastError(*problems)
    chunk, running, most = values["chunked_prefill_size"], values["max_running_requests"], values["max_total_tokens"]
    longest = chunk if chunk > 0 else max(values["max_prefill_tokens"], values["context_length"])
    policy = {name: values[name] for name in POLICY}
    if values["disable_radix_cache"]:
        policy["schedule_policy"] = "fcfs"  # as SGLang does: there are no prefixes to go by
    return {field: values[option] for field, option in NAMES.items()} | {
        "policy": policy,
        "max_num_batched_tokens": max(longest, running),
        "gpu_memory_utilization": float(values["mem_fraction_static"]),
        "memory_rule": "static",
        "null_block": False,
        "names": NAMES,
        "num_gpu_blocks_override": None if most is None else max(1, most // values["page_size"]),
        "strict_pool_check": False,
        "enable_prefix_caching": not values["disable_radix_cache"],
        "blank_blocks_first": False,
        "async_scheduling": not values["disable_overlap_schedule"],
        "fuse_allreduce_rms": False,
        "fi_allreduce_fusion_max_size_mb": None,
        "fused_mib": {},
        "follows_checkpoint_kv": True,
        "graphs": _graphs(values),
        "cuda_graph_bytes": 0,
    }


def _memory_defaults(chosen: Chosen, layout: Parallelism, gpu: Gpu, preset: Mapping[str, Any]) -> None:
    """`_handle_gpu_memory_settings` of server_args.py."""
    memory, values = gpu.visible_bytes / MIB, chosen.values
    rule = next(rule for rule in preset["memory_defaults"] if memory < rule["below_mib"])
    why = f" for {memory / 1024:.0f} GiB"
    chosen.default("chunked_prefill_size", rule["chunked_prefill_size"], why)
    chosen.default("cuda_graph_max_bs", rule["cuda_graph_max_bs"][layout.tp >= 4], f"{why} at tp {layout.tp}")
    chunk = values["chunked_prefill_size"]
    tokens = chunk if chunk > 0 else values["max_prefill_tokens"]
    reserved = 512 + 1.5 * max(tokens, 2048) + 2 * values["cuda_graph_max_bs"] + layout.tp * 1024 / 8
    if memory > 60 * 1024:
        reserved = max(reserved, 10 * 1024)
    chosen.default("mem_fraction_static", round((memory - reserved) / memory, 3), f"{why} at tp {layout.tp}")


def _graphs(values: Mapping[str, Any]) -> dict[str, Any]:
    """The batches of decodes that are captured (`_generate_cuda_graph_batch_sizes`); prompts run without."""
    if values["disable_cuda_graph"]:
        return {"decode": (), "mixed": ()}
    most = values["cuda_graph_max_bs"]
    sizes = [1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), *range(512, most + 1, 32)]
    return {"decode": tuple(n for n in sizes if n <= most), "mixed": ()}


def _problems(values: Mapping[str, Any], model: ModelSpec) -> list[str]:
    chunk, page, length = values["chunked_prefill_size"], values["page_size"], values["context_length"]
    problems = []
    if chunk > 0 and chunk % page:
        problems.append(f"engine.chunked_prefill_size {chunk} is not a multiple of page_size {page}")
    if values["enable_mixed_chunk"] and 0 < chunk <= values["max_running_requests"]:
        problems.append(
            f"engine.chunked_prefill_size {chunk} is not above max_running_requests {values['max_running_requests']}: "
            "with enable_mixed_chunk decodes could leave no token of it for a prompt; raise it, or lower the other"
        )
    if not 0 < values["mem_fraction_static"] <= 1:
        problems.append("engine.mem_fraction_static: this GPU is too small for its default; set it")
    if length > model.max_position:
        problems.append(
            f"engine.context_length {length} is above the {model.max_position} tokens that {model.name} allows"
        )
    return problems
