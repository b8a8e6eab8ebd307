"""The command line. Everything heavy is imported by the command that needs it."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

import click

from servecast.anchoring import cli as anchoring
from servecast.arguments import intervals_option, set_option
from servecast.calibrate_cli import calibrate
from servecast.comparing.cli import compare
from servecast.conformance import cli as conformance
from servecast.diagnosing.cli import diagnose
from servecast.errors import ServecastError
from servecast.explaining.cli import explain
from servecast.export_cli import export
from servecast.memory_cli import memory
from servecast.output import PARTIAL
from servecast.planning.cli import plan
from servecast.sweeping.cli import sweep
from servecast.trace_cli import trace
from servecast.validation.cli import validate

if TYPE_CHECKING:
    from servecast.run import Result
    from servecast.setup import Setup


class _Group(click.Group):
    """Prints a user's mistakes, all of them, and exits with 2."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ServecastError as error:
            problems = error.problems
        except MemoryError as error:
            problems = (
                f"not enough memory: {error}; is workload.num_requests or the trace too large for this machine?",
            )
        for problem in problems:
            click.echo(f"Error: {problem}", err=True)
        ctx.exit(2)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="servecast", prog_name="servecast")
def main() -> None:
    """Forecast how an LLM serving deployment will behave: TTFT, TPOT, throughput and KV memory."""


@main.command()
@click.argument("scenario", type=click.Path(path_type=Path), required=False)
@set_option
@click.option(
    "--serve-args",
    metavar="LINE",
    help="The line that starts your engine, in place of the scenario's model, engine and tp: vllm serve ..., "
    "python -m sglang.launch_server ..., trtllm-serve ...",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for the results. [default: runs/ and the name of the scenario file]",
)
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON only; write files only with --out.")
@intervals_option("Say how sure it is: simulate again under so many draws of what may be wrong.")
@click.option("--show-resolved", is_flag=True, help="Print the scenario with every default filled in, and stop.")
@click.option("--serve-line", is_flag=True, help="Print the command that starts each pool's engine, and stop.")
def run(
    scenario: Path | None,
    overrides: tuple[str, ...],
    serve_args: str | None,
    out: Path | None,
    as_json: bool,
    intervals: int | None,
    show_resolved: bool,
    serve_line: bool,
) -> None:
    """Replay the workload of SCENARIO, a YAML file, and report latencies, throughput and memory.

    \b
    servecast run scenarios/quickstart.yaml
    servecast run scenarios/quickstart.yaml --set engine.max_num_seqs=64 --out runs/seqs64
    servecast run scenarios/quickstart.yaml --serve-args "vllm serve Qwen/Qwen3-8B --max-num-seqs 64"
    """
    if scenario is None:
        raise _no_scenario(serve_args)
    from servecast.scenario import load_scenario
    from servecast.setup import set_up

    setup = set_up(load_scenario(scenario, overrides, serve_args))
    if show_resolved:
        click.echo(_resolved(setup), nl=False)
        return
    if serve_line:
        from servecast.serve_lines import commands

        click.echo("\n".join(command.text for command in commands(setup)))
        return
    if not as_json:
        out = out or Path("runs") / scenario.stem
    if out is not None:
        _make_folder(out)  # now, not when a long run has ended
    result = _simulate(setup)
    if intervals and result.complete:
        from servecast.intervals import predict_intervals

        result.manifest = {**result.manifest, "intervals": predict_intervals(setup, intervals).summary()}
    if as_json:
        import json

        found = result.summary() | ({"intervals": result.manifest["intervals"]} if intervals else {})
        click.echo(json.dumps(found, indent=2, allow_nan=False))
    else:
        from rich.console import Console

        from reports.terminal import print_summary

        print_summary(result, Console())
    if out is not None:
        result.save(out)
        click.echo(
            f"Report: {out / 'report.html'}   (also summary.json, requests.parquet, steps.parquet, manifest.json)",
            err=as_json,
        )
    if not result.complete:
        sys.exit(PARTIAL)


