"""Matrix multiplications: the fitted model against devices that are known, physics, and published measurements."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibrate.hardware import load_gpu
from calibrate.kernels.gemm import RATES, WEIGHT_BYTES, GemmModel, evaluate, fit_gemm
from calibrate.kernels.heldout import errors, split
from calibrate.kernels.roofline import Roofline, from_gpu
from calibrate.kernels.surface import fit_surface, thin
from servecast.errors import ServecastError
from tests.reference import reference

ROOFLINE = Roofline({"bf16": 100e12, "fp8": 200e12}, 1e12)
MANY = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192]
SIZES = [256, 512, 1024, 2048, 4096, 8192, 16384]
Points = Sequence[tuple[str, int, int, int]]


def device(weights: str, m: Any, n: Any, k: Any) -> Any:
    """A device without tiles: 3 us, 60 % of the peak, 80 % of the bandwidth."""
    peak = 0.6 * ROOFLINE.flops[weights]
    moved = WEIGHT_BYTES[weights] * n * k + 2.0 * m * (n + k)
    return 3e-6 + np.maximum(2.0 * m * n * k / peak, moved / 0.8e12)


def measured(points: Points, seconds: Callable[..., Any] = device, noise: float = 0.0, seed: int = 0) -> pl.DataFrame:
    table = pl.DataFrame(list(points), schema=["weights", "m", "n", "k"], orient="row")
    factor = np.exp(noise * np.random.default_rng(seed).standard_normal(len(table)))
    return table.with_columns(seconds=pl.Series([seconds(*row) for row in table.rows()]) * pl.Series(factor))


def grid(*weights: str, m: Sequence[int] = MANY, sizes: Sequence[int] = SIZES) -> Points:
    return [(w, x, n, k) for w in weights for x in m for n in sizes for k in sizes]


def queries(seed: int, count: int = 400, low: float = 0, high: float = 4.2) -> tuple[Any, Any, Any]:
    draw = np.random.default_rng(seed)
    m, n, k = (np.rint(10 ** draw.uniform(start, high, count)) for start in (low, 2.4, 2.4))
    return m, n, k


@pytest.fixture(scope="module")
def model() -> GemmModel:
    return fit_gemm(measured(grid("bf16", "fp8"), noise=0.02), ROOFLINE)


@pytest.mark.parametrize("weights", ["bf16", "fp8"])
def test_a_known_device_is_recovered_between_and_beyond_its_points(model: GemmModel, weights: str) -> None:
    m, n, k = queries(1)
    median, p90 = errors(model.seconds(weights, m, n, k), device(weights, m, n, k))
    assert median < 0.02
    assert p90 < 0.06
    m, n, k = queries(2, low=4.2, high=5.5)  # up to 30 times more rows than measured, and wider
    assert errors(model.seconds(weights, m, n, k), device(weights, m, n, k))[1] < 0.10


@pytest.mark.parametrize("seed", range(4))
def test_few_noisy_points_are_enough(seed: int) -> None:
    shapes = [(2048, 1024), (1024, 2048), (3072, 1024), (1024, 3072)]
    points = [("bf16", m, n, k) for m in (1, 8, 32, 64, 128, 256, 512, 2048) for n, k in shapes]
    sparse = fit_gemm(measured(points, noise=0.05, seed=seed), ROOFLINE)
    m, n, k = np.rint(np.geomspace(1, 2048, 50)), 1536.0, 1536.0
    median, p90 = errors(sparse.seconds("bf16", m, n, k), device("bf16", m, n, k))
    assert median < 0.06
    assert p90 < 0.12
    m, n, k = queries(seed)  # mostly far beyond the edge: the roofline leads on
    assert errors(sparse.seconds("bf16", m, n, k), device("bf16", m, n, k))[1] < 0.40


def test_one_point_is_enough_to_price_everything() -> None:
    single = fit_gemm(measured([("bf16", 4096, 4096, 4096)]), ROOFLINE)
    assert single.seconds("bf16", 4096, 4096, 4096) == pytest.approx(device("bf16", 4096, 4096, 4096), rel=0.01)
    # Four times the rows take four times as long, on the roofline with the efficiency that was measured.
    assert single.seconds("bf16", 16384, 4096, 4096) == pytest.approx(4 * device("bf16", 4096, 4096, 4096), rel=0.1)


def test_both_sides_of_a_tile_step_are_kept() -> None:
    def tiles(weights: str, m: Any, n: Any, k: Any) -> Any:
        return device(weights, -(-m // 256) * 256, n, k)

    rows = [1, 64, 128, 256, 257, 384, 512, 513, 768, 769, 1024]
    fitted = fit_gemm(measured(grid("bf16", m=rows), tiles), ROOFLINE)
    before, after = fitted.seconds("bf16", [256, 257], 4096, 4096)
    assert before == pytest.approx(tiles("bf16", 256, 4096, 4096), rel=0.03)
    assert after == pytest.approx(tiles("bf16", 257, 4096, 4096), rel=0.03)
    assert after > 1.9 * before


def test_wild_times_do_not_count(model: GemmModel) -> None:
    table = measured(grid("bf16"), noise=0.02)
    wild = np.random.default_rng(3).random(len(table)) < 0.05
    table = table.with_columns(seconds=table["seconds"] * pl.Series(np.where(wild, 3.0, 1.0)))
    m, n, k = queries(1)
    median, p90 = errors(fit_gemm(table, ROOFLINE).seconds("bf16", m, n, k), device("bf16", m, n, k))
    assert median < 0.02
    assert p90 < 0.08


def test_weights_that_sat_in_the_cache_are_priced_from_memory() -> None:
    def cached(weights: str, m: Any, n: Any, k: Any) -> Any:
        small = WEIGHT_BYTES[weights] * n * k < 32e6
        return 2e-6 + max(2.0 * m * n * k / 60e12, WEIGHT_BYTES[weights] * n * k / (3e12 if small else 0.8e12))

    fitted = fit_gemm(measured(grid("bf16"), cached), ROOFLINE)
    assert fitted.stream_share == pytest.approx(0.8, rel=0.03)
    assert fitted.seconds("bf16", 1, 2048, 2048) == pytest.approx(2 * 2048**2 / 0.8e12, rel=0.05)
    found = {what: points for what, _, _, _, points in evaluate(measured(grid("bf16"), cached), ROOFLINE)}
    honest = {what: points for what, _, _, _, points in evaluate(measured(grid("bf16")), ROOFLINE)}
    assert found["rows"] < honest["rows"]  # what the cache flattered is not counted as an error


def test_a_dtype_that_was_not_measured_follows_one_that_was() -> None:
    bf16 = fit_gemm(measured(grid("bf16")), ROOFLINE)
    m, n, k = queries(5)
    assert bf16.has("bf16")
    assert not bf16.has("fp8")
    assert bf16.inside("bf16", 64, 4096, 4096)
    assert not bf16.inside("fp8", m, n, k).any()
    fp8 = bf16.seconds("fp8", m, n, k)
    assert errors(fp8, device("fp8", m, n, k))[0] < 0.05
    int4 = bf16.seconds("int4", [1, 8192], 8192, 8192)  # few rows: a quarter of the bytes; many: the FLOPs of bf16
    assert int4 == pytest.approx(bf16.seconds("bf16", [1, 8192], 8192, 8192) * [0.27, 1.0], rel=0.1)
    both = fit_gemm(measured(grid("bf16", "fp8"), lambda w, *x: device(w, *x) * (2 if w == "fp8" else 1)), ROOFLINE)
    assert errors(both.seconds("fp8_block", m, n, k), both.seconds("fp8", m, n, k)) == (0, 0)
    with pytest.raises(ServecastError, match=r"weights 'fp8block' are not known \(did you mean 'fp8_block'\?\)"):
        bf16.seconds("fp8block", 1, 1, 1)


def test_inside_is_the_measured_range(model: GemmModel) -> None:
    assert model.inside("bf16", [1, 8192, 8193, 64, 64], [256, 16384, 256, 255, 256], 256).tolist() == [
        True,
        True,
        False,
        False,
        True,
    ]


def test_arrays_of_any_shape_broadcast(model: GemmModel) -> None:
    m, n, k = np.array([[1], [300]]), np.array([4096, 5000, 4096]), np.array([512, 512, 700])
    together = model.seconds("bf16", m, n, k)
    assert together.shape == (2, 3)
    one_by_one = [[model.seconds("bf16", a, b, c).item() for b, c in zip(n, k, strict=True)] for a in m.ravel()]
    assert together.tolist() == one_by_one
    assert model.seconds("bf16", np.arange(1, 9), 64, 64).shape == (8,)
    assert model.seconds("bf16", 1, 64, 64).shape == ()


size = st.integers(1, 10**6)


@settings(max_examples=200, deadline=None)
@given(weights=st.sampled_from(list(RATES)), m=size, more=st.integers(1, 10**5), n=size, k=size)
def test_physics_holds_everywhere(model: GemmModel, weights: str, m: int, more: int, n: int, k: int) -> None:
    now, then = model.seconds(weights, [m, m + more], n, k)
    rate = ROOFLINE.flops.get(RATES[weights], ROOFLINE.flops["bf16"])
    for rows, seconds in ((m, now), (m + more, then)):
        assert np.isfinite(seconds)
        assert seconds >= 2.0 * rows * n * k / rate * (1 - 1e-12)
        assert seconds >= WEIGHT_BYTES[weights] * n * k / ROOFLINE.bandwidth_bytes_per_s * (1 - 1e-12)
    assert now >= 1e-6  # a kernel takes a while
    assert then >= 0.95 * now  # this device has no tiles; what is left is the fit's noise


def test_the_same_table_gives_the_same_model(model: GemmModel) -> None:
    shuffled = measured(grid("bf16", "fp8"), noise=0.02).sample(fraction=1, shuffle=True, seed=1)
    assert fit_gemm(shuffled, ROOFLINE).to_json() == model.to_json()


def test_round_trip_through_json(model: GemmModel) -> None:
    text = json.dumps(model.to_json())
    again = GemmModel.from_json(json.loads(text))
    assert json.dumps(again.to_json()) == text
    assert len(text) < 4 * 2 * len(MANY) * len(SIZES) ** 2 + 1000  # plain whole numbers, below 4 characters each
    m, n, k = queries(7)
    for weights in ("bf16", "fp8", "int4"):
        assert again.seconds(weights, m, n, k) == pytest.approx(model.seconds(weights, m, n, k), rel=2e-3)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d.pop("flops"), r"gemm: the key 'flops' is missing"),
        (lambda d: d["flops"].pop("bf16"), r"gemm\.flops: the key 'bf16' is missing"),
        (lambda d: d.update(bandwidth_bytes_per_s=-1), r"gemm\.bandwidth_bytes_per_s: found -1"),
        (lambda d: d.update(stream_share="all"), r"gemm\.stream_share: found 'all'"),
        (lambda d: d.update(tables={}), r"gemm\.tables: holds no dtype"),
        (lambda d: d.update(tables=[1]), r"gemm\.tables: found \[1\]; expected a mapping"),
        (lambda d: d["tables"].update(fp6=d["tables"].pop("fp8")), r"gemm\.tables: weights 'fp6' are not known"),
        (lambda d: d["tables"]["fp8"].pop("n"), r"gemm\.tables\.fp8: the key 'n' is missing"),
        (lambda d: d["tables"]["fp8"].update(k=[4, 2]), r"gemm\.tables\.fp8\.k: expected increasing numbers"),
        (lambda d: d["tables"]["fp8"].update(m=[]), r"gemm\.tables\.fp8\.m: expected increasing numbers"),
        (lambda d: d["tables"]["fp8"]["rows"].pop(), r"gemm\.tables\.fp8\.rows: expected a list of 49 rows"),
        (lambda d: d["tables"]["fp8"]["rows"][3].pop(), r"gemm\.tables\.fp8\.rows\[3\]: expected 14 numbers"),
        (lambda d: d["tables"]["fp8"]["rows"].__setitem__(3, 1), r"gemm\.tables\.fp8\.rows\[3\]: expected 14 numbers"),
        (lambda d: d["tables"]["bf16"]["rows"][3].__setitem__(5, None), r"tables\.bf16\.rows\[3\]\[5\]: found None"),
        (lambda d: d["tables"]["bf16"]["rows"][3].__setitem__(5, "7"), r"tables\.bf16\.rows\[3\]\[5\]: found '7'"),
        (
            lambda d: d["tables"]["bf16"]["rows"][3].__setitem__(5, 1e9),
            r"rows: expected numbers between -2000 and 2000",
        ),
        (lambda d: d["tables"]["bf16"].update(fixed_us=float("nan")), r"gemm\.tables\.bf16\.fixed_us: found nan"),
    ],
)
def test_malformed_json_is_said_with_its_key(model: GemmModel, change: Callable[[Any], Any], said: str) -> None:
    data = json.loads(json.dumps(model.to_json()))
    change(data)
    with pytest.raises(ServecastError, match=said):
        GemmModel.from_json(data)


def test_tables_that_cannot_be_fitted_are_said() -> None:
    with pytest.raises(ServecastError, match="holds no rows"):
        fit_gemm(measured(grid("bf16")).clear(), ROOFLINE)
    table = measured(grid("bf16")).with_columns(weights=pl.lit("fp5"))
    with pytest.raises(ServecastError, match="gemm: weights 'fp5' are not known"):
        fit_gemm(table, ROOFLINE)


def test_held_out_errors_are_those_of_the_noise() -> None:
    found = {(what, weights): (median, p90) for what, weights, median, p90, _ in evaluate(NOISY, ROOFLINE)}
    assert {what for what, _ in found} == {"rows", "shapes", "largest m", "largest n or k"}
    for median, p90 in found.values():
        assert 0.01 < median < 0.035  # the median of |noise| is 2 %: less would be a leak, more a bad model
        assert p90 < 0.10


NOISY = measured(grid("bf16"), noise=0.03)


def test_splits_are_of_rows_or_of_whole_shapes() -> None:
    for by in (None, ["n", "k"]):
        kept, held = split(NOISY, by, 0.2, seed=1)
        assert len(kept) + len(held) == len(NOISY)
        assert 0.1 < len(held) / len(NOISY) < 0.3
        assert kept.equals(split(NOISY, by, 0.2, seed=1)[0])
        assert not kept.equals(split(NOISY, by, 0.2, seed=2)[0])
        shared = kept.select("n", "k").unique().join(held.select("n", "k").unique(), on=["n", "k"])
        assert (len(shared) == 0) == (by is not None)
    assert np.isnan(errors([], [])).all()
    assert errors([1.1, 2.0, 2.0], [1.0, 2.0, 4.0]) == pytest.approx((0.1, 0.42))


def test_nodes_are_round_and_keep_both_sides_of_steps() -> None:
    found = thin([1, 2, 3, 64, 65, 66, 100, 128, 129, 140, 256, 257, 1000], 1.3)
    assert found.tolist() == [1, 2, 3, 64, 128, 129, 256, 257, 1000]
    assert thin(range(1, 15), 1.9).tolist() == [1, 2, 4, 14]
    assert thin([7], 1.3).tolist() == [7]


def test_a_surface_continues_its_neighbours_where_nothing_was_measured() -> None:
    axes = [np.array([1.0, 2, 4, 8, 16]), np.array([1.0, 10, 100])]
    x, y = (part.ravel() for part in np.meshgrid(*axes, indexing="ij"))
    plane = np.log(x) - 0.5 * np.log(y)
    seen = ~((x == 4) | ((x == 16) & (y == 100)))
    surface = fit_surface(axes, [x[seen], y[seen]], plane[seen], (0.1, 0.1))
    assert surface.values.ravel() == pytest.approx(plane, abs=0.1)


# ---- published tables ---------------------------------------------------------------------------------------------


def published(folder: str, weights: str, gpu: str) -> tuple[pl.DataFrame, Roofline]:
    path = reference("reference", "aiconfigurator", folder, "gemm__vllm0.24.0.csv.gz")
    table = pl.read_csv(path).with_columns(pl.col("gemm_dtype").replace({"bfloat16": "bf16"}))
    table = table.filter(pl.col("gemm_dtype") == weights).select(
        "m", "n", "k", weights="gemm_dtype", seconds=pl.col("latency") / 1e3
    )
    return table, from_gpu(load_gpu(gpu))


@pytest.mark.parametrize(
    ("folder", "gpu", "weights", "beyond"),
    [("h200_sxm", "h200-sxm", "bf16", (0.08, 0.25)), ("rtx_pro_6000_server", "rtx-pro-6000", "fp8", (0.08, 0.25))],
)
def test_held_out_errors_on_published_tables(folder: str, gpu: str, weights: str, beyond: tuple[float, float]) -> None:
    table, roofline = published(folder, weights, gpu)
    found = {what: (median, p90, points) for what, _, median, p90, points in evaluate(table, roofline)}
    for what, (median, p90) in {
        "rows": (0.04, 0.12),
        "shapes": (0.06, 0.15),
        "largest m": beyond,
        "largest n or k": beyond,
    }.items():
        assert found[what][0] <= median, what
        assert found[what][1] <= p90, what
        assert found[what][2] > 900, what


def test_more_rows_are_never_cheaper_by_more_than_was_measured() -> None:
    table, roofline = published("h200_sxm", "fp8", "h200-sxm")
    fitted = fit_gemm(table, roofline)
    assert len(json.dumps(fitted.to_json(), separators=(",", ":"))) < 40_000
    m = np.arange(1, 32769)
    drops = []
    for (n, k), rows in table.filter((pl.col("n") >= 512) & (pl.col("k") >= 512)).group_by("n", "k"):
        seconds = rows.sort("m")["seconds"].to_numpy()
        priced = fitted.seconds("fp8", m, n, k)
        drops.append([1 - (s / np.maximum.accumulate(s)).min() for s in (priced, seconds)])
    fitted_drop, measured_drop = np.array(drops).T
    assert (fitted_drop < measured_drop + 0.1).all()
    assert np.median(fitted_drop) < np.median(measured_drop)


def test_a_card_with_a_large_cache_is_not_priced_from_it() -> None:
    table, roofline = published("l40s", "bf16", "l40s")
    fitted = fit_gemm(table.filter(pl.col("m") <= 64), roofline)
    assert 0.8 < fitted.stream_share < 0.9
    at = table.filter((pl.col("m") == 8) & (pl.col("n") == 2048) & (pl.col("k") == 3072))
    memory = 2 * 2048 * 3072 / roofline.bandwidth_bytes_per_s
    assert at["seconds"].item() < memory  # 12.6 MB: six of them fit the 96 MB cache of this card
    assert fitted.seconds("bf16", 8, 2048, 3072) > memory
