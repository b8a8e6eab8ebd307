"""One run of a diagnosis: a scenario with a change and a seed in, its symptoms and what else became of it out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from reports.diagnosing.facts import Symptom
from servecast.diagnosing.symptoms import value_of
from servecast.errors import ServecastError
from servecast.requests import Requests
from servecast.run import Result, simulate
from servecast.setup import Setup, set_up
from servecast.sweeping.runs import DONE, FAILED, INVALID, Base, Row, Task

MOST = 2_000
"""Requests of a run that are simulated: the first ones of longer workloads."""
BESIDE = {"p99_ttft_ms": "p99 ttft", "p99_tpot_ms": "p99 tpot", "output_throughput": "throughput"}
"""Figures that a change should not harm, and what they are called."""


@dataclass(frozen=True, slots=True)
class Court:
    """What is tried: the scenario `base`, with the recorded `requests` where a measured run gave them, and the
    `symptoms` that are looked at."""

    base: Base
    requests: Requests | None
    symptoms: tuple[Symptom, ...]

    def set_up(self, point: Mapping[str, Any], seed: int | None = None) -> Setup:
        """The scenario with a change. Raises ServecastError where that cannot be."""
        setup = set_up(self.base.scenario(point if seed is None else {**point, "seed": seed}))
        return setup if self.requests is None else replace(setup, requests=self.requests)


def beginning(setup: Setup) -> Setup:
    """The first MOST requests."""
    r = setup.requests
    if len(r.trace) <= MOST:
        return setup
    cut = replace(
        r,
        trace=r.trace.take(np.arange(MOST), f"first {MOST:,} requests"),
        think_s=None if r.think_s is None else r.think_s[:MOST],
        priority=None if r.priority is None else r.priority[:MOST],
    )
    return replace(setup, requests=cut)


def attempt(court: Court, points: Sequence[Mapping[str, Any]], task: Task) -> Row:
    """Simulate the change of the task's number, and say what came of it; whatever goes wrong is in the row."""
    row: Row = {"id": task.id, "point": task.number, "seed": task.seed, "error": None}
    status = INVALID
    try:
        setup = beginning(court.set_up(points[task.number], task.seed))
        status = FAILED
        return row | seen(setup, simulate(setup), court.symptoms) | {"status": DONE}
    except ServecastError as error:
        return row | {"status": status, "error": error.problems[0]}
    except Exception as error:  # the other runs go on
        return row | {"status": FAILED, "error": f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"}


def seen(setup: Setup, result: Result, symptoms: Sequence[Symptom]) -> Row:
    """The row of a run."""
    summary = result.summary()
    return {
        "values": [value_of(symptom, setup, result) for symptom in symptoms],
        "beside": {key: summary[key] for key in BESIDE},
        "saturated": bool(summary["saturated"]),
        "unserved": 1 - result.finished / summary["submitted"] if summary["submitted"] else 1.0,
    }
