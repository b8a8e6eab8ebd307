"""Reads an engine's steps, in either form."""

from __future__ import annotations

from pathlib import Path

from calibrate.observe.record import read_record
from calibrate.observe.steps import ObservedRun
from calibrate.observe.tables import read_tables


def read_steps(path: str | Path) -> ObservedRun:
    """Read an engine's steps: a record of the observer, or `steps_X.csv` with `requests_X.csv` beside it.

    A record that is cut off is used as far as it is whole, which `notes` say. Raises ServecastError with every problem:
    another kind of file, a newer format, values that cannot be, no steps.
    """
    path = Path(path)
    return read_tables(path) if path.suffix == ".csv" else read_record(path)
