"""What a sweep found, in words: plain text, for page and terminal alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import polars as pl

from reports.sweeping.points import COLUMNS, FRONTS, INTERACTIVITY, MEETS, THROUGHPUT, TTFT, Column, Swept
from reports.words import NONE, quantity

EXAMPLES = 3
"""Points that are named for each error."""
LONGEST = 60
"""Characters of a value that are shown."""

DEFINITIONS = {
    "Output (tokens/s/GPU)": "output tokens of finished requests per second, from time 0 to the last token, and per "
    "GPU; GPUs count while their replica exists",
    "Interactivity": "output tokens per second that the median user sees: 1000 / p50 TPOT in milliseconds",
    "Front": "the configurations that no other one beats in both of two figures: whatever is better in one is worse in "
    "the other (Pareto front)",
    "Saturated": "requests arrive faster than they are served, so latencies grow with the length of the run: such "
    "configurations are on no front",
    "Seeds": "every configuration runs under the same seeds, so that differences come from the configuration; figures "
    "are means over them",
}


def short(key: str, keys: list[str]) -> str:
    """A key's last word, where no other key ends with it."""
    last = key.rpartition(".")[2]
    return last if sum(k.rpartition(".")[2] == last for k in keys) == 1 and not last.isdecimal() else key


def value(found: object) -> str:
    """A value of an axis, cut short."""
    if found is None or isinstance(found, bool):
        return NONE if found is None else str(found).lower()
    text = f"{found:,.5g}" if isinstance(found, float) else str(found)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def settings(swept: Swept, point: Mapping[str, Any]) -> str:
    """`gpu h100-sxm, max_num_seqs 64`: where a point lies."""
    keys = [axis.key for axis in swept.axes]
    return ", ".join(f"{short(key, keys)} {value(point[key])}" for key in keys)


def options(swept: Swept, point: Mapping[str, Any]) -> str:
    """The options of `servecast run` that repeat it."""
    return " ".join(f"--set {axis.key}={point[axis.key]}" for axis in swept.axes)


def figure(column: Column, found: float | None) -> str:
    """A figure without its unit."""
    if found is None:
        return NONE
    if column.key == "gpus" and float(found).is_integer():
        return f"{found:,.0f}"
    return quantity(100 * found if column.unit == "%" else float(found))


def of(point: Mapping[str, Any], key: str) -> str:
    """A figure of a point with its unit."""
    column = next(c for c in COLUMNS if c.key == key)
    return f"{figure(column, point.get(key))} {column.unit}".strip()


def runs(count: int) -> str:
    """`1 run`, `2,000 runs`."""
    return f"{count:,} run{'' if count == 1 else 's'}"


def points(count: int) -> str:
    """`1 configuration`, `2,000 configurations`."""
    return f"{count:,} configuration{'' if count == 1 else 's'}"


def varied(swept: Swept) -> list[str]:
    """What was varied, an axis a line."""
    return [f"{name}: {text}" for name, text in swept.texts]


def answer(swept: Swept) -> tuple[str, str, bool]:
    """(the answer, what more there is to say of it, whether there is one)."""
    best = swept.best(THROUGHPUT, True)
    if best is None or not best[THROUGHPUT]:
        flags = {"saturated": "saturated", "undecided": "too short to tell"}
        counts = {said: int(swept.points[key].sum()) for key, said in flags.items()}
        why = ", ".join(f"{count:,} {said}" for said, count in counts.items() if count)
        return (
            f"No configuration of {swept.points.height:,} keeps up with its load",
            f"{why}: there is no front. Vary the load too, or take more GPUs."
            if why
            else "No request got its answer, so there is no front.",
            False,
        )
    said = f"Most output per GPU: {settings(swept, best)}"
    more = f"{of(best, THROUGHPUT)}"
    if best.get(INTERACTIVITY) is not None:
        more += f" at {of(best, INTERACTIVITY)}"
    more += f", TTFT {of(best, TTFT)} (medians)."
    meeting = swept.meeting
    if meeting is None:
        return said, more, True
    slo = swept.best(THROUGHPUT, True, meeting)
    if slo is None:
        return said, f"{more} No configuration meets the SLO for {MEETS:.0%} of the requests.", True
    if slo["point"] == best["point"]:
        return said, f"{more} It meets the SLO for {100 * float(best['slo_attainment']):.1f} % of the requests.", True
    also = f"With the SLO met for {MEETS:.0%} of the requests: {settings(swept, slo)}, {of(slo, THROUGHPUT)}."
    return said, f"{more} {also}", True


