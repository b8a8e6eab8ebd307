"""What takes each cause away: changes of scenario keys, the gentlest first. By the names of the causes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from calibrate.options import family
from reports.diagnosing.facts import Price
from servecast.diagnosing.conditions import async_option, graphs_off, prefix_option
from servecast.diagnosing.evidence import Evidence
from servecast.planning.candidates import Candidate

BUDGETS = (512, 1024, 2048, 4096, 8192, 16384)
CONTINUOUS = "vllm-0.19"
"""What a server of static batches is replaced by: the preset that the project's accuracy is measured with most."""


@dataclass(frozen=True, slots=True)
class Change:
    """What is changed, in words, as keys of the scenario, and what it costs beside a setting."""

    words: str
    point: Mapping[str, Any]
    price: Price = ""


Changes = Iterator[Change]


def _set(e: Evidence, option: str | None, value: Any, price: Price = "") -> Changes:
    """One option of the engine."""
    if option is not None:
        yield Change(
            f"{option} {_said(value)}, not {_said(e.engine.options.get(option))}", {e.key(option): value}, price
        )


def _said(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "unset" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def capacity(e: Evidence) -> Changes:
    """More replicas."""
    for factor in (2, 4, 8):
        yield Change(
            f"{factor * e.replicas} replicas, not {e.replicas}", {e.place("replicas"): factor * e.replicas}, "gpus"
        )
        if not e.summary["saturated"]:
            return


def traffic(e: Evidence) -> Changes:
    """More of it."""
    closed, arrivals = e.setup.scenario.workload.closed_loop, e.setup.scenario.workload.arrivals
    for factor in (2, 4, 8):
        if closed is not None:
            clients = factor * closed.concurrency
            yield Change(
                f"{clients:,} clients, not {closed.concurrency:,}", {"workload.closed_loop.concurrency": clients}
            )
        elif arrivals is not None:
            rate = factor * arrivals["rate"]
            yield Change(f"{rate:g} requests/s, not {arrivals['rate']:g}", {"workload.arrivals.rate": rate})


def oversized(e: Evidence) -> Changes:
    """Fewer replicas."""
    for fewer in dict.fromkeys((max(1, e.replicas // 2), max(1, e.replicas // 4))):
        yield Change(f"{fewer} replica{'s' * (fewer > 1)}, not {e.replicas}", {e.place("replicas"): fewer})


def long_prompts(e: Evidence) -> Changes:
    """Smaller chunks."""
    chunking = e.option("enable_chunked_prefill")
    off = chunking is not None and e.engine.options[chunking] is False
    for budget in (b for b in reversed(BUDGETS[:4]) if b < e.budget or off):
        point = {e.key(str(e.budget_option)): budget} | ({e.key(str(chunking)): True} if off else {})
        with_chunks = f"{chunking}, " if off else ""
        yield Change(f"{with_chunks}{e.budget_option} {budget:,}, not {e.budget:,}", point)


def mixed(e: Evidence) -> Changes:
    """As many GPUs, some of which read and some answer."""
    n, layout = e.replicas, e.pool.layout
    for reads in dict.fromkeys((max(1, n // 4), max(1, n // 2))):
        split = Candidate(e.pool.gpu.id, layout.tp, 1, (), (reads, n - reads))
        yield Change(f"{reads} replica{'s' * (reads > 1)} that read{'s' * (reads == 1)} and {n - reads} that answer"
                     f"{'s' * (n - reads == 1)}, not {n} that do both", split.overrides(e.cluster))  # fmt: skip


def chunks(e: Evidence) -> Changes:
    """Larger chunks."""
    for budget in (b for b in BUDGETS if b > e.budget):
        yield from _set(e, e.budget_option, budget)


def few_places(e: Evidence) -> Changes:
    """More of them."""
    for factor in (2, 4, 16):
        yield from _set(e, e.option("max_num_seqs"), factor * e.engine.max_num_seqs)


def many_places(e: Evidence) -> Changes:
    """Fewer of them."""
    for factor in (2, 4):
        yield from _set(e, e.option("max_num_seqs"), max(1, e.steps.peak_batch // factor))


def kv_cache(e: Evidence) -> Changes:
    """More room, or smaller entries."""
    share, override = e.option("gpu_memory_utilization"), e.option("num_gpu_blocks_override")
    if override is not None and e.engine.options[override] is not None:
        yield from _set(e, override, None)
    if share is not None and float(e.engine.options[share]) < 0.94:
        yield from _set(e, share, 0.95)
    places = e.option("max_num_seqs")
    each = float((e.trace.prompt_tokens + e.trace.output_tokens).mean())
    fits = int(e.pool.memory.kv_tokens / each)
    if 0 < fits < e.steps.peak_batch:
        yield from _set(e, places, fits)
    dtype = e.option("kv_cache_dtype")
    if dtype is not None and not str(e.engine.kv_cache_dtype).startswith("fp8"):
        words = [word for word in family(e.engine.engine)["options"][dtype] if str(word).startswith("fp8")]
        yield from _set(e, dtype, words[0], "bits")
    yield from _more_gpus(e)


def _more_gpus(e: Evidence) -> Changes:
    tp = e.pool.layout.tp
    if 2 * e.pool.layout.gpus <= e.pool.gpu.gpus_per_node:
        yield Change(f"tp {2 * tp}, not {tp}: {2 * tp} GPUs a replica", {e.place("tp"): 2 * tp}, "gpus")


def lengths(e: Evidence) -> Changes:
    """As long as the model allows where requests are over it; as short as the longest request where it is reserved."""
    over = e.engine.max_model_len < e.longest
    yield from _set(e, e.option("max_model_len"), e.pool.model.max_position if over else -(-e.longest // 256) * 256)


def no_prefix_cache(e: Evidence) -> Changes:
    """It turned on."""
    yield from _set(e, *prefix_option(e) or (None, None))


def prefix_routing(e: Evidence) -> Changes:
    """Where most of a prompt's beginning was."""
    yield Change("router prefix-affinity", {"cluster.router": "prefix-affinity"})


def no_graphs(e: Evidence) -> Changes:
    """Graphs for all batches."""
    if off := graphs_off(e):
        words = ", ".join(f"{name} {_said(value)}" for name, value in off.items())
        yield Change(words, {e.key(name): value for name, value in off.items()})
        return
    names = ("max_cudagraph_capture_size", "cuda_graph_max_bs", "cuda_graph_config.max_batch_size")
    option = next((name for name in names if name in e.engine.options), None)
    yield from _set(e, option, e.steps.peak_batch)


def host(e: Evidence) -> Changes:
    """A host that plans ahead; and one that takes no time, which is a bound."""
    option = async_option(e)
    if option is not None and not e.engine.async_scheduling:
        yield from _set(e, *option)
    names = ("bubble", "step", "per_sequence")
    yield Change("a host that takes no time in a step", {e.host(name): "0s" for name in names}, "bound")


def batching(e: Evidence) -> Changes:
    """Another engine."""
    engine = "engine" if len(e.setup.pools) == 1 else e.place("engine")
    yield Change(f"{CONTINUOUS}, not {e.engine.preset}", {engine: {"preset": CONTINUOUS}})


def front_end(e: Evidence) -> Changes:
    """One that takes no time, which is a bound: of how many servers it consists is not modelled."""
    point = {e.host(name): "0s" for name in ("request", "prompt_token")}
    yield Change("a front end that takes no time", point, "bound")


def router(e: Evidence) -> Changes:
    """By loads."""
    now = e.setup.scenario.cluster.router["kind"]
    yield Change(f"router least-outstanding, not {now}", {"cluster.router": "least-outstanding"})


def weights(e: Evidence) -> Changes:
    """Fewer bits; or more GPUs that read them."""
    yield from _set(e, e.option("quantization"), "fp8", "bits")
    yield from _more_gpus(e)


def link(e: Evidence) -> Changes:
    """Fewer GPUs a replica, and more replicas: as many GPUs."""
    before, tp = e.pool.layout.tp, e.pool.layout.tp // 2
    while tp >= 1:
        replicas = e.replicas * before // tp
        point = {e.place("tp"): tp, e.place("replicas"): replicas, "cluster.router": "least-outstanding"}
        gpus = f"{tp} GPU{'s' * (tp > 1)}"
        yield Change(f"{replicas} replicas of {gpus}, not {e.replicas} of {before} GPUs", point)
        tp //= 2


def starved(e: Evidence) -> Changes:
    """The class that waits first; or no class first, where one goes first already."""
    classes = e.setup.scenario.workload.classes or []
    if e.engine.options["scheduling_policy"] == "priority":
        same: dict[str, Any] = {f"workload.classes.{i}.priority": 0 for i, part in enumerate(classes) if part.priority}
        same |= {} if e.setup.scenario.workload.priority is None else {"workload.priority": None}
        yield Change("no class first: scheduling_policy fcfs", {e.key("scheduling_policy"): "fcfs"} | same)
        return
    names = {symptom.group for symptom in e.symptoms if symptom.group}
    for i, part in enumerate(classes):
        if part.name in names:
            point = {e.key("scheduling_policy"): "priority", f"workload.classes.{i}.priority": -1}
            yield Change(f"{part.name} first: scheduling_policy priority, its priority -1", point)


def failing(e: Evidence) -> Changes:
    """None of it."""
    point: dict[str, Any] = {}
    if e.setup.scenario.cluster.pools[e.index].failures is not None:
        point[e.place("failures")] = None
    if e.setup.scenario.cluster.events is not None:
        point["cluster.events"] = None
    yield Change("replicas that do not fail", point, "bound")


def gateway(e: Evidence) -> Changes:
    """Without its limits."""
    yield Change("no limits at the gateway", {"cluster.limits": None})
