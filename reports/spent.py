"""Where TTFT and TPOT were spent, as people see it: words, rows, and the figure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import plotly.graph_objects as go

from reports import look
from reports.pool_words import STAGES
from reports.words import latency_unit, quantity
from sim.result import Result

PARTS: dict[str, tuple[str, str, str]] = {
    "no_replica": ("waiting for a replica, or lost with one", look.RED, ""),
    "network": ("network", look.GREY, "."),
    "earlier_tries": ("earlier tries", look.RED, "/"),
    "front_end": ("front end", look.GREY, ""),
    "queue": ("queue", look.ORANGE, ""),
    "kv_load": ("KV from tiers", look.GREY, "\\"),
    "prefill": ("own prompt", look.BLUE, ""),
    "decode": ("decoding", look.GREEN, ""),
    "other_prompts": ("others' prompts", look.BLUE, "/"),
    "other_decodes": ("others' decoding", look.GREEN, "/"),
    "decode_queue": (STAGES["decode_queue"], look.ORANGE, "/"),
    "link_queue": (STAGES["link_queue"], look.RED, "/"),
    "transfer": (STAGES["transfer"], look.GREY, "x"),
    "first_decode": (STAGES["first_decode"], look.GREEN, "\\"),
    "left_out": ("preempted or left out", look.RED, "x"),
    "handed_over": ("handed over", look.GREY, "/"),
}
"""Of each part of `sim.spent`: what it is called, its colour and its pattern."""

WHICH = {"mean": "mean", "slowest": "slowest 1 %"}
METRICS = {"TTFT": "ttft_ms", "TPOT": "tpot_ms"}

LARGEST = 3
"""How many parts a sentence names: the largest."""

BAR = 44
"""Pixels of a bar, and a label of two lines."""

GROUPS = 5
"""How many classes and pools a figure shows: of more, those whose mean is the longest."""


def rows(spent: Mapping[str, Any]) -> Iterator[tuple[str, list[tuple[str, list[str]]]]]:
    """(metric with its unit, [(part, [mean, slowest 1 %, each with its share])]), where there are any; first the
    whole."""
    for metric, key in METRICS.items():
        if key not in spent:
            continue
        each = [spent[key][which] for which in WHICH]
        whole = [sum(parts.values()) for parts in each]
        scale, unit = latency_unit(max(whole))
        found = [("all", [quantity(total * scale) for total in whole])]
        for part, (name, *_) in PARTS.items():
            if any(parts.get(part, 0.0) > 0 for parts in each):
                values = [parts[part] for parts in each]
                cells = [
                    f"{quantity(value * scale)} ({100 * value / total:.0f} %)" if total else quantity(value)
                    for value, total in zip(values, whole, strict=True)
                ]
                found.append((name, cells))
        yield f"{metric} ({unit})", found


def said(spent: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(metric, its largest parts in shares: `decoding 86 %, others' prompts 14 %; slowest 1 %: ...`)."""
    for metric, key in METRICS.items():
        if key in spent:
            mean, slowest = (_shares(spent[key][which]) for which in WHICH)
            yield metric, f"{mean}; {WHICH['slowest']}: {slowest}"


def _shares(parts: Mapping[str, float]) -> str:
    whole = sum(parts.values()) or 1.0
    order = sorted((part for part in parts if parts[part] > 0), key=lambda part: -parts[part])
    return ", ".join(f"{PARTS[part][0]} {100 * parts[part] / whole:.0f} %" for part in order[:LARGEST])


def where_spent(result: Result) -> go.Figure:
    """TTFT and TPOT in parts, in shares: of the mean request and of the slowest ones, and by class and pool."""
    spent = result.spent
    groups = {key: _groups(spent, key) for key in METRICS.values()}
    shown = {
        part for key, each in groups.items() for _, parts in each for part, ms in parts[key]["slowest"].items() if ms
    }
    most = max(len(each) for each in groups.values())
    figure = look.panels(
        [f"<b>{metric}</b>, where it was spent" for metric in METRICS],
        legend=_lines([PARTS[part][0] for part in shown]),
        height=BAR * len(WHICH) * max(most, 1),
    )
    named = set()
    for i, (metric, key) in enumerate(METRICS.items()):
        n = str(i + 1) if i else ""
        bars = [
            (f"{name}: {label}" if name else label, parts[key][which])
            for name, parts in groups[key]
            for which, label in WHICH.items()
        ]
        if not bars:
            look.say(figure, i, "no request has two tokens" if metric == "TPOT" else "no request finished")
            continue
        wholes = [sum(parts.values()) for _, parts in bars]
        scale, unit = latency_unit(max(wholes))
        labels = [f"{label}<br>{quantity(w * scale)} {unit}" for (label, _), w in zip(bars, wholes, strict=True)]
        for part, (name, colour, pattern) in PARTS.items():
            values = [parts.get(part, 0.0) for _, parts in bars]
            if not any(value > 0 for value in values):
                continue
            figure.add_bar(
                x=[100 * value / (whole or 1.0) for value, whole in zip(values, wholes, strict=True)],
                y=list(range(len(bars))),
                orientation="h", name=name, legendgroup=name, showlegend=name not in named,
                customdata=[f"{quantity(value * scale)} {unit}" for value in values],
                hovertemplate="%{customdata}, %{x:.1f} %<extra>" + name + "</extra>",
                marker=part_marker(colour, pattern),
                xaxis=f"x{n}", yaxis=f"y{n}",
            )  # fmt: skip
            named.add(name)
        figure.update_layout({
            f"xaxis{n}": {"range": [0, 100], "title": {"text": "% of the whole"}},
            f"yaxis{n}": {"range": [len(bars) - 0.5, -0.5], "ticks": "", "showgrid": False,
                         "tickvals": list(range(len(bars))), "ticktext": labels},
        })  # fmt: skip
    figure.update_layout(barmode="stack", bargap=0.35)
    return figure


def part_marker(colour: str, pattern: str) -> dict[str, Any]:
    """How a part's bars look; its `pattern` tells it from another of the same colour."""
    if not pattern:
        return {"color": colour, "line": {"width": 0}}
    light = f"rgba{(*bytes.fromhex(colour[1:]), 0.25)}"
    drawn = {"shape": pattern, "size": 7, "solidity": 0.35, "fgcolor": colour, "bgcolor": light}
    return {"color": colour, "line": {"width": 0}, "pattern": drawn}


def _lines(names: list[str]) -> int:
    """How many lines a legend takes on paper, or a screen twice as wide as a phone's: in columns as wide as the longest
    name, if it needs several."""
    width_px, mark_px, letter_px = 640, 48, 7
    if sum(mark_px + letter_px * len(name) for name in names) <= width_px:
        return 1
    columns = width_px // (mark_px + letter_px * max(map(len, names)))
    return -(-len(names) // columns)


def _groups(spent: Mapping[str, Any], key: str) -> list[tuple[str, Mapping[str, Any]]]:
    """(name, its parts) of all, and of the classes and pools that have the metric, where there are several."""
    found = []
    for kind in ("classes", "pools"):
        there = [(name, parts) for name, parts in spent.get(kind, {}).items() if key in parts]
        found += there if len(there) > 1 else []
    found.sort(key=lambda each: -sum(each[1][key]["mean"].values()))
    everything = [("", spent["all"][""])] if key in spent["all"][""] else []
    return everything + found[:GROUPS]
