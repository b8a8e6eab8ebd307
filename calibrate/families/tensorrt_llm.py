"""What TensorRT-LLM's options mean (PyTorch backend). Sources: `catalog/engine-tensorrt-llm.yaml`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from calibrate.hardware import Gpu
from calibrate.layout import Parallelism
from calibrate.model import ModelSpec
from calibrate.options import Chosen
from servecast.errors import ServecastError

NAMES = {
    "max_num_seqs": "max_batch_size",
    "max_num_batched_tokens": "max_num_tokens",
    "max_model_len": "max_seq_len",
    "block_size": "kv_cache_config.tokens_per_block",
    "gpu_memory_utilization": "kv_cache_config.free_gpu_memory_fraction",
    "num_gpu_blocks_override": "kv_cache_config.max_tokens",
    "enable_prefix_caching": "kv_cache_config.enable_block_reuse",
    "kv_cache_dtype": "kv_cache_config.dtype",
    "dtype": "dtype",
}
"""Fields of `EngineSpec` -> options that say the same."""
POLICY = ("max_batch_size", "max_num_tokens", "enable_chunked_prefill", "batch_wait_timeout_iters",
          "batch_wait_max_tokens_ratio")  # fmt: skip


def resolve(
    chosen: Chosen, layout: Parallelism, gpu: Gpu, model: ModelSpec, preset: Mapping[str, Any]
) -> dict[str, Any]:
    """See `calibrate.families`."""
    values = chosen.values
    chosen.default("max_seq_len", model.max_position, " (the model's longest sequence)")
    chosen.default("kv_cache_config.max_tokens", None)
    policy = values["scheduler_config.capacity_scheduler_policy"]
    if problems := _problems(values, policy, model):
        raise ServecastError(*problems)
    block, most = values["kv_cache_config.tokens_per_block"], values["kv_cache_config.max_tokens"]
    return {field: values[option] for field, option in NAMES.items()} | {
        "policy": {name: values[name] for name in POLICY} | {"capacity_scheduler_policy": policy},
        "gpu_memory_utilization": float(values["kv_cache_config.free_gpu_memory_fraction"]),
        "memory_rule": "free",
        "null_block": False,
        "names": NAMES,
        "num_gpu_blocks_override": None if most is None else max(1, most // block),
        "strict_pool_check": False,
        "blank_blocks_first": False,
        "async_scheduling": not values["disable_overlap_scheduler"],
        "enforce_eager": False,
        "fuse_allreduce_rms": gpu.architecture in preset["fused_mib"],
        "fi_allreduce_fusion_max_size_mb": None,
        "fused_mib": preset["fused_mib"].get(gpu.architecture, {}),
        "quantization": None,
        "follows_checkpoint_kv": True,
        "graphs": _graphs(values["cuda_graph_config.max_batch_size"], values["cuda_graph_config.enable_padding"]),
        "cuda_graph_bytes": 0,
    }


def _graphs(most: int, padded: bool) -> dict[str, Any]:
    """The batches of decodes that are captured (`CudaGraphConfig._generate_cuda_graph_batch_sizes`); steps with prompts
    run without."""
    sizes = [1, 2, 4, *range(8, 129, 8)] if padded else [*range(1, 32), 32, 64, 128]
    sizes += [2**i for i in range(8, (most - 1).bit_length())]
    return {"decode": tuple(sorted({*(n for n in sizes if n < most), most})), "mixed": (), "padded": padded}


def _problems(values: Mapping[str, Any], policy: str, model: ModelSpec) -> list[str]:
    tokens, size, length = values["max_num_tokens"], values["max_batch_size"], values["max_seq_len"]
    block, chunked = values["kv_cache_config.tokens_per_block"], values["enable_chunked_prefill"]
    problems = []
    if tokens < size + block * chunked:
        least = size + block * chunked
        problems.append(
            f"engine.max_num_tokens {tokens} is below {least}, max_batch_size{' and a block' * chunked}: steps that "
            f"leave generating requests out are not modelled; raise it, or lower max_batch_size"
        )
    if policy == "MAX_UTILIZATION" and not chunked and tokens < length:
        problems.append(
            f"engine.max_num_tokens {tokens} is below max_seq_len {length}: a paused request of more tokens could "
            "never be resumed with MAX_UTILIZATION: set enable_chunked_prefill, raise it, or lower max_seq_len"
        )
    if length > model.max_position:
        problems.append(
            f"engine.max_seq_len {length} is above the {model.max_position} tokens that {model.name} allows"
        )
    return problems
