"""Sums of kernels against whole steps that others measured, and to which no profile was fitted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from calibrate.cost import compile_cost
from calibrate.profile import FOLDER, load_profile
from tests.calibrate.helpers import parts
from tests.reference import reference

LAYER = {"layernorm": 2, "qkv_proj": 1, "rotary_emb": 1, "o_proj": 1, "gate_up_proj": 1, "act_fn": 1, "down_proj": 1}
"""How often each of its layers runs in a layer of the model."""


def column(folder: Path, name: str, layer: str, size: str, at: int) -> float:
    """Microseconds of a layer in LLMServingSim's tables."""
    path = next(folder.glob(f"{name}.csv*"))
    rows = pl.read_csv(path).filter(pl.col("layer") == layer).sort(size)
    return float(np.interp(at, rows[size], rows["time_us"]))


def test_decode_steps_of_a_model_on_rtx_pro_6000() -> None:
    folder = reference("reference", "llmservingsim", "profiles", "rtxpro6000", "llama-3.1-8b", "tp1")
    model, layout, _, engine = parts("llama-3.1-8b", "rtx-pro-6000")
    cost = compile_cost(model, layout, engine, load_profile(FOLDER / "rtx-pro-6000.json"))
    attention = pl.read_csv(next(folder.glob("attention.csv*"))).filter(pl.col("prefill_chunk") == 0)
    off = []
    for n in (1, 8, 32, 64, 128, 256):
        once = sum(column(folder, "dense", layer, "tokens", n) for layer in ("embedding", "final_layernorm"))
        once += sum(column(folder, "per_sequence", layer, "sequences", n) for layer in ("lm_head", "sampler"))
        layer_us = sum(times * column(folder, "dense", layer, "tokens", n) for layer, times in LAYER.items())
        for context in (512, 2048, 8192):
            (decode_us,) = attention.filter(n_decode=n, kv_decode=context)["time_us"]
            measured = 1e-6 * (once + model.layers * (layer_us + decode_us))
            off.append((cost.step_s((), n, n * context) - cost.after_s[n]) / measured - 1)
    assert abs(float(np.median(off))) < 0.03
    assert max(map(abs, off)) < 0.08


@pytest.mark.parametrize(("gpu", "at_zero", "slope"), [("h100-sxm", 6.44, 4.37e-5), ("b200-sxm", 3.93, 1.80e-5)])
def test_one_request_of_llama_8b(gpu: str, at_zero: float, slope: float) -> None:
    """vLLM blog 2026-04-22: ms + ms a token of context. The host's bubble was set by these at short contexts."""
    model, layout, _, engine = parts("llama-3.1-8b", gpu)
    cost = compile_cost(model, layout, engine, load_profile(FOLDER / f"{gpu}.json"))
    for context in (256, 8192, 32768, 125_000):
        assert 1e3 * cost.step_s((), 1, context) == pytest.approx(at_zero + slope * context, rel=0.1)
