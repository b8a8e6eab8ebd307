"""Figures of a profile: one function a figure. The rates that its prices mean, against what the datasheet promises."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import plotly.graph_objects as go

from calibrate.kernels.chunks import pairs
from calibrate.kernels.heads import HeadShape, kind_sizes
from calibrate.kernels.roofline import from_gpu
from calibrate.layout import Parallelism
from calibrate.models import load_model
from calibrate.operators import attention_groups
from calibrate.profile import SKEW, Profile
from reports import look
from reports.profile_points import (
    expert_layers,
    expert_work,
    gemm_moved,
    gemm_shapes,
    has_allreduce,
    peak_of,
    ring_bytes,
)
from reports.words import size_text

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Shape = tuple[int, int, int, int, int]  # heads, KV heads, elements of keys and of values, window

COLOURS = (look.BLUE, look.ORANGE, look.GREEN, look.RED, "#8e6bd1")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross")
STEPS = 60  # points of a line
ONE_LINE = 40  # letters of a legend that takes two lines on a tablet

ROWS = (1, 16, 128, 1024, 8192)
HEADS = (("llama-3.1-8b", 1), ("llama-3.1-70b", 8))
"""Models and their tensor-parallel sizes, whose heads are drawn where they were measured."""
CONTEXTS = (0, 2048, 8192, 32768)
BATCHES = (1, 8, 32, 128, 512)
LAYERS = 4  # expert layers of as many models


@dataclass(frozen=True, slots=True)
class Panel:
    """Lines (name, x, y) over a logarithmic axis, and the datasheet's `limit` of y. `unit` is y's; `x` is said by
    `x_title`, in bytes where `sizes`. Where `log`, y is logarithmic as well."""

    title: str
    lines: Sequence[tuple[str, Floats, Floats]]
    limit: float | None
    x_title: str
    unit: str
    sizes: bool = False
    log: bool = False


def gemm_roofline(profile: Profile) -> go.Figure:
    """FLOP/s over FLOPs per byte of the catalogued models' projections, a panel a dtype of weights."""
    model, shapes = profile.families["gemm"], gemm_shapes(profile)
    n, k = np.array(list(shapes), np.float64).T
    rows = np.array(ROWS, np.float64)[:, None]
    figure = look.panels([f"<b>{weights}</b>" for weights in model.tables], columns=min(len(model.tables), 2))
    for i, weights in enumerate(model.tables):
        peak, bandwidth = peak_of(profile, weights) / 1e12, profile.gpu.bandwidth_bytes_per_s / 1e12
        x = 2 * rows * n * k / gemm_moved(weights, rows, n, k)
        y = 2e-12 * rows * n * k / model.seconds(weights, rows, n, k)
        inside = model.inside(weights, rows, n, k)
        for j, m in enumerate(ROWS):
            symbols = [SYMBOLS[j] + "-open" * (not ok) for ok in inside[j]]
            figure.add_scatter(
                x=x[j].astype(np.float32), y=y[j].astype(np.float32), mode="markers", showlegend=i == 0,
                name=f"m {m:,}", legendgroup=f"m {m}", marker={"color": COLOURS[j], "size": 7, "symbol": symbols},
                text=[f"{name}: n {a:,}, k {b:,}, m {m:,}" for (a, b), name in shapes.items()],
                hovertemplate="%{text}<br>%{y:,.4~g} TFLOP/s<extra></extra>", **_axes(i),
            )  # fmt: skip
        low, high = float(x.min()) / 1.3, float(x.max()) * 1.3
        roof = np.array(sorted({low, min(max(peak / bandwidth, low), high), high}))
        _limit(figure, i, roof, np.minimum(peak, roof * bandwidth), "datasheet", "%{y:,.4~g} TFLOP/s")
        axes = decades(low, high, "FLOPs per byte moved"), look.scaled(float(y.min()), peak, "TFLOP/s")
        figure.update_layout({f"xaxis{_number(i)}": axes[0], f"yaxis{_number(i)}": axes[1]})
    return figure


