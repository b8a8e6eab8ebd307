"""The figures: one function a figure, from a Result to a plotly Figure whose size is bounded."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import plotly.graph_objects as go

from reports import drafts, look, words
from reports.series import Series, cdf, over_time, thinned
from reports.spent import where_spent
from sim.metrics import PERCENTILES, Distribution, Floats
from sim.presence import EXIST
from sim.result import Result
from sim.steplog import UP

SCATTER_POINTS = 3000
"""Requests that a scatter shows; of more, every k-th by arrival."""


def latency_cdfs(result: Result) -> go.Figure:
    """TTFT, TPOT, ITL and E2E: the share of requests (ITL: of token gaps) at or below each value; SLO limits."""
    names = ("TTFT", "TPOT", "ITL", "E2E")
    figure = look.panels([f"<b>{name}</b>" for name in names], columns=2, legend=0)
    for i, name in enumerate(names):
        if name == "ITL":
            distribution = result.itl
        else:
            values = result.column(f"{name.lower()}_s")
            distribution = Distribution.of(values[~np.isnan(values)])
        _cdf_panel(figure, i, name, distribution, result.slo.get(name.lower()))
    return figure


def _cdf_panel(figure: go.Figure, i: int, name: str, distribution: Distribution, limit_s: float | None) -> None:
    n = str(i + 1) if i else ""
    axes = {"xaxis": f"x{n}", "yaxis": f"y{n}"}
    if not distribution.count:
        look.say(figure, i, "no request has two tokens" if name in ("TPOT", "ITL") else "no request finished")
        return
    marks_s = [distribution.percentile(q) for q in PERCENTILES]
    factor, unit = words.latency_unit(1e3 * marks_s[-1])
    scale = 1e3 * factor
    x, y = cdf(distribution)
    x, marks = x * scale, [m * scale for m in marks_s]
    what = "token gaps" if name == "ITL" else "requests"
    hover = f"%{{y:.4~g}} % of {what} at or below %{{x:.4~g}} {unit}<extra></extra>"
    figure.add_scatter(
        x=x, y=y, line={"color": look.BLUE, "width": 2, "shape": "hv"}, mode="lines", hovertemplate=hover, **axes
    )
    figure.add_scatter(
        x=marks, y=PERCENTILES, mode="markers+text", text=[f"p{q}" for q in PERCENTILES], textposition="bottom right",
        marker={"color": look.BLUE, "size": 9, "symbol": ["circle", "square", "diamond"]},
        hovertemplate=f"%{{text}} = %{{x:.4~g}} {unit}<extra></extra>", cliponaxis=False, **axes,
    )  # fmt: skip
    title = f"<b>{name}</b>  " + " · ".join(
        f"p{q} {words.quantity(m)}" for q, m in zip(PERCENTILES, marks, strict=True)
    )
    figure.layout.annotations[i].text = f"{title} {unit}"
    low, high = float(x[0]), float(x[-1])
    if limit_s is not None:
        limit = limit_s * scale
        figure.add_scatter(
            x=[limit, limit], y=[0, 100], mode="lines", line={"color": look.RED, "dash": "dash"},
            hovertemplate=f"SLO: {words.seconds(limit_s)}<extra></extra>", **axes,
        )  # fmt: skip
        right = limit <= (low * high) ** 0.5  # the label stands where the panel has room
        figure.add_annotation(
            text="SLO", x=limit, y=0.12, xref=f"x{n}", yref=f"y{n} domain", showarrow=False,
            xanchor="left" if right else "right", font={"color": look.RED},
        )  # fmt: skip
        low, high = min(low, limit), max(high, limit)
    axis = look.scaled(low, high, unit)
    if axis.get("type") == "log" and limit_s is not None:
        figure.layout.annotations[-1].x = float(np.log10(limit))  # annotations on log axes are placed by exponent
    figure.update_layout({f"xaxis{n}": axis, f"yaxis{n}": {"title": {"text": f"{what} (%)"}, "range": [0, 104]}})


def load_over_time(result: Result) -> go.Figure:
    """Requests waiting and running, all replicas together: means over time bins."""
    series = over_time(result)
    figure = look.panels(["<b>Requests in the system</b>"])
    _stack(figure, series, "running", series.running, look.BLUE, "%{y:.1f}")
    _stack(figure, series, "waiting", series.waiting, look.ORANGE, "%{y:.1f}", pattern="/")
    figure.update_yaxes(title_text="requests")
    return _timed(figure, series)


def kv_over_time(result: Result) -> go.Figure:
    """KV cache in use: mean over replicas and fullest moment of each bin, in % of a replica's pool and in GiB."""
    series, d = over_time(result), result.deployment
    figure = look.panels(["<b>KV cache in use</b>"])
    x = series.middles_s * words.clock(series.edges_s[-1])[0]
    _stack(figure, series, "mean", 100 * series.kv, look.GREEN, "%{y:.1f} %")
    fullest = "peak of the fullest replica" if d.replicas > 1 else "peak"
    figure.add_scatter(
        x=x, y=_small(100 * series.kv_peak), name=fullest, mode="lines", hovertemplate="%{y:.1f} %",
        line={"color": look.BLUE, "width": 1, "shape": "hvh"},
    )  # fmt: skip
    figure.add_scatter(
        x=x[[0, -1]], y=[100, 100], name="pool is full", mode="lines", hoverinfo="skip",
        line={"color": look.RED, "dash": "dash"},
    )  # fmt: skip
    hit = np.flatnonzero(series.preempted)
    if len(hit):
        figure.add_scatter(
            x=x[hit], y=np.full(len(hit), 104.0), customdata=series.preempted[hit], name="preemptions", mode="markers",
            marker={"symbol": "triangle-down", "size": 9, "color": look.ORANGE}, hovertemplate="%{customdata:.0f}",
        )  # fmt: skip
    top = 108
    figure.update_layout(
        yaxis={"range": [0, top], "title": {"text": "% of the pool"}, "tickvals": [0, 25, 50, 75, 100]}
    )
    if len(d.pools) == 1:
        pool_gib = d.pools[0].kv_blocks * d.pools[0].block_bytes / words.GIB
        quarters = [pool_gib * i / 4 for i in range(5)]
        figure.add_scatter(x=x[:1], y=[0], yaxis="y2", showlegend=False, hoverinfo="skip", mode="lines")
        figure.update_layout(
            yaxis2={
                "overlaying": "y", "side": "right", "range": [0, top / 100 * pool_gib], "showgrid": False,
                "title": {"text": "GiB per GPU"}, "zeroline": False, "fixedrange": True, "automargin": True,
                "tickvals": quarters, "ticktext": [f"{gib:.3g}" for gib in quarters],
            },
        )  # fmt: skip
    return _timed(figure, series)


