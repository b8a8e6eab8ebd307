"""A sweep as one self-contained HTML page that opens offline: the answer, the fronts, then all configurations.

Everything that comes from a user passes `escape` here, is set as plain text by the script, or is escaped in a figure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from html import escape
from importlib.resources import files
from typing import Any

import plotly.graph_objects as go

from reports import page as pages
from reports.page import card, figure, page
from reports.sweeping import figures, words
from reports.sweeping.points import INTERACTIVITY, THROUGHPUT, TTFT, Shown, Swept
from reports.words import DEFINITIONS

FRONT_ROWS = 20
HOVER = 4
"""Figures that a marker shows."""
ERRORS = 20
STYLE = """.wide { overflow-x: auto; } .wide th { white-space: nowrap; } footer, code { overflow-wrap: anywhere; }
.filters { display: flex; flex-wrap: wrap; gap: 10px 16px; align-items: end; margin: 12px 0; }
.filters label { display: flex; flex-direction: column; font-size: 0.85rem; color: var(--soft); gap: 2px; }
.filters label.check { flex-direction: row; align-items: center; gap: 6px; padding-bottom: 6px; }
select, input, button { font: inherit; font-size: 0.9rem; color: var(--ink); background: var(--card);
  border: 1px solid var(--line); border-radius: 6px; padding: 5px 8px; max-width: 15rem; }
input[type=text] { width: 8.5rem; } input.wrong { border-color: var(--bad); }
button { cursor: pointer; } th button { border: 0; background: none; padding: 0; color: inherit; font-weight: 500;
  text-align: inherit; white-space: nowrap; }
