"""A scenario's `host:` part from measurements of the deployment: what is fitted to what, and errors of the rest.

Serving runs are simulated with the candidates (`anchor_runs`), an engine's own steps are priced (`anchor_steps`). The
fit is `calibrate/anchor.py`; `points.py` simulates, and compares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from calibrate.anchor import PROBE, Anchor, Estimate, Floats, Scalar, Values, fit_anchor
from calibrate.anchor_steps import KINDS, Steps, recorded_steps
from servecast.anchoring.points import ENOUGH, STATS, Error, Point, factor_of, point_replay
from servecast.conformance.cli import contradictions
from servecast.errors import ServecastError
from servecast.scenario import load_scenario
from servecast.setup import Setup, set_up

if TYPE_CHECKING:
    from calibrate.observe.steps import ObservedRun
    from reports.measured import MeasuredRun

SERVING = ("request", "step", "per_sequence", "bubble", "kernels")
STEPS = ("step", "per_sequence", "bubble", "kernels")
TIMES_SPREAD = log(2.5)
"""Standard deviation of the logarithm of a preset's time, before any data: machines differ by such factors."""
KERNELS_SPREAD = {"profile": 0.15, "datasheet": 0.4}
"""Of the factor on kernels. Sums of a profile's kernels are within 6 % of whole steps where that is known
(docs/calibration.md), and clocks and engine versions differ. A profile of a CPU is another CPU's: as a datasheet."""
REPEATS, ALIKE = 4, 0.5
"""Fits at most, and the change of the noise (its logarithm) that needs no further one."""
FOLDS = 5
"""Of several runs each is left out of a fit once: alone, or, of many, with every fifth."""
MEASURE = (
    "measure a run at low concurrency (1 to 4), which tells request and step, and one near saturation, which tells "
    "kernels, and give both; or record the engine's steps (--steps)"
)
RECORD = "record steps under a load that varies: of few and of many sequences, of short and of long prompts"


@dataclass(frozen=True, slots=True)
class Anchored:
    """What an anchor found. `errors` are of points that the fit did not see where `unseen`; `checked` says which."""

    anchor: Anchor
    heads: tuple[str, ...]
    errors: tuple[Error, ...]
    unseen: bool
    checked: str
    notes: tuple[str, ...]

    @property
    def host(self) -> dict[str, str | float]:
        """What was told, as a scenario's `host:` has it."""
        told = {each.scalar.name: each.value for each in self.anchor.estimates if each.told}
        return {name: float(f"{v:.4g}") if name == "kernels" else f"{1e3 * v:.4g}ms" for name, v in told.items()}

    @property
    def signed(self) -> bool:
        """Whether errors have signs; those of steps are absolute."""
        return self.heads == STATS

    @property
    def better(self) -> bool:
        """Whether the errors became smaller, all in all."""
        pairs = [pair for each in self.errors for pair in zip(each.before, each.after, strict=True)]
        return sum(abs(log(1 + a)) - abs(log(1 + b)) for b, a in pairs if a is not None and b is not None) < 0


def anchor_runs(path: Path, runs: Mapping[str, MeasuredRun], done: Callable[[], None] = lambda: None) -> Anchored:
    """Fit what the serving runs (by name) tell of `request`, `step`, `per_sequence` and `kernels`.

    Errors are of runs that were left out of a fit; of one run with requests, of its second half after a fit to the
    first. `done()` is called after every simulation. Raises ServecastError for whatever cannot be compared or told.
    """
    points, problems = [], []
    for name, run in runs.items():
        try:
            points.append(Point(name, *point_replay(path, run), done))
        except ServecastError as error:
            problems += [p if run.source in p or name in p else f"{name}: {p}" for p in error.problems]
    if problems:
        raise ServecastError(*dict.fromkeys(problems))
    setup = points[0].setup
    base, scalars = _base(setup), _scalars(setup, SERVING, stay=("bubble",))
    unseen = len(points) > 1 or points[0].halve()
    anchor = _or_refuse(_fit_points(points, base, scalars), MEASURE)
    if len(points) > 1:
        others = [
            _fit_points([p for k, p in enumerate(points) if k % FOLDS != i], base, scalars)
            for i in range(min(FOLDS, len(points)))
        ]
        errors = [e for i, p in enumerate(points) for e in p.compared(base, base | others[i % FOLDS].values)]
        checked = f"each of the {len(points)} runs, predicted by a fit without it"
    else:
        errors = [*points[0].compared(base, base | anchor.values)]
        checked = "the second half of the requests, after a fit to the first half" if unseen else "what was fitted to"
    return Anchored(anchor, STATS, tuple(errors), unseen, checked, _notes(points))


def anchor_steps(path: Path, run: ObservedRun) -> Anchored:
    """Fit what the first half of an engine's own steps tells of `step`, `per_sequence`, `bubble` and `kernels`.

    Errors are of the second half. Raises ServecastError for steps that the scenario's engine cannot have made.
    """
    setup = set_up(load_scenario(path))
    base, scalars = _base(setup), _scalars(setup, STEPS)
    steps = recorded_steps(run, setup.pool.model, setup.pool.layout, setup.pool.engine, setup.pool.prices)
    if len(steps.seconds) < ENOUGH:
        raise ServecastError(f"{run.path}: only {len(steps.seconds)} steps; record at least {ENOUGH}, under load")
    steps = replace(steps, kernels_s=steps.kernels_s / base["kernels"])
    first = np.arange(len(steps.seconds)) < len(steps.seconds) // 2
    seen, rest = steps.part(first), steps.part(~first)
    anchor = _or_refuse(seen.fit(base, scalars), RECORD)
    values = base | anchor.values
    errors = tuple(_step_errors(rest, base, values))
    notes = [*contradictions(run, setup), *run.notes, *_prefill(seen, values, scalars)]
    checked = "the second half of the steps, after a fit to the first half"
    return Anchored(anchor, ("median", "p90"), errors, True, checked, tuple(notes))


