"""`servecast diagnose`: why a deployment behaves badly, and what to change. Heavy modules late."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import click

from servecast.arguments import set_option
from servecast.output import PARTIAL, progress_line, write_texts


@click.command()
@click.argument("scenario", type=click.Path(path_type=Path))
@set_option
@click.option(
    "--symptom",
    "symptoms",
    multiple=True,
    metavar="TEXT",
    help="What is seen on the real server: 'p99 ttft = 4s', 'gpu idle = 40 %'; may be repeated. [default: what a "
    "measured run shows, else what misses the scenario's slo, and work that piles up]",
)
@click.option(
    "--measured",
    "file",
    type=click.Path(path_type=Path),
    help="What a load generator saved of a real run; its requests are simulated (see servecast validate).",
)
@click.option("--format", metavar="NAME", help="Format of that file. [default: recognised from its content]")
@click.option("--run", "number", metavar="N", type=int, help="Which run, from 1, of a file that holds several.")
@click.option("--seeds", type=int, default=5, metavar="N", help="Judge causes under N seeds. [default: 5]")
@click.option("--workers", type=click.IntRange(min=1), metavar="N", help="Runs at a time. [default: one a core]")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for the page. [default: runs/, the name of the scenario and -diagnosis]",
)
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON only; write files only with --out.")
def diagnose(
    scenario: Path,
    overrides: tuple[str, ...],
    symptoms: tuple[str, ...],
    file: Path | None,
    format: str | None,
    number: int | None,
    seeds: int,
    workers: int | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Say why the deployment of SCENARIO (a file, or the folder of a saved result) behaves badly.

    Which cause takes most of the symptom away in simulation, how to check it on the real server, which flag to change.

    \b
    servecast diagnose today.yaml
    servecast diagnose today.yaml --symptom "p99 ttft = 4s" --symptom "mean tpot = 60ms"
    servecast diagnose today.yaml --measured bench.json
    """
    from reports.diagnosing.facts import plain
    from servecast.diagnosing.diagnose import diagnose as look
    from servecast.errors import ServecastError

    if file is None and (format is not None or number is not None):
        raise ServecastError("--format, --run: of a measured run; give --measured FILE too")
    run = None
    if file is not None:
        from reports.formats import read_measured

        run = read_measured(file, format, number)
    show, close = progress_line()
    try:
        found = look(
            scenario,
            overrides,
            measured=run,
            symptoms=symptoms,
            seeds=seeds,
            workers=workers,
            told=partial(show, "runs"),
        )
    except KeyboardInterrupt:
        click.echo("Ended early: a diagnosis has no part that could be kept.", err=True)
        sys.exit(PARTIAL)
    finally:
        close()
    text = json.dumps(plain(found), indent=1, allow_nan=False)
    if as_json:
        click.echo(text)
    else:
        from rich.console import Console

        from reports.diagnosing.terminal import print_diagnosed

        print_diagnosed(found, Console())
        out = out or Path("runs") / f"{scenario.stem}-diagnosis"
    if out is not None:
        from reports.diagnosing.page import diagnose_html

        write_texts(out, {"diagnosis.json": text, "report.html": diagnose_html(found)}, "the diagnosis")
        click.echo(f"Report: {out / 'report.html'}   (also diagnosis.json)", err=as_json)
