"""The verb `run`: a scenario in, a result out."""

from __future__ import annotations

import platform
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from calibrate.coverage import outside_shares
from calibrate.kvgroups import KINDS, kv_rules
from servecast.errors import ServecastError
from servecast.scenario import Scenario
from servecast.setup import Setup, memory_facts, set_up
from sim.cluster import Cluster, Pool
from sim.kvcache import KVCache
from sim.prefixcache import PrefixCache
from sim.result import Classes, Deployment
from sim.result import Result as Outcome
from sim.samples import shared_prompts
from sim.schedulers import Scheduler
from sim.source import ClosedLoop, OpenLoop, Requests, Sessions, Source
from sim.windows import Tables, Window, WindowCache
from workloads.content import content_of

NOT_MODELLED = (
    "the front end's time a token that it streams, which bounds small models on fast GPUs; the client's network",
    "answers that later prompts repeat: a prefix cache finds of prompts what the workload says that they share",
    "step-time jitter: steps are deterministic, so measured latency tails are wider",
    "clocks that drop under load",
    "LoRA, speculative decoding, structured output, multimodal inputs",
)
"""What a result of this version leaves out, whatever the scenario; an engine adds its own notes."""


class Result(Outcome):
    """What happened, and `save` with the report."""

    def save(self, folder: str | Path) -> Path:
        """Write the tables, the summary, the manifest and `report.html`. Raises ServecastError when that fails."""
        from polars.exceptions import PolarsError

        from reports.html import report_html

        try:
            return self.write(folder, {"report.html": report_html(self)})
        except (OSError, PolarsError) as error:  # polars has its own word for a full disk
            reason = getattr(error, "strerror", None) or error
            raise ServecastError(f"{folder}: cannot write the results: {reason}") from None


def simulate(scenario: Scenario | Setup, keep_going: Callable[[int, int, float], bool] | None = None) -> Result:
    """Replay the scenario's workload.

    `keep_going(requests done, requests in all, simulated seconds)` is asked now and then; False ends the run early,
    with a partial result. Raises ServecastError for whatever cannot be run.
    """
    setup = scenario if isinstance(scenario, Setup) else set_up(scenario)
    source = _source(setup)
    cluster = Cluster(source, _pool(setup), setup.scenario.cluster.router)
    if keep_going is None:
        complete = cluster.run()
    else:
        complete = cluster.run(lambda done, now: keep_going(done, source.total, now))
    facts = manifest(setup)
    if shares := _outside(setup, cluster):
        facts["cost"]["outside"] = shares
    memory = setup.memory
    deployment = Deployment(
        gpus=setup.gpus,
        replicas=setup.replicas,
        fixed_memory_bytes=memory.weight_bytes + memory.activation_bytes + memory.cuda_graph_bytes
        + memory.communication_bytes + memory.non_torch_bytes,
        kv_blocks=memory.usable_blocks,
        block_size=memory.block_size,
        kv_bytes_per_token=memory.kv_bytes_per_token,
        prefix_caching=setup.engine.enable_prefix_caching,
    )  # fmt: skip
    return Result(
        cluster.log,
        deployment,
        setup.scenario.slo.limits(),
        facts,
        open_loop=setup.requests.concurrency is None and not setup.requests.follow,
        complete=complete,
        unsent=source.unsent,
        classes=_classes(setup),
    )


def manifest(setup: Setup) -> dict[str, Any]:
    """Everything that decided the numbers: the scenario as resolved, versions, where costs and options come from."""
    engine, requests = setup.engine, setup.requests
    return {
        "name": setup.scenario.name,
        "servecast": version("servecast"),
        "versions": {"python": platform.python_version()} | {p: version(p) for p in ("numpy", "simpy", "polars")},
        "model": setup.model.name,
        "gpu": setup.gpu.id,
        "engine": engine.preset,
        "seed": setup.scenario.seed,
        "scenario": setup.resolved(),
        "engine_options": {
            option: {"value": engine.options[option], "source": source} for option, source in engine.sources.items()
        },
        "workload": {
            "source": requests.trace.source,
            "requests": len(requests.trace),
            "dropped": dict(requests.trace.dropped),
            "notes": list(requests.trace.notes),
        },
        "memory": memory_facts(setup.memory),
        "cost": dict(setup.cost.provenance),
        "notes": [*engine.notes, *_cache_notes(setup), *_own_notes(setup)],
        "not_modelled": list(NOT_MODELLED),
    }


