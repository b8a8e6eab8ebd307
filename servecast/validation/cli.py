"""`servecast validate`: forecast a run that somebody measured, and say how far off and why. Heavy modules late."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryFile

import click

from servecast.arguments import scenario_argument, set_option
from servecast.errors import ServecastError


@click.command()
@scenario_argument
@click.option(
    "--measured",
    "file",
    type=click.Path(path_type=Path),
    required=True,
    help="What a load generator saved of a real run of the deployment that SCENARIO describes.",
)
@click.option("--format", metavar="NAME", help="Format of the file. [default: recognised from its content]")
@click.option("--run", "number", metavar="N", type=int, help="Which run, from 1, of a file that holds several.")
@set_option
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for the report. [default: runs/, the name of the scenario file and -validation]",
)
@click.option("--json", "as_json", is_flag=True, help="Print the numbers as JSON only; write files only with --out.")
def validate(
    scenario: Path,
    file: Path,
    format: str | None,
    number: int | None,
    overrides: tuple[str, ...],
    out: Path | None,
    as_json: bool,
) -> None:
    """Forecast the run in a result file, and compare: how far off is SCENARIO, and what may be the cause?

    Read are the results of vllm bench serve, sglang, GuideLLM, aiperf and others. Recorded requests are replayed at
    their times and with their lengths; a file with aggregates only is compared with the scenario's own workload.

    \b
    servecast validate scenario.yaml --measured result.json
    servecast validate scenario.yaml --measured result.json --set engine.max_num_seqs=128 --out runs/try
    """
    from reports.formats import read_measured
    from servecast.scenario import load_scenario
    from servecast.validation.validate import save
    from servecast.validation.validate import validate as compare

    described = load_scenario(scenario, overrides)
    run = read_measured(file, format, number)
    if not as_json:
        out = out or Path("runs") / f"{scenario.stem}-validation"
    if out is not None:
        _make_folder(out)
    found = compare(described, run)
    if as_json:
        from reports.validation.json import validation_json

        click.echo(validation_json(found), nl=False)
    else:
        from rich.console import Console

        from reports.validation.terminal import print_validation

        print_validation(found, Console())
    if out is not None:
        save(found, out)
        click.echo(f"Report: {out / 'report.html'}   (also validation.json)", err=as_json)


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise ServecastError(f"--out {out}: no files can be written there: {error.strerror or error}") from None
