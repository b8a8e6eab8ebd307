"""A comparison as one self-contained HTML page that opens offline: the answer, the table behind it, why, and how it
was judged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from html import escape

import plotly.graph_objects as go

from reports.comparing import figures, words
from reports.comparing.facts import Compared, Line
from reports.page import card, figure, page
from reports.words import NONE, latency_unit, quantity

STYLE = """.better { color: var(--good); } .worse { color: var(--bad); } .plain { color: var(--soft); }
.lines td { min-width: 8rem; overflow-wrap: normal; } .lines td div { font-size: 0.85rem; font-weight: 400; }
.best { font-weight: 600; } .wide tbody th { min-width: 7rem; }
"""
CARDS = ("p99_ttft_ms", "p99_tpot_ms", "p99_e2el_ms", "output_throughput", "request_goodput",
         "cost_per_million_output_tokens")  # fmt: skip
FIGURES: dict[str, tuple[Callable[[Compared], go.Figure], str]] = {
    "spent": (figures.where_spent, "Where mean TTFT and TPOT were spent: means over all requests and runs"),
    "distributions": (
        figures.distributions,
        "The share of requests (ITL: of token gaps) at or below each value; of several seeds, the mean of each "
        "percentile",
    ),
    "time": (figures.over_time, "What went on in the run under the first seed, on one clock: means over time bins"),
}


def compare_html(c: Compared) -> str:
    """The whole page as text."""
    answer, *more = words.answer(c)
    body = "\n".join(
        [
            f"<h1>{escape(c.title)}</h1>",
            f'<p class="soft">{escape(_ran(c))}</p>',
            f"<p><strong>{escape(answer)}</strong></p>"
            if c.alike
            else f'<div class="banner saturated"><strong>{escape(answer)}</strong></div>',
            *(f"<p>{escape(sentence)}</p>" for sentence in more),
            *(f'<div class="banner saturated">{escape(sentence)}</div>' for sentence in words.piled_up(c)),
            *(
                f'<div class="banner saturated"><strong>{escape(label)} did not run</strong>: {escape(error)}</div>'
                for label, error in c.failed
            ),
            _cards(c),
            *_changed(c),
            "<h2>Every figure</h2>",
            f"<p>{escape(_legend(c))}</p>",
            _lines(c, c.lines),
            *_why(c),
            *(figure(name, caption) for name, (_, caption) in FIGURES.items()),
            *_steady(c),
            "<h2>How it was judged</h2>",
            "<ul>" + "".join(f"<li>{escape(sentence)}</li>" for sentence in words.method(c)) + "</ul>",
            f"<footer>A forecast, not a measurement. Made by servecast {escape(c.version)}, "
            f"{'seed' if len(c.seeds) == 1 else 'seeds'} {', '.join(map(str, c.seeds[:20]))}"
            f"{', ...' * (len(c.seeds) > 20)}.</footer>",
        ]
    )
    return page(f"Compare: {c.title}", body, figures_of(c), STYLE)


def figures_of(c: Compared) -> dict[str, go.Figure]:
    """The page's figures, by name."""
    return {name: make(c) for name, (make, _) in FIGURES.items()}


def _ran(c: Compared) -> str:
    same = "the same" if c.alike else "about"
    said = "; ".join(f"{r.label}: {r.setup}" for r in c.ran)
    return f"{said}; {same} {c.requests:,} requests, {len(c.seeds)} run{'s' * (len(c.seeds) != 1)} each"


def _cards(c: Compared) -> str:
    """Two scenarios: the headline differences."""
    if len(c.ran) != 2 or c.ran[1].same:
        return ""
    found = []
    for line in c.lines:
        difference = line.differences[1]
        if line.metric.key not in CARDS or difference is None or difference.interval is None:
            continue
        verdict = words.VERDICTS[difference.word]
        found.append(card(escape(words.heading(line)), words.change(line, 1), "", f"{verdict}: {_pair(line)}"))
    return f'<div class="cards">{"".join(found)}</div>'


def _pair(line: Line) -> str:
    old, new = (value.partition(" ±")[0] for value in words.values(line))
    return f"{old} -> {new}"


def _changed(c: Compared) -> Iterator[str]:
    if rows := words.changed(c):
        yield "<h2>What differs</h2>"
        yield _table(["", *(r.label for r in c.ran)], ([key, *values] for key, values in rows))


def _legend(c: Compared) -> str:
    return (
        f"Below each figure: its difference to {c.first.label}, with its 95 % interval. Bold: better than every other "
        "beyond noise"
    )


def _lines(c: Compared, lines: Iterable[Line]) -> str:
    """Metric, and every scenario's value over its difference with the verdict."""
    top = "".join(f"<th>{escape(name)}</th>" for name in ("", *(r.label for r in c.ran)))
    rows = "".join(f"<tr><th>{escape(words.heading(line))}</th>{''.join(_cells(c, line))}</tr>" for line in lines)
    return f'<div class="wide"><table class="lines"><thead><tr>{top}</tr></thead><tbody>{rows}</tbody></table></div>'


def _cells(c: Compared, line: Line) -> Iterator[str]:
    for i, (value, found) in enumerate(zip(words.values(line), line.differences, strict=True)):
        below = ""
        if found is not None and found.word not in ("equal", "undefined"):
            below = f": {escape(words.difference(line, i))}"
            if c.draws:
                below += f"; under the model's error {escape(words.under_error(line, found))}"
        if found is not None and found.word != "undefined":
            kind = found.word if found.word in ("better", "worse") else "plain"
            verdict = f"{words.SIGNS[found.word]} {words.VERDICTS[found.word]}".strip()
            below = f'<div class="{kind}">{escape(verdict)}{below}</div>'
        yield f"<td{' class=best' * (line.best == i)}>{escape(value)}{below}</td>"


def _why(c: Compared) -> Iterator[str]:
    if all(r.same for r in c.ran):
        return
    yield "<h2>Why they differ</h2>"
    for i, r in enumerate(c.ran[1:], 1):
        if said := words.why(c, i):
            yield f"<h3>{escape(f'{c.first.label} -> {r.label}')}</h3>"
            yield "<ul>" + "".join(f"<li>{escape(sentence)}</li>" for sentence in said) + "</ul>"
    names = [name for name in c.first.classes if all(name in r.classes for r in c.ran)]
    if names:
        head = ["class", *(f"{r.label}: {what}" for r in c.ran for what in ("queue, mean", "TTFT p50", "TTFT p99"))]
        yield "<h3>Request classes</h3>" + _table(
            head,
            (
                [
                    name,
                    *(
                        _ms(value)
                        for found in (r.classes[name] for r in c.ran)
                        for value in (found.queue_ms, found.p50_ttft_ms, found.p99_ttft_ms)
                    ),
                ]
                for name in names
            ),
        )


def _ms(value: float | None) -> str:
    scale, unit = latency_unit(value)
    return NONE if value is None else f"{quantity(value * scale)} {unit}"


def _steady(c: Compared) -> Iterator[str]:
    if c.trimmed is not None and not all(r.same for r in c.ran[1:]):
        yield "<h2>In the steady window</h2>"
        yield (
            f"<p>Requests after the first {100 * c.trimmed:.0f} % in order of arrival</p>"
            if c.trimmed
            else "<p>No run has a warm-up that could be told from its noise: the window is the whole run</p>"
        )
        if c.trimmed:
            yield _lines(c, c.steady)


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A head, and rows of which the first cell names each."""
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(
        f"<tr><th>{escape(first)}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in rest)}</tr>"
        for first, *rest in rows
    )
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
