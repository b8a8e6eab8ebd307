"""From a measured run to what is simulated: its recorded requests where they are known, else the scenario's.

It judges nothing: what may be unfair about the comparison is said by `checks.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from reports.words import requests as counted
from servecast.requests import Requests
from servecast.setup import Setup
from workloads.trace import Floats, Ints, Trace

if TYPE_CHECKING:
    import polars as pl

    from reports.measured import MeasuredRun

Bools = NDArray[np.bool_]
AT_THE_LIMIT = 0.8
"""Clients wait for their answers where so many of the requests were sent when as many ran as ever did."""


@dataclass(frozen=True, slots=True)
class Replay:
    """What is simulated. rows: int64[n], the row of the run's table that each request is; None where they do not
    correspond. said: which requests these are, a sentence. notes: what was left out, and what it means."""

    setup: Setup
    rows: Ints | None
    said: str
    notes: tuple[str, ...] = ()


def replay_of(run: MeasuredRun, setup: Setup) -> Replay:
    """The recorded requests, at their times where they are known and else at the scenario's; or the scenario's own."""
    frame = run.requests
    if frame is None:
        return _own(setup, "the file has aggregates only")
    done, good = _done(frame), _usable(frame)
    if run.completed is not None and run.completed > int(done.sum()):
        return _own(setup, f"the file holds only {int(done.sum()):,} of the {counted(run.completed)} that ran")
    if not good.any():
        return _own(setup, "the file does not say how long prompts and answers were")
    sent = frame["sent_s"].fill_null(np.nan).to_numpy()
    timed = good & ~np.isnan(sent)
    if timed.any():
        return _recorded(run, setup, frame, timed, sent)
    return _at_the_scenarios_times(run, setup, frame, good)


def _done(frame: pl.DataFrame) -> Bools:
    done: Bools = frame["error"].is_null().to_numpy()
    return done


def _usable(frame: pl.DataFrame) -> Bools:
    """Rows that can be replayed: they succeeded, and both lengths are known and not 0."""
    lengths = (frame["input_tokens"] > 0) & (frame["output_tokens"] > 0)
    usable: Bools = _done(frame) & lengths.fill_null(False).to_numpy()
    return usable


def _recorded(run: MeasuredRun, setup: Setup, frame: pl.DataFrame, good: Bools, sent: Floats) -> Replay:
    rows = np.flatnonzero(good)
    rows = rows[np.argsort(sent[rows], kind="stable")]
    notes = [*_left_out(frame, good, "lengths or time"), *_waiting(run, frame, rows, sent[rows])]
    requests = Requests(_trace(run, frame, rows, sent[rows]), follow=False)
    said = f"{_which(frame, rows)}, at the times at which they were sent"
    return Replay(replace(setup, requests=requests), rows, f"Replayed: {said}.", tuple(notes))


def _at_the_scenarios_times(run: MeasuredRun, setup: Setup, frame: pl.DataFrame, good: Bools) -> Replay:
    rows, theirs = np.flatnonzero(good), setup.requests
    if theirs.follow:
        return _own(setup, "the file does not say when requests were sent, and the scenario's belong to sessions")
    if len(theirs.trace) < len(rows):
        return _own(
            setup,
            f"the file does not say when its {counted(len(rows))} were sent, and the scenario has only "
            f"{len(theirs.trace):,} to take the times from (workload.num_requests)",
        )
    trace = _trace(run, frame, rows, theirs.trace.arrival_s[: len(rows)])
    think_s = None if theirs.think_s is None else theirs.think_s[: len(rows)]
    requests = Requests(trace, follow=False, concurrency=theirs.concurrency, think_s=think_s)
    if theirs.concurrency is not None:
        when = f"by {theirs.concurrency:,} clients who wait for their answers, as the scenario says"
    else:
        when = "at the scenario's times: the file does not say when they were sent, so request by request they differ"
    said = f"Replayed: {_which(frame, rows)}, {when}."
    return Replay(replace(setup, requests=requests), rows, said, tuple(_left_out(frame, good, "lengths")))


def _own(setup: Setup, why: str) -> Replay:
    said = f"Simulated: the scenario's own {counted(len(setup.requests.trace))}, since {why}."
    return Replay(setup, None, said)


def _trace(run: MeasuredRun, frame: pl.DataFrame, rows: Ints, arrival_s: Floats) -> Trace:
    output = frame["output_tokens"][rows].to_numpy()
    return Trace(arrival_s, frame["input_tokens"][rows].to_numpy(), output, output, source=f"recorded: {run.source}")


def _which(frame: pl.DataFrame, rows: Ints) -> str:
    if len(rows) == len(frame):
        return f"the {counted(len(rows))} of the file"
    return f"{len(rows):,} of the file's {counted(len(frame))}"


def _left_out(frame: pl.DataFrame, good: Bools, unknown: str) -> list[str]:
    """Which rows are not replayed."""
    failed, lacking = int((~_done(frame)).sum()), int((_done(frame) & ~good).sum())
    said = []
    if failed:
        said.append(
            f"{counted(failed)} that failed {_is(failed)} left out of the replay; what the engine did for them is "
            "not simulated"
        )
    if lacking:
        said.append(f"{counted(lacking)} without {unknown} {_is(lacking)} left out of the replay: its load is lower")
    return said


def _is(count: int) -> str:
    return "is" if count == 1 else "are"


def _waiting(run: MeasuredRun, frame: pl.DataFrame, rows: Ints, sent: Floats) -> list[str]:
    """Says so where the recorded times depend on the recorded answers."""
    if run.concurrency is not None:
        who = f"the client kept at most {run.concurrency:,.0f} requests running"
    elif (limit := _limit(sent, frame["e2e_s"][rows].fill_null(np.nan).to_numpy())) is not None:
        who = f"it looks as if {limit:,} clients had waited for their answers"
    else:
        return []
    return [
        f"{who}; requests are replayed when they were sent all the same: where the forecast is slower than the engine "
        "was they pile up, as waiting clients would not let them"
    ]


def _limit(sent: Floats, lasting: Floats) -> int | None:
    """How many clients waited for their answers, in a run that looks like it."""
    if np.isnan(lasting).any():
        return None
    ended = np.searchsorted(np.sort(sent + lasting), sent, side="right")
    running = np.arange(1, len(sent) + 1) - ended
    most = int(running.max())
    if most < 2 or len(sent) <= 2 * most:
        return None
    return most if float(np.mean(running[most - 1 :] == most)) >= AT_THE_LIMIT else None
