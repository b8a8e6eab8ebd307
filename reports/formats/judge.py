"""From what a reader found to a MeasuredRun: its summary is computed and compared with what the file states.

It knows no format, and leaves it to others what is doubtful.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from reports.formats import doubts, figures, units
from reports.formats.found import Found
from reports.measured import REQUEST_COLUMNS, MeasuredRun
from reports.words import requests as counted

if TYPE_CHECKING:
    import polars as pl


@dataclass(frozen=True, slots=True)
class _Judged:
    summary: dict[str, float]
    failed: int | None
    doubts: list[str]


def measured(found: Found, problems: list[str]) -> MeasuredRun | None:
    """The run with its summary and doubts. None, and problems, where no request succeeded or a unit must be wrong."""
    if nothing := _nothing(found):
        problems += nothing
        return None
    duration_s = _duration(found)
    judged = _aggregates(found) if found.requests is None else _requests(found, found.requests, duration_s)
    if wrong := units.wrong_units(judged.summary, found.source, found.unit):
        problems += wrong
        return None
    return MeasuredRun(
        tool=found.tool,
        version=found.version,
        source=found.source,
        model=found.model,
        requests=None if found.requests is None else found.requests.select(REQUEST_COLUMNS),
        summary={key: judged.summary[key] for key in figures.KEYS if key in judged.summary},
        duration_s=duration_s,
        completed=int(judged.summary["completed"]) if "completed" in judged.summary else None,
        failed=judged.failed,
        rate=found.rate,
        concurrency=found.concurrency,
        notes=found.notes,
        doubts=(*found.doubts, *judged.doubts),
    )


def _aggregates(found: Found) -> _Judged:
    stated = {**found.fallback, **found.stated}
    if found.duration_s is not None:
        stated["duration"] = found.duration_s
    told = [f"{counted(found.failed)} failed; every figure is over the others"] if found.failed else []
    told += figures.impossible(stated)
    return _Judged(figures.completed(figures.possible(stated)), found.failed, told)


def _requests(found: Found, frame: pl.DataFrame, duration_s: float | None) -> _Judged:
    computed, failed = figures.of(frame, duration_s), frame["error"].count()
    told = doubts.of(frame, found.duration_s)
    if found.sampled:
        done, all_done = computed["completed"], found.stated["completed"]
        told.append(
            f"only {done:,.0f} of {all_done:,.0f} requests that succeeded are in the file: latencies are theirs, "
            "counts and rates as stated"
        )
        computed = {k: v for k, v in computed.items() if k not in (*figures.COUNTS, *figures.RATES)}
        failed = failed if found.failed is None else found.failed
    told += figures.disagreements(found.stated, computed, found.tolerance)
    if found.failed not in (None, failed):
        told.append(f"the file says that {counted(found.failed)} failed, its details show {failed:,}")
    stated = {key: value for key, value in found.stated.items() if value}  # 0: the tool has no values
    return _Judged(figures.completed({**stated, **computed}), failed, told)


def _nothing(found: Found) -> list[str]:
    """A problem where no request succeeded."""
    frame = found.requests
    if frame is None and found.stated.get("completed", 1) > 0:
        return []
    if frame is not None and frame["error"].null_count():
        return []
    said = [] if frame is None else frame["error"].drop_nulls().to_list()
    why = f" (the first failed with {said[0][:80]!r})" if said else ""
    return [f"{found.source}: no request succeeded{why}, so there is nothing to compare with; repeat the run"]


def _duration(found: Found) -> float | None:
    if found.duration_s is not None or found.requests is None:
        return found.duration_s
    end = figures.last_end_s(found.requests)
    return end if end is not None and end > figures.SHORTEST_S else None
