"""Whole-model times of splitwise-sim's `perf_model.csv`: prefills and decode steps of a static batch, as family `step`.

They hold no kernel, so nothing is priced with them; sums of kernels are checked against them.
"""

from __future__ import annotations

from pathlib import Path

from calibrate.hardware import load_gpu
from calibrate.importers.gather import Gathered
from calibrate.measurements import Device, Measurements
from calibrate.rows import Kind, read_rows
from servecast.errors import ServecastError, nearest, one_of

HARDWARE = {"a100-80gb": "a100-sxm", "h100-80gb": "h100-sxm"}
COLUMNS: dict[str, Kind] = {
    **dict.fromkeys(("model", "hardware"), str),
    **dict.fromkeys(("tensor_parallel", "prompt_size", "batch_size", "token_size"), int),
    **dict.fromkeys(("prompt_time", "token_time"), float),
}
NOTES = (
    "whole steps of a serving framework that the source does not name, fp16, with its host time",
    "a decode step's time is the mean over token_size steps: kv_tokens is the middle, batch x (prompt + tokens / 2)",
)


def read_splitwise(path: Path, gpu: str | None) -> Measurements:
    """The steps of one GPU: `path` is perf_model.csv or its folder; repeats of a point become their median."""
    import polars as pl

    file = path / "perf_model.csv" if path.is_dir() else path
    problems: list[str] = []
    rows = read_rows(file, COLUMNS, problems)
    if rows is None:
        raise ServecastError(*problems)
    ids = {HARDWARE[name]: name for name in sorted(set(rows["hardware"].unique()) & set(HARDWARE))}
    if not ids:
        raise ServecastError(f"{file}: no hardware of the catalogue in it; expected {one_of(HARDWARE)}")
    if gpu is None and len(ids) == 1:
        gpu = next(iter(ids))
    if gpu not in ids:
        said = "say which GPU" if gpu is None else f"no {gpu!r}{nearest(gpu, ids)}"
        raise ServecastError(f"{file}: {said}; it holds {one_of(ids)}")
    found = Gathered(load_gpu(gpu))
    rows = found.without(rows, pl.col("hardware") != ids[gpu], "perf_model.csv", "of other hardware")
    nothing = pl.lit(0, pl.Int64)
    steps = rows.with_columns(tp="tensor_parallel", context=nothing, kernel=pl.lit("not stated"))
    prefill = steps.with_columns(sequences="batch_size", q="prompt_size", decodes=nothing, kv_tokens=nothing)
    taken = found.add("step", prefill, "prompt_time", "ms")
    steps = steps.filter(pl.col("row").is_in(taken))  # where the prompts were impossible the batch did not run as one
    middle = pl.col("batch_size") * (pl.col("prompt_size") + pl.col("token_size") // 2)
    decode = steps.with_columns(sequences=nothing, q=nothing, decodes="batch_size", kv_tokens=middle)
    found.add("step", decode, "token_time", "ms")
    device = Device(
        gpu=gpu,
        device=f"DGX with {ids[gpu]}",
        measured_by="Patel et al., Splitwise (ISCA 2024)",
        source="splitwise-sim, github.com/Mutinifni/splitwise-sim, data/perf_model.csv",
        licence="MIT, (c) 2024 Pratyush Patel",
        software="not stated",
        taken="2023-2024",
        notes=NOTES,
    )
    return found.measurements(device, file)
