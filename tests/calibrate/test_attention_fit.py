"""Attention kernels: the fitted models against devices that are known, physics, and published measurements."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibrate.hardware import load_gpu
from calibrate.kernels import decode, prefill
from calibrate.kernels.chunks import more_keys, pairs
from calibrate.kernels.decode import DecodeModel, fit_decode
from calibrate.kernels.heads import HeadShape, closest_kind
from calibrate.kernels.heldout import errors
from calibrate.kernels.prefill import PrefillModel, fit_prefill
from calibrate.kernels.roofline import Roofline, from_gpu
from servecast.errors import ServecastError
from tests.reference import reference

ROOFLINE = Roofline({"bf16": 100e12, "fp8": 200e12}, 1e12)
HEADS = [(4, 1), (8, 8), (16, 4), (32, 8), (64, 8)]
UNSEEN = [(24, 8, 128, 128), (32, 8, 96, 96)]
LENGTHS = [1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384]
CACHED = [2**i - 1 for i in (1, 4, 6, 8, 10, 12, 14, 16, 17)]
L2_BYTES = 32e6


def prefill_device(kv_dtype: str, s: Any, q: Any, c: Any, h: Any, k: Any, d: Any, v: Any, w: Any) -> Any:
    """4 us, and 60 % of the roofline; cached tokens are not in its law."""
    shape = HeadShape(kv_dtype, h, k, d, v, w)
    number, tokens = np.float64(s), np.float64(q)
    return 4e-6 + prefill.work_seconds(shape, ROOFLINE, number, tokens) / 0.6


def decode_device(kv_dtype: str, s: Any, c: Any, h: Any, k: Any, d: Any, v: Any, w: Any, cache: float = 0.0) -> Any:
    """5 us, 10 ns a sequence and head, 80 % of the bandwidth; KV within `cache` bytes is read at five times that."""
    moved = s * min(c + 1, w or np.inf) * HeadShape(kv_dtype, h, k, d, v, w).kv_token_bytes
    rate = 0.8e12 * (5 if moved <= cache else 1)
    return 5e-6 + 1e-8 * s * h + moved / rate


def prompts(kinds: Sequence[tuple[str, int, int]] = (("bf16", 128, 0),), noise: float = 0.0) -> pl.DataFrame:
    rows = [
        (kv, s, q, 0, h, k, d, d, w)
        for kv, d, w in kinds
        for s in (1, 2, 4, 8, 16, 32, 64)
        for q in LENGTHS
        for h, k in HEADS
        if s * q <= 65536
    ]
    schema = ["kv_dtype", "sequences", "q", "context", "heads", "kv_heads", "head_dim", "value_dim", "window"]
    return timed(pl.DataFrame(rows, schema, orient="row"), prefill_device, noise)


def batches(
    kinds: Sequence[tuple[str, int, int]] = (("bf16", 128, 0),), noise: float = 0.0, cache: float = 0.0
) -> pl.DataFrame:
    rows = [
        (kv, s, c, h, k, d, d, w)
        for kv, d, w in kinds
        for s in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
        for c in CACHED
        for h, k in HEADS
        if s * c <= 2**21
    ]
    schema = ["kv_dtype", "sequences", "context", "heads", "kv_heads", "head_dim", "value_dim", "window"]
    return timed(pl.DataFrame(rows, schema, orient="row"), lambda *row: decode_device(*row, cache), noise)


def timed(table: pl.DataFrame, law: Any, noise: float) -> pl.DataFrame:
    factor = np.exp(noise * np.random.default_rng(3).standard_normal(len(table)))
    seconds = pl.Series("seconds", [float(law(*row)) for row in table.rows()]) * pl.Series(factor)
    return table.with_columns(seconds, kernel=pl.lit("invented"))


@pytest.fixture(scope="module")
def prefills() -> PrefillModel:
    return fit_prefill(prompts([("bf16", 128, 0), ("bf16", 128, 1024), ("fp8", 64, 0)], noise=0.02), ROOFLINE)


@pytest.fixture(scope="module")
def decodes() -> DecodeModel:
    return fit_decode(batches([("bf16", 128, 0), ("bf16", 128, 1024), ("fp8", 64, 0)], noise=0.02), ROOFLINE)


def off(model: Any, law: Any, rows: Sequence[tuple[Any, ...]], **how: Any) -> tuple[float, float]:
    """Median and p90 of the errors at points (kv_dtype, sizes...)."""
    ours = np.array([model.seconds(*row, **how) for row in rows], float).ravel()
    return errors(ours, [law(*row) for row in rows])


def test_prompts_of_a_known_device_are_recovered_between_and_beyond_its_points(prefills: PrefillModel) -> None:
    inside = [("bf16", s, q, 0, h, k, 128, 128, 0) for s in (1, 3, 5, 24) for q in (100, 777, 1500) for h, k in HEADS]
    median, p90 = off(prefills, prefill_device, inside)
    assert median < 0.02
    assert p90 < 0.05
    beyond = [("bf16", s, q, 0, h, k, 128, 128, 0) for s, q in ((1, 60000), (300, 2000), (7, 40000)) for h, k in HEADS]
    assert off(prefills, prefill_device, beyond)[1] < 0.08
    unseen = [("bf16", s, q, 0, *heads, 0) for s in (1, 4) for q in (500, 9000) for heads in UNSEEN]
    assert off(prefills, prefill_device, unseen)[1] < 0.08
    windows = [("bf16", s, q, 0, 32, 8, 128, 128, 1024) for s in (1, 4) for q in (500, 3000, 12000)]
    assert off(prefills, prefill_device, windows)[1] < 0.05


def test_decode_of_a_known_device_is_recovered_between_and_beyond_its_points(decodes: DecodeModel) -> None:
    inside = [
        ("bf16", s, c, h, k, 128, 128, 0) for s in (1, 3, 24, 200) for c in (40, 777, 1500, 20000) for h, k in HEADS
    ]
    median, p90 = off(decodes, decode_device, inside, resident=True)
    assert median < 0.015
    assert p90 < 0.04
    beyond = [("bf16", s, c, h, k, 128, 128, 0) for s, c in ((1, 900000), (3000, 2000)) for h, k in HEADS]
    assert off(decodes, decode_device, beyond)[1] < 0.08
    unseen = [("bf16", s, c, *heads, 0) for s in (1, 48) for c in (500, 9000) for heads in UNSEEN]
    assert off(decodes, decode_device, unseen)[1] < 0.08


@pytest.mark.parametrize("count", [30, 60])
def test_a_few_noisy_points_still_make_a_model(count: int) -> None:
    chosen = np.random.default_rng(count).permutation(len(prompts()))[:count].tolist()
    rows = [("bf16", s, q, 0, 32, 8, 128, 128, 0) for s in (1, 4, 16) for q in (100, 777, 3000)]
    assert off(fit_prefill(prompts(noise=0.05)[chosen], ROOFLINE), prefill_device, rows)[1] < 0.25
    few = [("bf16", s, c, 32, 8, 128, 128, 0) for s in (1, 12, 100) for c in (100, 777, 3000)]
    chosen = np.random.default_rng(count).permutation(len(batches()))[:count].tolist()
    assert off(fit_decode(batches(noise=0.05)[chosen], ROOFLINE), decode_device, few, resident=True)[1] < 0.25


@settings(max_examples=60, deadline=None)
@given(
    kv=st.sampled_from(["bf16", "fp8", "int8"]), s=st.integers(1, 5000), q=st.integers(1, 200_000),
    c=st.integers(0, 500_000), k=st.integers(1, 64), ratio=st.integers(1, 64),
    d=st.sampled_from([64, 80, 96, 128, 192, 256, 512]), w=st.sampled_from([0, 0, 128, 1000, 4096]),
)  # fmt: skip
def test_no_price_beats_the_roofline_or_is_not_a_number(
    prefills: PrefillModel, decodes: DecodeModel, kv: str, s: int, q: int, c: int, k: int, ratio: int, d: int, w: int
) -> None:
    shape = HeadShape(kv, k * ratio, k, d, d, w)
    price = float(prefills.seconds(kv, s, q, c, k * ratio, k, d, d, w))
    flops = shape.pair_flops * s * float(pairs(np.float64(q), np.float64(c), w))
    fastest = max(kind.fit.floor for kind in prefills.kinds.values())
    assert np.isfinite(price)
    assert price * fastest >= 0.999 * flops / shape.peak(ROOFLINE)
    one = float(decodes.seconds(kv, s, c, k * ratio, k, d, d, w))
    read = s * min(c, w - 1 if w else c) * shape.kv_token_bytes
    assert np.isfinite(one)
    assert one >= 0.999 * read / ROOFLINE.bandwidth_bytes_per_s
    assert one >= 0.999 * s * min(c + 1, w or c + 1) * shape.pair_flops / shape.peak(ROOFLINE)


@settings(max_examples=40, deadline=None)
@given(
    s=st.integers(1, 300), q=st.integers(1, 30_000), c=st.integers(0, 100_000), more=st.floats(1.0, 3.0),
    heads=st.sampled_from(HEADS), w=st.sampled_from([0, 1024]),
)  # fmt: skip
def test_more_work_never_costs_less(
    prefills: PrefillModel, decodes: DecodeModel, s: int, q: int, c: int, more: float, heads: tuple[int, int], w: int
) -> None:
    def prompt(s: int, q: int, c: int) -> float:
        return float(prefills.seconds("bf16", s, q, c, *heads, 128, 128, w))

    def batch(s: int, c: int) -> float:
        return float(decodes.seconds("bf16", s, c, *heads, 128, 128, w))

    assert prompt(int(s * more), q, c) >= prompt(s, q, c) * (1 - 1e-9)
    assert prompt(s, int(q * more), c) >= prompt(s, q, c) * 0.95  # of times with 2 % noise; compiled, they never fall
    assert prompt(s, q, int(c * more)) >= prompt(s, q, c) * (1 - 1e-9)
    assert batch(int(s * more), c) >= batch(s, c) * (1 - 1e-9)
    assert batch(s, int(c * more)) >= batch(s, c) * (1 - 1e-9)


@pytest.mark.parametrize("window", [0, 1024])
def test_chunks_compile_to_the_same_prices(prefills: PrefillModel, window: int) -> None:
    shape = HeadShape("bf16", 32, 8, 128, 128, window)
    prices = prefills.compile(shape, max_q=9000, max_chunks=8)
    q, c = np.array([1, 17, 300, 2048, 9000]), np.array([0, 100, 1023, 1024, 50_000])
    for number in (1, 2, 8):
        expected = prefills.seconds("bf16", number, q[:, None], c, 32, 8, 128, 128, window)
        ours = [[prices.together([(int(x), int(y))] * number) for y in c] for x in q]
        np.testing.assert_allclose(ours, expected, rtol=0.01)  # compiled times never fall with q, others may a little
    assert prices.seconds(300, 100) == prices.together([(300, 100)])
    long, short = [(8000, 0)], [(16, 0)] * 3
    assert (
        prices.together(long) <= prices.together(long + short) < prices.together(long) + 3 * prices.together(short[:1])
    )
    every = [prices.seconds(q, 77) for q in range(1, 9001)]
    assert (np.diff(every) >= 0).all()


def test_a_window_cuts_what_cached_tokens_add() -> None:
    for q, c, w in ((5, 3, 4), (7, 0, 3), (3, 10, 4), (4, 2, 100)):
        seen = sum(min(c + i, w) for i in range(1, q + 1))
        assert float(pairs(np.float64(q), np.float64(c), w)) == seen
        fresh = sum(min(i, w) for i in range(1, q + 1))
        assert more_keys(q, c, w) == pytest.approx((seen - fresh) / q)


@pytest.mark.parametrize("window", [0, 1024])
def test_decode_compiles_to_lines_with_the_same_prices(decodes: DecodeModel, window: int) -> None:
    prices = decodes.compile(HeadShape("bf16", 32, 8, 128, 128, window), max_sequences=300)
    assert prices.seconds(0, 0) == 0.0
    for number in (1, 2, 7, 64, 300):
        lines = prices.lines[number]
        assert 1 <= len(lines) <= 14
        assert lines[-1][0] == float("inf")
        assert all(b >= 0 for _, _, b in lines)
        for (upto, a, b), (_, a2, b2) in pairwise(lines):
            assert a + b * upto == pytest.approx(a2 + b2 * upto, rel=1e-5)
        each = np.array([0, 3, 63, 100, 900, 1023, 5000, 200_000])
        cached = number * np.minimum(each, window or np.inf)
        expected = decodes.seconds("bf16", number, each, 32, 8, 128, 128, window)
        np.testing.assert_allclose([prices.seconds(number, kv) for kv in cached], expected, rtol=1e-5)


def test_kv_that_only_a_measuring_loop_finds_in_the_cache_is_priced_from_memory() -> None:
    model = fit_decode(batches(cache=L2_BYTES), ROOFLINE)
    cached = [("bf16", s, c, 32, 8, 128, 128, 0) for s, c in ((1, 4095), (8, 511), (16, 255), (4, 1023))]  # 16 MB
    assert off(model, lambda *row: decode_device(*row, L2_BYTES), cached, resident=True)[1] < 0.12
    assert off(model, decode_device, cached)[1] < 0.05
    large = [("bf16", s, c, 32, 8, 128, 128, 0) for s, c in ((16, 8191), (128, 1023))]  # 537 MB
    assert off(model, decode_device, large)[1] < 0.05


def test_measured_history_scales_what_is_derived() -> None:
    table = prompts()
    model = fit_prefill(table, ROOFLINE)
    sizes = {"sequences": 1, "q": [512, 1024, 2048], "context": 30_000}
    rows = pl.DataFrame(
        {"kv_dtype": ["bf16"] * 3, **sizes, "heads": 32, "kv_heads": 8, "head_dim": 128, "value_dim": 128, "window": 0}
    )
    fresh = model.seconds("bf16", 1, rows["q"].to_numpy(), 0, 32, 8, 128, 128)
    whole = model.seconds("bf16", 1, rows["q"].to_numpy(), 30_000, 32, 8, 128, 128)
    measured = rows.with_columns(seconds=pl.Series(fresh + 1.5 * (whole - fresh)), kernel=pl.lit("invented"))
    again = fit_prefill(pl.concat([table, measured.select(table.columns).cast(dict(table.schema))]), ROOFLINE)
    assert again.kinds["bf16/128/0"].history == pytest.approx(1.5, rel=0.01)
    assert model.kinds["bf16/128/0"].history == 1.0


def test_latents_are_a_kind_of_their_own() -> None:
    """MLA: a prompt's keys and values are of 192 and 128 elements, decoding tokens read latents of 576 once."""
    latent = HeadShape("bf16", 16, 1, 576, 512)
    assert (latent.kind, latent.kv_token_bytes, latent.pair_flops) == ("bf16/576:512/0", 1152.0, 2.0 * 16 * 1088)
    assert HeadShape("bf16", 16, 16, 192, 128).kv_token_bytes == 16 * 320 * 2.0
    assert HeadShape("bf16", 8, 1, 512, 512).kv_token_bytes == 2 * 512 * 2.0, "wide heads that are no latents"
    kinds = ["bf16/128/0", "fp8/576:512/0", "bf16/128/1024"]
    assert closest_kind(kinds, latent) == "fp8/576:512/0"
    assert closest_kind(kinds, HeadShape("fp8", 8, 8, 512, 512)) == "bf16/128/0"
    rows = batches().with_columns(kv_heads=1, head_dim=576, value_dim=512)
    rows = timed(rows.unique(["heads", "sequences", "context"]).select(rows.columns[:-2]), decode_device, 0.0)
    model = fit_decode(pl.concat([batches(), rows], how="vertical_relaxed"), ROOFLINE)
    unseen = [("bf16", s, c, 24, 1, 576, 512, 0) for s in (1, 12, 100) for c in (300, 3000, 30_000)]
    assert off(model, decode_device, unseen, resident=True)[1] < 0.08


