"""The verb `run`: a scenario in, a result out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from calibrate.coverage import outside_shares
from calibrate.kvgroups import KINDS, kv_rules
from calibrate.pipeline import PipelineCost
from calibrate.utilisation import AtPeaks
from servecast.costing.cost import Costing
from servecast.errors import ServecastError
from servecast.manifest import manifest
from servecast.pools import PoolSetup
from servecast.scenario import Scenario
from servecast.setup import Setup, set_up
from sim.cluster import Cluster, Pool, Routing
from sim.deployment import Classes, Deployment, PoolFacts
from sim.hybridcache import HybridCache
from sim.kvcache import KVCache
from sim.offload import TieredCache
from sim.prefixcache import PrefixCache
from sim.radixcache import RadixCache
from sim.result import Result as Outcome
from sim.routers import Known
from sim.samples import shared_prompts
from sim.source import ClosedLoop, OpenLoop, Requests, Sessions, Source
from sim.tiers import Tier
from sim.windows import Tables, Window, WindowCache
from workloads.content import content_of

if TYPE_CHECKING:
    from servecast.exporting import Exported

GATEWAY_BLOCK_TOKENS = 16
"""How finely a gateway that goes by prefixes tells prompts apart: no coarser than engines' KV blocks."""


class Result(Outcome):
    """What happened, what it costs, and `save` with the report."""

    costing: Costing | None = None

    def summary(self) -> dict[str, Any]:
        """Flat figures: see `sim.result.Result.summary`, and for those of cost `servecast.costing.cost.Costing`."""
        return super().summary() | self._costs

    @cached_property
    def _costs(self) -> dict[str, Any]:
        return {} if self.costing is None else self.costing.summary(self, super().summary())

    def save(self, folder: str | Path) -> Path:
        """Write the tables, the summary, the manifest and `report.html`. Raises ServecastError when that fails."""
        from polars.exceptions import PolarsError

        from reports.html import report_html

        try:
            return self.write(folder, {"report.html": report_html(self)})
        except (OSError, PolarsError) as error:  # polars has its own word for a full disk
            reason = getattr(error, "strerror", None) or error
            raise ServecastError(f"{folder}: cannot write the results: {reason}") from None

    def export(self, format: str, out: str | Path | None = None, window: tuple[float, float] | None = None) -> Exported:
        """Write it in the format of another tool: see `servecast.exporting.export`."""
        from servecast.exporting import export

        return export(self, format, out, window)


def simulate(scenario: Scenario | Setup, keep_going: Callable[[int, int, float], bool] | None = None) -> Result:
    """Replay the scenario's workload.

    `keep_going(requests done, requests in all, simulated seconds)` is asked now and then; False ends the run early,
    with a partial result. Raises ServecastError for whatever cannot be run.
    """
    setup = scenario if isinstance(scenario, Setup) else set_up(scenario)
    source = _source(setup)
    cluster = Cluster(source, [_pool(setup, pool) for pool in setup.pools], _routing(setup), setup.changes)
    if keep_going is None:
        complete = cluster.run()
    else:
        complete = cluster.run(lambda done, now: keep_going(done, source.total, now))
    deployment = Deployment(tuple(_facts(pool) for pool in setup.pools))
    facts = manifest(setup)
    for pool, shares in zip(facts["pools"], _outside(setup, deployment, cluster), strict=True):
        if shares:
            pool["cost"]["outside"] = shares
    result = Result(
        cluster.log,
        deployment,
        setup.scenario.slo.limits(),
        facts,
        open_loop=setup.requests.concurrency is None and not setup.requests.follow,
        complete=complete,
        unsent=source.unsent,
        classes=_classes(setup),
        reasoning=setup.requests.reasoning,
    )
    result.costing = setup.costing
    return result


def _facts(pool: PoolSetup) -> PoolFacts:
    memory = pool.memory
    return PoolFacts(
        name=pool.name,
        replicas=pool.engines,
        gpus=pool.layout.gpus // pool.layout.dp,
        fixed_memory_bytes=memory.weight_bytes + memory.activation_bytes + memory.cuda_graph_bytes
        + memory.communication_bytes + memory.non_torch_bytes,
        kv_blocks=memory.usable_blocks,
        block_size=memory.block_size,
        kv_bytes_per_token=memory.kv_bytes_per_token,
        prefix_caching=pool.engine.enable_prefix_caching,
        role=pool.role,
        ranks=pool.layout.dp,
        peaks=AtPeaks(pool.model, pool.layout, pool.gpu),
        tiers=() if pool.offload is None else tuple(tier.name for tier in pool.offload.tiers),
        stream_interval=pool.engine.options.get("stream_interval") or 1,
        drafting=pool.drafting,
    )  # fmt: skip


def _outside(setup: Setup, deployment: Deployment, cluster: Cluster) -> list[dict[str, float]]:
    """A pool: family -> share of its step time priced outside what was measured; of a datasheet, where all is,
    nothing."""
    found = []
    for pool, first in zip(setup.pools, deployment.first, strict=False):
        shares: dict[str, float] = {}
        if pool.cost.provenance["kind"] != "datasheet":
            cost = pool.cost if pool.drafts is None else pool.drafts.target
            steps = cluster.log.steps.table()
            if len(setup.pools) > 1:
                steps = steps.where((steps["replica"] >= first) & (steps["replica"] < first + pool.engines))
            shares = outside_shares(pool.model, pool.layout, pool.engine, pool.prices, cost, steps.blocks())
        found.append(shares)
    return found


