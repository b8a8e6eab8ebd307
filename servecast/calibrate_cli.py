"""`servecast calibrate`: measure a device, import others' tables, fit a profile, look at it. Heavy modules late."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from servecast.errors import ServecastError

if TYPE_CHECKING:
    from calibrate.measurements import Measurements

OUT = click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="The profile to write, a JSON file."
)


@click.group()
def calibrate() -> None:
    """Make the profile of a GPU, from its measured kernels, and look at it.

    \b
    servecast calibrate measure --device cpu --budget 10m --out cpu.json
    servecast calibrate import aiconfigurator systems/data/h100_sxm --out h100.json
    servecast calibrate show h100.json --html h100.html
    servecast calibrate diff h100.json h200.json
    """


@calibrate.command()
@click.option("--device", type=click.Choice(["cuda", "cpu"]), required=True, help="What to measure.")
@click.option("--dtype", help="What multiplications run in. [default: bf16 on a GPU, fp32 on a CPU]")
@click.option("--budget", default="10m", show_default=True, metavar="TIME", help="About how long it may take.")
@click.option("--model", "models", multiple=True, help="A model whose shapes to measure; may be repeated.")
@click.option(
    "--save",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of the measurements; what it holds is kept and gone on with. [default: OUT without .json]",
)
@OUT
def measure(device: str, dtype: str | None, budget: str, models: tuple[str, ...], save: Path | None, out: Path) -> None:
    """Run the kernels of a serving step on this machine's device, and fit a profile to their times.

    The most telling points come first; ctrl-C keeps those measured so far, and the same command goes on with them.
    Needs torch: pip install "servecast[calibrate]".
    """
    from calibrate.measure import measure as run
    from workloads.units import parse_duration

    try:
        budget_s = parse_duration(budget)
    except ValueError as error:
        raise ServecastError(f"--budget: {error}") from None
    _check_folder(out)
    folder = save or out.with_suffix("")

    def told(family: str, done: int, of: int, left_s: float) -> None:
        if sys.stderr.isatty():
            click.echo(f"\r{family}: {done} of {of} points, {left_s:,.0f} s left   ", nl=False, err=True)

    measured = run(device, folder, budget_s, dtype, models, told)
    click.echo(f"Measurements: {folder}")
    _fit([measured], out)


@calibrate.command("import")
@click.argument("format")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--gpu", help="Which GPU of the catalogue, where PATH holds several.")
@click.option("--save", type=click.Path(path_type=Path, file_okay=False), help="Also keep the measurements, a folder.")
@OUT
def import_(format: str, path: Path, gpu: str | None, save: Path | None, out: Path) -> None:
    """Fit a profile to kernel tables that others published.

    FORMAT is aiconfigurator, llmservingsim, vidur or splitwise; PATH a folder of it.
    """
    from calibrate.importers import import_measurements

    measured = import_measurements(format, path, gpu)
    for family, table in measured.tables.items():
        click.echo(f"{family}: {len(table):,} points")
    for note in measured.device.notes:
        click.echo(f"Note: {note}")
    if save is not None:
        measured.save(save)
    _fit([measured], out)


@calibrate.command()
@click.argument("folders", type=click.Path(path_type=Path), nargs=-1, required=True)
@OUT
def fit(folders: tuple[Path, ...], out: Path) -> None:
    """Fit a profile to saved measurements.

    Several FOLDERS of one GPU complete each other: a family is taken from the first that has it.
    """
    from calibrate.measurements import load_measurements

    _fit([load_measurements(folder) for folder in folders], out)


@calibrate.command()
@click.argument("profile")
@click.option(
    "--against",
    metavar="FOLDER",
    type=click.Path(path_type=Path),
    help="Also compare its prices with saved measurements of the GPU.",
)
@click.option("--all", "everything", is_flag=True, help="Print every size, kind and note.")
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), help="Also write one HTML page, with figures.")
def show(profile: str, against: Path | None, everything: bool, html: Path | None) -> None:
    """Print what PROFILE (a file, or a GPU whose profile is shipped) holds: whose measurements, of what, what the
    kernels reach of the datasheet, and how far the fit is off."""
    from rich.console import Console

    from calibrate.measurements import load_measurements
    from reports.profile_against import compare
    from reports.profile_terminal import print_against, print_profile
    from servecast.profiles import find_profile

    if html is not None and not html.parent.is_dir():
        raise ServecastError(f"--html {html}: there is no folder {html.parent}")
    found = find_profile(profile)
    compared = None if against is None else compare(found, load_measurements(against))
    print_profile(found, Console(), everything=everything)
    if compared is not None:
        print_against(compared, Console())
    if html is not None:
        from reports.profile_page import profile_html

        _write(html, profile_html(found, compared))
        click.echo(f"\nPage: {html}")


@calibrate.command()
@click.argument("a")
@click.argument("b")
def diff(a: str, b: str) -> None:
    """Print where the prices of profile B differ from those of profile A.

    Both are files, or GPUs whose profiles are shipped. Compared are the shapes of catalogued models, at sizes that
    both have measured.
    """
    from rich.console import Console

    from reports.profile_terminal import print_diff
    from servecast.profiles import find_profile

    print_diff((a, b), (find_profile(a), find_profile(b)), Console())


def _fit(measured: Sequence[Measurements], out: Path) -> None:
    from rich.console import Console

    from calibrate.fit import fit_profile
    from reports.profile_terminal import print_profile

    _check_folder(out)
    profile = fit_profile(measured, lambda family, off: click.echo(f"fitted {family}", err=True))
    _write(out, profile.to_text())
    print_profile(profile, Console())
    click.echo(f"Profile: {out}")


def _check_folder(out: Path) -> None:
    if not out.parent.is_dir():
        raise ServecastError(f"--out {out}: there is no folder {out.parent}")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ServecastError(f"{path}: cannot be written: {error.strerror or error}") from None
