"""Prefill and decode pools: which of them hand over to which, and what that costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from calibrate.connectors import (
    Connector,
    TransferLink,
    load_connector,
    load_transfer_link,
    node_link,
    transfer_link_names,
)
from calibrate.options import preset_names
from calibrate.routes import Side
from calibrate.transfer import TransferCosts
from servecast.errors import ServecastError, one_of
from servecast.pools import PoolSetup
from servecast.requests import Requests
from servecast.scenario import Scenario, SplitPart
from sim.handover import Split
from sim.schedulers.sglang_split import SglangDecode, SglangPrefill
from sim.schedulers.vllm_v1 import VllmV1

USUAL = {"vllm": "nixl", "sglang": "sglang-mooncake"}
"""The connector of an engine for which the scenario names none."""


def split_of(scenario: Scenario, pools: Sequence[PoolSetup], requests: Requests) -> Split | None:
    """How the cluster's prefill pools hand over to its decode pools; None where all pools are unified.

    Raises ServecastError with all that is wrong with that.
    """
    part = scenario.cluster.split or SplitPart()
    prefill, decode = ([i for i, pool in enumerate(pools) if pool.role == role] for role in ("prefill", "decode"))
    if not prefill:
        return None
    connector = load_connector(part.connector or USUAL[pools[prefill[0]].engine.engine])
    bootstraps = isinstance(pools[prefill[0]].scheduler, SglangPrefill)
    problems, transfers = list(_not_sglang(part)) if bootstraps else [], {}
    if connector.pieces == "layers":
        problems += _not_pushed(scenario, connector, pools)
    for i in prefill:
        for j in decode:
            source, to = pools[i], pools[j]
            if source.serves != to.serves:
                continue
            dtypes = [pool.model.kv_dtype or pool.model.dtype for pool in (source, to)]  # as served, unlike `for_`
            if dtypes[0] != dtypes[1]:
                problems.append(
                    f"cluster.pools.{j}.engine.kv_cache_dtype: KV is {dtypes[0]} on the prefill side, {dtypes[1]} on "
                    "the decode side: blocks move unchanged, set one"
                )
            try:
                link, other = _link(part, pools, source, to)
                here = Side(source.gpu, source.layout, source.engine, link)
                there = Side(to.gpu, to.layout, to.engine, other)
                transfers[i, j] = TransferCosts.for_(
                    source.model, here, there, connector, _run_blocks(part, to, requests)
                )
            except ServecastError as error:
                pair = f" ({source.name} to {to.name})"
                problems += (p if p.startswith("cluster.") else f"cluster.split.{p}{pair}" for p in error.problems)
    if problems:
        raise ServecastError(*dict.fromkeys(problems))
    return Split(
        transfers,
        router=part.router["kind"],
        parameters={key: value for key, value in part.router.items() if key != "kind"},
        pull=connector.moves == "pull",
        posts_first=any(cost.transport.posts_first for cost in transfers.values()),
        first_token=part.first_token,
        local_tokens=part.local_tokens,
        bootstraps=bootstraps,
        layers=pools[prefill[0]].model.layers if connector.pieces == "layers" else 0,
    )


def _not_pushed(scenario: Scenario, connector: Connector, pools: Sequence[PoolSetup]) -> Iterator[str]:
    """What cannot be where KV is sent while it is computed."""
    where, presets = "cluster.split.connector", preset_names()
    for preset in dict.fromkeys(pool.engine.preset for pool in pools if pool.role != "unified"):
        if connector.until is not None and preset in presets[presets.index(connector.until) + 1 :]:
            yield f"{where}: {preset} has no {connector.name} any more; take {connector.until}, or another connector"
    if any(pool.group is not None for pool in pools):
        yield f"{where}: {connector.name} is not simulated for engines that step together; take another connector"
    if any(pool.layout.pp > 1 for pool in pools):
        yield f"{where}: {connector.name} is not simulated for pipeline stages; take another connector"
    parts = scenario.cluster.pools
    if scenario.cluster.events or any(part.failures or part.autoscale for part in parts):
        yield f"{where}: {connector.name} is not simulated where replicas come and go; take another connector"


def _run_blocks(part: SplitPart, to: PoolSetup, requests: Requests) -> float:
    """Adjacent blocks that lie in the same order on both sides.

    SGLang takes pages from a sorted list of free ones (`need_sort` in mem_cache/allocator.py): those of a prompt lie
    together, but for where the list has pages of finished answers, each alone among those of other answers. So of a
    prompt's pages the answers' share of all ends a run, and its last one does. An estimate: nobody has measured it.
    """
    if part.run_blocks is not None:
        return part.run_blocks
    if not isinstance(to.scheduler, SglangDecode):
        return 1.0
    prompt, output = requests.trace.prompt_tokens.mean(), requests.trace.output_tokens.mean()
    return max(1.0, float(1 / (output / (prompt + output) + min(1.0, to.engine.block_size / prompt))))


def _not_sglang(part: SplitPart) -> Iterator[str]:
    """What SGLang's servers do in no other way."""
    if part.first_token != "decode":
        yield "cluster.split.first_token: SGLang's decode side streams all tokens; leave it out"
    if part.local_tokens:
        yield "cluster.split.local_tokens: SGLang's decode side reads no prompts itself; leave it out"


