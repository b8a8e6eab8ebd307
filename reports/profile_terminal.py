"""A profile in the terminal: whose it is, what it covers, what it reaches, how far it is off; and two of them compared.

Fits 80 columns; plain text where the console is no terminal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from reports import profile_words as words
from reports.profile_diff import datasheets, diff
from reports.profile_rates import Achieved, achieved, best, by_size
from reports.words import NONE

if TYPE_CHECKING:
    from rich.console import Console

    from calibrate.profile import Profile, Residual
    from reports.profile_against import Against


def print_profile(profile: Profile, console: Console, *, everything: bool = False) -> None:
    """Print sources, ranges, rates and held-out errors; `everything`: all sizes, kinds and notes."""
    reached = achieved(profile)
    covered = words.ranges(profile)  # all families are read before anything is printed
    console.print(Text(f"Profile of {profile.gpu.id} ({profile.gpu.name})", style="bold"))
    _sources(profile, console, everything)
    console.print()
    for said in words.limits(profile):
        console.print(Text(said, style="yellow"))
    _heading(console, "Measured")
    table = _plain()
    for family, of, sizes, kernels in covered:
        by = f"; by {kernels}" if kernels and everything else ""
        table.add_row(family, Text.assemble((of, "bold"), f": {sizes}{by}"))
    console.print(table)
    _heading(console, "Reached, of the datasheet's rate, by catalogued models on one GPU")
    if everything:
        _by_size(by_size(reached), console)
    else:
        console.print(_best(reached))
    if said := words.cached(reached):
        console.print(Text(said, style="dim"))
    _heading(console, "Errors on what was held out of the fit (median, p90)")
    if everything:
        _residuals(profile.residuals, console)
    else:
        console.print(_summary(profile.residuals))
        console.print(Text(words.ERRORS, style="dim"))
        console.print(Text("--all prints every kind, size and note.", style="dim"))


def print_against(against: Against, console: Console) -> None:
    """Print how far prices are from measured times."""
    _heading(console, "Against the measurements")
    table = _numbers(("family",), ("points", "median", "p90", "bias"))
    for each in against.families:
        table.add_row(*each.row)
    console.print(table)
    console.print(Text(against.seen))
    for said in against.left_out:
        console.print(Text(f"Not compared: {said}.", style="dim"))


def print_diff(names: tuple[str, str], profiles: tuple[Profile, Profile], console: Console) -> None:
    """Print where prices of the second profile differ from those of the first."""
    a, b = profiles
    found = diff(a, b)
    for letter, name, profile in zip("AB", names, profiles, strict=True):
        console.print(Text.assemble((f"{letter} ", "bold"), f"{name}: {profile.gpu.id}. {words.origin(profile)}"))
    if a.gpu.id != b.gpu.id:
        console.print(Text("\nDifferent GPUs: this compares the hardware.", style="yellow"))
        rates = ", ".join(f"{what} {ratio:.2f}" for what, ratio in datasheets(a, b))
        console.print(Text(f"By the datasheets alone B / A would be: {rates}."))
    _heading(console, "Time of B / time of A (below 1: B is faster)")
    table = _numbers(("family", "of"), ("calls", "p10", "median", "p90"))
    for row in found.rows:
        ratios = (f"{ratio:.2f}" for ratio in (row.p10, row.median, row.p90))
        table.add_row(words.family_name(row.family), row.of, f"{row.points:,}", *ratios)
    console.print(table if found.rows else Text("  They have nothing in common."))
    if outside := sum(row.left_out for row in found.rows):
        said = f"{outside:,} more calls are outside what one of the two has measured."
        console.print(Text(said, style="dim"))
    if found.largest:
        _heading(console, "Largest disagreements, against the median of their line")
    for call in found.largest:
        times = f"{words.duration(call.a)} in A, {words.duration(call.b)} in B"
        what = Text.assemble((f"{call.b / call.a:.2f}", "bold"), f"  {words.family_name(call.family)} {call.what}")
        console.print(Padding(what, (0, 0, 0, 2)))
        console.print(Padding(Text(f"{times}; {call.shape}", style="dim"), (0, 0, 0, 8)))
    for letter, only in zip("AB", found.only, strict=True):
        if only:
            _heading(console, f"Only in {letter}")
            table = _plain()
            for family, parts in only:
                table.add_row(words.family_name(family), Text("; ".join(parts)))
            console.print(table)


def _sources(profile: Profile, console: Console, everything: bool) -> None:
    console.print(Text(words.origin(profile)))
    for families, facts, notes in words.sources(profile):
        table = _plain()
        for name, what in facts:
            table.add_row(name, Text(what))
        console.print()
        console.print(Text(families, style="bold"))
        console.print(table)
        for note in notes if everything else ():
            console.print(Padding(Text(f"- {note}", style="dim"), (0, 0, 0, 2)))
        if notes and not everything:
            console.print(Padding(Text(f"{len(notes)} notes: --all prints them.", style="dim"), (0, 0, 0, 2)))


def _best(reached: Sequence[Achieved]) -> Table:
    table = _numbers(("family", "of"), ("best TFLOP/s", "", "best GB/s", ""))
    for family, of, flops, moved in best(reached):
        cells = []
        for side, unit in ((flops, 1e12), (moved, 1e9)):
            cells += (
                [f"{side.best / unit:,.{0 if side.best >= unit else 2}f}", f"{100 * side.best / side.limit:.0f} %"]
                if side
                else [NONE, ""]
            )
        table.add_row(words.family_name(family), of, *cells)
    return table


def _by_size(rows: Sequence[Achieved], console: Console) -> None:
    for family in dict.fromkeys(each.family for each in rows):
        table = _numbers((words.family_name(family), "size"), ("median", "best", ""))
        for each in rows:
            if each.family == family:
                rates = (words.rate(rate, each.bound) for rate in (each.median, each.best))
                table.add_row(each.of, each.size, *rates, f"{100 * each.best / each.limit:.0f} %")
        console.print(table)


def _summary(residuals: Sequence[Residual]) -> Table:
    table = _numbers(("family", "kind"), (words.POINTS, words.SHAPES, words.EDGE))
    for family, kind, cells in words.summary(residuals):
        table.add_row(family, kind, *(f"{words.per_cent(r.median)} {_wide(r.p90)}" if r else NONE for r in cells))
    return table


def _wide(share: float) -> str:
    return f"{words.per_cent(share):>7}"


def _residuals(residuals: Sequence[Residual], console: Console) -> None:
    for family in dict.fromkeys(each.family for each in residuals):
        table = _numbers((words.family_name(family), "held out"), ("median", "p90", "points"))
        for r in residuals:
            if r.family == family:
                table.add_row(
                    r.kind, words.held_out(r.what), words.per_cent(r.median), words.per_cent(r.p90), f"{r.points:,}"
                )
        console.print(table)


def _heading(console: Console, text: str) -> None:
    console.print()
    console.print(Text(text, style="bold"))


def _plain() -> Table:
    table = Table(box=None, show_header=False, pad_edge=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _numbers(left: Sequence[str], right: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=True, show_edge=False)
    for name in left:
        table.add_column(name)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table
