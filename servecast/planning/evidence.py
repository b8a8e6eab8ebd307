"""How much a plan's winner can bear, and how sure it is: fresh seeds, more traffic, other lengths, errors of prices."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING

from servecast.planning.candidates import Candidate
from servecast.planning.examine import Case, Trial, judged, setup_of, trial_of, why_not
from servecast.planning.load import fresh, scaled
from servecast.planning.slo import Requirement

if TYPE_CHECKING:
    from servecast.setup import Setup

TAIL = 200
"""Requests that should lie beyond a percentile for it to be told apart from noise (20,000 for p99)."""
FINEST = 0.02
"""How finely the largest traffic is looked for."""
WEIGHED = 10_000
"""Requests under a changed load, or an error of prices, unless the requirements need fewer: over short runs work seems
to pile up while the longest answers are still to come."""
SHIFTS = (0.8, 1.25)
"""Factors on rate and lengths under which it is simulated again."""
MOST_TRAFFIC = 4.0
"""The factor on the traffic up to which the headroom is looked for."""


@dataclass(frozen=True, slots=True)
class Shift:
    """What became of the requirements under a changed load: `what` ("rate", "prompt", "output") times `factor`."""

    what: str
    factor: float
    trial: Trial


@dataclass(frozen=True, slots=True)
class Evidence:
    """`verified`: the runs that checked the answer. `headroom`: the largest factor on the traffic that
    still meets everything (at least; None where more than `MOST_TRAFFIC` times), and `breaks`, what fails first beyond
    it. `draws`: under errors of prices and host times."""

    verified: tuple[Trial, ...]
    headroom: float | None
    breaks: str
    shifts: tuple[Shift, ...]
    draws: tuple[Trial, ...]

    @property
    def draws_met(self) -> int:
        """Draws of the error under which everything is met."""
        return sum(trial.keeps_up for trial in self.draws)


def enough(requirements: tuple[Requirement, ...]) -> int:
    """Requests that the finest percentile asks for."""
    return max([1000, *(ceil(TAIL / r.tail - 1e-6) for r in requirements if r.tail < 1)])


def verify(case: Case, candidate: Candidate, replicas: int, seed: int) -> Trial:
    """One run under another seed, with requests enough where they are drawn."""
    setup = fresh(setup_of(case.base, candidate, replicas), seed, enough(case.requirements))
    return trial_of(setup, case.requirements, replicas)


def under(case: Case, candidate: Candidate, replicas: int, what: str, factor: float) -> Trial:
    """One run under a changed load."""
    setup = scaled(_longer(setup_of(case.base, candidate, replicas), case.requirements), **{what: factor})
    return trial_of(setup, case.requirements, replicas)


def _longer(setup: Setup, requirements: tuple[Requirement, ...]) -> Setup:
    """With requests enough to tell whether work piles up, where they are drawn."""
    return fresh(setup, setup.scenario.seed, min(WEIGHED, enough(requirements)))


def headroom(case: Case, candidate: Candidate, replicas: int) -> tuple[float | None, str]:
    """The largest factor on the traffic that meets everything, and what fails beyond it."""
    low, high, said = 1.0, 0.0, ""
    at = 1.15
    while not high:
        trial = under(case, candidate, replicas, "rate", at)
        if trial.meets(case.requirements):
            low, at = at, at * 1.3
            if low >= MOST_TRAFFIC:
                return None, ""
        else:
            high, said = at, why_not(trial, case.requirements)
    while high - low > FINEST * low:
        middle = (low + high) / 2
        trial = under(case, candidate, replicas, "rate", middle)
        if trial.meets(case.requirements):
            low = middle
        else:
            high, said = middle, why_not(trial, case.requirements)
    return low, said


def drawn(case: Case, candidate: Candidate, replicas: int, count: int) -> list[Trial]:
    """Under so many draws of what may be wrong with prices and host times; `keeps_up` says whether all is met."""
    from servecast.intervals import results

    found = []
    for result in results(_longer(setup_of(case.base, candidate, replicas), case.requirements), count):
        trial = judged(result, case.requirements, replicas)
        found.append(replace(trial, keeps_up=trial.meets(case.requirements)))
    return found


def evidence(
    case: Case,
    candidate: Candidate,
    replicas: int,
    pool: ProcessPoolExecutor,
    verified: tuple[Trial, ...],
    draws: int,
    told: Callable[[str, int, int], None],
) -> Evidence:
    """All of it, beside the runs that verified it."""
    more = pool.submit(headroom, case, candidate, replicas)
    errors = pool.submit(drawn, case, candidate, replicas, draws)
    changed = {
        (what, factor): pool.submit(under, case, candidate, replicas, what, factor)
        for what in ("rate", "prompt", "output")
        for factor in SHIFTS
    }
    shifts = []
    for done, ((what, factor), future) in enumerate(changed.items(), 1):
        shifts.append(Shift(what, factor, future.result()))
        told("weighed", done, len(changed) + 2)
    most, breaks = more.result()
    told("weighed", len(changed) + 1, len(changed) + 2)
    found = errors.result()
    told("weighed", len(changed) + 2, len(changed) + 2)
    return Evidence(verified, most, breaks, tuple(shifts), tuple(found))