def _link(
    part: SplitPart, pools: Sequence[PoolSetup], source: PoolSetup, to: PoolSetup
) -> tuple[TransferLink, TransferLink]:
    """The way out of a prefill and into a decode replica."""
    if part.link is not None:
        return (load_transfer_link(part.link),) * 2
    gpus, joined = sum(pool.gpus for pool in pools), source.gpu.link_gpus
    kinds = dict.fromkeys(pool.gpu.id for pool in pools)
    if len(kinds) > 1 or gpus > joined:
        raise ServecastError(
            f"cluster.split.link: missing; {gpus} GPUs of {one_of(kinds)} are not all joined by their own link (which "
            f"joins {joined}); name what is between them: {one_of(transfer_link_names())}"
        )
    return node_link(source.gpu), node_link(to.gpu)


def wrong_roles(scenario: Scenario) -> Iterator[str]:
    """How the pools' roles do not go together."""
    roles: dict[str, dict[str, int]] = {}
    for i, pool in enumerate(scenario.cluster.pools):
        roles.setdefault(pool.model or scenario.model, {}).setdefault(pool.role, i)
    for model, places in roles.items():
        for role, other in (("prefill", "decode"), ("decode", "prefill")):
            if role in places and other not in places:
                yield (
                    f"cluster.pools.{places[role]}.role: a {role} pool needs a {other} pool that serves {model} too; "
                    "add one, or make it unified"
                )
        if "unified" in places and len(places) > 1:
            yield (
                f"cluster.pools.{places['unified']}.role: {model} is served by unified pools and by split ones; "
                "make all of them the same"
            )
    if scenario.cluster.split is not None and not any("prefill" in places for places in roles.values()):
        yield "cluster.split: there are no prefill and decode pools; give pools these roles, or take it out"


def not_split(pools: Sequence[PoolSetup], requests: Requests | None) -> Iterator[str]:
    """What of the pools and the workload is not simulated where prefill and decode are apart."""
    for i, pool in enumerate(pools):
        if pool.role == "unified":
            continue
        if not isinstance(pool.scheduler, (VllmV1, SglangPrefill, SglangDecode)):
            yield (
                f"cluster.pools.{i}.role: prefill and decode apart are simulated with vLLM's V1 scheduler and with "
                f"SGLang's; {pool.engine.preset} plans with {pool.scheduler}"
            )
        elif pool.group is not None and not isinstance(pool.scheduler, VllmV1):
            yield (
                f"cluster.pools.{i}.dp: engines of {pool.engine.preset} that step together are not simulated where "
                "prefill and decode are apart; use replicas"
            )
        if pool.model.windows:
            yield (
                f"cluster.pools.{i}.role: prefill and decode apart are not simulated for layers with windows, which "
                f"{pool.model.name} has"
            )
    apart = any(pool.role != "unified" for pool in pools)
    if apart and requests is not None and requests.trace.samples is not None:
        yield "workload: several samples of one prompt (n) are not simulated where prefill and decode are apart"
