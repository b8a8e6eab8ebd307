"""Layers with latent attention: a known device is recovered, and compiled prices are the same."""

from __future__ import annotations

import json

import numpy as np
import polars as pl
import pytest

from calibrate.kernels import mla
from calibrate.kernels.heldout import errors
from calibrate.kernels.mla import Layer, MlaModel, Phase, fit_mla
from calibrate.kernels.roofline import Roofline
from servecast.errors import ServecastError

ROOFLINE = Roofline({"bf16": 100e12, "fp8": 200e12}, 1e12)
LENGTHS = [1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384]
CACHED = [2**i - 1 for i in (1, 4, 6, 8, 10, 12, 14, 16, 17)]


def latent_device(phase: Phase, heads: int, sequences: int, tokens: int) -> float:
    """20 us, 60 % of the roofline."""
    layer = Layer("fp8_block", "bf16", "bf16", heads)
    size = np.float64(tokens + (phase == "decode"))
    return 20e-6 + float(layer.work(phase, ROOFLINE, np.float64(sequences), size)) / 0.6


def latents(phase: Phase) -> pl.DataFrame:
    name, other = ("q", "context") if phase == "prefill" else ("context", "q")
    rows = [
        ("fp8_block", "bf16", "bf16", s, n, 0, h, latent_device(phase, h, s, n))
        for s in (1, 2, 4, 8, 16, 32, 64)
        for n in (LENGTHS if phase == "prefill" else CACHED)
        for h in (1, 4, 16, 64, 128)
    ]
    schema = ["weights", "attn_dtype", "kv_dtype", "sequences", name, other, "heads", "seconds"]
    noise = np.exp(0.02 * np.random.default_rng(5).standard_normal(len(rows)))
    return pl.DataFrame(rows, schema, orient="row").with_columns(pl.col("seconds") * pl.Series(noise))


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_latent_layers_of_a_known_device_are_recovered(phase: Phase) -> None:
    model = fit_mla(phase, latents(phase), ROOFLINE)
    text = json.dumps(model.to_json())
    assert json.dumps(MlaModel.from_json(phase, json.loads(text), "mla").to_json()) == text
    points = [(h, s, n) for h in (2, 32, 128) for s in (1, 6, 50) for n in (100, 777, 3000, 60_000)]
    ours = [float(model.seconds("fp8_block", "bf16", "bf16", s, n, h)) for h, s, n in points]
    median, p90 = errors(ours, [latent_device(phase, *point) for point in points])
    assert median < 0.03
    assert p90 < 0.08
    assert model.inside("fp8_block", "bf16", "bf16", [1, 100], 100, 16).tolist() == [True, False]
    assert not model.inside("bf16", "bf16", "bf16", 1, 100, 16).any()
    assert float(model.seconds("bf16", "bf16", "fp8", 4, 1000, 16)) > 0  # a kind that was not measured
    few = latents(phase).filter(pl.col("heads").is_in([1, 16, 128]))
    names = [what for what, *_ in mla.evaluate(phase, few, ROOFLINE)]
    assert names == ["rows", "heads", "longest", "most"]


def test_latent_decode_compiles_to_lines_with_the_same_prices() -> None:
    model = fit_mla("decode", latents("decode"), ROOFLINE)
    prices = model.compile(Layer("fp8_block", "bf16", "bf16", 16), max_sequences=100)
    for number, each in ((1, 0), (1, 5000), (7, 300), (100, 90_000)):
        expected = float(model.seconds("fp8_block", "bf16", "bf16", number, each, 16))
        assert prices.seconds(number, number * each) == pytest.approx(expected, rel=0.006)  # knots are left out
    with pytest.raises(ServecastError, match="holds no rows"):
        fit_mla("decode", latents("decode")[:0], ROOFLINE)
    with pytest.raises(ServecastError, match="is no kind"):
        MlaModel.from_json("decode", model.to_json() | {"kinds": {"bf16": {}}}, "mla")


# --- published measurements ---
