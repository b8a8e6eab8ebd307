"""The verb `plan`: which deployment is the cheapest that meets the requirements, and how sure that is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from servecast.errors import ServecastError, one_of
from servecast.planning.candidates import SIZES, Candidate, candidates, known_gpus, limits_of
from servecast.planning.contest import hunt, second
from servecast.planning.day import Day, Hour, day, profile_of, steady
from servecast.planning.evidence import Evidence, evidence
from servecast.planning.examine import FAILS, Case, Outcome, setup_of
from servecast.planning.growth import Growth, grown
from servecast.planning.ladder import Ladder
from servecast.planning.limits import Limit, limits
from servecast.planning.load import rate_of
from servecast.planning.prices import prices_of
from servecast.planning.rent import Rent
from servecast.planning.search import Search, Told, survey, workers
from servecast.planning.slo import Requirement, parse_requirements
from servecast.scenario import Scenario, scenario_of
from servecast.sweeping.runs import Base


@dataclass(frozen=True, slots=True)
class Plan:
    """`winner` with `replicas` of it (beside the spare ones of `rent`), or None where nothing meets the requirements;
    `runner_up` is the cheapest with other hardware. `closest`: of those that fail, the one that misses by least.
    `raised` says how many replicas fresh seeds added, `rate` the requests per second; `one_course`: no seed changes the
    requests. `starts`: how to start it, as text for a shell. `limits`: what other limits would cost; `growth` and
    `day`: what it takes in the course of time, where that was asked for, or the workload has a day."""

    scenario: Scenario
    requirements: tuple[Requirement, ...]
    rent: Rent
    budget: float | None
    searched: Search
    winner: Outcome | None
    replicas: int
    runner_up: Outcome | None
    closest: Outcome | None
    evidence: Evidence | None
    raised: int
    rate: float | None
    one_course: bool
    starts: tuple[str, ...]
    limits: tuple[Limit, ...]
    growth: Growth | None
    day: Day | None

    @property
    def price_per_hour(self) -> float | None:
        """Dollars per hour of the winner, spare replicas included."""
        return None if self.winner is None else self.rent.price(self.winner.candidate, self.replicas + self.rent.spare)


def plan(
    path: str | Path,
    slo: Iterable[str] = (),
    *,
    overrides: Iterable[str] | Mapping[str, object] = (),
    gpus: Iterable[str] = (),
    rent: Rent | None = None,
    settings: Mapping[str, list[Any]] | None = None,
    tps: Iterable[int] = SIZES,
    pps: Iterable[int] = (1,),
    splits: Iterable[tuple[int, int] | None] = (None,),
    budget: float | None = None,
    draws: int = 10,
    growth: float | None = None,
    months: int = 12,
    hours: tuple[Hour, ...] | None = None,
    jobs: int = 2,
    told: Told = lambda what, done, total: None,
) -> Plan:
    """Search, verify on fresh seeds, and weigh.

    `slo`: requirements as text; left out, 99 % of the requests meet the scenario's own `slo`. `gpus` (default: those
    with a price and a measured profile), `tps`, `pps`, `splits` (prefill : decode) and `settings` (key -> values; None
    is what the scenario has) span the candidates. `rent`: prices and how GPUs are rented (default: one by
    one, at the prices of the default set); `budget` in dollars per hour. `growth` of the
    traffic as a share a month, over so many `months`. `hours` of a day whose peak the scenario's traffic is.
    Raises ServecastError for whatever is wrong with the scenario or the question.
    """
    rent = Rent(*prices_of(None)) if rent is None else rent
    case, every, scenario = question(path, slo, overrides, rent, gpus, settings, tps, pps, splits)
    base, requirements = case.base, case.requirements
    own = profile_of(scenario)
    if own is not None and hours is not None:
        raise ServecastError("--day: the scenario's arrivals have a day of their own; give one of the two")
    with workers(jobs) as pool:
        searched, todo = survey(case, every, pool, told)
        contest, winner = hunt(case, todo, budget, pool, jobs, told)
        found, runner_up, more, daily, other = None, None, None, None, tuple[Limit, ...]()
        if winner is not None:
            runner_up = second(contest, winner, todo, budget, pool, jobs, told)
            verified = tuple(contest.checked[winner, contest.replicas[winner]])
            found = evidence(case, winner, contest.replicas[winner], pool, verified, draws, told)
            other = limits(case, searched, todo, contest, winner, budget, pool, jobs, told)
            known = Ladder(case, winner, contest.replicas[winner], pool, jobs, told)
            known.weighed(contest.replicas[winner], found.headroom)
            if growth is not None:
                more = grown(known, growth, months)
            if own is not None:
                calm = replace(case, base=steady(base, scenario, own[1]))
                ladder = Ladder(calm, winner, contest.replicas[winner], pool, jobs, told)
                daily = day(case, winner, own[0], ladder, pool, own[1])
            elif hours is not None:
                daily = day(case, winner, hours, known, pool, None)
    searched.outcomes += contest.outcomes.values()
    replicas = contest.replicas[winner] if winner is not None else 0
    return Plan(
        scenario=scenario,
        requirements=requirements,
        rent=rent,
        budget=budget,
        searched=searched,
        winner=None if winner is None else contest.outcomes[winner],
        replicas=replicas,
        runner_up=None if runner_up is None else contest.outcome(runner_up),
        closest=None if winner is not None else _closest(searched, requirements),
        evidence=found,
        raised=0 if winner is None else replicas - contest.outcomes[winner].replicas,
        rate=rate_of(setup_of(base, todo[0].candidate).requests) if todo else None,
        one_course=contest.one_course,
        starts=() if winner is None else _starts(base, winner, replicas + rent.spare),
        limits=other,
        growth=more,
        day=daily,
    )


def question(
    path: str | Path,
    slo: Iterable[str],
    overrides: Iterable[str] | Mapping[str, object],
    rent: Rent,
    gpus: Iterable[str],
    settings: Mapping[str, list[Any]] | None,
    tps: Iterable[int],
    pps: Iterable[int],
    splits: Iterable[tuple[int, int] | None],
) -> tuple[Case, list[Candidate], Scenario]:
    """What `plan` is asked: what all candidates have in common, and the candidates. Raises ServecastError."""
    base = Base.of(path, overrides)
    scenario = scenario_of(base.file({}))
    requirements = requirements_of(scenario, slo)
    chosen = list(gpus) or default_gpus(rent.prices)
    known_gpus(chosen)
    if lacking := [gpu for gpu in chosen if gpu not in rent.prices]:
        raise ServecastError(
            f"--gpus: {one_of(lacking)} has no price in {rent.source}; give one with --price {lacking[0]}=2.50 "
            f"(dollars per GPU-hour), or other prices; priced: {one_of(sorted(rent.prices))}"
        )
    tried = limits_of(scenario) if settings is None else settings
    every = list(candidates(scenario, chosen, tried, tps=tps, pps=pps, splits=splits))
    return Case(base, requirements, rent), every, scenario


def _starts(base: Base, candidate: Candidate, replicas: int) -> tuple[str, ...]:
    """The commands that start it, and which of their options differ from those that start the scenario's own."""
    from servecast.serve_lines import differing, serve_line
    from servecast.setup import set_up

    setup = setup_of(base, candidate, replicas)
    lines = [serve_line(setup)]
    try:
        today = set_up(base.scenario({}))
    except ServecastError:
        return tuple(lines)  # what is there today cannot run
    changed = [f"{d.flag} {d.before} -> {d.after}" for d in differing(today, setup) if d.flag]
    if today.pools[0].gpu.id != setup.pools[0].gpu.id:
        changed.insert(0, f"{today.pools[0].gpu.id} -> {setup.pools[0].gpu.id}")
    return (*lines, "# differs from the scenario: " + (", ".join(changed) or "in nothing but the number of replicas"))


