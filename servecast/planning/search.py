"""Branch and bound over candidates: the one that seems cheapest is simulated first, and whoever cannot be cheaper than
what is known to do is not simulated at all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context

from servecast.errors import ServecastError
from servecast.planning.candidates import Candidate
from servecast.planning.examine import MEETS, Case, Outcome, examine, look
from servecast.sweeping.runs import ignore_interrupts

Told = Callable[[str, int, int], None]


@dataclass
class Search:
    """What was found: `outcomes` of all candidates, `same` of which resolve to another one of them."""

    outcomes: list[Outcome] = field(default_factory=list)
    same: int = 0

    @property
    def simulated(self) -> int:
        """Simulations in all."""
        return sum(len(outcome.trials) for outcome in self.outcomes)


@contextmanager
def workers(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """So many processes that keep what they have set up. Raises ServecastError when one of them is killed."""
    pool = ProcessPoolExecutor(jobs, get_context("spawn"), ignore_interrupts)
    try:
        yield pool
    except BrokenProcessPool:
        raise ServecastError(
            f"one of {jobs} worker processes ended: killed, or out of memory? Try --workers {max(1, jobs // 2)}"
        ) from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def survey(
    case: Case, candidates: Iterable[Candidate], pool: ProcessPoolExecutor, told: Told
) -> tuple[Search, list[Outcome]]:
    """Look at every candidate: those that cannot be, and, each resolved engine once, those that may."""
    found, todo, keys = Search(), list[Outcome](), set[str]()
    looks = [pool.submit(look, case, candidate) for candidate in candidates]
    for done, future in enumerate(looks, 1):
        outcome = future.result()
        told("set up", done, len(looks))
        if outcome.status:
            found.outcomes.append(outcome)
        elif outcome.key in keys:
            found.same += 1
        else:
            keys.add(outcome.key)
            todo.append(outcome)
    return found, todo


def search(
    case: Case,
    todo: Iterable[Outcome],
    pool: ProcessPoolExecutor,
    jobs: int,
    *,
    budget: float | None = None,
    told: Told = lambda what, done, total: None,
) -> list[Outcome]:
    """What becomes of those that may be: the ones that may be the cheapest are simulated. `budget`: dollars
    per hour at most; `told(what, done, in all)` hears how far it is."""

    def price(candidate: Candidate, replicas: int) -> float:
        return case.rent.price(candidate, replicas + case.rent.spare)

    ranked = sorted(todo, key=lambda o: (price(o.candidate, o.guess), o.candidate.gpus, str(o.candidate)))
    found = list[Outcome]()
    best = float("inf") if budget is None else budget * (1 + 1e-9)
    running: dict[Future[Outcome], Outcome] = {}
    waiting, total = iter(ranked), len(ranked)

    def below(candidate: Candidate) -> int | None:
        """Replicas from which on it is no cheaper than what is known; None while nothing is."""
        return None if best == float("inf") else case.rent.affords(candidate, best) + 1

    while True:
        while len(running) < jobs and (head := next(waiting, None)) is not None:
            limit = below(head.candidate)
            running[pool.submit(examine, case, head.candidate, head.least, head.guess, limit)] = head
        if not running:
            return found
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            outcome = future.result()
            del running[future]
            found.append(outcome)
            told("simulated", len(found), total)
            if outcome.status == MEETS:
                best = min(best, price(outcome.candidate, outcome.replicas))
