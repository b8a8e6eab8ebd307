"""The verb `sweep`: a scenario and what is varied in, a folder with a row a run and a report out."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from reports.sweeping.points import Shown, Swept
from servecast.arguments import DRAWS, wrong_draws
from servecast.errors import ServecastError, nearest, one_of
from servecast.sweeping.axes import Axis, Sampler, axes_of, grid, label, sample
from servecast.sweeping.backends import BACKENDS, Rows, cores
from servecast.sweeping.checks import check_axes
from servecast.sweeping.runs import DONE, FAILED, INVALID, Base, Row, Task, columns_of, run, tasks_of
from servecast.sweeping.store import ROW_BYTES, Store, fingerprints

MANY = 1000
"""Above so many runs, some are timed first, and somebody may be asked."""
PILOTS = 3
REPORT_BYTES = 6e6
MAX_SEEDS = 1000


@dataclass(slots=True)
class Progress:
    """How far a sweep is: runs that are `done` of `total`, those of an earlier call (`before`) among them; how many
    `failed`, and how many had an `invalid` scenario."""

    total: int
    before: int = 0
    done: int = 0
    failed: int = 0
    invalid: int = 0

    def count(self, row: Row) -> None:
        """One more."""
        self.done += 1
        self.failed += row["status"] == FAILED
        self.invalid += row["status"] == INVALID


@dataclass(frozen=True, slots=True)
class Estimate:
    """What `runs` runs will take: seconds on one core, of which there are `cores` (None: a cluster's), and bytes on
    the disk."""

    runs: int
    core_s: float
    cores: int | None
    disk_bytes: float


def sweep(
    scenario: str | Path,
    vary: Iterable[str] | Mapping[str, Any],
    folder: str | Path,
    *,
    overrides: Iterable[str] | Mapping[str, object] = (),
    seeds: int = 1,
    intervals: int = 0,
    samples: int | None = None,
    sampler: Sampler = "latin-hypercube",
    backend: str = "local",
    workers: int | None = None,
    address: str | None = None,
    told: Callable[[Progress], None] = lambda progress: None,
    ask: Callable[[Estimate], bool] = lambda estimate: True,
) -> Swept:
    """Run the scenario file at every point of what is varied, and write rows and a report into `folder`.

    `vary`: `"engine.max_num_seqs=64,128"` or `"workload.arrivals.rate=2:20:10"` texts, or a mapping from key path to a
    list of values or the text of a range. All combinations are run, or `samples` points drawn from them, each under
    `seeds` seeds from the scenario's own upwards, the same for all points; and all that again under `intervals` draws
    of the model's error (`servecast.intervals`), the same for all points and seeds. What the folder has already is not
    run again. `backend` is local (with so many `workers`, by default one a core), dask or ray (at `address`, or a
    cluster of their own on this machine). `told` hears of progress; `ask` is asked before more than a thousand runs.

    Runs that break, and points that make no valid scenario, are rows with their error. Ctrl-C ends it early, with
    `complete` False. Raises ServecastError for whatever cannot be begun, and where no run has a result.
    """
    base = Base.of(scenario, overrides)
    axes, tasks, again = _planned(base, vary, seeds, intervals, samples, sampler)
    if backend not in BACKENDS:
        raise ServecastError(f"--backend: unknown {backend!r}{nearest(backend, BACKENDS)}; {one_of(BACKENDS)}")
    facts = {
        "servecast": version("servecast"),
        "path": str(base.path),
        "text": base.text,
        "scenario": base.file({}).data,
        "vary": {axis.name: axis.text for axis in axes},
        "sample": None if samples is None else f"{samples} points, {sampler}",
        "seeds": seeds,
        "intervals": intervals,
        "files": fingerprints(base, axes),
    }
    complete = True
    with Store(Path(folder), facts, columns_of(axes)) as store:
        known = store.ids()
        todo = [task for task in tasks if task.id not in known]
        progress = Progress(len(tasks), before=len(tasks) - len(todo), done=len(tasks) - len(todo))
        told(progress)
        try:
            if len(todo) > MANY:
                todo = _asked(base, todo, store, progress, workers or (cores() if backend == "local" else None), ask)
            with closing(_rows(backend, base, todo, workers, address)) as rows:
                for row in rows:
                    store.add(row)
                    progress.count(row)
                    told(progress)
        except KeyboardInterrupt:
            complete = False
        swept = _swept(base, axes, store, len(tasks), seeds, intervals, again, complete)
        _save(swept, store)
    return swept


def _planned(
    base: Base,
    vary: Iterable[str] | Mapping[str, Any],
    seeds: int,
    intervals: int,
    samples: int | None,
    sampler: Sampler,
) -> tuple[tuple[Axis, ...], list[Task], int]:
    """Axes, runs, and how many points came twice; all that is wrong with them, before anything runs."""
    axes = axes_of(vary, sampled=samples is not None)
    if not 1 <= seeds <= MAX_SEEDS:
        raise ServecastError(f"--seeds: {seeds:,} is not a number of seeds from 1 to {MAX_SEEDS:,}")
    if intervals and intervals not in DRAWS:
        raise ServecastError(f"--intervals: {wrong_draws(intervals)}")
    if seeds > 1 and any("seed" in axis.keys for axis in axes):
        raise ServecastError("--seeds: the seed is varied too; take one of --seeds and --vary seed=...")
    points = grid(axes) if samples is None else sample(axes, samples, sampler)
    check_axes(base, axes)
    first = base.first_seed
    tasks, again = tasks_of(base, axes, points, range(first, first + seeds), intervals)
    return axes, tasks, again


def _rows(backend: str, base: Base, tasks: Sequence[Task], workers: int | None, address: str | None) -> Rows:
    if tasks:
        yield from BACKENDS[backend](base, tasks, workers, address)


def _asked(
    base: Base,
    todo: list[Task],
    store: Store,
    progress: Progress,
    cores: int | None,
    ask: Callable[[Estimate], bool],
) -> list[Task]:
    """What is left to do after a few runs that say what the others will take. Raises ServecastError where that is too
    much, or not wanted."""
    pilots = [todo[len(todo) * (2 * i + 1) // (2 * PILOTS)] for i in range(PILOTS)]
    run(base, pilots[0])  # the first one loads the modules, too
    began = time.perf_counter()
    for task in pilots:
        row = run(base, task)
        store.add(row)
        progress.count(row)
    left = len(todo) - PILOTS
    estimate = Estimate(left, (time.perf_counter() - began) / PILOTS * left, cores, ROW_BYTES * left + REPORT_BYTES)
    free = shutil.disk_usage(store.folder).free
    if free < 1.1 * estimate.disk_bytes:
        raise ServecastError(
            f"{store.folder}: {left:,} runs need about {estimate.disk_bytes / 1e6:,.0f} MB, and "
            f"{free / 1e6:,.0f} MB are free; give another --out"
        )
    if not ask(estimate):
        raise ServecastError("not started; the same command goes on with it")
    first = {task.id for task in pilots}
    return [task for task in todo if task.id not in first]


def _swept(
    base: Base,
    axes: tuple[Axis, ...],
    store: Store,
    total: int,
    seeds: int,
    intervals: int,
    again: int,
    complete: bool,
) -> Swept:
    data, kinds, rows = base.file({}).data, columns_of(axes), store.rows()
    shown = tuple(
        Shown(key, None if axis.span is not None or kinds[key] is not str else tuple(dict.fromkeys(map(label, values))))
        for axis in axes
        for key, values in zip(axis.keys, zip(*axis.settings, strict=True), strict=True)
    )
    return Swept(
        title=str(data.get("name") or base.path.stem),
        axes=shown,
        texts=tuple((axis.name, axis.text) for axis in axes),
        rows=rows.filter(rows["draw"] <= intervals),  # an earlier call may have asked for more
        total=total,
        seeds=seeds,
        draws=intervals,
        again=again,
        complete=complete,
        version=version("servecast"),
        scenario=base.text,
    )


def _save(swept: Swept, store: Store) -> None:
    from reports.sweeping.page import sweep_html

    if (swept.rows["status"] == DONE).any():
        store.save("report.html", sweep_html(swept))
    elif swept.complete:
        errors = dict.fromkeys(error for error in swept.rows["error"] if error)
        raise ServecastError(f"none of the {swept.total:,} runs has a result", *list(errors)[:10])
