"""How fast the simulator is: `python -m benchmarks [--oracle-requests N] [--million] [--five-million]`.

Each case runs in a process of its own. CPU seconds are of the simulation alone (the workload is made before); peak
memory is of the whole process, up to the saved result with its report where there is one (there also in bytes over the
number of requests). The naive engine of the tests runs the first requests of a case, and is compared with the fast
engine on the very same requests.
"""

from __future__ import annotations

import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.resources import files
from typing import Any

import click

import servecast
from servecast.requests import Requests
from servecast.run import tables_of
from servecast.scenario import Scenario
from servecast.setup import Setup, set_up
from servecast.sweeping.axes import axes_of, grid
from servecast.sweeping.runs import Base, figures, run, tasks_of
from sim.schedulers import scheduler_of
from tests.reference import ROOT
from tests.sim.oracle import Naive, oracle
from workloads.content import content_of

BASE: dict[str, Any] = {
    "name": "benchmark",
    "model": "llama-3.1-8b",
    "engine": {"preset": "vllm-0.19", "max_num_seqs": 256},
    "cluster": {"gpu": "h100-sxm"},
    "seed": 1,
}

OTHERS: dict[str, dict[str, Any]] = {
    "SGLang": {"preset": "sglang-0.5", "max_running_requests": 256},
    "TensorRT-LLM": {"preset": "tensorrt-llm-1", "max_batch_size": 256},
}
"""Engines of other policies, each at 0.8 of its saturation."""

EAGLE = {"method": "eagle3", "num_speculative_tokens": 3}
"""What drafts, where something does."""

PREFIX_SHARE = 40
"""The naive radix tree looks at tokens one by one, so it gets so many times fewer requests than other naive engines."""

ROW = "{:<18} {:>9} {:>7} {:>9} {:>9} {:>8} {:>8} {:>8} {:>7} {:>7} {:>7}"


def lognormal(mean: float) -> dict[str, Any]:
    """A length distribution with a coefficient of variation of 1."""
    return {"kind": "lognormal", "mean": mean, "cv": 1.0}


def generated(requests: int, rate: float, output: float = 256) -> dict[str, Any]:
    """Poisson arrivals, prompts of 1,024 tokens on average."""
    arrivals = {"kind": "poisson", "rate": rate} if rate else {"kind": "all-at-once"}
    return {
        "num_requests": requests,
        "arrivals": arrivals,
        "lengths": {"prompt": lognormal(1024), "output": lognormal(output)},
    }


POLICIES: list[dict[str, Any]] = [
    {"preset": "vllm-0.6", "max_model_len": 8192},
    {"preset": "vllm-0.6", "enable_chunked_prefill": True},
    {"preset": "sarathi"},
    {"preset": "orca"},
    {"preset": "tgi-3"},
    {"preset": "mlc-llm"},
    {"preset": "llama.cpp", "parallel": 16},
    {"preset": "transformers", "batch_size": 16},
]
"""One engine a scheduler policy, each at 0.8 of its saturation."""


def saturation(output: float, engine: dict[str, Any], model: str = "llama-3.1-8b") -> float:
    """Requests per second of a replica that always has work."""
    scenario = Scenario.model_validate(
        BASE | {"model": model, "engine": engine, "workload": generated(5000, 0, output)}
    )
    return float(servecast.simulate(scenario).summary()["request_throughput"])


