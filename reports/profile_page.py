"""A profile as one self-contained HTML page that opens offline: whose it is, what it reaches, how far it is off.

Everything that comes from a file passes `escape` here; figures hold numbers, our own words, and the names of a
measured point, which are those of the tables' columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from reports import profile_words as words
from reports.page import card, figure, page
from reports.profile_figures import figures_of
from reports.profile_rates import Achieved, achieved, best, by_size
from reports.words import NONE, percent

if TYPE_CHECKING:
    from calibrate.profile import Profile
    from reports.profile_against import Against

STYLE = """.wide { overflow-x: auto; } .wide th { white-space: nowrap; } .ranges th { min-width: 7rem; }
footer { overflow-wrap: anywhere; }
"""

CARDS = {
    "gemm": ("GEMM, best", "flops"),
    "prefill_attention": ("Prefill attention, best", "flops"),
    "decode_attention": ("Decode attention, best", "bytes"),
    "moe": ("Experts, best", "bytes"),
    "collective": ("All-reduce, best", "bytes"),
}
"""Family -> the title of its card, and what it is about."""


def profile_html(profile: Profile, against: Against | None = None) -> str:
    """The whole page as text, below 7 MB."""
    reached = achieved(profile)
    drawn = {name: (make(profile), caption) for name, (make, caption) in figures_of(profile).items()}
    compared = {}
    if against is not None:
        from reports.profile_against import figures_of as figures_against

        compared = figures_against(against)
    body = "\n".join(
        [
            f"<h1>{escape(profile.gpu.name)}: what its kernels cost</h1>",
            f'<p class="soft">Profile of {escape(profile.gpu.id)}. {escape(words.origin(profile))}</p>',
            f'<div class="banner"><strong>Accuracy</strong>: {escape(str(profile.provenance["accuracy"]))}.</div>',
            *(f'<div class="banner">{escape(said)}</div>' for said in words.limits(profile)),
            _cards(reached),
            "<h2>What the kernels reach</h2>",
            *(figure(name, caption) for name, (_, caption) in drawn.items()),
            _rates(reached),
            *(_against(against, compared) if against is not None else ()),
            "<h2>How far the fit is off</h2>",
            *_residuals(profile),
            "<h2>What was measured</h2>",
            _ranges(profile),
            "<h2>Where the measurements come from</h2>",
            *_sources(profile),
            "<footer>Rates are those of the profile's prices, which follow the measurements as closely as the errors "
            "say. Made by servecast.</footer>",
        ]
    )
    figures = {name: made for name, (made, _) in (drawn | compared).items()}
    return page(f"{profile.gpu.id}: profile", body, figures, STYLE)


def _cards(reached: Sequence[Achieved]) -> str:
    """The best rate of every family, of the dtype that is closest to the datasheet."""
    cards = []
    for family, (title, bound) in CARDS.items():
        if mine := [each for each in reached if (each.family, each.bound) == (family, bound)]:
            top = max(mine, key=lambda each: each.best / each.limit)
            value, unit = words.rate(top.best, bound).split()
            what = top.at if family == "collective" else top.of
            cards.append((title, value, unit, f"{percent(top.best / top.limit)} of the datasheet; {what}, {top.size}"))
    return '<div class="cards">' + "".join(card(*one) for one in cards) + "</div>"


def _rates(reached: Sequence[Achieved]) -> str:
    rows = []
    for family, of, flops, moved in best(reached):
        cells = (
            f"{words.rate(side.best, side.bound)} ({100 * side.best / side.limit:.0f} %)" if side else NONE
            for side in (flops, moved)
        )
        rows.append((words.family_name(family), of, *cells))
    short = _table(("family", "of", "best FLOP/s", "best bytes/s"), rows, numbers=2)
    sizes = [
        (
            words.family_name(each.family), each.of, each.size, words.rate(each.median, each.bound),
            words.rate(each.best, each.bound), percent(each.best / each.limit), each.at,
        )
        for each in by_size(reached)
    ]  # fmt: skip
    head = ("family", "of", "size", "median", "best", "of datasheet", "best of")
    best_of = "Best rates of the catalogued models' shapes on one GPU; in brackets, of the datasheet's. "
    best_of += words.cached(reached)
    said = "By size: the median and the best of those shapes"
    every = _table(head, sizes, numbers=3, last_text=True)
    return f"<p>{best_of}</p>{short}<details><summary>{said}</summary>{every}</details>"


def _against(against: Against, figures: dict[str, tuple[object, str]]) -> Iterable[str]:
    yield "<h2>Against the measurements</h2>"
    yield f'<div class="banner">{escape(against.seen)}</div>'
    yield _table(
        ("family", "points", "|error|, median", "p90", "bias"), [each.row for each in against.families], numbers=1
    )
    if against.left_out:
        yield "<ul>" + "".join(f"<li>Not compared: {escape(said)}.</li>" for said in against.left_out) + "</ul>"
    yield from (figure(name, caption) for name, (_, caption) in figures.items())


def _residuals(profile: Profile) -> Iterable[str]:
    yield f"<p>{escape(words.ERRORS)} Median, and p90 in brackets.</p>"
    rows = [
        (family, kind, *(f"{words.per_cent(r.median)} ({words.per_cent(r.p90)})" if r else NONE for r in cells))
        for family, kind, cells in words.summary(profile.residuals)
    ]
    yield _table(("family", "kind", words.POINTS, words.SHAPES, words.EDGE), rows, numbers=2)
    every = [
        (
            words.family_name(r.family), r.kind, words.held_out(r.what), words.per_cent(r.median),
            words.per_cent(r.p90), f"{r.points:,}",
        )
        for r in profile.residuals
    ]  # fmt: skip
    head = ("family", "kind", "held out", "median", "p90", "points")
    yield f"<details><summary>Every kind</summary>{_table(head, every, numbers=3)}</details>"


def _ranges(profile: Profile) -> str:
    rows = "".join(
        f"<tr><th>{escape(family)}<br>{escape(of)}</th><td>{escape(sizes)}"
        + (f'<div class="soft">{escape(kernels)}</div>' if kernels else "")
        + "</td></tr>"
        for family, of, sizes, kernels in words.ranges(profile)
    )
    return f'<table class="ranges"><tbody>{rows}</tbody></table>'


def _sources(profile: Profile) -> Iterable[str]:
    for families, facts, notes in words.sources(profile):
        yield f"<h3>{escape(families)}</h3>"
        yield "<dl>" + "".join(f"<dt>{name}</dt><dd>{escape(what)}</dd>" for name, what in facts) + "</dl>"
        if notes:
            yield "<details><summary>Notes</summary><ul>"
            yield "".join(f"<li>{escape(note)}</li>" for note in notes) + "</ul></details>"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: int = 99, *, last_text: bool = False) -> str:
    """A table that scrolls sideways where it must; columns from `numbers` on are right-aligned, the last one not where
    it is `last_text`."""

    def kind(i: int) -> str:
        return ' class="number"' if i >= numbers and not (last_text and i == len(head) - 1) else ""

    top = "".join(f"<th{kind(i)}>{escape(name)}</th>" for i, name in enumerate(head))
    body = "".join(
        f"<tr><th>{escape(first)}</th>"
        + "".join(f"<td{kind(i)}>{escape(cell)}</td>" for i, cell in enumerate(rest, 1))
        + "</tr>"
        for first, *rest in rows
    )
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
