"""What several commands take from the command line."""

from pathlib import Path

import click

scenario_argument = click.argument("scenario", type=click.Path(path_type=Path))
set_option = click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change a key of the scenario; may be repeated."
)
