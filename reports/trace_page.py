"""A trace as one self-contained HTML page that opens offline: what it holds, what to beware of, figures, notes.

Everything that comes from a user passes `escape` here; figures hold numbers and our own words only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from typing import Any

from plotly.offline import get_plotlyjs

from reports import look, trace_words
from reports.html import DRAW, POLICY
from reports.trace_figures import figures_of
from reports.words import NONE, percent, quantity, seconds
from workloads.statistics import describe
from workloads.trace import Trace

WIDE = ".wide { overflow-x: auto; } .wide th { white-space: nowrap; } footer { overflow-wrap: anywhere; }\n"


def trace_html(trace: Trace, title: str) -> str:
    """The whole page as text, below 6 MB however long the trace is. title: the file's name."""
    facts, figures = describe(trace), figures_of(trace)
    drawn = ",\n".join(f"{json.dumps(name)}: {_json(make(trace, facts))}" for name, (make, _) in figures.items())
    notes = "".join(f"<li>{escape(note)}</li>" for note in facts["notes"])
    body = "\n".join(
        [
            f"<h1>{escape(title)}</h1>",
            f'<p class="soft">{facts["requests"]:,} requests over {seconds(facts["span_s"])}</p>',
            *(f'<div class="banner">{escape(line)}</div>' for line in trace_words.warnings(facts)),
            _cards(facts),
            *(_figure(name, caption) for name, (_, caption) in figures.items()),
            "<h2>Numbers</h2>",
            f'<div class="wide">{_lengths(facts)}</div>',
            _facts(facts),
            f"<h2>Notes</h2><ul>{notes}</ul>" if notes else "",
            f"<footer>Read from {escape(facts['source'])} by servecast. Percentiles are linear.</footer>",
        ]
    )
    style = (files("reports") / "report.css").read_text(encoding="utf-8") + WIDE
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{escape(title)}</title>
<style>{style}</style>
</head>
<body>
<main>
{body}
</main>
<script>{get_plotlyjs()}</script>
<script>const FIGURES = {{{drawn.replace("<", chr(92) + "u003c")}}};{DRAW}</script>
</body>
</html>
"""


def _cards(facts: Mapping[str, Any]) -> str:
    arrivals, prompt, output = facts["arrivals"], facts["prompt_tokens"], facts["output_tokens"]
    cards = [
        ("Rate", quantity(arrivals["requests_per_s"]), "requests/s", f"CV of gaps {quantity(arrivals['gap_cv'])}"),
        ("Prompt, median", quantity(prompt["p50"]), "tokens", f"p99 {quantity(prompt['p99'])}"),
        ("Output, median", quantity(output["p50"]), "tokens", f"p99 {quantity(output['p99'])}"),
    ]
    if sessions := facts.get("sessions"):
        cards.append(
            ("Sessions", f"{sessions['count']:,}", "", f"{quantity(sessions['turns']['mean'])} turns on average")
        )
    if prefix := facts.get("prefix"):
        said = f"of {prefix['blocks']:,} blocks, cache without bounds"
        cards.append(("Prefix hits", percent(prefix["block_hit_rate"]), "", said))
    return '<div class="cards">' + "".join(_card(*card) for card in cards) + "</div>"


def _card(name: str, value: str, unit: str, more: str) -> str:
    shown = f" <small>{unit}</small>" if unit and value != NONE else ""
    return (
        f'<div class="card"><div class="name">{name}</div><div class="value">{value}{shown}</div>'
        f'<div class="more">{escape(more)}</div></div>'
    )


def _lengths(facts: Mapping[str, Any]) -> str:
    head = "".join(f'<th class="number">{stat}</th>' for stat in trace_words.STATS)
    rows = "".join(
        f"<tr><th>{name}</th>" + "".join(f'<td class="number">{v}</td>' for v in values) + "</tr>"
        for name, values in trace_words.lengths(facts)
    )
    return f"<table><thead><tr><th></th>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _facts(facts: Mapping[str, Any]) -> str:
    rows = "".join(f"<dt>{name}</dt><dd>{escape(what)}</dd>" for name, what in trace_words.facts_of(facts))
    return f"<dl>{rows}</dl>"


def _figure(name: str, caption: str) -> str:
    said = escape(caption)
    return f'<figure><div id="{name}" role="img" aria-label="{said}"></div><figcaption>{said}</figcaption></figure>'


def _json(figure: Any) -> str:
    """Data and both layouts, for wide and for narrow screens."""
    parts = json.loads(figure.to_json())
    return json.dumps(parts | {"narrow": look.one_column(parts)}, separators=(",", ":"))