def pools_over_time(result: Result) -> go.Figure:
    """Each pool's time in steps and KV cache in use, in % of what its replicas have."""
    figure = look.panels(["<b>Busy</b>, share of the time in steps", "<b>KV cache in use</b>, mean over replicas"])
    d = result.deployment
    for i, (pool, first) in enumerate(zip(d.pools, d.first, strict=False)):
        series = over_time(result, range(first, first + pool.replicas))
        line = {"color": look.SEVERAL[i % len(look.SEVERAL)], "dash": look.DASHES[i % len(look.DASHES)], "shape": "hvh"}
        for panel, share in (("", series.prefill_share + series.decode_share), ("2", series.kv)):
            figure.add_scatter(
                x=_small(series.middles_s * words.clock(series.edges_s[-1])[0]), y=_small(100 * share), name=pool.name,
                legendgroup=pool.name, showlegend=not panel, mode="lines", line=line, hovertemplate="%{y:.1f} %",
                xaxis=f"x{panel}", yaxis=f"y{panel}",
            )  # fmt: skip
    for axis in ("yaxis", "yaxis2"):
        figure.update_layout({axis: {"range": [0, 104], "title": {"text": "%"}}})
    return _timed(figure, series)


def replicas_over_time(result: Result) -> go.Figure:
    """How many replicas of each pool take requests, and how many exist, starting and drained ones included."""
    figure = look.panels(["<b>Replicas</b> (dotted: all that exist)"])
    series, d, presence = over_time(result), result.deployment, result.presence
    if presence is None:
        look.say(figure, 0, "no replica came or went")
        return figure
    scale = words.clock(series.edges_s[-1])[0]
    for i, (pool, first) in enumerate(zip(d.pools, d.first, strict=False)):
        colour = look.SEVERAL[i % len(look.SEVERAL)]
        for what, states, dash in (("take requests", (UP,), "solid"), ("exist", EXIST, "dot")):
            times, counts = presence.counts(range(first, first + pool.replicas), states)
            picked = thinned(times, series.edges_s)
            figure.add_scatter(
                x=_small(np.append(times[picked], series.edges_s[-1]) * scale),
                y=_small(np.append(counts[picked], counts[picked][-1:])), name=f"{pool.name}: {what}", mode="lines",
                hovertemplate="%{y:.0f}",
                line={"color": colour, "width": 2 if dash == "solid" else 1, "dash": dash, "shape": "hv"},
            )  # fmt: skip
    figure.update_layout(yaxis={"rangemode": "tozero", "title": {"text": "replicas"}})
    return _timed(figure, series)


