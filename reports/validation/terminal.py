"""A validation as people read it in a terminal: doubts first, then how far off, then why that may be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from reports import words
from reports.validation import words as say
from reports.validation.compared import STATS

if TYPE_CHECKING:
    from reports.validation.compared import Validation

SHOWN = 5
"""Causes that a terminal lists; the page has all."""
BAD, FAIR = 0.2, 0.1
"""Errors from which a figure is shown in red and in yellow."""


def print_validation(v: Validation, console: Console) -> None:
    """Print the comparison. Fits 80 columns; plain text where `console` is no terminal."""

    def line(text: str, style: str = "") -> None:
        console.print(Text(text, style=style), highlight=False)

    line(say.title(v), "bold")
    line(words.setup(v.result))
    line(f"Measured: {say.measured_by(v.run)}")
    console.print()
    for doubt in v.run.doubts:
        line(f"Doubt: {doubt}.", "red")
    for warning in v.warnings:
        line(f"Warning: {warning}", "yellow")
    line(v.replayed)
    console.print()
    line(say.verdict(v), "bold")
    if say.rows(v):
        console.print()
        console.print(_latencies(v))
    if say.others(v):
        console.print()
        console.print(_others(v))
    if found := say.per_request(v):
        console.print()
        console.print(_per_request(found))
    console.print()
    _print_causes(v, console)
    console.print()
    for note in v.run.notes:
        line(f"Note: {note}.")
    for said in words.pricing(v.result):
        line(said)


def _latencies(v: Validation) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in ("", "", ""):
        table.add_column(column)
    for stat in STATS:
        table.add_column(stat, justify="right", min_width=9)
    for name, unit, sides in say.rows(v):
        key = words.METRICS[name]
        for i, (side, values) in enumerate(sides):
            found = [v.errors.get(f"{stat}_{key}") for stat in STATS]
            cells = [Text(x, style=_style(e) if side == "error" else "") for x, e in zip(values, found, strict=True)]
            table.add_row(name if not i else "", unit if not i else "", side, *cells, end_section=side == "error")
    return table


def _style(error: float | None) -> str:
    size = 0.0 if error is None else abs(error)
    return "bold red" if size >= BAD else "yellow" if size >= FAIR else "green" if error is not None else ""


def _others(v: Validation) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for i, column in enumerate(("", *say.SIDES)):
        table.add_column(column, justify="right" if i else "left")
    for name, ours, theirs, error in say.others(v):
        table.add_row(name, ours, theirs, Text(say.signed(error), style=_style(error)))
    return table


def _per_request(found: list[tuple[str, str, str, str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for i, column in enumerate(("request by request", "requests", "off by, on average", "correlation")):
        table.add_column(column, justify="right" if i else "left")
    for row in found:
        table.add_row(*row)
    return table


def _print_causes(v: Validation, console: Console) -> None:
    said, likely = say.causes(v.causes)
    console.print(Text(said), highlight=False)
    table = Table.grid(padding=(0, 1))
    for i, cause in enumerate(likely[:SHOWN], start=1):
        table.add_row(f"{i}.", Text(say.cause(cause, v.causes)))
        if text := say.sets(cause):
            table.add_row("", Text(text, style="dim"))
    if likely:
        console.print(table, highlight=False)
    if len(likely) > SHOWN:
        console.print(Text(f"and {len(likely) - SHOWN} more, in the report."), highlight=False)
    if caution := say.caution(likely):
        console.print(Text(caution), highlight=False)
