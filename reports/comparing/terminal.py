"""A comparison in a terminal: the answer, a table, why, and how it was judged."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from reports.comparing import words
from reports.comparing.facts import Compared, Line

STYLES = {"better": "green", "worse": "red"}


def print_compared(c: Compared, console: Console) -> None:
    """Print it. Plain text where `console` is no terminal."""
    for i, sentence in enumerate(words.answer(c)):
        console.print(Text(sentence, style="bold" if i == 0 else ""), highlight=False)
    for sentence in words.piled_up(c):
        console.print(Text(sentence, style="yellow"), highlight=False)
    for label, error in c.failed:
        console.print(Text(f"{label} did not run: {error}", style="red"), highlight=False)
    console.print()
    if rows := words.changed(c):
        table = _table("differs in", *(r.label for r in c.ran))
        for key, values in rows:
            table.add_row(key, *values)
        console.print(table)
        console.print()
    console.print(_two(c) if len(c.ran) == 2 else _several(c))
    console.print()
    for i, ran in enumerate(c.ran[1:], 1):
        for sentence in words.why(c, i):
            console.print(Text(f"{ran.label}: " * (len(c.ran) > 2) + sentence), highlight=False)
    console.print()
    for sentence in words.method(c)[: 2 if c.draws else 1]:
        console.print(Text(sentence, style="dim"), highlight=False)


def _two(c: Compared) -> Table:
    table = _table("", *(r.label for r in c.ran), "difference", *["under the model's error"] * bool(c.draws), "")
    for line in c.lines:
        found = line.differences[1]
        assert found is not None
        cells = [*words.values(line), words.difference(line, 1), *[words.under_error(line, found)] * bool(c.draws)]
        verdict = Text(words.VERDICTS[found.word], style=STYLES.get(found.word, ""))
        table.add_row(words.heading(line), *cells, verdict)
    return table


def _several(c: Compared) -> Table:
    """A sign beside every figure says how it stands to the first."""
    table = _table("", *(r.label for r in c.ran))
    for line in c.lines:
        table.add_row(words.heading(line), *map(Text, _signed(line)))
    table.caption = f"against {c.first.label}: ▲ better, ▼ worse, ~ no difference beyond noise, = the same; * the best"
    table.caption_justify = "left"
    return table


def _signed(line: Line) -> list[str]:
    found = []
    for i, (value, d) in enumerate(zip(words.values(line), line.differences, strict=True)):
        found.append(f"{value} {'' if d is None else words.SIGNS[d.word]}{'*' * (line.best == i)}".rstrip())
    return found


def _table(first: str, *columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column(first, overflow="fold")
    for column in columns:
        table.add_column(column, overflow="fold", justify="left")
    return table
