"""A memory plan with all that people ask of it, as the words and numbers that the terminal, a page and a script show.

It knows no scenario and no command line.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from calibrate.engine import EngineSpec
from calibrate.hardware import GIB, Gpu
from calibrate.kvgroups import KVGroup
from calibrate.layout import Parallelism
from calibrate.memory import MemoryPlan
from calibrate.model import ModelSpec
from reports.words import gib, quantity

LENGTHS = (1024, 4096, 16_384, 65_536, 262_144)
"""Sequence lengths at which concurrency is told, beside `max_model_len`."""


@dataclass(frozen=True, slots=True)
class Planned:
    """`longest`: the longest `max_model_len` that starts. `fixes`: what to change where it does not fit, each a clause.
    `unsimulated`: what of the model cannot be simulated yet."""

    model: ModelSpec
    layout: Parallelism
    gpu: Gpu
    engine: EngineSpec
    plan: MemoryPlan
    longest: int
    fixes: tuple[str, ...]
    unsimulated: tuple[str, ...]


def title(planned: Planned) -> str:
    """What is planned: model, GPUs, preset."""
    layout = planned.layout
    ways = [f"{name} {n}" for name in ("tp", "pp", "dp", "dcp", "pcp") if (n := getattr(layout, name)) > 1]
    spread = f" ({', '.join([*ways, *['ep'] * layout.ep])})" if layout.gpus > 1 or layout.ep else ""
    return f"{planned.model.name} on {layout.gpus} x {planned.gpu.id}{spread}, {planned.engine.preset}"


def verdict(planned: Planned) -> tuple[str, str]:
    """(whether it fits, the reason in a sentence without its end)."""
    plan = planned.plan
    if plan.refusal:
        return "Does not fit", plan.refusal.rpartition(": ")[2]
    held = f"{plan.size_by_blocks():,} tokens" if plain(plan) else f"{plan.num_gpu_blocks:,} blocks"
    many = f"{quantity(plan.max_concurrency)} sequences of {plan.max_model_len:,} tokens at once"
    return "Fits", f"{gib(plan.kv_bytes)} of KV cache on each GPU hold {held}, {many}"


def plain(plan: MemoryPlan) -> bool:
    """Whether all layers keep everything, so that a pool is a number of tokens."""
    return [group.kind for group in plan.pool.groups] == ["full"]


def terms(planned: Planned) -> Iterator[tuple[str, int, str]]:
    """(name, bytes of a GPU, remark) of everything in the engine's share; parts of a term begin with two spaces."""
    plan, peaks, engine = planned.plan, planned.plan.peaks, planned.engine
    yield "Weights", plan.weight_bytes, _weights_remark(planned)
    for name, size in sorted(plan.weights.items(), key=lambda part: -part[1]):
        yield f"  {name}", size, ""
    sampling = f"sampling {engine.max_num_seqs:,} sequences"
    forward = f"a step of {engine.max_num_batched_tokens:,} tokens"
    more, less = (sampling, forward) if peaks.sampling >= peaks.forward else (forward, sampling)
    counted = plan.activation_bytes == peaks.total
    remark = f"peak: {more}; {less} takes {gib(min(peaks.sampling, peaks.forward))}" if counted else "as logged"
    yield "Activations", plan.activation_bytes, remark
    none = "none are captured" if engine.enforce_eager else "this version does not count them"
    yield "CUDA graphs", plan.cuda_graph_bytes, "assumed" if plan.cuda_graph_bytes else none
    yield "Communication", plan.communication_bytes, planned.gpu.link.name if planned.layout.gpus > 1 else "one GPU"
    yield "CUDA, cuBLAS", plan.non_torch_bytes, ""
    yield "KV cache", max(plan.kv_bytes, 0), _kv_remark(planned)


def _weights_remark(planned: Planned) -> str:
    found = {quantized.storage.weights for quantized in planned.model.quantized}
    held = f"{', '.join(sorted(found))} and {planned.model.dtype}" if found else planned.model.dtype
    return f"{planned.model.params / 1e9:,.1f} B parameters, {held}"


def _kv_remark(planned: Planned) -> str:
    plan = planned.plan
    if plan.kv_bytes <= 0:
        return f"{gib(-plan.kv_bytes)} too little"
    return f"set by {planned.engine.name_of('num_gpu_blocks_override')}" if plan.overridden else "what is left"


def facts(planned: Planned) -> Iterator[tuple[str, str]]:
    """Rows about the KV cache."""
    plan, most = planned.plan, planned.model.max_position
    each = f"{plan.block_bytes / 2**20:.3g} MiB a GPU"
    yield "Blocks", f"{plan.num_gpu_blocks:,} of {plan.block_size:,} tokens, {each}"
    if not plain(plan):
        for i, (group, count) in enumerate(_alike(plan)):
            yield "Groups" if i == 0 else "", f"{count} x {_group_text(group)}"
    if plain(plan):
        null = " (one block is the null block)" if plan.null_blocks else ""
        yield "Tokens", f"{max(0, plan.kv_tokens):,} for requests{null}"
    else:
        longest = f"of {plan.max_model_len:,} tokens takes {plan.pool.blocks(plan.max_model_len):,} blocks"
        yield "A sequence", f"{longest}, of one token {plan.pool.blocks(1):,}"
    if plan.num_gpu_blocks:
        lengths = sorted({n for n in LENGTHS if n < plan.max_model_len} | {plan.max_model_len})
        yield "At once", ", ".join(f"{quantity(plan.concurrency(n))} of {n:,}" for n in lengths) + " tokens"
    longest = f"{planned.longest:,}" + (" (all that the model allows)" if planned.longest >= most else "")
    option = planned.engine.name_of("max_model_len")
    yield "Longest", f"{option} {longest} starts" if planned.longest else f"no {option} starts"


