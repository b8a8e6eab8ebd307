"""The verb `export`: a result, saved or not, in the formats of the tools that people plot with."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from reports import perfetto
from reports.formats import WRITERS
from reports.simulated import SimulatedRun
from servecast.errors import ServecastError, nearest, one_of
from servecast.printing import print_page
from servecast.workload import SloPart
from sim.steplog import REQUEST_COLUMNS, STEP_COLUMNS
from sim.tables import DERIVED

if TYPE_CHECKING:
    import polars as pl

    from servecast.run import Result

FORMATS = (*WRITERS, "perfetto", "pdf")
PAGE = "report.html"
FACTS = ("summary.json", "manifest.json")
TABLES: Mapping[str, set[str]] = {
    "requests.parquet": {"status", "reason", *DERIVED, *REQUEST_COLUMNS} - {"outcome"},
    "steps.parquet": set(STEP_COLUMNS),
}
"""What a result folder must have -> the columns."""
GAPS = {"id": "Int64", "since_s": "Float64", "end_s": "Float64"}


@dataclass(frozen=True, slots=True)
class Exported:
    """path: the file. notes: what is left out of it."""

    path: Path
    notes: tuple[str, ...]


def export(
    run: Result | Path | str,
    format: str,
    out: Path | str | None = None,
    window: tuple[float, float] | None = None,
) -> Exported:
    """Write a result, or the one saved in a folder, in one of FORMATS; as "pdf" any folder with a page that a command
    wrote.

    out: the file, or a folder for it; None: the folder of the result, or the current one. window: start and end in
    seconds, of format perfetto. Raises ServecastError where there is no such format, no whole result of this version
    in the folder, nothing to show, or no room.
    """
    if format not in FORMATS:
        raise ServecastError(f"unknown format {format!r}{nearest(format, FORMATS)}; formats: {one_of(FORMATS)}")
    if window is not None and format != "perfetto":
        raise ServecastError(f"a window is for format perfetto; format {format} holds whole runs: leave the window out")
    folder = Path(run) if isinstance(run, str | Path) else Path()
    if format == "pdf":
        if not isinstance(run, str | Path):
            raise ServecastError("format pdf: save the result, and give its folder")
        path = _place(folder, out, "report.pdf")
        print_page(folder / PAGE, path)
        return Exported(path, ())
    simulated = saved(folder) if isinstance(run, str | Path) else simulated_of(run)
    notes: list[str] = []
    if format == "perfetto":
        name, text = perfetto.FILE, perfetto.write(simulated, notes, window)
    else:
        name, text = WRITERS[format].FILE, WRITERS[format].write(simulated, notes)
    path = _place(folder, out, name)
    _write(path, text)
    return Exported(path, tuple(notes))


def _place(folder: Path, out: Path | str | None, name: str) -> Path:
    path = folder if out is None else Path(out)
    return path / name if path.is_dir() else path


def simulated_of(result: Result) -> SimulatedRun:
    """A result that is in memory."""
    own = {} if result.classes is None else result.classes.slo
    return SimulatedRun(
        str(result.manifest["name"]),
        result.requests,
        result.steps,
        result.gaps,
        result.summary(),
        result.manifest,
        _theirs(result.slo),
        {name: _theirs(limits) for name, limits in own.items()},
    )


def _theirs(limits: Mapping[str, float]) -> dict[str, float]:
    """The limits that load generators know."""
    return {name: limit for name, limit in limits.items() if name != "gap"}


def saved(folder: Path) -> SimulatedRun:
    """The result that was saved in a folder. Raises ServecastError where it is not whole, or of another version."""
    import polars as pl

    names = (*TABLES, *FACTS)
    if not folder.is_dir():
        here = [entry.name for entry in folder.parent.iterdir()] if folder.parent.is_dir() else []
        what = "a file, not a folder" if folder.exists() else f"no such folder{nearest(folder.name, here)}"
        raise ServecastError(f"{folder}: {what}; give the one that servecast run wrote its results to")
    if lacking := [name for name in names if not (folder / name).is_file()]:
        raise ServecastError(
            f"{folder}: no {one_of(lacking)}; a result has {one_of(names)}: give the folder of a run that was saved, "
            "or run it again"
        )
    facts = {name: _facts(folder / name) for name in FACTS}
    summary, manifest = facts["summary.json"], facts["manifest.json"]
    if (made := manifest.get("servecast")) != version("servecast"):
        raise ServecastError(
            f"{folder / 'manifest.json'}: the result is of servecast {made}, this is {version('servecast')}: run the "
            "scenario again, or export with that version"
        )
    requests, steps = (_table(folder / name, columns) for name, columns in TABLES.items())
    path = folder / "gaps.parquet"
    gaps = (
        _table(path, set(GAPS)) if path.exists() else pl.DataFrame(schema={k: getattr(pl, v) for k, v in GAPS.items()})
    )
    slo, own = _limits(folder / "manifest.json", manifest)
    return SimulatedRun(str(folder), requests, steps, gaps, summary, manifest, slo, own)


def _facts(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ServecastError(f"{path}: cannot be read ({error}); run the scenario again") from None
    if not isinstance(found, dict):
        raise ServecastError(f"{path}: not a JSON object; run the scenario again")
    return found


def _table(path: Path, columns: set[str]) -> pl.DataFrame:
    import polars as pl

    try:
        found = pl.read_parquet(path)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise ServecastError(f"{path}: cannot be read ({error}); run the scenario again") from None
    if lacking := sorted(columns - set(found.columns)):
        raise ServecastError(
            f"{path}: no column {one_of(lacking)}, so the result is of another version of servecast: run the scenario "
            "again"
        )
    return found


def _limits(path: Path, manifest: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """(limits of the SLO, those of the classes with their own), in seconds."""
    try:
        scenario = manifest["scenario"]
        classes = scenario["workload"].get("classes", [])
        own = {part["name"]: _theirs(SloPart(**part["slo"]).limits()) for part in classes if part.get("slo")}
        return _theirs(SloPart(**scenario.get("slo", {})).limits()), own
    except (ValidationError, KeyError, TypeError, AttributeError) as error:
        raise ServecastError(f"{path}: its scenario is not one of this version ({error}); run it again") from None


def _write(path: Path, text: Iterable[str]) -> None:
    """Under its name once it is whole."""
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(text)
        part.replace(path)
    except OSError as error:
        raise ServecastError(f"{path}: cannot be written: {error.strerror or error}") from None
    finally:
        if part.is_file():
            part.unlink()