@main.command("list")
@click.argument("what", type=click.Choice(["models", "gpus", "presets", "mixes", "acceptance", "prices", "scenarios"]))
def list_(what: str) -> None:
    """The names that scenarios can use, and the scenarios that come with servecast."""
    from servecast.listing import LISTINGS

    for line in LISTINGS[what]():
        click.echo(line)


main.add_command(diagnose)
main.add_command(explain)
main.add_command(memory)
main.add_command(trace)
main.add_command(calibrate)
for command in (*anchoring.COMMANDS, *conformance.COMMANDS):
    calibrate.add_command(command)
main.add_command(validate)
main.add_command(compare)
main.add_command(sweep)
main.add_command(plan)
main.add_command(export)


def _no_scenario(serve_args: str | None) -> Exception:
    """What is still needed, beside all that is wrong with the line."""
    if serve_args is None:
        return click.UsageError("Missing argument 'SCENARIO'.", click.get_current_context())
    from servecast.serve_args import problems_of

    return ServecastError(
        *problems_of(serve_args),
        "--serve-args says what is served, not on which GPU and to whom: give a SCENARIO too, whose cluster.gpu and "
        'workload stay, as in servecast run scenarios/quickstart.yaml --serve-args "..."',
    )


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise ServecastError(f"--out {out}: no files can be written there: {error.strerror or error}") from None


def _simulate(setup: Setup) -> Result:
    """Run with a progress bar on a terminal; the first ctrl-C ends the simulation and keeps what is done."""
    from servecast.run import simulate

    stopped = False

    def stop(signum: int, frame: object) -> None:
        nonlocal stopped
        stopped = True
        signal.signal(signal.SIGINT, previous)  # a second ctrl-C ends the program

    previous = signal.signal(signal.SIGINT, stop)
    show, close = _progress()
    try:
        return simulate(setup, lambda done, total, now: show(done, total, now) and not stopped)
    finally:
        close()
        signal.signal(signal.SIGINT, previous)


def _progress() -> tuple[Callable[[int, int, float], bool], Callable[[], None]]:
    """A function that shows how far a run is, once it has taken a second, and one that takes the bar away again."""
    started, bar = time.monotonic(), None

    def show(done: int, total: int, now: float) -> bool:
        nonlocal bar
        if not sys.stderr.isatty():
            return True
        if bar is None and time.monotonic() - started > 1:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            bar = Progress(*columns, console=Console(stderr=True), transient=True)
            bar.add_task("requests", total=total)
            bar.start()
        if bar is not None:
            bar.update(bar.task_ids[0], completed=done, description=f"requests (simulated {now:,.0f} s)")
        return True

    return show, lambda: bar.stop() if bar is not None else None


def _resolved(setup: Setup) -> str:
    """The scenario as YAML that can be run again, every engine option with where its value came from."""
    from servecast.yamlfile import dump_yaml

    text = dump_yaml(setup.resolved())
    lines, path = [], list[tuple[int, str]]()
    pool = -1
    for line in text.splitlines():
        bare = line.lstrip(" -")
        indent, option = len(line) - len(bare), bare.partition(":")[0]
        while path and path[-1][0] >= indent:
            path.pop()
        path.append((indent, option))
        keys = [key for _, key in path]
        pool += keys[:2] == ["cluster", "pools"] and line.lstrip().startswith("- ")
        source = None
        if "engine" in keys[:-1]:
            sources = setup.pools[max(pool, 0) if keys[0] == "cluster" else 0].engine.sources
            source = sources.get(".".join(keys[keys.index("engine") + 1 :]))
        lines.append(f"{line}  # {source}" if source else line)
    notes = dict.fromkeys(f"# {note}" for pool in setup.pools for note in pool.engine.notes)
    about = [*notes, *(f"# {note}" for note in setup.requests.trace.notes)]
    for each in setup.pools:
        kv, which = each.memory, f" ({each.name})" if len(setup.pools) > 1 else ""
        about.append(
            f"# KV cache: {kv.num_gpu_blocks:,} blocks of {kv.block_size} tokens, {kv.kv_tokens:,} tokens a "
            f"replica{which}"
        )
    return "\n".join([*about, *lines]) + "\n"
