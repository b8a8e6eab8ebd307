"""A plan in plain figures and words, for reports and JSON."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from typing import TYPE_CHECKING

from reports.planning import day, growth
from reports.planning.facts import Change, Facts, Limit, Option, Point
from servecast.planning.course_facts import day_facts, figures_of, growth_facts
from servecast.planning.evidence import enough
from servecast.planning.examine import MEETS, Outcome, Trial
from servecast.yamlfile import dump_yaml

if TYPE_CHECKING:
    from servecast.planning.plan import Plan

NOTES = (
    "the router sends requests to the replica with the fewest, unless the scenario names another",
    "replicas are alike; those of the search are simulated all together, with the scenario's own seed",
    "a run in which work piles up, or a request is turned away, meets nothing",
)


def facts_of(plan: Plan) -> Facts:
    """Everything that terminal, page and JSON show."""
    options = [_option(plan, outcome) for outcome in plan.searched.outcomes]
    best = plan.winner
    answer = None
    if best is not None:
        trials = plan.evidence.verified if plan.evidence else ()
        answer = _shown(plan, best, plan.replicas, plan.rent.spare, trials[0] if trials else best.trial)
    more = plan.evidence
    too_long = 0 if best is None or best.trial is None else best.trial.too_long
    left = [f"{too_long} requests exceed the engine's max_model_len, and are turned away whatever it runs on"]
    grown, daily = growth_facts(plan), day_facts(plan)
    return Facts(
        title=f"The cheapest deployment for {plan.scenario.name}",
        traffic=_traffic(plan),
        rate=plan.rate,
        required=tuple(map(str, plan.requirements)),
        answer=answer,
        spare=plan.rent.spare,
        raised=plan.raised,
        starts=plan.starts,
        verified=tuple(figures_of(plan.requirements, trial) for trial in (more.verified if more else ())),
        verified_requests=more.verified[0].requests if more else 0,
        enough_requests=enough(plan.requirements),
        one_course=plan.one_course,
        headroom=more.headroom if more else None,
        breaks=more.breaks if more else "",
        changes=tuple(
            Change(s.what, s.factor, s.trial.meets(plan.requirements), figures_of(plan.requirements, s.trial))
            for s in (more.shifts if more else ())
        ),
        draws=len(more.draws) if more else 0,
        draws_met=more.draws_met if more else 0,
        runner_up=None if plan.runner_up is None else _with_spare(plan, plan.runner_up),
        closest=None if plan.closest is None else _option(plan, plan.closest),
        options=tuple(options),
        same=plan.searched.same,
        simulations=plan.searched.simulated,
        points=tuple(_points(plan)),
        limit=None if plan.requirements[0].metric == "goodput" else plan.requirements[0].limit,
        limits=tuple(_limits(plan)),
        growth=grown,
        day=daily,
        prices={gpu: plan.rent.prices[gpu] for gpu in sorted({o.candidate.gpu for o in plan.searched.outcomes})},
        price_source=plan.rent.source,
        notes=(
            *NOTES,
            *(left if too_long else ()),
            *(growth.said(grown) if grown else ()),
            *(day.said(daily) if daily else ()),
        ),
        scenario=dump_yaml(plan.scenario.model_dump(exclude_none=True, exclude_defaults=True, mode="json")),
        version=version("servecast"),
    )


def _traffic(plan: Plan) -> str:
    rate = "" if plan.rate is None else f", {plan.rate:.4g} requests a second"
    return f"{plan.scenario.model}{rate}; required: {', '.join(map(str, plan.requirements))}"


def _option(plan: Plan, outcome: Outcome) -> Option:
    return _shown(plan, outcome, outcome.replicas, 0, outcome.trial)


def _with_spare(plan: Plan, outcome: Outcome) -> Option:
    return _shown(plan, outcome, outcome.replicas, plan.rent.spare, outcome.trial)


def _shown(plan: Plan, outcome: Outcome, replicas: int, spare: int, trial: Trial | None) -> Option:
    candidate = outcome.candidate
    count = replicas + spare if replicas else 0
    charged = plan.rent.charged(candidate, count)
    return Option(
        what=str(candidate),
        gpu=candidate.gpu,
        status=outcome.status,
        replicas=replicas,
        gpus=count * candidate.gpus,
        charged=charged,
        free=plan.rent.held(candidate, charged) - count,
        dollars_per_hour=plan.rent.price(candidate, count) if count else None,
        why="" if outcome.status == MEETS else outcome.why,
        figures=() if trial is None else figures_of(plan.requirements, trial),
        tried={t.replicas: t.meets(plan.requirements) for t in outcome.trials},
    )


def _limits(plan: Plan) -> Iterator[Limit]:
    best, spare = plan.winner, plan.rent.spare
    for other in plan.limits:
        who, text = other.candidate, str(other.requirement)
        if who is None or best is None:
            yield Limit(text, other.requirement.limit, "", None, False)
            continue
        same = (who, other.replicas) == (best.candidate, plan.replicas)
        price = plan.rent.price(who, other.replicas + spare)
        yield Limit(text, other.requirement.limit, f"{other.replicas + spare} x {who}", price, same)


def _points(plan: Plan) -> list[Point]:
    """Simulations that keep up and meet all but, perhaps, the first requirement."""
    first, *others = plan.requirements
    found = []
    for outcome in plan.searched.outcomes:
        for trial in outcome.trials:
            value, *rest = trial.values
            good = trial.keeps_up and all(r.met(v) for r, v in zip(others, rest, strict=True))
            if good and value is not None and first.metric != "goodput":
                price = plan.rent.price(outcome.candidate, trial.replicas + plan.rent.spare)
                found.append(Point(price, value, f"{trial.replicas} x {outcome.candidate}", first.met(value)))
    return found
