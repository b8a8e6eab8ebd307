"""From a scenario to the things that run: every name looked up, every default resolved, everything checked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from calibrate.engine import EngineSpec
from calibrate.options import family, nested
from servecast.changes import changes_of, no_cold_start, wrong_changes
from servecast.costing.cost import Costing, costing_of
from servecast.costing.prices import split_path
from servecast.errors import ServecastError, one_of
from servecast.own_policy import split
from servecast.pools import PoolSetup, profile_of, set_up_pool
from servecast.profiles import DATASHEET
from servecast.requests import Requests, requests_of
from servecast.scenario import Scenario
from servecast.split import not_split, split_of, wrong_roles
from sim.changes import Changes
from sim.handover import Split
from sim.schedulers.vllm_v1 import VllmV1


@dataclass(frozen=True, slots=True)
class Setup:
    """A scenario with everything resolved."""

    scenario: Scenario
    pools: tuple[PoolSetup, ...]
    requests: Requests
    costing: Costing
    split: Split | None = None
    changes: Changes | None = None

    @property
    def pool(self) -> PoolSetup:
        """The only pool. Raises ServecastError where there are several: what asks for it can handle one."""
        if len(self.pools) > 1:
            count = len(self.pools)
            raise ServecastError(
                f"cluster.pools: this works on a scenario with one pool, not {count}; give one of them"
            )
        return self.pools[0]

    def with_pool(self, **changes: Any) -> Setup:
        """The same with a few fields of the only pool changed."""
        return replace(self, pools=(replace(self.pool, **changes),))

    @property
    def models(self) -> list[str]:
        """The models that are served, as the scenario calls them."""
        return list(dict.fromkeys(pool.serves for pool in self.pools))

    @property
    def gpus(self) -> int:
        """GPUs in the whole cluster."""
        return sum(pool.gpus for pool in self.pools)

    def resolved(self) -> dict[str, Any]:
        """The scenario as a plain mapping that can be loaded again, with every engine option filled in."""
        plain: dict[str, Any] = self.scenario.model_dump(exclude_none=True, exclude_defaults=True)
        plain["name"] = self.scenario.name
        plain["cluster"] = self.scenario.cluster.model_dump(exclude_none=True)
        engines = [self._resolved_engine(i) for i in range(len(self.pools))]
        alike = all(engine == engines[0] for engine in engines)
        if alike:
            plain["engine"] = engines[0]
        for i, pool in enumerate(plain["cluster"]["pools"]):
            pool.pop("engine", None)
            if not alike:
                pool["engine"] = engines[i]
            if pool.get("profile", DATASHEET) != DATASHEET:
                pool["profile"] = str(Path(profile_of(self.scenario, i) or "").resolve())
        plain["seed"] = self.scenario.seed
        workload = plain["workload"]
        lengths = [(workload.get("lengths", {}), "workload.lengths")]
        lengths += [(c["lengths"], f"workload.classes.{i}.lengths") for i, c in enumerate(workload.get("classes", []))]
        places = [(workload, "workload"), *lengths]
        places += [(workload.get(part, {}), f"workload.{part}") for part in ("prometheus", "servegen")]
        for part, key in places:
            for name in {"trace", "scrape", "earlier", "pool"} & part.keys():
                part[name] = str(self.scenario.path_of(f"{key}.{name}", part[name]).resolve())
        if isinstance(prices := plain.get("cost", {}).get("prices"), str) and (file := split_path(prices)):
            path = str(self.scenario.path_of("cost.prices", file[0]).resolve())
            plain["cost"]["prices"] = path if file[1] is None else f"{path}:{file[1]}"
        return plain

    def _resolved_engine(self, index: int) -> dict[str, Any]:
        engine = self.pools[index].engine
        plain = {"preset": engine.preset} | nested(engine.options)
        if (own := self.scenario.pool_engine(index).get("scheduler")) is not None:
            file, name = split(own)
            where = f"cluster.pools.{index}.engine.scheduler"
            plain["scheduler"] = f"{self.scenario.path_of('engine.scheduler', file, where).resolve()}:{name}"
        return plain


def set_up(scenario: Scenario) -> Setup:
    """Resolve `scenario`. Raises ServecastError with every problem of every part."""
    problems: list[str] = []
    found = [set_up_pool(scenario, index, problems) for index in range(len(scenario.cluster.pools))]
    pools = tuple(each for each in found if isinstance(each, PoolSetup))
    engines = [each.engine if isinstance(each, PoolSetup) else each for each in found]
    lengths = [engine.max_model_len for engine in engines if engine is not None]
    requests = None
    try:
        requests = requests_of(scenario, min(lengths) if len(lengths) == len(found) else None)
    except ServecastError as error:
        problems += error.problems
    if requests and requests.priority is not None:
        problems += _no_priorities(scenario, pools)
    problems += wrong_roles(scenario)
    problems += wrong_changes(scenario)
    if len(pools) == len(found):
        problems += no_cold_start(scenario, pools)
    problems += not_split(pools, requests)
    problems += _wrong_models(scenario)
    if any(pool.drafting for pool in pools) and any(
        (pool.engine.options.get("stream_interval") or 1) > 1 for pool in pools
    ):
        problems.append("engine.stream_interval: with speculative decoding only 1 is modelled; take one of the two out")
    if requests and requests.trace.samples is not None:
        problems += _no_samples(pools)
        if any(pool.offload for pool in pools):
            problems.append("workload: several samples of one prompt (n) are not simulated with KV tiers; take n out")
    if requests:
        problems += _wrong_routers(scenario, requests)
        problems += _unknown_streams(scenario, pools, requests)
        problems += _no_retries(scenario, requests)
        problems += _no_holds(scenario, pools, requests)
    split = costing = None
    try:
        costing = costing_of(scenario)
    except ServecastError as error:
        problems += error.problems
    if requests and not problems:
        try:
            split = split_of(scenario, pools, requests)
        except ServecastError as error:
            problems += error.problems
    if problems:
        raise ServecastError(*(scenario.at(problem) for problem in dict.fromkeys(problems)))
    assert requests
    assert costing
    return Setup(scenario, pools, requests, costing, split, changes_of(scenario, pools, requests))


def _wrong_models(scenario: Scenario) -> Iterator[str]:
    """How the models that requests ask for are not those that pools serve."""
    served = list(dict.fromkeys(pool.model or scenario.model for pool in scenario.cluster.pools))
    classes = scenario.workload.classes or []
    if len(served) > 1 and not classes:
        yield (
            f"cluster.pools: they serve {one_of(served)}, and nothing says which requests ask for which; give the "
            "workload classes, each with its model"
        )
    for i, part in enumerate(classes):
        if part.model is None and len(served) > 1:
            yield f"workload.classes.{i}.model: missing; which of the models that are served: {one_of(served)}"
        if part.model is not None and part.model not in served:
            yield f"workload.classes.{i}.model: no pool serves {part.model}; served: {one_of(served)}"


def _wrong_routers(scenario: Scenario, requests: Requests) -> Iterator[str]:
    routers, trace = scenario.cluster.routers, requests.trace
    if (key := routers.get("session-affinity")) and trace.turns is None:
        yield f"{key}: session-affinity goes by sessions, and the workload has none; take another router"
    if (key := routers.get("prefix-affinity")) and trace.prefix is None:
        yield (
            f"{key}: prefix-affinity goes by what prompts begin with, and the workload does not say what they share; "
            "take another router"
        )


def _unknown_streams(scenario: Scenario, pools: tuple[PoolSetup, ...], requests: Requests) -> Iterator[str]:
    """What asks for the gaps between messages where the times of a request's tokens are not known."""
    asks = ["slo.gap"] * ("gap" in scenario.slo.limits())
    classes = scenario.workload.classes or []
    asks += [f"workload.classes.{i}.slo.gap" for i, part in enumerate(classes) if part.slo and part.slo.gap is not None]
    if any((pool.engine.options.get("stream_interval") or 1) > 1 for pool in pools):
        asks.append("engine.stream_interval")
    why = [f"pipelines (pp {pool.layout.pp}), whose batches take turns" for pool in pools if pool.layout.pp > 1][:1]
    if requests.trace.samples is not None:
        why.append("several samples of a prompt (n)")
    if scenario.cluster.split is not None and scenario.cluster.split.first_token == "prefill":
        why.append("a first token that the prefill side streams (cluster.split.first_token)")
    for key, reason in product(asks, why):
        yield f"{key}: the gaps between a request's tokens are not known of {reason}; take one of the two out"


