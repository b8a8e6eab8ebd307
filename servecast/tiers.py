"""KV tiers of a pool: from the scenario, or the engine's own option, to what the simulator is told; what cannot be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from calibrate.connectors import load_transfer_link, transfer_link_names
from calibrate.cost import StepCost
from calibrate.engine import EngineSpec
from calibrate.hardware import GIB, Gpu
from calibrate.layout import Parallelism
from calibrate.memory import MemoryPlan
from calibrate.model import ModelSpec
from servecast.errors import ServecastError, one_of
from servecast.scenario import Scenario
from servecast.tier_parts import KvTiersPart, TierPart
from sim.offload import Offload
from sim.schedulers import Scheduler
from sim.schedulers.vllm_v1 import VllmV1
from sim.tiers import TierSpec

LATENCY_S = {"host": 20e-6, "disk": 200e-6, "remote": 1e-3}
"""Unless the scenario says it; assumed: a copy's start and end, a read of an NVMe disk, a round trip with a lookup."""
ORDER = list(LATENCY_S)
SHOWN_TOKENS = 2048
KEY = "cluster.kv_tiers"


def offload_of(
    scenario: Scenario,
    index: int,
    model: ModelSpec,
    gpu: Gpu,
    layout: Parallelism,
    engine: EngineSpec,
    memory: MemoryPlan,
    scheduler: Scheduler,
) -> Offload | None:
    """What pool `index` keeps KV in beyond its GPUs; None where there is nothing.

    Raises ServecastError with all that is wrong with that.
    """
    part, size_gib = scenario.cluster.pools[index].kv_tiers, engine.options.get("kv_offloading_size")
    if part is None and size_gib is None:
        return None
    key, problems = KEY, list[str]()
    if size_gib is not None:
        key = "engine.kv_offloading_size"
        if part is not None:
            problems.append(f"{key}: the pool has kv_tiers too; say what keeps KV in one of the two places")
        if engine.options["kv_offloading_backend"] == "lmcache":
            problems.append(
                "engine.kv_offloading_backend: LMCache keeps what its own server or configuration says, not this size; "
                f"write its tiers as {KEY} (with chunk: 256), and leave kv_offloading_size out"
            )
    host = {"kind": "host", "capacity": f"{round((size_gib or 0) * GIB)}B"}
    part = part or KvTiersPart.model_validate([host])
    problems += _not_simulated(scenario, index, key, part, model, layout, engine, scheduler)
    block, gpus = memory.block_size, layout.gpus
    chunk = part.chunk or block
    if chunk % block:
        problems.append(f"{KEY}.chunk: {chunk} tokens are no whole number of KV blocks, which have {block}")
    kinds = [tier.kind for tier in part.tiers]
    if part.prefetch and (kinds[0] != "host" or len(kinds) == 1):
        problems.append(
            f"{KEY}.prefetch: what it fetches comes from farther tiers to the host's memory; found {kinds}, give it a "
            "host and something behind that, or leave prefetch out"
        )
    problems += _wrong_tiers(part.tiers, key, chunk * memory.kv_bytes_per_token * gpus, chunk)
    if problems:
        raise ServecastError(*problems)
    near, gpu_bytes, usual = part.tiers[0], memory.kv_bytes_per_token, gpu.host_bytes_per_s
    read, write = (near.read or usual, near.write or usual) if near.kind == "host" else (usual, usual)
    return Offload(
        tuple(_spec(tier, part.tiers, chunk, gpu_bytes, gpus) for tier in part.tiers),
        chunk,
        gpu_bytes / read,
        gpu_bytes / write,
        part.load,
        1 if part.write_policy == "write_through" else part.hits,
        part.prefetch,
    )


def _spec(tier: TierPart, tiers: Sequence[TierPart], chunk: int, gpu_bytes: int, gpus: int) -> TierSpec:
    token_bytes, adapter = gpu_bytes * gpus, load_transfer_link(tier.link) if tier.link else None
    device = tier.kind != "host"
    name = tier.name or tier.kind
    if tier.name is None and sum(t.kind == tier.kind and t.name is None for t in tiers) > 1:
        name = f"{tier.kind} {1 + [t for t in tiers if t.kind == tier.kind].index(tier)}"
    return TierSpec(
        name,
        tier.capacity // (chunk * token_bytes),
        LATENCY_S[tier.kind] if tier.latency is None else tier.latency,
        read_s=token_bytes / tier.read if device and tier.read else 0.0,
        write_s=token_bytes / tier.write if device and tier.write else 0.0,
        link_s=gpu_bytes * adapter.gpus / adapter.bandwidth_bytes_per_s if adapter else 0.0,
        shared=tier.shared,
    )


