"""The shared look of all figures: palette, panels, axes. It knows nothing of what they show.

Colours are mid-tones that read on white and on near-black; dashes, hatching and marker shapes say the same without
colour. Backgrounds are transparent, so that a page can be light or dark.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from reports.words import quantity

BLUE, ORANGE, GREEN, RED, GREY = "#3d85d9", "#d9780d", "#1f9d78", "#d64550", "#868e96"
SEVERAL, DASHES = (BLUE, ORANGE, GREEN, RED, GREY), ("solid", "dash", "dot", "dashdot")
INK, GRID = "#30363d", "rgba(134, 142, 150, 0.28)"

PANEL, GAP, LEGEND, ENTRY, TOP, BOTTOM = 240, 96, 32, 20, 28, 48
"""Pixels: a panel's height, the space between two rows, for the legend in one line, for each of its entries where they
need a line each, and above and below everything."""
COLUMN_GAP = 0.1

SPREAD = 30
"""Largest over smallest value from which an axis is logarithmic."""


def panels(titles: Sequence[str], columns: int = 1, *, legend: int = 1, height: int = PANEL) -> go.Figure:
    """An empty figure with a panel a title, each of that `height`, axes x, x2, ... and y, y2, ..., and room for so many
    lines of `legend`."""
    top = TOP + (LEGEND + ENTRY * (legend - 1) if legend else 0)
    figure = go.Figure()
    figure.update_layout(
        template="none",
        meta={"panels": len(titles), "height": height},
        showlegend=legend > 0,
        font={"family": "system-ui, -apple-system, Segoe UI, Roboto, sans-serif", "size": 13, "color": INK},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        margin={"l": 56, "r": 20, "t": top, "b": BOTTOM},
        legend={
            "orientation": "h",
            "x": 0,
            "y": 1,
            "yref": "container",
            "yanchor": "top",
            "bgcolor": "rgba(0,0,0,0)",
            "traceorder": "normal",
        },
        hoverlabel={"namelength": -1},
        **_placement(len(titles), columns, top, height),
    )
    axis = {
        "gridcolor": GRID,
        "zeroline": False,
        "showline": True,
        "linecolor": GREY,
        "automargin": True,
        "title_standoff": 8,
        "separatethousands": True,
    }
    figure.update_xaxes(ticks="outside", tickcolor=GREY, **axis)
    figure.update_yaxes(fixedrange=True, rangemode="tozero", **axis)
    for i, title in enumerate(titles):
        figure.add_annotation(
            text=title, showarrow=False, x=0, y=1, xanchor="left", yanchor="bottom", yshift=4,
            xref=f"x{_number(i)} domain", yref=f"y{_number(i)} domain", font={"size": 14},
        )  # fmt: skip
    return figure


def one_column(figure: Mapping[str, Any]) -> dict[str, Any]:
    """The layout for narrow screens of a figure (as JSON): panels and legend entries one below the other."""
    layout = figure["layout"]
    entries = sum(trace.get("showlegend", True) for trace in figure["data"]) if layout["showlegend"] else 0
    top = TOP + ENTRY * entries
    changes = {"margin": {"t": top}, **_placement(layout["meta"]["panels"], 1, top, layout["meta"]["height"])}
    merged = {key: {**layout[key], **value} if isinstance(value, dict) else value for key, value in changes.items()}
    return {**layout, **merged}


def say(figure: go.Figure, panel: int, text: str) -> None:
    """Write `text` into the middle of an empty panel."""
    n = _number(panel)
    figure.add_scatter(x=[None], y=[None], xaxis=f"x{n}", yaxis=f"y{n}", showlegend=False)  # else there are no axes
    figure.add_annotation(text=text, showarrow=False, x=0.5, y=0.5, xref=f"x{n} domain", yref=f"y{n} domain")
    figure.update_layout({f"{axis}axis{n}": {"showticklabels": False, "showgrid": False} for axis in "xy"})


def scaled(low: float, high: float, unit: str) -> dict[str, Any]:
    """An axis for positive values: logarithmic, ticks written out, where they spread widely, else linear from 0."""
    title = {"text": unit}
    if low <= 0 or high / low < SPREAD:
        return {"title": title, "rangemode": "tozero"}
    decades = math.log10(high / low)
    steps = (1, 2, 5) if decades <= 2 else (1, 3) if decades <= 3.5 else (1,)
    ticks = [m * 10.0**e for e in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1) for m in steps]
    span = [math.log10(low) - 0.03 * decades, math.log10(high) + 0.06 * decades]
    return {"title": title, "type": "log", "range": span, "tickvals": ticks, "ticktext": [tick_text(t) for t in ticks]}


def tick_text(value: float) -> str:
    """A tick's number in full: 0.05, 2, 1,000."""
    return quantity(value) if value >= 100 else f"{value:g}"


def _placement(count: int, columns: int, top_px: int, panel: int) -> dict[str, Any]:
    """Height, and the place of every axis, for `count` panels of height `panel` in `columns` columns."""
    rows = -(-count // columns)
    area = rows * panel + (rows - 1) * GAP
    width = (1 - COLUMN_GAP * (columns - 1)) / columns
    axes: dict[str, Any] = {}
    for i in range(count):
        row, column = divmod(i, columns)
        left, top = column * (width + COLUMN_GAP), 1 - row * (panel + GAP) / area
        axes[f"xaxis{_number(i)}"] = {"domain": [left, left + width], "anchor": f"y{_number(i)}"}
        axes[f"yaxis{_number(i)}"] = {"domain": [max(0.0, top - panel / area), top], "anchor": f"x{_number(i)}"}
    return {"height": area + top_px + BOTTOM, **axes}


def _number(panel: int) -> str:
    return str(panel + 1) if panel else ""