def prefill_rates(profile: Profile) -> go.Figure:
    """TFLOP/s of one prompt chunk over its tokens, by cached tokens before it, a panel a head shape."""
    model = profile.families["prefill_attention"]
    panels = []
    for heads, shape, title in _shapes(model.kinds):
        tokens = _spread(16, 2 ** model.kinds[heads.kind].fit.extent["q"][1])
        lines = []
        for context in CONTEXTS:
            flops = heads.pair_flops * pairs(tokens, np.full_like(tokens, context), heads.window)
            seconds = model.seconds(heads.kv_dtype, 1, tokens, context, *shape)
            lines.append((f"{context:,} cached" if context else "whole prompt", tokens, flops / seconds / 1e12))
        panels.append(Panel(title, lines, heads.peak(from_gpu(profile.gpu)) / 1e12, "new tokens", "TFLOP/s"))
    return _draw(panels)


def decode_rates(profile: Profile) -> go.Figure:
    """TB/s at which a batch reads its KV, over all its KV tokens, by batch, a panel a head shape."""
    model = profile.families["decode_attention"]
    panels = []
    for heads, shape, title in _shapes(model.kinds):
        lines = []
        for batch in BATCHES:
            context = _spread(16, 2 ** model.kinds[heads.kind].fit.extent["seen"][1]) - 1
            context = context[model.inside(heads.kv_dtype, batch, context, *shape)]
            seconds = model.seconds(heads.kv_dtype, batch, context, *shape)
            moved = batch * np.minimum(context + 1, heads.window or np.inf) * heads.kv_token_bytes
            lines.append((f"batch {batch}", batch * context, moved / seconds / 1e12))
        limit = profile.gpu.bandwidth_bytes_per_s / 1e12
        panels.append(Panel(title, lines, limit, "KV tokens of all sequences", "TB/s"))
    return _draw(panels)


def expert_rates(profile: Profile) -> go.Figure:
    """Of expert layers over tokens, by model: TB/s, and the share of the peak of their weights' dtype."""
    model = profile.families["moe"]
    moved, done = [], []
    for shape, weights, name in _layers(profile):
        tokens = _spread(1, 16384)
        tokens = tokens[model.inside(weights, tokens, *shape)]
        seconds = model.seconds(weights, tokens, *shape, skew=SKEW)
        flops, size = expert_work(weights, tokens, shape)
        moved.append((name, tokens, size / seconds / 1e12))
        done.append((name, tokens, 100 * flops / seconds / peak_of(profile, weights)))
    limit = profile.gpu.bandwidth_bytes_per_s / 1e12
    return _draw(
        [
            Panel("<b>Bytes</b>", moved, limit, "tokens", "TB/s"),
            Panel("<b>FLOPs</b>, of the peak of their dtype", done, 100.0, "tokens", "%"),
        ]
    )


def allreduce_rates(profile: Profile) -> go.Figure:
    """Bus bandwidth and time of an all-reduce over its buffer, by group."""
    model = profile.families["collective"]
    rates, times = [], []
    for gpus in sorted({n for op, _, n in model.curves if op == "all_reduce"}):
        backend = model.allreduce_backend(gpus)
        if (curve := model.curves.get(("all_reduce", backend, gpus))) is None:
            continue
        size = _spread(curve.at[0], curve.at[-1])
        seconds = curve(size)
        rates.append((f"{gpus} GPUs", size, ring_bytes(1.0, gpus) * size / seconds / 1e9))
        times.append((f"{gpus} GPUs", size, 1e6 * seconds))
    limit = profile.gpu.link.bandwidth_bytes_per_s / 1e9
    return _draw(
        [
            Panel("<b>Bus bandwidth</b>", rates, limit, "buffer of one GPU", "GB/s", sizes=True),
            Panel("<b>Time</b>", times, None, "buffer of one GPU", "µs", sizes=True, log=True),
        ]
    )


