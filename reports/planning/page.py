"""A plan as one self-contained HTML page that opens offline: the answer, what it rests on, all that was considered."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape

import plotly.graph_objects as go

from reports import look
from reports.page import card, figure, page
from reports.planning import day, growth, words
from reports.planning.facts import Facts, Figure, Option

STYLE = """.wide td, .wide th { white-space: nowrap; }
.wide td.what, .wide td.why { white-space: normal; min-width: 10rem; }
.wide td.why { min-width: 16rem; }
.missed { color: var(--bad); }
code { overflow-wrap: anywhere; }
"""
MOST = 400
"""Rows of the table of configurations; what is left out is said."""


def plan_html(facts: Facts) -> str:
    """The whole page as text."""
    drawn = figures_of(facts)
    body = "\n".join(
        [
            f"<h1>{escape(facts.title)}</h1>",
            f"<p>{escape(facts.traffic)}</p>",
            *(f"<p>{'<strong>' * (i == 0)}{escape(s)}{'</strong>' * (i == 0)}</p>"
              for i, s in enumerate(filter(None, words.answer(facts)))),
            _cards(facts),
            *_verified(facts),
            *_changes(facts),
            *_growth(facts),
            *_day(facts),
            *_limits(facts),
            "<h2>All configurations</h2>",
            f"<p>{escape(words.considered(facts))}</p>",
            _options(facts),
            *_starts(facts),
            "<h2>What it rests on</h2>",
            "<ul>" + "".join(f"<li>{escape(note)}</li>" for note in _assumptions(facts)) + "</ul>",
            f"<details><summary>The scenario</summary><pre>{escape(facts.scenario)}</pre></details>",
            f"<footer>A forecast, not a measurement. Made by servecast {escape(facts.version)}.</footer>",
        ]
    )  # fmt: skip
    return page(f"Plan: {facts.title}", body, drawn, STYLE)


def figures_of(facts: Facts) -> dict[str, go.Figure]:
    """The page's figures, by name."""
    drawn = {"growth": growth.drawn(facts, facts.growth)} if facts.growth and facts.growth.fleets else {}
    drawn |= {"day": day.drawn(facts.day)} if facts.day else {}
    return drawn | ({"prices": _prices(facts)} if facts.points else {})


def _cards(facts: Facts) -> str:
    best = facts.answer
    if best is None:
        return ""
    price = best.dollars_per_hour or 0.0
    headroom = "4 times and more" if facts.headroom is None else f"{100 * (facts.headroom - 1):.0f}"
    cards = [
        card("GPUs", f"{best.gpus:,}", "", f"{words.replicas(best, facts.spare)}"),
        card("Price", words.dollars(price), "an hour", f"{words.a_month(price)} a month; {facts.price_source}"),
        card("Headroom", headroom, "" if facts.headroom is None else "% more traffic", facts.breaks),
        card("Sure", f"{facts.draws_met} of {facts.draws}", "draws", "of the error of step times meet everything"),
    ]
    return f'<div class="cards">{"".join(cards)}</div>'


def _verified(facts: Facts) -> Iterator[str]:
    if not facts.verified:
        return
    yield "<h2>What is required, and comes out</h2>"
    names = ["recorded requests"] if facts.one_course else [f"seed {i + 1}" for i in range(len(facts.verified))]
    heads = "".join(f"<th>{name}</th>" for name in names)
    rows = "".join(
        f"<tr><td>{escape(row[0].required)}</td>{''.join(map(_cell, row))}</tr>"
        for row in zip(*facts.verified, strict=True)
    )
    yield f'<div class="wide"><table><tr><th>required</th>{heads}</tr>{rows}</table></div>'


def _cell(found: Figure) -> str:
    return f"<td{' class=missed' * (not found.met)}>{escape(found.shown)}</td>"


def _changes(facts: Facts) -> Iterator[str]:
    if not facts.changes:
        return
    yield "<h2>What would change it</h2>"
    rows = []
    for change in facts.changes:
        missed = words.missed(change.figures)
        then = "all is met" if change.met else "not met" if missed else "work piles up"
        cells = "".join(map(_cell, change.figures))
        rows.append(f"<tr><td>{words.changed(change.what, change.factor)}</td><td>{escape(then)}</td>{cells}</tr>")
    heads = "".join(f"<th>{escape(f.required)}</th>" for f in facts.changes[0].figures)
    yield f'<div class="wide"><table><tr><th>if there is</th><th>then</th>{heads}</tr>{"".join(rows)}</table></div>'


def _growth(facts: Facts) -> Iterator[str]:
    if facts.growth is None:
        return
    yield "<h2>As traffic grows</h2>"
    yield "".join(f"<p>{escape(sentence)}</p>" for sentence in growth.sentences(facts.growth))
    if facts.growth.fleets:
        yield _table(growth.HEADS, growth.rows(facts, facts.growth))
        yield figure("growth", "What each month costs, and the traffic against what that month's fleet carries")


