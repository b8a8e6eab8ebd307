"""What a plan's answer takes while its traffic grows: sentences, rows and a figure."""

from __future__ import annotations

from collections.abc import Iterator

import plotly.graph_objects as go

from reports import look
from reports.planning.facts import Facts, Growth
from reports.planning.words import dollars, traffic

HEADS = ("from month", "replicas", "GPUs", "$ a month", "carries")


def sentences(growth: Growth) -> Iterator[str]:
    """What it comes to, the first one alone enough."""
    count, more = len(growth.months), f"{100 * growth.rate:.3g} % more traffic every month"
    last = growth.months[-1]
    if not growth.fleets:
        yield f"With {more}: the first month takes more GPUs than there may be."
        return
    if growth.dollars is None:
        ends = next(month.number for month in growth.months if month.replicas is None)
        yield f"With {more}, month {ends} takes more GPUs than there may be."
    else:
        first = growth.fleets[0]
        yield (
            f"With {more}: {first.gpus:,} GPU{'s' * (first.gpus != 1)} in the first month, {last.gpus:,} in month "
            f"{count} for {last.factor:.2f} times the traffic; {dollars(growth.dollars)} over {count} months."
        )
    if steps := [str(fleet.since) for fleet in growth.fleets[1:]]:
        which = f"{', '.join(steps[:-1])} and {steps[-1]}" if len(steps) > 1 else steps[0]
        yield f"The fleet grows in month{'s' * (len(steps) > 1)} {which}."
    else:
        yield "The fleet need not grow."
    if growth.over_budget is not None:
        yield f"From month {growth.over_budget} on it takes more than the budget."


def rows(facts: Facts, growth: Growth) -> Iterator[tuple[str, ...]]:
    """A row a fleet."""
    for fleet in growth.fleets:
        paid = f" ({fleet.charged:,} paid for)" if fleet.charged > fleet.gpus else ""
        carries = "at least " * (not fleet.proven) + traffic(facts.rate, fleet.carries)
        yield str(fleet.since), f"{fleet.replicas:,}", f"{fleet.gpus:,}{paid}", dollars(fleet.dollars), carries


def drawn(facts: Facts, growth: Growth) -> go.Figure:
    """Dollars a month as bars, month by month, and the traffic."""
    figure = look.panels(["<b>$ a month</b>", f"<b>Traffic{', requests/s' * (facts.rate is not None)}</b>"], columns=2)
    months = [month for month in growth.months if month.replicas is not None]
    numbers = [month.number for month in months]
    figure.add_bar(
        x=numbers,
        y=[month.dollars for month in months],
        name="to be paid",
        marker={"color": look.BLUE},
        text=[f"{month.gpus:,} GPUs" for month in months],
        textposition="none",
        hovertemplate="month %{x}: %{text}, $%{y:,.0f}<extra></extra>",
    )
    rate = 1.0 if facts.rate is None else facts.rate
    carried = {fleet.replicas: fleet.carries * rate for fleet in growth.fleets}
    figure.add_scatter(
        x=numbers,
        y=[carried[month.replicas] for month in months if month.replicas is not None],
        name="what the fleet carries",
        mode="lines",
        line={"shape": "hvh", "color": look.GREEN, "dash": "dash"},
        hovertemplate="month %{x}: the fleet carries %{y:.3g}<extra></extra>",
        xaxis="x2",
        yaxis="y2",
    )
    figure.add_scatter(
        x=[month.number for month in growth.months],
        y=[month.factor * rate for month in growth.months],
        name="traffic",
        mode="lines+markers",
        line={"color": look.ORANGE},
        hovertemplate="month %{x}: traffic %{y:.3g}<extra></extra>",
        xaxis="x2",
        yaxis="y2",
    )
    figure.update_xaxes(title={"text": "month"}, dtick=max(1, round(len(growth.months) / 12)), tick0=1)
    figure.update_yaxes(title={"text": "$ a month"}, selector={"anchor": "x"})
    figure.update_yaxes(
        title={"text": "requests/s" if facts.rate is not None else "times today's"}, selector={"anchor": "x2"}
    )
    return figure


def said(growth: Growth) -> list[str]:
    """What it rests on."""
    return [
        "growth: the configuration stays, each month has one rate, and the requests stay alike; "
        f"{growth.simulations} simulations with the scenario's own seed, longer than those of the search where "
        "requests are drawn"
    ]