def test_what_was_measured_is_known(prefills: PrefillModel, decodes: DecodeModel) -> None:
    inside = prefills.inside("bf16", [1, 1, 300], [100, 99_999, 100], 32, 8, 128, 128)
    assert inside.tolist() == [True, False, False]
    assert prefills.inside("bf16", 1, 100, 128, 8, 128, 128).item() is False
    assert decodes.inside("bf16", [1, 1, 4000], [100, 999_999, 100], 32, 8, 128, 128).tolist() == [True, False, False]
    assert decodes.inside("bf16", 1, 100, 32, 8, 96, 96).item() is False


def test_models_survive_being_written(prefills: PrefillModel, decodes: DecodeModel) -> None:
    for model, sizes in ((prefills, (3, 700, 99, 16, 4, 128, 128, 0)), (decodes, (3, 700, 16, 4, 128, 128, 0))):
        text = json.dumps(model.to_json(), separators=(",", ":"))
        assert len(text) < 16_000
        again = type(model).from_json(json.loads(text))
        assert json.dumps(again.to_json(), separators=(",", ":")) == text
        assert float(again.seconds("bf16", *sizes)) == pytest.approx(float(model.seconds("bf16", *sizes)), rel=1e-3)


def test_what_is_wrong_with_written_models_is_said(prefills: PrefillModel, decodes: DecodeModel) -> None:
    def broken(model: Any, *path: Any, value: Any = None) -> str:
        data = json.loads(json.dumps(model.to_json()))
        at = data
        for key in path[:-1]:
            at = at[key]
        if value is None:
            del at[path[-1]]
        else:
            at[path[-1]] = value
        with pytest.raises(ServecastError) as caught:
            type(model).from_json(data)
        return str(caught.value)

    kind = ("kinds", "bf16/128/0")
    assert "prefill_attention.kinds.bf16/128/0.key_ns" in broken(prefills, *kind, "key_ns", value="x")
    assert "decode_attention: the key 'axes' is missing" in broken(decodes, "axes")
    assert "tables[0].values" in broken(decodes, *kind, "tables", 0, "values", "", value=[[1, 2]])
    assert "tables[1].span" in broken(decodes, *kind, "tables", 1, "span", value=[[0, 3]])
    assert "extent.q" in broken(prefills, *kind, "extent", "q", value="no")
    assert "is no kind" in broken(prefills, "kinds", value={"bf16": prefills.to_json()["kinds"]["bf16/128/0"]})
    assert "more than 0" in broken(decodes, *kind, "share", value=-1)
    with pytest.raises(ServecastError, match="did you mean 'bf16'"):
        prefills.seconds("bf61", 1, 1, 0, 1, 1, 128, 128)
    with pytest.raises(ServecastError, match="no rows"):
        fit_decode(batches()[:0], ROOFLINE)
    with pytest.raises(ServecastError, match="context 0"):
        fit_prefill(prompts().with_columns(context=pl.lit(5, pl.Int64)), ROOFLINE)


