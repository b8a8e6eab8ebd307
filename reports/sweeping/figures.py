"""Figures of a sweep: one function a figure, from a Swept to a plotly Figure whose size is bounded.

Each trace says in `meta` which points it shows, so that the page can say what they are (`table.js` has all values) and
dim those that a filter takes out. What comes from a user, values and keys, is escaped: plotly reads tags in texts.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from itertools import combinations
from typing import Any

import numpy as np
import plotly.graph_objects as go
import polars as pl
from plotly.colors import sample_colorscale

from reports import look
from reports.sweeping import words
from reports.sweeping.levels import Levels, levels
from reports.sweeping.points import FRONTS, INTERACTIVITY, THROUGHPUT, TTFT, Column, Shown, Swept

POINTS, RANGED = 3000, 1500
"""Points that the page has room for, and with their ranges; of more, those on a front and every k-th of the others."""
LINES = 1000
"""Lines of parallel coordinates, likewise."""
LEGEND = 850
"""Pixels of a line of the legend, whose entries are as wide as the longest one."""
COLOURS = 8
GROUPS = len(look.SEVERAL)
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x")
SCALE = [sample_colorscale("Plasma", share)[0] for share in np.linspace(0.12, 0.82, COLOURS)]
"""From little to much, on white and on near-black."""
AXES = 6
"""Axes of which heat maps show pairs."""
CELLS = 60
"""Cells up to which their numbers are written into them."""
MAPPED = (THROUGHPUT, INTERACTIVITY, TTFT)


def room(swept: Swept) -> int:
    """Points that the page has room for."""
    return POINTS if swept.under_error is None else RANGED


def kept(swept: Swept, most: int) -> pl.DataFrame:
    """At most `most` points, those on the fronts among them."""
    points = swept.points
    if points.height <= most:
        return points
    on = points["point"].is_in(list(swept.fronts))
    others = points.filter(~on)
    step = -(-others.height // max(1, most - int(on.sum())))
    return pl.concat([points.filter(on), others[::step]]).sort("point")


def fronts(swept: Swept) -> go.Figure:
    """Throughput per GPU against interactivity and against TTFT: a marker a point, a line along each front."""
    titles = ["<b>Output per GPU and interactivity</b>", "<b>Output per GPU and TTFT</b>"]
    groups = _groups(swept)
    a_line = max(1, LEGEND // (7 * max(len(name) for name, *_ in groups) + 50))
    figure = look.panels(titles, columns=2, legend=-(-(len(groups) + 1) // a_line))
    points = kept(swept, room(swept))
    for i, against in enumerate(FRONTS):
        n = str(i + 1) if i else ""
        axes: dict[str, Any] = {"xaxis": f"x{n}", "yaxis": f"y{n}"}
        if against not in points.columns or points[against].null_count() == points.height:
            look.say(figure, i, "no configuration has it")
            continue
        shown = points.drop_nulls([THROUGHPUT, against]).sort("steady", descending=True)  # the legend has the first one
        front = swept.front(against)
        figure.add_scatter(
            x=front[against].to_list(), y=front[THROUGHPUT].to_list(), mode="lines", name="front",
            line={"color": look.GREY, "width": 1.5, "dash": "dot"}, hoverinfo="skip", showlegend=not i,
            legendgroup="front", **axes,
        )  # fmt: skip
        for group, (name, colour, symbol, of) in enumerate(groups):
            rows = shown.filter(of(shown))
            if not rows.height:
                continue
            steady = rows["steady"].to_list()
            on = rows["point"].is_in(front["point"].to_list()).to_list()
            figure.add_scatter(
                x=rows[against].to_list(), y=rows[THROUGHPUT].to_list(), mode="markers", name=escape(name),
                hovertemplate="%{text}<extra></extra>", legendgroup=str(group), showlegend=not i,
                marker={
                    "color": colour, "size": [10 if o else 7 for o in on],
                    "symbol": [symbol if s else f"{symbol}-open" for s in steady],
                    "opacity": [1.0 if o else 0.65 for o in on],
                },
                meta={"points": rows["point"].to_list()}, selected={"marker": {"opacity": 1}},
                unselected={"marker": {"opacity": 0.06}}, **axes,
            )  # fmt: skip
        values = shown[against]
        title = "tokens/s/user, median" if against == INTERACTIVITY else "TTFT (ms), median"
        axis = look.scaled(float(values.min() or 0), float(values.max() or 1), title)  # type: ignore[arg-type]
        figure.update_layout({f"xaxis{n}": axis, f"yaxis{n}": {"title": {"text": "tokens/s/GPU"}}})
    return figure


def _groups(swept: Swept) -> list[tuple[str, str, str, Callable[[pl.DataFrame], pl.Series]]]:
    """(name, colour, symbol, which rows) of points of one colour: by an axis of few names, else numbers."""
    few = [(axis, swept.points[axis.key].unique(maintain_order=True).to_list()) for axis in swept.axes]
    few = [(axis, values) for axis, values in few if 2 <= len(values) <= GROUPS]
    few.sort(key=lambda pair: pair[0].values is None)
    if not few:
        return [("configurations", look.BLUE, "circle", lambda rows: rows["point"] >= 0)]
    axis, values = few[0]
    ordered = [v for v in axis.values or sorted(values) if v in values]
    name = words.short(axis.key, [a.key for a in swept.axes])

    def of(value: object) -> Callable[[pl.DataFrame], pl.Series]:
        return lambda rows: rows[axis.key] == value

    return [(f"{name} {words.value(value)}", look.SEVERAL[i], SYMBOLS[i], of(value)) for i, value in enumerate(ordered)]


def lines(swept: Swept) -> go.Figure:
    """The three figures by the values of the only axis."""
    (axis,) = swept.axes
    shown = [c for c in swept.columns if c.key in MAPPED]
    figure = look.panels([f"<b>{c.name}</b>" for c in shown], columns=len(shown), legend=False)
    points = kept(swept, room(swept))
    scale = levels(axis, swept.points)
    points = points.with_columns(place=pl.Series(scale.places(points[axis.key]))).sort("place")
    for i, column in enumerate(shown):
        n = str(i + 1) if i else ""
        rows = points.drop_nulls(column.key)
        steady = rows["steady"].to_list()
        figure.add_scatter(
            x=rows["place"].to_list(), y=rows[column.key].to_list(),
            mode="lines+markers" if axis.values is None else "markers", line={"color": look.BLUE},
            marker={"size": 8, "symbol": ["circle" if s else "circle-open" for s in steady], "color": look.BLUE},
            hovertemplate="%{text}<extra></extra>",
            meta={"points": rows["point"].to_list()}, xaxis=f"x{n}", yaxis=f"y{n}",
            unselected={"marker": {"opacity": 0.06}},
        )  # fmt: skip
        if swept.under_error is not None:
            ends = rows[f"{column.key}_under_error"]
            low, high = ends.list.first(), ends.list.last()
        elif swept.seeds > 1 and f"{column.key}_low" in rows.columns:
            low, high = rows[f"{column.key}_low"], rows[f"{column.key}_high"]
        else:
            low = high = rows[column.key]
        if not low.equals(high):
            figure.data[-1].error_y = {
                "type": "data", "symmetric": False, "color": look.GREY, "thickness": 1,
                "array": (high - rows[column.key]).to_list(), "arrayminus": (rows[column.key] - low).to_list(),
            }  # fmt: skip
        figure.update_layout({f"xaxis{n}": _ticks(scale, swept), f"yaxis{n}": {"title": {"text": column.unit}}})
    return figure


def _ticks(scale: Levels, swept: Swept) -> dict[str, Any]:
    at, texts = scale.ticks()
    name = words.short(scale.key, [axis.key for axis in swept.axes])
    return {
        "title": {"text": escape(name)},
        "tickvals": at,
        "ticktext": [escape(t) for t in texts],
        "rangemode": "normal",
    }


def pairs(swept: Swept) -> list[tuple[Shown, Shown]]:
    """Pairs of axes that heat maps show, the most telling first: those along which throughput per GPU differs most."""
    axes = sorted(swept.axes, key=lambda axis: -_effect(swept, axis))[:AXES]
    axes = [axis for axis in axes if swept.points[axis.key].n_unique() > 1]
    return list(combinations(axes, 2))


def _effect(swept: Swept, axis: Shown) -> float:
    """How much throughput per GPU differs between the means at each of an axis' levels."""
    points = swept.points.drop_nulls(THROUGHPUT)
    if not points.height:
        return 0.0
    where = pl.Series("level", levels(axis, swept.points).cells(points[axis.key]))
    means = points.with_columns(where).group_by("level").agg(pl.col(THROUGHPUT).mean())[THROUGHPUT].to_list()
    return float(max(means) - min(means))