def batch_over_time(result: Result) -> go.Figure:
    """Prompt tokens computed and output tokens given, per second, stacked; and what the engine's time went into."""
    series = over_time(result)
    figure = look.panels(["<b>Tokens per second</b>", "<b>Engine's time</b> (the rest is idle)"])
    rate = "%{y:,.0f} tokens/s"
    _stack(figure, series, "decode: output tokens", series.output_tokens_per_s, look.BLUE, rate)
    _stack(figure, series, "prefill: prompt tokens", series.prefill_tokens_per_s, look.ORANGE, rate, pattern="/")
    for name, share, colour, pattern in (
        ("steps that only decode", series.decode_share, look.BLUE, ""),
        ("steps with prefill", series.prefill_share, look.ORANGE, "/"),
    ):
        _stack(figure, series, name, 100 * share, colour, "%{y:.1f} %", pattern=pattern, panel="2", legend=False)
    figure.update_layout(yaxis={"title": {"text": "tokens/s"}}, yaxis2={"title": {"text": "%"}, "range": [0, 102]})
    return _timed(figure, series)


def use_over_time(result: Result) -> go.Figure:
    """The share of the GPUs' peaks that the model's FLOPs and bytes need, idle time included."""
    series = over_time(result)
    figure = look.panels(["<b>Share of the GPU's peaks</b>"])
    x = _small(series.middles_s * words.clock(series.edges_s[-1])[0])
    for name, share, colour, dash in (
        ("compute (MFU)", series.compute, look.ORANGE, "solid"),
        ("memory bandwidth", series.bandwidth, look.BLUE, "dot"),
    ):
        figure.add_scatter(
            x=x, y=_small(100 * share), name=f"{name}, mean {100 * share.mean():.0f} %", mode="lines",
            line={"color": colour, "dash": dash, "width": 1.5, "shape": "hvh"}, hovertemplate="%{y:.1f} %",
        )  # fmt: skip
    figure.update_layout(yaxis={"range": [0, 104], "title": {"text": "% of the peak"}})
    return _timed(figure, series)


def requests_scatter(result: Result) -> go.Figure:
    """Each request: TTFT against prompt tokens, E2E against output tokens; waiting and preemption set apart."""
    names = ("id", "prompt_tokens", "output_tokens", "ttft_s", "e2e_s", "queue_s", "preemptions")
    count = result.finished
    picked = np.unique(np.linspace(0, count - 1, min(count, SCATTER_POINTS)).round().astype(int))
    columns = {name: result.column(name, finished=True)[picked] for name in names}
    note = f": {len(picked):,} of {count:,} requests" if len(picked) < count else ""
    figure = look.panels([f"<b>TTFT by prompt</b>{note}", f"<b>E2E by output</b>{note}"], columns=2)
    if not count:
        for panel in (0, 1):
            look.say(figure, panel, "no request finished")
        return figure
    preempted = columns["preemptions"] > 0
    waited = ~preempted & (columns["queue_s"] > columns["ttft_s"] / 2)
    groups = {
        "served at once": (~preempted & ~waited, look.BLUE, "circle"),
        "over half of TTFT in the queue": (waited, look.ORANGE, "diamond"),
        "preempted": (preempted, look.RED, "x"),
    }
    for n, tokens, time in (("", "prompt_tokens", "ttft_s"), ("2", "output_tokens", "e2e_s")):
        factor, unit = words.latency_unit(1e3 * float(np.quantile(columns[time], 0.99)))
        x, y = columns[tokens], columns[time] * 1e3 * factor
        for name, (chosen, colour, symbol) in groups.items():
            if chosen.any():
                figure.add_scatter(
                    x=_small(x[chosen]), y=_small(y[chosen]), customdata=columns["id"][chosen].astype(int),
                    mode="markers", name=name, legendgroup=name, showlegend=not n, xaxis=f"x{n}", yaxis=f"y{n}",
                    marker={"size": 5, "symbol": symbol, "color": colour, "opacity": 0.6},
                    hovertemplate=f"request %{{customdata}}: %{{x:,}} tokens, %{{y:.4~g}} {unit}<extra>{name}</extra>",
                )  # fmt: skip
        figure.update_layout(
            {
                f"xaxis{n}": look.scaled(float(x.min()), float(x.max()), tokens.replace("_", " ")),
                f"yaxis{n}": look.scaled(float(y.min()), float(y.max()), unit),
            }
        )
    return figure


