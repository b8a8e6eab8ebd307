"""How many replicas of one kind other traffic takes: runs that are few, since each answers for others. More replicas
are no worse, and more traffic is no easier: what so many replicas carry, more of them carry too."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Executor
from math import ceil, inf, log

from servecast.planning.candidates import Candidate
from servecast.planning.evidence import FINEST, MOST_TRAFFIC, WEIGHED, enough
from servecast.planning.examine import Case, screened, setup_of, trial_of
from servecast.planning.load import fresh, scaled
from servecast.planning.search import Told

NARROW = 0.03
"""How finely the traffic that so many replicas carry is looked for, as a share of it."""
LONGEST = 10
"""Times the requests of a run under the scenario's traffic that are simulated at most."""


def carries(case: Case, candidate: Candidate, replicas: int, factor: float) -> bool:
    """Whether so many replicas meet everything under so many times the traffic. Where requests are drawn, more traffic
    has more of them, so that the run is as long in time."""
    requests = min(WEIGHED, enough(case.requirements)) * min(max(1.0, factor), LONGEST)
    setup = setup_of(case.base, candidate, replicas)
    setup = scaled(fresh(setup, setup.scenario.seed, ceil(requests)), rate=factor)
    trial = screened(setup, case.requirements, replicas) or trial_of(setup, case.requirements, replicas)
    return trial.meets(case.requirements)


class Ladder:
    """Which numbers of replicas of a candidate carry which factors on the case's traffic, and which do not, as far as
    it is known. `guess`: replicas that the traffic itself may take; `runs` counts simulations."""

    def __init__(self, case: Case, candidate: Candidate, guess: int, pool: Executor, jobs: int, told: Told) -> None:
        self._case, self._candidate, self._pool, self._jobs, self._told = case, candidate, pool, jobs, told
        self._first = guess
        self._good: list[tuple[int, float]] = []
        self._bad: list[tuple[int, float]] = []
        self._most = case.rent.affords(candidate)
        self.runs = 0

    def weighed(self, replicas: int, headroom: float | None) -> None:
        """That so many carry the traffic, as few as will do, and how much more (`Evidence`)."""
        self.know(replicas, MOST_TRAFFIC if headroom is None else headroom, True)
        if replicas > 1:
            self.know(replicas - 1, 1.0, False)
        if headroom is not None:
            self.know(replicas, headroom * (1 + FINEST), False)

    def know(self, replicas: int, factor: float, good: bool) -> None:
        """What a run has shown."""
        (self._good if good else self._bad).append((replicas, factor))

    def fewest(self, factors: Iterable[float]) -> dict[float, int | None]:
        """The fewest replicas that carry each factor; None where as many as there may be do not."""
        factors = sorted(set(factors))
        while unsettled := [f for f in factors if self._between(f)[1] - self._between(f)[0] > 1]:
            apart = [unsettled[(2 * i + 1) * len(unsettled) // (2 * self._jobs)] for i in range(self._jobs)]
            self._try({(self._guess(factor), factor) for factor in apart})
        found = {factor: self._between(factor)[1] for factor in factors}
        return {factor: replicas if replicas <= self._most else None for factor, replicas in found.items()}

    def largest(self, replicas: Iterable[int]) -> dict[int, tuple[float, bool]]:
        """The largest factor that each number of replicas is known to carry, and whether a few percent more is known to
        be too much: False where nothing that was tried was."""
        counts = list(replicas)
        while wide := [n for n in counts if inf > self._carried(n)[1] > (1 + NARROW) * self._carried(n)[0]]:
            self._try({(n, sum(self._carried(n)) / 2) for n in wide[: self._jobs]})
        return {n: (self._carried(n)[0], self._carried(n)[1] < inf) for n in counts}

    def _between(self, factor: float) -> tuple[int, int]:
        """(The most replicas that are known not to carry it, the fewest that are known to, or one more than there may
        be.)"""
        low = max((n for n, f in self._bad if f <= factor), default=0)
        high = min((n for n, f in self._good if f >= factor and n > low), default=self._most + 1)
        return low, max(high, low + 1)

    def _carried(self, replicas: int) -> tuple[float, float]:
        """(The most traffic that so many are known to carry, the least that they are known not to.)"""
        high = min((f for n, f in self._bad if n >= replicas), default=inf)
        return max((f for n, f in self._good if n <= replicas and f < high), default=0.0), high

    def _guess(self, factor: float) -> int:
        """How many it may take, between those that are known: in proportion to what is known of the nearest traffic."""

        def far(known: tuple[int, float]) -> float:
            return abs(log(known[1] / factor))

        low, high = self._between(factor)
        enough = min(self._good, key=lambda known: (far(known), known[0]), default=None)
        short = min(self._bad, key=lambda known: (far(known), -known[0]), default=None)
        each = [known[0] / known[1] for known in (enough, short) if known is not None] or [float(self._first)]
        likely = ceil(factor * sum(each) / len(each) - 1e-9)
        if low < likely < high:
            return likely
        if high > self._most:  # far too many would take long
            return min(ceil(1.3 * low) + 1, self._most)
        step = max(1, (high - low) // 3)
        return low + step if likely <= low else high - step

    def _try(self, asked: Iterable[tuple[int, float]]) -> None:
        runs = {(n, f): self._pool.submit(carries, self._case, self._candidate, n, f) for n, f in sorted(asked)}
        for (n, f), run in runs.items():
            self.know(n, f, run.result())
            self.runs += 1
            self._told("other traffic tried", self.runs, self.runs + 1)
