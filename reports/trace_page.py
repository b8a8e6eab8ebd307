"""A trace as one self-contained HTML page that opens offline: what it holds, what to beware of, figures, notes.

Everything that comes from a user passes `escape` here; figures hold numbers and our own words only.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from reports import trace_words
from reports.page import card, figure, page
from reports.trace_figures import figures_of
from reports.words import percent, quantity, seconds
from workloads.statistics import describe
from workloads.trace import Trace

WIDE = ".wide { overflow-x: auto; } .wide th { white-space: nowrap; } footer { overflow-wrap: anywhere; }\n"


def trace_html(trace: Trace, title: str) -> str:
    """The whole page as text, below 6 MB however long the trace is. title: the file's name."""
    facts, figures = describe(trace), figures_of(trace)
    notes = "".join(f"<li>{escape(note)}</li>" for note in facts["notes"])
    body = "\n".join(
        [
            f"<h1>{escape(title)}</h1>",
            f'<p class="soft">{facts["requests"]:,} requests over {seconds(facts["span_s"])}</p>',
            *(f'<div class="banner">{escape(line)}</div>' for line in trace_words.warnings(facts)),
            _cards(facts),
            *(figure(name, caption) for name, (_, caption) in figures.items()),
            "<h2>Numbers</h2>",
            f'<div class="wide">{_lengths(facts)}</div>',
            _facts(facts),
            f"<h2>Notes</h2><ul>{notes}</ul>" if notes else "",
            f"<footer>Read from {escape(facts['source'])} by servecast. Percentiles are linear.</footer>",
        ]
    )
    return page(title, body, {name: make(trace, facts) for name, (make, _) in figures.items()}, WIDE)


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
    return '<div class="cards">' + "".join(card(*one) for one in cards) + "</div>"


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
