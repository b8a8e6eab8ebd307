"""The time between the tokens of each request, from the log of steps: load generators list it, our tables do not.

A request has a token in every step of its replica that decodes, from its first to its last, except in those gaps in
which it was preempted or left out. Where that does not give as many tokens as it had, the gaps are not known: samples
of one prompt, pipelines (whose cohorts take turns), prompts that another replica read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import polars as pl

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

SAME_S = 1e-7
"""Times of one step from two logs: within a run of steps they are rounded."""


def token_gaps(requests: pl.DataFrame, steps: pl.DataFrame, left_out: pl.DataFrame) -> list[Floats | None]:
    """A request: float64[output tokens - 1], in seconds; None where it did not finish or they are not known.

    requests, steps: the tables of a result; left_out: `id`, `since_s`, `end_s` of the gaps in which requests were
    preempted or left out.
    """
    found: list[Floats | None] = [None] * len(requests)
    gaps = {int(key[0]): group for key, group in left_out.group_by("id")} if len(left_out) else {}
    wanted = requests.with_row_index("row").filter(requests["status"] == "finished", requests["samples"] == 1)
    for (replica,), mine in wanted.group_by("replica"):
        numbers, ends, decodes = _steps(steps.filter(steps["replica"] == replica))
        columns = ("row", "id", "first_step", "last_step", "first_token_s", "finish_s", "output_tokens")
        for row, id, first, last, first_s, finish_s, tokens in mine.select(columns).iter_rows():
            i, j = np.searchsorted(numbers, (first, last))
            if j >= len(ends) or abs(ends[i] - first_s) > SAME_S or abs(ends[j] - finish_s) > SAME_S:
                continue
            times = ends[i + 1 : j + 1][decodes[i + 1 : j + 1]]
            if id in gaps:
                times = _without(times, gaps[id])
            if len(times) == tokens - 1:
                found[row] = np.diff(times, prepend=first_s)
    return found


def _without(times: Floats, gaps: pl.DataFrame) -> Floats:
    """The times without those within the gaps, and with the ends of these."""
    outside = np.ones(len(times), dtype=bool)
    for since_s, end_s in gaps.select("since_s", "end_s").iter_rows():
        outside &= (times <= since_s + SAME_S) | (times > end_s + SAME_S)
    return np.sort(np.concatenate([times[outside], gaps["end_s"].to_numpy()]))


def _steps(rows: pl.DataFrame) -> tuple[Ints, Floats, npt.NDArray[np.bool_]]:
    """(numbers, ends in seconds, whether anything decodes) of all steps of a replica's rows, in order."""
    rows = rows.sort("step")
    count = rows["steps"].to_numpy().astype(np.int64)
    start, end, first = (rows[name].to_numpy() for name in ("start_s", "end_s", "first_step_s"))
    row = np.repeat(np.arange(len(rows)), count)
    within = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
    with np.errstate(divide="ignore", invalid="ignore"):
        slope = np.where(count > 1, 2 * (end - start - count * first) / (count * (count - 1)), 0.0)
    ends = start[row] + (within + 1) * first[row] + slope[row] * within * (within + 1) / 2
    ends = np.where(within + 1 == count[row], end[row], ends)
    numbers = rows["step"].to_numpy()[row] + within
    return numbers, ends, rows["decodes"].to_numpy()[row] > 0