.wide td { white-space: nowrap; } .wide td small { color: var(--soft); } #table td small { display: block; }
#coordinates .annotation .bg { fill: var(--card) !important; fill-opacity: 0.8 !important; }
th[aria-sort] button { color: var(--ink); font-weight: 600; }
tr.front > :first-child { border-left: 4px solid #3d85d9; } tr.unsteady { color: var(--soft); }
figure .pick { padding: 0 8px 6px; }
"""


def sweep_html(swept: Swept) -> str:
    """The whole page as text, below 6 MB however many runs there are."""
    pairs, drawn = _pairs(swept), figures_of(swept)
    others = [drawn.pop(f"heat_{i}") for i in range(2, len(pairs) + 1)]  # in place of the first one, when asked for
    body = "\n".join(
        [
            *_top(swept),
            _cards(swept),
            *_wrong(swept, "failed", "Runs that failed", most=3),
            *(_captioned(swept, name, pairs) for name in drawn),
            "<h2>The front</h2>",
            *_fronts(swept),
            "<h2>All configurations</h2>",
            _table(swept),
            *_wrong(swept, "invalid", "Left out: no valid scenario", most=ERRORS),
            "<h2>What was varied</h2>",
            "<ul>" + "".join(f"<li><code>{escape(line)}</code></li>" for line in words.varied(swept)) + "</ul>",
            f"<details><summary>The scenario</summary><pre>{escape(swept.scenario)}</pre></details>",
            "<h2>What each number means</h2>",
            _definitions(),
            f"<footer>A forecast, not a measurement. Made by servecast {escape(swept.version)}.</footer>",
        ]
    )
    heats = ["FIGURES.heat", *map(pages.parts, others)]
    script = (
        f"const HEAT = [{', '.join(heats)}];\n"
        + pages.data("TABLE", _data(swept))
        + (files("reports.sweeping") / "table.js").read_text(encoding="utf-8")
    )
    return page(f"Sweep: {swept.title}", body, drawn, STYLE, script)


def figures_of(swept: Swept) -> dict[str, go.Figure]:
    """The page's figures, by name; a heat map for every pair of axes."""
    drawn: dict[str, go.Figure] = {"fronts": figures.fronts(swept)}
    if len(swept.axes) == 1:
        drawn["lines"] = figures.lines(swept)
    for i, pair in enumerate(_pairs(swept), 1):
        drawn["heat" if i == 1 else f"heat_{i}"] = figures.heat(swept, pair)
    if len(swept.axes) > 1:
        drawn["coordinates"] = figures.coordinates(swept)
    return drawn


def _pairs(swept: Swept) -> list[tuple[Shown, Shown]]:
    return figures.pairs(swept) if len(swept.axes) > 1 else []


def _top(swept: Swept) -> Iterator[str]:
    said, more, found = words.answer(swept)
    yield f'<h1>Sweep: {escape(swept.title)}</h1><p class="soft">{escape(words.ran(swept))}</p>'
    if not swept.complete:
        yield '<div class="banner"><strong>Ended early</strong>: the same command goes on from here.</div>'
    kind = "stable" if found else "saturated"
    yield f'<div class="banner {kind}"><strong>{escape(said)}.</strong> {escape(more)}</div>'
    if notes := words.counted(swept):
        yield f'<div class="banner">{"<br>".join(map(escape, notes))}</div>'


def _cards(swept: Swept) -> str:
    shown = []
    for name, key, most in (
        ("Most output per GPU", THROUGHPUT, True),
        ("Fastest for a user", INTERACTIVITY, True),
        ("Lowest TTFT, median", TTFT, False),
    ):
        if (best := swept.best(key, most)) is not None:
            column = next(c for c in swept.columns if c.key == key)
            said = [words.settings(swept, best)]
            if drawn := words.between(column, best):
                others = swept.rivals(key, most, best).height
                said += [f"{drawn} within the model's error"] + [f"{others:,} more may do as well"] * bool(others)
            shown.append(card(name, words.figure(column, best[key]), column.unit, "; ".join(said)))
    sizes = [swept.front(against).height for against in (INTERACTIVITY, TTFT)]
    more = f"and {sizes[1]:,} on the one by TTFT"
    shown.append(card("On the front by interactivity", f"{sizes[0]:,}", f"of {swept.points.height:,}", more))
    return f'<div class="cards">{"".join(shown)}</div>'


CAPTIONS = {
    "fronts": "A marker a configuration; the dotted line joins those that no other one beats in both figures. Open "
    "markers do not keep up with their load (or ran too short to tell). Better is up, and to the right in the left "
    "panel, to the left in the right one.",
    "lines": "The figures by what was varied; open markers do not keep up with their load.",
    "heat": "Means over all values of the other axes, from dark (worst) to bright (best). Empty: none that keeps up "
    "with its load.",
    "coordinates": "A line a configuration, through its values and its figures; brighter lines give more output per "
    "GPU.",
}


def _captioned(swept: Swept, name: str, pairs: list[tuple[Any, Any]]) -> str:
    caption = CAPTIONS[name]
    if name == "lines" and (swept.under_error is not None or swept.seeds > 1):
        caption += f" Bars span {'the seeds' if swept.under_error is None else 'the error of the model'}."
    most = figures.LINES if name == "coordinates" else figures.room(swept)
    if name != "heat" and swept.points.height > most:
        caption += (
            f" Shown are the fronts and an even choice of the others, {most:,} of {swept.points.height:,} at most."
        )
    text = figure(name, caption)
    if name == "heat" and len(pairs) > 1:
        keys = [axis.key for axis in swept.axes]
        choices = "".join(
            f'<option value="{i}">{escape(words.short(a.key, keys))} and {escape(words.short(b.key, keys))}</option>'
            for i, (a, b) in enumerate(pairs)
        )
        pick = f'<div class="pick"><label>Axes <select id="pair">{choices}</select></label></div>'
        text = text.replace("<figure>", f"<figure>{pick}", 1)
    return text


def _fronts(swept: Swept) -> Iterator[str]:
    if said := words.ranges(swept):
        yield f'<p class="soft">{escape(said)}</p>'
    for against, name in ((INTERACTIVITY, "Output per GPU and interactivity"), (TTFT, "Output per GPU and TTFT")):
        head, rows, more = words.front_rows(swept, against, FRONT_ROWS)
        if not rows:
            yield f"<p>{name}: no configuration keeps up and has both figures, so there is no front.</p>"
            continue
        left = f" ({more:,} more between them)" if more else ""
        yield f"<h3>{name}{left}</h3>"
        axes = len(swept.axes)
        cells = [
            "".join(f"<td{' class=number' if i >= axes else ''}>{_lines(cell)}</td>" for i, cell in enumerate(row))
            for row in rows
        ]
        top = "".join(f"<th{' class=number' if i >= axes else ''}>{_lines(h)}</th>" for i, h in enumerate(head))
        body = "".join(f"<tr>{row}</tr>" for row in cells)
        yield f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _lines(cell: str) -> str:
    first, _, more = cell.partition("\n")
    return escape(first) + (f"<br><small>{escape(more)}</small>" if more else "")


def _table(swept: Swept) -> str:
    shown = figures.kept(swept, figures.room(swept)).height
    left = f" The fronts and an even choice of the others, {shown:,} of {swept.points.height:,}; rows/ has all." if (
        shown < swept.points.height
    ) else ""  # fmt: skip
    return (
        f'<p class="soft">Filters dim the figures too. Numbers: 100, &gt;100, &lt;=0.5, 10..20.{left}</p>'
        '<div class="filters" id="filters"></div><p id="count" class="soft"></p>'
        '<div class="wide"><table id="table"></table></div><p><button id="more" hidden></button></p>'
    )


def _data(swept: Swept) -> dict[str, Any]:
    """What the script makes the table of: a list a row, values first."""
    keys = [axis.key for axis in swept.axes]
    columns = [{"name": words.short(key, keys), "title": key, "kind": "axis"} for key in keys]
    factors = []
    for c in swept.columns:
        factors.append(100 if c.unit == "%" else 1)
        name = f"{c.name} ({c.unit})" if c.unit else c.name
        columns.append({"name": name, "title": name, "kind": "figure"})
    under, points = swept.under_error, figures.kept(swept, figures.room(swept))
    drawn = []
    for against, name in ((INTERACTIVITY, "interactivity"), (TTFT, "TTFT")):
        if under is not None and (key := f"{against}_front_under_error") in points.columns:
            drawn.append(key)
            title = f"In how many of {under.draws} draws of the model's error it is on the front by {name}"
            columns.append({"name": f"Front by {name}, of {under.draws}", "title": title, "kind": "front"})
    rows = [
        [
            *(_plain(point[key]) for key in keys),
            *(_rounded(f, point[c.key]) for c, f in zip(swept.columns, factors, strict=True)),
            *(point[key] for key in drawn),
        ]
        for point in points.iter_rows(named=True)
    ]
    ends = [
        [
            [_rounded(f, end) for end in point[f"{c.key}_under_error"] or ()]
            for c, f in zip(swept.columns, factors, strict=True)
        ]
        for point in points.iter_rows(named=True)
        if under is not None
    ]
    at = len(keys) + next((i for i, c in enumerate(swept.columns) if c.key == THROUGHPUT), 0)
    return {
        "columns": columns,
        "rows": rows,
        "points": points["point"].to_list(),
        "ranges": ends,
        "axes": len(keys),
        "states": [_state(swept, point) for point in points.iter_rows(named=True)],
        "steady": points["steady"].to_list(),
        "front": sorted(swept.fronts),
        "sort": at,
        "hover": len(keys) + HOVER,
    }


def _rounded(factor: float, value: float | None) -> float | None:
    return None if value is None else float(f"{factor * value:.5g}")


def _state(swept: Swept, point: Mapping[str, Any]) -> str:
    said = "" if point["steady"] else "saturated" if point["saturated"] else "too short to tell"
    if swept.under_error is not None and (count := point["saturated_under_error"]):
        said += f"{', ' if said else ''}saturated in {count:,} of {swept.under_error.draws:,} draws"
    return said


def _plain(value: Any) -> Any:
    return words.value(value) if isinstance(value, bool) else value


def _wrong(swept: Swept, status: str, heading: str, most: int) -> Iterator[str]:
    if said := words.wrong(swept, status, most):
        yield f"<h2>{heading}</h2><ul>" + "".join(f"<li>{escape(line)}</li>" for line in said) + "</ul>"


def _definitions() -> str:
    names = ("TTFT", "TPOT", "E2E", "KV cache", "Preemption")
    meaning: Iterable[tuple[str, str]] = [*words.DEFINITIONS.items(), *((name, DEFINITIONS[name]) for name in names)]
    return "<dl>" + "".join(f"<dt>{name}</dt><dd>{escape(text)}</dd>" for name, text in meaning) + "</dl>"
