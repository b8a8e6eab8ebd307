"""What a sweep found, in words: plain text, for page and terminal alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import polars as pl

from calibrate.uncertainty import LEVEL
from reports.sweeping.points import COLUMNS, FRONTS, INTERACTIVITY, LEAST, MEETS, THROUGHPUT, TTFT, Column, Swept
from reports.words import NONE, quantity

EXAMPLES = 3
"""Points that are named for each error."""
NEITHER = {0: "neither", 2: "both"}
"""What is said of so many of a front's two figures."""
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
    "Model's error": "what may be wrong with the prices of kernels, with clocks under load, and with the times of host "
    "and front end, drawn at random (--intervals). In each draw all configurations have the same error, so that it "
    "leaves their differences alone where it moves them alike",
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


def between(column: Column, point: Mapping[str, Any]) -> str:
    """The range of a figure under the model's error; nothing where it has none that its digits could show."""
    ends = [figure(column, end) for end in point.get(f"{column.key}_under_error") or ()]
    return "" if set(ends) <= {figure(column, point[column.key])} else "–".join(ends)


def of(point: Mapping[str, Any], key: str) -> str:
    """A figure of a point with its unit, and its range."""
    column = next(c for c in COLUMNS if c.key == key)
    drawn = between(column, point)
    return f"{figure(column, point.get(key))}{f' ({drawn})' if drawn else ''} {column.unit}".strip()


def ran(swept: Swept) -> str:
    """What was run."""
    over = [f"{swept.seeds} seeds"] * (swept.seeds > 1)
    over += [f"{swept.draws} draws of the model's error"] * (swept.draws > 0)
    done = f"{points(swept.points.height)}, {runs(swept.count('done'))} of {swept.total:,}"
    return f"{done}{', each under ' if over else ''}{' and '.join(over)}"


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
    if swept.under_error is not None:
        more += f" {_ahead(swept, best)}"
    meeting = swept.meeting
    if meeting is None:
        return said, more, True
    slo = swept.best(THROUGHPUT, True, meeting)
    if slo is None:
        return said, f"{more} No configuration meets the SLO for {MEETS:.0%} of the requests.", True
    if slo["point"] == best["point"]:
        return said, f"{more} It meets the SLO for {of(best, 'slo_attainment')} of the requests.", True
    also = f"With the SLO met for {MEETS:.0%} of the requests: {settings(swept, slo)}, {of(slo, THROUGHPUT)}."
    if swept.under_error is not None:
        also = f"{also.removesuffix('.')}, met for {of(slo, 'slo_attainment')}."
    return said, f"{more} {also}", True


def _ahead(swept: Swept, best: Mapping[str, Any]) -> str:
    """Whether what gives the most does so beyond the model's error."""
    rivals = swept.rivals(THROUGHPUT, True, best)
    if not rivals.height:
        return "No other one gives as much, within the model's error."
    some = "; ".join(settings(swept, point) for point in rivals.head(EXAMPLES).iter_rows(named=True))
    more = f" (and {rivals.height - EXAMPLES:,} more)" if rivals.height > EXAMPLES else ""
    return f"Within the model's error {_others(rivals.height)} as much: {some}{more}."


def _others(count: int) -> str:
    return "another one may give" if count == 1 else f"{count:,} others may give"


def ranges(swept: Swept) -> str:
    """What ranges are, and what fronts say of neighbours; nothing where there are none."""
    if swept.under_error is None:
        return ""
    return (
        f"Ranges hold the central {LEVEL:.0%} of {swept.under_error.draws:,} draws of the model's error, each the same "
        f"for all configurations. Clocks fall under load, so they lie rather on the slow side. Next differs: in "
        "which of the front's two figures the next row differs by more than that error; where in neither, the two "
        "cannot be told apart."
    )


def _under_error(swept: Swept) -> Iterator[str]:
    there = 0 if swept.under_error is None else swept.under_error.draws
    if there < swept.draws:
        least = "" if there else f"; ranges need {LEAST}"
        yield f"{there:,} of {swept.draws:,} draws have been run for all configurations{least}."
    if there and (more := int((swept.points["steady"] & (swept.points["saturated_under_error"] > 0)).sum())):
        yield f"{points(more)} of {swept.points.height:,} keep up, but are saturated in some of the draws."


def counted(swept: Swept) -> list[str]:
    """What is not on the fronts, and why."""
    found = list(_under_error(swept))
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
        done_rows = swept.rows.filter((swept.rows["status"] == "done") & (swept.rows["draw"] == 0))
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
    """(head, rows, how many more there are) of a front as a table; `brief` heads are for a terminal. Of what was drawn,
    cells have the range on a second line, and rows say in how many draws they are on the front and in which of its two
    figures they differ from the next row beyond the model's error."""
    columns = [c for c in swept.columns if c.key in (THROUGHPUT, *FRONTS, "p99_ttft_ms", "slo_attainment", "unserved")]
    front = swept.front(against)
    keys = [axis.key for axis in swept.axes]
    names = [(c.brief or c.name) if brief else f"{c.name}\n({c.unit})" for c in columns]
    head = [*(short(key, keys) for key in keys), *names]
    shown = list(some(front, most).iter_rows(named=True))
    drawn = (THROUGHPUT, against) if brief else [c.key for c in columns]  # a terminal is narrow
    cells = [[figure(c, p[c.key]) + (f"\n{between(c, p)}" if c.key in drawn else "") for c in columns] for p in shown]
    rows = [[*(value(p[key]) for key in keys), *map(str.strip, found)] for p, found in zip(shown, cells, strict=True)]
    if swept.under_error is not None and rows:
        count = swept.under_error.draws
        head += [f"Front of {count}" if brief else f"On it, of\n{count} draws", "Next differs"]
        names_of = {c.key: (c.brief or c.name) if brief else c.name for c in columns}
        apart = [*swept.next_differs(against, [point["point"] for point in shown]), None]
        for row, point, found in zip(rows, shown, apart, strict=True):
            said = "" if found is None else NEITHER.get(len(found)) or names_of[found[0]]
            row += [f"{point[f'{against}_front_under_error']:,}", said]
    return head, rows, front.height - len(rows)


def some(front: pl.DataFrame, most: int) -> pl.DataFrame:
    """At most so many points of a front, the ends among them."""
    if front.height <= most:
        return front
    return front[[round(i * (front.height - 1) / (most - 1)) for i in range(most)]]
