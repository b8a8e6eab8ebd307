"""`servecast calibrate anchor`: a scenario's `host:` part from measurements, as a table, and put into a copy of it.

What is fitted and what is held out is known to `anchor.py`. The copy is the file's own text with the keys
written into it, so comments stay.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from math import log
from pathlib import Path
from typing import TYPE_CHECKING

import click

from servecast.anchoring.text import block, tried, write
from servecast.arguments import scenario_argument
from servecast.errors import ServecastError

if TYPE_CHECKING:
    from rich.console import Console

    from calibrate.anchor import Estimate
    from reports.measured import MeasuredRun
    from servecast.anchoring.anchor import Anchored

CORRECTION, LARGE, SCATTERED = 0.4, 0.2, 1.5
"""A factor on kernels further from 1 (its logarithm) is no correction; errors above this, and as many times larger than
their noise, are more than the scalars explain."""
ADVICE = {
    "request": "a run at low concurrency (1 to 4) tells request and step",
    "step": "a run at low concurrency (1 to 4) tells request and step",
    "per_sequence": "runs at low and at high concurrency together, or --steps, tell per_sequence",
    "bubble": "--steps tells bubble",
    "kernels": "a run near saturation, or with long prompts, tells kernels",
}
ADVICE_STEPS = "steps under a load that varies, of few and many sequences, short and long prompts"
HEADINGS = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "e2el_ms": "E2E"}


@click.command()
@scenario_argument
@click.option(
    "--measured",
    "files",
    multiple=True,
    type=click.Path(path_type=Path),
    help="What a load generator measured (vllm bench serve and others); may be repeated.",
)
@click.option("--format", "format_", help="Whose format the files have. [default: recognised]")
@click.option("--run", type=int, help="Which run of the file, from 1. [default: all]")
@click.option("--steps", type=click.Path(path_type=Path), help="Instead: steps that an engine recorded of itself.")
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), help="A copy of SCENARIO with the result in it."
)
def anchor(
    scenario: Path, files: tuple[Path, ...], format_: str | None, run: int | None, steps: Path | None, out: Path | None
) -> None:
    """Fit the host times of SCENARIO, and one factor on its kernels, to measurements of the deployment it describes.

    \b
    servecast calibrate anchor my.yaml --measured bench.json --out my-anchored.yaml
    servecast calibrate anchor my.yaml --measured low.json --measured high.json
    servecast calibrate anchor my.yaml --steps steps.jsonl

    What the measurements do not tell stays as it is. Errors before and after are of points that the fit did not see,
    where there are any.
    """
    from rich.console import Console

    from servecast.anchoring.anchor import anchor_runs, anchor_steps

    problems = _contradictions(files, format_, run, steps, out)
    source = tried(problems, scenario)
    runs = _runs(problems, files, format_, run)
    recorded = None
    if steps is not None:
        from calibrate.observe.read import read_steps

        try:
            recorded = read_steps(steps)
        except ServecastError as error:
            problems += error.problems
    if problems or source is None:
        raise ServecastError(*dict.fromkeys(problems))
    shown = sys.stderr.isatty()
    try:
        found = anchor_steps(scenario, recorded) if recorded else anchor_runs(scenario, runs, _progress(shown))
    finally:
        click.echo("\r" + " " * 30 + "\r" if shown else "", nl=False, err=True)
    _print(found, "scenario's" if source.host.model_fields_set else "preset's", Console())
    click.echo(f"\n{block(found.host)}", nl=False)
    if out is not None:
        write(scenario, out, found.host)
        click.echo(f"\nScenario: {out}")


COMMANDS = (anchor,)


def _contradictions(
    files: tuple[Path, ...], format_: str | None, run: int | None, steps: Path | None, out: Path | None
) -> list[str]:
    problems = []
    if bool(files) == (steps is not None):
        problems.append(
            "give --measured (what a load generator measured) or --steps (an engine's own steps), one of them"
        )
    if steps is not None and (format_ is not None or run is not None):
        problems.append("--format and --run belong to --measured")
    if run is not None and len(files) > 1:
        problems.append("--run says which run of one file; without it all runs of all files are used")
    problems += [f"--measured {file}: given twice" for file in dict.fromkeys(files) if files.count(file) > 1]
    if out is not None and out.exists():
        problems.append(f"--out {out}: exists already; name a new file")
    elif out is not None and not out.parent.is_dir():
        problems.append(f"--out {out}: there is no folder {out.parent}")
    return problems


def _runs(problems: list[str], files: tuple[Path, ...], format_: str | None, run: int | None) -> dict[str, MeasuredRun]:
    """The measured runs by a short name; what cannot be read is added to `problems`."""
    from reports.formats import read_all, read_measured

    found: dict[str, MeasuredRun] = {}
    for file in dict.fromkeys(files):
        name = file.name if [f.name for f in files].count(file.name) == 1 else str(file)
        try:
            runs = read_all(file, format_) if run is None else [read_measured(file, format_, run)]
        except ServecastError as error:
            problems += error.problems
            continue
        found |= {name if len(runs) == 1 else f"{name} run {i}": each for i, each in enumerate(runs, 1)}
    return found


def _progress(shown: bool) -> Callable[[], None]:
    """Counts simulations where a person watches."""
    count = itertools.count(1)
    return lambda: click.echo(f"\r{next(count)} simulations", nl=False, err=True) if shown else None


def _print(found: Anchored, whose: str, console: Console) -> None:
    """The scalars, what to know of them, and the errors. Fits 80 columns."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    def table(left: tuple[str, ...], right: tuple[str, ...]) -> Table:
        out = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        for name in left:
            out.add_column(name, overflow="fold")
        for name in right:
            out.add_column(name, justify="right")
        return out

    for note in found.notes:
        console.print(Text(f"Note: {note}."))
    estimates = found.anchor.estimates
    scalars = table(("scalar",), (whose, "anchored", "80 % interval"))
    scalars.add_column("told", overflow="fold")
    for each in estimates:
        scalars.add_row(*_row(each, [other.scalar.name for other in estimates if other.like == each.scalar.name]))
    console.print(scalars)
    for said in _said(found):
        console.print(Text(said))
    console.print(Text(f"\nErrors of {found.checked}:", style="bold"))
    errors = table(("", ""), tuple(f"{head} {when}" for head in found.heads for when in ("before", "after")))
    for error in found.errors:
        cells = [_percent(e, found.signed) for pair in zip(error.before, error.after, strict=True) for e in pair]
        errors.add_row(error.of, HEADINGS.get(error.what, error.what), *cells)
    console.print(errors)
    console.print(Text(_verdict(found, whose)))


