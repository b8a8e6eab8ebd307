"""The verb `plan`: which deployment is the cheapest that meets the requirements, and how sure that is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from servecast.errors import ServecastError, one_of
from servecast.planning.candidates import SIZES, Candidate, candidates, known_gpus, limits_of
from servecast.planning.evidence import Evidence, evidence, verify
from servecast.planning.examine import FAILS, MEETS, Case, Outcome, Trial, setup_of
from servecast.planning.load import generated, rate_of
from servecast.planning.search import Search, Told, search, survey, workers
from servecast.planning.slo import Requirement, parse_requirements
from servecast.scenario import Scenario, scenario_of
from servecast.sweeping.runs import Base

MOST_GPUS = 1024
FRESH_SEED = 1_000_003
"""Seeds of the runs that verify begin here, far from those that people write."""
ATTEMPTS = 6


@dataclass(frozen=True, slots=True)
class Plan:
    """`winner` with `replicas` of it (`spare` ones beside them), or None where nothing meets the requirements;
    `runner_up` is the cheapest with other hardware. `closest`: of those that fail, the one that misses by least.
    `prices`: dollars per GPU-hour, from `price_source`. `raised` says how many replicas fresh seeds added."""

    scenario: Scenario
    requirements: tuple[Requirement, ...]
    prices: Mapping[str, float]
    price_source: str
    searched: Search
    winner: Outcome | None
    replicas: int
    spare: int
    runner_up: Outcome | None
    closest: Outcome | None
    evidence: Evidence | None
    raised: int
    rate: float | None
    verified_requests: int = 0
    starts: tuple[str, ...] = ()
    unpriced: tuple[str, ...] = ()

    def price(self, candidate: Candidate, replicas: int) -> float:
        """Dollars per hour of so many replicas (or units), the spare ones not counted."""
        return self.prices[candidate.gpu] * candidate.gpus * replicas

    @property
    def gpus(self) -> int:
        """GPUs of the winner, spare ones included."""
        return 0 if self.winner is None else (self.replicas + self.spare) * self.winner.candidate.gpus

    @property
    def price_per_hour(self) -> float | None:
        """Dollars per hour of the winner, spare replicas included."""
        return None if self.winner is None else self.price(self.winner.candidate, self.replicas + self.spare)


def plan(
    path: str | Path,
    slo: Iterable[str] = (),
    *,
    overrides: Iterable[str] | Mapping[str, object] = (),
    gpus: Iterable[str] = (),
    prices: Mapping[str, float],
    price_source: str,
    settings: Mapping[str, list[Any]] | None = None,
    tps: Iterable[int] = SIZES,
    pps: Iterable[int] = (1,),
    splits: Iterable[tuple[int, int] | None] = (None,),
    budget: float | None = None,
    most_gpus: int = MOST_GPUS,
    spare: int = 0,
    draws: int = 10,
    jobs: int = 2,
    told: Told = lambda what, done, total: None,
) -> Plan:
    """Search, verify on fresh seeds, and weigh.

    `slo`: requirements as text; left out, 99 % of the requests meet the scenario's own `slo`. `gpus` (default: those
    with a price and a measured profile), `tps`, `pps`, `splits` (prefill : decode) and `settings` (key -> values; None
    is what the scenario has) span the candidates. `prices` in dollars per GPU-hour; `budget` in dollars per hour.
    Raises ServecastError for whatever is wrong with the scenario or the question.
    """
    base = Base.of(path, overrides)
    scenario = scenario_of(base.file({}))
    requirements = requirements_of(scenario, slo)
    chosen = list(gpus) or default_gpus(prices)
    known_gpus(chosen)
    if lacking := [gpu for gpu in chosen if gpu not in prices]:
        raise ServecastError(
            f"--gpus: {one_of(lacking)} has no price in {price_source}; give one with --price {lacking[0]}=2.50 "
            f"(dollars per GPU-hour), or other prices; priced: {one_of(sorted(prices))}"
        )
    tried = limits_of(scenario) if settings is None else settings
    every = list(candidates(scenario, chosen, tried, tps=tps, pps=pps, splits=splits))
    case = Case(base, requirements, most_gpus)
    with workers(jobs) as pool:
        searched, todo = survey(case, every, pool, told)
        searched.outcomes += search(case, todo, prices, pool, jobs, budget=budget, spare=spare, told=told)

        def ranked(outcomes: Iterable[Outcome]) -> list[Outcome]:
            meeting = [outcome for outcome in outcomes if outcome.status == MEETS]
            return sorted(meeting, key=lambda o: (prices[o.candidate.gpu] * o.gpus, str(o.candidate)))

        winner, replicas, raised, verified = None, 0, 0, list[Trial]()
        for outcome in ranked(searched.outcomes):
            replicas, trials = outcome.replicas, list[Trial]()
            for attempt in range(ATTEMPTS):
                told("verified", attempt, ATTEMPTS)
                trials = _verify(case, scenario, outcome.candidate, replicas, pool)
                if all(trial.meets(requirements) for trial in trials):
                    break
                replicas += max(1, replicas // 10)
            else:
                continue
            if replicas * outcome.candidate.gpus <= most_gpus:
                winner, raised, verified = outcome, replicas - outcome.replicas, trials
                break
        found, runner_up = None, None
        if winner is not None:
            others = [outcome for outcome in todo if outcome.candidate.hardware != winner.candidate.hardware]
            known = ranked(o for o in searched.outcomes if o.candidate.hardware != winner.candidate.hardware)
            limit = (
                prices[known[0].candidate.gpu] * (known[0].gpus + spare * known[0].candidate.gpus) if known else None
            )
            second = search(case, others, prices, pool, jobs, budget=limit or budget, spare=spare, told=told)
            runner_up = next(iter(ranked([*second, *known])), None)
            found = evidence(case, winner.candidate, replicas, pool, tuple(verified), draws, told)
    starts = _starts(base, winner.candidate, replicas + spare) if winner is not None else ()
    return Plan(
        scenario, requirements, prices, price_source, searched, winner, replicas, spare, runner_up,
        None if winner else _closest(searched, requirements), found, raised,
        rate_of(setup_of(base, winner.candidate).requests) if winner else None, starts=starts,
    )  # fmt: skip


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
    if texts:
        found = parse_requirements(texts, groups)
    elif scenario.slo.limits() or any(part.slo for part in scenario.workload.classes or []):
        found = parse_requirements(["goodput > 99 %"])
    else:
        raise ServecastError('nothing is required: give --slo "p99 ttft < 1s, p95 tpot < 50ms", or the scenario an slo')
    if any(r.metric == "goodput" for r in found) and not (
        scenario.slo.limits() or any(part.slo for part in scenario.workload.classes or [])
    ):
        raise ServecastError("--slo goodput: the scenario has no slo that requests could meet; give it slo: {ttft: 1s}")
    return found


def default_gpus(prices: Mapping[str, float]) -> list[str]:
    """The GPUs that have both a price and a measured profile."""
    from calibrate.profile import profile_names

    return [gpu for gpu in sorted(prices) if gpu in profile_names()]


def _verify(
    case: Case, scenario: Scenario, candidate: Candidate, replicas: int, pool: Any, seeds: int = 2
) -> list[Trial]:
    """Under fresh seeds; of a recorded workload, which has only one course, once."""
    count = seeds if generated(scenario) else 1
    futures = [pool.submit(verify, case, candidate, replicas, FRESH_SEED + i) for i in range(count)]
    return [future.result() for future in futures]


def _closest(searched: Search, requirements: tuple[Requirement, ...]) -> Outcome | None:
    """Of those that fail, the one that misses by least."""

    def miss(outcome: Outcome) -> float:
        trial = outcome.trial
        assert trial is not None
        worst = trial.worst(requirements)
        return (0.0 if worst is None else worst[0].excess(worst[1])) + (0 if trial.keeps_up else 1e6)

    failing = [outcome for outcome in searched.outcomes if outcome.status == FAILS and outcome.trials]
    return min(failing, key=miss, default=None)
