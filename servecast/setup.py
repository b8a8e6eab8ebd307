"""From a scenario to the things that run: every name looked up, every default resolved, everything checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from calibrate.cost import CompiledCost, StepCost, compile_cost
from calibrate.engine import EngineSpec, resolve_engine
from calibrate.fixes import require_fit
from calibrate.hardware import Gpu, load_gpu
from calibrate.layout import Parallelism, check_layout
from calibrate.memory import Logged, MemoryPlan
from calibrate.model import ModelSpec
from calibrate.models import load_model
from calibrate.options import family, nested
from calibrate.prices import Prices
from calibrate.scaled import PRICED, Scaled
from calibrate.serving import checked_windows, served
from calibrate.ubatch import InPieces
from servecast.errors import ServecastError
from servecast.keyed import keyed
from servecast.own_policy import own_policy, split
from servecast.profiles import DATASHEET, prices_of
from servecast.requests import Requests, requests_of
from servecast.scenario import HostPart, Scenario, is_path
from sim.schedulers import Scheduler, scheduler_of

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Setup:
    """A scenario with everything resolved."""

    scenario: Scenario
    model: ModelSpec
    gpu: Gpu
    layout: Parallelism
    replicas: int
    engine: EngineSpec
    memory: MemoryPlan
    prices: Prices
    cost: CompiledCost
    requests: Requests
    scheduler: Scheduler

    @property
    def step_cost(self) -> StepCost:
        """What a step takes; in pieces, where the engine computes it so."""
        pieces = self.engine.ubatch_tokens
        return InPieces(self.cost, pieces) if pieces else self.cost

    @property
    def gpus(self) -> int:
        """GPUs in the whole cluster."""
        return self.replicas * self.layout.gpus

    def resolved(self) -> dict[str, Any]:
        """The scenario as a plain mapping that can be loaded again, with every engine option filled in."""
        plain: dict[str, Any] = self.scenario.model_dump(exclude_none=True, exclude_defaults=True)
        plain["name"] = self.scenario.name
        plain["engine"] = {"preset": self.engine.preset} | nested(self.engine.options)
        if (own := self.scenario.engine.get("scheduler")) is not None:
            file, name = split(own)
            plain["engine"]["scheduler"] = f"{self.scenario.path_of('engine.scheduler', file).resolve()}:{name}"
        plain["cluster"] = self.scenario.cluster.model_dump(exclude_none=True)
        for pool in plain["cluster"]["pools"]:
            if pool.get("profile", DATASHEET) != DATASHEET:
                pool["profile"] = str(Path(_profile(self.scenario) or "").resolve())
        plain["seed"] = self.scenario.seed
        workload = plain["workload"]
        lengths = [(workload.get("lengths", {}), "workload.lengths")]
        lengths += [(c["lengths"], f"workload.classes.{i}.lengths") for i, c in enumerate(workload.get("classes", []))]
        places = [(workload, "workload"), *lengths]
        places += [(workload.get(part, {}), f"workload.{part}") for part in ("prometheus", "servegen")]
        for part, key in places:
            for name in {"trace", "scrape", "earlier", "pool"} & part.keys():
                part[name] = str(self.scenario.path_of(f"{key}.{name}", part[name]).resolve())
        return plain


def set_up(scenario: Scenario) -> Setup:
    """Resolve `scenario`. Raises ServecastError with every problem of every part."""
    problems: list[str] = []

    def ask(call: Callable[[], T]) -> T | None:
        try:
            return call()
        except ServecastError as error:
            problems.extend(error.problems)
            return None

    pool = scenario.cluster.pools[0]
    if len(scenario.cluster.pools) > 1 or pool.role != "unified":
        problems.append("cluster.pools: only one pool of role unified is modelled yet")
    path = scenario.path_of("model", scenario.model)
    named = ask(lambda: keyed("model", lambda: load_model(str(path) if is_path(scenario.model) else scenario.model)))
    gpu = load_gpu(pool.gpu)
    layout = Parallelism(pool.tp)
    engine = model = memory = cost = scheduler = None
    prices = ask(lambda: keyed("cluster.profile", lambda: prices_of(gpu, _profile(scenario))))
    if prices and scenario.host.kernels is not None:
        prices = Scaled(prices, dict.fromkeys(PRICED, scenario.host.kernels))
    if named:
        engine = ask(lambda: _engine(scenario, gpu, named, layout))
        model = ask(lambda: keyed("engine", lambda: checked_windows(served(named, engine), engine))) if engine else None
        scheduler = ask(lambda: _scheduler(scenario, engine)) if engine else None
        wrong = check_layout(model or named, layout, gpu)
        problems += [p if p.startswith("cluster.") else f"cluster.tp: {p}" for p in wrong]
        if model and engine and not wrong:
            logged = Logged(**dict(scenario.memory))
            memory = ask(lambda: keyed("engine", lambda: require_fit(model, layout, gpu, engine, logged)))
            if prices:
                cost = ask(lambda: keyed("model", lambda: compile_cost(model, layout, engine, prices)))
    requests = ask(lambda: requests_of(scenario, None if engine is None else engine.max_model_len))
    if engine and scheduler and requests and requests.priority is not None and not scheduler.by_priority:
        key = "workload.classes: they" if scenario.workload.priority is None else "workload.priority: requests"
        problems.append(f"{key} have priorities, {_no_priorities(engine)}, or take the priorities out")
    if engine and requests and requests.trace.samples is not None:
        kind = family(engine.engine)
        if why := kind.get("no_samples"):
            problems.append(
                f"workload: requests ask for several samples of one prompt (n), which {kind['title']} does in its own "
                f"way: {why}. Take n out, or take a preset of vLLM, where each sample is a request"
            )
    if problems:
        raise ServecastError(*(scenario.at(problem) for problem in problems))
    assert model
    assert engine
    assert memory
    assert prices
    assert cost
    assert requests
    assert scheduler
    return Setup(scenario, model, gpu, layout, pool.replicas, engine, memory, prices, cost, requests, scheduler)


def _engine(scenario: Scenario, gpu: Gpu, model: ModelSpec, layout: Parallelism) -> EngineSpec:
    engine = with_host(resolve_engine(scenario.engine_options, gpu, model, layout), scenario.host)
    return replace(engine, notes=(*engine.notes, *scenario.notes))


def _scheduler(scenario: Scenario, engine: EngineSpec) -> Scheduler:
    """The preset's policy, or the user's own."""
    if (word := scenario.engine.get("scheduler")) is None:
        return scheduler_of(engine)
    file, name = split(word)
    return own_policy(scenario.path_of("engine.scheduler", file), name, engine)


def with_host(engine: EngineSpec, host: HostPart) -> EngineSpec:
    """The engine with the times of the host and the front end that the scenario gives."""
    times = {
        "sync_base_s": host.step, "async_base_s": host.step, "bubble_s": host.bubble,
        "sync_per_sequence_s": host.per_sequence, "async_per_sequence_s": host.per_sequence,
        "compiled_layer_s": host.layer, "uncaptured_layer_s": host.layer, "eager_layer_s": host.layer,
    }  # fmt: skip
    front_end = {"request_s": host.request, "prompt_token_s": host.prompt_token}
    return replace(
        engine,
        host=replace(engine.host, **{name: s for name, s in times.items() if s is not None}),
        front_end=replace(engine.front_end, **{name: s for name, s in front_end.items() if s is not None}),
    )


def _no_priorities(engine: EngineSpec) -> str:
    if "scheduling_policy" in engine.options:
        return "which vLLM refuses unless the engine's scheduling_policy is priority; set that"
    return f"which {engine.preset} does not look at; take an engine that does"


def _profile(scenario: Scenario) -> Path | str | None:
    """The profile that the scenario asks for: a file, "datasheet", or None."""
    profile = scenario.cluster.pools[0].profile
    if profile in (None, DATASHEET):
        return profile
    return scenario.path_of("cluster.profile", profile, "cluster.pools.0.profile")


def memory_facts(plan: MemoryPlan) -> dict[str, Any]:
    """The memory plan as plain numbers, for the manifest."""
    names = ("visible_bytes", "budget_bytes", "weight_bytes", "activation_bytes", "cuda_graph_bytes",
             "communication_bytes", "non_torch_bytes", "kv_bytes", "kv_bytes_per_token", "block_size", "num_gpu_blocks",
             "max_concurrency", "overridden", "kv_tokens")  # fmt: skip
    return {name: getattr(plan, name) for name in names}
