"""Kernels bound by memory: the fitted curves against devices that are known, physics, and published measurements."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibrate.hardware import load_gpu
from calibrate.kernels.elementwise import (
    DEFAULTS,
    ElementwiseModel,
    default_elementwise,
    evaluate,
    fit_elementwise,
)
from calibrate.kernels.roofline import Roofline, from_gpu
from servecast.errors import ServecastError
from tests.reference import reference

ROOFLINE = Roofline({"bf16": 400e12}, 2e12)
ROWS = sorted({1, 2, 3, *range(4, 64, 5), *range(64, 1024, 64), *range(1024, 8193, 512)})
CACHE = 40e6


def device(op: str, rows: Any, elements: Any) -> Any:
    """2 us, 70 % of the bandwidth beyond a cache of 40 MB, 3 times as much within; rope half of both."""
    moved = 2.0 * np.asarray(rows, np.float64) * np.asarray(elements, np.float64)
    rate = 1.4e12 / (2 if op == "rope" else 1)
    return 2e-6 + np.minimum(moved, CACHE) / (3 * rate) + np.maximum(moved - CACHE, 0) / rate


def measured(noise: float = 0.02, widths: tuple[int, ...] = (4096, 16384)) -> pl.DataFrame:
    points = [(op, r, e) for op in ("norms", "rope") for r in ROWS for e in widths]
    table = pl.DataFrame(points, schema=["op", "rows", "elements"], orient="row")
    factor = np.exp(noise * np.random.default_rng(0).standard_normal(len(table)))
    return table.with_columns(seconds=pl.Series([float(device(*p)) for p in points]) * pl.Series(factor))


@pytest.fixture(scope="module")
def model() -> ElementwiseModel:
    return fit_elementwise(measured(), ROOFLINE)


@pytest.mark.parametrize("op", ["norms", "rope"])
def test_a_known_device_is_recovered_between_its_points_and_widths(model: ElementwiseModel, op: str) -> None:
    rows = np.array([1, 17, 100, 700, 1500, 8000])
    for width in (4096, 16384):
        off = model.seconds(op, rows, width) / device(op, rows, width) - 1
        assert np.abs(off).max() < 0.08
        assert model.inside(op, rows, width).all()
    between = model.seconds(op, rows, 8192) / device(op, rows, 8192) - 1
    assert np.abs(between).max() < 0.15  # the most rows of 4096 end in the cache, those of 8192 do not
    assert np.abs(between[:5]).max() < 0.06
    assert model.inside(op, rows[:5], 8192).all()
    beyond = np.array([20_000, 60_000])
    assert np.abs(model.seconds(op, beyond, 16384) / device(op, beyond, 16384) - 1).max() < 0.15
    assert not model.inside(op, beyond, 16384).any()
    assert not model.inside(op, rows, 30_000).any()


def test_rows_and_elements_broadcast(model: ElementwiseModel) -> None:
    table = model.seconds("rope", np.array([[1], [64]]), np.array([4096, 5000, 16384]))
    assert table.shape == (2, 3)
    for i, rows in enumerate((1, 64)):
        for j, width in enumerate((4096, 5000, 16384)):
            assert table[i, j] == model.seconds("rope", rows, width)[()]


def test_bytes_beyond_the_measured_ones_cost_at_least_the_bandwidth() -> None:
    cached = measured(noise=0.0).filter(2 * pl.col("rows") * pl.col("elements") < CACHE)
    model = fit_elementwise(cached, ROOFLINE)
    near, far = model.seconds("norms", [10_000, 20_000], 16384)
    assert far - near >= 2 * 10_000 * 16384 / ROOFLINE.bandwidth_bytes_per_s * (1 - 1e-9)


@pytest.mark.parametrize("op", [*DEFAULTS, "something"])
def test_an_op_that_was_not_measured_has_a_default_and_is_never_inside(model: ElementwiseModel, op: str) -> None:
    for any_model in (default_elementwise(ROOFLINE), model):
        if op in ("norms", "rope") and any_model is model:
            continue
        small, large = any_model.seconds(op, [1, 100_000], 8192)
        assert 1e-6 < small < 3e-5
        share = 2 * 99_999 * 8192 / (large - small) / ROOFLINE.bandwidth_bytes_per_s
        assert 0.3 < share <= 1
        assert not any_model.inside(op, [1, 100], 8192).any()


@settings(max_examples=100, deadline=None)
@given(
    op=st.sampled_from(["norms", "rope", "sampling"]),
    rows=st.lists(st.integers(1, 10**6), min_size=2, max_size=30),
    elements=st.integers(1, 10**6),
)
def test_physics(model: ElementwiseModel, op: str, rows: list[int], elements: int) -> None:
    s = model.seconds(op, np.sort(rows), elements)
    assert np.isfinite(s).all()
    assert (s > 1e-6).all()
    assert (np.diff(s) >= 0).all()
    moved = 2.0 * np.sort(rows) * elements
    assert (s >= np.maximum(moved - CACHE, 0) / ROOFLINE.bandwidth_bytes_per_s).all()  # the cache is the device's


def test_a_single_point_is_enough_for_a_finite_price() -> None:
    model = fit_elementwise(measured().head(1), ROOFLINE)
    s = model.seconds("norms", [1, 10, 10_000], [4096, 999, 20_000])
    assert np.isfinite(s).all()
    assert (s > 0).all()


def test_evaluate_reports_noise_inside() -> None:
    found = {(w, k): (median, p90, n) for w, k, median, p90, n in evaluate(measured(), ROOFLINE)}
    assert {what for what, _ in found} == {"rows", "widths", "most rows", "default"}
    assert 0.005 < found["rows", "all"][0] < 0.03
    assert found["widths", "rope"][0] < 0.04
    assert found["default", "all"][2] == len(measured())


def test_json_round_trip(model: ElementwiseModel) -> None:
    text = json.dumps(model.to_json())
    again = ElementwiseModel.from_json(json.loads(text))
    assert json.dumps(again.to_json()) == text
    rows = np.arange(1, 20_000, 37)
    np.testing.assert_allclose(again.seconds("norms", rows, 8000), model.seconds("norms", rows, 8000), rtol=1e-3)
    assert again.seconds("sampling", 1, 1000) == model.seconds("sampling", 1, 1000)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d.pop("bandwidth"), "elementwise: the key 'bandwidth' is missing"),
        (lambda d: d.update(curves=3), "elementwise.curves: found 3; expected a list"),
        (lambda d: d["curves"][1].update(elements=0), "elementwise.curves[1].elements: found 0"),
        (lambda d: d["curves"][0].update(us=[0] * len(d["curves"][0]["us"])), "elementwise.curves[0].us[0]: found 0"),
    ],
)
def test_damaged_json_is_refused_with_its_key(model: ElementwiseModel, change: Any, said: str) -> None:
    data = json.loads(json.dumps(model.to_json()))
    change(data)
    with pytest.raises(ServecastError) as caught:
        ElementwiseModel.from_json(data)
    assert said in str(caught.value)


def test_every_token_count_is_compiled_in_milliseconds(model: ElementwiseModel) -> None:
    spent = []
    for _ in range(5):
        start = time.process_time()
        model.seconds("norms", np.arange(16385), 8192)
        spent.append(time.process_time() - start)
    assert min(spent) < 0.02


def test_published_times_that_were_held_out() -> None:
    """vLLM's norms on an RTX PRO 6000, Llama-3.1-8B: 4 x 4096 elements a row, microseconds."""
    path = reference("reference", "llmservingsim", "profiles", "rtxpro6000", "llama-3.1-8b", "tp1", "dense.csv")
    rows = pl.read_csv(path).filter(pl.col("layer").is_in(["layernorm", "rotary_emb"]))
    ops = pl.col("layer").replace({"layernorm": "norms", "rotary_emb": "rope"})
    wide = pl.when(pl.col("layer") == "layernorm").then(4 * 4096).otherwise(10240)
    table = rows.select(op=ops, rows="tokens", elements=wide.cast(pl.Int64), seconds=pl.col("time_us") / 1e6)
    found = {(w, k): (median, p90) for w, k, median, p90, _ in evaluate(table, from_gpu(load_gpu("rtx-pro-6000")))}
    assert found["rows", "norms"][0] < 0.05
    assert found["rows", "rope"][0] < 0.05
