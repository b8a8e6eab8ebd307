"""From a pool of the scenario to what its replicas are made of: every name looked up, every default resolved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

from calibrate.connectors import load_transfer_link
from calibrate.cost import CompiledCost, StepCost, compile_cost
from calibrate.draft_worth import DraftWorth, worth
from calibrate.engine import EngineSpec, resolve_engine
from calibrate.fixes import require_fit
from calibrate.group_cost import GroupCost, group_cost
from calibrate.hardware import Gpu, load_gpu
from calibrate.layout import Parallelism, check_layout, check_nodes
from calibrate.layout_rules import check_engine_layout
from calibrate.memory import Logged, MemoryPlan
from calibrate.model import ModelSpec
from calibrate.models import load_model
from calibrate.options import family
from calibrate.pipeline import InSeries, PipelineCost, pipeline_cost
from calibrate.prices import Prices
from calibrate.scaled import PRICED, Scaled
from calibrate.serving import checked_windows, served
from calibrate.speculation import check_draft, draft_of
from calibrate.speculative_cost import SpeculativeCost, speculative_cost
from calibrate.swapping import swap_block_s, swap_blocks
from calibrate.ubatch import InPieces
from servecast.errors import ServecastError
from servecast.host_part import HostPart, with_host
from servecast.keyed import keyed
from servecast.own_policy import own_policy, split
from servecast.parts import is_path
from servecast.profiles import DATASHEET, prices_of
from servecast.scenario import PoolPart, Scenario
from servecast.speculation import drafting_of, no_drafts
from servecast.tiers import offload_of
from sim.drafts import Drafting
from sim.offload import Offload
from sim.schedulers import Scheduler, scheduler_of
from sim.schedulers.vllm_v0 import VllmV0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PoolSetup:
    """A pool with everything resolved: `replicas` engines at most, alike."""

    name: str
    role: Literal["unified", "prefill", "decode"]
    weight: float
    replicas: int
    serves: str  # the model, as the scenario calls it
    model: ModelSpec
    gpu: Gpu
    layout: Parallelism
    engine: EngineSpec
    memory: MemoryPlan
    prices: Prices
    cost: CompiledCost
    scheduler: Scheduler
    group: GroupCost | None = None
    pipeline: PipelineCost | InSeries | None = None
    drafts: SpeculativeCost | None = None
    drafting: Drafting | None = None
    offload: Offload | None = None

    @property
    def step_cost(self) -> StepCost:
        """What a step takes; in pieces, stage by stage, or with drafts, where the engine computes it so."""
        if self.drafts is not None:
            return self.drafts
        if isinstance(self.pipeline, InSeries):
            return self.pipeline
        pieces = self.engine.ubatch_tokens
        return InPieces(self.cost, pieces) if pieces else self.cost

    def draft_worth(self, context: int, most: int) -> DraftWorth | None:
        """What its drafts are worth to up to `most` sequences of so many tokens; None where it makes none."""
        if self.drafts is None or self.drafting is None:
            return None
        return worth(self.drafts, self.drafting.length, self.drafting.proposes, context, most)

    @property
    def engines(self) -> int:
        """Engines in the whole pool, each with a queue and a KV cache."""
        return self.replicas * self.layout.dp

    @property
    def gpus(self) -> int:
        """GPUs in the whole pool."""
        return self.replicas * self.layout.gpus


def set_up_pool(scenario: Scenario, index: int, problems: list[str]) -> PoolSetup | EngineSpec | None:
    """Resolve pool `index`; its mistakes are added to `problems`, each with its key. Where there are any, what is known
    of its engine."""
    part, found = scenario.cluster.pools[index], list[str]()

    def ask(call: Callable[[], T]) -> T | None:
        try:
            return call()
        except ServecastError as error:
            found.extend(error.problems)
            return None

    word = scenario.model if part.model is None else part.model
    where = "model" if part.model is None else f"cluster.pools.{index}.model"
    path = scenario.path_of(where, word)
    named = ask(lambda: keyed("model", lambda: load_model(str(path) if is_path(word) else word)))
    gpu, layout = load_gpu(part.gpu), _layout(part)
    host = scenario.host if part.host is None else part.host
    engine = model = memory = scheduler = costed = drafting = offload = None
    prices = ask(lambda: keyed("cluster.profile", lambda: prices_of(gpu, profile_of(scenario, index))))
    if prices and host.kernels is not None:
        prices = Scaled(prices, dict.fromkeys(PRICED, host.kernels))
    if named:
        engine = ask(lambda: _engine(scenario, index, host, gpu, named, layout))
        model = ask(lambda: keyed("engine", lambda: checked_windows(served(named, engine), engine))) if engine else None
        scheduler = ask(lambda: _scheduler(scenario, index, engine)) if engine else None
        wrong = [*check_layout(model or named, layout, gpu), *check_nodes(layout, gpu)]
        wrong += check_engine_layout(model, layout, engine) if model and engine else []
        found += [p if p.startswith("engine.") else f"cluster.{_key(p)}: {p}" for p in wrong]
        if layout.dp > 1 and named.experts is None:
            wrong.append("dp")
            found.append(
                f"cluster.dp: {named.name} has no experts, and engines that share none step on their own; use replicas"
            )
        found += _no_stages(part, named, engine, scenario.pool_engine(index).get("scheduler"))
        if engine and model:
            own = scenario.pool_engine(index).get("scheduler")
            tiers = part.kv_tiers or engine.options.get("kv_offloading_size")
            found += (refused := list(no_drafts(model, layout, engine, part.role, own, tiers)))
            said = scenario.speculation if part.speculation is None else part.speculation
            drafting = ask(lambda: drafting_of(said, engine, scenario.seed))
            drafter = None if refused else ask(lambda: draft_of(model, engine))
            if drafter and not wrong:
                wrong += (lacks := check_draft(drafter, layout, gpu))
                found += lacks
        table, experts = part.experts.load, named.experts
        if isinstance(table, list) and experts is not None and len(table) != experts.count:
            wrong.append("load")
            found.append(f"cluster.experts.load: {len(table)} shares; {named.name} has {experts.count} experts")
        if model and engine and not wrong:
            logged = Logged(**dict(scenario.memory if part.memory is None else part.memory))
            memory = ask(lambda: keyed("engine", lambda: require_fit(model, layout, gpu, engine, logged)))
            if memory and scheduler:
                known = model, gpu, layout, engine, memory, scheduler
                offload = ask(lambda: offload_of(scenario, index, *known))
            if prices and not found:
                costed = ask(lambda: keyed("model", lambda: costs(model, layout, engine, prices)))
    problems += _placed(scenario, index, found)
    if not (model and engine and memory and prices and costed and scheduler):
        return engine
    cost, group, pipeline, drafts = costed
    if isinstance(scheduler, VllmV0) and scheduler.swaps:
        scheduler = replace(scheduler, swap_blocks=swap_blocks(engine, memory))
    if scheduler.swaps:
        cost = replace(cost, swap_block_s=swap_block_s(model, gpu, memory))
    name = scenario.cluster.names[index]
    return PoolSetup(
        name, part.role, part.weight, scenario.cluster.most(index), word, model, gpu, layout, engine, memory, prices,
        cost, scheduler, group, pipeline, drafts, drafting, offload,
    )  # fmt: skip


class Costs(NamedTuple):
    """What an engine's steps cost, of a pipeline those of its first stage; what those of all engines together do, where
    they step together; what those of all stages do, where there are several; and what steps with drafts do."""

    cost: CompiledCost
    group: GroupCost | None = None
    pipeline: PipelineCost | InSeries | None = None
    drafts: SpeculativeCost | None = None


def costs(model: ModelSpec, layout: Parallelism, engine: EngineSpec, prices: Prices) -> Costs:
    """Raises `ServecastError` as `compile_cost` does."""
    return _costs(model, layout, _Engine(engine, prices))


@dataclass(frozen=True, slots=True, eq=False)
class _Engine:
    """An engine and its prices as the key of a cache: equal to others of the same prices where the engine is."""

    engine: EngineSpec
    prices: Prices

    def __hash__(self) -> int:
        return id(self.prices)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Engine) and self.prices is other.prices and self.engine == other.engine


@lru_cache(maxsize=8)
def _costs(model: ModelSpec, layout: Parallelism, key: _Engine) -> Costs:
    """A sweep asks for the same ones again and again."""
    engine, prices = key.engine, key.prices
    if layout.pp > 1:
        pipeline = pipeline_cost(model, layout, engine, prices)
        return Costs(pipeline.stages[0].cost, pipeline=pipeline)
    if layout.dp == 1:
        cost = compile_cost(model, layout, engine.undrafted, prices)
        if engine.speculation is not None:
            return Costs(cost, drafts=speculative_cost(model, layout, engine, prices, cost))
        return Costs(cost)
    group = group_cost(model, layout, engine, prices)
    return Costs(group.own, group)


def _no_stages(part: PoolPart, model: ModelSpec, engine: EngineSpec | None, own: object) -> Iterator[str]:
    """Why the layers of a model cannot be on several pipeline stages here."""
    if part.pp == 1:
        return
    if engine is not None and not engine.pipeline:
        yield (
            f"cluster.pp: how batches of {engine.preset} follow each other through pipeline stages is not modelled; "
            "take vLLM 0.10 or later, or more tp"
        )
    if part.dp > 1:
        yield "cluster.pp: stages of engines that share experts (dp) are not modelled; set pp or dp to 1"
    if part.role != "unified":
        yield "cluster.pp: stages on one side of split prefill and decode are not modelled; leave pp out there"
    if model.windows:
        yield f"cluster.pp: {model.name} has layers with windows, whose stages are not modelled; leave pp out"
    if own is not None:
        yield "cluster.pp: a policy of your own plans for one stage; leave pp or engine.scheduler out"


def _layout(part: PoolPart) -> Parallelism:
    experts = part.experts
    return Parallelism(
        part.tp,
        part.pp,
        dp=part.dp,
        dcp=part.dcp,
        pcp=part.pcp,
        ep=part.ep,
        network=None if part.network is None else load_transfer_link(part.network),
        redundant_experts=experts.redundant,
        expert_load=tuple(experts.load) if isinstance(experts.load, list) else experts.load or "",
        all2all_backend=experts.all2all,
    )


def _key(problem: str) -> str:
    """The key of what is wrong with a layout: the first word of the sentence, or tp."""
    word = problem.split(" ")[0].rstrip(":")
    keys = {
        "redundant_experts": "experts.redundant",
        "all2all_backend": "experts.all2all",
        "expert_load": "experts.load",
    }
    if "no network between nodes" in problem:
        return "network"
    return keys.get(word, word if word in ("tp", "pp", "dp", "ep", "dcp", "pcp") else "tp")


def _placed(scenario: Scenario, index: int, found: list[str]) -> Iterator[str]:
    """The mistakes of a pool under the keys where they were written; which pool, where that does not say it."""
    part, several = scenario.cluster.pools[index], len(scenario.cluster.pools) > 1
    pool = f"cluster.pools.{index}"
    for problem in found:
        key = problem.partition(":")[0].split(" ")[0]
        head, _, rest = key.partition(".")
        own = head == "model" and part.model is not None
        if head == "engine" and part.engine is not None:
            own = rest.partition(".")[0] in part.engine or not rest
        if own:
            yield f"{pool}.{problem}"
        elif head == "cluster" and several:
            yield f"{pool}.{problem.removeprefix('cluster.')}"
        elif several:
            yield f"{problem} (pool {index}, {part.gpu})"
        else:
            yield problem


def _engine(
    scenario: Scenario, index: int, host: HostPart, gpu: Gpu, model: ModelSpec, layout: Parallelism
) -> EngineSpec:
    options = {key: value for key, value in scenario.pool_engine(index).items() if key != "scheduler"}
    drafts = options.get("speculative_config")
    if isinstance(drafts, dict) and isinstance(word := drafts.get("model"), str) and is_path(word):
        where = f"cluster.pools.{index}.engine.speculative_config.model"
        path = scenario.path_of("engine.speculative_config.model", word, where)
        options["speculative_config"] = drafts | {"model": str(path)}
    engine = resolve_engine(options, gpu, model, layout)
    if own := family(engine.engine).get("sides", {}).get(scenario.cluster.pools[index].role):
        engine = resolve_engine(options | own, gpu, model, layout)
    engine = with_host(engine, host)
    return replace(engine, notes=(*engine.notes, *scenario.notes)) if index == 0 else engine


def _scheduler(scenario: Scenario, index: int, engine: EngineSpec) -> Scheduler:
    """The preset's policy, or the user's own."""
    if (word := scenario.pool_engine(index).get("scheduler")) is None:
        return scheduler_of(engine, scenario.cluster.pools[index].role)
    file, name = split(word)
    where = f"cluster.pools.{index}.engine.scheduler"
    return own_policy(scenario.path_of("engine.scheduler", file, where), name, engine)


def profile_of(scenario: Scenario, index: int) -> Path | str | None:
    """The profile that the scenario asks for: a file, "datasheet", or None."""
    profile = scenario.cluster.pools[index].profile
    if profile in (None, DATASHEET):
        return profile
    return scenario.path_of("cluster.profile", profile, f"cluster.pools.{index}.profile")
