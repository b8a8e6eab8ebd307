"""Who wins a plan: the cheapest that meets the requirements, with as many replicas as fresh seeds ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import replace

from servecast.comparing.scenarios import fingerprint
from servecast.planning.candidates import Candidate
from servecast.planning.evidence import verify
from servecast.planning.examine import MEETS, Case, Outcome, Trial, setup_of
from servecast.planning.load import fresh
from servecast.planning.search import Told, search

FRESH_SEED = 1_000_003
"""Seeds of the runs that verify begin here, far from those that people write."""
SEEDS = 2
"""So many of them."""
ATTEMPTS = 6
"""How often one configuration gets more replicas before it drops out."""


def hunt(
    case: Case, todo: Sequence[Outcome], budget: float | None, pool: ProcessPoolExecutor, jobs: int, told: Told
) -> tuple[Contest, Candidate | None]:
    """The contest of those that may be, and who wins it; None where nobody does. `budget` in dollars per hour."""
    found = search(case, todo, pool, jobs, budget=budget, told=told)
    contest, searched = Contest(case, found), _least(case, found, budget)
    while (winner := contest.winner(pool, told)) is not None:
        # Fresh seeds may have made dearer what ended the search: who was too dear for that may be cheaper now.
        limit = contest.price(winner) * (1 - 1e-6)
        if limit <= searched * (1 + 1e-9):
            break
        found = search(case, [o for o in todo if not contest.knows(o.candidate)], pool, jobs, budget=limit, told=told)
        contest.add(found)
        searched = _least(case, found, limit)
    return contest, winner


def _least(case: Case, found: Iterable[Outcome], budget: float | None) -> float:
    """Dollars per hour below which a search has left nobody out."""
    prices = [case.rent.price(o.candidate, o.replicas + case.rent.spare) for o in found if o.status == MEETS]
    return min(prices, default=float("inf") if budget is None else budget)


def second(
    contest: Contest,
    winner: Candidate,
    todo: Sequence[Outcome],
    budget: float | None,
    pool: ProcessPoolExecutor,
    jobs: int,
    told: Told,
) -> Candidate | None:
    """The cheapest with other hardware than the winner's, of which no fresh seeds are asked."""

    def other(candidate: Candidate) -> bool:
        return candidate.hardware != winner.hardware

    known = contest.cheapest(other)
    limit = budget if known is None else contest.price(known) * (1 - 1e-6)
    unknown = [o for o in todo if other(o.candidate) and not contest.knows(o.candidate)]
    contest.add(search(contest.case, unknown, pool, jobs, budget=limit, told=told))
    return contest.cheapest(other)


class Contest:
    """Who meets the requirements in the search, by what it costs, and with how many replicas it does on fresh seeds."""

    def __init__(self, case: Case, outcomes: Iterable[Outcome]) -> None:
        self.case = case
        self.outcomes: dict[Candidate, Outcome] = {}
        self.replicas: dict[Candidate, int] = {}  # of those that are in it
        self.checked: dict[tuple[Candidate, int], list[Trial]] = {}
        self.one_course = False
        self.add(outcomes)

    def add(self, outcomes: Iterable[Outcome]) -> None:
        """What a search has found."""
        for outcome in outcomes:
            if (before := self.outcomes.get(outcome.candidate)) is not None:
                trials = {trial.replicas: trial for trial in (*before.trials, *outcome.trials)}
                outcome = replace(outcome, trials=tuple(trials[n] for n in sorted(trials)))
            self.outcomes[outcome.candidate] = outcome
            if outcome.status == MEETS:
                self.replicas[outcome.candidate] = outcome.replicas

    def knows(self, candidate: Candidate) -> bool:
        """Whether the search found how many replicas it takes."""
        return self.outcomes[candidate].status == MEETS

    def raised(self, candidate: Candidate) -> bool:
        """Whether it takes more than the search said."""
        return self.replicas[candidate] > self.outcomes[candidate].replicas

    def outcome(self, candidate: Candidate) -> Outcome:
        """What the search found, with as many replicas as it takes."""
        replicas = self.replicas[candidate]
        checked = self.checked.get((candidate, replicas), [])[:1]
        found = self.outcomes[candidate]
        return replace(found, replicas=replicas, trials=found.trials + tuple(checked) * self.raised(candidate))

    def price(self, candidate: Candidate) -> float:
        """Dollars per hour, spare replicas included."""
        return self.case.rent.price(candidate, self.replicas[candidate] + self.case.rent.spare)

    def cheapest(self, among: Callable[[Candidate], bool]) -> Candidate | None:
        """Of those that are in it."""
        return min(filter(among, self.replicas), key=lambda c: (self.price(c), str(c)), default=None)

    def winner(self, pool: Executor, told: Told) -> Candidate | None:
        """The cheapest one that meets everything on fresh seeds: who does not gets more replicas, or drops out."""
        while (candidate := self.cheapest(lambda _: True)) is not None:
            told("verified", len(self.checked), len(self.checked) + 1)
            replicas = self.replicas[candidate]
            if (candidate, replicas) not in self.checked:
                self.checked[candidate, replicas] = self._check(candidate, replicas, pool)
            if all(trial.meets(self.case.requirements) for trial in self.checked[candidate, replicas]):
                return candidate
            replicas += max(1, replicas // 10)
            tried = sum(other == candidate for other, _ in self.checked)
            if tried == ATTEMPTS or replicas > self.case.rent.affords(candidate):
                del self.replicas[candidate]
            else:
                self.replicas[candidate] = replicas
        return None

    def _check(self, candidate: Candidate, replicas: int, pool: Executor) -> list[Trial]:
        setup = setup_of(self.case.base, candidate, replicas)
        self.one_course = fingerprint(fresh(setup, FRESH_SEED, 0)) == fingerprint(setup)
        trial = self.outcomes[candidate].trial
        if self.one_course and trial is not None and trial.replicas == replicas:
            return [trial]
        seeds = range(FRESH_SEED, FRESH_SEED + (1 if self.one_course else SEEDS))
        runs = [pool.submit(verify, self.case, candidate, replicas, seed) for seed in seeds]
        return [run.result() for run in runs]
