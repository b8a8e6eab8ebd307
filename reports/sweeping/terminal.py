"""A sweep as people read it in a terminal: the answer, the fronts, what is missing."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from reports.sweeping import words
from reports.sweeping.points import INTERACTIVITY, TTFT, Swept

ROWS = 10
ERRORS = 5


def print_sweep(swept: Swept, console: Console) -> None:
    """Print the summary. Plain text where `console` is no terminal."""

    def line(text: str, style: str = "") -> None:
        console.print(Text(text, style=style), highlight=False)

    line(f"Sweep: {swept.title}", "bold")
    line(words.ran(swept))
    console.print()
    if not swept.points.height:
        line("No run has a result yet.", "bold")
    else:
        said, more, found = words.answer(swept)
        line(f"{said}.", "bold" if found else "bold red")
        line(more)
        for against, name in ((INTERACTIVITY, "interactivity"), (TTFT, "TTFT")):
            _print_front(swept, against, f"Front of output per GPU and {name}", console)
    console.print()
    if said := words.ranges(swept):
        line(said, "dim")
    for note in words.counted(swept):
        line(note)
    for status, name, style in (("invalid", "Left out", "yellow"), ("failed", "Failed", "red")):
        for error in words.wrong(swept, status, ERRORS):
            line(f"{name}: {error}", style)


def _print_front(swept: Swept, against: str, title: str, console: Console) -> None:
    head, rows, more = words.front_rows(swept, against, ROWS, brief=True)
    if not rows:
        return
    console.print()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 0, 0, 1))
    for i, name in enumerate(head):
        if i < len(swept.axes):
            table.add_column(Text(name), overflow="fold")
        else:
            table.add_column(Text(name if "\n" in name else name.replace(" ", "\n", 1)), justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    left = f" ({more:,} more between them)" if more else ""
    console.print(Text(f"{title}{left}"), highlight=False)
    console.print(table)
