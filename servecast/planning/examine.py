"""One candidate of a plan: set up, bounded, simulated with as few replicas as will do. Runs in worker processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil
from typing import TYPE_CHECKING, Any

from servecast.errors import ServecastError
from servecast.planning.bounds import bound
from servecast.planning.candidates import Candidate
from servecast.planning.load import first
from servecast.planning.rent import Rent
from servecast.planning.slo import Requirement
from servecast.sweeping.runs import Base

if TYPE_CHECKING:
    from servecast.run import Result
    from servecast.setup import Setup

INVALID, BOUND, PRICE, FAILS, MEETS = "invalid", "bound", "price", "fails", "meets"
"""What became of a candidate: it cannot run; no number of replicas would do; it cannot be cheaper than what is known;
it was simulated and does not meet the requirements with as many replicas as it might have; or it does."""


@dataclass(frozen=True, slots=True)
class Case:
    """What all candidates have in common: the scenario, what is required of it, and how GPUs are rented."""

    base: Base
    requirements: tuple[Requirement, ...]
    rent: Rent


@dataclass(frozen=True, slots=True)
class Trial:
    """One simulation: what was required, and came out (None: no request has it); `keeps_up`: work does not pile up, and
    nobody is turned away."""

    replicas: int
    values: tuple[float | None, ...]
    keeps_up: bool
    why: str = ""
    growth: float = 1.3
    """By how much more there should be, if it is not enough: little where it was close."""
    too_long: int = 0
    """Requests that the engine turns away whatever it runs on, since they exceed its `max_model_len`: not counted."""
    hopeless: bool = False
    """Requests are not served, and would not be with any number of replicas."""
    requests: int = 0
    """That were simulated."""

    def meets(self, requirements: tuple[Requirement, ...]) -> bool:
        """Whether all that is required is met."""
        return self.keeps_up and all(r.met(value) for r, value in zip(requirements, self.values, strict=True))

    def worst(self, requirements: tuple[Requirement, ...]) -> tuple[Requirement, float | None] | None:
        """The requirement that is missed by most, with its value."""
        missed = [(r, v) for r, v in zip(requirements, self.values, strict=True) if not r.met(v)]
        return max(missed, key=lambda pair: pair[0].excess(pair[1]), default=None)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a candidate, with `replicas` of it; the `trials` that were made, and what it says (`why`)."""

    candidate: Candidate
    status: str
    replicas: int = 0
    least: int = 1
    guess: int = 1
    trials: tuple[Trial, ...] = ()
    why: str = ""
    key: str = ""
    """Equal for candidates that resolve to the same engine, or the same unit of them."""

    @property
    def gpus(self) -> int:
        """GPUs in all."""
        return self.replicas * self.candidate.gpus

    @property
    def trial(self) -> Trial | None:
        """The simulation with as many replicas as it has; where it fails, the last one."""
        return next((t for t in self.trials if t.replicas == self.replicas), self.trials[-1] if self.trials else None)


TOO_LONG = ("prompt_too_long", "over_max_model_len")
"""Reasons for which an engine turns requests away that are the scenario's, and no deployment's."""
SCREEN = 5
"""The share of the requests, as its reciprocal, that are simulated first."""


@lru_cache(maxsize=64)
def _known(base: Base, candidate: Candidate) -> Setup:
    return _set_up(base, candidate, 1)


def _set_up(base: Base, candidate: Candidate, replicas: int) -> Setup:
    from servecast.setup import set_up

    return set_up(base.scenario(changes_for(base, candidate, replicas)))


def changes_for(base: Base, candidate: Candidate, replicas: int) -> dict[str, Any]:
    """The keys of the scenario to change so that it has so many replicas (or units) of the candidate."""
    data = base.file({}).data
    cluster, engine = data.get("cluster"), data.get("engine")
    whole = {"engine": {"preset": engine}} if isinstance(engine, str) else {}  # it may get limits
    overrides = candidate.overrides(cluster if isinstance(cluster, dict) else {}, replicas)
    return whole | _own_figures(data, candidate) | overrides


def _own_figures(data: Mapping[str, Any], candidate: Candidate) -> dict[str, Any]:
    """What the scenario says of its own GPU and layout holds for no other."""
    cluster = data.get("cluster") or {}
    same = (cluster.get("gpu"), cluster.get("tp", 1), cluster.get("pp", 1)) == candidate.hardware[:3]
    return {} if same or "memory" not in data else {"memory": {}}


def setup_of(base: Base, candidate: Candidate, replicas: int = 1) -> Setup:
    """The scenario with so many replicas (or units) of the candidate. Raises ServecastError where it cannot run."""
    if candidate.split is not None:
        return _set_up(base, candidate, replicas)  # which link joins the sides depends on how many GPUs there are
    setup = _known(base, candidate)
    if replicas == 1:
        return setup
    scenario = setup.scenario
    parts = [part.model_copy(update={"replicas": part.replicas * replicas}) for part in scenario.cluster.pools]
    cluster = scenario.cluster.model_copy(update={"pools": parts})
    pools = tuple(replace(pool, replicas=pool.replicas * replicas) for pool in setup.pools)
    return replace(setup, scenario=scenario.model_copy(update={"cluster": cluster}), pools=pools)


def trial_of(setup: Setup, requirements: tuple[Requirement, ...], replicas: int) -> Trial:
    """Simulate, and look at what is required."""
    from servecast.run import simulate

    try:
        return judged(simulate(setup), requirements, replicas)
    except ServecastError as error:  # it comes to a standstill
        return Trial(replicas, tuple(None for _ in requirements), False, "; ".join(error.problems), hopeless=True)