def share(planned: Planned) -> str:
    """What the engine's share of the GPU's memory is a share of, by its rule, in GiB."""
    plan, engine = planned.plan, planned.engine
    part = f"{engine.gpu_memory_utilization:g} of"
    if engine.memory_rule == "free":
        used = plan.weight_bytes + plan.overhead_bytes
        if used >= plan.visible_bytes:
            return f"all of {plan.visible_bytes / GIB:.2f}"
        return f"{used / GIB:.2f} and {part} the other {max(0, plan.visible_bytes - used) / GIB:.2f}"
    whole = f"{part} {plan.visible_bytes / GIB:.2f}"
    return f"{whole}, for weights and KV cache" if engine.memory_rule == "static" else whole


def _alike(plan: MemoryPlan) -> list[tuple[KVGroup, int]]:
    found: dict[tuple[str, int], tuple[KVGroup, int]] = {}
    for group in plan.pool.groups:
        key = (group.kind, group.size)
        found[key] = (found.get(key, (group, 0))[0], found.get(key, (group, 0))[1] + 1)
    return list(found.values())


def _group_text(group: KVGroup) -> str:
    kept = {
        "full": "keep every token",
        "window": f"keep a window of {group.size:,} tokens",
        "chunk": f"keep the current chunk of {group.size:,} tokens",
        "state": f"keep {group.states} state{'s' if group.states > 1 else ''} a sequence",
    }
    return f"{group.layers} layers that {kept[group.kind]}"


def log_lines(planned: Planned) -> list[tuple[str, list[str]]]:
    """(versions, lines) as vLLM's log has them, in both meanings that "KV cache size" has had; nothing for others."""
    plan = planned.plan
    if planned.engine.engine != "vllm":
        return []
    available = f"Available KV cache memory: {plan.kv_bytes / GIB:.2f} GiB"
    length, many = f"{plan.max_model_len:,}", f"{plan.max_concurrency:.2f}x"
    blocks = plan.size_by_blocks()
    return [
        ("vLLM 0.10 to 0.19", [
            available, f"GPU KV cache size: {blocks:,} tokens",
            f"Maximum concurrency for {length} tokens per request: {many}"]),
        ("vLLM 0.32", [
            available,
            f"GPU KV cache size: {plan.size_by_concurrency():,} tokens, "
            f"Maximum concurrency for {length} tokens per request: {many}"]),
    ]  # fmt: skip


def notes(planned: Planned) -> list[str]:
    """What to know of the numbers."""
    said = [f"Not simulated yet, only planned: {reason}." for reason in planned.unsimulated]
    if planned.layout.pp > 1:
        said.append("Of a pipeline the stage with the fewest blocks is shown.")
    said += planned.engine.notes
    said.append(
        "Overheads are formulas checked against published start-up logs (docs/memory.md), good to a few percent of the "
        "KV cache; --logged puts your engine's own numbers in their place."
    )
    return said


def as_json(planned: Planned) -> dict[str, Any]:
    """All of it for a script: bytes, tokens and blocks."""
    plan = planned.plan
    return {
        "model": planned.model.name,
        "gpu": planned.gpu.id,
        "engine": planned.engine.preset,
        "layout": asdict(planned.layout),
        "fits": not plan.refusal,
        "refusal": plan.refusal or None,
        "to_fit": list(planned.fixes),
        "visible_bytes": plan.visible_bytes,
        "budget_bytes": plan.budget_bytes,
        "weight_bytes": plan.weight_bytes,
        "weights": dict(plan.weights),
        "activation_bytes": plan.activation_bytes,
        "forward_bytes": plan.peaks.forward,
        "sampling_bytes": plan.peaks.sampling,
        "cuda_graph_bytes": plan.cuda_graph_bytes,
        "communication_bytes": plan.communication_bytes,
        "non_torch_bytes": plan.non_torch_bytes,
        "kv_bytes": plan.kv_bytes,
        "block_size": plan.block_size,
        "block_bytes": plan.block_bytes,
        "num_gpu_blocks": plan.num_gpu_blocks,
        "groups": [asdict(group) for group in plan.pool.groups],
        "max_model_len": plan.max_model_len,
        "longest_max_model_len": planned.longest,
        "max_concurrency": plan.max_concurrency,
        "kv_cache_size_by_blocks": plan.size_by_blocks(),
        "kv_cache_size_by_concurrency": plan.size_by_concurrency(),
        "not_simulated": list(planned.unsimulated),
    }
