"""From measurements to a profile: every family is fitted, and evaluated on what was held out of a fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from calibrate.hardware import Gpu, load_gpu
from calibrate.kernel_times import kernels_s
from calibrate.kernels import collective, decode, elementwise, gemm, moe_fit, prefill
from calibrate.kernels.roofline import Roofline, from_gpu
from calibrate.kernels.tally import Tally
from calibrate.layout import Parallelism
from calibrate.measurements import Measurements, measured_rates
from calibrate.models import load_model, model_names
from calibrate.profile import Profile, Residual, Source
from servecast.errors import ServecastError, one_of

if TYPE_CHECKING:
    import polars as pl

    Fit = Callable[[pl.DataFrame, Roofline], Any]
    Evaluate = Callable[[pl.DataFrame, Roofline], list[tuple[str, str, float, float, int]]]

CPU = "cpu"
FITS: Mapping[str, tuple[Fit, Evaluate]] = {
    "gemm": (gemm.fit_gemm, gemm.evaluate),
    "prefill_attention": (prefill.fit_prefill, prefill.evaluate),
    "decode_attention": (decode.fit_decode, decode.evaluate),
    "moe": (moe_fit.fit_moe, moe_fit.evaluate),
    "elementwise": (elementwise.fit_elementwise, elementwise.evaluate),
    "collective": (collective.fit_collective, collective.evaluate),
}
"""Family -> (its fit, its held-out errors as (what was held out, kind, median, p90, points))."""


def fit_profile(
    measured: Sequence[Measurements], done: Callable[[str, Sequence[Residual]], None] = lambda family, off: None
) -> Profile:
    """Fit a profile to measurements of one GPU; a family that several of them hold is taken from the first.

    `done(family, residuals)` is told of every family. Raises `ServecastError` when the measurements are of several
    GPUs, or hold no family that is fitted.
    """
    gpu = _gpu_of(measured)
    roofline = _roofline(gpu, measured)
    families: dict[str, Any] = {}
    residuals: list[Residual] = []
    sources = []
    for one in measured:
        mine = [family for family in FITS if family in one.tables and family not in families]
        for family in mine:
            fit, evaluate = FITS[family]
            table = one.tables[family]
            families[family] = fit(table, roofline)
            off = [
                Residual(family, kind, what, median, p90, points)
                for what, kind, median, p90, points in evaluate(table, roofline)
                if points
            ]
            residuals += off
            done(family, off)
        if mine:
            sources.append(Source(tuple(mine), asdict(one.device) | {"notes": list(one.device.notes)}))
    if not families:
        raise ServecastError(f"the measurements hold no family that is fitted; fitted are {one_of(FITS)}")
    profile = Profile(gpu, families, tuple(sources), tuple(residuals))
    for one in measured:
        if "step" in one.tables and (off := _steps_off(one.tables["step"], profile)):
            done("step", off)
            return replace(profile, residuals=(*residuals, *off))
    return profile


def _steps_off(table: pl.DataFrame, profile: Profile) -> list[Residual]:
    """Sums of kernels against whole steps of catalogued models, which nothing is fitted to."""
    off = Tally()
    for row in table.filter(table["model"].is_in(model_names())).iter_rows(named=True):
        chunks = [(row["q"], row["context"])] * row["sequences"]
        model, layout = load_model(row["model"]), Parallelism(row["tp"])
        ours = kernels_s(model, layout, profile, chunks, row["decodes"], row["kv_tokens"])
        kind = "mixed" if chunks and row["decodes"] else "prefill" if chunks else "decode"
        off.add("whole steps", kind, [ours], [row["seconds"]])
    return [Residual("step", kind, what, median, p90, points) for what, kind, median, p90, points in off.found()]


def _roofline(gpu: Gpu, measured: Sequence[Measurements]) -> Roofline:
    """Of a CPU the rates that were measured, for no two are alike; of a GPU the datasheet's."""
    if gpu.id != CPU:
        return from_gpu(gpu)
    flops, bandwidth = measured_rates(measured[0])
    if "bf16" not in flops:
        raise ServecastError(f"a profile of a {CPU} is fitted to bf16 kernels; found {one_of(flops)}: measure bf16")
    return Roofline(flops, bandwidth)


def _gpu_of(measured: Sequence[Measurements]) -> Gpu:
    gpus = sorted({one.device.gpu for one in measured})
    if len(gpus) != 1:
        raise ServecastError(f"measurements of one GPU make a profile; found {one_of(gpus) or 'none'}")
    return load_gpu(gpus[0])
