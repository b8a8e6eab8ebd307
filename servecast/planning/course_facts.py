"""What a plan's winner takes in the course of time, in plain figures: months in which the traffic grows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reports.planning.facts import HOURS_A_MONTH, Fleet, Growth, Month

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
