"""What was explained, in a terminal: fits 80 columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from reports import drafts
from reports.explaining import words
from reports.explaining.facts import Explained


def print_explained(e: Explained, console: Console) -> None:
    """Plain text where `console` is no terminal."""
    console.print(Text(words.title(e), style="bold"), highlight=False)
    for sentence in words.answer(e):
        console.print()
        console.print(Text(sentence), highlight=False)
    for name, step in words.steps(e):
        console.print()
        console.print(Text(name, style="bold"), highlight=False)
        console.print(_table(words.PART_HEAD, words.part_rows(step)))
    console.print()
    for sentence in words.roofline(e):
        console.print(Text(sentence), highlight=False)
    console.print()
    console.print(_pairs([*words.kept(e), *words.lessons(e)]))
    if e.drafts is not None:
        console.print()
        console.print(_table(drafts.HEAD, drafts.rows(e.drafts)))
    console.print()
    console.print(_table(words.change_head(e), words.change_rows(e)))
    for line in words.not_changed(e):
        console.print(Text(f"Not shown: {line}", style="dim"), highlight=False)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column(head[0])
    for column in head[1:]:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def _pairs(rows: Iterable[tuple[str, str]]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column()
    for name, text in rows:
        table.add_row(name, Text(text))
    return table
