"""Compute what bounds one engine, and what one request takes on it: kernel by kernel, nothing is simulated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from calibrate.breakdown import Part, Step, main_rate, step_of, turning_batch
from calibrate.options import family
from reports.explaining.facts import Alone, Change, Explained, Kept, Static
from servecast.errors import ServecastError
from servecast.pools import PoolSetup, set_up_pool
from servecast.scenario import Scenario, load_scenario
from servecast.setup import set_up
from workloads.trace import Trace

CHANGES = {"fp8 weights": "quantization", "an fp8 KV cache": "kv_cache_dtype"}
CHUNKS = (256, 512, 1024, 2048, 4096, 8192, 16384)
"""Chunks of which it is said how long they hold up those that decode."""
POINTS, STATIC, BESIDE = 24, 32, 32
"""In how many places the cost of an answer is looked up along it; the requests of a static batch, and those that decode
beside a chunk, at most."""


def explain(
    scenario: str | Path,
    overrides: Iterable[str] | Mapping[str, object] = (),
    *,
    prompt: int | None = None,
    output: int | None = None,
) -> tuple[Explained, ...]:
    """Look at one engine of every pool of a scenario file: what a request of `prompt` and `output` tokens takes (by
    default of as many as the workload's have on average), alone and among others, and what bounds it.

    Raises ServecastError where the scenario cannot be run, for lengths that the engine does not take, and for engines
    whose GPUs wait for each other otherwise than with tensor parallelism.
    """
    base = load_scenario(scenario, overrides)
    setup = set_up(base)
    trace = setup.requests.trace
    lengths = [
        round(float(given.mean())) if own is None else own
        for given, own in ((trace.prompt_tokens, prompt), (trace.output_tokens, output))
    ]
    if problems := [problem for i, pool in enumerate(setup.pools) for problem in _wrong(pool, i, lengths)]:
        raise ServecastError(*map(base.at, problems))

    given = overrides if isinstance(overrides, Mapping) else list(overrides)

    def changed(index: int) -> Iterator[Change]:
        pool = setup.pools[index]
        for name, field in CHANGES.items():
            if field == "quantization" and main_rate(pool.model, pool.layout, pool.gpu) != "bf16":
                yield Change(name, why="its weights have no more bits than that")
                continue
            option = pool.engine.name_of(field)
            allowed = family(pool.engine.engine)["options"].get(option, [])
            values = [value for value in allowed if isinstance(value, str) and value.startswith("fp8")]
            if not values:
                yield Change(name, why=f"{pool.engine.preset} has no option for it")
                continue
            key = f"engine.{option}"
            more = {**given, key: values[0]} if isinstance(given, Mapping) else [*given, f"{key}={values[0]}"]
            try:
                yield _change(name, load_scenario(scenario, more), index, pool, lengths)
            except ServecastError as error:
                yield Change(name, why=error.problems[0])

    several = len(setup.pools) > 1
    return tuple(_explained(pool, several, trace, lengths, changed(i)) for i, pool in enumerate(setup.pools))


def _wrong(pool: PoolSetup, index: int, lengths: list[int]) -> Iterator[str]:
    where, layout = f"cluster.pools.{index}", pool.layout
    if layout.dp * layout.pp * layout.pcp > 1:
        yield (
            f"{where}: dp {layout.dp}, pp {layout.pp}, pcp {layout.pcp}; explain looks at one engine whose GPUs share "
            "every layer: leave these at 1 (experts may be dealt out over tp)"
        )
    if sum(lengths) > _longest(pool):
        prompt, output = lengths
        yield (
            f"{where}: {prompt:,} prompt and {output:,} output tokens are more than a request may have here "
            f"({_longest(pool):,} in all); give --prompt and --output"
        )


def _longest(pool: PoolSetup) -> int:
    """Tokens of the longest request."""
    most = pool.engine.max_model_len
    return min(most, pool.memory.pool.longest(pool.memory.usable_blocks, most))


class _Engine:
    """One engine of a pool, asked for steps."""

    def __init__(self, pool: PoolSetup) -> None:
        self.pool = pool
        limits = pool.engine.max_num_batched_tokens, pool.engine.max_model_len, pool.engine.ubatch_tokens
        self.budget = min(limit for limit in limits if limit is not None)

    def step(self, chunks: list[tuple[int, int]], decodes: int, kv_tokens: int) -> Step:
        """Parts of one step."""
        p = self.pool
        return step_of(p.model, p.layout, p.engine.undrafted, p.prices, p.cost, chunks, decodes, kv_tokens)

    def prompt(self, tokens: int, cached: int = 0) -> Step:
        """Parts of the steps that read a prompt of so many tokens, of which some are cached."""
        steps = []
        while cached < tokens:
            q = min(self.budget, tokens - cached)
            steps.append(self.step([(q, cached)], 0, 0))
            cached += q
        return _together(steps)

    def between(self, chunk: int, decodes: int, kv_tokens: int) -> float:
        """Seconds between two tokens of those that decode when a chunk of so many tokens is read."""
        if self.pool.scheduler.mixes:
            return self.step([(chunk, 0)], decodes, kv_tokens).seconds
        return self.step([(chunk, 0)], 0, 0).seconds + self.decode_s(decodes, kv_tokens)

    def decode_s(self, decodes: int, kv_tokens: int) -> float:
        """Seconds of a step of decodes alone, all equally long."""
        return self.step([], decodes, kv_tokens).seconds

    def alone(self, prompt: int, output: int) -> Alone:
        """One request with nobody else."""
        front = self.pool.engine.front_end
        read = self.prompt(prompt)
        at = np.unique(np.linspace(prompt, prompt + max(output - 2, 0), min(POINTS, max(output - 1, 1))).round())
        decodes = [self.decode_s(1, int(n)) for n in at]
        anew = [self.prompt(int(n) + 1).seconds for n in at]
        return Alone(
            front.request_s + front.prompt_token_s * prompt,
            read,
            _mean(at, decodes),
            read.seconds + (output - 1) * _mean(at, anew),
            output,
        )

    def kept(self, prompt: int, output: int) -> Kept:
        """What the GPU keeps."""
        memory = self.pool.memory
        fits = memory.concurrency(prompt + output)
        return Kept(
            memory.weight_bytes,
            memory.kv_bytes_per_token,
            memory.kv_tokens,
            max(1, min(int(fits), self.pool.engine.max_num_seqs)),
        )


def _mean(at: np.ndarray[Any, Any], values: list[float]) -> float:
    """Of a function that is straight between points."""
    return float(np.trapezoid(values, at) / (at[-1] - at[0])) if len(at) > 1 else values[0]


def _together(steps: list[Step]) -> Step:
    """Several steps as one."""
    parts: dict[str, Part] = {}
    for part in (part for step in steps for part in step.parts):
        if (one := parts.get(part.name)) is not None:
            part = Part(
                part.name, one.seconds + part.seconds, one.flops + part.flops, one.hbm_bytes + part.hbm_bytes,
                one.compute_s + part.compute_s, one.bandwidth_s + part.bandwidth_s,
            )  # fmt: skip
        parts[part.name] = part
    return Step(tuple(parts.values()))


def _explained(
    pool: PoolSetup, several: bool, trace: Trace, lengths: list[int], changes: Iterable[Change]
) -> Explained:
    engine, (prompt, output) = _Engine(pool), lengths
    longest = _longest(pool)
    kept, context = engine.kept(prompt, output), prompt + output // 2
    batches = [*_doubling(1, kept.at_once), kept.at_once]
    beside = min(kept.at_once, BESIDE, pool.engine.max_num_seqs - 1)
    chunks = [n for n in CHUNKS if n < engine.budget - beside] + [engine.budget - beside] if beside else []
    kv = beside * context
    model, layout, gpu = pool.model, pool.layout, pool.gpu
    return Explained(
        setup=f"{model.name} on {layout.gpus} x {gpu.id}, {pool.engine.preset}",
        pool=pool.name if several else "",
        gpus=layout.gpus,
        prompt=prompt,
        output=output,
        workload=trace.source,
        peaks={**gpu.flops, "bandwidth": gpu.bandwidth_bytes_per_s},
        rate=main_rate(model, layout, gpu),
        alone=engine.alone(prompt, output),
        kept=kept,
        budget=engine.budget,
        context=context,
        by_length={n: engine.prompt(n) for n in [*_doubling(16, longest - 1), longest - 1]},
        by_batch={n: engine.step([], n, n * context) for n in dict.fromkeys(batches)},
        by_context={n: engine.step([], 1, n) for n in [*_doubling(16, longest - 1), longest - 1]},
        by_chunk=({0: engine.decode_s(beside, kv)} if beside else {})
        | {n: engine.between(n, beside, kv) for n in chunks if n > 0},
        beside=beside,
        turns_empty=turning_batch(model, layout, gpu, 0),
        turns=turning_batch(model, layout, gpu, context),
        half_cached_s=engine.alone(prompt, output).front_end_s + engine.prompt(prompt, prompt // 2).seconds,
        static=_static(trace, min(kept.at_once, STATIC)),
        drafts=pool.draft_worth(context, kept.at_once),
        changes=tuple(changes),
        pricing=str(pool.cost.provenance.get("kind", "")),
        version=version("servecast"),
    )


def _doubling(low: int, high: int) -> list[int]:
    found = []
    while low < high:
        found.append(low)
        low *= 2
    return found


def _static(trace: Trace, batch: int) -> Static | None:
    """Groups of requests in order of arrival, each until its longest ends; None for batches of one."""
    batch = min(batch, len(trace))
    if batch < 2:
        return None
    wasted = []
    for tokens in (trace.prompt_tokens, trace.output_tokens):
        whole = tokens[: len(tokens) // batch * batch].reshape(-1, batch)
        wasted.append(1.0 - float(whole.sum() / (batch * whole.max(axis=1).sum())))
    return Static(batch, *wasted)


def _change(name: str, scenario: Scenario, index: int, was: PoolSetup, lengths: list[int]) -> Change:
    """The pool at `index` as this scenario has it. Raises ServecastError where it cannot be."""
    problems: list[str] = []
    pool = set_up_pool(scenario, index, problems)
    if not isinstance(pool, PoolSetup):
        raise ServecastError(*map(scenario.at, problems))
    engine, (prompt, output) = _Engine(pool), lengths
    most = min(_Engine(was).kept(prompt, output).at_once, pool.engine.max_num_seqs)
    return Change(
        name,
        engine.alone(prompt, output),
        engine.kept(prompt, output),
        engine.decode_s(most, most * (prompt + output // 2)),
    )
