"""What was diagnosed, in a terminal: fits 80 columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from reports.diagnosing import words
from reports.diagnosing.facts import Diagnosed

CHECKED = 3
"""Causes of which it is said how to check them; the page has all."""


def print_diagnosed(found: Diagnosed, console: Console) -> None:
    """Plain text where `console` is no terminal."""
    console.print(Text(found.title, style="bold"), highlight=False)
    console.print(Text(found.setup), highlight=False)
    console.print()
    for i, sentence in enumerate(words.answer(found)):
        console.print(Text(sentence, style="bold" if i == 0 else ""), highlight=False)
    if found.symptoms:
        console.print()
        console.print(_table(words.SYMPTOM_HEAD, words.symptom_rows(found)))
    for cause in found.foremost[:CHECKED]:
        console.print()
        console.print(Text(words.named(cause), style="bold"), highlight=False)
        console.print(_pairs(words.how(cause)))
    if found.tried:
        console.print()
        console.print(_table(words.CAUSE_HEAD, map(words.cause_row, found.tried)))
    for sentence in found.compare:
        console.print()
        console.print(Text(sentence), highlight=False)
    if not found.tried:
        console.print()
        console.print(_pairs(found.figures))
    if found.ruled_out:
        console.print()
        console.print(Text("Ruled out", style="bold"), highlight=False)
        rows = [(f"{each.pool}: {each.cause}" if each.pool else each.cause, each.why) for each in found.ruled_out]
        console.print(_pairs(rows))
    console.print()
    console.print(Text(words.tried(found)), highlight=False)
    for notice in found.notices:
        console.print(Text(f"Note: {notice}"), highlight=False)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in head:
        table.add_column(column, overflow="fold", no_wrap=column == "goes")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _pairs(rows: Iterable[tuple[str, str]]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(name, Text(text))
    return table