def worth_of_drafts(result: Result) -> go.Figure:
    """How many times as fast tokens come with drafts, by how many decode at once."""
    return drafts.by_batch(drafts.of_manifest(result.manifest), result.summary()["mean_batch_size_current"])


FIGURES: dict[str, tuple[Callable[[Result], go.Figure], str]] = {
    "latency": (
        latency_cdfs,
        "How latencies spread: at a value on the x axis, the curve gives the share that is at most that long; a long "
        "flat top is a slow tail that averages hide.",
    ),
    "spent": (
        where_spent,
        "What to change first: a queue asks for more replicas or places, the own prompt for faster GPUs or more of "
        "them to a replica, others' prompts for smaller chunks or a pool of their own.",
    ),
    "load": (load_over_time, "A growing waiting area means that requests arrive faster than they are served."),
    "kv": (
        kv_over_time,
        "Memory left for more requests: when the pool is full, new requests wait and running ones are preempted.",
    ),
    "pools": (
        pools_over_time,
        "Pools side by side: one that is busy all the time, or whose KV cache is full, is what requests wait for.",
    ),
    "replicas": (
        replicas_over_time,
        "Replicas that fail, start and stop: between the two lines lie those that cost and do not take requests.",
    ),
    "batch": (
        batch_over_time,
        "Prefill reads prompts: it is bound by compute and sets TTFT; decode writes one token a request and step: it "
        "is bound by memory bandwidth and sets TPOT, and steps with prefill stretch the gaps between tokens.",
    ),
    "drafts": (
        worth_of_drafts,
        "Drafts are nearly free while a step waits for memory, and cost what they compute when many decode at once: "
        "below the dashed line answers come later with them.",
    ),
    "use": (
        use_over_time,
        "What limits it: prompts need the tensor cores, answers the memory. Neither is ever used whole: kernels reach "
        "60 to 80 %, and idle time counts. Attention of chunks to what came before them is not in it.",
    ),
    "requests": (
        requests_scatter,
        "One point a request: TTFT should follow the prompt's length and E2E the output's; points far above the others "
        "waited in the queue or were preempted.",
    ),
}
"""The figures of a report, in order, each with what a reader should see in it."""


def _stack(
    figure: go.Figure, series: Series, name: str, values: Floats, colour: str, hover: str,
    *, pattern: str = "", panel: str = "", legend: bool = True,
) -> None:  # fmt: skip
    """Add an area on top of those that are there."""
    figure.add_scatter(
        x=_small(series.middles_s * words.clock(series.edges_s[-1])[0]), y=_small(values), name=name, mode="lines",
        stackgroup=f"stack{panel}", line={"color": colour, "width": 0 if pattern else 1, "shape": "hvh"},
        hovertemplate=hover, fillcolor=f"rgba{(*bytes.fromhex(colour[1:]), 0.35)}",
        fillpattern={"shape": pattern, "size": 7, "solidity": 0.25, "fgcolor": colour} if pattern else None,
        showlegend=legend, xaxis=f"x{panel}", yaxis=f"y{panel}",
    )  # fmt: skip


def _timed(figure: go.Figure, series: Series) -> go.Figure:
    """Time axes, and one hover box for all areas."""
    scale, unit = words.clock(series.edges_s[-1])
    figure.update_layout(hovermode="x unified")
    figure.update_xaxes(
        title_text=f"time ({unit})", range=[0, series.edges_s[-1] * scale], unifiedhovertitle_text=f"%{{x:.4~g}} {unit}"
    )
    return figure


def _small(values: Floats) -> np.typing.NDArray[np.float32]:
    """Half the bytes in the page; a screen shows no more digits."""
    return np.asarray(values, dtype=np.float32)
