"""What drafts were worth, in words and drawn: for a run, and for an engine that is explained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from calibrate.draft_worth import DraftWorth
from reports import look
from reports.words import percent, quantity

HEAD = ("at once", "TPOT without", "step with drafts", "TPOT with", "as fast")


def of_manifest(manifest: Mapping[str, Any]) -> list[tuple[str, DraftWorth]]:
    """(pool, what drafts are worth there) of a run's pools that draft."""
    found = []
    for pool in manifest.get("pools") or []:
        if facts := pool.get("drafts"):
            steps = {int(n): tuple(step) for n, *step in facts["by_batch"]}
            found.append((pool["name"], DraftWorth(**{**facts, "by_batch": steps})))
    return found


def turning(worth: DraftWorth) -> str:
    """From which batch on they do harm."""
    context = f"at {worth.context:,} tokens each"
    if worth.turns is None:
        return f"with up to {worth.most:,} at once they pay ({context})"
    if worth.turns == 1:
        return f"they never pay ({context})"
    return f"from {worth.turns:,} at once on they slow every answer down ({context})"


def speedup_at(worth: DraftWorth, batch: float) -> float:
    """How many times as fast tokens come with `batch` sequences, between those that were looked at."""
    n = sorted(worth.by_batch)
    return float(np.interp(np.log(max(batch, 1.0)), np.log(n), [worth.speedup(each) for each in n]))


def said(summary: Mapping[str, Any], manifest: Mapping[str, Any]) -> list[str]:
    """What a run's drafts came to; nothing where there were none."""
    if summary.get("draft_tokens") is None or summary["mean_acceptance_length"] is None:
        return []
    rate = f"{percent(summary['draft_acceptance_rate'])} accepted, " if summary["draft_tokens"] else ""
    text = f"{rate}{quantity(summary['mean_acceptance_length'])} tokens a sequence and step"
    worths = of_manifest(manifest)
    batch = summary["mean_batch_size_current"]
    if len(worths) == 1 and batch:
        worth = worths[0][1]
        text += f"; at the mean batch tokens come {quantity(speedup_at(worth, batch))} times as fast, {turning(worth)}"
    return [text]


def rows(worth: DraftWorth) -> Iterator[tuple[str, ...]]:
    """By how many decode at once: HEAD."""
    for n, (plain_s, drafted_s, _) in worth.by_batch.items():
        tpot_s = worth.tpot_s(n)
        yield (
            f"{n:,}",
            *(f"{quantity(1e3 * seconds)} ms" for seconds in (plain_s, drafted_s, tpot_s)),
            f"{plain_s / tpot_s:.2f}x",
        )


def lesson(worth: DraftWorth) -> str:
    """The whole in a sentence."""
    most = max(worth.by_batch)
    return (
        f"give {quantity(worth.length)} tokens a sequence and step: alone they come {worth.speedup(1):.2f} times as "
        f"fast as without, {most:,} at once {worth.speedup(most):.2f} times; {turning(worth)}."
    )


def by_batch(worths: Sequence[tuple[str, DraftWorth]], batch: float | None = None) -> go.Figure:
    """How many times as fast tokens come with drafts, by how many decode at once; `batch`: a run's mean."""
    figure = look.panels(["<b>How many times as fast tokens come with drafts</b>"])
    colours = (look.BLUE, look.ORANGE, look.GREEN, look.RED, look.GREY)
    values = [1.0]
    for i, (name, worth) in enumerate(worths):
        y = [worth.speedup(n) for n in worth.by_batch]
        values += y
        figure.add_scatter(
            x=list(worth.by_batch), y=y, name=name if len(worths) > 1 else "with drafts", mode="lines+markers",
            line={"color": colours[i % len(colours)], "width": 2},
            hovertemplate="%{x:,} at once: %{y:.2f} times as fast",
        )  # fmt: skip
    most = max((n for _, worth in worths for n in worth.by_batch), default=1)
    figure.add_scatter(
        x=[1, most], y=[1, 1], name="no gain", mode="lines", line={"color": look.GREY, "dash": "dash", "width": 1.5},
        hoverinfo="skip",
    )  # fmt: skip
    if batch and batch >= 1 and len(worths) == 1:
        here = speedup_at(worths[0][1], batch)
        figure.add_scatter(
            x=[batch], y=[here], name="this run's mean batch", mode="markers",
            marker={"color": look.ORANGE, "size": 12, "symbol": "diamond"},
            hovertemplate="%{x:.4~g} at once: %{y:.2f} times as fast",
        )  # fmt: skip
    figure.update_layout(
        xaxis=look.scaled(1, max(most, 2), "sequences that decode at once"),
        yaxis={"title": {"text": "times as fast"}, "range": [0, 1.08 * max(values)]},
    )
    return figure
