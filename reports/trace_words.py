"""What `workloads.statistics.describe` found, said to people: rows of a table, and what to beware of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from reports.words import NONE, percent, quantity, requests, seconds

if TYPE_CHECKING:
    from rich.console import Console

Facts = Mapping[str, Any]
STATS = ("mean", "p50", "p90", "p99", "max", "sum")


def warnings(facts: Facts) -> list[str]:
    """What people should know before they trust the numbers: with counts, one sentence each."""
    lines = []
    if facts["dropped"]:
        why = "; ".join(f"{n:,}: {reason}" for reason, n in facts["dropped"].items())
        lines.append(f"Dropped: {sum(facts['dropped'].values()):,} rows ({why}).")
    if one := facts["one_token_outputs"]:
        lines.append(f"{requests(one)} with one output token: they have no TPOT.")
    if over := facts.get("over_max_model_len"):
        lines.append(
            f"{requests(over)} of {facts['requests']:,} are longer than {facts['max_model_len']:,} tokens (prompt and "
            f"output; the longest {facts['longest_request_tokens']:,}): an engine with this max_model_len rejects them."
        )
    return lines


def lengths(facts: Facts) -> list[tuple[str, list[str]]]:
    """(what, mean to sum) of everything that has a distribution."""
    rows = [("prompt tokens", facts["prompt_tokens"]), ("output tokens", facts["output_tokens"])]
    if sessions := facts.get("sessions"):
        rows.append(("turns of a session", sessions["turns"]))
        if sessions["think_s"]:
            rows.append(("think time (s)", sessions["think_s"]))
    return [(name, [quantity(values[stat]) for stat in STATS]) for name, values in rows]


def facts_of(facts: Facts) -> list[tuple[str, str]]:
    """(name, what) of everything else, in the order in which people ask."""
    arrivals = facts["arrivals"]
    peak, cv = quantity(arrivals["peak_over_mean_60s"]), quantity(arrivals["gap_cv"])
    rows = [
        ("Requests", f"{facts['requests']:,} over {seconds(facts['span_s'])}"),
        ("Rate", f"{quantity(arrivals['requests_per_s'])} requests/s; {quantity(facts['input_tokens_per_s'])} tokens/s "
                 f"in, {quantity(facts['output_tokens_per_s'])} tokens/s out"),
        ("Burstiness", f"CV of gaps {cv} (Poisson: 1), busiest minute {peak} x the mean, longest gap "
                       f"{NONE if arrivals['longest_gap_s'] is None else seconds(arrivals['longest_gap_s'])}"),
    ]  # fmt: skip
    if step := arrivals["grid_s"]:
        rows.append(("Grid", f"{arrivals['distinct_times']:,} distinct arrival times, {seconds(step)} apart"))
    rows.append(("Longest", f"{facts['longest_request_tokens']:,} tokens, prompt and output"))
    if sessions := facts.get("sessions"):
        rows.append(("Sessions", f"{sessions['count']:,}, of which {sessions['of_one_turn']:,} have one turn"))
    if classes := facts.get("classes"):
        rows.append(("Classes", ", ".join(f"{name} {count:,}" for name, count in classes.items())))
    if prefix := facts.get("prefix"):
        rows += prefix_rows(prefix)
    return rows


def prefix_rows(prefix: Facts) -> list[tuple[str, str]]:
    """The shared prefixes, and what caches make of them."""
    blocks, tokens = _exact(prefix["block_hit_rate"]), _exact(prefix["token_hit_rate"])
    size, distinct = prefix["block_tokens"], prefix["distinct_blocks"]
    hit = f"{requests(prefix['requests_with_hits'])} with a hit"
    rows = [
        ("Prefix blocks", f"{prefix['blocks']:,} of {size} tokens, {distinct:,} distinct"),
        ("Hit rate", f"{blocks} of blocks, {tokens} of tokens, in a cache without bounds; {hit}"),
    ]
    if prefix["lru"]:
        sizes = ", ".join(f"{percent(row['block_hit_rate'])} in {row['blocks']:,} blocks" for row in prefix["lru"])
        rows.append(("LRU", sizes))
    if left := prefix["lru_left_out"]:
        rows.append(("", f"not computed, for the time it takes: {', '.join(f'{size:,}' for size in left)} blocks"))
    return rows


def print_facts(facts: Facts, console: Console) -> None:
    """Print everything; fits 80 columns, plain text where `console` is no terminal."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    console.print(Text(facts["source"], style="bold"))
    for line in warnings(facts):
        console.print(Text(line, style="yellow"), highlight=False)
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for name, what in facts_of(facts):
        table.add_row(name, Text(what))
    console.print()
    console.print(table)
    spread = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    spread.add_column("")
    for stat in STATS:
        spread.add_column(stat, justify="right")
    for name, values in lengths(facts):
        spread.add_row(name, *values)
    console.print()
    console.print(spread)
    console.print()
    for note in facts["notes"]:
        console.print(Text(f"Note: {note}."), highlight=False)


def _exact(share: float | None) -> str:
    return NONE if share is None else f"{100 * share:.2f} %"