def counted(swept: Swept) -> list[str]:
    """What is not on the fronts, and why."""
    found = []
    done, invalid, failed = (swept.count(status) for status in ("done", "invalid", "failed"))
    missing = swept.total - done - invalid - failed
    if missing:
        found.append(f"{runs(missing)} of {swept.total:,} are still to be done: the same command goes on with them.")
    if saturated := int(swept.points["saturated"].sum()):
        found.append(f"{points(saturated)} of {swept.points.height:,} are saturated, and on no front.")
    if undecided := int((swept.points["undecided"] & ~swept.points["saturated"]).sum()):
        found.append(
            f"{points(undecided)} of {swept.points.height:,} ran too short to tell whether they keep up, and are on no "
            "front; more requests would tell."
        )
    if "unserved" in swept.points.columns and (lost := int((swept.points["unserved"] > 0).sum())):
        found.append(f"{points(lost)} of {swept.points.height:,} did not serve all requests: see Not served.")
    if invalid:
        found.append(f"{runs(invalid)} of {swept.total:,} were left out: what they combine makes no valid scenario.")
    if failed:
        found.append(f"{runs(failed)} of {swept.total:,} failed; the same command tries them again.")
    if swept.again:
        found.append(f"{points(swept.again)} were drawn twice, and run once.")
    if "scenario" in swept.rows.columns:
        done_rows = swept.rows.filter(swept.rows["status"] == "done")
        if same := done_rows.height - done_rows["scenario"].n_unique():
            found.append(
                f"{runs(same)} came to the same scenario as another one: some of what is varied changes nothing."
            )
    return found


def wrong(swept: Swept, status: str, most: int) -> list[str]:
    """Errors of runs of that status, each with how often and where, and how many more there are."""
    errors = swept.errors(status)
    found = []
    for error, count, rows in errors[:most]:
        where = [
            settings(swept, row)
            for row in rows.unique("point", maintain_order=True).head(EXAMPLES).iter_rows(named=True)
        ]
        more = "; ..." if rows["point"].n_unique() > EXAMPLES else ""
        found.append(f"{runs(count)} ({'; '.join(where)}{more}): {error}")
    if len(errors) > most:
        found.append(f"and {len(errors) - most:,} other errors, in the column `error` of the rows")
    return found


def front_rows(swept: Swept, against: str, most: int, *, brief: bool = False) -> tuple[list[str], list[list[str]], int]:
    """(head, rows, how many more there are) of a front as a table; `brief` heads are for a terminal."""
    columns = [c for c in swept.columns if c.key in (THROUGHPUT, *FRONTS, "p99_ttft_ms", "slo_attainment", "unserved")]
    front = swept.front(against)
    keys = [axis.key for axis in swept.axes]
    names = [(c.brief or c.name) if brief else f"{c.name} ({c.unit})" for c in columns]
    head = [*(short(key, keys) for key in keys), *names]
    rows = [
        [*(value(point[key]) for key in keys), *(figure(c, point[c.key]) for c in columns)]
        for point in some(front, most).iter_rows(named=True)
    ]
    return head, rows, front.height - len(rows)


def some(front: pl.DataFrame, most: int) -> pl.DataFrame:
    """At most so many points of a front, the ends among them."""
    if front.height <= most:
        return front
    return front[[round(i * (front.height - 1) / (most - 1)) for i in range(most)]]
