"""`python -m benchmarks.accuracy REFERENCE`: see `benchmarks.accuracy.suite`."""

from __future__ import annotations

from pathlib import Path

import click

from benchmarks.accuracy.suite import write

PAGE = Path(__file__).parents[2] / "docs" / "accuracy.md"


@click.command()
@click.argument("reference", type=click.Path(path_type=Path, exists=True, file_okay=False))
def main(reference: Path) -> None:
    """Compare with the measured runs in REFERENCE and write docs/accuracy.md."""
    write(reference, PAGE)


main()
