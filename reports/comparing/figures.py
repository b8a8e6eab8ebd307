"""The figures of a comparison: where time went, distributions overlaid, and what went on, on one clock."""

from __future__ import annotations

from html import escape
from typing import Any

import numpy as np
import plotly.graph_objects as go

from reports import look, words
from reports.comparing.facts import LATENCIES, PERCENTS, Compared
from reports.spent import BAR, METRICS, PARTS, part_marker

OVER_TIME = (
    ("running", "Requests running", "requests", 1.0),
    ("waiting", "Requests waiting", "requests", 1.0),
    ("kv", "KV cache in use", "%", 100.0),
    ("output_tokens_per_s", "Output", "tokens/s", 1.0),
)


def where_spent(c: Compared) -> go.Figure:
    """Mean TTFT and TPOT of each scenario, in parts."""
    shown = [
        part
        for part in PARTS
        if any(r.spent.get(key, {}).get(part, 0.0) > 0 for r in c.ran for key in METRICS.values())
    ]
    figure = look.panels(
        [f"<b>Mean {metric}</b>" for metric in METRICS], legend=-(-len(shown) // 4), height=BAR * len(c.ran) + 20
    )
    named = set()
    for i, key in enumerate(METRICS.values()):
        n = str(i + 1) if i else ""
        there = [(r.label, r.spent[key]) for r in c.ran if key in r.spent]
        if not there:
            look.say(figure, i, "no request has two tokens" if i else "no request finished")
            continue
        scale, unit = words.latency_unit(max(sum(parts.values()) for _, parts in there))
        for part in shown:
            name, colour, pattern = PARTS[part]
            values = [scale * parts.get(part, 0.0) for _, parts in there]
            if not any(values):
                continue
            figure.add_bar(
                x=values, y=list(range(len(there))), orientation="h", name=name, legendgroup=name,
                showlegend=name not in named, hovertemplate="%{x:.4~g} " + unit + f"<extra>{name}</extra>",
                marker=part_marker(colour, pattern),
                xaxis=f"x{n}", yaxis=f"y{n}",
            )  # fmt: skip
            named.add(name)
        labels = [
            f"{escape(_short(name))}<br>{words.quantity(scale * sum(parts.values()))} {unit}" for name, parts in there
        ]
        figure.update_layout({
            f"xaxis{n}": {"title": {"text": unit}, "rangemode": "tozero"},
            f"yaxis{n}": {"range": [len(there) - 0.5, -0.5], "ticks": "", "showgrid": False,
                         "tickvals": list(range(len(there))), "ticktext": labels},
        })  # fmt: skip
    figure.update_layout(barmode="stack", bargap=0.35)
    return figure


def distributions(c: Compared) -> go.Figure:
    """TTFT, TPOT, ITL and E2E of all scenarios, overlaid: each percentile's mean over seeds."""
    figure = look.panels([f"<b>{name}</b>" for name in LATENCIES], columns=2, legend=_lines(c))
    for i, (name, key) in enumerate(LATENCIES.items()):
        n = str(i + 1) if i else ""
        there = [(k, r) for k, r in enumerate(c.ran) if np.isfinite(r.curves[key]).all()]
        if not there:
            look.say(figure, i, "no request has two tokens" if name in ("TPOT", "ITL") else "no request finished")
            continue
        scale, unit = words.latency_unit(max(float(r.curves[key][-1]) for _, r in there))
        for k, r in there:
            figure.add_scatter(
                x=_small(scale * r.curves[key]), y=_small(PERCENTS), mode="lines", name=escape(r.label),
                legendgroup=str(k), showlegend=i == 0, line=_line(k), xaxis=f"x{n}", yaxis=f"y{n}",
                hovertemplate=f"%{{y:.4~g}} % at or below %{{x:.4~g}} {unit}",
            )  # fmt: skip
        low = min(float(r.curves[key][0]) for _, r in there) * scale
        high = max(float(r.curves[key][-1]) for _, r in there) * scale
        what = "token gaps (%)" if name == "ITL" else "requests (%)"
        figure.update_layout({
            f"xaxis{n}": look.scaled(low, high, unit), f"yaxis{n}": {"title": {"text": what}, "range": [0, 104]},
        })  # fmt: skip
    return figure


def over_time(c: Compared) -> go.Figure:
    """What went on in the run under the first seed, of all scenarios on one clock."""
    figure = look.panels([f"<b>{title}</b>" for _, title, _, _ in OVER_TIME], legend=_lines(c), height=160)
    end_s = max(float(r.series["time_s"][-1]) for r in c.ran)
    clock, unit = words.clock(end_s)
    for i, (name, _, what, scale) in enumerate(OVER_TIME):
        n = str(i + 1) if i else ""
        for k, r in enumerate(c.ran):
            figure.add_scatter(
                x=_small(clock * r.series["time_s"]), y=_small(scale * r.series[name]), mode="lines",
                name=escape(r.label), legendgroup=str(k), showlegend=i == 0, line=_line(k), xaxis=f"x{n}",
                yaxis=f"y{n}", hovertemplate=f"%{{y:.4~g}} {what} at %{{x:.4~g}} {unit}",
            )  # fmt: skip
        figure.update_layout({
            f"xaxis{n}": {"range": [0, clock * end_s], "title": {"text": f"time ({unit})"}},
            f"yaxis{n}": {"title": {"text": what}},
        })  # fmt: skip
    return figure


def _line(k: int) -> dict[str, Any]:
    """Another colour for each of five, and another dash for the next five."""
    return {
        "color": look.SEVERAL[k % len(look.SEVERAL)],
        "dash": look.DASHES[(k // len(look.SEVERAL) + k) % len(look.DASHES)],
        "width": 2,
    }


def _lines(c: Compared) -> int:
    """Lines of the legend on a wide screen."""
    return -(-sum(60 + 7 * len(r.label) for r in c.ran) // 900)


def _short(text: str) -> str:
    return text if len(text) <= 24 else f"{text[:23]}…"


def _small(values: Any) -> np.typing.NDArray[np.float32]:
    return np.asarray(values, dtype=np.float32)