def heat(swept: Swept, pair: tuple[Shown, Shown]) -> go.Figure:
    """Means of the three figures by two axes, over all values of the others; only steady points count."""
    shown = [c for c in swept.columns if c.key in MAPPED]
    first, second = (levels(axis, swept.points) for axis in pair)
    figure = look.panels([_map_title(c, []) for c in shown], columns=len(shown), legend=False)
    points = swept.points.filter(swept.points["steady"])
    where = points.with_columns(
        column=pl.Series(first.cells(points[pair[0].key])), row=pl.Series(second.cells(points[pair[1].key]))
    )
    width, height = len(first.names), len(second.names)
    for i, column in enumerate(shown):
        n = str(i + 1) if i else ""
        means = where.drop_nulls(column.key).group_by("column", "row").agg(pl.col(column.key).mean(), pl.len())
        cells: list[list[float | None]] = [[None] * width for _ in range(height)]
        counts = [[0] * width for _ in range(height)]
        for x, y, mean, count in means.select("column", "row", column.key, "len").iter_rows():
            cells[y][x], counts[y][x] = float(f"{mean:.5g}"), count
        found = [cell for row in cells for cell in row if cell is not None]
        figure.layout.annotations[i].text = _map_title(column, found)
        if not found:
            look.say(figure, i, "none keeps up")
            continue
        figure.add_heatmap(
            z=cells, customdata=counts, x=[*range(width)], y=[*range(height)], xaxis=f"x{n}", yaxis=f"y{n}",
            colorscale=SCALE if column.more_is_better else SCALE[::-1], showscale=False, hoverongaps=False,
            xgap=1, ygap=1,
            texttemplate="%{z:.3~s}" if width * height <= CELLS else None, textfont={"size": 11},
            hovertemplate=f"%{{z:,.4~g}} {column.unit}, mean of %{{customdata}}<extra></extra>",
        )  # fmt: skip
        ticks = [_map_ticks(scale, swept, alone=not i or axis == "x") for axis, scale in (("x", first), ("y", second))]
        figure.update_layout({f"xaxis{n}": ticks[0], f"yaxis{n}": ticks[1]})
    return figure


