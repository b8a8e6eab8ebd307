"""Runs that several tests look at; each takes well under a second."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from reports.html import report_html
from sim import cluster
from sim.changes import Changes, Event
from sim.result import Result
from tests.reports.helpers import run

FAILING = Changes((2, 1), (1.0, 1.0), (Event(3.0, "fail", 0), Event(4.0, "start", 1), Event(6.0, "drain", 0, 1)))
SLO = {"ttft": 1.0, "tpot": 0.05}


def partial() -> Result:
    """A run that was stopped when 100 requests were done."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster, "EVENTS_PER_CHECK", 50)
        return run(300, 20.0, keep_going=lambda done, now: done < 100)


RUNS: dict[str, Callable[[], Result]] = {
    "stable": lambda: run(300, 8.0, slo=SLO),
    "saturated": lambda: run(1000, 30.0, kv_blocks=1500, slo=SLO | {"e2e": 30.0}),
    "two replicas": lambda: run(200, 16.0, replicas=2),
    "two pools": lambda: run(200, 16.0, pools=2),
    "failing": lambda: run(200, 16.0, replicas=2, pools=2, changes=FAILING),
    "closed loop": lambda: run(200, concurrency=16),
    "one request": lambda: run(1),
    "one token each": lambda: run(20, lengths=({"kind": "fixed", "tokens": 100}, {"kind": "fixed", "tokens": 1})),
    "all rejected": lambda: run(
        5, max_model_len=2048, lengths=({"kind": "fixed", "tokens": 4000}, {"kind": "fixed", "tokens": 10}), slo=SLO
    ),
    "partial": partial,
}


@pytest.fixture(scope="session")
def runs() -> Callable[[str], Result]:
    """A run of RUNS by name, simulated once."""
    return cache(lambda name: RUNS[name]())


@pytest.fixture(scope="session")
def pages(runs: Callable[[str], Result]) -> Callable[[str], str]:
    """The report of a run of RUNS by name, made once."""
    return cache(lambda name: report_html(runs(name)))
