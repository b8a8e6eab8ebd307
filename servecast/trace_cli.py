"""`servecast trace`: look at a trace file, change it, write it in one form. Heavy modules are imported late."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from servecast.errors import ServecastError

if TYPE_CHECKING:
    from workloads.trace import Trace

OPTIONS = (
    click.option("--format", metavar="NAME", help="Format of FILE. [default: recognised from its column names]"),
    click.option("--block-tokens", type=int, help="Tokens of a prefix block, where the format leaves it open."),
    click.option(
        "--spread", metavar="SECONDS", type=float, help="Begin sessions without a start at random times in it."
    ),
    click.option("--shared-prefix", is_flag=True, help="Claude Code: sessions share tool schemas and system prompts."),
    click.option(
        "--window", metavar="START END", nargs=2, type=float, help="Keep the arrivals in [START, END) seconds."
    ),
    click.option("--sample", metavar="SHARE", type=float, help="Keep a random share, 0 to 1, of the sessions."),
    click.option("--first", metavar="N", type=int, help="Keep the first N requests."),
    click.option("--rate", metavar="FACTOR", type=float, help="Let requests arrive FACTOR times as fast."),
    click.option("--jitter", metavar="SECONDS", type=float, help="Move every arrival by a random time below it."),
    click.option("--scale-prompt", metavar="FACTOR", type=float, default=1.0, help="Multiply prompt lengths."),
    click.option("--scale-output", metavar="FACTOR", type=float, default=1.0, help="Multiply output lengths."),
    click.option("--max-prompt", metavar="TOKENS", type=int, help="Limit of prompts."),
    click.option("--max-output", metavar="TOKENS", type=int, help="Limit of outputs."),
    click.option("--max-total", metavar="TOKENS", type=int, help="Limit of prompt and output together."),
    click.option(
        "--over-long",
        type=click.Choice(["reject", "truncate"]),
        default="reject",
        show_default=True,
        help="What becomes of requests over a limit: counted and left to the engine, or cut.",
    ),
    click.option("--seed", type=int, default=0, show_default=True, help="Of everything random."),
)
"""What every command takes: how to read the file, then what to change, in the order in which it is done."""


def _reads_a_trace(command: Callable[..., None]) -> Callable[..., None]:
    """Gives the command the path and the trace that the shared options describe, before its own options."""

    @wraps(command)
    def with_trace(file: Path, **given: Any) -> None:
        names = set(signature(_trace).parameters) - {"file"}
        own = {name: value for name, value in given.items() if name not in names}
        if (check := own.get("out")) is not None:
            _check_out(check, command.__name__)
        command(file, _trace(file, **{name: given[name] for name in names}), **own)

    for option in reversed(OPTIONS):
        with_trace = option(with_trace)
    return click.argument("file", type=click.Path(path_type=Path))(with_trace)


@click.group()
def trace() -> None:
    """Look at trace files, change them, write them in one form.

    \b
    Read are CSV, JSONL (both also gzipped) and Parquet of: Azure 2023 to 2025, BurstGPT 1 to 3, Mooncake, aiperf's
    Mooncake, vLLM's timed_trace, Qwen-Bailian, RAGPulse, Claude Code sessions, and plain tables.
    """


@trace.command()
@_reads_a_trace
@click.option("--max-model-len", metavar="TOKENS", type=click.IntRange(1), help="Count the requests that are longer.")
@click.option("--json", "as_json", is_flag=True, help="Print the numbers as JSON.")
def info(file: Path, trace: Trace, max_model_len: int | None, as_json: bool) -> None:
    """Print what FILE holds: counts, rates, burstiness, lengths, sessions, shared prefixes."""
    from workloads.statistics import describe

    facts = describe(trace, max_model_len=max_model_len)
    if as_json:
        import json

        click.echo(json.dumps(facts, indent=2, allow_nan=False))
        return
    from rich.console import Console

    from reports.trace_words import print_facts

    print_facts(facts, Console())


@trace.command()
@_reads_a_trace
@click.option("--out", type=click.Path(path_type=Path), required=True, help="A .parquet, .jsonl or .jsonl.gz file.")
def convert(file: Path, trace: Trace, out: Path) -> None:
    """Write FILE in the canonical form, with everything that is known of its requests."""
    from workloads.write import write_trace

    write_trace(trace, out)
    for note in trace.notes:
        click.echo(f"Note: {note}", err=True)
    dropped = f"; dropped: {', '.join(f'{n:,} {why}' for why, n in trace.dropped.items())}" if trace.dropped else ""
    click.echo(f"{out}: {len(trace):,} requests over {trace.arrival_s[-1]:,.0f} s{dropped}")


@trace.command()
@_reads_a_trace
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The page, an .html file.")
def plot(file: Path, trace: Trace, out: Path) -> None:
    """Draw FILE: one page with arrivals, lengths, shared prefixes and sessions."""
    from reports.trace_page import trace_html

    part = out.with_name(out.name + ".part")
    try:
        part.write_text(trace_html(trace, file.name), encoding="utf-8")
        part.replace(out)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise ServecastError(f"--out {out}: cannot be written: {error.strerror or error}") from None
    click.echo(f"Page: {out}")


def _check_out(out: Path, command: str) -> None:
    """Raises ServecastError before the work, not after it."""
    from workloads.write import check_ending

    if command == "convert":
        check_ending(out)
    if not out.parent.is_dir():
        raise ServecastError(f"--out {out}: no folder {out.parent}")
    if out.is_dir():
        raise ServecastError(f"--out {out}: a folder; name a file")


def _trace(
    file: Path,
    *,
    format: str | None,
    block_tokens: int | None,
    spread: float | None,
    shared_prefix: bool,
    window: tuple[float, float] | None,
    sample: float | None,
    first: int | None,
    rate: float | None,
    jitter: float | None,
    scale_prompt: float,
    scale_output: float,
    max_prompt: int | None,
    max_output: int | None,
    max_total: int | None,
    over_long: Any,
    seed: int,
) -> Trace:
    """The trace, read and changed in the order of `OPTIONS`."""
    from workloads import transform
    from workloads.generate import stream
    from workloads.readers import read_trace
    from workloads.readers.options import ReadOptions

    stream(seed, "trace")  # says what is wrong with the seed
    trace = read_trace(file, format, ReadOptions(block_tokens, spread, shared_prefix, seed))
    if window is not None:
        trace = trace.window(*window)
    if sample is not None:
        trace = transform.sample(trace, sample, seed)
    if first is not None:
        trace = trace.head(first)
    if rate is not None:
        trace = trace.scale_rate(rate)
    if jitter is not None:
        trace = transform.jitter(trace, jitter, seed)
    if (scale_prompt, scale_output) != (1, 1):
        trace = transform.scale_lengths(trace, scale_prompt, scale_output)
    return transform.limit_lengths(trace, prompt=max_prompt, output=max_output, total=max_total, over_long=over_long)