def figures_of(profile: Profile) -> dict[str, tuple[Callable[[Profile], go.Figure], str]]:
    """The figures that the profile has data for, in order, each with what a reader should see in it."""
    found = {name: (make, caption) for name, (family, make, caption) in _FIGURES.items() if family in profile.families}
    for name, family in (("prefill", "prefill_attention"), ("decode", "decode_attention")):
        if name in found and not _shapes(profile.families[family].kinds):
            del found[name]
    if "roofline" in found and not gemm_shapes(profile):
        del found["roofline"]
    if "experts" in found and not _layers(profile):
        del found["experts"]
    if "allreduce" in found and not has_allreduce(profile):
        del found["allreduce"]
    return found


def decades(low: float, high: float, unit: str) -> dict[str, Any]:
    """An axis as `look.scaled` makes it, with fewer labels where it spans decades: a phone has room for few."""
    axis = look.scaled(low, high, unit)
    kept = [t for t in axis.get("tickvals", ()) if np.isclose(np.log10(t) % 1, 0) and low <= t <= high]
    kept = kept[:: 2 if len(kept) > 4 else 1]
    if len(kept) > 2:
        axis |= {"tickvals": kept, "ticktext": [f"{t / 1e6:g} M" if t >= 1e6 else look.tick_text(t) for t in kept]}
    return axis


_FIGURES: Mapping[str, tuple[str, Callable[[Profile], go.Figure], str]] = {
    "roofline": (
        "gemm",
        gemm_roofline,
        "GEMMs: each mark is a projection of a catalogued model on one GPU, at m tokens. Under the slope the memory "
        "bounds it, under the flat top the multipliers; the distance to the line is what the kernel loses. Hollow "
        "marks lie outside what was measured.",
    ),
    "prefill": (
        "prefill_attention",
        prefill_rates,
        "Prefill attention (heads / KV heads) of one prompt, and of a chunk after cached tokens (of which tables "
        "rarely hold any: then they are derived, not measured; the teeth are whole waves of tiles). Short chunks leave "
        "most of the GPU idle.",
    ),
    "decode": (
        "decode_attention",
        decode_rates,
        "Decode attention (heads / KV heads): how fast a batch reads its KV cache, from memory as in a serving step. "
        "Few tokens wait for the kernel to start; the same tokens cost more or less by how many sequences hold them.",
    ),
    "experts": (
        "moe",
        expert_rates,
        "Expert layers on one GPU: few tokens are bound by reading the experts they touch, many by multiplying.",
    ),
    "allreduce": (
        "collective",
        allreduce_rates,
        "The all-reduce that the engine would run. Steps are where it goes over to another library; small buffers cost "
        "the latency of the group whatever their size. Bus bandwidth is what each GPU would send in a ring: more than "
        "its link carries where the switch does the sums.",
    ),
}


def _shapes(kinds: Mapping[str, Any]) -> list[tuple[HeadShape, Shape, str]]:
    """The head shapes to draw, with their titles: of HEADS what was measured, else the first that were; no latents."""
    known = {HeadShape(dtype, 1, 1, *sizes): kind for name, kind in kinds.items()
             for dtype, *sizes in [kind_sizes(name)] if sizes[0] == sizes[1]}  # fmt: skip
    measured = [
        (base, (int(heads), int(kv_heads), base.head_dim, base.value_dim, base.window))
        for base, kind in sorted(known.items(), key=lambda each: (each[0].window > 0, each[0].kv_dtype != "bf16"))
        for axes, values in zip(kind.fit.tables.axes, kind.fit.tables.values, strict=True) if axes.own
        for heads, kv_heads in [owner.split("/") for owner in values]
    ]  # fmt: skip
    named = {}
    for model, tp in HEADS:
        group = attention_groups(load_model(model), Parallelism(tp))[0]
        sizes = (group.heads, group.kv_heads, group.head_dim, group.head_dim, group.window)
        named[sizes] = f"{model}, tp {tp}" if tp > 1 else model
    if not measured:
        return []
    first = measured[0][0].kv_dtype
    chosen = [each for each in measured if each[0].kv_dtype == first and each[1] in named] or measured[: len(HEADS)]
    chosen.sort(key=lambda each: list(named).index(each[1]) if each[1] in named else 0)
    return [
        (HeadShape(base.kv_dtype, *shape), shape, _title(named.get(shape, base.kv_dtype), *shape))
        for base, shape in chosen
    ]


