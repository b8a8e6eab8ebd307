"""What the winner takes in the course of a day: each hour sized by itself, as if its traffic went on, replicas started
before they are needed; and where the workload has that day, whether it goes well with the fleet that changes."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from servecast.errors import ServecastError
from servecast.planning.candidates import Candidate
from servecast.planning.evidence import WEIGHED
from servecast.planning.examine import Case, Trial, changes_for, setup_of, trial_of
from servecast.planning.ladder import Ladder
from servecast.scenario import Scenario
from servecast.sweeping.runs import Base
from workloads.arrivals import DAY_S, rates_of

HOURS = 24
"""Parts of a day that are sized; of a period of another length, as many."""


@dataclass(frozen=True, slots=True)
class Hour:
    """A part of the day: when it begins and how long it is, in seconds, and its traffic as a factor on the peak's."""

    start_s: float
    length_s: float
    factor: float


@dataclass(frozen=True, slots=True)
class Day:
    """`replicas` of each of the `hours`, the spare ones not among them (None: more than there may be). `peak`: the
    highest rate in requests per second, None where it is the scenario's. `start_s`: how long a replica takes until it
    serves, None where nobody knows. `check`: the workload's own day with the fleet that changes; None where the
    scenario has no such day. `runs`: simulations."""

    hours: tuple[Hour, ...]
    replicas: tuple[int | None, ...]
    peak: float | None
    start_s: float | None
    runs: int
    check: Trial | None = None

    @property
    def period_s(self) -> float:
        """Seconds after which it begins anew."""
        return sum(hour.length_s for hour in self.hours)


def hours_of(text: str) -> tuple[Hour, ...]:
    """24 relative rates, separated by commas. Raises ServecastError."""
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        rates = []
    if len(rates) != HOURS or not max(rates) > 0 or not all(0 <= rate < 1e9 for rate in rates):
        raise ServecastError(
            f"--day {text!r}: expected the relative rates of 24 hours, such as 1,1,1,1,1,2,4,8,9,9,..."
        )
    return tuple(Hour(i * DAY_S / HOURS, DAY_S / HOURS, rate / max(rates)) for i, rate in enumerate(rates))


def profile_of(scenario: Scenario) -> tuple[tuple[Hour, ...], float] | None:
    """(The hours of the workload's own day, its highest rate in requests per second); None where its rate does not
    change over and over. A curve is taken in 24 parts at the highest rate of each."""
    arrivals = scenario.workload.arrivals
    found = None if arrivals is None else rates_of(arrivals)
    if arrivals is None or found is None:
        return None
    lengths, rates = found
    peak = float(rates.max())
    if arrivals["kind"] != "diurnal":
        starts = np.cumsum(lengths) - lengths
        return tuple(
            Hour(float(s), float(n), float(r) / peak) for s, n, r in zip(starts, lengths, rates, strict=True)
        ), peak
    ends = np.cumsum(lengths)
    part = float(ends[-1]) / HOURS
    highest = [
        float(rates[(ends > i * part + 1e-6) & (ends - lengths < (i + 1) * part - 1e-6)].max()) for i in range(HOURS)
    ]
    return tuple(Hour(i * part, part, rate / peak) for i, rate in enumerate(highest)), peak


def steady(base: Base, scenario: Scenario, peak: float) -> Base:
    """The scenario with arrivals that stay at the peak."""
    count = min(scenario.workload.num_requests or WEIGHED, WEIGHED)
    changes = (f"workload.arrivals={{kind: poisson, rate: {peak!r}}}", f"workload.num_requests={count}")
    return replace(base, overrides=(*base.overrides, *changes))


def sized(hours: Sequence[Hour], ladder: Ladder) -> tuple[int | None, ...]:
    """Replicas of each hour; at least one where there is no traffic. `ladder`: of the traffic of the peak."""
    found = ladder.fewest(hour.factor for hour in hours if hour.factor)
    return tuple(found[hour.factor] if hour.factor else 1 for hour in hours)


def day(
    case: Case, candidate: Candidate, hours: tuple[Hour, ...], ladder: Ladder, pool: Executor, peak: float | None
) -> Day:
    """The day of `candidate`. `ladder`: of the traffic of its busiest hour; `peak`: its highest rate, in requests per
    second, where the case's workload itself has these hours."""
    from servecast.changes import cold_start_of

    before = ladder.runs
    setup = setup_of(case.base, candidate)
    found = Day(hours, sized(hours, ladder), peak, cold_start_of(setup.scenario.cluster.pools[0], setup.pools[0]), 0)
    check = None
    if peak is not None and candidate.split is None and None not in found.replicas:
        check = pool.submit(lived, case, candidate, found).result()
    return replace(found, runs=ladder.runs - before, check=check)


def lived(case: Case, candidate: Candidate, found: Day) -> Trial:
    """The case's workload with the fleet that changes."""
    from servecast.setup import set_up

    last_s = float(setup_of(case.base, candidate).requests.trace.arrival_s[-1])
    initial, events = events_of(found, last_s)
    changes = changes_for(case.base, candidate, initial)
    changes["cluster"] |= {"events": events, "cold_start": f"{found.start_s or 0.0}s"}
    setup = set_up(case.base.scenario(changes))
    return trial_of(setup, case.requirements, max(n or 0 for n in found.replicas))


def events_of(found: Day, last_s: float) -> tuple[int, list[dict[str, Any]]]:
    """(Replicas at the beginning, what happens until `last_s`): those that an hour needs beside those that there are
    start so early that they serve when it begins; those that it does not need are drained when it begins, the last
    ones first."""
    wanted, early_s = [n or 0 for n in found.replicas], found.start_s or 0.0
    there, changes, time_s = wanted[0], list[tuple[float, int]](), 0.0
    periods = int(last_s // found.period_s) + 1
    initial = there
    for n, hour in list(zip(wanted, found.hours, strict=True)) * periods:
        if n > there and time_s <= early_s:
            initial += n - there
        elif n != there:
            changes.append((max(time_s - (early_s if n > there else 0.0), 0.0), n - there))
        there, time_s = n, time_s + hour.length_s
    places, events = set(range(initial)), list[dict[str, Any]]()
    for at_s, more in sorted(changes):
        if at_s >= last_s:
            break
        if more > 0:
            events.append({"at": f"{at_s:.6f}s", "start": more})
            places |= set(sorted(set(range(len(places) + more)) - places)[:more])
        for place in sorted(places, reverse=True)[: max(-more, 0)]:
            events.append({"at": f"{at_s:.6f}s", "drain": place})
            places.remove(place)
    return initial, events
