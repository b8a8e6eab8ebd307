"""What was explained as one self-contained HTML page that opens offline. All text from a user passes `escape` here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape

import plotly.graph_objects as go

from reports import drafts
from reports.explaining import figures, words
from reports.explaining.facts import Explained
from reports.page import card, figure, page
from reports.words import quantity

FIGURES: dict[str, tuple[Callable[[Explained], go.Figure], str]] = {
    "length": (
        figures.by_length,
        "What a prompt takes, and the least that the GPU's peaks allow. Where its FLOPs take longer than its bytes the "
        "prompt is long enough to keep the tensor cores busy; what attention adds bends the line up in the end.",
    ),
    "batch": (
        figures.by_batch,
        "Reading the weights takes as long for one as for many; attention reads every request's own KV cache, and "
        "grows with them.",
    ),
    "context": (figures.by_context, "The KV cache that a token reads grows with what is before it."),
    "roofline": (
        figures.roofline,
        "Left of the bend a step waits for memory, right of it for arithmetic. Batches move decoding to the "
        "right, until all that is read is KV.",
    ),
}


DRAFTS = "Drafts are nearly free while steps wait for memory; with many at once they cost what they compute."


def explain_html(explained: Sequence[Explained]) -> str:
    """The whole page as text; of several pools one after the other."""
    body = "\n".join(part for i, e in enumerate(explained) for part in _pool(e, i))
    foot = f"<footer>A forecast, not a measurement. Made by servecast {escape(explained[0].version)}.</footer>"
    return page(f"Explained: {words.title(explained[0])}", body + foot, figures_of(explained))


def figures_of(explained: Sequence[Explained]) -> dict[str, go.Figure]:
    """The page's figures, by name; from the second pool on with its number."""
    made = {_id(name, i): make(e) for i, e in enumerate(explained) for name, (make, _) in FIGURES.items()}
    drafting = {_id("drafts", i): e.drafts for i, e in enumerate(explained) if e.drafts is not None}
    return made | {name: drafts.by_batch([("", worth)]) for name, worth in drafting.items()}


def _id(name: str, pool: int) -> str:
    return f"{name}_{pool + 1}" if pool else name


def _pool(e: Explained, number: int) -> Iterator[str]:
    yield f"<h1>{escape(words.title(e))}</h1>"
    yield f'<p class="soft">{words.tokens(e.prompt)} in, {e.output:,} out; workload: {escape(e.workload)}</p>'
    for i, sentence in enumerate(words.answer(e)):
        yield f"<p>{'<strong>' * (not i)}{escape(sentence)}{'</strong>' * (not i)}</p>"
    n, batch = max(e.by_batch), e.batch
    plain = "" if e.drafts is None else ", no drafts"
    cards = [
        card(
            f"TTFT, alone{plain}", quantity(1e3 * e.alone.ttft_s), "ms", f"prompt {words.ms(e.alone.prefill.seconds)}"
        ),
        card(f"TPOT, alone{plain}", quantity(1e3 * e.alone.tpot_s), "ms", f"{quantity(1 / e.alone.tpot_s)} tokens/s"),
        card(
            f"TPOT, {n:,} at once{plain}",
            quantity(1e3 * batch.seconds),
            "ms",
            f"{quantity(n / batch.seconds)} tokens/s in all",
        ),
        card("Prompts are bound by", words.BOUNDS[e.alone.prefill.bound], "", "this one, alone"),
        card("Answers are bound by", words.BOUNDS[e.by_batch[1].bound], "", f"at {n:,}: {words.BOUNDS[batch.bound]}"),
        card("At once", f"{e.kept.at_once:,}", "requests", "like this one"),
    ]
    yield f'<div class="cards">{"".join(cards)}</div>'
    yield "<h2>Where a step's time goes</h2>"
    for name, step in words.steps(e):
        yield f"<h3>{escape(name)}</h3>"
        yield _table(words.PART_HEAD, words.part_rows(step))
    for name, (_, caption) in FIGURES.items():
        yield figure(_id(name, number), caption)
        if name == "roofline":
            yield from (f"<p>{escape(sentence)}</p>" for sentence in words.roofline(e))
    yield "<h2>What memory holds</h2>"
    yield _terms(words.kept(e))
    yield "<h2>What it would be without, and with</h2>"
    yield _terms(words.lessons(e))
    if e.drafts is not None:
        yield _table(drafts.HEAD, drafts.rows(e.drafts))
        yield figure(_id("drafts", number), DRAFTS)
    yield _table(words.change_head(e), words.change_rows(e))
    yield "".join(f"<p class='soft'>Not shown: {escape(line)}</p>" for line in words.not_changed(e))
    yield "<h2>What it rests on</h2>"
    yield "<ul>" + "".join(f"<li>{escape(note)}</li>" for note in words.assumptions(e)) + "</ul>"


def _terms(rows: Iterable[tuple[str, str]]) -> str:
    return "<dl>" + "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in rows) + "</dl>"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = "".join(f"<th{' class=number' if i else ''}>{escape(name)}</th>" for i, name in enumerate(head))
    body = "".join(
        f"<tr><th>{escape(first)}</th>{''.join(f'<td class=number>{escape(cell)}</td>' for cell in rest)}</tr>"
        for first, *rest in rows
    )
    return f'<div class="wide"><table class="number"><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table></div>'
