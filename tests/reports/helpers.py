"""Small real runs to report on: catalogue model and GPU, generated requests, the datasheet cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from calibrate.cost import compile_cost
from calibrate.datasheet import Datasheet
from calibrate.memory import plan_memory
from servecast.manifest import memory_facts
from sim.changes import Changes
from sim.cluster import Cluster, Pool, Routing
from sim.deployment import Deployment, PoolFacts
from sim.result import Result
from sim.schedulers import scheduler_of
from sim.source import ClosedLoop, OpenLoop, Requests
from tests.calibrate.helpers import parts
from workloads.generate import generate, generate_lengths

LENGTHS = ({"kind": "lognormal", "mean": 1024, "cv": 1.0}, {"kind": "lognormal", "mean": 256, "cv": 1.0})

POOL = {"model", "gpu", "engine", "cost", "memory", "engine_options"}
"""Facts that a manifest has for each pool."""


def run(
    n: int = 300,
    rate: float = 8.0,
    *,
    replicas: int = 1,
    pools: int = 1,
    concurrency: int | None = None,
    kv_blocks: int | None = None,
    max_model_len: int = 32_768,
    lengths: tuple[dict[str, Any], dict[str, Any]] = LENGTHS,
    slo: Mapping[str, float] | None = None,
    keep_going: Callable[[int, float], bool] = lambda done, now: True,
    changes: Changes | None = None,
    **manifest: Any,
) -> Result:
    """Llama 3.1 8B on H100s, in equal pools; `manifest` entries replace those made here, those of POOL a pool's."""
    model, layout, gpu, engine = parts("llama-3.1-8b", "h100-sxm", max_model_len=max_model_len)
    memory = plan_memory(model, layout, gpu, engine)
    source: OpenLoop | ClosedLoop
    if concurrency is None:
        trace = generate(n, 1, {"kind": "poisson", "rate": rate}, lengths)
        source = OpenLoop(trace.arrival_s, Requests(trace.prompt_tokens, trace.output_tokens, trace.max_tokens))
    else:
        prompt, output = generate_lengths(n, 1, lengths)
        source = ClosedLoop(concurrency, Requests(prompt, output, output))
    blocks = kv_blocks or memory.num_gpu_blocks
    scheduler = scheduler_of(engine)
    cost = compile_cost(model, layout, engine, Datasheet(gpu))
    pool = Pool(
        replicas,
        scheduler,
        cost,
        blocks,
        engine.block_size,
        engine.max_model_len,
        engine.async_scheduling,
        engine.front_end,
    )
    cluster = Cluster(source, [pool] * pools, Routing(), changes)
    complete = cluster.run(keep_going)
    fixed = memory.budget_bytes - memory.kv_bytes
    usable = cluster.front_ends[0].replica.state.kv.usable
    size, token_bytes = engine.block_size, memory.kv_bytes_per_token
    names = [gpu.id, *(f"{gpu.id} {i}" for i in range(1, pools))]
    deployment = Deployment(tuple(PoolFacts(name, replicas, 1, fixed, usable, size, token_bytes) for name in names))
    options = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size", "async_scheduling")
    one = {key: manifest.pop(key) for key in POOL & manifest.keys()}
    pool_facts = {
        "model": model.name,
        "gpu": gpu.id,
        "tp": 1,
        "dp": 1,
        "ep": False,
        "replicas": replicas,
        "engine": engine.preset,
        "cost": cost.provenance,
        "memory": memory_facts(memory),
        "engine_options": {o: {"value": getattr(engine, o), "source": engine.sources[o]} for o in options},
    }
    facts: dict[str, Any] = {
        "name": "chat on one H100",
        "servecast": "0.1.0",
        "scenario": {"name": "chat on one H100", "model": model.name, "cluster": {"gpu": gpu.id, "tp": 1}},
        "seed": 1,
        "pools": [pool_facts | one | {"name": name} for name in names],
        "notes": list(engine.notes),
        "not_modelled": ["prefix caching", "speculative decoding"],
        "workload": {"source": "generated: poisson arrivals", "requests": n, "dropped": {}, "notes": []},
    }
    return Result(
        cluster.log,
        deployment,
        slo or {},
        facts | manifest,
        open_loop=concurrency is None,
        complete=complete,
    )


def tokens(result: Result, column: str) -> float:
    """The sum of a column of the step log."""
    return float(np.sum(result.steps[column].to_numpy()))