def _row(each: Estimate, shared: list[str]) -> tuple[str, ...]:
    from servecast.anchoring.anchor import reason

    before = _shown(each.scalar.name, each.scalar.default)
    if not each.told:
        return each.scalar.name, before, "stays", "", f"no: {reason(each)}"
    told = f"with {' and '.join(shared)}" if shared else "yes"
    low, high = (_shown(each.scalar.name, value) for value in (each.low, each.high))
    return each.scalar.name, before, _shown(each.scalar.name, each.value), f"{low} to {high}", told


def _shown(name: str, value: float) -> str:
    return (
        f"{value:.3f}" if name == "kernels" else f"{1e3 * value:.3g} ms" if value >= 1e-4 else f"{1e6 * value:.3g} us"
    )


def _percent(share: float | None, signed: bool) -> str:
    from reports.words import NONE

    return NONE if share is None else f"{100 * share:{'+' if signed else ''}.1f} %"


def _said(found: Anchored) -> list[str]:
    """What to know of the scalars, and what to measure for those that were not told."""
    out = []
    for each in found.anchor.estimates:
        name = each.scalar.name
        if shared := [other.scalar.name for other in found.anchor.estimates if other.like == name]:
            out.append(f"{name} also holds what {' and '.join(shared)} may be off: here only the sum is known.")
        if name == "kernels" and each.told and abs(log(each.value)) > CORRECTION:
            out.append(f"kernels {each.value:.2f} is no correction: is SCENARIO what was measured (model, GPU, dtype)?")
    for (a, b), both in found.anchor.correlation.items():
        if abs(both) > 0.8:
            out.append(f"{a} and {b} are hardly told apart (correlation {both:.2f}).")
    untold = [each.scalar.name for each in found.anchor.estimates if not each.told]
    advice = dict.fromkeys(ADVICE[name] if found.signed else ADVICE_STEPS for name in untold)
    return out + [f"To tell more: {'; '.join(advice)}."] * bool(advice)


def _verdict(found: Anchored, whose: str) -> str:
    left = max((abs(e) for error in found.errors for e in error.after if e is not None), default=0.0)
    unexplained = left > LARGE and found.anchor.scatter > SCATTERED
    if not found.better:
        said = f"The anchored values are no better than the {whose} here: do not use them before you know why."
    else:
        said = (
            f"The largest error left is {100 * left:.0f} %{' here, and these scalars do not explain it' * unexplained}."
        )
    return said if found.unseen else f"Nothing was held out: the fit saw these figures. {said}"
