"""The verb `diagnose`: a scenario and what is wrong with it in; which cause takes most of that away out.

    found = diagnose("today.yaml", symptoms=["p99 ttft = 4s"])
    found.verdict; found.likely[0].words; found.likely[0].sets

It knows no causes (`catalogue.py`) and no figures (`symptoms.py`): it tries, pairs by seed, and ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calibrate.options import family
from reports import words
from reports.diagnosing.facts import Diagnosed, RuledOut
from reports.diagnosing.words import figures_of, shows_instead, to_compare
from servecast.comparing.scenarios import fingerprint
from servecast.diagnosing.catalogue import CAUSES
from servecast.diagnosing.evidence import Evidence
from servecast.diagnosing.otherwise import explaining, others
from servecast.diagnosing.otherwise import told as sentences
from servecast.diagnosing.rank import Idea, best_of, judged, promising
from servecast.diagnosing.symptoms import of_file, of_run, parse_symptoms, value_of
from servecast.diagnosing.trial import Court, attempt, beginning, seen
from servecast.errors import ServecastError
from servecast.exporting import saved
from servecast.run import simulate
from servecast.sweeping.backends import on_cores
from servecast.sweeping.runs import DONE, Base, Row, Task
from servecast.validation.checks import warnings_of
from servecast.validation.replay import Replay, replay_of
from servecast.yamlfile import dump_yaml

if TYPE_CHECKING:
    from reports.measured import MeasuredRun
    from servecast.run import Result
    from servecast.setup import Setup

SEEDS, MAX_SEEDS = 5, 100
FEW = 100
"""Fewer requests than these have no p99 worth the name."""
ONE_COURSE = "the requests are recorded or fixed: one course, so nothing is said of chance"
ONE_SEED = "one seed: nothing is said of chance"


def diagnose(
    scenario: str | Path,
    overrides: Iterable[str] | Mapping[str, object] = (),
    *,
    measured: MeasuredRun | None = None,
    symptoms: Iterable[str] = (),
    seeds: int = SEEDS,
    workers: int | None = None,
    told: Callable[[int, int], None] = lambda done, total: None,
) -> Diagnosed:
    """Say why the deployment of a scenario file, or of the folder of a saved result, behaves badly.

    `symptoms` (`p99 ttft = 4s`, `gpu idle = 40 %`: see docs/diagnose.md) are what is seen on the real server; without
    them, what a `measured` run shows, whose requests are then simulated; without that, the percentiles that miss the
    scenario's SLO, and work that piles up. Every cause that the numbers of the simulated run allow is taken away, one
    at a time, on the same requests: under the first seed every change, under all `seeds` the best of each cause.

    Raises ServecastError with every mistake, and where there is nothing to look at: no request, or one.
    """
    if not 1 <= seeds <= MAX_SEEDS:
        raise ServecastError(f"--seeds: {seeds:,} is not a number of seeds from 1 to {MAX_SEEDS}")
    base = _base(scenario, overrides)
    whole, replay = Court(base, None, ()).set_up({}), None
    if measured is not None:
        replay = replay_of(measured, whole)
        whole = replay.setup
    setup = beginning(whole)
    if len(setup.requests.trace) < 2:
        raise ServecastError(
            f"{scenario}: one request; a diagnosis is of requests that share a server: give more, or look at one with "
            "`servecast explain`"
        )
    asked = parse_symptoms([symptoms] if isinstance(symptoms, str) else symptoms, setup, measured)
    result = simulate(setup)
    if not asked:
        asked = of_file(measured, setup) if measured is not None else of_run(setup, result)
    asked = tuple(replace(symptom, simulated=value_of(symptom, setup, result)) for symptom in asked)
    hidden = tuple(symptom for symptom in asked if not symptom.shown)
    if measured is not None and not symptoms and not _limited(setup):
        asked = hidden or asked  # nobody says what is wrong: first of all what is unlike the simulation
    shown = tuple(symptom for symptom in asked if symptom.shown)
    recorded = None if replay is None or replay.rows is None else whole.requests
    court = Court(base, recorded, shown)
    found = Diagnosed(
        title=setup.scenario.name,
        setup=words.setup(result),
        verdict="healthy" if not asked else "outside",
        symptoms=asked,
        tried=(),
        ruled_out=(),
        figures=tuple(figures_of(result)),
        undecided=result.saturation.undecided,
        asked="" if not _limited(setup) else "simulated" if measured is None else "measured",
        instead=tuple(shows_instead(result)),
        like=(),
        compare=(),
        notices=tuple(_notices(result, measured, replay)),
        requests=len(setup.requests.trace),
        of=len(whole.requests.trace),
        runs=1,
        seeds=(setup.scenario.seed,),
        one_course="",
        engine=family(setup.pools[0].engine.engine)["title"],
        version=version("servecast"),
    )
    if not asked:
        return found
    if not shown:
        return _outside(found, court, setup, result, workers, told)
    return _tried(found, court, setup, result, seeds, workers, told)


def _limited(setup: Setup) -> bool:
    return bool(setup.scenario.slo.limits() or any((setup.requests.slo or {}).values()))


def _base(scenario: str | Path, overrides: Iterable[str] | Mapping[str, object]) -> Base:
    """A scenario file, or that of a saved result."""
    folder = Path(scenario)
    if not folder.is_dir():
        return Base.of(scenario, overrides)
    run = saved(folder)
    if not run.summary.get("completed"):
        raise ServecastError(f"{folder / 'summary.json'}: no request finished in that run; give its scenario instead")
    text = dump_yaml(run.manifest["scenario"])
    given = Base.of(folder / "manifest.json", overrides)
    return replace(given, text=text)


def _notices(result: Result, measured: MeasuredRun | None, replay: Replay | None) -> Iterable[str]:
    yield from words.notices(result, result.summary())
    if len(result.requests) < FEW:
        yield f"Of {words.requests(len(result.requests))}, p99 is hardly more than the slowest one."
    if measured is not None and replay is not None:
        yield replay.said
        yield from (f"{text[:1].upper()}{text[1:]}." for text in warnings_of(measured, replay))


def _outside(
    found: Diagnosed, court: Court, setup: Setup, result: Result, workers: int | None, told: Callable[[int, int], None]
) -> Diagnosed:
    """What would make the simulation show what is seen, and what else there is to look at."""
    cluster = court.base.file({}).data["cluster"]
    changes = [
        change
        for i in range(len(setup.pools))
        for change in others(Evidence(setup, result, i, found.symptoms, cluster), court.requests is not None)
    ]
    tasks = [Task(f"{n}-{found.seeds[0]}", n, found.seeds[0], {}, {}) for n in range(len(changes))]
    rows = _run(replace(court, symptoms=found.symptoms), [change.point for change in changes], tasks, workers, told)
    tried = [(change, rows[n, found.seeds[0]]) for n, change in enumerate(changes)]
    like = tuple(sentences(found.symptoms, explaining(found.symptoms, tried)))
    return replace(found, like=like, compare=tuple(to_compare(found)), runs=1 + len(tasks))


def _tried(
    found: Diagnosed,
    court: Court,
    setup: Setup,
    result: Result,
    seeds: int,
    workers: int | None,
    told: Callable[[int, int], None],
) -> Diagnosed:
    first = setup.scenario.seed
    one_course = ONE_SEED if seeds == 1 else ""
    if seeds > 1 and (court.requests is not None or _alike(court, setup, first + 1)):
        one_course, seeds = ONE_COURSE, 1
    ideas, ruled_out = _ideas(court, setup, result)
    points: list[Mapping[str, Any]] = [{}, *(change.point for idea in ideas for change in idea.changes)]
    before: list[Row] = [{"status": DONE} | seen(setup, result, court.symptoms)]
    tasks = [Task(f"{number}-{first}", number, first, {}, {}) for number in range(1, len(points))]
    rows = _run(court, points, tasks, workers, told)
    kept, number = [], 1
    for idea in ideas:
        mine = [rows[number + i, first] for i in range(len(idea.changes))]
        number += len(mine)
        best, why = best_of(idea, before[0], mine, court.symptoms, setup.scenario.slo.limits())
        if best is None:
            ruled_out.append(replace(idea.ruled_out(f"{idea.why}, but cannot be tried: {why}"), possible=True))
        else:
            kept.append((idea, best, number - len(mine) + best))
    worth = [n for idea, best, n in kept if promising(idea.changes[best], before[0], rows[n, first], court, setup)]
    others = range(first + 1, first + seeds) if worth else range(0)
    more = [Task(f"{n}-{seed}", n, seed, {}, {}) for seed in others for n in (0, *worth)]
    rows |= _run(court, points, more, workers, told)
    lost = [seed for seed in others if rows[0, seed]["status"] != DONE]
    used = [seed for seed in others if seed not in lost]
    before += [rows[0, seed] for seed in used]
    tried = []
    for idea, best, n in kept:
        seen_under = (first, *used) if n in worth else (first,)
        pairs = [(b, rows[n, seed]) for b, seed in zip(before, seen_under, strict=False)]
        tried.append(judged(idea, best, pairs, court, setup))
    tried.sort(key=lambda cause: (not cause.likely, -cause.score))
    return replace(
        found,
        verdict="found" if any(cause.likely for cause in tried) else "unexplained",
        tried=tuple(tried),
        ruled_out=tuple(ruled_out),
        runs=1 + len(tasks) + len(more),
        seeds=(first, *used),
        one_course=one_course,
    )


def _alike(court: Court, setup: Setup, seed: int) -> bool:
    """Whether another seed gives the same requests."""
    return fingerprint(beginning(court.set_up({}, seed))) == fingerprint(setup)


def _ideas(court: Court, setup: Setup, result: Result) -> tuple[list[Idea], list[RuledOut]]:
    """The causes that can be, and those that cannot, of every pool."""
    cluster = court.base.file({}).data["cluster"]
    ideas, ruled_out = list[Idea](), list[RuledOut]()
    for i, pool in enumerate(setup.pools):
        evidence = Evidence(setup, result, i, court.symptoms, cluster)
        name = pool.name if len(setup.pools) > 1 else ""
        for cause in CAUSES:
            there, why = cause.there(evidence)
            changes = tuple(cause.changes(evidence)) if there else ()
            idea = Idea(cause, name, pool.engine.engine, why, changes)
            if changes:
                ideas.append(idea)
            elif there:
                ruled_out.append(replace(idea.ruled_out(f"{why}, but no setting is left to change"), possible=True))
            else:
                ruled_out.append(idea.ruled_out(why))
    return ideas, ruled_out


def _run(
    court: Court,
    points: list[Mapping[str, Any]],
    tasks: list[Task],
    workers: int | None,
    told: Callable[[int, int], None],
) -> dict[tuple[int, int], Row]:
    """Number and seed -> what became of it."""
    found: dict[tuple[int, int], Row] = {}
    if tasks:
        told(0, len(tasks))
        with closing(on_cores(partial(attempt, court, points), tasks, workers)) as rows:
            for row in rows:
                found[row["point"], row["seed"]] = row
                told(len(found), len(tasks))
    return found
