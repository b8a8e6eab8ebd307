"""The summary of a run as people read it in a terminal: verdict first, then what is missing, then the numbers."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from reports import drafts, pool_words, spent, tier_words, words
from reports.cost_words import cost_facts
from reports.words import gib, percent, quantity
from sim.result import Result

STYLES = {"stable": "bold green", "saturated": "bold red"}


def print_summary(result: Result, console: Console) -> None:
    """Print the run's summary. Fits 80 columns; plain text where `console` is no terminal."""
    s = result.summary()
    word, why = words.verdict(result)
    lines = [Text(words.title(result), style="bold"), Text(words.setup(result)), Text()]
    lines.append(Text.assemble((words.headline(word), STYLES.get(word, "bold yellow")), f": {why}."))
    if consequence := words.consequence(word):
        lines.append(Text(consequence))
    lines += [Text(notice, style="yellow") for notice in words.notices(result, s)]
    for line in lines:
        console.print(line, highlight=False)
    latencies = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    latencies.add_column("")
    latencies.add_column("")
    for stat in ("mean", "p50", "p90", "p99"):
        latencies.add_column(stat, justify="right", min_width=9)
    for name, key in words.shown(s).items():
        unit, values = words.latency_row(s, key)
        latencies.add_row(name, unit, *values)
    console.print()
    console.print(latencies)
    console.print()
    said, rows = words.interval_rows(result.manifest)
    if rows:
        sure = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        for column in ("", "mean", "p50", "p90", "p99"):
            sure.add_column(column, justify="right" if column else "left")
        for name, cells in rows:
            sure.add_row(name, *cells)
        console.print(Text(f"{said}:"), sure, sep="\n")
        console.print()
    for key, head, columns, row in (
        ("classes", "class", words.CLASS_COLUMNS, words.class_row),
        ("pools", "pool", pool_words.POOL_COLUMNS, pool_words.pool_row),
    ):
        if key in s:
            table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
            table.add_column(head, overflow="fold")
            for column in columns:
                table.add_column(column, justify="right")
            for name, one in s[key].items():
                table.add_row(Text(name), *row(one))
            console.print(table)
            console.print()
    if handed := s.get("handed_over"):
        stages = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        for column in ("", "mean", "p50", "p90", "p99"):
            stages.add_column(column, justify="right" if column else "left")
        for name, cells in pool_words.stage_rows(handed):
            stages.add_row(name, *cells)
        console.print(Text(pool_words.handed_over(handed)), stages, sep="\n")
        console.print()
    facts = Table(box=None, show_header=False, pad_edge=False)
    facts.add_column(no_wrap=True)
    facts.add_column()
    for name, fact in _facts(result, s):
        facts.add_row(name, Text(fact))
    console.print(facts)
    console.print()
    for sentence in (*words.notes(result), *words.pricing(result)):
        console.print(Text(sentence), highlight=False)


def _facts(result: Result, s: dict[str, Any]) -> list[tuple[str, str]]:
    """The rows below the latencies."""

    def number(key: str) -> str:
        return quantity(s[key])

    facts = [("Requests", f"{s['completed']:,} of {s['submitted']:,} finished in {words.seconds(s['duration'])}")]
    if not s["engine_steps"]:
        return facts
    tokens = f"{number('input_throughput')} tokens/s in, {number('output_throughput')} tokens/s out"
    facts.append(("Throughput", f"{number('request_throughput')} requests/s, {tokens}"))
    if s["request_goodput"] is not None:
        limits = words.slo(result.slo) if result.slo else "the SLO of their class"
        met = f"{percent(s['slo_attainment'])} meet {limits}"
        facts.append(("Goodput", f"{number('request_goodput')} requests/s ({met})"))
    if said := words.gaps(s):
        facts.append(("Gaps", said))
    if said := words.given_up(s):
        facts.append(("Time-outs", said))
    went = [(f"{metric} is", said) for metric, said in spent.said(s["spent"])]
    found = s["prefix_cache_hit_rate"]
    kv = [
        f"{stat} {percent(s[f'kv_{stat}_fraction'])} ({gib(s[f'{stat}_kv_cache_memory_used'])} per GPU)"
        for stat in ("peak", "mean")
    ]
    return [
        *facts,
        *went,
        ("KV cache", ", ".join(kv)),
        *([("KV held", said)] if (said := words.held(s)) else []),
        ("Queue", f"mean {number('mean_queue_size')}, peak {number('peak_queue_size')} requests waiting"),
        (
            "Batch",
            f"mean {number('mean_batch_size_current')}, peak {number('peak_batch_size_current')} requests a step"
            + " and replica" * (result.deployment.replicas > 1),
        ),
        *[("Stages", said) for said in pool_words.pipelines(s)],
        *[("Replicas", said) for said in pool_words.came_and_went(s)],
        ("Preemptions", "; ".join(filter(None, words.preemptions(s)))),
        *[("Drafts", said) for said in drafts.said(s, result.manifest)],
        *([("Prefix hits", f"{percent(found)} of prompt tokens")] if found is not None else []),
        *[(f"KV from {name}", said) for name, said in tier_words.found(s)],
        *([("KV loads", waited)] if (waited := tier_words.waited(s)) else []),
        *cost_facts(s, result.manifest),
    ]
