"""Does it fit, and how many KV tokens are left? The arithmetic of the engine's start-up, on the GPU with least left.

Of a pipeline every stage is looked at; otherwise all GPUs of a replica are alike. Overheads are formulas checked
against published start-up logs (docs/memory.md), not measurements of this model on this GPU: what an engine logged
replaces any of them (`Logged`), and `num_gpu_blocks_override` the pool.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from calibrate.activations import Peaks, profile_peaks
from calibrate.engine import EngineSpec
from calibrate.hardware import GIB, Gpu
from calibrate.kvgroups import KVPool, kv_pool
from calibrate.layout import Parallelism
from calibrate.model import ModelSpec
from calibrate.serving import served
from calibrate.speculation import draft_of
from calibrate.weights import rank_weights

MIB = 2**20
# CUDA context growth, cuBLAS workspaces: what seven start-up logs leave unexplained on one GPU, 0.11 to 0.26 GiB.
NON_TORCH_BYTES = 200 * MIB
# NCCL's and the custom all-reduce's buffers. Over NVLink 1.5 to 2 GiB whatever the number of GPUs: vLLM's non-torch
# memory grew by 1.79 GiB from one H100 to two (vllm-project/vllm#10511); four H100 and eight H200 leave about as much
# unexplained (vllm-project/vllm#21348, the recipe of Kimi-K2-Thinking). Over PCIe 0.08 GiB (two A6000, vLLM 0.11.1).
LINK_BYTES, PCIE_BYTES = 1800 * MIB, 80 * MIB


@dataclass(frozen=True, slots=True)
class Logged:
    """Bytes of one GPU that an engine logged, in place of ours; None: ours."""

    weights: int | None = None
    activations: int | None = None
    cuda_graphs: int | None = None
    communication: int | None = None
    other: int | None = None


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of one GPU, and the KV pool that is left. `num_gpu_blocks` counts as the engine logs it.

    `weights` says what the weights are, `weight_bytes` and `activation_bytes` what counts, ours or logged.
    `overridden`: `num_gpu_blocks_override`, not the arithmetic, set the pool; `kv_bytes` is then that pool's size.
    `refusal` says why the engine would not start, empty where it would.
    """

    visible_bytes: int
    budget_bytes: int
    weights: Mapping[str, int]
    peaks: Peaks
    weight_bytes: int
    activation_bytes: int
    cuda_graph_bytes: int
    communication_bytes: int
    non_torch_bytes: int
    kv_bytes: int
    pool: KVPool
    num_gpu_blocks: int
    max_model_len: int
    least_blocks: int
    overridden: bool
    null_blocks: int
    refusal: str

    @property
    def overhead_bytes(self) -> int:
        """All that is neither weights nor KV cache."""
        return self.activation_bytes + self.cuda_graph_bytes + self.communication_bytes + self.non_torch_bytes

    @property
    def block_size(self) -> int:
        """Tokens of one KV block."""
        return self.pool.block_size

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV block on this rank."""
        return self.pool.block_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one KV block by its tokens."""
        return self.block_bytes // self.block_size

    @property
    def usable_blocks(self) -> int:
        """Blocks that requests can hold: all but vLLM's null block."""
        return self.num_gpu_blocks - self.null_blocks

    @property
    def kv_tokens(self) -> int:
        """Tokens that requests can hold in KV, in every layer; behind windows they may be more."""
        return self.usable_blocks // len(self.pool.groups) * self.block_size

    @property
    def max_concurrency(self) -> float:
        """Sequences of `max_model_len` tokens that the pool holds, as the engine logs it."""
        return self.concurrency(self.max_model_len)

    @property
    def needed_bytes(self) -> int:
        """Weights, overhead and the KV cache that one sequence of `max_model_len` must find at start-up."""
        return self.weight_bytes + self.overhead_bytes + self.least_blocks * self.block_bytes

    def concurrency(self, tokens: int) -> float:
        """Sequences of so many tokens that the pool holds."""
        return self.num_gpu_blocks / self.pool.blocks(tokens)

    def size_by_blocks(self) -> int:
        """ "GPU KV cache size" as vLLM logs it until 0.19: the tokens of a group's share of the blocks."""
        return self.num_gpu_blocks // len(self.pool.groups) * self.block_size

    def size_by_concurrency(self) -> int:
        """ "GPU KV cache size" as vLLM logs it from 0.24: the tokens of as many of the longest sequences as fit."""
        return int(self.max_concurrency * self.max_model_len)


def plan_memory(
    model: ModelSpec, layout: Parallelism, gpu: Gpu, engine: EngineSpec, logged: Logged | None = None
) -> MemoryPlan:
    """The memory of the GPU of the replica that has the fewest blocks, whether or not the engine would start."""
    model = served(model, engine)
    plans = [_plan(model, layout, gpu, engine, logged or Logged(), stage) for stage in range(layout.pp)]
    return min(plans, key=lambda plan: (plan.num_gpu_blocks, -plan.needed_bytes))


