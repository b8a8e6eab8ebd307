"""Several models at once: each one's own cheapest deployment, and what all of them take on one type of GPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reports.planning.fleet import OneType, Together
from servecast.planning.candidates import SIZES, Candidate
from servecast.planning.contest import hunt
from servecast.planning.facts import facts_of
from servecast.planning.plan import Plan, default_gpus, plan, question
from servecast.planning.rent import Rent
from servecast.planning.search import Told, survey, workers


@dataclass(frozen=True, slots=True)
class Fleet:
    """A plan for each scenario. `one_type`: what each takes of the cheapest type of GPU if all are to have the same,
    spare replicas not counted; None where no type serves all of them."""

    plans: tuple[Plan, ...]
    one_type: tuple[tuple[Candidate, int], ...] | None


def fleet(
    paths: Sequence[str | Path],
    slo: Sequence[str] = (),
    *,
    rent: Rent,
    overrides: Iterable[str] | Mapping[str, object] = (),
    gpus: Iterable[str] = (),
    settings: Mapping[str, list[Any]] | None = None,
    tps: Sequence[int] = SIZES,
    pps: Sequence[int] = (1,),
    splits: Sequence[tuple[int, int] | None] = (None,),
    budget: float | None = None,
    draws: int = 10,
    jobs: int = 2,
    told: Told = lambda what, done, total: None,
) -> Fleet:
    """A plan for each of the scenarios at `paths`, as `plan` makes it, and the cheapest of one type of GPU. `budget`
    (dollars per hour) and the GPUs of `rent` are the most that one of them may take. Raises ServecastError."""
    gpus, overrides = list(gpus), overrides if isinstance(overrides, Mapping) else list(overrides)
    for path in paths:  # what is wrong with the last one is said before the first one is planned
        question(path, slo, overrides, rent, gpus, settings, tps, pps, splits)
    plans = tuple(
        plan(
            path, slo, overrides=overrides, gpus=gpus, rent=rent, settings=settings, tps=tps, pps=pps, splits=splits,
            budget=budget, draws=draws, jobs=jobs, told=told,
        )
        for path in paths
    )  # fmt: skip
    if any(each.winner is None for each in plans):
        return Fleet(plans, None)
    winners = tuple((each.winner.candidate, each.replicas) for each in plans if each.winner is not None)
    if len({candidate.gpu for candidate, _ in winners}) == 1:
        return Fleet(plans, winners)
    least = [each.price_per_hour or 0.0 for each in plans]
    best: tuple[tuple[Candidate, int], ...] | None = None
    price = float("inf")
    with workers(jobs) as pool:
        for gpu in gpus or default_gpus(rent.prices):
            found, sum_ = list[tuple[Candidate, int]](), 0.0
            for i, path in enumerate(paths):
                # cheaper than the best type only if the others take no more than what they take at least
                limit = price - sum_ - sum(least[i + 1 :])
                if winners[i][0].gpu == gpu:
                    who: Candidate | None = winners[i][0]
                    replicas = winners[i][1]
                else:
                    case, every, _ = question(path, slo, overrides, rent, [gpu], settings, tps, pps, splits)
                    _, todo = survey(case, every, pool, told)
                    contest, who = hunt(case, todo, None if limit == float("inf") else limit, pool, jobs, told)
                    replicas = 0 if who is None else contest.replicas[who]
                if who is None:
                    break
                found.append((who, replicas))
                sum_ += rent.price(who, replicas + rent.spare)
            if len(found) == len(paths) and sum_ < price:
                best, price = tuple(found), sum_
    return Fleet(plans, best)


def together_of(found: Fleet, names: Sequence[str], rent: Rent, budget: float | None) -> Together:
    """The fleet in plain figures, by the names of its scenarios."""
    one = None
    if found.one_type is not None:
        takes = [(who, n + rent.spare) for who, n in found.one_type]
        one = OneType(
            gpu=takes[0][0].gpu,
            takes={name: f"{n} x {who}" for name, (who, n) in zip(names, takes, strict=True)},
            gpus=sum(rent.charged(who, n) for who, n in takes),
            dollars_per_hour=sum(rent.price(who, n) for who, n in takes),
        )
    plans = {name: facts_of(each) for name, each in zip(names, found.plans, strict=True)}
    return Together(plans, one, budget, rent.most)
