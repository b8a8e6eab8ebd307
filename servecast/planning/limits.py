"""What a limit costs: the cheapest deployment if the first required latency might take half as long, or twice. What the
search has simulated answers for much of it: what misses a limit misses a stricter one too."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

from servecast.planning.candidates import Candidate
from servecast.planning.contest import Contest, hunt
from servecast.planning.examine import BOUND, Case, Outcome, Trial
from servecast.planning.search import Search, Told, survey
from servecast.planning.slo import Requirement

FACTORS = (0.5, 2.0)
"""On the limit of the first requirement."""
MOST_PRICE = 4.0
"""Times the winner's price: what costs more under a stricter limit is not looked for."""


@dataclass(frozen=True, slots=True)
class Limit:
    """The cheapest under another limit, `requirement`, with `replicas` of it, checked on fresh seeds; `candidate` is
    None where nothing that was tried does. Under a stricter limit not all of the engine's limits are tried, so that
    it may be had for less, and nothing that costs more than `MOST_PRICE` times as much. `runs`: simulations."""

    requirement: Requirement
    candidate: Candidate | None
    replicas: int
    runs: int


def limits(
    case: Case,
    searched: Search,
    todo: Sequence[Outcome],
    contest: Contest,
    winner: Candidate,
    budget: float | None,
    pool: ProcessPoolExecutor,
    jobs: int,
    told: Told,
) -> tuple[Limit, ...]:
    """One for each of `FACTORS`; none where what is required first is no latency. `todo`: the candidates that may
    be."""
    first, *others = case.requirements
    if first.metric == "goodput":
        return ()
    found = list[Limit]()
    for factor in FACTORS:
        other = replace(first, limit=factor * first.limit)
        there = replace(case, requirements=(other, *others))
        verified = contest.checked[winner, contest.replicas[winner]]
        if factor < 1 and all(trial.meets(there.requirements) for trial in verified):
            found.append(Limit(other, winner, contest.replicas[winner], 0))  # what is stricter is no cheaper
            continue
        if factor < 1:
            among = [o for o in todo if contest.knows(o.candidate) or o.candidate.settings in ((), winner.settings)]
        else:
            out = [o.candidate for o in searched.outcomes if o.status == BOUND]
            among = [*todo, *survey(there, out, pool, told)[1]]
        known = [_knowing(contest.outcomes.get(o.candidate, o), there.requirements, factor) for o in among]
        price = contest.price(winner)
        best = price * (1 - 1e-6) if factor > 1 else min(MOST_PRICE * price, budget or float("inf"))
        further, cheapest = hunt(there, known, best, pool, jobs, told)
        runs = sum(len(o.trials) for o in further.outcomes.values()) + sum(map(len, further.checked.values()))
        if cheapest is not None:
            found.append(Limit(other, cheapest, further.replicas[cheapest], runs))
        elif factor > 1:
            found.append(Limit(other, winner, contest.replicas[winner], runs))
        else:
            found.append(Limit(other, None, 0, runs))
    return tuple(found)


def _knowing(outcome: Outcome, requirements: tuple[Requirement, ...], factor: float) -> Outcome:
    """The candidate with as many replicas at least as its simulations leave."""
    missed = [trial.replicas for trial in outcome.trials if _misses(trial, requirements, factor)]
    least = max([outcome.least, *(n + 1 for n in missed)])
    return replace(outcome, least=least, guess=max(outcome.guess, least), trials=())


def _misses(trial: Trial, requirements: tuple[Requirement, ...], factor: float) -> bool:
    """Whether a simulation shows that so many replicas miss the other requirements. One that was ended early does so
    for stricter limits only."""
    return (factor < 1 or trial.requests > 0) and not trial.meets(requirements)
