"""Which option to change so that a model fits, each with the value that would do: every one is tried by planning again.

Knows the options whose change leaves the rest of the deployment as it is; a smaller model is not among them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from calibrate.engine import EngineSpec
from calibrate.hardware import Gpu
from calibrate.layout import Parallelism, check_layout
from calibrate.memory import Logged, MemoryPlan, plan_memory
from calibrate.model import ModelSpec
from calibrate.serving import check_simulated, served
from servecast.errors import ServecastError

HIGHEST_SHARE = 0.97
"""What the driver and other processes hold is outside the engine's share: not suggested above this."""

FEWER = 256
"""Sequences that are tried together with a shorter `max_model_len`."""


def require_fit(
    model: ModelSpec, layout: Parallelism, gpu: Gpu, engine: EngineSpec, logged: Logged | None = None
) -> MemoryPlan:
    """The memory plan of a deployment that can be simulated. Raises `ServecastError`, with the option to change, where
    the engine would refuse to start or run out of memory, and for a model whose KV cache or kernels are not known."""
    check_simulated(served(model, engine))
    plan = plan_memory(model, layout, gpu, engine, logged)
    if plan.refusal:
        found = ", or ".join(changes(model, layout, gpu, engine, logged))
        raise ServecastError(f"{plan.refusal}. To fit: {found}")
    return plan


def longest_model_len(
    model: ModelSpec, layout: Parallelism, gpu: Gpu, engine: EngineSpec, logged: Logged | None = None
) -> int:
    """The longest `max_model_len` with which the engine starts, up to what the model allows; 0 where none does."""
    low, high = 0, model.max_position + 1
    while low + 1 < high:
        middle = (low + high) // 2
        starts = not plan_memory(model, layout, gpu, _with_length(engine, middle), logged).refusal
        low, high = (middle, high) if starts else (low, middle)
    return low


def _with_length(engine: EngineSpec, tokens: int) -> EngineSpec:
    """The engine with another `max_model_len`: without chunked prefill its own default budget follows."""
    if engine.options.get("enable_chunked_prefill", True) or engine.sources.get("max_num_batched_tokens") == "user":
        return replace(engine, max_model_len=tokens)
    budget = max(engine.max_num_seqs, tokens, min(2048, engine.max_num_batched_tokens))
    return replace(engine, max_model_len=tokens, max_num_batched_tokens=budget)


def changes(
    model: ModelSpec, layout: Parallelism, gpu: Gpu, engine: EngineSpec, logged: Logged | None = None
) -> Iterator[str]:
    """The changes of one option that would do, each as a clause."""
    if engine.num_gpu_blocks_override is not None:
        yield from _other_pool(plan_memory(model, layout, gpu, engine, logged), engine)
        return

    def fits(layout: Parallelism = layout, engine: EngineSpec = engine) -> bool:
        return not plan_memory(model, layout, gpu, engine, logged).refusal

    if longest := longest_model_len(model, layout, gpu, engine, logged):
        yield f"lower {engine.name_of('max_model_len')} to at most {longest}"
    needed = plan_memory(model, layout, gpu, engine, logged).needed_bytes
    if (share := math.ceil(100 * needed / gpu.visible_bytes) / 100) <= HIGHEST_SHARE:
        yield f"raise {engine.name_of('gpu_memory_utilization')} to {share:g}"
    for option, least in (("max_num_seqs", 8), ("max_num_batched_tokens", max(512, engine.max_num_seqs))):
        lower = 2 ** (getattr(engine, option) - 1).bit_length() // 2
        while lower >= least and not fits(engine=replace(engine, **{option: lower})):
            lower //= 2
        if lower >= least:
            yield f"lower {engine.name_of(option)} to {lower}"
    fewer = replace(engine, max_num_seqs=FEWER)
    length = longest_model_len(model, layout, gpu, fewer, logged) if engine.max_num_seqs > FEWER else 0
    if 0 < length < engine.max_model_len:
        names = engine.name_of("max_num_seqs"), engine.name_of("max_model_len")
        yield f"lower {names[0]} to {FEWER} and {names[1]} to at most {length}"
    if not engine.kv_cache_dtype.startswith("fp8") and fits(engine=replace(engine, kv_cache_dtype="fp8")):
        yield "set kv_cache_dtype to fp8"
    larger = (replace(layout, tp=tp) for tp in range(layout.tp + 1, gpu.gpus_per_node + 1))
    found = next((it.tp for it in larger if not check_layout(model, it, gpu) and fits(layout=it)), 0)
    yield f"raise tp to {found}" if found else "use a GPU with more memory"


def _other_pool(plan: MemoryPlan, engine: EngineSpec) -> Iterator[str]:
    option = engine.name_of("num_gpu_blocks_override")
    room = (plan.visible_bytes - plan.weight_bytes - plan.overhead_bytes) // plan.block_bytes
    if room < plan.least_blocks:
        yield "raise tp"
        return
    if plan.num_gpu_blocks > room:
        yield f"lower {option} to at most {room} blocks (they are per engine, never times tp)"
        return
    longest = plan.pool.longest(plan.num_gpu_blocks - engine.strict_pool_check, plan.max_model_len)
    yield f"raise {option} to at least {plan.least_blocks}"
    if longest:
        yield f"lower max_model_len to {longest}"
