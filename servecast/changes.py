"""Replicas that fail, start and stop, and a gateway's limits: from the scenario to what the simulator is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf

from calibrate.cold_start import cold_start_s
from servecast.errors import one_of
from servecast.pools import PoolSetup
from servecast.requests import Requests
from servecast.scenario import PoolPart, Scenario
from sim.changes import Autoscale, Changes, Event, Failures, Limits

RETRIES = 1
"""How often a request that is lost with its replica is sent anew, if the scenario does not say it."""


def changes_of(scenario: Scenario, pools: Sequence[PoolSetup], requests: Requests) -> Changes | None:
    """What is to happen in a run; None where nothing is."""
    cluster = scenario.cluster
    limits = cluster.limits
    parts = [pool.failures or pool.autoscale for pool in cluster.pools]
    if not (any(parts) or cluster.events or limits):
        return None
    return Changes(
        initially=tuple(part.replicas for part in cluster.pools),
        cold_start_s=tuple(cold_start_of(part, pool) or 0.0 for part, pool in zip(cluster.pools, pools, strict=True)),
        events=tuple(_events(scenario)),
        failures={
            i: Failures(part.failures.mtbf, _or_never(part.failures.repair))
            for i, part in enumerate(cluster.pools)
            if part.failures
        },
        retries=RETRIES if cluster.retries is None else cluster.retries,
        autoscale={
            i: _autoscale(part, slo_of(scenario, requests, part.role))
            for i, part in enumerate(cluster.pools)
            if part.autoscale
        },
        limits=None
        if limits is None
        else Limits(limits.outstanding or inf, limits.outstanding_per_replica or inf, limits.prompt_tokens or inf),
    )


def wrong_changes(scenario: Scenario) -> Iterator[str]:
    """What of all this does not fit the pools."""
    cluster = scenario.cluster
    for i, part in enumerate(cluster.pools):
        key, rule = _key(scenario, i), part.autoscale
        if rule is not None:
            if not rule.min <= part.replicas <= rule.max:
                yield (
                    f"{key}.replicas: {part.replicas} at the start are not from autoscale's min to max, {rule.min} to "
                    f"{rule.max}"
                )
            if rule.metric == "slo" and not _limits(scenario, part.role):
                which = {"prefill": "a ttft", "decode": "a tpot"}.get(part.role, "an slo")
                yield f"{key}.autoscale.metric: slo needs {which}; give the scenario one, such as slo: {{ttft: 1s}}"
    for j, event in enumerate(cluster.events or []):
        key = f"cluster.events.{j}"
        if event.pool is None and len(cluster.pools) > 1:
            yield f"{key}.pool: missing; there are {one_of(cluster.names)}"
        elif event.pool is not None and event.pool not in cluster.names:
            yield f"{key}.pool: there is no pool {event.pool!r}; there are {one_of(cluster.names)}"
        else:
            index = cluster.pool_of(event)
            place, most = event.drain if event.fail is None else event.fail, cluster.most(index)
            if place is not None and place >= most:
                yield f"{key}.{event.kinds[0]}: there is no replica {place}; the pool has 0 to {most - 1}"
            if cluster.pools[index].autoscale is not None and event.fail is None:
                yield f"{key}.{event.kinds[0]}: how many the pool has, its autoscaler says; take one of them out"
    if cluster.retries and not (cluster.events or any(pool.failures for pool in cluster.pools)):
        yield "cluster.retries: nothing fails here; give pools failures, or take it out"


def no_cold_start(scenario: Scenario, pools: Sequence[PoolSetup]) -> Iterator[str]:
    """Pools of which replicas are started, and nobody knows how long that takes."""
    cluster = scenario.cluster
    events = [event for event in cluster.events or [] if event.pool is None or event.pool in cluster.names]
    starts = {cluster.pool_of(event) for event in events if event.start is not None}
    for i, (part, pool) in enumerate(zip(cluster.pools, pools, strict=True)):
        if (part.autoscale or i in starts) and cold_start_of(part, pool) is None:
            yield (
                f"{_key(scenario, i)}.cold_start: missing; how long {pool.engine.preset} takes until it serves is not "
                "known here, give it, for example 90s"
            )


def notes_of(scenario: Scenario, pools: Sequence[PoolSetup], changes: Changes | None) -> Iterator[str]:
    """What was resolved."""
    starts = (
        set() if changes is None else {e.pool for e in changes.events if e.kind == "start"} | set(changes.autoscale)
    )
    for i in sorted(starts):
        if scenario.cluster.pools[i].cold_start is None and changes is not None:
            yield (
                f"a replica of {pools[i].name} takes {changes.cold_start_s[i]:.0f} s from its start until it serves, "
                "which is an estimate from published start-ups of vLLM; set cold_start"
            )


def slo_of(scenario: Scenario, requests: Requests, role: str) -> Callable[[int], Mapping[str, float]]:
    """The limits of a request by its number, as far as they are for a pool of that role."""
    base, classes = scenario.slo.limits(), requests.trace.classes
    if classes is None:
        mine = _of_role(base, role)
        return lambda number: mine
    index, names = classes
    own = [_of_role((requests.slo or {}).get(name, base), role) for name in names]
    return lambda number: own[index[number]]


def _key(scenario: Scenario, index: int) -> str:
    return "cluster" if len(scenario.cluster.pools) == 1 else f"cluster.pools.{index}"


def _limits(scenario: Scenario, role: str) -> bool:
    every = [scenario.slo.limits()]
    every += [part.slo.limits() for part in scenario.workload.classes or [] if part.slo is not None]
    return any(_of_role(limits, role) for limits in every)


def _of_role(limits: Mapping[str, float], role: str) -> dict[str, float]:
    """A prefill pool answers for TTFT, a decode pool for TPOT; of gaps an autoscaler hears nothing."""
    names = {"prefill": ("ttft",), "decode": ("tpot",)}.get(role, ("ttft", "tpot", "e2e"))
    return {name: limit for name, limit in limits.items() if name in names}


def cold_start_of(part: PoolPart, pool: PoolSetup) -> float | None:
    """Seconds from a replica's start until it serves; None where nobody says."""
    return cold_start_s(pool.engine, pool.memory) if part.cold_start is None else part.cold_start


def _autoscale(part: PoolPart, slo: Callable[[int], Mapping[str, float]]) -> Autoscale:
    rule = part.autoscale
    assert rule is not None
    return Autoscale(
        rule.min, rule.max, rule.metric, rule.target, rule.every, rule.tolerance, rule.up_after, rule.down_after,
        rule.window or 0.0, slo,
    )  # fmt: skip


def _events(scenario: Scenario) -> Iterator[Event]:
    for event in scenario.cluster.events or []:
        pool = scenario.cluster.pool_of(event)
        if event.start is not None:
            yield Event(event.at, "start", pool, count=event.start)
        elif event.drain is not None:
            yield Event(event.at, "drain", pool, event.drain)
        else:
            yield Event(event.at, "fail", pool, event.fail or 0, repair_s=_or_never(event.repair))


def _or_never(seconds: float | None) -> float:
    return inf if seconds is None else seconds