def _base(setup: Setup) -> dict[str, float]:
    """What the scenario has now, by its own word or the preset's: seconds, and the factor on kernels."""
    if setup.scenario.host.extras:
        raise ServecastError(
            "host.extras: the measurements hold these times already, and would count them twice; take them out, and "
            "anchor without them"
        )
    host, kind = setup.pool.engine.host, "async" if setup.pool.engine.async_scheduling else "sync"
    return {
        "request": setup.pool.engine.front_end.request_s,
        "step": getattr(host, f"{kind}_base_s"),
        "per_sequence": getattr(host, f"{kind}_per_sequence_s"),
        "bubble": host.bubble_s,
        "kernels": factor_of(setup),
    }


def _scalars(setup: Setup, names: Sequence[str], stay: Sequence[str] = ()) -> list[Scalar]:
    """What can be fitted: no time that the scenario sets to 0, no bubble of a synchronous engine."""
    base, known = _base(setup), setup.pool.prices.provenance["kind"] == "profile" and setup.pool.gpu.id != "cpu"
    spread = KERNELS_SPREAD["profile" if known else "datasheet"]
    out = []
    for name in names:
        if name == "kernels":
            out.append(Scalar(name, base[name], spread, 0.101, 9.9))
        elif base[name] > 0 and (name != "bubble" or setup.pool.engine.async_scheduling):
            limits = min(1e-6, base[name]), max(1.0, base[name])
            out.append(Scalar(name, base[name], TIMES_SPREAD, *limits, stays=name in stay))
    return out


def _fit_points(points: Sequence[Point], base: Values, scalars: Sequence[Scalar]) -> Anchor:
    """The fit to these runs, with the noise near its result: far from it, as in an overload that never was, figures
    are far steeper and requests scatter more."""
    kernels = next(scalar for scalar in scalars if scalar.name == "kernels")

    def noise(at: Values) -> Floats:
        probe = {**at, "kernels": at["kernels"] * exp(PROBE * kernels.spread)}
        return np.concatenate([point.noise(at, probe) for point in points])

    now = noise(base)
    for _ in range(REPEATS):
        anchor = fit_anchor(lambda v: np.concatenate([p.errors({**base, **v}) for p in points]), now, scalars)
        before, now = now, noise({**base, **anchor.values})
        if np.abs(np.log(now / before)).max(initial=0) < ALIKE:
            break
    return anchor


def _notes(points: Sequence[Point]) -> tuple[str, ...]:
    """What is to be known of the runs, each said once."""
    of: dict[str, list[str]] = {}
    for point in points:
        for note in point.notes:
            of.setdefault(note, []).append(point.name)
    return tuple(f"{', '.join(names)}: {note}" for note, names in of.items())


def _or_refuse(anchor: Anchor, measure: str) -> Anchor:
    """The anchor, unless nothing was told on its own; `measure` says what would."""
    shared = {each.like for each in anchor.estimates}
    if any(each.told and each.scalar.name not in shared for each in anchor.estimates):
        return anchor
    why = "; ".join(f"{each.scalar.name}: {reason(each)}" for each in anchor.estimates if not each.told)
    raise ServecastError(f"this cannot tell host times from kernels ({why}); {measure}")


def reason(estimate: Estimate) -> str:
    """Why a scalar was not told."""
    if estimate.scalar.stays:
        return "only --steps tells it"
    return f"cannot be told from {estimate.like} here" if estimate.like else "hardly changes what was measured"


def _step_errors(steps: Steps, before: Values, after: Values) -> Iterator[Error]:
    """Median and p90 of the absolute errors, of all steps and kind by kind."""
    offs = [np.abs(steps.predicted(values) / steps.seconds - 1) for values in (before, after)]
    for i, kind in enumerate((*KINDS, "all")):
        rows = (steps.kind == i) | (kind == "all")
        if count := int(rows.sum()):
            first, then = (tuple(map(float, np.percentile(off[rows], (50, 90)))) for off in offs)
            yield Error(f"{kind} steps", f"{count:,}", first, then)


def _prefill(steps: Steps, values: Values, scalars: Sequence[Scalar]) -> Iterator[str]:
    """Says so where prompts and decodes clearly need factors of their own, which a scenario does not have."""
    there = [replace(scalar, default=values[scalar.name]) for scalar in scalars]
    apart = Scalar("prefill", 1.0, KERNELS_SPREAD["profile"], 0.2, 5.0)
    found = {each.scalar.name: each for each in steps.fit(values, [*there, apart]).estimates}
    if found["prefill"].told and abs(log(found["prefill"].value)) > 2.58 * found["prefill"].sd:
        decode = found["kernels"].value
        yield (
            f"steps with mostly prompt tokens alone say kernels {decode * found['prefill'].value:.3g}, the others "
            f"{decode:.3g}; host.kernels is one factor for both"
        )
