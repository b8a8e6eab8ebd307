"""The verb `plan`: which deployment is the cheapest that meets the requirements, and how sure that is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from servecast.comparing.scenarios import fingerprint
from servecast.errors import ServecastError, one_of
from servecast.planning.candidates import SIZES, Candidate, candidates, known_gpus, limits_of
from servecast.planning.evidence import Evidence, evidence, verify
from servecast.planning.examine import FAILS, MEETS, Case, Outcome, Trial, setup_of
from servecast.planning.load import fresh, rate_of
from servecast.planning.prices import prices_of
from servecast.planning.search import Search, Told, search, survey, workers
from servecast.planning.slo import Requirement, parse_requirements
from servecast.scenario import Scenario, scenario_of
from servecast.sweeping.runs import Base

MOST_GPUS = 1024
FRESH_SEED = 1_000_003
"""Seeds of the runs that verify begin here, far from those that people write."""
SEEDS = 2
"""So many of them."""
ATTEMPTS = 6
"""How often one configuration gets more replicas before it drops out."""


@dataclass(frozen=True, slots=True)
class Plan:
    """`winner` with `replicas` of it (`spare` ones beside them), or None where nothing meets the requirements;
    `runner_up` is the cheapest with other hardware. `closest`: of those that fail, the one that misses by least.
    `prices`: dollars per GPU-hour, from `price_source`. `raised` says how many replicas fresh seeds added, `rate` the
    requests per second; `one_course`: no seed changes the requests. `starts`: how to start it, as text for a shell."""

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
    one_course: bool
    starts: tuple[str, ...]

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
    prices: Mapping[str, float] | None = None,
    price_source: str = "yours",
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
    is what the scenario has) span the candidates. `prices` in dollars per GPU-hour (default: the default price set), as
    `price_source` calls them; `budget` in dollars per hour.
    Raises ServecastError for whatever is wrong with the scenario or the question.
    """
    if prices is None:
        prices, price_source = prices_of(None)
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

        def look_for(among: Iterable[Outcome], limit: float | None) -> list[Outcome]:
            return search(case, among, prices, pool, jobs, budget=limit, spare=spare, told=told)

        contest = _Contest(case, prices, spare, look_for(todo, budget))
        winner = contest.winner(pool, told)
        while winner is not None and contest.raised(winner):
            # it costs more than the search had thought: who was too dear for that may be cheaper now
            limit = contest.price(winner) * (1 - 1e-6)
            contest.add(look_for([o for o in todo if not contest.knows(o.candidate)], limit))
            if (cheaper := contest.winner(pool, told)) is winner:
                break
            winner = cheaper
        found, runner_up = None, None
        if winner is not None:
            others = [o for o in todo if o.candidate.hardware != winner.hardware and not contest.knows(o.candidate)]
            second = contest.cheapest(lambda candidate: candidate.hardware != winner.hardware)
            contest.add(look_for(others, budget if second is None else contest.price(second) * (1 - 1e-6)))
            runner_up = contest.cheapest(lambda candidate: candidate.hardware != winner.hardware)
            verified = tuple(contest.checked[winner, contest.replicas[winner]])
            found = evidence(case, winner, contest.replicas[winner], pool, verified, draws, told)
    searched.outcomes += contest.outcomes.values()
    replicas = contest.replicas[winner] if winner is not None else 0
    return Plan(
        scenario=scenario,
        requirements=requirements,
        prices=prices,
        price_source=price_source,
        searched=searched,
        winner=None if winner is None else contest.outcomes[winner],
        replicas=replicas,
        spare=spare,
        runner_up=None if runner_up is None else contest.outcomes[runner_up],
        closest=None if winner is not None else _closest(searched, requirements),
        evidence=found,
        raised=0 if winner is None else replicas - contest.outcomes[winner].replicas,
        rate=rate_of(setup_of(base, todo[0].candidate).requests) if todo else None,
        one_course=contest.one_course,
        starts=() if winner is None else _starts(base, winner, replicas + spare),
    )


class _Contest:
    """Who meets the requirements in the search, by what it costs, and with how many replicas it does on fresh seeds."""

    def __init__(self, case: Case, prices: Mapping[str, float], spare: int, outcomes: Iterable[Outcome]) -> None:
        self._case, self._prices, self._spare = case, prices, spare
        self.outcomes: dict[Candidate, Outcome] = {}
        self.replicas: dict[Candidate, int] = {}  # of those that are in it
        self.checked: dict[tuple[Candidate, int], list[Trial]] = {}
        self.one_course = False
        self.add(outcomes)

    def add(self, outcomes: Iterable[Outcome]) -> None:
        """What a search has found."""
        for outcome in outcomes:
            self.outcomes[outcome.candidate] = outcome
            if outcome.status == MEETS:
                self.replicas[outcome.candidate] = outcome.replicas

    def knows(self, candidate: Candidate) -> bool:
        """Whether the search found how many replicas it takes."""
        return self.outcomes[candidate].status == MEETS

    def raised(self, candidate: Candidate) -> bool:
        """Whether it takes more than the search said."""
        return self.replicas[candidate] > self.outcomes[candidate].replicas

    def price(self, candidate: Candidate) -> float:
        """Dollars per hour, spare replicas included."""
        return self._prices[candidate.gpu] * candidate.gpus * (self.replicas[candidate] + self._spare)

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
            if all(trial.meets(self._case.requirements) for trial in self.checked[candidate, replicas]):
                return candidate
            replicas += max(1, replicas // 10)
            tried = sum(other == candidate for other, _ in self.checked)
            if tried == ATTEMPTS or replicas * candidate.gpus > self._case.most:
                del self.replicas[candidate]
            else:
                self.replicas[candidate] = replicas
        return None

    def _check(self, candidate: Candidate, replicas: int, pool: Executor) -> list[Trial]:
        setup = setup_of(self._case.base, candidate, replicas)
        self.one_course = fingerprint(fresh(setup, FRESH_SEED, 0)) == fingerprint(setup)
        trial = self.outcomes[candidate].trial
        if self.one_course and trial is not None and trial.replicas == replicas:
            return [trial]
        seeds = range(FRESH_SEED, FRESH_SEED + (1 if self.one_course else SEEDS))
        runs = [pool.submit(verify, self._case, candidate, replicas, seed) for seed in seeds]
        return [run.result() for run in runs]


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
