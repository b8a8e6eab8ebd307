"""From a scenario to the things that run: every name looked up, every default resolved, everything checked."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy as np

from calibrate.cost import StepCost, datasheet_cost
from calibrate.engine import MODELLED, EngineSpec, resolve_engine
from calibrate.hardware import Gpu, load_gpu
from calibrate.layout import Parallelism, check_layout
from calibrate.memory import MemoryPlan, plan_memory
from calibrate.model import ModelSpec
from calibrate.models import load_model
from servecast.errors import ServecastError
from servecast.scenario import LengthsPart, Scenario, WorkloadPart, is_path
from workloads.generate import Lengths, generate, generate_lengths
from workloads.readers import read_trace
from workloads.trace import Ints, Trace

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Requests:
    """What is submitted: int64[n] lengths, with float64[n] arrival times, or with the concurrency of a closed loop."""

    arrival_s: np.ndarray[Any, np.dtype[np.float64]] | None
    prompt_tokens: Ints
    output_tokens: Ints
    max_tokens: Ints
    concurrency: int | None
    source: str
    dropped: dict[str, int]
    notes: tuple[str, ...]


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
    cost: StepCost
    requests: Requests

    @property
    def gpus(self) -> int:
        """GPUs in the whole cluster."""
        return self.replicas * self.layout.gpus

    def resolved(self) -> dict[str, Any]:
        """The scenario as a plain mapping that can be loaded again, with every engine option filled in."""
        plain: dict[str, Any] = self.scenario.model_dump(exclude_none=True, exclude_defaults=True)
        plain["name"] = self.scenario.name
        plain["engine"] = {"preset": self.engine.preset} | {
            option: getattr(self.engine, option) for option in MODELLED if option in self.engine.sources
        }
        plain["cluster"] = self.scenario.cluster.model_dump()
        plain["seed"] = self.scenario.seed
        slo = {key: f"{value:.12g}s" for key, value in plain.get("slo", {}).items()}
        workload = plain["workload"]
        if "window" in workload:
            workload["window"] = [f"{seconds:.12g}s" for seconds in workload["window"]]
        for part, key in ((workload, "workload.trace"), (workload.get("lengths", {}), "workload.lengths.trace")):
            if "trace" in part:
                part["trace"] = str(self.scenario.path_of(key, part["trace"]).resolve())
        return {**plain, "slo": slo} if slo else plain


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
    model = ask(lambda: _keyed("model", lambda: load_model(str(path) if is_path(scenario.model) else scenario.model)))
    gpu = load_gpu(pool.gpu)
    layout = Parallelism(pool.tp)
    engine = memory = cost = None
    if model:
        engine = ask(lambda: resolve_engine(scenario.engine, gpu, model))
        wrong = check_layout(model, layout, gpu)
        problems += [p if p.startswith("cluster.") else f"cluster.tp: {p}" for p in wrong]
        if engine and not wrong:
            memory = ask(lambda: _keyed("engine", lambda: plan_memory(model, layout, gpu, engine)))
            cost = ask(lambda: _keyed("model", lambda: datasheet_cost(model, layout, gpu, engine)))
    requests = ask(lambda: _requests(scenario, engine))
    if problems:
        raise ServecastError(*(scenario.at(problem) for problem in problems))
    assert model
    assert engine
    assert memory
    assert cost
    assert requests
    return Setup(scenario, model, gpu, layout, pool.replicas, engine, memory, cost, requests)


def _keyed(key: str, call: Callable[[], T]) -> T:
    """Put the key path in front of problems that do not name one."""
    try:
        return call()
    except ServecastError as error:
        named = re.compile(r"(model|cluster|engine|workload)[.:]")
        raise ServecastError(*(p if named.match(p) else f"{key}: {p}" for p in error.problems)) from None


def _requests(scenario: Scenario, engine: EngineSpec | None) -> Requests:
    """The requests that the workload describes. Raises ServecastError with all that is wrong with it."""
    workload = scenario.workload
    if workload.trace is not None:
        trace = _keyed("workload.trace", lambda: _trace(scenario, workload))
        return _capped(workload, engine, trace.arrival_s, trace, None)
    assert workload.lengths is not None
    assert workload.num_requests is not None
    lengths = _lengths(scenario, workload.lengths)
    if workload.arrivals is not None:
        trace = generate(workload.num_requests, scenario.seed, workload.arrivals, lengths)
        return _capped(workload, engine, trace.arrival_s, trace, None)
    assert workload.closed_loop is not None
    prompt_tokens, output_tokens = generate_lengths(workload.num_requests, scenario.seed, lengths)
    source = f"generated: closed loop of {workload.closed_loop.concurrency} clients, seed {scenario.seed}"
    nothing = np.zeros(workload.num_requests)
    trace = Trace(nothing, prompt_tokens, output_tokens, output_tokens, source=source)
    return _capped(workload, engine, None, trace, workload.closed_loop.concurrency)


def _lengths(scenario: Scenario, part: LengthsPart) -> Lengths:
    if part.trace is None:
        return part.prompt or {}, part.output or {}
    path = scenario.path_of("workload.lengths.trace", part.trace)
    return _keyed("workload.lengths.trace", lambda: read_trace(path, part.format))


def _trace(scenario: Scenario, workload: WorkloadPart) -> Trace:
    assert workload.trace is not None
    trace = read_trace(scenario.path_of("workload.trace", workload.trace), workload.format)
    if workload.window is not None:
        trace = trace.window(workload.window[0], workload.window[1])
    if workload.rate_scale is not None:
        trace = trace.scale_rate(workload.rate_scale)
    return trace if workload.num_requests is None else trace.head(workload.num_requests)


def _capped(
    workload: WorkloadPart,
    engine: EngineSpec | None,
    arrival_s: np.ndarray[Any, np.dtype[np.float64]] | None,
    trace: Trace,
    concurrency: int | None,
) -> Requests:
    """The trace's requests under `workload.max_tokens`: a number for all, or what `max_model_len` leaves."""
    cap, output = trace.max_tokens, trace.output_tokens
    if isinstance(workload.max_tokens, int):
        over = int((output > workload.max_tokens).sum())
        if over:
            raise ServecastError(
                f"workload.max_tokens: {over:,} of {len(trace):,} requests have more output tokens "
                f"(up to {output.max():,}) than {workload.max_tokens:,}; raise it, or shorten the output lengths"
            )
        cap = np.full(len(trace), workload.max_tokens, dtype=np.int64)
    elif workload.max_tokens == "unlimited" and engine is not None:
        cap = np.maximum(engine.max_model_len - trace.prompt_tokens, output)
    return Requests(
        arrival_s, trace.prompt_tokens, output, cap, concurrency, trace.source, dict(trace.dropped), tuple(trace.notes)
    )


def memory_facts(plan: MemoryPlan) -> dict[str, Any]:
    """The memory plan as plain numbers, for the manifest."""
    return asdict(plan) | {"kv_tokens": plan.kv_tokens}