def requirements_of(scenario: Scenario, slo: Iterable[str]) -> tuple[Requirement, ...]:
    """What is required: as said, else that 99 % of the requests meet the scenario's own SLO."""
    texts = list(slo)
    groups = [part.name for part in scenario.workload.classes or []]
    limited = scenario.slo.limits() or any(part.slo for part in scenario.workload.classes or [])
    if texts:
        found = parse_requirements(texts, groups)
    elif limited:
        found = parse_requirements(["goodput > 99 %"])
    else:
        raise ServecastError('nothing is required: give --slo "p99 ttft < 1s, p95 tpot < 50ms", or the scenario an slo')
    if any(r.metric == "goodput" for r in found) and not limited:
        raise ServecastError("--slo goodput: the scenario has no slo that requests could meet; give it slo: {ttft: 1s}")
    return found


def default_gpus(prices: Mapping[str, float]) -> list[str]:
    """The GPUs that have both a price and a measured profile."""
    from calibrate.profile import profile_names

    return [gpu for gpu in sorted(prices) if gpu in profile_names()]


def _closest(searched: Search, requirements: tuple[Requirement, ...]) -> Outcome | None:
    """Of those that fail, the one that misses by least."""

    def miss(outcome: Outcome) -> float:
        trial = outcome.trial
        assert trial is not None
        worst = trial.worst(requirements)
        return (0.0 if worst is None else worst[0].excess(worst[1])) + (0 if trial.keeps_up else 1e6)

    failing = [outcome for outcome in searched.outcomes if outcome.status == FAILS and outcome.trials]
    return min(failing, key=miss, default=None)
