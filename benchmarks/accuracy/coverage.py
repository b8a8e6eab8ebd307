"""Do the intervals hold what was measured? By dense and MoE models, and by few and many clients."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.accuracy import silicon
from calibrate.uncertainty import LEVEL
from servecast.intervals import predict_intervals
from servecast.scenario import Scenario
from servecast.setup import set_up

EVERY = 3  # of the rows that are known well enough; all of them take minutes
FEW = 8  # clients
METRICS = {"TTFT": ("mean_ttft_ms", "silicon_ttft_ms"), "TPOT": ("mean_tpot_ms", "silicon_tpot_ms")}


@dataclass(frozen=True, slots=True)
class Coverage:
    """Of `points` measured values of one metric, the share within the stated interval, and the median of half its width
    over its middle."""

    models: str
    load: str
    metric: str
    held: float
    half_width: float
    points: int


def coverages(reference: Path) -> list[Coverage]:
    """A row a stratum and metric."""
    found: dict[tuple[str, str, str], list[tuple[bool, float]]] = {}
    rows = [(row, known) for row, known, why in silicon.judged(reference) if known and not why and not known.assumed]
    for row, known in rows[::EVERY]:
        scenario = Scenario.model_validate({"name": "coverage", **silicon.scenario(row, known)})
        sure = predict_intervals(set_up(scenario))
        models = "MoE" if "MiniMax" in row["model_path"] else "dense"
        load = f"up to {FEW} clients" if row["concurrency"] <= FEW else f"more than {FEW}"
        for metric, (ours, theirs) in METRICS.items():
            low, high = sure.of(ours) or (np.nan, np.nan)
            held = low <= row[theirs] <= high
            found.setdefault((models, load, metric), []).append((held, (high - low) / (high + low)))
    return [
        Coverage(*key, float(np.mean([h for h, _ in pairs])), float(np.median([w for _, w in pairs])), len(pairs))
        for key, pairs in sorted(found.items())
    ]


def section(found: list[Coverage]) -> str:
    """Markdown."""
    lines = ["| models | load | metric | held | half-width, median | points |", "| --- | --- | --- | --- | --- | --- |"]
    lines += [
        f"| {c.models} | {c.load} | {c.metric} | {100 * c.held:.0f} % | {100 * c.half_width:.0f} % | {c.points} |"
        for c in found
    ]
    return "\n".join(
        [f"Of the serving points above, every third: how many lie in the {100 * LEVEL:.0f} % interval.", "", *lines]
    )
