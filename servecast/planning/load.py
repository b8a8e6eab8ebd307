"""The traffic of a plan: the same workload with other rates, lengths, seeds and numbers of requests."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from servecast.requests import Requests, requests_of
from workloads.transform import scale_lengths

if TYPE_CHECKING:
    from servecast.setup import Setup


MOST_NOISE = 50
"""Requests of which fewer show nothing."""


def scaled(setup: Setup, rate: float = 1.0, prompt: float = 1.0, output: float = 1.0) -> Setup:
    """The setup with so many times the traffic, and prompts and answers so many times as long: requests come so many
    times as fast; of a closed loop there are so many times the clients (rounded)."""
    requests = setup.requests
    trace = requests.trace
    if rate != 1.0 and requests.concurrency is not None:
        requests = replace(requests, concurrency=max(1, round(requests.concurrency * rate)))
    elif rate != 1.0:
        trace = trace.scale_rate(rate)
    if prompt != 1.0 or output != 1.0:
        trace = scale_lengths(trace, prompt, output)
    return replace(setup, requests=replace(requests, trace=trace))


def first(setup: Setup, count: int) -> Setup | None:
    """The setup with its first so many requests; None where they hang together otherwise (sessions, closed loops)."""
    requests = setup.requests
    if requests.concurrency is not None or requests.follow or count < MOST_NOISE or len(setup.models) > 1:
        return None
    trace = requests.trace.head(count)
    priority = None if requests.priority is None else requests.priority[:count]
    return replace(setup, requests=replace(requests, trace=trace, priority=priority))


def rate_of(requests: Requests) -> float | None:
    """Requests per second, on average; None of a closed loop, whose rate is its answers', and of one request."""
    arrival_s = requests.trace.arrival_s
    span = float(arrival_s[-1] - arrival_s[0]) if len(arrival_s) > 1 else 0.0
    return None if requests.concurrency is not None or not span else (len(arrival_s) - 1) / span


def fresh(setup: Setup, seed: int, requests: int) -> Setup:
    """The setup under another seed, with at least so many requests where they are drawn one by one. A recorded trace
    stays what it is, unless the scenario samples it or adds jitter."""
    scenario = setup.scenario
    workload = scenario.workload
    if workload.kind != "trace" and workload.num_requests is not None and workload.num_requests < requests:
        workload = workload.model_copy(update={"num_requests": requests})
    scenario = scenario.model_copy(update={"seed": seed, "workload": workload})
    lengths = [pool.engine.max_model_len for pool in setup.pools]
    return replace(setup, scenario=scenario, requests=requests_of(scenario, min(lengths)))
