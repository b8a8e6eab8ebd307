"""What no number of replicas can mend, and how many it takes at least: bounds from the costs of steps and the memory
plan, so that hopeless candidates are never simulated. They only ever leave out what cannot be."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

import numpy as np

from calibrate.draft_worth import drafted
from calibrate.pipeline import InSeries
from servecast.planning.load import rate_of
from servecast.planning.slo import Requirement

if TYPE_CHECKING:
    from servecast.pools import PoolSetup
    from servecast.setup import Setup

SLACK = 0.95
"""Of the replicas that the bounds call for: what work takes at least is compared with the time in which it arrives, and
a little of it may be done after that."""
LOAD = 0.8
"""Of the guess: how busy replicas can be."""


@dataclass(frozen=True, slots=True)
class Bound:
    """At least so many replicas (or units of a split), and so many by a guess; and why none would do, where that is
    so."""

    replicas: int
    guess: int = 1
    why: str = ""


def bound(setup: Setup, requirements: Iterable[Requirement]) -> Bound:
    """The bound of one replica, or one unit of a split, for the setup's traffic."""
    readers = [pool for pool in setup.pools if pool.role != "decode"]
    answerers = [pool for pool in setup.pools if pool.role != "prefill"]
    trace = setup.requests.trace
    own = trace.prefix is None and not setup.requests.follow  # else caches may find what prompts share
    for requirement in requirements:
        if requirement.metric in ("ttft", "e2e") and own and not requirement.group:
            least = _least_ttft_s(readers[0], _quantile(trace.prompt_tokens, requirement.stat))
            if least > requirement.limit:
                return Bound(1, why=f"{requirement}: a prompt alone takes {requirement.shown(least)}")
        if requirement.metric in ("tpot", "itl"):
            least = _least_step_s(answerers[0])
            if requirement.metric == "tpot":  # between messages it is a step, which may yield several tokens
                least /= _most_tokens(answerers[0])
            if least > requirement.limit:
                return Bound(1, why=f"{requirement}: a token alone takes {requirement.shown(least)}")
    rate = rate_of(setup.requests)
    if rate is None or setup.requests.follow:
        return Bound(1)
    prompt = float(trace.prompt_tokens.mean()) if own else 0.0
    output = float(trace.output_tokens.mean())
    needed = 1.0
    for pool in setup.pools:
        reads = prompt if pool.role != "decode" else 0.0
        answers = output if pool.role != "prefill" else 0.0
        share = 1 / pool.replicas
        needed = max(needed, share * rate * _least_work_s(pool, reads, answers))
        if answers and own and trace.samples is None and not pool.model.windows:
            held_s = answers * _least_step_s(pool) / _most_tokens(pool)
            needed = max(needed, share * rate * held_s * (prompt + answers / 2) / pool.memory.kv_tokens)
    least = max(1, ceil(SLACK * needed))
    return Bound(least, max(least, _guess(setup, requirements, rate)))


def _guess(setup: Setup, requirements: Iterable[Requirement], rate: float) -> int:
    """How many it may take: replicas that read prompts in large chunks, and otherwise decode as many sequences at once
    as their memory and the requirements on tokens allow. Only says in which order to try."""
    trace, needed = setup.requests.trace, 1.0
    tpot_s = min((r.limit for r in requirements if r.metric == "tpot"), default=float("inf"))
    prompt, output = float(trace.prompt_tokens.mean()), float(trace.output_tokens.mean())
    for pool in setup.pools:
        chunk = min(pool.engine.max_num_batched_tokens, 2048)
        reads_s = prompt * _bottleneck_s(pool, [(chunk, 0)], 0, 0) / chunk if pool.role != "decode" else 0.0
        context = prompt + output / 2
        batch = max(1, min(pool.engine.max_num_seqs, int(pool.memory.kv_tokens / context)))
        while batch > 1 and _token_s(pool, batch, int(batch * context)) > 0.7 * tpot_s:
            batch = batch * 3 // 4
        answers_s = output * _token_s(pool, batch, int(batch * context), _bottleneck_s) / batch
        work_s = reads_s + (answers_s if pool.role != "prefill" else 0.0)
        needed = max(needed, rate * work_s / pool.replicas / LOAD)
    return ceil(needed)


