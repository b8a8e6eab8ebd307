"""`servecast export`: a saved result in another tool's format. Heavy modules late."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("result", type=click.Path(path_type=Path))
@click.option(
    "--format",
    metavar="NAME",
    required=True,
    help="vllm, sglang, guidellm, aiperf, aiperf_records, csv, table, perfetto or pdf.",
)
@click.option(
    "--out", type=click.Path(path_type=Path), help="The file, or a folder for it. [default: in the result's folder]"
)
@click.option(
    "--window", metavar="START END", nargs=2, type=float, help="perfetto: show what overlaps these seconds. [all]"
)
def export(result: Path, format: str, out: Path | None, window: tuple[float, float] | None) -> None:
    """Write RESULT, a folder that servecast run saved, in the format of a tool that you plot with; as pdf the page in a
    folder of any command's, which a browser of this machine prints.

    \b
    servecast export runs/quickstart --format vllm
    servecast export runs/quickstart --format perfetto --window 10 20 --out trace.json
    servecast export plans/quickstart --format pdf
    """
    from servecast.exporting import export as write

    written = write(result, format, out, window)
    for note in written.notes:
        click.echo(f"Note: {note}", err=True)
    click.echo(f"Written: {written.path}")
