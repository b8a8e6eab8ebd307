"""What tests of importers ask: of a refusal, of one row, of every table."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from calibrate.importers import import_measurements
from calibrate.measurements import FAMILIES, WEIGHTS, Measurements, checked
from servecast.errors import ServecastError

H100 = "h100-sxm"


def refused(format: str, path: Path, gpu: str | None = None) -> str:
    with pytest.raises(ServecastError) as error:
        import_measurements(format, path, gpu)
    return str(error.value)


def one(found: Measurements, family: str, **point: object) -> dict[str, object]:
    """The one row of a family with these values."""
    rows = found.tables[family].filter(*(pl.col(column) == value for column, value in point.items()))
    assert len(rows) == 1, rows
    return rows.row(0, named=True)


def sound(found: Measurements) -> None:
    """Every table is what FAMILIES says, with no point twice."""
    for family, table in found.tables.items():
        assert table.columns == [*FAMILIES[family], "seconds", "spread", "kernel"]
        assert checked(family, table, family) == []
        assert not {"file", "row"} & set(table.columns)
        if "weights" in table.columns:
            assert set(table["weights"].unique()) <= set(WEIGHTS)
    assert found.device.licence
    assert found.device.source
