"""Figures of a validation: one function a figure, from a Validation to a plotly Figure whose size is bounded."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import plotly.graph_objects as go

from reports import look, words
from reports.series import cdf
from reports.validation.compared import PREDICTED, TIMES, both
from sim.metrics import Distribution, Floats

if TYPE_CHECKING:
    from reports.validation.compared import Validation

POINTS = 3000
"""Requests that a figure shows; of more, every k-th by arrival."""
BINS = 40
"""Most pieces of time that errors are averaged over; each holds PER_BIN requests at least."""
PER_BIN = 10
MARKS = (50, 90, 99)
NAMES = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "e2el_ms": "E2E"}
ZERO = {"zeroline": True, "zerolinecolor": look.GREY}
FORECAST, MEASURED = look.BLUE, look.ORANGE


def cdfs(v: Validation) -> go.Figure:
    """TTFT, TPOT and E2E: the share of requests at or below each value, of both sides."""
    figure = look.panels([f"<b>{name}</b>" for name in NAMES.values()], columns=3)
    shown: set[str] = set()
    for i, key in enumerate(NAMES):
        ours, theirs = _values(v, key)
        marks = [] if len(theirs) else [(v.measured[f"p{q}_{key}"], q) for q in MARKS if f"p{q}_{key}" in v.measured]
        if not len(ours) or not (len(theirs) or marks):
            look.say(figure, i, "not measured" if len(ours) else "no request has it")
            continue
        largest = max(float(ours.max()) * 1e3, *(value for value, _ in marks), *(theirs[-1:] * 1e3), 0.0)
        factor, unit = words.latency_unit(largest)
        _panel(figure, i, ours * 1e3 * factor, theirs * 1e3 * factor, [(x * factor, q) for x, q in marks], unit, shown)
    return figure


def _values(v: Validation, key: str) -> tuple[Floats, Floats]:
    """(predicted, measured) seconds, sorted; empty where nobody knows them one by one."""
    column = TIMES[key]
    if v.matched is not None:
        ours, theirs = both(v.matched, column)
        return np.sort(ours), np.sort(theirs)
    ours = v.result.column(column, finished=True)
    rows = v.run.requests
    theirs = np.zeros(0) if rows is None else rows.filter(rows["error"].is_null())[column].drop_nulls().to_numpy()
    return np.sort(ours[~np.isnan(ours)]), np.sort(theirs)


def _panel(
    figure: go.Figure, i: int, ours: Floats, theirs: Floats, marks: list[tuple[float, int]], unit: str, shown: set[str]
) -> None:
    n = str(i + 1) if i else ""
    axes = {"xaxis": f"x{n}", "yaxis": f"y{n}"}
    hover = f"%{{y:.4~g}} % at or below %{{x:.4~g}} {unit}"
    for name, values, colour, dash in (("forecast", ours, FORECAST, "solid"), ("measured", theirs, MEASURED, "dash")):
        if len(values):
            x, y = cdf(Distribution.of(values))
            figure.add_scatter(
                x=_small(x), y=_small(y), mode="lines", name=name, legendgroup=name, showlegend=name not in shown,
                line={"color": colour, "width": 2, "shape": "hv", "dash": dash}, hovertemplate=hover, **axes,
            )  # fmt: skip
            shown.add(name)
    if marks:
        figure.add_scatter(
            x=[x for x, _ in marks], y=[q for _, q in marks], mode="markers", name="measured (percentiles)",
            marker={"color": MEASURED, "size": 11, "symbol": "diamond"}, legendgroup="marks",
            showlegend="marks" not in shown, hovertemplate=f"p%{{y}} = %{{x:.4~g}} {unit}", **axes,
        )  # fmt: skip
        shown.add("marks")
    everything = np.concatenate([ours, theirs, [x for x, _ in marks]])
    axis = look.scaled(float(everything.min()), float(everything.max()), unit)
    figure.update_layout({f"xaxis{n}": axis, f"yaxis{n}": {"title": {"text": "requests (%)"}, "range": [0, 104]}})


def scatter(v: Validation) -> go.Figure:
    """A point a request: predicted against measured TTFT, TPOT and E2E, and the line on which both are the same."""
    assert v.matched is not None
    figure = look.panels([f"<b>{name}</b>" for name in NAMES.values()], columns=3, legend=False)
    for i, key in enumerate(NAMES):
        n = str(i + 1) if i else ""
        rows = _some(v, TIMES[key])
        if not len(rows[0]):
            look.say(figure, i, "not measured")
            continue
        ours, theirs, numbers, tokens = rows
        factor, unit = words.latency_unit(1e3 * float(max(ours.max(), theirs.max())))
        x, y = theirs * 1e3 * factor, ours * 1e3 * factor
        axes = {"xaxis": f"x{n}", "yaxis": f"y{n}"}
        low, high = float(min(x.min(), y.min())), float(max(x.max(), y.max()))
        figure.add_scatter(
            x=[low, high], y=[low, high], mode="lines", line={"color": look.GREY, "dash": "dash"}, hoverinfo="skip",
            **axes,
        )  # fmt: skip
        figure.add_scatter(
            x=_small(x), y=_small(y), customdata=np.column_stack([numbers, tokens]), mode="markers",
            marker={"size": 5, "color": FORECAST, "opacity": 0.55}, **axes,
            hovertemplate=f"request %{{customdata[0]}} (%{{customdata[1]:,}} tokens in, %{{customdata[2]:,}} out): "
            f"measured %{{x:.4~g}}, forecast %{{y:.4~g}} {unit}<extra></extra>",
        )  # fmt: skip
        figure.update_layout(
            {
                f"xaxis{n}": _square(low, high, f"measured ({unit})"),
                f"yaxis{n}": _square(low, high, f"forecast ({unit})"),
            }
        )
    return figure


def _square(low: float, high: float, title: str) -> dict[str, Any]:
    """An axis of a square panel, as `look.scaled`, where nothing is gained by beginning at 0."""
    axis = look.scaled(low, high, title)
    edge = 0.05 * (high - low) or 0.1 * high
    return axis if axis.get("type") == "log" else {"title": axis["title"], "range": [low - edge, high + edge]}


def over_time(v: Validation) -> go.Figure:
    """The error of each request by the time at which it was sent, and the median of neighbours."""
    assert v.matched is not None
    figure = look.panels([f"<b>Error of {name}</b>" for name in NAMES.values()], legend=False)
    scale, unit = words.clock(float(v.matched["sent_s"].max() or 0.0))  # type: ignore[arg-type]
    for i, key in enumerate(NAMES):
        n = str(i + 1) if i else ""
        pair = _timed(v, TIMES[key])
        if not len(pair[0]):
            look.say(figure, i, "not measured")
            continue
        sent, error = pair[0] * scale, 100 * pair[1]
        axes = {"xaxis": f"x{n}", "yaxis": f"y{n}"}
        edge = max(5.0, 1.2 * float(np.quantile(np.abs(error), 0.97)))
        beyond = int((np.abs(error) > edge).sum())
        picked = np.unique(np.linspace(0, len(sent) - 1, min(len(sent), POINTS)).round().astype(int))
        figure.add_scatter(
            x=_small(sent[picked]), y=_small(error[picked]), mode="markers", **axes,
            marker={"size": 4, "color": look.GREY, "opacity": 0.6},
            hovertemplate=f"%{{y:+.1f}} % at %{{x:.4~g}} {unit}<extra></extra>",
        )  # fmt: skip
        middle, median = _medians(sent, error)
        figure.add_scatter(
            x=_small(middle), y=_small(median), mode="lines", line={"color": FORECAST, "width": 2}, **axes,
            hovertemplate=f"median %{{y:+.1f}} % around %{{x:.4~g}} {unit}<extra></extra>",
        )  # fmt: skip
        said = f" ({beyond:,} outside)" if beyond else ""
        figure.layout.annotations[i].text = f"<b>Error of {NAMES[key]}</b>{said}"
        figure.update_layout(
            {
                f"xaxis{n}": {"title": {"text": f"sent at ({unit})" if i == len(NAMES) - 1 else ""}},
                f"yaxis{n}": {"title": {"text": "%"}, "range": [max(-edge, -102), edge]} | ZERO,
            }
        )
    return figure


def _timed(v: Validation, column: str) -> tuple[Floats, Floats]:
    """(sent, error as a fraction) of the requests that have both times."""
    assert v.matched is not None
    rows = v.matched.select("sent_s", PREDICTED + column, column).drop_nulls()
    rows = rows.filter(rows[column] > 0).sort("sent_s")
    return rows["sent_s"].to_numpy(), (rows[PREDICTED + column] / rows[column] - 1).to_numpy()


def _medians(sent: Floats, error: Floats) -> tuple[Floats, Floats]:
    """Medians of neighbours in the order of sending."""
    pieces = max(1, min(BINS, len(sent) // PER_BIN))
    x, y = np.array_split(sent, pieces), np.array_split(error, pieces)
    return np.array([np.median(part) for part in x]), np.array([np.median(part) for part in y])


def _some(v: Validation, column: str) -> tuple[Floats, Floats, Floats, Floats]:
    """(predicted, measured, position in the order of arrival, tokens in and out) of POINTS requests at most."""
    assert v.matched is not None
    rows = v.matched.with_row_index("number").drop_nulls([PREDICTED + column, column])
    rows = rows.filter(rows[column] > 0)
    picked = np.unique(np.linspace(0, max(len(rows) - 1, 0), min(len(rows), POINTS)).round().astype(int))
    rows = rows[picked.tolist()]
    tokens = rows.select("input_tokens", "output_tokens").to_numpy()
    return rows[PREDICTED + column].to_numpy(), rows[column].to_numpy(), rows["number"].to_numpy(), tokens


def figures_of(v: Validation) -> dict[str, tuple[Callable[[Validation], go.Figure], str]]:
    """The figures that there are data for, in order, each with what a reader should see in it."""
    found: dict[str, tuple[Callable[[Validation], go.Figure], str]] = {
        "distributions": (
            cdfs,
            "How latencies spread, forecast and measured: where the curves lie apart to the side, times are off; where "
            "the measured one has the longer flat top, the engine has slow requests that the forecast does not know.",
        )
    }
    if v.matched is not None and len(v.matched):
        found["requests"] = (
            scatter,
            "A point a request: on the dashed line forecast and measurement agree, above it the forecast is too slow.",
        )
        if v.matched["sent_s"].n_unique() > 1:
            found["time"] = (
                over_time,
                "Forecast over measurement, less 1, by the time of sending; the line is the median of neighbours. An "
                "error that grows with time is one of speed under overload, one that stays is one of each request.",
            )
    return found


def _small(values: Floats) -> np.typing.NDArray[np.float32]:
    """Half the bytes in the page; a screen shows no more digits."""
    return np.asarray(values, dtype=np.float32)
