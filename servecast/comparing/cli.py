"""`servecast compare`: the same requests under several scenarios. Heavy modules late."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import click

from servecast.arguments import intervals_option, set_option
from servecast.output import PARTIAL, progress_line, write_texts


@click.command()
@click.argument("scenarios", type=click.Path(path_type=Path), nargs=-1, required=True)
@click.option(
    "--vary", multiple=True, metavar="KEY=VALUES", help="Compare these values of a key of the only scenario: a,b."
)
@set_option
@click.option("--seeds", type=int, default=5, metavar="N", help="Run every scenario under N seeds. [default: 5]")
@intervals_option("Also run so many draws of the model's error, the same for all.")
@click.option("--workers", type=click.IntRange(min=1), metavar="N", help="Runs at a time. [default: one a core]")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for the report. [default: runs/, the name of the first scenario file and -compare]",
)
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON only; write files only with --out.")
def compare(
    scenarios: tuple[Path, ...],
    vary: tuple[str, ...],
    overrides: tuple[str, ...],
    seeds: int,
    intervals: int | None,
    workers: int | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Run SCENARIOS on the same requests: which is better than the first, by more than chance, and why?

    \b
    servecast compare today.yaml tomorrow.yaml
    servecast compare scenario.yaml --vary engine.max_num_seqs=64,256
    servecast compare scenario.yaml --vary cluster.gpu=h100-sxm,l40s --seeds 10 --intervals
    """
    from servecast.comparing.compare import compare as run_all

    show, close = progress_line()
    try:
        found = run_all(
            scenarios,
            vary,
            overrides=overrides,
            seeds=seeds,
            intervals=intervals or 0,
            workers=workers,
            told=partial(show, "runs"),
        )
    except KeyboardInterrupt:
        click.echo("Ended early: a comparison has no part that could be kept.", err=True)
        sys.exit(PARTIAL)
    finally:
        close()
    if as_json:
        click.echo(json.dumps(found.plain(), indent=1, allow_nan=False))
    else:
        from rich.console import Console

        from reports.comparing.terminal import print_compared

        print_compared(found, Console())
        out = out or Path("runs") / f"{scenarios[0].stem}-compare"
    if out is not None:
        from reports.comparing.page import compare_html

        text = json.dumps(found.plain(), indent=1, allow_nan=False)
        write_texts(out, {"compare.json": text, "report.html": compare_html(found)}, "the comparison")
        click.echo(f"Report: {out / 'report.html'}   (also compare.json)", err=as_json)