def _plan(
    model: ModelSpec, layout: Parallelism, gpu: Gpu, engine: EngineSpec, logged: Logged, stage: int
) -> MemoryPlan:
    def ours(said: int | None, computed: int) -> int:
        return computed if said is None else said

    weights = rank_weights(model, layout, stage)
    draft = draft_of(model, engine)
    if draft is not None:
        weights["draft model"] = draft.weight_bytes(layout)
    peaks = profile_peaks(model, layout, engine, stage)
    weight_bytes = ours(logged.weights, sum(weights.values()))
    activations = ours(logged.activations, peaks.total)
    graphs = ours(logged.cuda_graphs, engine.cuda_graph_bytes)
    communication = ours(logged.communication, _communication_bytes(model, layout, gpu))
    other = ours(logged.other, NON_TORCH_BYTES)
    used = weight_bytes + activations + graphs + communication + other
    budget = _budget_bytes(gpu, engine, used)
    pool = kv_pool(model, engine, layout.tp, layout.dcp, layout.pp)
    if draft is not None:  # its layers have a place in every block
        pool = replace(pool, block_bytes=pool.block_bytes + pool.block_size * draft.model.kv_bytes_per_token(layout.tp))
    least = pool.blocks(engine.max_model_len) + engine.strict_pool_check
    override = engine.num_gpu_blocks_override
    counted = weight_bytes if engine.memory_rule == "static" else used
    available = budget - counted if override is None else override * pool.block_bytes
    blocks = max(0, available // pool.block_bytes)
    problem = ""
    if override is not None and used + available > gpu.visible_bytes:
        option = engine.name_of("num_gpu_blocks_override")
        problem = f"{option} {engine.options[option]} needs {_gib(available)} of KV cache"
    elif override is not None and engine.strict_pool_check and override < least:
        problem = (
            f"num_gpu_blocks_override {override} is below the {least} blocks that one sequence of max_model_len "
            f"{engine.max_model_len} needs (with the null block)"
        )
    elif available <= 0:
        problem = "nothing is left for KV cache"
    elif override is None and engine.memory_rule == "total" and blocks < least:
        problem = (
            f"one sequence of {engine.name_of('max_model_len')} {engine.max_model_len} needs "
            f"{_gib(least * pool.block_bytes)} of KV cache and {_gib(available)} is left"
        )
    drafts = "" if draft is None else f" ({_gib(weights['draft model'])} of them of {draft.model.name}, which drafts)"
    weighs = f"weights {_gib(weight_bytes)}{drafts}, overhead {_gib(used - weight_bytes)}"
    refusal = problem and (
        f"{model.name} does not fit {layout.gpus} x {gpu.id}: per GPU {_gib(gpu.visible_bytes)}"
        f"{_share(engine, budget)}, {weighs}: {problem}"
    )
    return MemoryPlan(
        visible_bytes=gpu.visible_bytes,
        budget_bytes=budget,
        weights=weights,
        peaks=peaks,
        weight_bytes=weight_bytes,
        activation_bytes=activations,
        cuda_graph_bytes=graphs,
        communication_bytes=communication,
        non_torch_bytes=other,
        kv_bytes=available,
        pool=pool,
        num_gpu_blocks=blocks,
        max_model_len=engine.max_model_len,
        least_blocks=least,
        overridden=override is not None,
        null_blocks=int(engine.null_block),
        refusal=refusal,
    )


def _budget_bytes(gpu: Gpu, engine: EngineSpec, used: int) -> int:
    """What the engine's rule gives to weights, overhead and KV cache together (to weights and KV cache, where it keeps
    the overhead apart: `static`); `used` bytes are weights and overhead."""
    share = engine.gpu_memory_utilization
    if engine.memory_rule == "free":
        return min(gpu.visible_bytes, used + int(max(0, gpu.visible_bytes - used) * share))
    return int(gpu.visible_bytes * share)


def _share(engine: EngineSpec, budget: int) -> str:
    """The engine's share in words: nothing where it may take all that is free, by the option's name where the option
    is the share itself."""
    share, option = engine.gpu_memory_utilization, engine.name_of("gpu_memory_utilization")
    if engine.memory_rule == "free" or share == 1:
        return ""
    name = f"{option} " if engine.options.get(option) == share else ""
    return f" x {name}{share:g} = {_gib(budget)}"


def _communication_bytes(model: ModelSpec, layout: Parallelism, gpu: Gpu) -> int:
    """Buffers of the GPUs that talk to each other: data parallel groups do only where they share experts."""
    if layout.gpus // (1 if model.experts else layout.dp) == 1:
        return 0
    return PCIE_BYTES if gpu.link.name.startswith("PCIe") else LINK_BYTES


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"