def _outside(setup: Setup, cluster: Cluster) -> dict[str, float]:
    """Family -> share of the step time priced outside what was measured; of a datasheet, where all is, nothing."""
    if setup.cost.provenance["kind"] == "datasheet":
        return {}
    steps = cluster.log.steps.table().blocks()
    return outside_shares(setup.model, setup.layout, setup.engine, setup.prices, setup.cost, steps)


def _cache_notes(setup: Setup) -> list[str]:
    if setup.engine.sources.get("enable_prefix_caching", "").startswith("off"):
        return ["prefix caching is off: it is not simulated for models whose layers have windows"]
    if not setup.engine.enable_prefix_caching or setup.requests.trace.prefix is not None:
        return []
    found = "preempted requests" if setup.requests.trace.samples is None else "preempted requests, and other samples,"
    return [f"prefix caching is on, but nobody knows what prompts share here: only {found} are found again"]


def _own_notes(setup: Setup) -> list[str]:
    own = setup.scenario.engine.get("scheduler")
    return [] if own is None else [f"steps are planned by {own}, not by {setup.engine.preset}'s scheduler"]


def _source(setup: Setup) -> Source:
    r, t = setup.requests, setup.requests.trace
    requests = Requests(t.prompt_tokens, t.output_tokens, t.max_tokens, t.patience_s, r.priority, t.samples)
    if r.concurrency is not None:
        return ClosedLoop(r.concurrency, requests, r.think_s)
    if r.follow:
        assert t.turns is not None
        return Sessions(t.arrival_s, requests, t.turns.previous, t.turns.think_s)
    return OpenLoop(t.arrival_s, requests)


def _classes(setup: Setup) -> Classes | None:
    r = setup.requests
    return None if r.trace.classes is None else Classes(*r.trace.classes, r.slo or {})


def _pool(setup: Setup) -> Pool:
    engine, scheduler = setup.engine, setup.scheduler
    return Pool(
        replicas=setup.replicas,
        scheduler=scheduler,
        cost=setup.step_cost,
        num_blocks=setup.memory.usable_blocks + 1,  # a KV cache has a null block, which not every engine has
        block_size=engine.block_size,
        max_model_len=engine.max_model_len,
        asynchronous=engine.async_scheduling,
        front_end=engine.front_end,
        cache=_cache(setup, tables := tables_of(setup), scheduler),
        tables=tables,
    )


def tables_of(setup: Setup) -> Tables:
    """The block tables of the model's layers."""
    engine, pool = setup.engine, setup.memory.pool
    windows = []
    for window in setup.model.windows:
        alike = [g for g in pool.groups if g.kind == KINDS[window.chunked] and g.size == window.size]
        most = alike[0].most_blocks(engine.max_model_len, pool.in_flight) if alike else 0
        windows.append(Window(window.size, window.chunked, len(alike), most))
    rules = kv_rules(engine)
    whole = engine.policy.get("scheduler_reserve_full_isl", False)
    return Tables(
        full=sum(group.kind == "full" for group in pool.groups),
        windows=tuple(windows),
        admission="step" if not whole else "window" if rules.caps_admission else "prompt",
        late=rules.keeps_in_flight and engine.async_scheduling,
    )


def _cache(setup: Setup, tables: Tables, scheduler: Scheduler) -> Callable[[int, int], KVCache]:
    """What makes a replica's KV cache; prefix caches all have the same content in common."""
    trace, engine = setup.requests.trace, setup.engine
    if not engine.enable_prefix_caching:
        slides = any(window.tables for window in tables.windows)
        return partial(WindowCache, tables=tables) if slides else scheduler.cache
    known = None if trace.prefix is None else content_of(trace.prefix, trace.prompt_tokens, engine.block_size).path
    samples, size = trace.samples, engine.block_size
    paths = known if samples is None else shared_prompts(known, trace.prompt_tokens, samples, size)
    return lambda num_blocks, block_size: PrefixCache(num_blocks, block_size, paths, engine.blank_blocks_first)
