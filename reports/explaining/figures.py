"""What bounds an engine, drawn: prompts by their length, answers by batch and context, and the roofline."""

from __future__ import annotations

from collections.abc import Mapping

import plotly.graph_objects as go

from calibrate.breakdown import NAMES, Step
from reports import look
from reports.explaining import words
from reports.explaining.facts import Explained
from reports.words import quantity

COLOURS = {"weights": look.BLUE, "experts": look.ORANGE, "attention": look.GREEN, "elementwise": look.GREY,
           "communication": look.RED, "host": "#b8a13a"}  # fmt: skip


def by_length(e: Explained) -> go.Figure:
    """Seconds of a prompt alone by its tokens, and the least that the peaks allow."""
    return _times("<b>A prompt alone</b>", "prompt tokens", e.by_length)


def by_context(e: Explained) -> go.Figure:
    """Seconds of one token alone by the tokens before it, and the least that the peaks allow."""
    return _times("<b>A token alone</b>", "tokens before it", e.by_context)


def _times(title: str, axis: str, steps: Mapping[int, Step]) -> go.Figure:
    x, hover = list(steps), "%{x:,} tokens: %{y:.4~g} ms"
    figure = look.panels([title])
    lines = (
        ("predicted", [s.seconds for s in steps.values()], look.BLUE, "solid"),
        ("FLOPs at the peak", [s.compute_s for s in steps.values()], look.ORANGE, "dash"),
        ("bytes at the peak", [s.bandwidth_s for s in steps.values()], look.GREEN, "dot"),
    )
    for name, seconds, colour, dash in lines:
        figure.add_scatter(
            x=x, y=[1e3 * s for s in seconds], name=name, mode="lines",
            line={"color": colour, "dash": dash, "width": 2}, hovertemplate=f"{hover}<extra>{name}</extra>",
        )  # fmt: skip
    every = [1e3 * s for _, seconds, *_ in lines for s in seconds if s > 0]
    figure.update_layout(
        xaxis=look.scaled(min(x), max(x), axis), yaxis=look.scaled(max(min(every), 1e-3), max(every), "ms")
    )
    return figure


def by_batch(e: Explained) -> go.Figure:
    """Seconds of a decode step by how many decode, in parts."""
    figure = look.panels([f"<b>A decode step after {e.context:,} tokens each</b>"], legend=2)
    x = list(e.by_batch)
    for name in NAMES:
        values = [1e3 * sum(p.seconds for p in step.parts if p.name == name) for step in e.by_batch.values()]
        if not any(values):
            continue
        figure.add_bar(
            x=[f"{n:,}" for n in x], y=values, name=NAMES[name], marker={"color": COLOURS[name], "line": {"width": 0}},
            hovertemplate="%{x} at once: %{y:.4~g} ms<extra>" + NAMES[name] + "</extra>",
        )  # fmt: skip
    figure.update_layout(
        barmode="stack", bargap=0.3, xaxis={"title": {"text": "requests at once"}, "type": "category"},
        yaxis={"title": {"text": "ms"}},
    )  # fmt: skip
    return figure


def roofline(e: Explained) -> go.Figure:
    """FLOP/s by FLOPs a byte: the roof, this prompt, and decodes at every batch."""
    figure = look.panels(["<b>Roofline</b>"])
    peak, bandwidth = e.peaks[e.rate], e.peaks["bandwidth"]
    steps = [*e.by_batch.values(), e.alone.prefill]
    low = min(0.5, *(s.intensity / 2 for s in steps))
    high = max(4 * peak / bandwidth, 2 * e.alone.prefill.intensity)
    roof = [low, peak / bandwidth, high]
    figure.add_scatter(
        x=roof, y=[bandwidth * low / 1e12, peak / 1e12, peak / 1e12],
        name=f"the GPU's roof, {words.RATES[e.rate]}", mode="lines", line={"color": look.GREY, "width": 2},
        hoverinfo="skip",
    )  # fmt: skip
    figure.add_scatter(
        x=[s.intensity for s in e.by_batch.values()], y=[s.flops / s.seconds / 1e12 for s in e.by_batch.values()],
        customdata=[f"{n:,} at once, {words.ms(s.seconds)}" for n, s in e.by_batch.items()], name="decoding",
        mode="lines+markers", line={"color": look.GREEN, "dash": "dot"}, marker={"size": 8},
        hovertemplate="%{customdata}: %{y:.3~g} TFLOP/s<extra>decoding</extra>",
    )  # fmt: skip
    read = e.alone.prefill
    figure.add_scatter(
        x=[read.intensity], y=[read.flops / read.seconds / 1e12], name=f"prompt of {e.prompt:,} tokens", mode="markers",
        marker={"color": look.BLUE, "size": 11, "symbol": "diamond"},
        hovertemplate=f"{quantity(1e3 * read.seconds)} ms: %{{y:.3~g}} TFLOP/s<extra>prompt</extra>",
    )  # fmt: skip
    rates = [s.flops / s.seconds / 1e12 for s in steps]
    figure.update_layout(
        xaxis=look.scaled(low, high, "FLOPs a byte of HBM"),
        yaxis=look.scaled(min(*rates, bandwidth * low / 1e12) / 1.5, 1.5 * peak / 1e12, "TFLOP/s"),
    )
    return figure