def _source(setup: Setup) -> Source:
    r, t = setup.requests, setup.requests.trace
    requests = Requests(
        t.prompt_tokens, t.output_tokens, t.max_tokens, t.patience_s, r.priority, t.samples, r.first_token_s, r.retries,
        r.backoff_s, r.network_s,
    )  # fmt: skip
    if (hold_s := setup.scenario.workload.hold_kv) is not None and t.turns is not None:
        requests = replace(requests, hold_s=np.full(len(t), hold_s), next_turn=t.turns.following())
    if r.concurrency is not None:
        return ClosedLoop(r.concurrency, requests, r.think_s)
    if r.follow:
        assert t.turns is not None
        return Sessions(t.arrival_s, requests, t.turns.previous, t.turns.think_s, t.turns.joins())
    return OpenLoop(t.arrival_s, requests)


def _classes(setup: Setup) -> Classes | None:
    r = setup.requests
    return None if r.trace.classes is None else Classes(*r.trace.classes, r.slo or {})


def _routing(setup: Setup) -> Routing:
    cluster = setup.scenario.cluster
    kind, parameters = cluster.router["kind"], {k: v for k, v in cluster.router.items() if k != "kind"}
    return Routing(
        kind,
        parameters,
        cluster.router_stale,
        setup.scenario.seed,
        _known(setup),
        _asks(setup),
        setup.split,
    )


def _known(setup: Setup) -> Known:
    """What the gateway looks at in requests."""
    trace, routers, paths, session = setup.requests.trace, setup.scenario.cluster.routers, None, None
    if "prefix-affinity" in routers and trace.prefix is not None:
        paths = content_of(trace.prefix, trace.prompt_tokens, GATEWAY_BLOCK_TOKENS).path
    if "session-affinity" in routers and trace.turns is not None:
        session = trace.turns.sessions().tolist().__getitem__
    return Known(paths, GATEWAY_BLOCK_TOKENS, session)


def _asks(setup: Setup) -> npt.NDArray[np.int64] | None:
    """int64[n]: the index of the model that each request asks for; None where all pools serve the same."""
    models = setup.models
    if len(models) == 1:
        return None
    assert setup.requests.trace.classes is not None
    parts = setup.scenario.workload.classes or []
    return np.array([models.index(part.model or "") for part in parts])[setup.requests.trace.classes[0]]


def _pool(setup: Setup, pool: PoolSetup) -> Pool:
    engine = pool.engine
    stages = pool.pipeline if isinstance(pool.pipeline, PipelineCost) else None
    return Pool(
        replicas=pool.engines,
        scheduler=pool.scheduler,
        cost=pool.step_cost,
        num_blocks=pool.memory.usable_blocks + 1,  # a KV cache has a null block, which not every engine has
        block_size=pool.memory.block_size,
        max_model_len=engine.max_model_len,
        asynchronous=engine.pipeline == "staggered" if stages else engine.async_scheduling,
        front_end=engine.front_end,
        cache=_cache(setup, pool, tables := tables_of(pool)),
        tables=tables,
        weight=pool.weight,
        serves=setup.models.index(pool.serves),
        role=pool.role,
        group=pool.group,
        ranks=pool.layout.dp,
        stages=stages,
        fills_queue=engine.fills_queue,
        drafting=pool.drafting,
    )


def tables_of(pool: PoolSetup) -> Tables:
    """The block tables of the model's layers."""
    engine, memory = pool.engine, pool.memory.pool
    windows = []
    for window in pool.model.windows:
        alike = [g for g in memory.groups if g.kind == KINDS[window.chunked] and g.size == window.size]
        most = alike[0].most_blocks(engine.max_model_len, memory.in_flight) if alike else 0
        windows.append(Window(window.size, window.chunked, len(alike), most))
    rules = kv_rules(engine)
    whole = engine.policy.get("scheduler_reserve_full_isl", False)
    return Tables(
        full=sum(group.kind == "full" for group in memory.groups),
        windows=tuple(windows),
        admission="step" if not whole else "window" if rules.caps_admission else "prompt",
        late=rules.keeps_in_flight and engine.async_scheduling,
        keeps_ends=rules.keeps_ends,
    )


def _cache(setup: Setup, pool: PoolSetup, tables: Tables) -> Callable[[int, int], KVCache]:
    """What makes a replica's KV cache; prefix caches all have the same content in common."""
    trace, engine = setup.requests.trace, pool.engine
    slides = any(window.tables for window in tables.windows)
    if not engine.enable_prefix_caching:
        return partial(WindowCache, tables=tables) if slides else pool.scheduler.cache
    tree = pool.scheduler.prefix_tree
    size = 1 if tree else pool.memory.block_size  # a tree looks at pages, but its queue at tokens
    known = None if trace.prefix is None else content_of(trace.prefix, trace.prompt_tokens, size).path
    times = trace.samples  # a prompt is sent so often
    if setup.requests.retries is not None:
        times = setup.requests.retries + 1
    paths = known if times is None else shared_prompts(known, trace.prompt_tokens, times, size)
    if tree:
        return lambda num_blocks, block_size: RadixCache(num_blocks, block_size, paths)
    if (offload := pool.offload) is not None:
        common = {i: Tier(spec) for i, spec in enumerate(offload.tiers) if spec.shared}

        def tiered(num_blocks: int, block_size: int) -> KVCache:
            tiers = [common.get(i) or Tier(spec) for i, spec in enumerate(offload.tiers)]
            return TieredCache(num_blocks, block_size, paths, engine.blank_blocks_first, offload, tiers)

        return tiered
    drops_last = engine.speculation is not None and engine.speculation.drops_last
    cache = partial(HybridCache, tables=tables) if slides else partial(PrefixCache, drops_last=drops_last)
    return lambda num_blocks, block_size: cache(num_blocks, block_size, paths, engine.blank_blocks_first)
