"""Why a forecast misses: each change worth trying is simulated on the same requests, and judged by the error it leaves.

It knows how errors are measured, and not what is tried: that is `changes.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from reports.validation.causes import Cause, Causes
from reports.validation.compared import errors, figures, match, matched_figures, mean_error
from reports.words import requests as counted
from reports.words import seconds
from servecast.errors import ServecastError
from servecast.run import simulate
from servecast.validation.changes import Change, changes

if TYPE_CHECKING:
    from reports.measured import MeasuredRun
    from reports.validation.compared import Figures
    from servecast.validation.replay import Replay
    from sim.result import Result

FIRST, COMPANY = 4_000, 1_000
"""Requests that changes are judged by, in longer runs; and how many more are simulated, to keep the last of them
company."""
CLOSE = 0.01
"""A mean error that needs no explanation."""
LEAST_OVERHEAD_MS, MOST_OVERHEAD_MS = 0.1, 500.0
"""A client that adds less explains nothing, and none adds more."""


@dataclass(frozen=True, slots=True)
class _Court:
    """The measured run, and the requests that every change is simulated on; `first`: those that are compared, None for
    all."""

    run: MeasuredRun
    replay: Replay
    first: int | None

    def figures(self, result: Result) -> tuple[Figures, Figures]:
        """(predicted, measured) figures; of the first requests of a run, latencies only."""
        rows = self.replay.rows
        matched = None if rows is None else match(result, self.run, rows)
        if self.first is not None and matched is not None:
            return matched_figures(matched.head(self.first))
        predicted, measured = figures(result, self.run, matched)
        if self.first is not None:
            measured = {key: value for key, value in measured.items() if key.endswith("_ms")}
        return predicted, measured


def causes_of(run: MeasuredRun, replay: Replay, result: Result) -> Causes:
    """What is left of the error of `result`, the forecast of `replay`, with each change."""
    error = mean_error(*_Court(run, replay, None).figures(result))
    if error is None:
        return Causes(None, why_none="no latency and no throughput was measured")
    if error < CLOSE:
        return Causes(error, why_none="the forecast is close enough")
    court, over = _Court(run, replay, None), ""
    if len(replay.setup.requests.trace) > FIRST + COMPANY:
        court, over = _Court(run, _beginning(replay), FIRST), f"the first {counted(FIRST)}"
        result = simulate(court.replay.setup)
    return _tried(court, result, over)


def _tried(court: _Court, base: Result, over: str) -> Causes:
    predicted, measured = court.figures(base)
    tried, refused = [], []
    ideas: list[tuple[str, Callable[[], Cause]]] = [
        (change.words, lambda change=change: _try(court, base, change))  # type: ignore[misc]
        for change in changes(court.replay.setup)
    ]
    ideas += [("a client that is slow", lambda: _client(predicted, measured))]
    for words, attempt in ideas:
        try:
            tried.append(attempt())
        except ServecastError as error:
            refused.append(f"{words}: {error.problems[0]}")
    tried.sort(key=lambda cause: cause.mean_error)
    return Causes(mean_error(predicted, measured), tuple(tried), tuple(refused), over)


def _try(court: _Court, base: Result, change: Change) -> Cause:
    """Raises ServecastError where the deployment would not start, or refuse requests that ran."""
    setup = replace(change.apply(court.replay.setup.scenario), requests=court.replay.setup.requests)
    result = simulate(setup)
    if result.finished < base.finished:
        raise ServecastError(f"it would reject {counted(base.finished - result.finished)}")
    return _cause(change.words, change.sets(), *court.figures(result))


def _client(predicted: Figures, measured: Figures) -> Cause:
    """A constant on TTFT and E2E of every request, as large as the difference of the medians (else means) of TTFT."""
    key = next((key for key in ("p50_ttft_ms", "mean_ttft_ms") if key in predicted and key in measured), None)
    if key is None:
        raise ServecastError("no TTFT was measured")
    more = measured[key] - predicted[key]
    if not LEAST_OVERHEAD_MS <= more <= MOST_OVERHEAD_MS:
        raise ServecastError(f"the median TTFTs are {seconds(abs(more) / 1e3)} apart, which is no client's doing")
    shifted = {k: v + more if k.endswith(("_ttft_ms", "_e2el_ms")) else v for k, v in predicted.items()}
    return _cause(f"{more:.3g} ms of the client's own on every request (TTFT and E2E)", (), shifted, measured)


def _cause(words: str, sets: tuple[str, ...], predicted: Figures, measured: Figures) -> Cause:
    error = mean_error(predicted, measured)
    if error is None:
        raise ServecastError("nothing can be compared")
    return Cause(words, sets, error, errors(predicted, measured))


def _beginning(replay: Replay) -> Replay:
    """The first requests of a long run, and those that keep them company."""
    requests, count = replay.setup.requests, FIRST + COMPANY
    cut = replace(
        requests,
        trace=requests.trace.take(np.arange(count), f"first {count:,} requests"),
        think_s=None if requests.think_s is None else requests.think_s[:count],
        priority=None if requests.priority is None else requests.priority[:count],
    )
    setup = replace(replay.setup, requests=cut)
    return replace(replay, setup=setup, rows=None if replay.rows is None else replay.rows[:count])
