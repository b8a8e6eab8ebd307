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
.wide td, .wide thead th { white-space: nowrap; } .wide td.word, .wide td:last-child { overflow-wrap: normal; }
.best { font-weight: 600; } .wide tbody th { min-width: 8.5rem; }
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
            f'<div class="banner {"stable" if c.alike else "saturated"}"><strong>{escape(answer)}</strong></div>',
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
            "<h2>Why they differ</h2>",
            *_why(c),
            _figure("spent"),
            _figure("distributions"),
            _figure("time"),
            *_steady(c),
            "<h2>How it was judged</h2>",
            "<ul>" + "".join(f"<li>{escape(sentence)}</li>" for sentence in words.method(c)) + "</ul>",
            f"<footer>A forecast, not a measurement. Made by servecast {escape(c.version)}, "
            f"{'seed' if len(c.seeds) == 1 else 'seeds'} {', '.join(map(str, c.seeds[:20]))}"
            f"{', ...' * (len(c.seeds) > 20)}.</footer>",
        ]
    )
    return page(f"Compare: {c.title}", body, {name: make(c) for name, (make, _) in FIGURES.items()}, STYLE)


def _figure(name: str) -> str:
    return figure(name, FIGURES[name][1])


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
        yield _table(["", *(r.label for r in c.ran)], ([(key, ""), *((v, "") for v in vs)] for key, vs in rows))


def _legend(c: Compared) -> str:
    if len(c.ran) == 2:
        return f"{c.ran[1].label} less {c.first.label}, with 95 % intervals"
    return f"Differences to {c.first.label} with 95 % intervals; bold: better than every other beyond noise"


def _lines(c: Compared, lines: Iterable[Line]) -> str:
    """Metric, every scenario's value, and each one's difference with the verdict."""
    several = len(c.ran) > 2
    head = ["", *(r.label for r in c.ran)]
    for r in c.ran[1:]:
        head += [f"{r.label} less the first" if several else "difference"]
        head += ["under the model's error"] * bool(c.draws) + [""]

    def cells(line: Line) -> Iterator[tuple[str, str]]:
        yield words.heading(line), ""
        for i, value in enumerate(words.values(line)):
            yield value, "best" if line.best == i else ""
        for i, found in enumerate(line.differences):
            if found is not None:
                yield words.difference(line, i), ""
                if c.draws:
                    yield words.under_error(line, found), ""
                word = found.word if found.word in ("better", "worse") else "plain"
                yield f"{words.SIGNS[found.word]} {words.VERDICTS[found.word]}".strip(), f"word {word}"

    return _table(head, map(cells, lines))


def _why(c: Compared) -> Iterator[str]:
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
                    (name, ""),
                    *(
                        (_ms(value), "")
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


def _table(head: Iterable[str], rows: Iterable[Iterable[tuple[str, str]]]) -> str:
    """A head, and cells with their classes; the first of a row names it."""
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = []
    for row in rows:
        (first, _), *rest = row
        cells = "".join(f"<td{f' class={chr(34)}{kind}{chr(34)}' * bool(kind)}>{escape(v)}</td>" for v, kind in rest)
        body.append(f"<tr><th>{escape(first)}</th>{cells}</tr>")
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'
