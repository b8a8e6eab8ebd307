"""Measurements as files: what is written comes back, and what is wrong is said with file and row."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibrate.measurements import FAMILIES, TEXT, Device, Measurements, checked, load_measurements
from servecast.errors import ServecastError

DEVICE = Device(
    gpu="cpu",
    device="a made-up CPU",
    measured_by="us",
    source="this test",
    licence="Apache-2.0",
    software="none 1.0",
    taken="2026-11-29",
    notes=("not real: a colon, and ünicode",),
)


def table(family: str, points: int = 3) -> pl.DataFrame:
    """`points` points of a family, all sizes different and positive."""
    sizes = {c: "x" if c in TEXT else [i + 1 for i in range(points)] for c in FAMILIES[family]}
    rows = pl.DataFrame({c: [v] * points if isinstance(v, str) else v for c, v in sizes.items()})
    return rows.with_columns(
        pl.Series("seconds", [1e-6 / (i + 3) for i in range(points)]),
        pl.Series("spread", [None, *(0.1 * i for i in range(1, points))], dtype=pl.Float64),
        kernel=pl.lit("torch 2"),
    )


def written(folder: Path, family: str, rows: pl.DataFrame) -> Path:
    Measurements(DEVICE, {family: rows}).save(folder)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_comes_back_bit_for_bit(tmp_path: Path, family: str) -> None:
    rows = table(family)
    back = load_measurements(written(tmp_path / "new" / "folder", family, rows))
    assert back.device == DEVICE
    assert back.tables[family].equals(rows)


@given(st.lists(st.floats(1e-9, 1e3), min_size=1, max_size=20))
def test_seconds_are_written_exactly(tmp_path_factory: pytest.TempPathFactory, seconds: list[float]) -> None:
    rows = table("gemm", len(seconds)).with_columns(pl.Series("seconds", seconds))
    folder = written(tmp_path_factory.mktemp("m"), "gemm", rows)
    assert load_measurements(folder).tables["gemm"]["seconds"].to_list() == seconds


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("m", "0", "gemm.csv, row 3: m is 0"),
        ("n", "-5", "gemm.csv, row 3: n is -5"),
        ("m", "4.5", "gemm.csv, row 3: m is '4.5'; expected a whole number"),
        ("k", "wide", "gemm.csv, row 3: k is 'wide'; expected a whole number"),
        ("k", "", "gemm.csv, row 3: k is missing"),
        ("seconds", "nan", "gemm.csv, row 3: seconds is 'nan'; expected a number"),
        ("seconds", "inf", "gemm.csv, row 3: seconds is 'inf'"),
        ("seconds", "0", "gemm.csv, row 3: seconds is 0.0; expected more"),
        ("seconds", "-1e-6", "gemm.csv, row 3: seconds is -1e-06; expected more"),
        ("seconds", "", "gemm.csv, row 3: seconds is missing"),
        ("weights", "", "gemm.csv, row 3: weights is missing"),
    ],
)
def test_a_bad_value_is_said_with_its_row(tmp_path: Path, column: str, value: str, said: str) -> None:
    folder = written(tmp_path, "gemm", table("gemm"))
    cells = [line.split(",") for line in (folder / "gemm.csv").read_text().splitlines()]
    cells[2][cells[0].index(column)] = value
    (folder / "gemm.csv").write_text("\n".join(",".join(line) for line in cells) + "\n")
    with pytest.raises(ServecastError) as error:
        load_measurements(folder)
    assert any(said in problem for problem in error.value.problems), error.value


def test_all_problems_are_said_at_once(tmp_path: Path) -> None:
    folder = written(tmp_path, "gemm", pl.concat([table("gemm"), table("gemm", 1).with_columns(seconds=2e-6)]))
    (folder / "colective.csv").write_text("op,backend\n")
    (folder / "quantize.csv").write_text("op,weights,m\nstatic,fp8,1\n")
    (folder / "host.csv").write_text("what,sequences,seconds,spread,kernel\n")
    (folder / "device.yaml").write_text("gpu: cpu\ndevise: x\n")
    with pytest.raises(ServecastError) as error:
        load_measurements(folder)
    text = str(error.value)
    assert "'devise' is not known (did you mean 'device'?)" in text
    assert "'measured_by' is missing" in text
    assert "colective.csv: no such family (did you mean 'collective'?)" in text
    assert "quantize.csv: no column k, seconds; found op, weights, m" in text
    assert "host.csv: holds no rows" in text
    assert "gemm.csv, row 5: the same point as another row (2 rows are not unique)" in text


def test_nothing_to_load(tmp_path: Path) -> None:
    with pytest.raises(ServecastError, match=r"no device\.yaml in it"):
        load_measurements(tmp_path)
    Measurements(DEVICE, {}).save(tmp_path)
    with pytest.raises(ServecastError, match=r"holds no table; expected files such as gemm\.csv"):
        load_measurements(tmp_path)
    (tmp_path / "device.yaml").write_text("- a list\n")
    with pytest.raises(ServecastError, match="expected keys gpu, device"):
        load_measurements(tmp_path)


def test_spread_and_kernel_may_be_left_out(tmp_path: Path) -> None:
    folder = written(tmp_path, "gemm", table("gemm").drop("spread", "kernel"))
    back = load_measurements(folder).tables["gemm"]
    assert back["spread"].to_list() == back["kernel"].to_list() == [None] * 3


@pytest.mark.parametrize(
    ("family", "column", "fine"),
    [
        ("prefill_attention", "context", True),
        ("prefill_attention", "window", True),
        ("prefill_attention", "q", False),
        ("decode_attention", "sequences", False),
        ("host", "sequences", True),
        ("step", "sequences", True),
        ("step", "q", True),
        ("step", "decodes", True),
        ("step", "tp", False),
        ("collective", "gpus", False),
    ],
)
def test_zero_where_it_means_none(family: str, column: str, fine: bool) -> None:
    rows = table(family).with_columns(pl.Series(column, [0, 2, 3]))
    assert (checked(family, rows, "x.csv") == []) is fine
