"""What the options of engines with few of them mean. Sources: `catalog/engine-<family>.yaml`.

All are synchronous, find no prefixes again, and have neither a null block nor fused all-reduces.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from calibrate.hardware import Gpu
from calibrate.layout import Parallelism
from calibrate.model import ModelSpec
from calibrate.options import Chosen
from servecast.errors import ServecastError

WIGGLE_ROOM = 0.93
"""The share of the GPU's memory that TGI counts on (TGI_WIGGLE_ROOM): assumed."""
LEAST_PREFILL, ANY_PREFILL = 100, 4096
"""What TGI's launcher takes for a mistake, and what it takes instead or where it does not know the GPU, in tokens."""
ALL = 1.0


def tgi(chosen: Chosen, layout: Parallelism, gpu: Gpu, model: ModelSpec, preset: Mapping[str, Any]) -> dict[str, Any]:
    """TGI. See `calibrate.families`."""
    v = chosen.values
    _longest(chosen, model, "max_total_tokens")
    for name in ("max_batch_total_tokens", "max_batch_size"):
        chosen.default(name, None)
    fast = int(layout.tp * preset["card_flops"].get(gpu.id, 0) // _tgi_flops(model))
    fast = fast if fast > LEAST_PREFILL else ANY_PREFILL
    chosen.default("max_batch_prefill_tokens", min(fast, model.max_position), f" for {layout.tp} x {gpu.id}")
    seqs = min(v["max_batch_size"] or v["max_concurrent_requests"], v["max_concurrent_requests"])
    return _engine(
        chosen,
        {
            "max_num_seqs": "max_concurrent_requests",
            "max_num_batched_tokens": "max_batch_prefill_tokens",
            "max_model_len": "max_total_tokens",
            "gpu_memory_utilization": "cuda_memory_fraction",
            "num_gpu_blocks_override": "max_batch_total_tokens",
        },
        max_num_seqs=seqs,
        max_num_batched_tokens=max(v["max_batch_prefill_tokens"], seqs),
        gpu_memory_utilization=WIGGLE_ROOM * v["cuda_memory_fraction"],
        block_size=1,
        policy={name: v[name] for name in ("max_batch_prefill_tokens", "waiting_served_ratio", "max_waiting_tokens")}
        | {"max_batch_size": seqs},
        graphs={"decode": (1, 2, 4, 8, 16, 32), "mixed": ()},
    )


def _tgi_flops(model: ModelSpec) -> int:
    """FLOP of a token as TGI's launcher counts them (`Config::flop`): attention as one more projection."""
    attention = 2 * model.hidden * model.head_dim * (3 * model.heads + 2 * model.kv_heads)
    inner = model.experts.topk * model.experts.inter if model.experts else model.intermediate
    return model.layers * (attention + 6 * model.hidden * inner)


def llama_cpp(
    chosen: Chosen, layout: Parallelism, gpu: Gpu, model: ModelSpec, preset: Mapping[str, Any]
) -> dict[str, Any]:
    """llama.cpp's server. See `calibrate.families`."""
    v = chosen.values
    chosen.default("ctx_size", model.max_position, " (the model's longest sequence)")
    slots, batch, part = v["parallel"], v["batch_size"], v["ubatch_size"]
    problems = []
    if min(batch, part) < slots:
        problems.append(
            f"engine.parallel {slots} is above batch_size {batch} or ubatch_size {part}: steps that leave generating "
            "slots out are not modelled; lower it, or raise them"
        )
    if v["ctx_size"] < 2 * slots:
        problems.append(f"engine.ctx_size {v['ctx_size']} leaves no room for a prompt and a token in {slots} slots")
    if problems:
        raise ServecastError(*problems)
    length = v["ctx_size"] // slots
    return _engine(
        chosen,
        {"max_num_seqs": "parallel", "max_num_batched_tokens": "batch_size", "max_model_len": "ctx_size / parallel",
         "num_gpu_blocks_override": "ctx_size"},
        max_num_seqs=slots,
        max_num_batched_tokens=batch,
        max_model_len=length,
        gpu_memory_utilization=ALL,
        num_gpu_blocks_override=slots * length,
        block_size=1,
        policy={"n_parallel": slots, "n_batch": batch, "cont_batching": v["cont_batching"]},
        graphs={"decode": tuple(range(1, slots + 1)), "mixed": ()},
        ubatch_tokens=part,
    )  # fmt: skip


def mlc_llm(
    chosen: Chosen, layout: Parallelism, gpu: Gpu, model: ModelSpec, preset: Mapping[str, Any]
) -> dict[str, Any]:
    """MLC-LLM. See `calibrate.families`."""
    v = chosen.values
    _longest(chosen, model, "max_single_sequence_length")
    chosen.default("max_total_sequence_length", None)
    total, page, seqs = v["max_total_sequence_length"], v["kv_cache_page_size"], v["max_num_sequence"]
    return _engine(
        chosen,
        {
            "max_num_seqs": "max_num_sequence",
            "max_num_batched_tokens": "prefill_chunk_size",
            "max_model_len": "max_single_sequence_length",
            "block_size": "kv_cache_page_size",
            "num_gpu_blocks_override": "max_total_sequence_length",
        },
        max_num_seqs=seqs,
        max_num_batched_tokens=max(v["prefill_chunk_size"], seqs),
        gpu_memory_utilization=v["gpu_memory_utilization"],
        num_gpu_blocks_override=total and max(1, total // page),
        block_size=page,
        policy={name: v[name] for name in ("max_num_sequence", "prefill_chunk_size", "prefill_mode")},
        graphs={"decode": tuple(range(1, seqs + 1)), "mixed": ()},
    )


def transformers(
    chosen: Chosen, layout: Parallelism, gpu: Gpu, model: ModelSpec, preset: Mapping[str, Any]
) -> dict[str, Any]:
    """Plain Transformers. See `calibrate.families`."""
    v = chosen.values
    _longest(chosen, model, "max_length", v["batch_size"])
    return _engine(
        chosen,
        {"max_num_seqs": "batch_size", "max_model_len": "max_length"},
        max_num_seqs=v["batch_size"],
        max_num_batched_tokens=v["batch_size"] * v["max_length"],
        gpu_memory_utilization=ALL,
        block_size=1,
        policy={"max_batch_size": v["batch_size"]},
        enforce_eager=not v["torch_compile"],
        graphs={"decode": tuple(range(1, v["batch_size"] + 1)) if v["torch_compile"] else (), "mixed": ()},
    )


def sarathi(
    chosen: Chosen, layout: Parallelism, gpu: Gpu, model: ModelSpec, preset: Mapping[str, Any]
) -> dict[str, Any]:
    """Sarathi-Serve. See `calibrate.families`."""
    v = chosen.values
    _longest(chosen, model, "max_model_len")
    return _engine(
        chosen,
        {"max_num_batched_tokens": "chunk_size"},
        max_num_seqs=v["max_num_seqs"],
        max_num_batched_tokens=max(v["chunk_size"], v["max_num_seqs"]),
        gpu_memory_utilization=v["gpu_memory_utilization"],
        policy={name: v[name] for name in ("chunk_size", "max_num_seqs")},
    )


def orca(chosen: Chosen, layout: Parallelism, gpu: Gpu, model: ModelSpec, preset: Mapping[str, Any]) -> dict[str, Any]:
    """Orca. See `calibrate.families`."""
    v = chosen.values
    _longest(chosen, model, "max_model_len", v["max_batch_size"])
    return _engine(
        chosen,
        {"max_num_seqs": "max_batch_size"},
        max_num_seqs=v["max_batch_size"],
        max_num_batched_tokens=v["max_batch_size"] * v["max_model_len"],
        gpu_memory_utilization=v["gpu_memory_utilization"],
        policy={"max_batch_size": v["max_batch_size"]},
    )


def _engine(chosen: Chosen, names: Mapping[str, str], **fields: Any) -> dict[str, Any]:
    """The fields of `EngineSpec`: those given, those that an option says (`names`), and what all have in common."""
    said = {field: chosen.values[option] for field, option in names.items() if option in chosen.values}
    return {
        "block_size": 16,
        "num_gpu_blocks_override": None,
        "memory_rule": "total",
        "null_block": False,
        "names": names,
        "enable_prefix_caching": False,
        "blank_blocks_first": False,
        "async_scheduling": False,
        "enforce_eager": False,
        "graphs": {"decode": (), "mixed": ()} if fields.get("enforce_eager") else {"decode": GRAPHS, "mixed": ()},
        "fuse_allreduce_rms": False,
        "fi_allreduce_fusion_max_size_mb": None,
        "fused_mib": {},
        "dtype": chosen.values["dtype"],
        "kv_cache_dtype": "auto",
        "quantization": None,
        "follows_checkpoint_kv": False,
        "strict_pool_check": False,
        "cuda_graph_bytes": 0,
        "max_model_len": chosen.values.get("max_model_len"),
    } | said | fields  # fmt: skip


GRAPHS = (1, 2, 4, *range(8, 257, 8))
"""Batches of decodes that vLLM captured before its V1 engine."""
MOST = 2**18
"""Tokens of a step that are priced, where an engine has no limit: all its prompts at once."""


def _longest(chosen: Chosen, model: ModelSpec, option: str, sequences: int = 1) -> None:
    """The longest sequence: the model's, or a shorter one, where that many prompts of it may come at once."""
    most = min(model.max_position, MOST // sequences)
    shorter = most < model.max_position
    why = (
        f" ({sequences} prompts of it are {MOST:,} tokens in one step)"
        if shorter
        else " (the model's longest sequence)"
    )
    chosen.default(option, most, why)
    length = chosen.values[option]
    if length > model.max_position:
        limit = f"the {model.max_position} tokens that {model.name} allows"
    elif length * sequences > MOST:
        limit = f"{most}: {sequences} prompts of it at once would be more than the {MOST:,} tokens that are priced"
    else:
        return
    raise ServecastError(f"engine.{option} {length} is above {limit}")
