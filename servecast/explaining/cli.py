"""`servecast explain`: what bounds an engine, and what one request takes on it. Heavy modules late."""

from __future__ import annotations

import json
from pathlib import Path

import click

from servecast.arguments import set_option
from servecast.output import write_texts


@click.command()
@click.argument("scenario", type=click.Path(path_type=Path))
@set_option
@click.option(
    "--prompt", type=click.IntRange(1), metavar="TOKENS", help="Of the request. [default: the workload's mean]"
)
@click.option(
    "--output", type=click.IntRange(1), metavar="TOKENS", help="Of the request. [default: the workload's mean]"
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for the page. [default: runs/, the name of the scenario file and -explain]",
)
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON only; write files only with --out.")
def explain(
    scenario: Path, overrides: tuple[str, ...], prompt: int | None, output: int | None, out: Path | None, as_json: bool
) -> None:
    """Say what bounds an engine of SCENARIO, what one request takes on it alone and among others, and what a KV cache,
    batches, chunks and fewer bits are worth.

    \b
    servecast explain scenarios/quickstart.yaml
    servecast explain scenarios/quickstart.yaml --prompt 8000 --output 200 --set cluster.gpu=l40s
    """
    from reports.explaining.facts import plain
    from servecast.explaining.explain import explain as look

    found = look(scenario, overrides, prompt=prompt, output=output)
    text = json.dumps([plain(each) for each in found], indent=1, allow_nan=False)
    if as_json:
        click.echo(text)
    else:
        from rich.console import Console

        from reports.explaining.terminal import print_explained

        for i, each in enumerate(found):
            click.echo("\n" * bool(i), nl=False)
            print_explained(each, Console())
        out = out or Path("runs") / f"{scenario.stem}-explain"
    if out is not None:
        from reports.explaining.page import explain_html

        write_texts(out, {"explain.json": text, "report.html": explain_html(found)}, "the page")
        click.echo(f"Report: {out / 'report.html'}   (also explain.json)", err=as_json)