def test_small_tables_are_evaluated_as_far_as_they_go() -> None:
    one = prompts().filter((pl.col("heads") == 32) & (pl.col("sequences") == 1))
    names = {(what, times) for what, times, *_ in prefill.evaluate(one, ROOFLINE)}
    assert ("longest", "all") in names
    assert not names & {("shapes", "all"), ("most", "all")}
    small = batches().filter((pl.col("heads") == 32) & (pl.col("context") < 1000) & (pl.col("sequences") < 8))
    rows = decode.evaluate(small, ROOFLINE)
    assert rows
    assert all(which == "all" and np.isfinite(median) for _, which, median, _, _ in rows)


NAMES = {
    "batch_size": "sequences", "num_heads": "heads", "num_key_value_heads": "kv_heads", "window_size": "window",
    "kernel_source": "kernel",
}  # fmt: skip
NARROW = (pl.col("head_dim") == 128) & (pl.col("window") == 0) & (pl.col("kv_cache_dtype") == "bfloat16")


def published(folder: str, phase: str, *kv_heads: int) -> pl.DataFrame:
    """One kind of a system's table: bf16, head_dim 128, full attention; with these numbers of KV heads (all)."""
    path = reference("reference", "aiconfigurator", folder, f"{phase}_attention__vllm0.24.0.csv.gz")
    table = pl.read_csv(path).rename(NAMES).filter(NARROW)
    table = table.with_columns(q="isl", context="step")
    table = table.filter(pl.col("kv_heads").is_in(kv_heads)) if kv_heads else table
    return table.with_columns(seconds=pl.col("latency") * 1e-3, kv_dtype=pl.lit("bf16"), value_dim="head_dim")