def cases(saved: list[int]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, scenario), the load set by measured saturation; `saved` are numbers of requests, at least a million."""
    engine = BASE["engine"]
    full = saturation(256, engine)
    long = saturation(2048, engine)
    tight = engine | {"num_gpu_blocks_override": 4000, "max_model_len": 32768}
    yield "0.8 of saturation", {"workload": generated(20_000, 0.8 * full)}
    yield "the same, 100k", {"workload": generated(100_000, 0.8 * full)}
    yield "long outputs", {"workload": generated(20_000, 0.8 * long, 2048)}
    for name, other in OTHERS.items():
        yield name, {"engine": other, "workload": generated(20_000, 0.8 * saturation(256, other))}
    drafts = {"engine": engine | {"speculative_config": EAGLE}, "speculation": {"acceptance": 0.7}}
    yield "drafts", drafts | {"workload": generated(20_000, 0.8 * full)}
    yield "light load", {"workload": generated(20_000, 0.1 * full)}
    yield "KV tight", {"engine": tight, "workload": generated(20_000, 0.9 * saturation(256, tight))}
    azure = ROOT / "traces" / "azure" / "AzureLLMInferenceTrace_conv.csv.gz"
    if azure.exists():
        yield "Azure conv", {"workload": {"trace": str(azure)}}
    mooncake = ROOT / "traces" / "mooncake" / "conversation_trace.jsonl.gz"
    if mooncake.exists():
        yield (
            "Mooncake, 8 GPUs",
            {
                "engine": {"preset": "vllm-0.19", "max_model_len": 131_072},
                "cluster": {"gpu": "h100-sxm", "replicas": 8},
                "workload": {"trace": str(mooncake)},
            },
        )
    fleet = {"gpu": "h100-sxm", "replicas": 32, "router": "least-outstanding"}
    yield "32 GPUs, 200k", {"cluster": fleet, "workload": generated(200_000, 32 * 0.8 * full)}
    limits = {"max_num_seqs": 256, "max_num_batched_tokens": 1024, "max_model_len": 16384}
    yield (
        "64 ranks, 20k",
        {
            "model": "deepseek-r1",
            "engine": {"preset": "vllm-0.19"} | limits,
            "cluster": {
                "gpu": "h200-sxm", "dp": 64, "ep": True, "network": "rdma-400", "router": "least-outstanding",
                "experts": {"all2all": "deepep_auto"},
            },
            "workload": generated(20_000, 100, 512),
        },
    )  # fmt: skip
    hybrid = "gpt-oss-20b"
    yield "windows", {"model": hybrid, "workload": generated(20_000, 0.8 * saturation(256, engine, hybrid))}
    shared = {"workload": {"mix": "agent", "num_sessions": 600}}
    yield "shared prefixes", shared
    yield "shared, windows", shared | {"model": hybrid}
    behind = {"preset": "vllm-0.24", "max_num_seqs": 256, "max_model_len": 65536, "num_gpu_blocks_override": 8000}
    host = {"gpu": "h100-sxm", "kv_tiers": [{"kind": "host", "capacity": "64GiB"}]}
    yield "shared, small", shared | {"engine": behind}
    yield "shared, tiers", shared | {"engine": behind, "cluster": host}
    yield "shared, SGLang", shared | {"engine": OTHERS["SGLang"]}
    for engine in POLICIES:
        name = engine["preset"] + " chunked" * ("enable_chunked_prefill" in engine)
        yield name, {"engine": engine, "workload": generated(5_000, 0.8 * saturation(256, engine))}
    for requests in saved:
        yield f"{requests:,}, saved", {"workload": generated(requests, 0.8 * full)}


def measure(name: str, scenario: dict[str, Any], oracle_requests: int) -> str:
    """One row of the table. A million requests are saved too, and not given to the naive engine."""
    save = scenario["workload"].get("num_requests", 0) >= 1_000_000
    setup = set_up(Scenario.model_validate(BASE | scenario))
    start = time.process_time()
    result = servecast.simulate(setup)
    cpu = time.process_time() - start
    if save:
        with tempfile.TemporaryDirectory() as folder:
            result.save(folder)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    summary, n = result.summary(), result.submitted
    shared = setup.requests.trace.prefix is not None
    compared = oracle_requests if setup.pool.engines == 1 and not save else 0
    if shared:
        compared = compared // PREFIX_SHARE if setup.pool.scheduler.prefix_tree else 0
    ratio = oracle_ratio(setup, compared) if compared else None
    caching = cpu / cpu_seconds(without_caching(setup)) if shared else None
    return ROW.format(
        name,
        f"{n:,}",
        f"{cpu:.2f}",
        f"{n / cpu:,.0f}",
        f"{summary['engine_steps'] / n:.2f}",
        f"{sum(block.height for block in result.step_blocks()) / n:.2f}",
        f"{summary['preemptions']:,}",
        f"{memory:,.0f}",
        f"{memory * 2**20 / n:,.0f}" if save else "–",
        f"{ratio:.1f}x" if ratio else "–",
        f"{caching:.1f}x" if caching else "–",
    )


def without_caching(setup: Setup) -> Setup:
    """The same engine, with prefix caching off."""
    return setup.with_pool(engine=replace(setup.pool.engine, enable_prefix_caching=False))


def cpu_seconds(setup: Setup) -> float:
    """CPU time of one simulation."""
    start = time.process_time()
    servecast.simulate(setup)
    return time.process_time() - start


def oracle_ratio(setup: Setup, n: int) -> float:
    """CPU time of the naive engine over that of the fast one, on the first `n` requests."""
    few = setup.requests.trace.head(n)
    if few.prefix is None:
        setup = without_caching(setup)
    engine = setup.pool.engine
    fast = min(cpu_seconds(replace(setup, requests=Requests(few, follow=False))) for _ in range(3))
    columns = few.arrival_s, few.prompt_tokens, few.output_tokens, few.max_tokens
    rows = zip(*(column.tolist() for column in columns), strict=True)
    scheduler = scheduler_of(engine)
    naive = [
        Naive(i, *row)
        for i, row in enumerate(rows)
        if row[1] + row[3] <= engine.max_model_len and row[1] <= scheduler.longest_prompt
    ]
    if few.prefix is not None:
        path = content_of(few.prefix, few.prompt_tokens, 1).path
        for r in naive:
            for content, end in path(r.id):
                r.begins += [(content, i) for i in range(len(r.begins), end)]
    naive_engine = oracle(
        scheduler,
        setup.pool.step_cost,
        setup.pool.memory.usable_blocks + 1,
        engine.block_size,
        engine.async_scheduling,
        caching=few.prefix is not None,
        tables=tables_of(setup.pool),
    )
    start = time.process_time()
    naive_engine.run(naive)
    return (time.process_time() - start) / fast


def sweep_row(runs: int = 20) -> str:
    """CPU milliseconds of a run of a sweep, and what of it is not the simulation: set-up, workload, summary, row."""
    base = Base.of(str(files("scenarios") / "quickstart.yaml"))
    axes = axes_of([f"workload.arrivals.rate=4.0:12:{runs}"])
    tasks, _ = tasks_of(base, axes, grid(axes), [1])
    run(base, tasks[0])  # the first one loads the modules
    whole = simulated = 0.0
    for task in tasks:
        start = time.process_time()
        setup = set_up(base.scenario(task.point))
        begun = time.process_time()
        result = servecast.simulate(setup)
        simulated += time.process_time() - begun
        figures(result.summary())
        whole += time.process_time() - start
    ms = 1e3 / runs
    return (
        f"a run of a sweep, 2,000 requests: {ms * whole:.0f} ms, {ms * (whole - simulated):.0f} beside the simulation"
    )


@click.command()
@click.option(
    "--oracle-requests", default=4000, help="Requests for the comparison with the naive engine; 0 leaves it out."
)
@click.option("--million", is_flag=True, help="Also a million requests to a saved result.")
@click.option("--five-million", is_flag=True, help="Also five million requests to a saved result.")
def main(oracle_requests: int, million: bool, five_million: bool) -> None:
    """Print CPU time, requests per CPU second, steps and step-log rows a request, peak memory, ratio to the oracle,
    and what prefix caching costs where prompts share: CPU time with it over that without."""
    names = (
        "case", "requests", "CPU s", "req/CPU s", "steps/req", "rows/req", "preempt.", "peak MiB", "B/req", "oracle",
        "caching",
    )  # fmt: skip
    click.echo(ROW.format(*names))
    spawn = multiprocessing.get_context("spawn")
    for name, scenario in cases([1_000_000] * million + [5_000_000] * five_million):
        with spawn.Pool(1) as pool:
            click.echo(pool.apply(measure, (name, scenario, oracle_requests)))
        sys.stdout.flush()
    with spawn.Pool(1) as pool:
        click.echo(pool.apply(sweep_row))
