"""Does it fit, and how many KV tokens are left? The arithmetic of the engine's start-up, one GPU of the replica at a
time.

Everything is per rank; all ranks are alike under tensor parallelism. Overheads are formulas checked against a few
published start-up logs, not measurements of this model on this GPU: a logged block count (`num_gpu_blocks_override`)
replaces them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from calibrate.engine import EngineSpec
from calibrate.hardware import GIB, Gpu
from calibrate.layout import Parallelism, check_layout
from calibrate.model import ModelSpec
from calibrate.serving import check_simulated, served
from servecast.errors import ServecastError

MIB = 2**20
# CUDA context growth, cuBLAS workspaces. Assumed: what start-up logs of a 7B and a 0.6B model leave unexplained
# (0.1 to 0.35 GiB; vllm-project/vllm#10517 logs 0.35 on V0).
NON_TORCH_BYTES = 200 * MIB
# NCCL's and the custom all-reduce's buffers by number of GPUs: aiconfigurator-core 0.12.0 system specs (Apache-2.0).
COMMUNICATION_BYTES = {1: 0, 2: 342 * MIB, 4: 392 * MIB, 8: 392 * MIB}
# fp32 logits and one fp32 copy while the profiling run samples max_num_seqs sequences. Assumed.
LOGIT_COPIES = 2


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of one GPU, and the KV pool that is left. `num_gpu_blocks` counts as the engine logs it.

    `kv_tokens` is what requests can use: all but vLLM's null block. `max_concurrency` is the number of sequences of
    `max_model_len` tokens that the pool holds, as the engine logs it. `overridden` says that
    `num_gpu_blocks_override`, not the arithmetic, set the pool; `kv_bytes` is then that pool's size.
    """

    visible_bytes: int
    budget_bytes: int
    weight_bytes: int
    activation_bytes: int
    cuda_graph_bytes: int
    communication_bytes: int
    non_torch_bytes: int
    kv_bytes: int
    kv_bytes_per_token: int
    block_size: int
    num_gpu_blocks: int
    max_concurrency: float
    overridden: bool
    null_blocks: int = 1

    @property
    def usable_blocks(self) -> int:
        """Blocks that requests can hold."""
        return self.num_gpu_blocks - self.null_blocks

    @property
    def kv_tokens(self) -> int:
        """Tokens that requests can hold in KV."""
        return self.usable_blocks * self.block_size

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV block on this rank."""
        return self.kv_bytes_per_token * self.block_size


def plan_memory(model: ModelSpec, layout: Parallelism, gpu: Gpu, engine: EngineSpec) -> MemoryPlan:
    """The memory of one GPU of the replica. Raises `ServecastError`, with the flag to change, where vLLM would refuse
    to start or run out of memory, and for a model whose KV cache or kernels are not known."""
    model = served(model, engine)
    check_simulated(model)
    weights = model.weight_bytes(layout.tp)
    overhead = _overhead_bytes(model, layout, engine)
    budget = _budget_bytes(gpu, engine, weights + overhead)
    per_token = model.kv_bytes_per_token(layout.tp)
    block_bytes = per_token * engine.block_size
    length_blocks = -(-engine.max_model_len // engine.block_size)
    least_blocks = length_blocks + engine.strict_pool_check
    available = budget - weights - (0 if engine.memory_rule == "static" else overhead)
    override = engine.num_gpu_blocks_override
    blocks = max(0, available // block_bytes) if override is None else override
    problem = ""
    if override is not None and weights + overhead + override * block_bytes > gpu.visible_bytes:
        problem = (
            f"{engine.name_of('num_gpu_blocks_override')} {override} needs {_gib(override * block_bytes)} of KV cache"
        )
    elif override is None and available <= 0:
        problem = "nothing is left for KV cache"
    elif override is None and engine.memory_rule == "total" and available < least_blocks * block_bytes:
        problem = (
            f"one sequence of max_model_len {engine.max_model_len} needs {_gib(least_blocks * block_bytes)} of KV "
            f"cache and {_gib(available)} is left"
        )
    elif override is not None and engine.strict_pool_check and override < least_blocks:
        raise ServecastError(
            f"engine.num_gpu_blocks_override {override} is below the {least_blocks} blocks that one sequence of "
            f"max_model_len {engine.max_model_len} needs (with the null block): {engine.preset} refuses to start; "
            f"raise it, or lower max_model_len to {(override - 1) * engine.block_size}"
        )
    if problem:
        share, of = engine.name_of("gpu_memory_utilization"), " of what is free" * (engine.memory_rule == "free")
        raise ServecastError(
            f"{model.name} does not fit {layout.tp} x {gpu.id}: per GPU {_gib(gpu.visible_bytes)} x "
            f"{share} {engine.gpu_memory_utilization:g}{of} = {_gib(budget)}, weights {_gib(weights)}, "
            f"overhead {_gib(overhead)}: {problem}. {_fixes(model, layout, gpu, engine, blocks)}"
        )
    return MemoryPlan(
        visible_bytes=gpu.visible_bytes,
        budget_bytes=budget,
        weight_bytes=weights,
        activation_bytes=activation_bytes(model, layout, engine),
        cuda_graph_bytes=engine.cuda_graph_bytes,
        communication_bytes=_communication_bytes(layout),
        non_torch_bytes=NON_TORCH_BYTES,
        kv_bytes=available if override is None else override * block_bytes,
        kv_bytes_per_token=per_token,
        block_size=engine.block_size,
        num_gpu_blocks=blocks,
        max_concurrency=blocks / length_blocks,
        overridden=override is not None,
        null_blocks=int(engine.null_block),
    )


def activation_bytes(model: ModelSpec, layout: Parallelism, engine: EngineSpec) -> int:
    """Peak of the engine's profiling run: the MLP (or experts) of `max_num_batched_tokens` tokens, or latent
    attention's keys and values of its longest context; then the logits it samples.

    A token holds gate, up and their product (sharded) and three hidden-sized buffers: 3 (intermediate / tp + hidden)
    elements. Checked: vllm-project/vllm#10517 logs 2.07 GiB at 20,000 and 2.99 GiB at 29,000 tokens for Llama-3.1-8B,
    111 kB a token; this gives 110.6 kB. Experts use two workspaces, as wide as their widest tensors, `topk` times a
    token (`workspace_shapes` of vLLM's fused experts). Known to be too little: with 1,024 sequences, start-up logs of
    three models with experts (vllm-project/vllm#21348, #23278 and the Kimi-K2-Thinking recipe) leave 4 to 6 GiB less.
    """
    tp, experts = layout.tp, model.experts
    widest = model.intermediate // tp if model.dense_layers else 0
    elements = 3 * (widest + model.hidden)
    if experts:
        inner = experts.inter // tp
        workspaces = experts.topk * (max(inner, model.hidden) + max(2 * inner, model.hidden))
        elements = max(elements, workspaces + 3 * (model.hidden + experts.shared_inter // tp))
    logits = LOGIT_COPIES * 4 * engine.max_num_seqs * model.padded_vocab
    peak = elements * engine.max_num_batched_tokens
    if latent := model.latent:
        peak = max(peak, _context_tokens(engine) * model.heads_per_rank(tp) * (latent.nope + latent.value))
    return peak * model.dtype_bytes + logits


def _context_tokens(engine: EngineSpec) -> int:
    """Cached tokens whose keys and values latent attention makes at a time
    (`determine_chunked_prefill_workspace_size` of vLLM)."""
    pages = engine.max_num_seqs * engine.block_size
    return max(min(max(8 * engine.max_model_len, 4 * pages), 64 * 1024), pages)


def _communication_bytes(layout: Parallelism) -> int:
    return next((size for gpus, size in COMMUNICATION_BYTES.items() if gpus >= layout.tp), COMMUNICATION_BYTES[8])


def _fixes(model: ModelSpec, layout: Parallelism, gpu: Gpu, engine: EngineSpec, blocks: int) -> str:
    """Which flag to change, with the value that would do."""
    if engine.num_gpu_blocks_override is not None:
        room = (gpu.visible_bytes - model.weight_bytes(layout.tp) - _overhead_bytes(model, layout, engine)) // (
            model.kv_bytes_per_token(layout.tp) * engine.block_size
        )
        return f"Lower it to at most {room} blocks (they are per engine, never times tp)" if room > 1 else "Raise tp"
    fixes = []
    if (usable := blocks - engine.strict_pool_check) > 0:
        fixes.append(f"lower {engine.name_of('max_model_len')} to at most {usable * engine.block_size}")
    # not above 0.97: what the driver and other processes hold is outside the engine's share
    if (share := math.ceil(100 * _needed_bytes(model, layout, engine) / gpu.visible_bytes) / 100) <= 0.97:
        fixes.append(f"raise {engine.name_of('gpu_memory_utilization')} to {share:g}")
    larger = next(
        (tp for tp in range(layout.tp + 1, gpu.gpus_per_node + 1) if _holds(model, Parallelism(tp), gpu, engine)), 0
    )
    fixes.append(f"raise tp to {larger}" if larger else "use a GPU with more memory")
    return "To fit: " + ", or ".join(fixes)


def _holds(model: ModelSpec, layout: Parallelism, gpu: Gpu, engine: EngineSpec) -> bool:
    budget = gpu.visible_bytes * engine.gpu_memory_utilization
    return not check_layout(model, layout, gpu) and _needed_bytes(model, layout, engine) <= budget


def _needed_bytes(model: ModelSpec, layout: Parallelism, engine: EngineSpec) -> int:
    """Weights, overhead and the KV cache that one sequence of `max_model_len` must find at start-up."""
    blocks = -(-engine.max_model_len // engine.block_size) + engine.strict_pool_check
    kv_bytes = blocks * engine.block_size * model.kv_bytes_per_token(layout.tp)
    return model.weight_bytes(layout.tp) + _overhead_bytes(model, layout, engine) + kv_bytes


def _budget_bytes(gpu: Gpu, engine: EngineSpec, fixed: int) -> int:
    """What the engine's rule gives to weights, overhead and KV cache together (to weights and KV cache, where it keeps
    the overhead apart: `static`); `fixed` bytes are weights and overhead."""
    share = engine.gpu_memory_utilization
    if engine.memory_rule == "free":
        return fixed + int((gpu.visible_bytes - fixed) * share)
    return int(gpu.visible_bytes * share)


def _overhead_bytes(model: ModelSpec, layout: Parallelism, engine: EngineSpec) -> int:
    return (
        activation_bytes(model, layout, engine)
        + engine.cuda_graph_bytes
        + _communication_bytes(layout)
        + NON_TORCH_BYTES
    )


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"
