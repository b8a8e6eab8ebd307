"""The verb `compare`: scenarios in; every figure of each, with the same requests for all, and what differs out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from calibrate.uncertainty import LEVEL
from reports.comparing.facts import Class, Compared, Ran
from servecast.comparing.judge import lines_of, steady_of, trim_of
from servecast.comparing.observe import observe, tasks_of
from servecast.comparing.scenarios import Candidate, candidates, changes, fingerprint, limits
from servecast.errors import ServecastError
from servecast.setup import Setup
from servecast.sweeping.backends import on_cores
from servecast.sweeping.runs import DONE, Row

SEEDS = 5
MAX_SEEDS = 1000
SAME_COURSE = "seeds change nothing about the requests, which come from a recording or a fixed list: one run a scenario"
ONE_SEED = "one seed was asked for: one run a scenario"


def compare(
    scenarios: str | Path | Sequence[str | Path],
    vary: Iterable[str] | Mapping[str, Any] = (),
    *,
    overrides: Iterable[str] | Mapping[str, object] = (),
    seeds: int = SEEDS,
    intervals: int = 0,
    workers: int | None = None,
    told: Callable[[int, int], None] = lambda done, total: None,
) -> Compared:
    """Run scenario files, or one at every value of what is varied, under the same `seeds` seeds (the first one's own
    and those above it), and compare each with the first.

    `vary` as in `sweep`; `overrides` go for all. A difference is better or worse where its 95 % interval over seeds, of
    differences paired by seed, excludes 0. Where there is one run a scenario, the interval is over sections of it. With
    `intervals`, so many draws of the model's error are run under the first seed, the same for all scenarios, and the
    difference has to be on one side of 0 in the central 80 % of them too. Scenarios with other requests are not ranked.
    `workers` runs at a time (one a core); `told` hears how many of how many runs are done.

    A scenario that cannot run is in `failed`. Raises ServecastError with every mistake, and where fewer than two ran.
    """
    if not 1 <= seeds <= MAX_SEEDS:
        raise ServecastError(f"--seeds: {seeds:,} is not a number of seeds from 1 to {MAX_SEEDS:,}")
    if isinstance(scenarios, str | Path):
        scenarios = [scenarios]
    asked = candidates(scenarios, [vary] if isinstance(vary, str) else vary, overrides)
    first_seed = _first_seed(asked)
    setups, failed = _set_up(asked, first_seed)
    there = list(setups)
    prints = {i: fingerprint(setup) for i, setup in setups.items()}
    one_course = ONE_SEED if seeds == 1 else ""
    if seeds > 1 and all(fingerprint(asked[i].set_up(first_seed + 1)) == prints[i] for i in there):
        one_course, seeds = SAME_COURSE, 1
    used = tuple(range(first_seed, first_seed + seeds))
    rows = _run([asked[i] for i in there], used, bool(one_course), intervals, workers, told)
    runs: dict[int, list[Row]] = {}
    drawn: dict[int, list[Mapping[str, Any]]] = {}
    for n, i in enumerate(there):
        mine = sorted((row for row in rows if row["point"] == n), key=lambda row: int(row["seed"]))
        if wrong := [row for row in mine if row["status"] != DONE]:
            failed.append((asked[i].label, f"seed {wrong[0]['seed']}: {wrong[0]['error']}"))
            continue
        runs[i] = [row for row in mine if "figures" in row]
        drawn.update((i, row["under_error"]) for row in mine if "under_error" in row)
    _at_least_two(runs, failed)
    first = next(iter(runs))
    alike = len({prints[i] for i in runs}) == 1
    unlike = set[str]()
    if not alike:
        from reports.comparing.facts import METRICS

        unlike = {metric.key for metric in METRICS}
    elif any(limits(setups[i]) != limits(setups[first]) for i in runs):
        unlike = {"request_goodput"}
    trimmed = trim_of(runs)
    return Compared(
        title=" and ".join([", ".join(asked[i].label for i in list(runs)[:-1]), asked[list(runs)[-1]].label]),
        ran=tuple(_ran(asked[i].label, setups[first], setups[i], rows) for i, rows in runs.items()),
        failed=tuple(failed),
        lines=tuple(lines_of(runs, drawn, frozenset(unlike))),
        steady=() if trimmed is None else tuple(steady_of(runs, trimmed, frozenset(unlike))),
        trimmed=trimmed,
        alike=alike,
        seeds=used,
        one_course=one_course,
        requests=len(setups[first].requests.trace),
        draws=intervals,
        level=LEVEL,
        version=version("servecast"),
    )


def _first_seed(asked: list[Candidate]) -> int:
    seed = asked[0].base.file({}).data.get("seed", 0)
    if not isinstance(seed, int):
        asked[0].base.scenario(asked[0].point)  # says what is wrong with it
    return int(seed)


def _set_up(asked: list[Candidate], seed: int) -> tuple[dict[int, Setup], list[tuple[str, str]]]:
    """Those that can run, and what is wrong with the others."""
    found, failed = {}, []
    for i, candidate in enumerate(asked):
        try:
            found[i] = candidate.set_up(seed)
        except ServecastError as error:
            failed.append((candidate.label, "\n".join(error.problems)))
    _at_least_two(found, failed)
    return found, failed


def _at_least_two(there: Mapping[int, Any], failed: list[tuple[str, str]]) -> None:
    if len(there) < 2:
        problems = dict.fromkeys(problem for _, error in failed for problem in error.split("\n"))
        raise ServecastError(*problems, "fewer than two scenarios can run, so there is nothing to compare")


def _run(
    asked: list[Candidate],
    seeds: Sequence[int],
    one_course: bool,
    draws: int,
    workers: int | None,
    told: Callable[[int, int], None],
) -> list[Row]:
    tasks = tasks_of(len(asked), seeds, one_course, draws)
    found: list[Row] = []
    told(0, len(tasks))
    with closing(on_cores(partial(observe, asked), tasks, workers)) as rows:
        for row in rows:
            found.append(row)
            told(len(found), len(tasks))
    return found


def _ran(label: str, first: Setup, setup: Setup, rows: Sequence[Row]) -> Ran:
    differs = changes(first, setup)
    piled = [row for row in rows if row["saturated"]]
    keys = [k for k, v in rows[0]["figures"].items() if all(isinstance(r["figures"].get(k), int | float) for r in rows)]
    return Ran(
        label=label,
        setup=rows[0]["setup"],
        changes=differs,
        same=not differs,
        saturated=len(piled),
        undecided=sum(row["undecided"] for row in rows),
        verdict=(piled or rows)[0]["verdict"],
        figures={key: _mean([row["figures"][key] for row in rows]) for key in keys},
        spent={
            metric: {part: _mean([row["spent"][metric][part] for row in rows]) for part in parts}
            for metric, parts in rows[0]["spent"].items()
            if all(metric in row["spent"] for row in rows)
        },
        classes={
            name: Class(**{key: _mean_of([row["classes"][name][key] for row in rows]) for key in found})
            for name, found in rows[0]["classes"].items()
        },
        busy=(_mean([row["busy"][0] for row in rows]), _mean([row["busy"][1] for row in rows])),
        curves={key: np.mean([row["curves"][key] for row in rows], axis=0) for key in rows[0]["curves"]},
        series=rows[0]["series"],
    )


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))


def _mean_of(values: Sequence[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return _mean(there) if len(there) == len(values) else None