def _day(facts: Facts) -> Iterator[str]:
    if facts.day is None:
        return
    yield "<h2>Over the day</h2>"
    yield "".join(f"<p>{escape(sentence)}</p>" for sentence in day.sentences(facts.day))
    yield figure("day", "GPUs over the day against as many all the time as the busiest hour takes, and the traffic")
    yield _table(day.HEADS, day.rows(facts.day))


def _limits(facts: Facts) -> Iterator[str]:
    if facts.limits or facts.points:
        yield "<h2>What the limit costs</h2>"
    if facts.limits:
        yield "<ul>" + "".join(f"<li>{escape(sentence)}</li>" for sentence in words.limits(facts)) + "</ul>"
    if facts.points:
        yield figure(
            "prices",
            "What each simulated configuration costs, and its first required latency. The line is the cheapest that "
            "was found for each limit: less may do, since the search looks for the cheapest at the limit itself",
        )


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Words and numbers, escaped here."""
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def _options(facts: Facts) -> str:
    ranked = words.ranked(facts)
    rows = "".join(map(_row, ranked[:MOST]))
    left = f"<p>{len(ranked) - MOST} more are left out here.</p>" if len(ranked) > MOST else ""
    heads = "".join(f"<th>{name}</th>" for name in ("configuration", "replicas", "GPUs", "$ an hour", "", "why"))
    return f'<div class="wide"><table><tr>{heads}</tr>{rows}</table></div>{left}'


def _row(option: Option) -> str:
    counts = (f"{option.replicas:,}", f"{option.gpus:,}", words.dollars(option.dollars_per_hour))
    cells = "".join(f"<td>{cell if option.replicas else ''}</td>" for cell in counts)
    why = option.why or words.missed(option.figures)
    return (
        f'<tr><td class="what">{escape(option.what)}</td>{cells}<td>{words.STATUS[option.status]}</td>'
        f'<td class="why">{escape(why)}</td></tr>'
    )


def _starts(facts: Facts) -> Iterator[str]:
    if facts.starts:
        yield "<h2>How to start it</h2>"
        yield "".join(f"<pre>{escape(line)}</pre>" for line in facts.starts)


def _assumptions(facts: Facts) -> list[str]:
    used = ", ".join(f"{gpu} {words.dollars(price)}" for gpu, price in sorted(facts.prices.items()))
    return [f"Prices per GPU and hour: {used} ({facts.price_source}).", *facts.notes]


def _prices(facts: Facts) -> go.Figure:
    latency = facts.required[0].rsplit(" <= ", 1)[0]
    drawn = look.panels([f"<b>Price against {escape(latency)}</b>"])
    kinds = ((True, "meets everything", look.GREEN, "circle"), (False, "misses this limit only", look.ORANGE, "x"))
    for met, name, colour, symbol in kinds:
        points = [point for point in facts.points if point.met == met]
        drawn.add_scatter(
            x=[point.value for point in points],
            y=[point.dollars_per_hour for point in points],
            mode="markers",
            name=name,
            marker={"color": colour, "symbol": symbol, "size": 9},
            text=[escape(point.what) for point in points],
            hovertemplate="%{text}<br>%{x:.3g} s, $%{y:,.2f} an hour<extra></extra>",
        )
    xs, ys = list[float](), list[float]()
    for point in sorted(facts.points, key=lambda p: (p.value, p.dollars_per_hour)):
        if not ys or point.dollars_per_hour < ys[-1]:
            xs.append(point.value)
            ys.append(point.dollars_per_hour)
    drawn.add_scatter(
        x=xs,
        y=ys,
        mode="lines",
        name="cheapest for a limit",
        line={"shape": "hv", "color": look.BLUE},
        hoverinfo="skip",
    )
    values = [point.value for point in facts.points]
    if facts.limit is not None and facts.answer is not None:
        here = f"{facts.answer.replicas + facts.spare} x {facts.answer.what}"
        found = [(facts.limit, facts.answer.dollars_per_hour, here)]
        found += [(other.limit, other.dollars_per_hour, other.what) for other in facts.limits if other.what]
        drawn.add_scatter(
            x=[limit for limit, *_ in found],
            y=[price for _, price, _ in found],
            mode="markers",
            name="cheapest at this limit, checked",
            marker={"color": look.BLUE, "symbol": "diamond-open", "size": 11, "line": {"width": 2}},
            text=[escape(what) for *_, what in found],
            hovertemplate="%{text}<br>limit %{x:.3g} s, $%{y:,.2f} an hour<extra></extra>",
        )
        values += [limit for limit, *_ in found]
    if facts.limit is not None:
        drawn.add_vline(x=facts.limit, line={"dash": "dot", "color": look.GREY})
        values.append(facts.limit)
    drawn.update_xaxes(**look.scaled(min(values), max(values), f"{escape(latency)}, s"))
    drawn.update_yaxes(title={"text": "$ an hour"})
    return drawn
