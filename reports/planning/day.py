"""What a plan's answer takes in the course of a day: sentences, rows and a figure."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import plotly.graph_objects as go

from reports import look
from reports.planning.facts import Day
from reports.planning.words import dollars, traffic
from reports.words import clock, seconds

HEADS = ("from", "until", "traffic up to", "replicas", "GPUs")
DAY_S = 86_400.0


def sentences(day: Day) -> Iterator[str]:
    """What it comes to, the first one alone enough."""
    period = "a day" if day.period_s == DAY_S else f"in each {seconds(day.period_s)}"
    if day.gpu_hours is None or day.dollars is None or day.static_dollars is None:
        yield "The busiest hour takes more GPUs than there may be."
        return
    least = min(hour.gpus or 0 for hour in day.hours)
    saved = 1 - day.dollars / day.static_dollars
    yield (
        f"With replicas that come and go, {least:,} to {day.static_gpus:,} GPUs: {day.gpu_hours:,.4g} GPU-hours and "
        f"{dollars(day.dollars)} {period}, {100 * saved:.0f} % less than {day.static_gpus:,} all the time "
        f"({dollars(day.static_dollars)})."
    )
    if day.checked:
        figures = "; ".join(f"{figure.required}: {figure.shown}" for figure in day.checked)
        how = "meets everything" if day.met else f"does not meet everything, {day.why}"
        yield f"Simulated with that fleet, its day {how} ({figures})."
    else:
        yield "That day itself was not simulated."


def rows(day: Day) -> Iterator[tuple[str, ...]]:
    """A row for hours on end that take the same."""
    for _, group in groupby(day.hours, key=lambda hour: hour.replicas):
        hours = list(group)
        last = hours[-1]
        more = "more than there may be" if last.replicas is None else f"{last.replicas:,}"
        most = traffic(day.rate, max(hour.factor for hour in hours))
        ends = last.start_s + last.length_s
        yield time(day, hours[0].start_s), time(day, ends), most, more, "" if last.gpus is None else f"{last.gpus:,}"


def time(day: Day, at_s: float) -> str:
    """`07:00` of a day; of another period, the time since it began."""
    if day.period_s == DAY_S:
        return f"{round(at_s) // 3600:02d}:{round(at_s) % 3600 // 60:02d}"
    return seconds(at_s) if at_s else "0"


def drawn(day: Day) -> go.Figure:
    """GPUs over the day, against as many all the time, and the traffic."""
    unit = "times the busiest" if day.rate is None else "requests/s"
    figure = look.panels(["<b>GPUs</b>", f"<b>Traffic, {unit}</b>"], columns=2)
    scale, word = (1 / 3600, "hour") if day.period_s == DAY_S else clock(day.period_s)
    xs = [hour.start_s * scale for hour in day.hours] + [day.period_s * scale]
    texts = [f"{time(day, h.start_s)} to {time(day, h.start_s + h.length_s)}" for h in day.hours]
    gpus = [hour.gpus for hour in day.hours]
    figure.add_scatter(
        x=xs,
        y=[*gpus, gpus[-1]],
        text=[*texts, texts[-1]],
        name="come and go",
        mode="lines",
        line={"shape": "hv", "color": look.BLUE},
        fill="tozeroy",
        hovertemplate="%{text}: %{y} GPUs<extra></extra>",
    )
    if day.static_gpus is not None:
        figure.add_scatter(
            x=[xs[0], xs[-1]],
            y=[day.static_gpus] * 2,
            name="as many all the time",
            mode="lines",
            line={"color": look.GREY, "dash": "dash"},
            hovertemplate="%{y} GPUs all the time<extra></extra>",
        )
    rate = 1.0 if day.rate is None else day.rate
    loads = [hour.factor * rate for hour in day.hours]
    figure.add_scatter(
        x=xs,
        y=[*loads, loads[-1]],
        text=[*texts, texts[-1]],
        name="traffic",
        mode="lines",
        line={"shape": "hv", "color": look.ORANGE},
        hovertemplate="%{text}: %{y:.3g}<extra></extra>",
        xaxis="x2",
        yaxis="y2",
    )
    figure.update_xaxes(title={"text": word}, range=[0, xs[-1]])
    if word == "hour":
        figure.update_xaxes(dtick=4)
    figure.update_yaxes(tickformat=",d", title={"text": "GPUs"}, selector={"anchor": "x"})
    figure.update_yaxes(title={"text": unit}, selector={"anchor": "x2"})
    return figure


def said(day: Day) -> list[str]:
    """What it rests on."""
    if day.start_s is None:
        start = "how long a replica takes until it serves is not known here, and not paid for: give cold_start"
    else:
        start = f"replicas start {day.start_s:.0f} s before they are needed, which is paid for ({day.starts} a day)"
    return [
        "day: each hour is sized by itself, as if its highest rate went on; "
        f"{start}; those that are drained finish what they have, which is not counted; {day.simulations} simulations"
    ]
