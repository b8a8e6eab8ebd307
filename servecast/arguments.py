"""What several commands take from the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])
DRAWS = range(5, 1001)
"""Of the model's error: fewer make no range, and more tell nothing new."""

scenario_argument = click.argument("scenario", type=click.Path(path_type=Path))
set_option = click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change a key of the scenario; may be repeated."
)


class _Draws(click.IntRange):
    """How many draws of the model's error are run."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return int(super().convert(value, param, ctx))
        except click.BadParameter:
            self.fail(wrong_draws(value), param, ctx)


def intervals_option(help: str) -> Callable[[F], F]:
    """`--intervals [DRAWS]`, 20 where no number is given."""
    return click.option(
        "--intervals",
        is_flag=False,
        flag_value=20,
        type=_Draws(DRAWS[0], DRAWS[-1]),
        metavar="[DRAWS]",
        help=f"{help} [20 if no number is given]",
    )


def wrong_draws(value: object) -> str:
    """What is said of a number of draws that cannot be."""
    return f"{value!r} is not a number of draws, {DRAWS[0]} to {DRAWS[-1]}"
