"""The shell of every page: self-contained, offline, light and dark, with figures that redraw for a phone.

It knows nothing of what a page says. Everything that comes from a user must be escaped by who builds the body; figures
hold numbers and our own words only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from typing import Any

from plotly.offline import get_plotlyjs

from reports import look
from reports.words import NONE

# Nothing may be loaded from anywhere: the browser itself enforces it.
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"

DRAW = """
const narrow = matchMedia("(max-width: 640px)");
const config = {responsive: true, displayModeBar: false};
const draw = () => Object.entries(FIGURES).forEach(([id, f]) =>
  Plotly.react(id, f.data, structuredClone(narrow.matches ? f.narrow : f.layout), config));
draw();
narrow.addEventListener("change", draw);
"""


def page(title: str, body: str, figures: Mapping[str, Any], style: str = "", script: str = "") -> str:
    """The whole page as text. `title` is escaped here; `figures` are plotly figures by element id, which `script` finds
    drawn."""
    css = (files("reports") / "report.css").read_text(encoding="utf-8") + style
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{escape(title)}</title>
<style>{css}</style>
</head>
<body>
<main>
{body}
</main>
<script>{get_plotlyjs()}</script>
<script>const FIGURES = {_json(figures)};{DRAW}{script}</script>
</body>
</html>
"""


def card(name: str, value: str, unit: str, more: str) -> str:
    """One figure of the answer, with its unit and a line below."""
    shown = f" <small>{unit}</small>" if unit and value != NONE else ""
    return (
        f'<div class="card"><div class="name">{name}</div><div class="value">{value}{shown}</div>'
        f'<div class="more">{escape(more)}</div></div>'
    )


def figure(name: str, caption: str) -> str:
    """The place of a figure, with its caption."""
    said = escape(caption)
    return f'<figure><div id="{name}" role="img" aria-label="{said}"></div><figcaption>{said}</figcaption></figure>'


def _json(figures: Mapping[str, Any]) -> str:
    return "{" + ",\n".join(f"{json.dumps(name)}: {parts(drawn)}" for name, drawn in figures.items()) + "}"


def parts(figure: Any) -> str:
    """Data and both layouts of a figure, safe inside a script element."""
    found = json.loads(figure.to_json())
    found["narrow"] = look.one_column(found)
    return json.dumps(found, separators=(",", ":")).replace("<", "\\u003c")


def data(name: str, value: Any) -> str:
    """A constant of a script, safe inside a script element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return f"const {name} = {text};\n"
