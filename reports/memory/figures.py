"""Figures of one request's memory: what a GPU holds while it runs, and how many like it the KV pool takes."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from calibrate.hardware import GIB
from calibrate.lifetime import Life
from reports import look
from reports.memory.plan import Planned


def gpu_memory(planned: Planned, life: Life) -> go.Figure:
    """Everything on one GPU, stacked, over the tokens of the request."""
    plan = planned.plan
    figure = look.panels(["<b>Memory of one GPU</b>"])
    x = [0, *(moment.tokens for moment in life.moments)]
    fixed = plan.cuda_graph_bytes + plan.communication_bytes + plan.non_torch_bytes
    held = [moment.blocks * plan.block_bytes for moment in life.moments]
    pool = plan.num_gpu_blocks * plan.block_bytes
    rows = [
        ("weights", [plan.weight_bytes] * len(x), look.BLUE),
        ("CUDA, graphs, buffers", [fixed] * len(x), look.GREY),
        ("KV cache of this request", [held[0], *held], look.RED),
        ("KV cache free for others", [pool - size for size in [held[0], *held]], look.GREEN),
        ("activations of the step", [m.activation_bytes for m in (life.moments[0], *life.moments)], look.ORANGE),
    ]
    for name, sizes, colour in rows:
        figure.add_scatter(
            x=x, y=[size / GIB for size in sizes], name=name, mode="lines", stackgroup="memory", line_shape="vh",
            line={"width": 0.5, "color": colour}, fillcolor=_faded(colour), hovertemplate="%{y:.3~f} GiB",
        )  # fmt: skip
    for text, size, dash in (
        ("the engine's share", plan.budget_bytes, "dash"),
        ("the GPU", plan.visible_bytes, "solid"),
    ):
        figure.add_hline(y=size / GIB, line={"color": look.INK, "width": 1, "dash": dash})
        figure.add_annotation(x=1, xref="paper", y=size / GIB, text=text, showarrow=False, xanchor="right",
                              yanchor="bottom", font={"size": 11})  # fmt: skip
    figure.update_layout(
        hovermode="x unified",
        xaxis={"title": {"text": "tokens of the request"}, "range": [0, x[-1]]},
        yaxis={"title": {"text": "GiB"}, "range": [0, 1.06 * plan.visible_bytes / GIB]},
    )
    return _prompt_end(figure, life)


def step_memory(planned: Planned, life: Life) -> go.Figure:
    """What moves: the activations of each step, and the request's own KV cache."""
    plan = planned.plan
    figure = look.panels(["<b>Activations of the step</b>", "<b>KV cache of this request</b>"], columns=2, legend=0)
    x = [0, *(moment.tokens for moment in life.moments)]
    first = life.moments[0]
    for axis, sizes, colour in (
        ("", [m.activation_bytes for m in (first, *life.moments)], look.ORANGE),
        ("2", [m.blocks * plan.block_bytes for m in (first, *life.moments)], look.RED),
    ):
        figure.add_scatter(
            x=x, y=[size / 2**20 for size in sizes], mode="lines", line_shape="vh", fill="tozeroy",
            line={"width": 1.5, "color": colour}, fillcolor=_faded(colour), xaxis=f"x{axis}", yaxis=f"y{axis}",
            hovertemplate="%{x:,} tokens: %{y:,.4~g} MiB<extra></extra>",
        )  # fmt: skip
    layout: dict[str, Any] = {}
    for axis in ("", "2"):
        layout[f"xaxis{axis}"] = {"title": {"text": "tokens of the request"}, "range": [0, x[-1]]}
        layout[f"yaxis{axis}"] = {"title": {"text": "MiB"}, "rangemode": "tozero"}
    figure.update_layout(**layout)
    return figure


def pool_use(planned: Planned, life: Life) -> go.Figure:
    """The pool's blocks under as many such requests as run to their end together, under one more, and under one."""
    usable = planned.plan.usable_blocks
    decodes = [moment for moment in life.moments if not moment.prefill]
    figure = look.panels(["<b>KV blocks of such requests, all at the same output token</b>"])
    for count, colour, dash in ((life.at_once + 1, look.RED, "dot"), (life.at_once, look.GREEN, "solid"),
                                (1, look.BLUE, "dash")):  # fmt: skip
        if count:
            figure.add_scatter(
                x=[moment.tokens - life.prompt for moment in decodes], y=[count * moment.blocks for moment in decodes],
                name=f"{count:,} request{'s' if count > 1 else ''}", mode="lines" if len(decodes) > 1 else "markers",
                line={"color": colour, "dash": dash, "width": 2}, hovertemplate="%{y:,} blocks",
            )  # fmt: skip
    figure.add_hline(y=usable, line={"color": look.INK, "width": 1})
    figure.add_annotation(x=0, xref="paper", y=usable, text="all blocks of the pool", showarrow=False, xanchor="left",
                          yanchor="bottom", font={"size": 11})  # fmt: skip
    figure.update_layout(
        hovermode="x unified",
        xaxis={"title": {"text": "output tokens of each request"}, "range": [0, 1.01 * life.output]},
        yaxis={"title": {"text": "blocks"}, "range": [0, 1.15 * usable]},
    )
    return figure


def _prompt_end(figure: go.Figure, life: Life) -> go.Figure:
    figure.add_vline(x=life.prompt, line={"color": look.GREY, "width": 1, "dash": "dot"})
    right = life.prompt > 0.6 * (life.prompt + life.output)
    figure.add_annotation(
        x=life.prompt, y=0, yref="paper", text="prompt ends", showarrow=False, yanchor="bottom",
        xanchor="right" if right else "left", font={"size": 11},
    )  # fmt: skip
    return figure


def _faded(colour: str) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red}, {green}, {blue}, 0.45)"
