"""One run of a sweep: a scenario's text and a few overrides in, one flat row out, on whatever machine."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from servecast.sweeping.axes import Axis, Point, label
from servecast.yamlfile import YamlFile, override, parse_yaml, read_text

if TYPE_CHECKING:
    from servecast.scenario import Scenario

Row = dict[str, Any]
DONE, INVALID, FAILED = "done", "invalid", "failed"
"""What became of a run: it has its figures; its scenario cannot be (`error` says why); it was begun, and broke."""


@dataclass(frozen=True, slots=True)
class Base:
    """The scenario that all runs begin with: a file's text, its path and the folder in which the command was typed
    (absolute, since files are read from there), and `overrides` on top (`key=value`)."""

    text: str
    path: Path
    here: Path
    overrides: tuple[str, ...] = ()

    @classmethod
    def of(cls, path: str | Path, overrides: Iterable[str] | Mapping[str, object] = ()) -> Base:
        """The scenario file at `path`. Raises ServecastError where there is none."""
        if isinstance(overrides, Mapping):
            overrides = [f"{key}={json.dumps(value, default=str)}" for key, value in overrides.items()]
        elif isinstance(overrides, str):
            overrides = [overrides]
        return cls(read_text(Path(path)), Path(path).absolute(), Path.cwd(), tuple(overrides))

    @property
    def first_seed(self) -> int:
        """The scenario's own."""
        return int(_parsed(self).data.get("seed", 0))

    def file(self, point: Mapping[str, Any]) -> YamlFile:
        """What a run's scenario file would hold. Raises ServecastError."""
        known = _parsed(self)
        file = replace(known, data=deepcopy(known.data), places=dict(known.places))
        override(file, point)
        return file

    def scenario(self, point: Mapping[str, Any]) -> Scenario:
        """The scenario of a run, checked. Raises ServecastError."""
        from servecast.scenario import scenario_of

        return scenario_of(self.file(point))


@lru_cache(maxsize=2)
def _parsed(base: Base) -> YamlFile:
    """A worker is asked for the same one again and again."""
    file = parse_yaml(base.text, base.path, base.here)
    override(file, base.overrides)
    return file


@dataclass(frozen=True, slots=True)
class Task:
    """A run that is to be done. `id` is a hash of all that it follows from, `number` counts points, `columns` has the
    point's values as they stand in the table. `draw` counts those of the model's error; 0 is the forecast itself."""

    id: str
    number: int
    seed: int
    point: Point
    columns: Mapping[str, Any]
    draw: int = 0


def columns_of(axes: Iterable[Axis]) -> dict[str, type]:
    """Key -> the type of its column: int, float or bool where all values are, else text."""
    found: dict[str, type] = {}
    for axis in axes:
        for key, values in zip(axis.keys, zip(*axis.settings, strict=True), strict=True):
            kinds = {type(value) for value in values}
            found[key] = kinds.pop() if len(kinds) == 1 else float if kinds == {int, float} else str
            if found[key] not in (int, float, bool):
                found[key] = str
    return found


def tasks_of(
    base: Base, axes: tuple[Axis, ...], points: Iterable[Point], seeds: Iterable[int], draws: int = 0
) -> tuple[list[Task], int]:
    """A task for every point and seed, and then for every draw of them, each only once; and how many points came again.
    A sweep that is stopped has had its first draws for all points."""
    types, seeds = columns_of(axes), tuple(seeds)
    beginning = json.dumps([version("servecast"), _parsed(base).data], default=str, sort_keys=True)
    begun = sha256(beginning.encode())

    def id_of(point: Point, *which: int) -> str:
        # Which changes are made to which scenario says what it comes to, without the work of resolving it.
        whole = begun.copy()
        whole.update(json.dumps([list(point.items()), *which], default=str).encode())
        return whole.hexdigest()[:16]

    found: dict[str, Task] = {}
    again = 0
    for number, point in enumerate(points):
        columns = {key: label(value) if types[key] is str else types[key](value) for key, value in point.items()}
        fresh = False
        for seed in (point["seed"],) if "seed" in point else seeds:
            task = Task(id_of(point, seed), number, seed, point, columns)
            fresh |= task.id not in found
            found.setdefault(task.id, task)
        again += not fresh
    tasks = list(found.values())
    for draw in range(1, draws + 1):
        tasks += [replace(task, id=id_of(task.point, task.seed, draw), draw=draw) for task in found.values()]
    return tasks, again


def run(base: Base, task: Task) -> Row:
    """Simulate, and say what came of it; whatever goes wrong is in the row."""
    from servecast.errors import ServecastError
    from servecast.intervals import under
    from servecast.run import simulate
    from servecast.setup import set_up

    started, row, status = time.perf_counter(), _begun(task), INVALID
    try:
        setup = set_up(base.scenario(task.point | {"seed": task.seed}))
        resolved = json.dumps(setup.resolved(), default=str, sort_keys=True)
        status = FAILED
        if task.draw:  # the same one for all seeds
            setup = under(setup, task.draw, base.first_seed)
        result = simulate(setup)
        row |= {"status": DONE, "scenario": sha256(resolved.encode()).hexdigest()[:16]}
        row |= figures(result.summary()) | {"undecided": result.saturation.undecided}
    except ServecastError as error:
        row |= {"status": status, "error": "\n".join(error.problems)}
    except Exception as error:  # the other runs go on
        row |= {"status": FAILED, "error": f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"}
    return row | {"wall_s": time.perf_counter() - started}


def lost(task: Task, why: str) -> Row:
    """The row of a run of which nothing came back."""
    return _begun(task) | {"status": FAILED, "error": why}


def _begun(task: Task) -> Row:
    known = {"id": task.id, "point": task.number, "seed": task.seed, "draw": task.draw}
    return known | {**task.columns, "error": None}


def figures(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a summary, and what configurations are compared by: tokens per second and GPU (GPUs count while
    their replica exists), `interactivity`, the tokens per second that the median user sees (1000 / p50 TPOT in ms), and
    the share of requests that were `unserved`: rejected, given up or failed."""
    flat = {key: value for key, value in summary.items() if value is None or isinstance(value, bool | int | float)}
    gpu_s, tpot_ms = summary["gpu_seconds"], summary["p50_tpot_ms"]
    return flat | {
        "output_throughput_per_gpu": summary["total_output_tokens"] / gpu_s if gpu_s else None,
        "interactivity": 1e3 / tpot_ms if tpot_ms else None,
        "unserved": 1 - summary["completed"] / summary["submitted"] if summary["submitted"] else None,
    }


def ignore_interrupts() -> None:
    """Ctrl-C reaches every process of a terminal; which runs end is for the one that started them to say."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def about_worker() -> str:
    """The version that a worker would run."""
    return version("servecast")
