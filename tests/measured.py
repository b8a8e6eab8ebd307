"""Measurements of devices that never were: a few points of every family, from the datasheet and with a ripple."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from typing import Any

import numpy as np
import polars as pl

from calibrate.datasheet import Datasheet
from calibrate.fit import FITS
from calibrate.hardware import load_gpu
from calibrate.kernels.heads import HeadShape
from calibrate.kernels.roofline import from_gpu
from calibrate.measurements import Device, Measurements
from calibrate.profile import SKEW, Profile, Residual, Source

SHAPES = ((4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336))
HEADS = ((32, 8, 128, 128, 0), (8, 1, 128, 128, 0))
EXPERTS = (4096, 14336, 8, 2)


def device(gpu: str = "h100-sxm", **facts: Any) -> Device:
    """Whose measurements they are."""
    known = {
        "device": "a device", "measured_by": "a test", "source": "tests", "licence": "Apache-2.0",
        "software": "none 1.0", "taken": "2026-11", "notes": ("made up",),
    }  # fmt: skip
    return Device(gpu, **(known | facts))


RESIDUALS = (
    Residual("gemm", "bf16", "rows", 0.0271, 0.0935, 3655),
    Residual("gemm", "bf16", "largest m", 0.047, 0.15, 966),
    Residual("gemm", "bf16", "largest n or k", 0.0687, 0.165, 6142),
    Residual("decode_attention", "all", "rows", 0.0127, 0.0471, 12462),
    Residual("decode_attention", "all", "shapes", 0.0333, 0.124, 62166),
)
"""Held-out errors that nobody measured."""


@cache
def profile() -> Profile:
    """Fitted to `measured()`, with RESIDUALS for its errors."""
    return fitted(measured())


def fitted(measurements: Measurements) -> Profile:
    """Fitted to measurements, without the evaluation, which takes most of the time."""
    gpu = load_gpu(measurements.device.gpu)
    families = {family: FITS[family][0](table, from_gpu(gpu)) for family, table in measurements.tables.items()}
    source = Source(tuple(families), asdict(measurements.device) | {"notes": list(measurements.device.notes)})
    return Profile(gpu, families, (source,), RESIDUALS)


def measured(
    gpu: str = "h100-sxm", slower: float = 1.0, weights: Sequence[str] = ("bf16", "fp8"), **facts: Any
) -> Measurements:
    """A device that takes `slower` times what a datasheet's efficiencies say, 3 % more or less."""
    sheet = Datasheet(load_gpu(gpu))
    one = np.ones(1)
    gemm = [
        (w, m, n, k, sheet.gemm_s(w, m * one, n, k)[0])
        for w in weights for n, k in SHAPES for m in (1, 16, 64, 256, 1024, 4096, 8192)
    ]  # fmt: skip
    prefill = [
        ("bf16", 1, q, 0, *heads, _prefill_s(sheet, heads, q))
        for heads in HEADS for q in (16, 64, 256, 1024, 4096, 8192)
    ]  # fmt: skip
    decode = [
        ("bf16", n, context, *heads, _decode_s(sheet, heads, n * (context + 1)))
        for heads in HEADS for n in (1, 8, 32, 128) for context in (127, 1023, 4095, 16383)
    ]  # fmt: skip
    experts = [
        ("bf16", t, *EXPERTS, 1, 1, SKEW, sheet.moe_s("bf16", t * one, *EXPERTS, 1)[0])
        for t in (1, 4, 16, 64, 256, 1024, 4096)
    ]
    norms = [("norms", rows, 16384, sheet.elementwise_s("norms", rows * one, 16384)[0]) for rows in (1, 64, 1024, 4096)]
    reduce = [
        ("all_reduce", "custom_graph", gpus, 2**p, sheet.collective_s("allreduce", 2**p * one, gpus)[0])
        for gpus in (2, 4, 8) for p in range(10, 29, 2)
    ]  # fmt: skip
    heads_columns = ["heads", "kv_heads", "head_dim", "value_dim", "window"]
    tables = {
        "gemm": _table(["weights", "m", "n", "k"], gemm, slower),
        "prefill_attention": _table(["kv_dtype", "sequences", "q", "context", *heads_columns], prefill, slower),
        "decode_attention": _table(["kv_dtype", "sequences", "context", *heads_columns], decode, slower),
        "moe": _table(["weights", "tokens", "hidden", "inter", "experts", "topk", "tp", "ep", "skew"], experts, slower),
        "elementwise": _table(["op", "rows", "elements"], norms, slower),
        "collective": _table(["op", "backend", "gpus", "bytes"], reduce, slower),
    }
    return Measurements(device(gpu, **facts), tables)


def _prefill_s(sheet: Datasheet, heads: tuple[int, int, int, int, int], q: int) -> float:
    flops = HeadShape("bf16", *heads).pair_flops * q * (q + 1) / 2
    return 1e-5 + flops / (0.6 * sheet.gpu.flops["bf16"])


def _decode_s(sheet: Datasheet, heads: tuple[int, int, int, int, int], tokens: int) -> float:
    return 1e-5 + HeadShape("bf16", *heads).kv_token_bytes * tokens / (0.85 * sheet.gpu.bandwidth_bytes_per_s)


def _table(columns: list[str], rows: Sequence[tuple[Any, ...]], slower: float) -> pl.DataFrame:
    ripple = np.exp(0.03 * np.random.default_rng(0).standard_normal(len(rows)))
    table = pl.DataFrame(rows, schema=[*columns, "seconds"], orient="row")
    return table.with_columns(
        seconds=pl.col("seconds") * slower * pl.Series(ripple), spread=pl.lit(None, pl.Float64), kernel=pl.lit("k<b>")
    )
