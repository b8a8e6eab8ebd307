"""`servecast plan`: the cheapest deployment that meets its requirements. Heavy modules late."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from servecast.arguments import set_option
from servecast.errors import ServecastError
from servecast.output import PARTIAL, progress_line, write_texts

if TYPE_CHECKING:
    from reports.planning.facts import Facts


def _numbers(word: str, option: str) -> list[int]:
    try:
        found = [int(part) for part in word.split(",")]
    except ValueError:
        found = [0]
    if min(found) < 1:
        raise ServecastError(f"{option} {word}: expected whole numbers of 1 or more, such as 1,2,4")
    return list(dict.fromkeys(found))


def _splits(word: str | None) -> list[tuple[int, int] | None]:
    if word is None:
        return [None]
    found: list[tuple[int, int] | None] = [None]
    for part in word.split(","):
        match = re.fullmatch(r"\s*(\d+):(\d+)\s*", part)
        if match is None or not (int(match[1]) and int(match[2])):
            raise ServecastError(f"--split {part.strip()!r}: expected prefill:decode, such as 1:1,1:2")
        found.append((int(match[1]), int(match[2])))
    return found


def _budget(word: str | None) -> float | None:
    """Dollars per hour."""
    if word is None:
        return None
    match = re.fullmatch(r"\s*\$?([0-9]+(?:\.[0-9]+)?)\s*/?\s*(h|hour|month)?\s*", word)
    if match is None or not float(match[1]):
        raise ServecastError(f"--budget {word!r}: expected dollars an hour or a month, such as 40/h or 20000/month")
    from reports.planning.facts import HOURS_A_MONTH

    return float(match[1]) / (HOURS_A_MONTH if match[2] == "month" else 1)


@click.command()
@click.argument("scenarios", nargs=-1, required=True, metavar="SCENARIO...", type=click.Path(path_type=Path))
@click.option(
    "--slo",
    multiple=True,
    metavar="LIMITS",
    help='What is required: "p99 ttft < 1s, p95 tpot < 50ms", "chat: p99 ttft < 500ms", "goodput > 99 %". '
    "[default: 99 % of requests meet the scenario's slo]",
)
@click.option("--gpus", metavar="A,B", help="GPUs to choose from. [default: all with a price and a measured profile]")
@click.option("--prices", "price_set", metavar="SET", help="A price set (servecast list prices) or a file.")
@click.option("--price", "own", multiple=True, metavar="GPU=DOLLARS", help="Dollars per GPU-hour; may be repeated.")
@click.option("--budget", metavar="DOLLARS", help="At most so much: 40/h or 20000/month.")
@click.option("--tp", "tps", default="1,2,4,8", metavar="N,M", help="Tensor parallel sizes. [default: 1,2,4,8]")
@click.option("--pp", "pps", default="1", metavar="N,M", help="Pipeline stages. [default: 1]")
@click.option("--split", metavar="P:D,...", help="Also prefill and decode apart, in these proportions.")
@click.option(
    "--vary", multiple=True, metavar="KEY=VALUES", help="Limits to choose from. [default: vLLM's batch limits]"
)
@click.option("--spare", type=click.IntRange(0, 1000), default=0, metavar="N", help="Replicas beside those needed.")
@click.option("--whole-nodes", is_flag=True, help="GPUs are rented by the node: eights, or racks of 72.")
@click.option("--max-gpus", type=click.IntRange(1, 100_000), default=1024, metavar="N", help="[default: 1024]")
@click.option("--growth", metavar="RATE", help="More traffic every month, what that takes: 10%/month or 100%/year.")
@click.option("--months", type=click.IntRange(1, 120), metavar="N", help="So many of them. [default: 12]")
@click.option("--day", metavar="R,R,...", help="Relative traffic of 24 hours; the scenario's is that of the busiest.")
@click.option("--draws", type=click.IntRange(0, 200), default=10, metavar="N", help="Draws of the error. [default: 10]")
@click.option("--workers", type=click.IntRange(min=1), metavar="N", help="Runs at a time. [default: one a core]")
@set_option
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for the report. [default: runs/, the name of the scenario file and -plan]",
)
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON only; write files only with --out.")
def plan(
    scenarios: tuple[Path, ...],
    slo: tuple[str, ...],
    gpus: str | None,
    price_set: str | None,
    own: tuple[str, ...],
    budget: str | None,
    tps: str,
    pps: str,
    split: str | None,
    vary: tuple[str, ...],
    spare: int,
    whole_nodes: bool,
    max_gpus: int,
    growth: str | None,
    months: int | None,
    day: str | None,
    draws: int,
    workers: int | None,
    overrides: tuple[str, ...],
    out: Path | None,
    as_json: bool,
) -> None:
    """Find the cheapest deployment for the traffic of SCENARIO that meets what is required, and say how sure that is.

    GPUs, layouts, limits of the engine and numbers of replicas are searched; the cluster of SCENARIO is one of them. Of
    several scenarios (models, say), each gets its own, and what all take together is said.

    \b
    servecast plan scenario.yaml --slo "p99 ttft < 1s, p95 tpot < 50ms"
    servecast plan scenario.yaml --slo "p99 ttft < 1s" --gpus h100-sxm,l40s --budget 40/h --spare 1
    servecast plan scenario.yaml --slo "p99 ttft < 1s" --growth 10%/month --months 24
    """
    from servecast.planning.day import hours_of
    from servecast.planning.growth import growth_rate
    from servecast.planning.prices import prices_of
    from servecast.planning.rent import Rent
    from servecast.sweeping.backends import cores

    rent = Rent(*prices_of(price_set, own), whole_nodes=whole_nodes, spare=spare, most=max_gpus)
    if months is not None and growth is None:
        raise ServecastError("--months: of what? Give --growth too, such as 10%/month")
    asked: dict[str, Any] = {
        "overrides": overrides, "gpus": [g.strip() for g in gpus.split(",")] if gpus else (), "rent": rent,
        "settings": _settings(vary) if vary else None, "tps": _numbers(tps, "--tp"), "pps": _numbers(pps, "--pp"),
        "splits": _splits(split), "budget": _budget(budget), "draws": draws, "jobs": workers or cores(),
    }  # fmt: skip
    show, close = progress_line()
    try:
        if len(scenarios) > 1:
            if growth is not None or day is not None:
                raise ServecastError("--growth, --day: of one scenario at a time; plan each on its own for that")
            _several(scenarios, slo, asked | {"told": show}, out, as_json, close)
            return
        asked |= {"growth": None if growth is None else growth_rate(growth), "months": months or 12}
        asked |= {"hours": None if day is None else hours_of(day), "told": show}
        _one(scenarios[0], slo, asked, out, as_json, close)
    except KeyboardInterrupt:
        click.echo("Ended early: a plan has no part that could be kept.", err=True)
        sys.exit(PARTIAL)
    finally:
        close()


def _one(
    scenario: Path,
    slo: tuple[str, ...],
    asked: dict[str, Any],
    out: Path | None,
    as_json: bool,
    found: Callable[[], None],
) -> None:
    """A plan for one scenario; `found` hears that it is there."""
    from servecast.planning.facts import facts_of
    from servecast.planning.plan import plan as find

    facts = facts_of(find(scenario, slo, **asked))
    found()
    if as_json:
        click.echo(json.dumps(facts.plain(), indent=1, allow_nan=False))
    else:
        from rich.console import Console

        from reports.planning.terminal import print_plan

        print_plan(facts, Console())
        out = out or Path("runs") / f"{scenario.stem}-plan"
    if out is not None:
        _write(out, facts)
        if not as_json:
            click.echo(f"Report: {out / 'report.html'}   (also plan.json)")


def _several(
    scenarios: tuple[Path, ...],
    slo: tuple[str, ...],
    asked: dict[str, Any],
    out: Path | None,
    as_json: bool,
    found: Callable[[], None],
) -> None:
    """Plans for several, each with a page of its own, and the sum."""
    from servecast.planning.fleet import fleet, together_of

    names = [path.stem for path in scenarios]
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise ServecastError(f"{twice[0]}: two scenario files of that name; their results would lie in the same folder")
    together = together_of(fleet(scenarios, slo, **asked), names, asked["rent"], asked["budget"])
    found()
    text = json.dumps(together.plain(), indent=1, allow_nan=False)
    if as_json:
        click.echo(text)
    else:
        from rich.console import Console

        from reports.planning.terminal import print_together

        print_together(together, Console())
        out = out or Path("runs") / f"{'+'.join(names)}-plan"
    if out is not None:
        for name, facts in together.plans.items():
            _write(out / name, facts)
        write_texts(out, {"plans.json": text}, "the plans")
        if not as_json:
            click.echo(f"Reports: {out}/NAME/report.html   (also plans.json)")


def _write(out: Path, facts: Facts) -> None:
    from reports.planning.page import plan_html

    text = json.dumps(facts.plain(), indent=1, allow_nan=False)
    write_texts(out, {"plan.json": text, "report.html": plan_html(facts)}, "the plan")


def _settings(vary: tuple[str, ...]) -> dict[str, list[Any]]:
    from servecast.sweeping.axes import axes_of

    found: dict[str, list[Any]] = {}
    for axis in axes_of(vary):
        if len(axis.keys) > 1:
            raise ServecastError(f"--vary {'+'.join(axis.keys)}: a plan varies one key at a time")
        if axis.keys[0].startswith("cluster"):
            raise ServecastError(f"--vary {axis.keys[0]}: a plan finds the cluster; use --gpus, --tp, --pp, --split")
        found[axis.keys[0]] = [values[0] for values in axis.settings]
    return found
