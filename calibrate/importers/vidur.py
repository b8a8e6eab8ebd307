"""Kernel and collective times of Microsoft's vidur: its folder `data/profiling` with `compute/` and `network/`.

One transformer layer's kernels per model and tensor-parallel degree, attention of paged caches, NCCL on one node. It
knows the files, columns and units (milliseconds, bytes), nothing of fits.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calibrate.hardware import load_gpu
from calibrate.importers.gather import Gathered
from calibrate.importers.shapes import Shape, add_layers, layer_shapes
from calibrate.measurements import Device, Measurements
from calibrate.model import ModelSpec
from calibrate.rows import Kind, read_rows
from servecast.errors import ServecastError, nearest, one_of

if TYPE_CHECKING:
    pass

GPUS = {"a100": "a100-sxm", "h100": "h100-sxm"}
"""Folder of `compute/` -> id of the catalogue; `network/<folder>_dgx` is the same board on its node."""
OPS = {
    "emb": "embedding",
    "input_layernorm": "norm",
    "post_attention_layernorm": "norm",
    "attn_pre_proj": "qkv",
    "attn_rope": "rope",
    "attn_post_proj": "o_proj",
    "mlp_up_proj": "gate_up",
    "mlp_act": "activation",
    "mlp_down_proj": "down",
    "add": "add",
}
"""Column `time_stats.<op>.median` -> operator."""
KERNEL = "vidur 2024: torch, flash-attn, NCCL"
UNRESOLVED = "0.000 ms, below the resolution of 0.001 ms"
NOTES = (
    "fp16 of 2024's kernels; medians, to 1 us: a kernel of a few microseconds is known to tens of per cent only",
    "norms and residual adds are kernels of their own here; engines fuse them",
)
_MLP: dict[str, Kind] = {
    **dict.fromkeys(("num_tokens", "num_tensor_parallel_workers", "n_head", "n_kv_head", "n_embd"), int),
    **dict.fromkeys(("n_expanded_embd", "vocab_size"), int),
    "use_gated_mlp": str,
}
_ATTENTION: dict[str, Kind] = {
    **dict.fromkeys(("n_embd", "n_q_head", "n_kv_head", "num_tensor_parallel_workers"), int),
    **dict.fromkeys(("batch_size", "prefill_chunk_size", "kv_cache_size"), int),
    "attention_backend": str,
    **dict.fromkeys(("time_stats.attn_prefill.median", "time_stats.attn_decode.median"), float),
}


def read_vidur(path: Path, gpu: str | None) -> Measurements:
    """The measurements of one GPU (`gpu`, which may be left out where the folder holds one of the known ones)."""
    here = sorted({f.name for f in (path / "compute").glob("*") if f.name in GPUS})
    here += sorted({f.name.removesuffix("_dgx") for f in (path / "network").glob("*_dgx")} & set(GPUS) - set(here))
    ids = {GPUS[name]: name for name in here}
    if not ids:
        wanted = [f"compute/{name}" for name in GPUS] + [f"network/{name}_dgx" for name in GPUS]
        raise ServecastError(f"{path}: no table of vidur for a GPU of the catalogue; expected {one_of(wanted)}")
    if gpu is None and len(ids) == 1:
        gpu = next(iter(ids))
    if gpu not in ids:
        said = "say which GPU" if gpu is None else f"no {gpu!r}{nearest(gpu, ids)}"
        raise ServecastError(f"{path}: {said}; it holds {one_of(ids)}")
    found, name = Gathered(load_gpu(gpu)), ids[gpu]
    for file in sorted((path / "compute" / name).rglob("mlp.csv*")):
        _layers(found, file)
    attention = sorted((path / "compute" / name).rglob("attention*.csv*"))
    for file in attention + sorted((path / "history").glob(f"{name}_attention*.csv*")):
        read_attention(found, file)
    for op in ("all_reduce", "send_recv"):
        for file in sorted((path / "network" / f"{name}_dgx").glob(f"{op}.csv*")):
            _collective(found, file, op)
    nodes = sorted(f.name for f in (path / "network").glob("*") if f.name != f"{name}_dgx")
    if nodes:
        found.notes.append(f"network/ of other nodes is not taken: {one_of(nodes)}")
    if overheads := sorted(f.name for f in path.rglob("*cpu_overheads*.csv*")):
        found.notes.append(f"host times of an engine of 2024 under Ray are not taken: {one_of(overheads)}")
    device = Device(
        gpu=gpu,
        device=name,
        measured_by="Microsoft Research, vidur",
        source="vidur, github.com/microsoft/vidur, data/profiling",
        licence="MIT, (c) Microsoft Corporation",
        software="not stated (kernels of 2024)",
        taken="2024",
        notes=NOTES,
    )
    return found.measurements(device, path)


def _layers(found: Gathered, file: Path) -> None:
    import polars as pl

    times = {f"time_stats.{op}.median": op for op in OPS}
    columns: dict[str, Kind] = {**_MLP, **dict.fromkeys(times, float)}
    rows = read_rows(file, columns, found.problems, nullable=tuple(times))
    if rows is None:
        return
    if empty := [op for column, op in times.items() if rows[column].is_null().all()]:
        found.notes.append(f"{file.parent.name}: no times of {one_of(empty)}")
    shapes: dict[tuple[str, int], Shape] = {}
    sizes = [column for column in _MLP if column != "num_tokens"]
    for size in rows.select("row", *sizes).unique(sizes, maintain_order=True).iter_rows(named=True):
        heads, tp = size["n_head"], size["num_tensor_parallel_workers"]
        if min(tp, heads, size["n_kv_head"], size["n_embd"]) < 1 or heads % tp:
            found.problems.append(f"{file}, row {size['row']}: {heads} heads over {tp} GPUs; they do not divide")
            return
        operators = layer_shapes(_model(file, size), tp)
        shapes |= {(op, tp): operators[operator] for op, operator in OPS.items()}
    long = rows.rename({**times, "num_tensor_parallel_workers": "tp"}).unpivot(
        on=list(OPS), index=["tp", "num_tokens", "file", "row"], variable_name="layer", value_name="time"
    )
    long = long.filter(pl.col("time").is_not_null()).with_columns(pl.lit(KERNEL).alias("kernel"))
    long = found.without(long, pl.col("time") == 0, file.parent.name, UNRESOLVED)
    add_layers(found, long, shapes, "num_tokens", "time", "ms")


def _model(file: Path, size: Mapping[str, Any]) -> ModelSpec:
    heads, hidden = size["n_head"], size["n_embd"]
    return ModelSpec(
        name=file.parent.name,
        hidden=hidden,
        layers=1,
        heads=heads,
        kv_heads=size["n_kv_head"],
        head_dim=hidden // heads,
        intermediate=size["n_expanded_embd"],
        vocab=size["vocab_size"],
        max_position=1,
        dtype="fp16",
        gated_mlp=size["use_gated_mlp"].lower() == "true",
    )


def read_attention(found: Gathered, file: Path, decode: bool = True) -> None:
    """Rows of vidur's attention.csv (LLMServingSim's first format has the same): prompt chunks, and decode batches."""
    import polars as pl

    rows = read_rows(file, _ATTENTION, found.problems, nullable=tuple(c for c in _ATTENTION if c.startswith("time")))
    if rows is None:
        return
    tp = pl.col("num_tensor_parallel_workers")
    rows = rows.with_columns(
        kv_dtype=pl.lit("bf16"),
        sequences="batch_size",
        q="prefill_chunk_size",
        context="kv_cache_size",
        heads=pl.col("n_q_head") // tp,
        kv_heads=(pl.col("n_kv_head") // tp).clip(1),
        head_dim=pl.col("n_embd") // pl.col("n_q_head"),
        value_dim=pl.col("n_embd") // pl.col("n_q_head"),
        window=pl.lit(0, pl.Int64),
        kernel=pl.col("attention_backend").str.replace("AttentionBackend.", "", literal=True),
    )
    timed = pl.any_horizontal(pl.col(c).is_not_null() for c in _ATTENTION if c.startswith("time"))
    rows = found.without(rows, ~timed, file.name, "no time in them")
    taken = [("prefill_attention", "attn_prefill"), ("decode_attention", "attn_decode")]
    for family, what in taken if decode else taken[:1]:
        time = f"time_stats.{what}.median"
        part = rows.filter(pl.col(time).is_not_null())
        part = found.without(part, pl.col(time) == 0, what, UNRESOLVED)
        found.add(family, part, time, "ms")
    if idle := int(
        (rows["time_stats.attn_prefill.median"].is_null() & rows["time_stats.attn_decode.median"].is_null()).sum()
    ):
        found.notes.append(f"{file.name}: {idle:,} rows hold no time")


def _collective(found: Gathered, file: Path, op: str) -> None:
    import polars as pl

    time = f"time_stats.{op}.median"
    columns: dict[str, Kind] = {**dict.fromkeys(("rank", "num_workers", "size", "devices_per_node"), int), time: float}
    rows = read_rows(file, columns, found.problems)
    if rows is None:
        return
    across = pl.col("num_workers") > pl.col("devices_per_node")
    rows = found.without(rows, across, op, "between nodes, which no family describes")
    rows = found.without(rows, pl.col("rank") != 0, op, "another rank's view of the same call")
    rows = rows.rename({"num_workers": "gpus", "size": "bytes"})
    rows = rows.with_columns(pl.lit(op).alias("op"), pl.lit("nccl").alias("backend"), pl.lit("NCCL").alias("kernel"))
    found.add("collective", rows, time, "ms")