def _no_retries(scenario: Scenario, requests: Requests) -> Iterator[str]:
    if requests.retries is None:
        return
    if requests.trace.samples is not None:
        yield "workload.timeout.retries: of several samples of a prompt (n) they are not modelled; take one of them out"
    if any(pool.role != "unified" for pool in scenario.cluster.pools):
        yield (
            "workload.timeout.retries: where prefill and decode are apart they are not modelled; give pools that do "
            "both, or take them out"
        )


def _no_holds(scenario: Scenario, pools: tuple[PoolSetup, ...], requests: Requests) -> Iterator[str]:
    """What KV that is held between turns does not go with."""
    if scenario.workload.hold_kv is None:
        return
    if not requests.follow:
        yield "workload.hold_kv: no request follows the answer of another here; take it out, or give sessions"
    if requests.trace.samples is not None:
        yield "workload.hold_kv: of several samples of a prompt (n) it is not modelled; take one of them out"
    for pool in pools:
        if not pool.engine.enable_prefix_caching:
            yield (
                "workload.hold_kv: without a prefix cache the next turn would not find what is held; set the engine's "
                "enable_prefix_caching, or take hold_kv out"
            )
        elif (
            pool.role != "unified" or pool.layout.pp > 1 or pool.layout.dp > 1 or not isinstance(pool.scheduler, VllmV1)
        ):
            yield (
                "workload.hold_kv: modelled for vLLM V1 replicas that read and answer, with pp 1 and dp 1; take "
                "hold_kv out, or change the others"
            )
        elif pool.offload is not None or pool.drafting is not None:
            what = "KV tiers" if pool.offload is not None else "speculative decoding"
            yield f"workload.hold_kv: not modelled together with {what}; take one of the two out"
        elif pool.model.windows:
            yield f"workload.hold_kv: not modelled for layers with windows, which {pool.model.name} has; take it out"


def _no_samples(pools: tuple[PoolSetup, ...]) -> Iterator[str]:
    for kind in (family(pool.engine.engine) for pool in pools):
        if why := kind.get("no_samples"):
            yield (
                f"workload: requests ask for several samples of one prompt (n), which {kind['title']} does in its own "
                f"way: {why}. Take n out, or take a preset of vLLM, where each sample is a request"
            )


def _no_priorities(scenario: Scenario, pools: tuple[PoolSetup, ...]) -> list[str]:
    key = "workload.classes: they" if scenario.workload.priority is None else "workload.priority: requests"
    return [
        f"{key} have priorities, {_lacks(pool.engine)}, or take the priorities out"
        for pool in pools
        if not pool.scheduler.by_priority
    ]


def _lacks(engine: EngineSpec) -> str:
    if "scheduling_policy" in engine.options:
        return "which vLLM refuses unless the engine's scheduling_policy is priority; set that"
    return f"which {engine.preset} does not look at; take an engine that does"