def _wrong_tiers(tiers: Sequence[TierPart], key: str, chunk_bytes: int, chunk: int) -> Iterator[str]:
    """What the tiers lack, or have too much of."""
    for i, tier in enumerate(tiers):
        where = f"{key}.tiers.{i}" if key == KEY else key
        if tier.capacity < chunk_bytes:
            yield (
                f"{where}{'.capacity' if key == KEY else ''}: {tier.capacity / 2**20:,.1f} MiB hold no chunk of "
                f"{chunk:,} tokens, which has {chunk_bytes / 2**20:,.1f} MiB on all GPUs of a replica; give it more"
            )
        if tier.kind == "host" and tier.link is not None:
            yield f"{where}.link: the host's memory is reached over the GPUs' own links; give their read and write"
        if tier.kind == "disk" and tier.link is not None:
            yield f"{where}.link: a disk is in the machine; one that is not is of kind remote"
        both = tier.read is not None and tier.write is not None
        if tier.kind == "disk" and not both:
            yield (
                f"{where}: how fast a disk is must be said; for example read: 6GB/s, write: 3GB/s (all disks of a "
                "replica together)"
            )
        if tier.kind == "remote" and not both and tier.link is None:
            yield (
                f"{where}: how KV gets there must be said: link: {one_of(transfer_link_names())} (each GPU's adapter), "
                "or read: 10GB/s and write: 10GB/s (what the store does)"
            )
        if tier.kind == "remote" and (tier.read is None) != (tier.write is None):
            yield f"{where}: of a store's read and write one is missing; give both, or neither and a link"
    kinds = [tier.kind for tier in tiers]
    if kinds != sorted(kinds, key=ORDER.index) or kinds.count("host") > 1:
        yield f"{key}.tiers: they go from near to far, one host at most, then disks, then remote stores; found {kinds}"


def _not_simulated(
    scenario: Scenario,
    index: int,
    key: str,
    part: KvTiersPart,
    model: ModelSpec,
    layout: Parallelism,
    engine: EngineSpec,
    scheduler: Scheduler,
) -> Iterator[str]:
    """What tiers do not go together with."""
    pool, cluster = scenario.cluster.pools[index], scenario.cluster
    if type(scheduler) is not VllmV1:
        yield (
            f"{key}: KV tiers are simulated with vLLM's V1 scheduler; {engine.preset} plans with {scheduler}. Take a "
            "preset of vLLM, or leave them out"
        )
        return
    if not engine.enable_prefix_caching:
        yield f"{key}: tiers keep what prefix caching knows of, and that is off; set enable_prefix_caching true"
    if part.load == "async" and not scheduler.pulls_spare_prefills:
        yield (
            f"{key}: before 0.24 vLLM gives blocks to loads without regard for those that prompts still need, and can "
            f"come to a stop for ever; take vllm-0.24 or later{', or load: sync' if key == KEY else ''}"
        )
    elif part.load == "async" and not scheduler.pulled_first:
        yield (
            f"{key}: by priority, {engine.preset} lets requests whose KV has come wait behind others, and can come to "
            f"a stop for ever; take vllm-0.32, or scheduling_policy fcfs{', or load: sync' if key == KEY else ''}"
        )
    if model.windows:
        yield f"{key}: tiers are not simulated for layers with windows, which {model.name} has; leave them out"
    sizes = {"pp": "pipeline stages", "dp": "engines that step together", "dcp": "ranks that share tokens"}
    for name, what in (sizes | {"pcp": "ranks that share tokens"}).items():
        if getattr(layout, name) > 1:
            yield f"{key}: tiers are not simulated for {what} ({name} {getattr(layout, name)}); leave them out"
    if pool.role != "unified":
        yield f"{key}: tiers are not simulated where prefill and decode are apart; leave them out"
    if cluster.events or pool.failures or pool.autoscale:
        yield f"{key}: tiers are not simulated where replicas come and go; leave events, failures and autoscale out"


def notes_of(offload: Offload, cost: StepCost, budget: int, longest: int) -> Iterator[str]:
    """Of each tier what loading takes, what computing would, and from how many tokens on it is worth it."""
    chunk = offload.chunk_tokens
    most = (longest - 1) // chunk
    for tier in offload.tiers:
        tokens = min(max(1, SHOWN_TOKENS // chunk), most) * chunk
        if not tokens:
            continue
        loads_s, computes_s = load_s(offload, tier, tokens), saved_s(cost, tokens, budget)
        worth = _worth(offload, tier, cost, budget, most)
        said = (
            f"KV from {tier.name}: {tokens:,} tokens are there after {1e3 * loads_s:,.2f} ms if nothing else moves, "
            f"and take {1e3 * computes_s:,.2f} ms to compute"
        )
        if worth is None:
            yield f"{said}; even {most * chunk:,} tokens are computed faster: give it a faster way, or leave it out"
        elif worth > chunk:
            yield f"{said}; below {worth:,} tokens computing is faster"
        else:
            yield said


def load_s(offload: Offload, tier: TierSpec, tokens: int) -> float:
    """Seconds until so many tokens have come from a tier, if nothing else moves."""
    return tokens * max(offload.read_s, tier.read_s, tier.link_s) + tier.latency_s


def saved_s(cost: StepCost, tokens: int, budget: int) -> float:
    """Seconds by which a prompt of one token more is read sooner if its first `tokens` tokens are known."""
    done, took = 0, 0.0
    while done <= tokens:
        step = min(budget, tokens + 1 - done)
        took += cost.step_s([(step, done)], 0, 0, ())
        done += step
    return took - cost.step_s([(1, tokens)], 0, 0, ())


def _worth(offload: Offload, tier: TierSpec, cost: StepCost, budget: int, most: int) -> int | None:
    """The tokens from which on loading is faster than computing, up to `most` chunks; None where it is not even then.
    Short prompts, whose steps take what their launches do, do not count."""
    chunk = offload.chunk_tokens

    def faster(chunks: int) -> bool:
        return load_s(offload, tier, chunks * chunk) < saved_s(cost, chunks * chunk, budget)

    if not faster(most):
        return None
    low, high = most // 2, most
    while low and faster(low):
        low, high = low // 2, low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if faster(middle) else (middle, high)
    return high * chunk
