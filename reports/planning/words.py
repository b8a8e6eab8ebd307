"""Sentences about plans that terminal and page share."""

from __future__ import annotations

import math
from collections.abc import Iterator

from reports.planning.facts import HOURS_A_MONTH, Facts, Figure, Option
from reports.words import NONE, quantity

STATUS = {
    "meets": "meets everything",
    "fails": "simulated, misses",
    "bound": "cannot meet it",
    "price": "cannot be cheaper",
    "invalid": "cannot run",
}
"""What became of a configuration -> how it is said; those of most interest first."""


def dollars(value: float | None) -> str:
    """`$12.34`, `$1,234`."""
    if value is None:
        return NONE
    return f"${value:,.2f}" if value < 1000 else f"${value:,.0f}"


def a_month(dollars_per_hour: float) -> str:
    """Of a price per hour."""
    return dollars(dollars_per_hour * HOURS_A_MONTH)


def replicas(option: Option, spare: int = 0) -> str:
    """`6 x h100-sxm, tp 2`."""
    more = f" and {spare} spare" if spare else ""
    return f"{option.replicas}{more} x {option.what}"


def gpus(option: Option) -> str:
    """`12 GPUs`, `12 GPUs (16 paid for)`."""
    more = f" ({option.charged:,} paid for)" if option.charged > option.gpus else ""
    return f"{option.gpus:,} GPU{'s' * (option.gpus != 1)}{more}"


def traffic(rate: float | None, factor: float) -> str:
    """So many times the traffic of `rate` requests a second: `12.4 requests/s`, or, of a closed loop, `1.3 times the
    clients`."""
    return f"{factor:.3g} times the clients" if rate is None else f"{quantity(rate * factor)} requests/s"


def missed(figures: tuple[Figure, ...]) -> str:
    """What is not met, in a few words."""
    return "; ".join(f"{figure.required}: {figure.shown}" for figure in figures if not figure.met)


def answer(facts: Facts) -> Iterator[str]:
    """The answer in sentences, the first one alone enough."""
    best = facts.answer
    if best is None:
        yield "Nothing that was tried meets the requirements."
        if facts.closest is not None:
            close = facts.closest
            why = missed(close.figures) or close.why
            yield f"Closest: {replicas(close)} ({gpus(close)}, {dollars(close.dollars_per_hour)} an hour): {why}."
        return
    price = best.dollars_per_hour or 0.0
    yield f"{replicas(best, facts.spare)}: {gpus(best)}, {dollars(price)} an hour, {a_month(price)} a month."
    if best.charged > best.gpus:
        free = f"; {best.free} more replica{'s' * (best.free != 1)} would cost nothing" if best.free else ""
        yield f"{best.charged - best.gpus} of the GPUs that are paid for stand idle{free}."
    yield _checked(facts)
    if facts.headroom is None:
        yield "It carries four times this traffic, the most that was tried."
    else:
        yield f"It carries {100 * (facts.headroom - 1):.0f} % more traffic; beyond that, {facts.breaks}."
    if facts.draws:
        yield f"Under errors of the prices of steps it meets everything in {facts.draws_met} of {facts.draws} draws."
    if (other := facts.runner_up) is not None and other.dollars_per_hour is not None:
        more = other.dollars_per_hour / price - 1 if price else 0.0
        yield (
            f"Runner-up: {replicas(other, facts.spare)}, {gpus(other)}, {dollars(other.dollars_per_hour)} an hour "
            f"({100 * more:+.0f} %)."
        )


def limits(facts: Facts) -> Iterator[str]:
    """What another limit would cost or save, a sentence each."""
    price = None if facts.answer is None else facts.answer.dollars_per_hour
    for other in facts.limits:
        stricter = facts.limit is not None and other.limit < facts.limit
        if other.dollars_per_hour is None or not price:
            yield f"{other.required}: nothing that was tried, up to four times the price."
        elif other.same:
            yield f"{other.required}: {'the same deployment does' if stricter else 'nothing cheaper was found'}."
        else:
            change = f"{100 * (other.dollars_per_hour / price - 1):+.0f} %"
            most = "at most " if stricter else ""
            yield f"{other.required}: {most}{dollars(other.dollars_per_hour)} an hour ({change}), {other.what}."


def _checked(facts: Facts) -> str:
    """On what the answer was checked."""
    count = f"{facts.verified_requests:,}"
    if facts.one_course:
        said = f"It meets everything on the {count} recorded requests: they have one course, which no seed can vary."
    else:
        seeds = len(facts.verified)
        said = f"It meets everything on {seeds} fresh seed{'s' * (seeds != 1)} of {count} requests each."
    if facts.verified_requests < facts.enough_requests:
        said += f" Percentiles as high as these ask for {facts.enough_requests:,} to be told from chance."
    return said + (f" The search alone had said {facts.raised} fewer." if facts.raised else "")


def ranked(facts: Facts) -> list[Option]:
    """All configurations: those that meet everything first, of equal status the cheapest, of these the one that misses
    by least."""
    order = list(STATUS)
    return sorted(facts.options, key=lambda o: (order.index(o.status), o.dollars_per_hour or 0.0, _miss(o), o.what))


def _miss(option: Option) -> float:
    """By what factor, as its logarithm, it misses what is required: 0 where it does not, infinite where unknown."""
    missed = [f.value for f in option.figures if not f.met]
    if not option.figures or not all(missed):
        return math.inf
    return max((abs(math.log(f.value / f.limit)) for f in option.figures if f.value and not f.met), default=0.0)


def considered(facts: Facts) -> str:
    """How many configurations were looked at, and what became of them."""
    total = len(facts.options) + facts.same
    parts = [f"{count} {STATUS[status]}" for status, count in sorted(facts.counts.items(), key=lambda x: -x[1])]
    if facts.same:
        parts.append(f"{facts.same} the same as another")
    return f"{total} configurations considered: {', '.join(parts)}; {facts.simulations} simulations."


def changed(what: str, factor: float) -> str:
    """`20 % less traffic`."""
    thing = {"rate": "traffic", "prompt": "prompt tokens", "output": "output tokens"}[what]
    return f"{abs(100 * (factor - 1)):.0f} % {'more' if factor > 1 else 'less' if what == 'rate' else 'fewer'} {thing}"
