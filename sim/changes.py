"""What is to happen to the replicas of a cluster, and what its gateway turns away: what a scenario says of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Literal


@dataclass(frozen=True, slots=True)
class Event:
    """At `at_s` the unit at place `replica` of pool `pool` fails, and is back after `repair_s` (inf: never); or it
    is drained; or `count` more of the pool are started."""

    at_s: float
    kind: Literal["fail", "drain", "start"]
    pool: int
    replica: int = 0
    count: int = 1
    repair_s: float = inf


@dataclass(frozen=True, slots=True)
class Failures:
    """Each unit fails after an exponential time of mean `mtbf_s` in which it takes requests, and takes them again
    after `repair_s` (inf: never)."""

    mtbf_s: float
    repair_s: float = inf


@dataclass(frozen=True, slots=True)
class Limits:
    """A gateway turns requests away while `outstanding` are not over yet, or `per_replica` times the replicas that take
    requests; and those with more than `prompt_tokens`."""

    outstanding: float = inf
    per_replica: float = inf
    prompt_tokens: float = inf


@dataclass(frozen=True, slots=True)
class Autoscale:
    """A pool has from `least` to `most` units, so that `metric` is at `target`: `outstanding` requests that are not
    over, or `waiting` ones that have not begun, a unit; the share of `kv` in use; or the share of requests that were
    over in the last `window_s` and had met their SLO, whose limits `slo` says by a request's number.

    Looked at every `every_s`. Within `tolerance` of the target nothing changes; nor before what it wants has been so
    for `up_after_s` or `down_after_s`.
    """

    least: int
    most: int
    metric: Literal["outstanding", "waiting", "kv", "slo"]
    target: float
    every_s: float = 15.0
    tolerance: float = 0.1
    up_after_s: float = 0.0
    down_after_s: float = 300.0
    window_s: float = 0.0
    slo: Callable[[int], Mapping[str, float]] = lambda number: {}


@dataclass(frozen=True, slots=True)
class Changes:
    """What happens in a run, to units: replicas on their own, or all those together that step together.

    `initially`: how many of each pool there are at time 0, of those it can have. `cold_start_s` of each pool:
    from one's start until it takes requests. A request that is lost with its replica is sent anew, up to
    `retries` times. `limits` None: all are let in.
    """

    initially: tuple[int, ...]
    cold_start_s: tuple[float, ...] = ()
    events: tuple[Event, ...] = ()
    failures: Mapping[int, Failures] = field(default_factory=dict)
    retries: int = 0
    autoscale: Mapping[int, Autoscale] = field(default_factory=dict)
    limits: Limits | None = None
