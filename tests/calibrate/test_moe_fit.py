"""Expert layers: the fitted model against devices that are known, routing, physics, and published measurements."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibrate.hardware import load_gpu
from calibrate.kernels.heldout import errors, split
from calibrate.kernels.moe import LAYOUT, MoeModel, layers_of
from calibrate.kernels.moe_fit import evaluate, fit_moe
from calibrate.kernels.moe_law import START, least_seconds, rates_of
from calibrate.kernels.roofline import Roofline, from_gpu
from calibrate.kernels.routing import loads
from servecast.errors import ServecastError
from tests.reference import reference

ROOFLINE = Roofline({"bf16": 400e12, "fp8": 800e12}, 2e12)
DEVICE = replace(START, norm=4.0, tile_rows=40.0)
TOKENS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384]
SHAPES = [(2048, 768, 128, 8), (4096, 14336, 8, 2), (4096, 2048, 256, 8), (3072, 1024, 256, 8), (5120, 8192, 16, 1)]
SPLITS = [(1, 1), (2, 1), (4, 1), (1, 2), (1, 4), (1, 8)]


def device(weights: str, layout: tuple[int, ...], tokens: Any, skew: str, gated: bool = True) -> Any:
    """A device that follows the law, but is 20 % slower where experts are wide."""
    _, inter, experts, topk, tp, ep = layout
    at = np.asarray(tokens, np.float64)
    layers = layers_of(layout, 2.0 if gated else 1.0, *loads(skew, at, experts, topk, ep), at)
    rates = rates_of(weights, "", ROOFLINE)
    slower = 1.2 if inter / tp > 4000 else 1.0
    return np.maximum(DEVICE.seconds(layers, rates) * slower, least_seconds(layers, rates))


def measured(
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    weights: Sequence[str] = ("bf16", "fp8"),
    skews: Sequence[str] = ("balanced", "power_law_1.2"),
    tokens: Sequence[int] = TOKENS,
    noise: float = 0.02,
) -> pl.DataFrame:
    rows = []
    for w in weights:
        for shape in shapes:
            for tp, ep in SPLITS:
                for skew in skews:
                    layout = (*shape, tp, ep)
                    times = device(w, layout, tokens, skew)
                    rows += [(w, t, *layout, skew, s, f"kernel {w}") for t, s in zip(tokens, times, strict=True)]
    columns = ["weights", "tokens", *LAYOUT, "skew", "seconds", "kernel"]
    table = pl.DataFrame(rows, schema=columns, orient="row").with_columns(spread=pl.lit(None, pl.Float64))
    factor = np.exp(noise * np.random.default_rng(0).standard_normal(len(table)))
    return table.with_columns(pl.col("seconds") * pl.Series(factor))


@pytest.fixture(scope="module")
def model() -> MoeModel:
    return fit_moe(measured(), ROOFLINE)


@pytest.mark.parametrize("skew", ["balanced", "power_law_1.2", "power_law_1.01", "uniform"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_known_device_is_recovered(model: MoeModel, shape: tuple[int, int, int, int], skew: str) -> None:
    tokens = np.array([1, 3, 7, 24, 100, 700, 3000, 12000])
    for tp, ep in SPLITS:
        median, p90 = errors(
            model.seconds("fp8", tokens, *shape, tp, ep, skew), device("fp8", (*shape, tp, ep), tokens, skew)
        )
        assert median < 0.04
        assert p90 < 0.15


def test_shapes_and_token_counts_that_were_never_seen_follow_the_law(model: MoeModel) -> None:
    tokens = np.array([1, 5, 60, 900, 10_000, 60_000])
    for layout in ((2560, 1024, 128, 8, 1, 1), (4096, 1024, 192, 6, 2, 1), (2048, 1536, 96, 4, 1, 4)):
        median, p90 = errors(model.seconds("bf16", tokens, *layout), device("bf16", layout, tokens, "balanced"))
        assert median < 0.08
        assert p90 < 0.25
        assert not model.inside("bf16", tokens, *layout).any()


def test_a_measured_layout_may_fall_where_its_times_do() -> None:
    """Engines switch kernels at some count of tokens."""
    table = measured(SHAPES[:2], ["bf16"], noise=0.0)
    slow = pl.when((pl.col("tokens") <= 16) & (pl.col("tp") == 4)).then(pl.col("seconds") * 3)
    model = fit_moe(table.with_columns(slow.otherwise(pl.col("seconds"))), ROOFLINE)
    tokens = np.arange(1, 200)
    switched, smooth = (model.seconds("bf16", tokens, *SHAPES[1], tp, 1) for tp in (4, 2))
    assert switched[15] > 1.2 * switched[63]
    assert smooth[15] < 1.02 * smooth[63]


def test_inside_is_what_was_measured(model: MoeModel) -> None:
    shape = SHAPES[0]
    assert model.inside("bf16", [1, 300, 16384], *shape, 2, 1).tolist() == [True, True, True]
    assert model.inside("bf16", [16385, 40_000], *shape, 2, 1).tolist() == [False, False]
    assert not model.inside("bf16", [300], *shape, 16, 1).any()


def test_ungated_experts_are_told_by_their_times_and_by_the_caller() -> None:
    shape = (2688, 1856, 128, 6)
    half = measured([shape], ["bf16"], tokens=TOKENS)
    skews, at = half["skew"].to_list(), half["tokens"].to_list()
    layouts = half.select(LAYOUT).rows()
    times = [float(device("bf16", x, t, s, gated=False)) for x, t, s in zip(layouts, at, skews, strict=True)]
    model = fit_moe(pl.concat([measured(weights=["bf16"]), half.with_columns(seconds=pl.Series(times))]), ROOFLINE)
    assert model.ungated == {shape}
    unseen = (2688, 1900, 128, 6, 1, 1)
    gated, not_gated = (model.seconds("bf16", [64], *unseen, gated=x)[0] for x in (True, False))
    assert not_gated == pytest.approx(float(device("bf16", unseen, 64, "balanced", gated=False)), rel=0.1)
    assert gated > 1.3 * not_gated


def test_times_from_a_warm_cache_are_not_believed() -> None:
    """A loop over one layer finds its few experts in the L2 cache; a step of an engine reads them from memory."""
    table = measured(SHAPES[:1], ["bf16"], noise=0.0)
    warm = pl.when(pl.col("tokens") == 1).then(pl.col("seconds") / 4).otherwise(pl.col("seconds"))
    model = fit_moe(table.with_columns(warm), ROOFLINE)
    assert not model.ungated
    read = 8 * 2 * 3 * 2048 * 768  # of 8 experts, 2 bytes a weight
    assert model.seconds("bf16", [1], *SHAPES[0])[0] >= read / ROOFLINE.bandwidth_bytes_per_s


def test_thirty_points_are_enough_to_stay_near_the_law() -> None:
    table = measured(weights=["bf16"]).sample(30, seed=1)
    model = fit_moe(table, ROOFLINE)
    tokens = np.array([1, 16, 256, 4096])
    off = [errors(model.seconds("bf16", tokens, *s), device("bf16", (*s, 1, 1), tokens, "balanced"))[0] for s in SHAPES]
    assert np.median(off) < 0.25
    one = fit_moe(table.head(1), ROOFLINE).seconds("bf16", TOKENS, *SHAPES[0])
    assert np.isfinite(one).all()
    assert (one > 0).all()


def test_evaluate_reports_noise_inside_and_more_outside() -> None:
    found = {(what, kind): (median, p90, points) for what, kind, median, p90, points in evaluate(measured(), ROOFLINE)}
    assert set(found) == {(w, k) for w in ("rows", "shapes", "most tokens") for k in ("all", "bf16", "fp8")}
    median, p90, points = found["rows", "all"]
    assert 0.005 < median < 0.035  # the noise that was put in has a median of 0.0135
    assert p90 < 0.1
    assert points == found["rows", "bf16"][2] + found["rows", "fp8"][2]
    assert found["shapes", "all"][0] < 0.2


@settings(max_examples=60, deadline=None)
@given(
    hidden=st.integers(256, 8192),
    inter=st.integers(64, 16384),
    experts=st.integers(1, 512),
    topk=st.integers(1, 22),
    tp=st.sampled_from([1, 2, 8, 32]),
    ep=st.sampled_from([1, 2, 8, 64]),
    skew=st.sampled_from(["balanced", "uniform", "power_law_1.01", "power_law_1.2", "power_law_0.5", "touched=3"]),
    weights=st.sampled_from(["bf16", "fp8"]),
    start=st.integers(1, 3000),
)
def test_physics(
    model: MoeModel,
    hidden: int,
    inter: int,
    experts: int,
    topk: int,
    tp: int,
    ep: int,
    skew: str,
    weights: str,
    start: int,
) -> None:
    topk = min(topk, experts)
    layout = (hidden, inter, experts, topk, tp, ep)
    tokens = np.arange(start, start + 2000, 7, dtype=np.float64)
    s = model.seconds(weights, tokens, *layout, skew)
    assert np.isfinite(s).all()
    active, rows = loads(skew, tokens, experts, topk, ep)
    layers = layers_of(layout, 2.0, active, rows, tokens)
    assert (s >= least_seconds(layers, rates_of(weights, "", ROOFLINE)) * (1 - 1e-9)).all()
    assert (np.diff(s) >= 0).all()


@settings(max_examples=80, deadline=None)
@given(
    experts=st.integers(1, 600),
    topk=st.integers(1, 22),
    ep=st.sampled_from([1, 2, 4, 16, 64]),
    skew=st.sampled_from(["balanced", "uniform", "power_law_1.01", "power_law_1.2", "power_law_2.5", "touched=5"]),
)
def test_routing(experts: int, topk: int, ep: int, skew: str) -> None:
    topk = min(topk, experts)
    tokens = np.unique(np.rint(np.geomspace(1, 40_000, 90)))
    active, rows = loads(skew, tokens, experts, topk, ep)
    assert (active >= 1).all()
    assert (active <= -(-experts // min(ep, experts)) + 1e-9).all()
    assert (active <= rows + 1e-9).all()
    assert (
        rows >= np.maximum(tokens * topk / min(ep, experts), 1.0) * (1 - 1e-6)
    ).all()  # the fullest rank holds no less than the mean
    assert (rows <= tokens * topk * (1 + 1e-6) + 1).all()
    assert (np.diff(active) >= -1e-9).all()
    assert (np.diff(rows) >= -1e-9).all()


def test_skews_order_as_they_should() -> None:
    tokens = np.array([32.0])
    touched = {skew: loads(skew, tokens, 128, 8, 1)[0][0] for skew in ("balanced", "uniform", "power_law_1.2")}
    assert touched["balanced"] == 128
    assert touched["uniform"] == pytest.approx(128 * (1 - (1 - 8 / 128) ** 32))
    assert touched["power_law_1.2"] < touched["uniform"]
    many = np.array([4096.0])
    fullest = [
        loads(skew, many, 128, 8, 8)[1][0] for skew in ("balanced", "uniform", "power_law_1.01", "power_law_1.2")
    ]
    assert fullest == sorted(fullest)
    with pytest.raises(ServecastError, match="zipf"):
        loads("zipf", tokens, 128, 8, 1)


def test_json_round_trip_is_small_and_the_same(model: MoeModel) -> None:
    text = json.dumps(model.to_json(), separators=(",", ":"))
    again = MoeModel.from_json(json.loads(text))
    assert json.dumps(again.to_json(), separators=(",", ":")) == text
    assert len(text) < 100 * sum(len(variant.layouts) for variant in model.variants) + 2000
    for skew in ("balanced", "power_law_1.2"):
        ours, theirs = (m.seconds("fp8", TOKENS, *SHAPES[0], 2, 1, skew) for m in (model, again))
        np.testing.assert_allclose(theirs, ours, rtol=0.01)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d.pop("knots"), "moe: the key 'knots' is missing"),
        (lambda d: d["flops"].pop("bf16"), "moe.flops: no rate of bf16"),
        (lambda d: d.update(bandwidth=-1), "moe.bandwidth: found -1"),
        (lambda d: d.update(knots=[4, 2]), "moe.knots"),
        (lambda d: d["variants"][0].update(weights="fp7"), "moe.variants[0].weights: found 'fp7'"),
        (lambda d: d["variants"][0]["law"].pop("norm"), "moe.variants[0].law: the key 'norm' is missing"),
        (lambda d: d["variants"][0]["shapes"][1]["layouts"][0].pop(), "moe.variants[0].shapes[1].layouts[0]"),
        (lambda d: d["variants"][0]["shapes"][0]["layouts"][0][2].pop(), "moe.variants[0].shapes[0].layouts[0]"),
    ],
)
def test_damaged_json_is_refused_with_its_key(model: MoeModel, change: Any, said: str) -> None:
    data = json.loads(json.dumps(model.to_json()))
    change(data)
    with pytest.raises(ServecastError) as caught:
        MoeModel.from_json(data)
    assert said in str(caught.value)


def test_unknown_weights_are_named(model: MoeModel) -> None:
    with pytest.raises(ServecastError, match="int4"):
        model.seconds("int4", [1], *SHAPES[0])
    with pytest.raises(ServecastError, match="fp6"):
        fit_moe(measured().with_columns(weights=pl.lit("fp6")), ROOFLINE)


def test_a_layer_is_compiled_in_milliseconds(model: MoeModel) -> None:
    tokens = np.arange(16385)
    model.seconds("bf16", tokens, *SHAPES[2], 1, 1, "power_law_1.2")
    spent = []
    for _ in range(5):
        start = time.process_time()
        model.seconds("bf16", tokens, *SHAPES[2], 1, 1, "power_law_1.2")
        spent.append(time.process_time() - start)
    assert min(spent) < 0.02  # about 0.7 ms on an idle core


@pytest.mark.parametrize(("folder", "gpu"), [("h100_sxm", "h100-sxm"), ("a100_sxm", "a100-sxm")])
def test_published_times_that_were_held_out(folder: str, gpu: str) -> None:
    """Of H100's table a part of block-scaled fp8, which two kernels run; A100's has bf16 and power laws only."""
    files = sorted(reference("reference", "aiconfigurator", folder).glob("moe__*.csv.gz"))
    names = {
        "moe_dtype": "weights", "num_tokens": "tokens", "hidden_size": "hidden", "inter_size": "inter",
        "num_experts": "experts", "moe_tp_size": "tp", "moe_ep_size": "ep", "distribution": "skew",
        "kernel_source": "kernel",
    }  # fmt: skip
    table = (
        pl.read_csv(files[0])
        .rename(names)
        .with_columns(
            pl.col("weights").replace("bfloat16", "bf16"),
            seconds=pl.col("latency") / 1e3,
            spread=pl.lit(None, pl.Float64),
        )
    )
    if folder == "h100_sxm":
        table = table.filter((pl.col("weights") == "fp8_block") & (pl.col("ep") <= 8) & (pl.col("hidden") < 5000))
    roofline = from_gpu(load_gpu(gpu))
    kept, held = split(table, None, 0.1, seed=3)
    model = fit_moe(kept, roofline)
    priced, real = [], []
    for key, rows in held.group_by("weights", *LAYOUT, "skew", maintain_order=True):
        priced.append(model.seconds(str(key[0]), rows["tokens"].to_numpy(), *key[1:]))  # type: ignore[arg-type]
        real.append(rows["seconds"].to_numpy())
    median, p90 = errors(np.concatenate(priced), np.concatenate(real))
    assert median < 0.03
    assert p90 < 0.12
    assert len(json.dumps(model.to_json(), separators=(",", ":"))) < 15_000  # about 65 a layout
