"""What a plan's winner takes in the course of time, in plain figures: months of growing traffic, hours of a day."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reports.planning.facts import HOURS_A_MONTH, Day, Figure, Fleet, Growth, Hour, Month
from servecast.planning.examine import Trial, why_not
from servecast.planning.slo import Requirement

if TYPE_CHECKING:
    from servecast.planning.plan import Plan


def growth_facts(plan: Plan) -> Growth | None:
    """The fleet month by month; None where nobody asked."""
    found, best = plan.growth, plan.winner
    if found is None or best is None:
        return None
    rent, candidate = plan.rent, best.candidate
    months, since = list[Month](), dict[int, int]()
    for i, needed in enumerate(found.replicas):
        if needed is None:
            months.append(Month(i + 1, found.factor(i), None, None, None))
            continue
        replicas = needed + rent.spare
        dollars = HOURS_A_MONTH * rent.price(candidate, replicas)
        months.append(Month(i + 1, found.factor(i), replicas, replicas * candidate.gpus, dollars))
        since.setdefault(needed, i + 1)
    fleets = tuple(
        Fleet(
            replicas=needed + rent.spare,
            gpus=(needed + rent.spare) * candidate.gpus,
            charged=rent.charged(candidate, needed + rent.spare),
            dollars=HOURS_A_MONTH * rent.price(candidate, needed + rent.spare),
            since=month,
            carries=found.carried[needed][0],
            proven=found.carried[needed][1],
        )
        for needed, month in since.items()
    )
    known = [month.dollars for month in months if month.dollars is not None]
    limit = float("inf") if plan.budget is None else plan.budget * HOURS_A_MONTH * (1 + 1e-9)
    return Growth(
        rate=found.rate,
        months=tuple(months),
        fleets=fleets,
        dollars=sum(known) if len(known) == len(months) else None,
        over_budget=next((m.number for m in months if m.dollars is not None and m.dollars > limit), None),
        simulations=found.runs,
    )


def day_facts(plan: Plan) -> Day | None:
    """The fleet hour by hour; None where there is no day."""
    found, best = plan.day, plan.winner
    if found is None or best is None:
        return None
    rent, candidate = plan.rent, best.candidate
    fleets = [None if n is None else n + rent.spare for n in found.replicas]
    hours = tuple(
        Hour(hour.start_s, hour.length_s, hour.factor, n, None if n is None else n * candidate.gpus)
        for hour, n in zip(found.hours, fleets, strict=True)
    )
    known = [n for n in fleets if n is not None]
    whole = len(known) == len(fleets)
    ups = [(before, n) for before, n in zip([known[-1], *known], known, strict=False) if n > before] if whole else []
    paid_s = 0.0
    for hour, n in zip(found.hours, known, strict=False):
        paid_s += rent.charged(candidate, n) * hour.length_s
    for before, n in ups:
        paid_s += (rent.charged(candidate, n) - rent.charged(candidate, before)) * (found.start_s or 0.0)
    price = rent.prices[candidate.gpu]
    check = found.check
    return Day(
        period_s=found.period_s,
        rate=found.peak if found.peak is not None else plan.rate,
        hours=hours,
        gpu_hours=paid_s / 3600 if whole else None,
        dollars=price * paid_s / 3600 if whole else None,
        static_gpus=max(known) * candidate.gpus if whole else None,
        static_dollars=rent.price(candidate, max(known)) * found.period_s / 3600 if whole else None,
        starts=sum(n - before for before, n in ups),
        start_s=found.start_s,
        checked=() if check is None else figures_of(plan.requirements, check),
        met=check is not None and check.meets(plan.requirements),
        why="" if check is None else why_not(check, plan.requirements),
        simulations=found.runs,
    )


def figures_of(requirements: tuple[Requirement, ...], trial: Trial) -> tuple[Figure, ...]:
    """What a simulation says of each requirement."""
    return tuple(
        Figure(str(r), r.metric, r.limit, value, r.shown(value), r.met(value))
        for r, value in zip(requirements, trial.values, strict=True)
    )