def screened(setup: Setup, requirements: tuple[Requirement, ...], replicas: int) -> Trial | None:
    """What the first requests show already: where more of them miss a requirement than may in the whole run, it fails,
    whatever comes later. None where they do not."""
    from servecast.run import simulate

    total = len(setup.requests.trace)
    beginning = first(setup, total // SCREEN)
    if beginning is None:
        return None
    try:
        result = simulate(beginning)
    except ServecastError:
        return None  # the whole run will say it
    for requirement in requirements:
        missed, allowed = requirement.missed(result), requirement.tail * total
        if missed > allowed + 1:
            values = tuple(r.value(result) for r in requirements)
            count = len(beginning.requests.trace)
            why = f"{requirement}: missed by {missed} of the first {count} requests, where {allowed:.0f} of {total} may"
            return Trial(replicas, values, False, why, 1.5 if missed < 0.5 * count else 2.0)
    return None


def judged(result: Result, requirements: tuple[Requirement, ...], replicas: int) -> Trial:
    """What a result says of the requirements."""
    summary = result.summary()
    values = tuple(requirement.value(result) for requirement in requirements)
    reasons = summary["rejected_reasons"]
    too_long = sum(reasons.get(reason, 0) for reason in TOO_LONG)
    lost = summary["submitted"] - summary["completed"] - summary["cancelled"] - too_long
    if lost and all(requirement.metric != "goodput" for requirement in requirements):
        said = ", ".join(f"{count} {reason}" for reason, count in reasons.items() if reason not in TOO_LONG)
        why = f"{lost} of {summary['submitted']} requests are not served ({said})"
        return Trial(replicas, values, False, why, too_long=too_long, hopeless=True, requests=summary["submitted"])
    if summary["saturated"]:
        behind = summary["duration"] / max(float(result.column("arrival_s").max()), 1e-9)
        growth = min(max(behind, 1.2), 3.0)
        why = str(summary["saturation_note"])
        return Trial(replicas, values, False, why, growth, too_long, requests=summary["submitted"])
    return Trial(replicas, values, True, too_long=too_long, requests=summary["submitted"])


def look(case: Case, candidate: Candidate) -> Outcome:
    """What can be said without simulating: `status` is empty where that is nothing but the `least` replicas."""
    try:
        setup = _known(case.base, candidate)
    except ServecastError as error:
        return Outcome(candidate, INVALID, why="; ".join(error.problems))
    limits = bound(setup, case.requirements)
    pools = setup.pools
    key = repr([(p.gpu.id, p.layout, p.replicas, sorted(p.engine.options.items(), key=str)) for p in pools])
    return Outcome(
        candidate, BOUND if limits.why else "", least=limits.replicas, guess=limits.guess, why=limits.why, key=key
    )


def examine(case: Case, candidate: Candidate, least: int, guess: int, below: int | None) -> Outcome:
    """The fewest replicas that meet the requirements, from `least` up to `below` (fewer than that, if given); begins
    with the `guess`."""
    most = case.rent.affords(candidate)
    if most < least:
        gpus = case.rent.charged(candidate, least + case.rent.spare)
        why = f"it takes {gpus} GPUs, of {case.rent.most} that there may be"
        return Outcome(candidate, BOUND, least=least, why=why)
    if below is not None:
        most = min(most, below - 1)
    if most < least:
        return Outcome(candidate, PRICE, least=least)
    if candidate.split is not None:
        try:
            most = _joined(case.base, candidate, least, most)
        except ServecastError as error:
            return Outcome(candidate, INVALID, least=least, why="; ".join(error.problems))
    trials: dict[int, Trial] = {}

    def good(replicas: int) -> bool:
        if replicas not in trials:
            setup = setup_of(case.base, candidate, replicas)
            trials[replicas] = screened(setup, case.requirements, replicas) or trial_of(
                setup, case.requirements, replicas
            )
        return trials[replicas].meets(case.requirements)

    low, high = least - 1, None  # `low` replicas are known, or bound, to be too few
    at = most if below is not None else min(most, guess)
    while high is None:
        if good(at):
            high = at
        else:
            if at >= most or _stuck(trials, low, at, case.requirements):
                break
            low, at = at, min(most, max(at + 1, ceil(at * trials[at].growth)))
    while high is not None and high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if good(middle) else (middle, high)
    kept = tuple(trials[n] for n in sorted(trials))
    if high is None:
        why = why_not(trials[max(trials)], case.requirements)
        return Outcome(candidate, FAILS, max(trials), least, guess, kept, why)
    return Outcome(candidate, MEETS, high, least, guess, kept)


def _joined(base: Base, candidate: Candidate, least: int, most: int) -> int:
    """The most units, from `least` on, whose sides something joins: without a network, those of one node. Raises
    ServecastError where `least` are too many."""
    setup_of(base, candidate, least)
    low, high = least, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        try:
            setup_of(base, candidate, middle)
            low = middle
        except ServecastError:
            high = middle
    return low


def _stuck(trials: Mapping[int, Trial], before: int, now: int, requirements: tuple[Requirement, ...]) -> bool:
    """Whether more replicas no longer help: what is missed by most was no better with more of them."""
    one, other = trials.get(before), trials[now]
    if other.hopeless:
        return True
    if one is None or not (one.keeps_up and other.keeps_up) or now < 1.4 * before:
        return False
    worse, now_worst = one.worst(requirements), other.worst(requirements)
    if worse is None or now_worst is None or worse[0] != now_worst[0]:
        return False
    return now_worst[0].excess(now_worst[1]) > 0.98 * worse[0].excess(worse[1])


def why_not(trial: Trial, requirements: tuple[Requirement, ...]) -> str:
    """What a simulation lacks."""
    if not trial.keeps_up:
        return trial.why
    worst = trial.worst(requirements)
    if worst is None:
        return ""
    requirement, value = worst
    return f"{requirement}: {requirement.shown(value)}"
