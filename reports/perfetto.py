"""A run as a trace that ui.perfetto.dev and chrome://tracing show: steps of replicas, and requests with their phases.

A process a replica. Its first track has the rows of the step log (a run of equal decode steps is one slice); on the
other tracks are requests, each on the first one that is free, as a slice that holds those of its phases: queue, until
its first step; prefill, until its first token; decode, until its last. What was turned away is a moment, in a process
of its own. Format: Trace Event Format (JSON), times in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

import numpy as np

from reports.simulated import SimulatedRun
from reports.words import requests as counted
from servecast.errors import ServecastError

if TYPE_CHECKING:
    import polars as pl

FILE = "perfetto.json"
MOST = 250_000
"""Events: a browser shows that many at ease, in a file of about 60 MB."""
A_REQUEST = 4
"""Events of a request: itself and its phases."""
ARGS = (
    "steps", "prefill_requests", "prefill_tokens", "decodes", "kv_tokens", "running", "waiting", "kv_blocks",
    "preempted",
)  # fmt: skip
FACTS = ("status", "reason", "class", "prompt_tokens", "cached_tokens", "output_tokens", "preemptions", "samples")
PHASES = ("queue", "prefill", "decode")


def write(run: SimulatedRun, notes: list[str], window: tuple[float, float] | None = None) -> Iterator[str]:
    """The trace, one event a line. window: seconds; all that overlaps it is shown, as a whole.

    Of more than MOST events only the first, which is said in `notes` and in the trace. Raises ServecastError where
    the window is none, or holds nothing.
    """
    times = [run.steps["end_s"].max(), run.requests["arrival_s"].max(), run.requests["finish_s"].max()]
    end_s = max(float(time) for time in times if time is not None)  # type: ignore[arg-type]
    since, until = window or (0.0, end_s)
    if window is not None and not since < until:
        raise ServecastError(f"the window from {since:g} to {until:g} s is empty: give its start, and then its end")
    requests = _overlapping(_ends(run.requests, end_s), "arrival_s", "over_s", since, until)
    steps = _overlapping(run.steps, "start_s", "end_s", since, until)
    if not len(steps) and not len(requests):
        raise ServecastError(f"nothing happens from {since:g} to {until:g} s: the run goes from 0 to {end_s:g} s")
    asked = len(steps) + len(requests)
    steps, requests = _first(steps, requests)
    if window is not None:
        notes.append(f"shown is what overlaps the window from {since:g} to {until:g} s of {end_s:g} s")
    if len(steps) + len(requests) < asked:
        begins = np.concatenate([steps["start_s"].to_numpy(), requests["arrival_s"].to_numpy()])
        notes.append(
            f"cut off at {begins.max():g} s, after {MOST:,} events: choose a window (START END, in seconds) for what "
            "comes later"
        )
    rows, others = len(run.steps) - len(steps), len(run.requests) - len(requests)
    if rows or others:
        notes.append(
            f"left out: {rows:,} of {len(run.steps):,} rows of steps, {others:,} of {counted(len(run.requests))}"
        )
    told = {"simulated_by": run.made_by, "name": run.manifest["name"], "notes": list(notes)}
    yield f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(told)}, "traceEvents": ['
    separator = "\n"
    for event in _events(run, steps, requests):
        yield separator + json.dumps(event, allow_nan=False)
        separator = ",\n"
    yield "\n]}\n"


def _ends(requests: pl.DataFrame, end_s: float) -> pl.DataFrame:
    """With `over_s`, when each request was over: at its arrival where it was rejected, at the end where it was not."""
    import polars as pl

    rejected = pl.when(pl.col("status") == "rejected").then("arrival_s").otherwise(end_s)
    return requests.with_columns(over_s=pl.coalesce("finish_s", rejected))


def _overlapping(rows: pl.DataFrame, begin: str, end: str, since: float, until: float) -> pl.DataFrame:
    return rows.filter((rows[begin] <= until) & (rows[end] >= since))


def _first(steps: pl.DataFrame, requests: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """As many of both as make MOST events, those that begin first."""
    begins = np.concatenate([steps["start_s"].to_numpy(), requests["arrival_s"].to_numpy()])
    events = np.repeat([1, A_REQUEST], [len(steps), len(requests)])
    order = np.argsort(begins, kind="stable")
    kept = np.sort(order[np.cumsum(events[order]) <= MOST])
    return steps[kept[kept < len(steps)]], requests[kept[kept >= len(steps)] - len(steps)]


def _events(run: SimulatedRun, steps: pl.DataFrame, requests: pl.DataFrame) -> Iterator[dict[str, Any]]:
    replicas = sorted({*steps["replica"].unique().to_list(), *requests["replica"].drop_nulls().unique().to_list()})
    names = _pools(run)
    nobody = (max(replicas) if replicas else 0) + 1
    for replica in replicas:
        pool = f" ({names[replica]})" if replica < len(names) else ""
        yield _name("process_name", replica, 0, f"replica {replica}{pool}")
        yield _name("thread_name", replica, 0, "steps")
    for row in steps.sort("start_s").iter_rows(named=True):
        what = "prefill" if row["prefill_tokens"] else "decode" if row["decodes"] else "idle"
        what = "prefill + decode" if row["prefill_tokens"] and row["decodes"] else what
        args = {name: row[name] for name in ARGS}
        yield _slice(what, row["replica"], 0, row["start_s"], row["end_s"], args)
    requests = requests.sort("arrival_s", maintain_order=True)
    tracks = _tracks(requests)
    used: set[tuple[int, int]] = set()
    for row, track in zip(requests.iter_rows(named=True), tracks, strict=True):
        process = nobody if row["replica"] is None else row["replica"]
        if (process, track) not in used:
            used.add((process, track))
            yield _name("thread_name", process, track, f"requests {track}")
            if process == nobody and track == 1:
                yield _name("process_name", nobody, 0, "no replica")
        yield from _request(row, process, track)


def _tracks(requests: pl.DataFrame) -> list[int]:
    """A track for each request, in order of arrival, from 1: the first of its replica on which none is running."""
    tracks = []
    free: dict[int | None, list[int]] = {}
    busy: dict[int | None, list[tuple[float, int]]] = {}
    for replica, begin, end in requests.select("replica", "arrival_s", "over_s").iter_rows():
        running, idle = busy.setdefault(replica, []), free.setdefault(replica, [])
        while running and running[0][0] <= begin:
            heappush(idle, heappop(running)[1])
        tracks.append(heappop(idle) if idle else len(running) + 1)
        heappush(running, (end, tracks[-1]))
    return tracks


def _request(row: Mapping[str, Any], process: int, track: int) -> Iterator[dict[str, Any]]:
    name, end = f"request {row['id']}", row["over_s"]
    args = {key: row[key] for key in FACTS if key in row}
    if row["status"] == "rejected":
        moment = {"name": name, "ph": "i", "s": "t", "ts": _ns(end) / 1e3}
        yield moment | {"pid": process, "tid": track, "args": args}
        return
    yield _slice(name, process, track, row["arrival_s"], end, args)
    times = [row["arrival_s"], row["scheduled_s"], row["first_token_s"], end]
    for phase, begin, stop in zip(PHASES, times, times[1:], strict=False):
        if begin is None or begin > end:  # given up before
            return
        yield _slice(phase, process, track, begin, end if stop is None else min(stop, end), {})


def _pools(run: SimulatedRun) -> list[str]:
    """The pool of each replica, as far as the manifest says it."""
    return [pool["name"] for pool in run.manifest["pools"] for _ in range(pool["replicas"] * pool["dp"])]


def _slice(
    name: str, process: int, track: int, begin_s: float, end_s: float, args: Mapping[str, Any]
) -> dict[str, Any]:
    begin, end = _ns(begin_s), _ns(end_s)
    times = {"ts": begin / 1e3, "dur": (end - begin) / 1e3}
    return {"name": name, "ph": "X", **times, "pid": process, "tid": track, "args": args}


def _name(what: str, process: int, track: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": track, "args": {"name": name}}


def _ns(seconds: float) -> int:
    """Whole nanoseconds, so that what touches or lies within does so exactly."""
    return round(seconds * 1e9)
