"""From the workload of a scenario to the requests that are submitted: the verbs of `workloads`, called in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from servecast.errors import ServecastError
from servecast.keyed import keyed
from servecast.priorities import priorities
from servecast.scenario import Scenario
from servecast.workload import LengthsPart, WorkloadPart
from workloads import transform
from workloads.clients import generate_servegen
from workloads.generate import (
    Lengths,
    RequestClass,
    generate,
    generate_class_lengths,
    generate_classes,
    generate_lengths,
    stream,
)
from workloads.kinds import call_kind
from workloads.mixes import generate_mix
from workloads.people import THINK
from workloads.prometheus import read_prometheus
from workloads.readers import read_trace
from workloads.readers.options import ReadOptions
from workloads.servegen import read_servegen
from workloads.sessions import generate_sessions
from workloads.trace import Floats, Ints, Trace


@dataclass(frozen=True, slots=True)
class Requests:
    """What is submitted: the trace's requests at their times; or, with `concurrency`, in order by that many clients who
    think `think_s` (float64[n]) between an answer and the next request. `follow` says that turns wait for the answer
    before them. `slo` has the limits (seconds) of the classes that have their own; `priority` (int64[n]) is None when
    no class has one, `reasoning` (float64[n], the share of each output) when nobody reasons. `first_token_s`
    (float64[n]): who has no first token by then gives up; `retries` (int64[n]): how often requests are sent again after
    that, first `backoff_s` later; `network_s`: the way to the gateway and back; None where there is nothing of it."""

    trace: Trace
    follow: bool
    concurrency: int | None = None
    think_s: Floats | None = None
    slo: Mapping[str, Mapping[str, float]] | None = None
    priority: Ints | None = None
    reasoning: Floats | None = None
    first_token_s: Floats | None = None
    retries: Ints | None = None
    backoff_s: Floats | None = None
    network_s: Floats | None = None


def requests_of(scenario: Scenario, max_model_len: int | None) -> Requests:
    """The requests that the scenario's workload describes. Raises ServecastError with all that is wrong with it.

    `max_model_len` (tokens) is what clients without a cap are left with; None while the engine is not known.
    """
    workload = scenario.workload
    kind = workload.kind
    closed = workload.closed_loop
    trace = keyed(f"workload.{kind}", lambda: _MAKE[kind](scenario, workload))
    think_s = None
    if closed is not None and closed.think is not None:
        think_s = call_kind(THINK, closed.think, len(trace), stream(scenario.seed, "think"))
    trace = _sampled(_impatient(_capped(trace, workload, max_model_len), workload), workload)
    slo = {part.name: part.slo.limits() for part in workload.classes or [] if part.slo is not None}
    follow = trace.turns is not None and closed is None and workload.turns != "as_recorded"
    concurrency = None if closed is None else closed.concurrency
    priority = priorities(scenario, trace, slo, follow or closed is not None)
    retries = _of_each(trace, workload, "timeout", lambda wait: wait.retries or None, 0)
    return Requests(
        trace,
        follow,
        concurrency,
        think_s,
        slo,
        priority,
        reasoning=_of_each(trace, workload, "reasoning", float, 0.0),
        first_token_s=_of_each(trace, workload, "timeout", lambda wait: wait.first_token, np.inf),
        retries=None if retries is None else retries.astype(np.int64),
        backoff_s=_of_each(trace, workload, "timeout", lambda wait: wait.backoff if wait.retries else None, 0.0),
        network_s=_of_each(trace, workload, "network", lambda network: network.latency or None, 0.0),
    )


def _of_each(
    trace: Trace, w: WorkloadPart, key: str, number: Callable[[Any], float | None], otherwise: float
) -> Floats | None:
    """float64[n]: a number of what each request's class has under `key`, or else the workload; None where nobody has
    one."""
    names: tuple[str, ...] = ("",) if trace.classes is None else trace.classes[1]
    parts = {part.name: getattr(part, key) for part in w.classes or []}
    values = [getattr(w, key) if parts.get(name) is None else parts[name] for name in names]
    found = [None if value is None else number(value) for value in values]
    if all(value is None for value in found):
        return None
    numbers = np.array([otherwise if value is None else value for value in found])
    return np.full(len(trace), numbers[0]) if trace.classes is None else numbers[trace.classes[0]]


def _from_trace(scenario: Scenario, w: WorkloadPart) -> Trace:
    assert w.trace is not None
    options = ReadOptions(
        block_tokens=w.block_tokens, spread_s=w.spread, shared_prefix=bool(w.shared_prefix), seed=scenario.seed
    )
    path = scenario.path_of("workload.trace", w.trace)
    trace = keyed("workload.trace", lambda: read_trace(path, w.format, options))
    if w.window is not None:
        trace = trace.window(w.window[0], w.window[1])
    if w.sample is not None:
        trace = transform.sample(trace, w.sample, scenario.seed)
    if w.jitter is not None:
        trace = transform.jitter(trace, w.jitter, scenario.seed)
    if w.rate_scale is not None:
        trace = trace.scale_rate(w.rate_scale)
    if w.num_requests is not None:
        trace = trace.head(w.num_requests)
    if w.prompt_scale is not None or w.output_scale is not None:
        trace = transform.scale_lengths(trace, w.prompt_scale or 1.0, w.output_scale or 1.0)
    if w.max_prompt is not None or w.max_output is not None:
        trace = transform.limit_lengths(
            trace, prompt=w.max_prompt, output=w.max_output, over_long=w.over_long or "reject"
        )
    return trace


def _from_arrivals(scenario: Scenario, w: WorkloadPart) -> Trace:
    assert w.arrivals is not None
    assert w.num_requests is not None
    if w.classes is not None:
        return generate_classes(w.num_requests, scenario.seed, w.arrivals, _classes(scenario, w))
    lengths, correlation = _lengths(scenario, w.lengths, "workload.lengths")
    return generate(w.num_requests, scenario.seed, w.arrivals, lengths, correlation=correlation)


def _from_closed_loop(scenario: Scenario, w: WorkloadPart) -> Trace:
    assert w.closed_loop is not None
    assert w.num_requests is not None
    n, classes = w.num_requests, None
    if w.classes is not None:
        index, prompt, output = generate_class_lengths(n, scenario.seed, _classes(scenario, w))
        classes = index, tuple(part.name for part in w.classes)
    else:
        lengths, correlation = _lengths(scenario, w.lengths, "workload.lengths")
        prompt, output = generate_lengths(n, scenario.seed, lengths, correlation=correlation)
    source = f"generated: closed loop of {w.closed_loop.concurrency} clients, seed {scenario.seed}"
    return Trace(np.zeros(n), prompt, output, output, source=source, classes=classes)


def _from_prometheus(scenario: Scenario, w: WorkloadPart) -> Trace:
    part = w.prometheus
    assert part is not None
    assert w.num_requests is not None
    scrape = scenario.path_of("workload.prometheus.scrape", part.scrape)
    earlier = scenario.path_of("workload.prometheus.earlier", part.earlier) if part.earlier else None
    measured = read_prometheus(
        scrape, earlier, interval_s=part.interval, model=part.model, max_model_len=part.max_model_len
    )
    if w.arrivals is None and measured.rate is None:
        raise ServecastError(
            f"{scrape}: one scrape says no rate; give earlier and interval, or arrivals beside prometheus"
        )
    arrivals = w.arrivals or {"kind": "poisson", "rate": measured.rate}
    trace = generate(w.num_requests, scenario.seed, arrivals, (measured.prompt, measured.output))
    rate = "" if measured.rate is None else f", {measured.rate:.3g} requests/s"
    note = f"lengths of {measured.requests:,.0f} requests in {scrape.name}{rate}"
    return replace(trace, notes=(*trace.notes, note, *measured.notes))


def _from_servegen(scenario: Scenario, w: WorkloadPart) -> Trace:
    part = w.servegen
    assert part is not None
    pool = read_servegen(scenario.path_of("workload.servegen.pool", part.pool))
    span = None if part.span is None else (part.span[0], part.span[1])
    trace = generate_servegen(
        pool, scenario.seed, span_s=span, rate=part.rate, even=part.even, comonotone=part.comonotone,
        by_client=part.by_client,
    )  # fmt: skip
    return trace if w.num_requests is None else trace.head(w.num_requests)


def _from_sessions(scenario: Scenario, w: WorkloadPart) -> Trace:
    assert w.sessions is not None
    assert w.num_sessions is not None
    return generate_sessions(w.num_sessions, scenario.seed, w.sessions)


def _from_mix(scenario: Scenario, w: WorkloadPart) -> Trace:
    from workloads.mixes import load_mix

    assert w.mix is not None
    key = "num_sessions" if load_mix(w.mix, w.rate).sessions else "num_requests"
    other = "num_requests" if key == "num_sessions" else "num_sessions"
    n = getattr(w, key)
    if n is None or getattr(w, other) is not None:
        raise ServecastError(f"mix {w.mix} takes {key}, not {other}")
    return generate_mix(w.mix, n, scenario.seed, w.rate)


_MAKE = {
    "trace": _from_trace,
    "arrivals": _from_arrivals,
    "closed_loop": _from_closed_loop,
    "prometheus": _from_prometheus,
    "servegen": _from_servegen,
    "sessions": _from_sessions,
    "mix": _from_mix,
}


def _classes(scenario: Scenario, w: WorkloadPart) -> list[RequestClass]:
    return [
        RequestClass(part.name, part.weight, *_lengths(scenario, part.lengths, f"workload.classes.{i}.lengths"))
        for i, part in enumerate(w.classes or [])
    ]


def _lengths(scenario: Scenario, part: LengthsPart | None, key: str) -> tuple[Lengths, float | None]:
    assert part is not None
    if part.trace is None:
        return (part.prompt or {}, part.output or {}), part.correlation
    path, format = scenario.path_of(f"{key}.trace", part.trace), part.format
    return keyed(f"{key}.trace", lambda: read_trace(path, format)), None


def _capped(trace: Trace, workload: WorkloadPart, max_model_len: int | None) -> Trace:
    """The trace under `workload.max_tokens`: a number for all clients, or what `max_model_len` leaves."""
    output = trace.output_tokens
    if isinstance(workload.max_tokens, int):
        over = int((output > workload.max_tokens).sum())
        if over:
            raise ServecastError(
                f"workload.max_tokens: {over:,} of {len(trace):,} requests have more output tokens "
                f"(up to {output.max():,}) than {workload.max_tokens:,}; raise it, or shorten the output lengths"
            )
        return replace(trace, max_tokens=np.full(len(trace), workload.max_tokens, dtype=np.int64))
    if workload.max_tokens == "unlimited" and max_model_len is not None:
        return replace(trace, max_tokens=np.maximum(max_model_len - trace.prompt_tokens, output))
    return trace


def _impatient(trace: Trace, workload: WorkloadPart) -> Trace:
    """The trace with `timeout.total` where clients have no less patience of their own."""
    patience_s = _of_each(trace, workload, "timeout", lambda wait: wait.total, np.inf)
    if patience_s is None:
        return trace
    return replace(
        trace, patience_s=patience_s if trace.patience_s is None else np.minimum(trace.patience_s, patience_s)
    )


def _sampled(trace: Trace, workload: WorkloadPart) -> Trace:
    """The trace with the samples of each prompt that the workload, its classes or the trace itself ask for; None where
    all ask for one."""
    samples = trace.samples
    if workload.n > 1:
        if samples is not None:
            raise ServecastError("workload.n: the trace has samples of its own; take n, or that column, out")
        samples = np.full(len(trace), workload.n, dtype=np.int64)
    elif trace.classes is not None and workload.classes is not None:
        samples = np.array([part.n for part in workload.classes], dtype=np.int64)[trace.classes[0]]
    if samples is None or samples.max() == 1:
        return replace(trace, samples=None)
    note = f"{samples.sum():,} samples of {len(trace):,} prompts, all of one as long as its request's answer"
    return replace(trace, samples=samples, notes=(*trace.notes, note))