def _title(name: str, heads: int, kv_heads: int, head_dim: int, value_dim: int, window: int) -> str:
    """Short enough for a phone."""
    return f"<b>{name}</b>: {heads}/{kv_heads} heads of {head_dim}" + (f", window {window:,}" if window else "")


def _layers(profile: Profile) -> list[tuple[tuple[int, ...], str, str]]:
    """(shape, weights, model) of the expert layers of catalogued models that were measured, LAYERS of them at most."""
    model = profile.families["moe"]
    known = {variant.weights for variant in model.variants}
    found = [
        (shape, weights, name)
        for (shape, weights), name in expert_layers().items()
        if weights in known and model.inside(weights, np.array([64.0]), *shape).all()
    ]
    return found[:: max(-(-len(found) // LAYERS), 1)]


def _draw(panels: Sequence[Panel]) -> go.Figure:
    """A figure of the panels side by side, the lines of one name alike in all of them."""
    figure = look.panels([panel.title for panel in panels], columns=len(panels))
    names = list(dict.fromkeys(name for panel in panels for name, _, _ in panel.lines))
    if len("".join(names)) > ONE_LINE:
        more = look.ENTRY
        figure.update_layout(height=figure.layout.height + more, margin={"t": figure.layout.margin.t + more})
    for i, panel in enumerate(panels):
        lines = [line for line in panel.lines if len(line[1])]
        for name, x, y in lines:
            j = names.index(name) % len(COLOURS)
            what = "%{customdata}" if panel.sizes else f"%{{x:,}} {panel.x_title}"
            figure.add_scatter(
                x=x, y=y.astype(np.float32), mode="lines", name=name, legendgroup=name, showlegend=i == 0,
                line={"color": COLOURS[j], "dash": DASHES[j], "width": 2},
                customdata=[size_text(size) for size in x] if panel.sizes else None,
                hovertemplate=f"%{{y:,.4~g}} {panel.unit}, {what}<extra>{name}</extra>", **_axes(i),
            )  # fmt: skip
        low, high = min(x[0] for _, x, _ in lines), max(x[-1] for _, x, _ in lines)
        x_axis = decades(low, high, panel.x_title)
        if panel.sizes:
            ticks = [2.0**p for p in range(0, 41, 5) if low <= 2.0**p <= high]
            x_axis |= {"tickvals": ticks, "ticktext": [size_text(t) for t in ticks]}
        y_axis: dict[str, Any] = {"title": {"text": panel.unit}}
        if panel.log:
            y_axis = look.scaled(min(y.min() for *_, y in lines), max(y.max() for *_, y in lines), panel.unit)
        if panel.limit is not None:
            ends = np.array([low, high])
            _limit(figure, i, ends, np.full(2, panel.limit), "datasheet", f"%{{y:,.4~g}} {panel.unit}")
        figure.update_layout({f"xaxis{_number(i)}": x_axis, f"yaxis{_number(i)}": y_axis})
    return figure


def _limit(figure: go.Figure, panel: int, x: Floats, y: Floats, name: str, hover: str) -> None:
    figure.add_scatter(
        x=x, y=y, mode="lines", name=name, legendgroup=name, showlegend=panel == 0,
        line={"color": look.GREY, "width": 2}, hovertemplate=f"{hover}<extra>{name}</extra>", **_axes(panel),
    )  # fmt: skip


def _axes(panel: int) -> dict[str, str]:
    return {"xaxis": f"x{_number(panel)}", "yaxis": f"y{_number(panel)}"}


def _number(panel: int) -> str:
    return str(panel + 1) if panel else ""


def _spread(low: float, high: float) -> Floats:
    """Whole numbers from `low` to `high`, even in their logarithm."""
    return np.unique(np.rint(np.geomspace(low, high, STEPS)))
