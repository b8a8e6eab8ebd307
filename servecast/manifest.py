"""Everything that decided the numbers of a run, as plain facts: what ran, versions, where costs and options come from,
and what is not modelled."""

from __future__ import annotations

import platform
from dataclasses import asdict
from functools import cache
from importlib.metadata import version
from typing import Any

from calibrate.memory import MemoryPlan
from servecast.changes import notes_of
from servecast.pools import PoolSetup
from servecast.serve_lines import commands
from servecast.setup import Setup
from servecast.speculation import words
from servecast.tiers import notes_of as notes_of_tiers
from sim.schedulers.vllm_v0 import VllmV0

NOT_MODELLED = (
    "the front end's time a token that it streams, which bounds small models on fast GPUs; the client's network",
    "answers that later prompts repeat: a prefix cache finds of prompts what the workload says that they share",
    "step-time jitter: steps are deterministic, so measured latency tails are wider",
    "clocks that drop under load",
    "LoRA, structured output, multimodal inputs",
)
"""What a result of this version leaves out, whatever the scenario; an engine adds its own notes."""


@cache
def versions() -> dict[str, str]:
    """Of Python and of the packages that numbers may depend on."""
    names = ("servecast", "numpy", "simpy", "polars")
    return {"python": platform.python_version()} | {name: version(name) for name in names}


def manifest(setup: Setup) -> dict[str, Any]:
    """The facts; `pools` has a pool's own, in the order of the scenario."""
    requests = setup.requests
    pools = [_pool(pool) | _drafts(setup, pool) for pool in setup.pools]
    notes = dict.fromkeys(
        note
        for i, pool in enumerate(setup.pools)
        for note in (
            *pool.engine.notes,
            *_own_notes(setup, i),
            *_host_notes(setup, i),
            *_swap_notes(pool),
            *_stage_notes(pool),
            *([] if pool.drafting is None else [words(pool.drafting)]),
            *_tier_notes(pool),
        )
    )
    return {
        "name": setup.scenario.name,
        "servecast": versions()["servecast"],
        "versions": {name: found for name, found in versions().items() if name != "servecast"},
        "pools": pools,
        "seed": setup.scenario.seed,
        "scenario": setup.resolved(),
        "workload": {
            "source": requests.trace.source,
            "requests": len(requests.trace),
            "dropped": dict(requests.trace.dropped),
            "notes": list(requests.trace.notes),
        },
        "cost": setup.costing.facts(),
        "serve_lines": [command.text for command in commands(setup)],
        "notes": [
            *notes,
            *_cache_notes(setup),
            *_unused_drafts(setup),
            *notes_of(setup.scenario, setup.pools, setup.changes),
            *filter(None, [setup.costing.note]),
        ],
        "not_modelled": list(NOT_MODELLED),
    }


def _pool(pool: PoolSetup) -> dict[str, Any]:
    engine = pool.engine
    return {
        "name": pool.name,
        "model": pool.model.name,
        "gpu": pool.gpu.id,
        "tp": pool.layout.tp,
        "pp": pool.layout.pp,
        "dp": pool.layout.dp,
        "dcp": pool.layout.dcp,
        "pcp": pool.layout.pcp,
        "ep": pool.layout.ep,
        "replicas": pool.replicas,
        "engine": engine.preset,
        "engine_options": {
            option: {"value": engine.options[option], "source": source} for option, source in engine.sources.items()
        },
        "memory": memory_facts(pool.memory),
        "cost": dict(pool.cost.provenance),
    }


def _drafts(setup: Setup, pool: PoolSetup) -> dict[str, Any]:
    """What drafts are worth to sequences of the workload's mean length, halfway through their answers."""
    trace, memory = setup.requests.trace, pool.memory
    prompt, output = (float(tokens.mean()) for tokens in (trace.prompt_tokens, trace.output_tokens))
    most = min(int(memory.concurrency(round(prompt + output))), pool.engine.max_num_seqs)
    worth = pool.draft_worth(round(prompt + output / 2), max(1, most))
    if worth is None:
        return {}
    steps = [[n, *step] for n, step in worth.by_batch.items()]
    return {"drafts": {**asdict(worth), "by_batch": steps}}


def _unused_drafts(setup: Setup) -> list[str]:
    unused = setup.scenario.speculation is not None and all(pool.drafting is None for pool in setup.pools)
    return ["speculation is not used: no engine has a speculative_config that drafts tokens"] if unused else []


def memory_facts(plan: MemoryPlan) -> dict[str, Any]:
    """The memory plan as plain numbers."""
    names = ("visible_bytes", "budget_bytes", "weight_bytes", "activation_bytes", "cuda_graph_bytes",
             "communication_bytes", "non_torch_bytes", "kv_bytes", "kv_bytes_per_token", "block_size", "num_gpu_blocks",
             "max_concurrency", "overridden", "kv_tokens")  # fmt: skip
    return {name: getattr(plan, name) for name in names}


def _cache_notes(setup: Setup) -> list[str]:
    if setup.requests.trace.prefix is not None or not any(pool.engine.enable_prefix_caching for pool in setup.pools):
        return []
    found = "preempted requests" + ("" if setup.requests.trace.samples is None else ", and other samples,")
    return [f"prefix caching is on, but nobody knows what prompts share here: only {found} are found again"]


def _stage_notes(pool: PoolSetup) -> list[str]:
    if pool.engine.pipeline != "serial" or pool.layout.pp == 1:
        return []
    return [
        f"{pool.engine.preset} runs one batch at a time through its {pool.layout.pp} pipeline stages, of which all but "
        "one wait: async_scheduling: false keeps as many batches under way as stages"
    ]


def _tier_notes(pool: PoolSetup) -> list[str]:
    if pool.offload is None:
        return []
    return list(notes_of_tiers(pool.offload, pool.step_cost, pool.engine.max_num_batched_tokens,
                               pool.engine.max_model_len))  # fmt: skip


def _own_notes(setup: Setup, index: int) -> list[str]:
    own, preset = setup.scenario.pool_engine(index).get("scheduler"), setup.pools[index].engine.preset
    return [] if own is None else [f"steps are planned by {own}, not by {preset}'s scheduler"]


def _host_notes(setup: Setup, index: int) -> list[str]:
    """Times of the user's own, which may stand for what is not modelled."""
    host = setup.scenario.cluster.pools[index].host or setup.scenario.host
    notes = list(host.notes())
    if host.bubble is not None and not setup.pools[index].engine.async_scheduling:
        notes.append("host.bubble has no influence: the engine is synchronous, and waits in every step for host.step")
    return notes


def _swap_notes(pool: PoolSetup) -> list[str]:
    scheduler = pool.scheduler
    if not isinstance(scheduler, VllmV0) or not scheduler.swaps:
        return []
    return [
        f"preempted requests are swapped to the host: {scheduler.swap_blocks:,} blocks a GPU, "
        f"{1e3 * pool.cost.swap_block_s:.2f} ms to copy one, there or back"
    ]
