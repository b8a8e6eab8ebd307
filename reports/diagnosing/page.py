"""What was diagnosed as one self-contained HTML page that opens offline. All text from a user passes `escape` here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from reports.diagnosing import words
from reports.diagnosing.facts import Diagnosed, Tried
from reports.page import card, page

BANNERS = {"healthy": "stable", "found": "saturated", "unexplained": "", "outside": ""}
"""How the answer looks, by verdict."""


def diagnose_html(found: Diagnosed) -> str:
    """The whole page as text."""
    foot = f"<footer>A forecast, not a measurement. Made by servecast {escape(found.version)}.</footer>"
    return page(f"Diagnosed: {found.title}", "\n".join(_body(found)) + foot, {})


def _body(found: Diagnosed) -> Iterator[str]:
    yield f"<h1>{escape(found.title)}</h1>"
    yield f'<p class="soft">{escape(found.setup)}</p>'
    first, *rest = words.answer(found)
    yield f'<div class="banner {BANNERS[found.verdict]}"><strong>{escape(first)}</strong>'
    yield "".join(f"<p>{escape(sentence)}</p>" for sentence in rest) + "</div>"
    if found.likely:
        top = found.likely[0]
        pairs = zip(words.shown(found), top.effects, strict=True)
        yield '<div class="cards">'
        for symptom, (before, after) in pairs:
            yield card(escape(symptom.name), escape(symptom.said(after)), "", f"now {symptom.said(before)}")
        yield card("Of it goes", words.goes(top.gone, top.half), "", "with the change")
        yield "</div>"
        yield _terms(words.how(top))
    if found.symptoms:
        yield "<h2>What is wrong</h2>"
        yield _table(words.SYMPTOM_HEAD, words.symptom_rows(found))
    if found.compare:
        yield "<h2>What to compare</h2>"
        yield "<ul>" + "".join(f"<li>{escape(sentence)}</li>" for sentence in found.compare) + "</ul>"
    if found.tried:
        yield "<h2>Causes that were taken away, one at a time</h2>"
        yield _causes(found.tried)
    if found.ruled_out:
        yield "<h2>Ruled out</h2>"
        rows = ((f"{each.pool}: {each.words}" if each.pool else each.words, each.why) for each in found.ruled_out)
        yield _table(("cause", "why not"), rows)
    yield "<h2>The simulated run</h2>"
    yield _terms(found.figures)
    yield "".join(f'<p class="soft">{escape(notice)}</p>' for notice in found.notices)
    yield "<h2>What it rests on</h2>"
    lines = [words.tried(found), *words.assumptions(found)]
    yield "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def _causes(tried: Sequence[Tried]) -> str:
    rows = []
    for cause in tried:
        name, change, gone, but = words.cause_row(cause)
        rows.append((name, change, gone.replace(" ", "\N{NO-BREAK SPACE}"), but, cause.check))
    return _table((*words.CAUSE_HEAD, "how to check it"), rows)


def _terms(rows: Iterable[tuple[str, str]]) -> str:
    return "<dl>" + "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in rows) + "</dl>"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(
        f"<tr><th>{escape(first)}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in rest)}</tr>"
        for first, *rest in rows
    )
    return f'<div class="wide"><table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table></div>'
