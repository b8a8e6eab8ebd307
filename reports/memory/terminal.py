"""A memory plan as people read it in a terminal: whether it fits, what goes where, what the engine would log."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from calibrate.hardware import GIB
from calibrate.kvlayouts import LayoutUse
from reports.memory import plan as words
from reports.memory.plan import Planned
from reports.words import percent, quantity

BAR = 24
"""Characters of the longest bar: the GPU's memory, or a term that is larger."""


def print_plan(planned: Planned, console: Console) -> None:
    """Fits 80 columns; plain text where `console` is no terminal."""
    plan = planned.plan
    word, why = words.verdict(planned)
    console.print(Text(words.title(planned), style="bold"), highlight=False)
    console.print()
    style = "bold red" if plan.refusal else "bold green"
    console.print(Text.assemble((word, style), f": {why}."), highlight=False)
    if plan.refusal:
        console.print(Text("Any one of these would do:" if len(planned.fixes) > 1 else "This would do:"))
        for fix in planned.fixes:
            console.print(Text(f"  - {fix}", style="yellow"), highlight=False)
    console.print()
    console.print(_table(planned))
    console.print()
    rows = Table(box=None, show_header=False, pad_edge=False)
    rows.add_column(no_wrap=True)
    rows.add_column()
    for name, fact in words.facts(planned):
        rows.add_row(name, Text(fact))
    console.print(rows)
    console.print()
    for versions, lines in words.log_lines(planned) if not plan.refusal else ():
        console.print(Text(f"{versions} would log"), highlight=False)
        for line in lines:
            console.print(Text(f"  {line}", style="dim"), highlight=False, soft_wrap=True)
    for note in words.notes(planned):
        console.print(Text(note), highlight=False)


def print_layouts(uses: Sequence[LayoutUse], name: str, console: Console) -> None:
    """How the KV cache's memory is used by layout, on the requests of a trace."""
    console.print()
    console.print(Text(f"Layouts of the KV cache on {name}", style="bold"), highlight=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("")
    for column in ("held a request", "without tokens", "at once"):
        table.add_column(column, justify="right")
    for use in uses:
        table.add_row(use.name, f"{use.held_tokens:,.0f} tokens", percent(use.waste), quantity(use.at_once))
    console.print(table)
    console.print(Text("Averages over the steps of all requests; holes that an allocator leaves are not counted."))


def _table(planned: Planned) -> Table:
    plan = planned.plan
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("one GPU", no_wrap=True)
    table.add_column("GiB", justify="right")
    table.add_column("", min_width=BAR, no_wrap=True)
    table.add_column("", overflow="fold")
    terms = list(words.terms(planned))
    each = BAR / max(plan.visible_bytes, *(size for _, size, _ in terms))
    for name, size, remark in terms:
        part = name.startswith(" ")
        bar = "" if part else "█" * round(each * size)
        said = plan.kv_bytes if name == "KV cache" else size
        style = "dim" if part else ""
        colour = "green" if name == "KV cache" else "blue" if name == "Weights" else "yellow"
        table.add_row(Text(name, style=style), Text(f"{said / GIB:.2f}", style=style), Text(bar, style=colour),
                      Text(remark, style="dim"))  # fmt: skip
    table.add_section()
    table.add_row("The engine's", f"{plan.budget_bytes / GIB:.2f}", "─" * round(each * plan.budget_bytes),
                  words.share(planned))  # fmt: skip
    return table