def _map_title(column: Column, found: list[float]) -> str:
    ends = f" {words.figure(column, min(found))} to {words.figure(column, max(found))}" if found else ""
    return f"<b>{column.name}</b>{ends} {column.unit}"


def _map_ticks(scale: Levels, swept: Swept, *, alone: bool) -> dict[str, Any]:
    name = words.short(scale.key, [axis.key for axis in swept.axes])
    step = -(-len(scale.names) // 12)
    at = [*range(0, len(scale.names), step)]
    return {
        "title": {"text": escape(name) if alone else ""}, "tickvals": at, "showgrid": False,
        "ticktext": [escape(scale.names[i]) for i in at], "range": [-0.5, len(scale.names) - 0.5],
    }  # fmt: skip


def coordinates(swept: Swept) -> go.Figure:
    """Parallel coordinates: a line a point, through its value on every axis and its figures; the brighter, the more
    throughput per GPU."""
    points = kept(swept, LINES).drop_nulls(THROUGHPUT)
    shown = [c for c in swept.columns if c.key in MAPPED]
    scales = [levels(axis, swept.points) for axis in swept.axes]
    scales += [levels(Shown(c.key, None), swept.points, name=f"{c.name}<br>({c.unit})") for c in shown]
    figure = look.panels([""], legend=False)
    figure.layout.annotations = ()
    at = [scale.shares(points[scale.key]) for scale in scales]
    best = points[THROUGHPUT].rank("dense").to_numpy()
    bins = np.minimum((best - 1) / max(best.max(initial=1) - 1, 1) * COLOURS, COLOURS - 1).astype(int)
    for colour in range(COLOURS):
        mine = np.flatnonzero(bins == colour)
        x, y = list[int | None](), list[float | None]()
        for i in mine.tolist():
            x += [*range(len(scales)), None]
            y += [*(float(f"{share[i]:.4g}") if np.isfinite(share[i]) else None for share in at), None]
        figure.add_scatter(
            x=x, y=y, mode="lines", line={"color": SCALE[colour], "width": 1.5}, opacity=0.7, hoverinfo="skip",
            meta={"lines": points["point"].to_numpy()[mine].tolist()},
        )  # fmt: skip
    keys = [axis.key for axis in swept.axes]
    for i, scale in enumerate(scales):
        name = escape(words.short(scale.key, keys)) if i < len(keys) else scale.name
        figure.add_annotation(
            text=f"<b>{name}</b>", x=i, yanchor="bottom", showarrow=False, font={"size": 12},
            xanchor="left" if not i else "right" if i == len(scales) - 1 else "center",
            y=1.04 + 0.15 * (i % 2),  # so that long names have room on a phone
        )  # fmt: skip
        figure.add_shape(type="line", x0=i, x1=i, y0=0, y1=1, line={"color": look.GREY, "width": 1})
        ticks, texts = scale.ticks(shares=True)
        for share, text in zip(ticks, texts, strict=True):
            figure.add_annotation(
                text=escape(text), x=i, y=share, xanchor="left" if i < len(scales) - 1 else "right", showarrow=False,
                font={"size": 11}, xshift=3 if i < len(scales) - 1 else -3, bgcolor="#ffffff", borderpad=0,
            )  # fmt: skip
    figure.update_layout(
        height=420, margin={"l": 16, "r": 16, "t": 8, "b": 16},
        xaxis={"visible": False, "range": [-0.1, len(scales) - 0.9], "fixedrange": True},
        yaxis={"visible": False, "range": [-0.04, 1.36]},
    )  # fmt: skip
    return figure