def found(rows: Any, what: str, which: str) -> tuple[float, float]:
    return next((median, p90) for w, t, median, p90, _ in rows if (w, t) == (what, which))


def test_held_out_prompts_of_a_published_table() -> None:
    rows = prefill.evaluate(published("h100_sxm", "context", 1, 8), from_gpu(load_gpu("h100-sxm")))
    assert found(rows, "rows", "0.1 ms and more")[0] < 0.03
    assert found(rows, "shapes", "0.1 ms and more")[0] < 0.05
    assert found(rows, "longest", "0.1 ms and more")[0] < 0.06


def test_held_out_batches_of_a_published_table() -> None:
    rows = decode.evaluate(published("h100_sxm", "generation", 1, 8), from_gpu(load_gpu("h100-sxm")))
    assert found(rows, "rows", "all")[0] < 0.018  # of half the head shapes; 1.2 % of all
    assert found(rows, "shapes", "uncached")[0] < 0.05
    assert found(rows, "longest", "uncached")[0] < 0.03


@pytest.fixture(scope="module")
def layers() -> pl.DataFrame:
    """Attention of whole layers, of another engine version on the same GPU, of a table that no fit here sees."""
    path = reference("reference", "llmservingsim", "profiles", "rtxpro6000", "llama-3.1-8b", "tp1", "attention.csv.gz")
    return pl.read_csv(path).with_columns(seconds=pl.col("time_us") * 1e-6)