def _most_tokens(pool: PoolSetup) -> int:
    """Of a sequence in one step."""
    return 1 if pool.drafting is None else 1 + pool.drafting.tokens


def _token_s(
    pool: PoolSetup,
    decodes: int,
    kv_tokens: int,
    step_s: Callable[[PoolSetup, list[tuple[int, int]], int, int], float] | None = None,
) -> float:
    """Seconds a token of each of so many sequences, with the drafts that are right on average."""
    if pool.drafts is None or pool.drafting is None:
        return (step_s or _step_s)(pool, [], decodes, kv_tokens)
    seconds, tokens = drafted(pool.drafts, decodes, kv_tokens, pool.drafting.length, pool.drafting.proposes)
    return seconds / tokens


def _bottleneck_s(pool: PoolSetup, chunks: list[tuple[int, int]], decodes: int, kv_tokens: int) -> float:
    """Seconds between two steps like that: of the slowest stage of a pipeline."""
    if pool.pipeline is None or isinstance(pool.pipeline, InSeries):
        return _step_s(pool, chunks, decodes, kv_tokens)
    return max(busy_s for busy_s, _ in pool.pipeline.stages_s(chunks, decodes, kv_tokens))


def _quantile(tokens: np.ndarray, stat: float | str) -> int:
    return int(np.percentile(tokens, stat, method="lower")) if isinstance(stat, float) else int(tokens.mean())


def _least_ttft_s(pool: PoolSetup, prompt: int) -> float:
    """Seconds to read a prompt of so many tokens with nobody else there, in chunks as large as they may be."""
    chunk, before, seconds = pool.engine.max_num_batched_tokens, 0, 0.0
    while before < prompt:
        tokens = min(chunk, prompt - before)
        seconds += _step_s(pool, [(tokens, before)], 0, 0)
        before += tokens
    front = pool.engine.front_end
    chunks = ceil(prompt / chunk)
    passed = seconds if pool.pipeline is None or isinstance(pool.pipeline, InSeries) else seconds / max(chunks, 1)
    return passed + front.request_s + front.prompt_token_s * prompt


def _least_step_s(pool: PoolSetup) -> float:
    """Seconds of a step in which one sequence decodes, with nothing in its cache."""
    return _step_s(pool, [], 1, 1)


def _step_s(pool: PoolSetup, chunks: list[tuple[int, int]], decodes: int, kv_tokens: int) -> float:
    """Seconds of one step, through all stages of a pipeline."""
    if pool.pipeline is None:
        seen = tuple(min(kv_tokens, window.size) for window in pool.model.windows) if decodes else ()
        return pool.step_cost.step_s(chunks, decodes, kv_tokens, seen)
    if isinstance(pool.pipeline, InSeries):
        return pool.pipeline.step_s(chunks, decodes, kv_tokens)
    return sum(busy_s + send_s for busy_s, send_s in pool.pipeline.stages_s(chunks, decodes, kv_tokens))


def _least_work_s(pool: PoolSetup, prompt: float, output: float) -> float:
    """Seconds for which a request keeps a replica busy at least: all its tokens at the best rate of any step, and its
    share of the steps that answers take where as many sequences decode as ever can."""
    engine = pool.engine
    stages = [pool.cost] if pool.pipeline is None else [stage.cost for stage in pool.pipeline.stages]
    best = 0.0
    for cost in stages:
        tokens = np.asarray(cost.tokens_s[1:]) / np.arange(1, len(cost.tokens_s))
        each = (prompt + max(output - 1, 0.0)) * float(tokens.min())
        context = max(prompt, 1.0)
        together = engine.max_num_seqs
        if not pool.model.windows:
            together = max(1, min(together, int(pool.memory.kv_tokens / context)))
        step = max(min(cost.decode_tokens_s[1:]), 0.0)
        best = max(best, each, max(output - 1, 0.0) * step / together / _most_tokens(pool))
    return best
