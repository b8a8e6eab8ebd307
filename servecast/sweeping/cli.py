"""`servecast sweep`: the same scenario at many points. Heavy modules late."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from servecast.arguments import intervals_option, scenario_argument, set_option
from servecast.errors import ServecastError
from servecast.output import PARTIAL

if TYPE_CHECKING:
    from servecast.sweeping.sweep import Estimate, Progress

EVERY_S = 60.0
"""How often progress is said where there is no terminal."""


@click.command()
@scenario_argument
@click.option(
    "--vary",
    multiple=True,
    metavar="KEY=VALUES",
    help="What to vary: a,b,c or low:high:steps (log:low:high:steps); may be repeated. KEY+KEY=[a,b],[c,d] sets both.",
)
@set_option
@click.option("--seeds", type=int, default=1, metavar="N", help="Run every point under N seeds. [default: 1]")
@intervals_option("Also run every point under so many draws of the model's error, the same for all.")
@click.option("--sample", "samples", type=int, metavar="N", help="Run N points of the space, not all combinations.")
@click.option(
    "--sampler",
    type=click.Choice(["latin-hypercube", "sobol"]),
    default="latin-hypercube",
    help="How --sample chooses. [default: latin-hypercube]",
)
@click.option("--workers", type=click.IntRange(min=1), metavar="N", help="Runs at a time. [default: one a core]")
@click.option(
    "--backend", type=click.Choice(["local", "dask", "ray"]), default="local", help="Where it runs. [default: local]"
)
@click.option(
    "--address", metavar="ADDRESS", help="Of the Dask scheduler or Ray head. [default: a cluster on this machine]"
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for rows and report. [default: runs/, the name of the scenario file and -sweep]",
)
@click.option("--yes", is_flag=True, help="Do not ask before more than a thousand runs.")
@click.option("--json", "as_json", is_flag=True, help="Print points, fronts and errors as JSON only.")
def sweep(
    scenario: Path,
    vary: tuple[str, ...],
    overrides: tuple[str, ...],
    seeds: int,
    intervals: int | None,
    samples: int | None,
    sampler: str,
    workers: int | None,
    backend: str,
    address: str | None,
    out: Path | None,
    yes: bool,
    as_json: bool,
) -> None:
    """Run SCENARIO at every combination of values, in parallel: which configuration gives the most, and at what price?

    Rows land in a folder as runs finish; the same command goes on where it stopped. --set changes all runs.

    \b
    servecast sweep scenario.yaml --vary cluster.gpu=h100-sxm,b200-sxm --vary engine.max_num_seqs=32,64,128
    servecast sweep scenario.yaml --vary workload.arrivals.rate=2:20:10 --seeds 3 --intervals
    servecast sweep scenario.yaml --vary workload.arrivals.rate=2:20 --vary cluster.tp=1,2,4 --sample 64
    """
    from servecast.sweeping.sweep import sweep as run_all

    folder = out or Path("runs") / f"{scenario.stem}-sweep"
    show, close = _progress()
    try:
        swept = run_all(
            scenario, vary, folder, overrides=overrides, seeds=seeds, intervals=intervals or 0, samples=samples,
            sampler=sampler, backend=backend, workers=workers, address=address, told=show,  # type: ignore[arg-type]
            ask=(lambda estimate: True) if yes else _ask,
        )  # fmt: skip
    except KeyboardInterrupt:
        click.echo(f"Ended early: what had run is kept in {folder}; the same command goes on.", err=True)
        sys.exit(PARTIAL)
    finally:
        close()
    if as_json:
        from reports.sweeping.json import sweep_json

        click.echo(sweep_json(swept), nl=False)
    else:
        from rich.console import Console

        from reports.sweeping.terminal import print_sweep

        print_sweep(swept, Console())
    if swept.points.height:
        click.echo(f"Report: {folder / 'report.html'}   (also rows/, a row a run, and sweep.json)", err=as_json)
    if not swept.complete:
        kept = swept.rows.height
        click.echo(f"Ended early: {kept:,} of {swept.total:,} runs are kept; the same command goes on.", err=True)
        sys.exit(PARTIAL)


def _ask(estimate: Estimate) -> bool:
    from reports.words import seconds

    if estimate.cores is None:
        took = f"{seconds(estimate.core_s)} of one core's time, shared by the cluster's"
    else:
        took = f"{seconds(estimate.core_s / estimate.cores)} on {estimate.cores} cores"
    said = f"{estimate.runs:,} runs: about {took}, and {estimate.disk_bytes / 1e6:,.0f} MB on the disk. Go on?"
    try:
        return click.confirm(said, err=True)
    except click.Abort:  # nobody is there to answer
        raise ServecastError(f"{said} Nobody answered; give --yes to start without being asked") from None


def _progress() -> tuple[Callable[[Progress], None], Callable[[], None]]:
    """A function that shows how far a sweep is, and one that takes the bar away again."""
    started = said = time.monotonic()
    bar = None

    def left_s(now: Progress) -> float:
        done = now.done - now.before
        return (time.monotonic() - started) / done * (now.total - now.done) if done else 0.0

    def show(now: Progress) -> None:
        nonlocal bar, said, started
        if now.done == now.before:
            started = time.monotonic()
        wrong = f", {now.failed:,} failed" * bool(now.failed) + f", {now.invalid:,} left out" * bool(now.invalid)
        if not sys.stderr.isatty():
            if time.monotonic() - said > EVERY_S and now.done > now.before:
                from reports.words import seconds

                said = time.monotonic()
                click.echo(f"{now.done:,} of {now.total:,} runs{wrong}; about {seconds(left_s(now))} left", err=True)
            return
        if bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            bar = Progress(*columns, console=Console(stderr=True), transient=True)
            bar.add_task("runs", total=now.total, completed=now.before)
            bar.start()
        bar.update(bar.task_ids[0], completed=now.done, description=f"runs{wrong}")

    return show, lambda: bar.stop() if bar is not None else None
