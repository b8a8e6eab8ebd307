"""Figures of a trace: one function a figure, whose size is bounded however many requests there are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import plotly.graph_objects as go

from reports import look, words
from workloads.chains import sessions
from workloads.statistics import hit_tokens
from workloads.trace import Floats, Trace

BINS = 200
POINTS = 400

Facts = Mapping[str, Any]


def arrivals_over_time(trace: Trace, facts: Facts) -> go.Figure:
    """Requests and tokens per second, in equal bins."""
    edges = _edges(trace)
    figure = look.panels(["<b>Requests per second</b>", "<b>Tokens per second</b>"])
    width = edges[1]
    count = np.histogram(trace.arrival_s, edges)[0] / width
    _steps(figure, edges, count, "requests", look.GREEN, "%{y:.4~g} requests/s", legend=False)
    for name, tokens, colour, dash in (
        ("prompt tokens", trace.prompt_tokens, look.ORANGE, "solid"),
        ("output tokens", trace.output_tokens, look.BLUE, "dot"),
    ):
        rate = np.histogram(trace.arrival_s, edges, weights=tokens)[0] / width
        _steps(figure, edges, rate, name, colour, "%{y:,.4~g} tokens/s", panel="2", dash=dash)
    figure.update_layout(yaxis={"title": {"text": "requests/s"}}, yaxis2={"title": {"text": "tokens/s"}})
    return _timed(figure, edges)


def length_cdfs(trace: Trace, facts: Facts) -> go.Figure:
    """The share of requests whose prompt, and whose output, is at most that long."""
    figure = look.panels(["", ""], columns=2, legend=0)
    _cdf(figure, 0, "Prompt", trace.prompt_tokens, "tokens", "requests")
    _cdf(figure, 1, "Output", trace.output_tokens, "tokens", "requests")
    return figure


def prefix_sharing(trace: Trace, facts: Facts) -> go.Figure:
    """The share of prompt tokens that earlier prompts had, over time; and block hit rates by cache size."""
    assert trace.prefix is not None
    edges = _edges(trace)
    figure = look.panels(["<b>Prompt tokens seen before</b>", "<b>Block hits by cache size</b>"], 2)
    hits = hit_tokens(trace.prefix, trace.prefix.known_blocks(), trace.prompt_tokens)
    tokens = np.histogram(trace.arrival_s, edges, weights=trace.prompt_tokens)[0]
    with np.errstate(invalid="ignore"):
        share = 100 * np.histogram(trace.arrival_s, edges, weights=hits)[0] / tokens
    _steps(figure, edges, share, "prompt tokens seen before", look.GREEN, "%{y:.1f} %", legend=False)
    scale, unit = words.clock(edges[-1])
    figure.update_layout(
        xaxis={"title": {"text": f"time ({unit})"}, "range": [0, edges[-1] * scale]},
        yaxis={"title": {"text": "%"}, "range": [0, 102]},
        yaxis2={"title": {"text": "% of blocks"}, "range": [0, 102]},
    )
    prefix = facts["prefix"]
    limit = 100 * (prefix["block_hit_rate"] or 0.0)
    rows = [row for row in prefix["lru"] if row["block_hit_rate"] is not None]
    x = [row["blocks"] for row in rows] + [prefix["distinct_blocks"]]
    y = [100 * row["block_hit_rate"] for row in rows] + [limit]
    figure.add_scatter(
        x=x, y=y, mode="lines+markers", name="LRU", xaxis="x2", yaxis="y2",
        line={"color": look.BLUE, "width": 2}, marker={"size": 7},
        hovertemplate="%{y:.2f} % in %{x:,} blocks<extra></extra>",
    )  # fmt: skip
    low = min(x)
    figure.add_scatter(
        x=[low * 0.9, max(x) * 1.1], y=[limit, limit], mode="lines", name="cache without bounds", xaxis="x2",
        yaxis="y2", line={"color": look.GREY, "dash": "dash"},
        hovertemplate=f"{limit:.2f} %<extra>cache without bounds</extra>",
    )  # fmt: skip
    figure.update_layout(xaxis2=look.scaled(float(low), float(max(x)), f"blocks of {prefix['block_tokens']} tokens"))
    return figure


def session_cdfs(trace: Trace, facts: Facts) -> go.Figure:
    """Turns of a session, and think times between turns."""
    assert trace.turns is not None
    figure = look.panels(["", ""], columns=2, legend=0)
    first, _ = sessions(trace.turns.previous)
    counts = np.bincount(first)
    _cdf(figure, 0, "Turns", counts[counts > 0], "turns", "sessions")
    thinks = trace.turns.think_s[trace.turns.previous >= 0]
    if thinks.size:
        _cdf(figure, 1, "Think time", thinks, "s", "turns")
    else:
        look.say(figure, 1, "no session has two turns")
    return figure


def figures_of(trace: Trace) -> dict[str, tuple[Any, str]]:
    """The figures that the trace has data for, in order, each with what a reader should see in it."""
    found: dict[str, tuple[Any, str]] = {
        "arrivals": (
            arrivals_over_time,
            "How requests arrive: peaks well above the mean, and not the mean, decide how many replicas are needed.",
        ),
        "lengths": (
            length_cdfs,
            "At a value on the x axis, the curve gives the share of requests that is at most that long. Long prompts "
            "cost prefill time and KV memory, long outputs decode steps.",
        ),
    }
    if trace.prefix is not None:
        found["prefix"] = (
            prefix_sharing,
            "What a prefix cache can save at most: left, prompt tokens that earlier prompts began with; right, block "
            "hits of a plain LRU cache of that size. A real engine also keeps blocks of running requests.",
        )
    if trace.turns is not None:
        found["sessions"] = (
            session_cdfs,
            "Sessions are replayed as closed loops: a turn comes its think time after the answer before it.",
        )
    return found


def _edges(trace: Trace) -> Floats:
    """BINS equal bins from 0 to just behind the last arrival; fewer for few requests."""
    bins = int(min(BINS, max(10, len(trace) // 4)))
    last = float(trace.arrival_s[-1]) or 1.0
    return np.linspace(0.0, last * (1 + 1e-9), bins + 1)


def _steps(
    figure: go.Figure, edges: Floats, values: Floats, name: str, colour: str, hover: str,
    *, panel: str = "", dash: str = "solid", legend: bool = True,
) -> None:  # fmt: skip
    x = (edges[1:] + edges[:-1]) / 2 * words.clock(edges[-1])[0]
    whole: list[float | None] = [float(v) if np.isfinite(v) else None for v in values.astype(np.float32)]
    figure.add_scatter(
        x=x.astype(np.float32), y=whole, name=name, mode="lines", showlegend=legend, hovertemplate=hover,
        line={"color": colour, "width": 1.5, "shape": "hvh", "dash": dash}, xaxis=f"x{panel}", yaxis=f"y{panel}",
    )  # fmt: skip


def _cdf(figure: go.Figure, panel: int, name: str, values: Any, unit: str, what: str) -> None:
    """A distribution with its percentiles, on an axis that suits it."""
    n = str(panel + 1) if panel else ""
    shares = np.linspace(0, 100, POINTS + 1)
    x = np.percentile(values, shares, method="higher").astype(np.float64)
    low = float(x[x > 0][0]) if (x > 0).any() else 0.0  # a zero has no place on a logarithmic axis
    axis = look.scaled(low, float(x[-1]), unit)
    shown = x.clip(min=low) if axis.get("type") == "log" else x
    axes = {"xaxis": f"x{n}", "yaxis": f"y{n}"}
    figure.add_scatter(
        x=shown, y=shares, mode="lines", line={"color": look.BLUE, "width": 2}, **axes,
        hovertemplate=f"%{{y:.4~g}} % of {what} at or below %{{x:,.4~g}} {unit}<extra></extra>",
    )  # fmt: skip
    marks = [float(np.percentile(values, q)) for q in (50, 90, 99)]
    figure.add_scatter(
        x=np.clip(marks, low, None) if axis.get("type") == "log" else marks, y=(50, 90, 99), mode="markers+text",
        text=["p50", "p90", "p99"], textposition="bottom right", cliponaxis=False,
        marker={"color": look.BLUE, "size": 9, "symbol": ["circle", "square", "diamond"]}, **axes,
        hovertemplate=f"%{{text}} = %{{x:,.4~g}} {unit}<extra></extra>",
    )  # fmt: skip
    said = f"p50 {words.quantity(marks[0])} · p99 {words.quantity(marks[2])} {unit}"
    figure.layout.annotations[panel].text = f"<b>{name}</b>  {said}"
    figure.update_layout({f"xaxis{n}": axis, f"yaxis{n}": {"title": {"text": f"{what} (%)"}, "range": [0, 104]}})


def _timed(figure: go.Figure, edges: Floats) -> go.Figure:
    scale, unit = words.clock(edges[-1])
    figure.update_layout(hovermode="x unified")
    figure.update_xaxes(
        title_text=f"time ({unit})", range=[0, edges[-1] * scale], unifiedhovertitle_text=f"%{{x:.4~g}} {unit}"
    )
    return figure
