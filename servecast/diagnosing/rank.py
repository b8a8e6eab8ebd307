"""From what became of changes to a ranking of causes: how much of the symptoms goes, what it costs, what it harms."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from reports.diagnosing.facts import RuledOut, Symptom, Tried
from reports.words import quantity
from servecast.diagnosing.catalogue import Cause, look
from servecast.diagnosing.remedies import Change
from servecast.diagnosing.trial import BESIDE, Court
from servecast.errors import ServecastError
from servecast.serve_lines import differing
from servecast.setup import Setup
from servecast.sweeping.axes import label
from servecast.sweeping.runs import DONE, Row
from sim.statistics import t_interval

PRICES = {"": 0.0, "bits": 0.1, "bound": 0.15, "gpus": 0.2}
"""What a change has to take away beyond one that is only a setting, as a share of the symptom: another number format
may answer otherwise, a bound is reached by nobody, and GPUs cost."""
HARM = 0.1
"""The share of the symptom that has to go for every doubling of another figure, where that is harmed."""
PILES_UP = 0.5
"""The same where work comes to pile up."""
WORTH = 0.05
"""The least share of the symptom that a cause takes away; and how much better a harsher change has to be."""
HARMED = 1.1
"""Other figures are worse from here on."""


@dataclass(frozen=True, slots=True)
class Idea:
    """A cause that can be, in a pool, with the numbers that say so and what takes it away."""

    cause: Cause
    pool: str
    engine: str
    why: str
    changes: tuple[Change, ...]

    def ruled_out(self, why: str) -> RuledOut:
        """It is not the cause."""
        return RuledOut(self.cause.name, self.cause.words, self.pool, why)


def gone(symptoms: Sequence[Symptom], before: Row, after: Row) -> float | None:
    """The share of the symptoms that a change takes away, the mean of those that were there; None where none was."""
    pairs = zip(symptoms, before["values"], after["values"], strict=True)
    there = [share for symptom, a, b in pairs if (share := symptom.gone(a, b)) is not None]
    return float(np.mean(there)) if there else None


def harms(
    symptoms: Sequence[Symptom], before: Row, after: Row, limits: Mapping[str, float]
) -> dict[str, tuple[float, float, float]]:
    """Other figures that are worse: key -> (times, before, after); not those that stay within their limit."""
    asked = {symptom.name for symptom in symptoms}
    found = {}
    for key, name in BESIDE.items():
        a, b = before["beside"][key], after["beside"][key]
        if name in asked or not a or not b:
            continue
        times = a / b if key == "output_throughput" else b / a
        limit = limits.get(key.split("_")[1])
        within = key.endswith("_ms") and limit is not None and b <= 1e3 * limit
        if times >= HARMED and not within:
            found[key] = (times, a, b)
    return found


def score(symptoms: Sequence[Symptom], change: Change, before: Row, after: Row, limits: Mapping[str, float]) -> float:
    """What a change takes away, less what it costs and harms."""
    worst = max((times for times, _, _ in harms(symptoms, before, after, limits).values()), default=1.0)
    piles_up = after["saturated"] and not before["saturated"]
    lost = max(0.0, after["unserved"] - before["unserved"])
    taken = gone(symptoms, before, after) or 0.0
    cost = PRICES[change.price] + HARM * math.log2(worst) + PILES_UP * piles_up
    return taken - cost - float(lost)


def best_of(
    idea: Idea, before: Row, rows: Sequence[Row], symptoms: Sequence[Symptom], limits: Mapping[str, float]
) -> tuple[int | None, str]:
    """The number of the gentlest change that is not clearly worse than another one; or None, and why."""
    scores = {
        i: score(symptoms, idea.changes[i], before, row, limits) for i, row in enumerate(rows) if row["status"] == DONE
    }
    if not scores:
        return None, str(rows[0]["error"])
    most = max(scores.values())
    return next(i for i, value in scores.items() if value >= most - WORTH), ""


def promising(change: Change, before: Row, after: Row, court: Court, setup: Setup) -> bool:
    """Whether a change takes enough away, for what it costs, to be tried under other seeds."""
    taken = gone(court.symptoms, before, after)
    worth = score(court.symptoms, change, before, after, setup.scenario.slo.limits())
    return taken is not None and taken >= WORTH and worth > 0


def judged(idea: Idea, best: int, pairs: Sequence[tuple[Row, Row]], court: Court, setup: Setup) -> Tried:
    """The best change of a cause: pairs of a run without it and one with it, of every seed that it was tried under, the
    first seed's first."""
    change, symptoms, limits = idea.changes[best], court.symptoms, setup.scenario.slo.limits()
    done = [(a, b) for a, b in pairs if b["status"] == DONE and gone(symptoms, a, b) is not None]
    shares = t_interval(np.array([gone(symptoms, a, b) for a, b in done]))
    scores = [score(symptoms, change, a, b, limits) for a, b in done]
    first, then = done[0]
    worse = harms(symptoms, first, then, limits)
    certain = len(pairs) == 1 or shares.excludes_zero
    return Tried(
        cause=idea.cause.name,
        words=idea.cause.words,
        pool=idea.pool,
        why=idea.why,
        change=change.words,
        sets=tuple(f"{key}={typed(value)}" for key, value in change.point.items()),
        flags=_flags(court, setup, change),
        price=change.price,
        gone=shares.mean,
        half=shares.half,
        effects=tuple(zip(first["values"], then["values"], strict=True)),
        worse=tuple((BESIDE[key], _said(key, a), _said(key, b)) for key, (_, a, b) in worse.items()),
        score=float(np.mean(scores)),
        likely=shares.mean >= WORTH and certain and float(np.mean(scores)) > 0,
        check=look(idea.cause.name, idea.engine),
    )


def _said(key: str, value: float) -> str:
    return f"{quantity(value)} {'ms' if key.endswith('_ms') else 'tokens/s'}"


def typed(value: object) -> str:
    """A value as `--set` takes it."""
    return json.dumps(value, default=str) if isinstance(value, dict | list) else label(value)


def _flags(court: Court, setup: Setup, change: Change) -> tuple[str, ...]:
    """What of the server's command line is another, in its own words."""
    try:
        different = differing(setup, court.set_up(change.point))
    except ServecastError:
        return ()
    found = []
    for each in different:
        if each.flag:
            found.append(f"{each.flag}: {_named(each.after)}, not {_named(each.before)}")
        elif each.after:
            found.append(str(each.after))
    return tuple(found)


def _named(value: object) -> str:
    return "unset" if value is None else label(value)