@pytest.fixture(scope="module")
def workstation() -> tuple[PrefillModel, DecodeModel]:
    roofline = from_gpu(load_gpu("rtx-pro-6000"))
    tables = (published("rtx_pro_6000_server", phase, 1, 8) for phase in ("context", "generation"))
    return fit_prefill(next(tables), roofline), fit_decode(next(tables), roofline)


def test_cached_tokens_of_chunks_cost_what_others_measured(
    layers: pl.DataFrame, workstation: tuple[PrefillModel, DecodeModel]
) -> None:
    rows = layers.filter((pl.col("n_decode") == 0) & (pl.col("kv_prefill") >= 512))
    q, context, seconds = (rows[name].to_numpy() for name in ("prefill_chunk", "kv_prefill", "seconds"))
    ours = workstation[0].seconds("bf16", 1, q, context, 32, 8, 128, 128)
    median, p90 = errors(ours, seconds)
    assert median < 0.1
    assert p90 < 0.15


def test_layers_read_their_kv_from_memory_and_not_from_the_cache(
    layers: pl.DataFrame, workstation: tuple[PrefillModel, DecodeModel]
) -> None:
    size = pl.col("n_decode") * pl.col("kv_decode") * 4096
    rows = layers.filter((pl.col("prefill_chunk") == 0) & (size > 8e6) & (size <= 128e6))  # fits the cache, and counts
    number, context, seconds = (rows[name].to_numpy() for name in ("n_decode", "kv_decode", "seconds"))
    assert errors(workstation[1].seconds("bf16", number, context, 32, 8, 128, 128), seconds)[0] < 0.12
    assert errors(workstation[1].seconds("bf16", number, context, 32, 8, 128, 128, resident=True), seconds)[0] > 0.2


def test_decodes_that_ride_in_a_prefill_kernel_cost_what_others_measured(
    layers: pl.DataFrame, workstation: tuple[PrefillModel, DecodeModel]
) -> None:
    rows = layers.filter((pl.col("n_decode") > 0) & (pl.col("prefill_chunk") > 0)).gather_every(37)
    prices = workstation[0].compile(HeadShape("bf16", 32, 8, 128, 128), max_q=2048)
    columns = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
    ours = [prices.seconds(q, c) + prices.riders.seconds(n, n * kv) for q, c, n, kv in rows.select(columns).iter_rows()]
    apart = workstation[1].seconds("bf16", rows["n_decode"].to_numpy(), rows["kv_decode"].to_numpy(), 32, 8, 128, 128)
    alone = np.array([prices.seconds(q, c) for q, c in rows.select(columns[:2]).iter_rows()])
    measured = rows["seconds"].to_numpy()
    assert errors(ours, measured)[0] < 0.2
    assert errors(ours, measured)[0] < 0.7 * errors(alone + apart, measured)[0]
