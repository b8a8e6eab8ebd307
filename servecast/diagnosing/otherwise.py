"""What the real server may have that the scenario does not say: settings, faults and loads under which the simulation
would show what is seen. Tried where it does not."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from reports.diagnosing.facts import Symptom
from servecast.diagnosing.conditions import async_option, prefix_option
from servecast.diagnosing.evidence import Evidence
from servecast.diagnosing.rank import typed
from servecast.diagnosing.remedies import Change
from servecast.sweeping.runs import DONE, Row
from servecast.validation.changes import changes
from servecast.yamlfile import parse_value

PLACES = (4, 8, 16, 32, 64)
"""Limits of a batch that people set."""
NEAR = 1.5
"""A simulation within this factor of what is seen is like it."""
MOST = 3
"""How many are told of."""


def others(e: Evidence, recorded: bool) -> Iterator[Change]:
    """All that is worth trying on a pool; where requests are `recorded`, no other load."""
    options = e.engine.options
    for places in (n for n in PLACES if n < e.engine.max_num_seqs):
        yield from _option(e, e.option("max_num_seqs"), places)
    for name in ("enforce_eager", "disable_cuda_graph"):
        if options.get(name) is False:
            yield from _option(e, name, True)
    for off in (prefix_option(e), async_option(e)):
        if off is not None and options[off[0]] is off[1]:
            yield from _option(e, off[0], not off[1])
    for tokens in (b for b in (512, 2048, 16384) if b != e.budget and b >= e.engine.max_num_seqs):
        yield from _option(e, e.budget_option, tokens)
    blocks = e.option("num_gpu_blocks_override")
    if blocks is not None and blocks.startswith("num_gpu_blocks"):
        for part in (2, 4):
            yield Change(f"a KV cache 1/{part} as large", {e.key(blocks): e.pool.memory.num_gpu_blocks // part})
    for factor in (1.5, 2.0, 3.0):
        kernels = factor * (e.setup.scenario.host.kernels or 1.0)
        if kernels < 10:
            words = f"GPUs {factor:g} times as slow (throttled clocks, or shared with others)"
            yield Change(words, {e.host("kernels"): kernels})
    yield Change("a host that takes 10 ms a step (busy or slow CPU cores)", {e.host("step"): "10ms"})
    yield Change("a front end that takes 100 ms a request", {e.host("request"): "100ms"})
    if e.replicas > 1:
        yield Change(f"{e.replicas - 1} replicas (one is down)", {e.place("replicas"): e.replicas - 1})
    if not recorded:
        yield from _load(e)
    if len(e.setup.pools) == 1:
        for change in changes(e.setup):
            pairs = (text.partition("=") for text in change.sets())
            yield Change(change.words, {key: parse_value(value, key) for key, _, value in pairs})


def _option(e: Evidence, option: str | None, value: Any) -> Iterator[Change]:
    if option is not None:
        yield Change(f"{option} {str(value).lower()}", {e.key(option): value})


def _load(e: Evidence) -> Iterator[Change]:
    workload = e.setup.scenario.workload
    for factor in (0.25, 0.5, 1.5, 2.0, 3.0):
        words = f"{factor:g} times the traffic"
        if workload.arrivals is not None and "rate" in workload.arrivals:
            yield Change(words, {"workload.arrivals.rate": factor * workload.arrivals["rate"]})
        elif workload.trace is not None:
            yield Change(words, {"workload.rate_scale": factor * (workload.rate_scale or 1.0)})


def explaining(
    symptoms: Sequence[Symptom], tried: Sequence[tuple[Change, Row]]
) -> list[tuple[Change, tuple[float | None, ...]]]:
    """Those under which the simulation has all symptoms about as they are seen, the nearest first, with its figures;
    of one change with several values the nearest."""
    found = []
    for change, row in tried:
        if row["status"] != DONE or row["unserved"] > 0.5:
            continue
        apart = _apart(symptoms, row["values"])
        if apart is not None and apart <= math.log(NEAR):
            found.append((apart, change, tuple(row["values"])))
    found.sort(key=lambda each: each[0])
    first: dict[tuple[str, ...], tuple[Change, tuple[float | None, ...]]] = {}
    for _, change, values in found:
        first.setdefault(tuple(change.point), (change, values))
    return list(first.values())[:MOST]


def _apart(symptoms: Sequence[Symptom], values: Sequence[float | None]) -> float | None:
    """The largest distance, as a logarithm; None where a figure is not there."""
    apart = 0.0
    for symptom, value in zip(symptoms, values, strict=True):
        if value is None or symptom.observed is None:
            return None
        seen, ours = symptom.badness(symptom.observed), symptom.badness(value)
        if not (0 < seen < math.inf and 0 < ours < math.inf):
            return None
        apart = max(apart, abs(math.log(ours / seen)))
    return apart


def told(symptoms: Sequence[Symptom], found: Sequence[tuple[Change, tuple[float | None, ...]]]) -> Iterator[str]:
    """What was found, in sentences."""
    for change, values in found:
        pairs: Iterator[tuple[Symptom, float | None]] = zip(symptoms, values, strict=True)
        figures = ", ".join(f"{symptom.name} {symptom.said(value)}" for symptom, value in pairs)
        yield f"The simulation would show it with {change.words}: {figures} ({_sets(change.point)})."


def _sets(point: Mapping[str, Any]) -> str:
    return " ".join(f"--set {key}={typed(value)}" for key, value in point.items())
