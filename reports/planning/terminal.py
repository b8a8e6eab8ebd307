"""A plan in a terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from reports.planning import day, fleet, growth, words
from reports.planning.facts import Facts, Option
from reports.planning.fleet import Together

ROWS = 8


def print_plan(facts: Facts, console: Console) -> None:
    """The answer, the figures behind it, and the nearest alternatives."""
    console.print(Text(facts.title, style="bold"))
    console.print(Text(facts.traffic))
    console.print()
    for i, sentence in enumerate(words.answer(facts)):
        console.print(Text(sentence, style="bold" if i == 0 else ""), highlight=False)
    console.print()
    if facts.verified:
        names = ["recorded"] if facts.one_course else [f"seed {i + 1}" for i in range(len(facts.verified))]
        table = _table("required", *names)
        for row in zip(*facts.verified, strict=True):
            table.add_row(row[0].required, *(figure.shown for figure in row))
        console.print(table)
        console.print()
    if facts.changes:
        table = _table("if there is", "then")
        for change in facts.changes:
            then = "all is met" if change.met else words.missed(change.figures) or "work piles up"
            table.add_row(words.changed(change.what, change.factor), then)
        console.print(table)
        console.print()
    if facts.limits:
        console.print(Text("With another limit:"))
        for sentence in words.limits(facts):
            console.print(Text(sentence), highlight=False)
        console.print()
    if facts.growth is not None:
        _course(console, growth.sentences(facts.growth), growth.HEADS, growth.rows(facts, facts.growth))
    if facts.day is not None:
        _course(console, day.sentences(facts.day), day.HEADS, day.rows(facts.day))
    table = _table("configuration", "GPUs", "$ an hour", "", "")
    for option in _nearest(facts):
        why = option.why or words.missed(option.figures)
        table.add_row(
            words.replicas(option) if option.replicas else option.what,
            f"{option.gpus:,}" if option.gpus else "",
            words.dollars(option.dollars_per_hour) if option.replicas else "",
            words.STATUS[option.status],
            Text(why, overflow="ellipsis"),
        )
    console.print(table)
    console.print()
    console.print(Text(words.considered(facts)), highlight=False)
    for line in facts.starts:
        console.print(Text(line), highlight=False)
    for note in facts.notes:
        console.print(Text(f"Note: {note}"), highlight=False)


def print_together(together: Together, console: Console) -> None:
    """Plans for several models, a line each."""
    _course(console, fleet.sentences(together), fleet.HEADS, fleet.rows(together))


def _course(
    console: Console, sentences: Iterable[str], heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]
) -> None:
    """What the answer takes in the course of time."""
    for sentence in sentences:
        console.print(Text(sentence), highlight=False)
    console.print()
    table = _table(*heads)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print()


def _nearest(facts: Facts) -> list[Option]:
    """Those of most interest; of the same GPUs and number of them, one."""
    shown = dict[tuple[str, str, int], Option]()
    for option in words.ranked(facts):
        shown.setdefault((option.status, option.gpu, option.gpus), option)
    return list(shown.values())[:ROWS]


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in ("GPUs", "$ an hour") else "left", overflow="fold")
    return table
