"""Layer times of LLMServingSim's profiler (casys-kaist): a GPU's folder with `<model>/tp<N>/{dense,attention,...}.csv`.

GPU times of single layers of vLLM, in microseconds, whose shapes come from the models' config.json beside them. Of the
older format (`layers.csv`, nanoseconds) GEMMs and attention. `llmservingsim_folder.py` knows where they lie.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from calibrate.hardware import load_gpu
from calibrate.importers.gather import Gathered
from calibrate.importers.llmservingsim_folder import Profile, gpu_folder, model_config, profiles, sizes
from calibrate.importers.shapes import Shape, add_layers, layer_shapes
from calibrate.importers.vidur import read_attention
from calibrate.measurements import Device, Measurements
from calibrate.model import ModelSpec
from calibrate.rows import Kind, read_rows
from servecast.errors import ServecastError, one_of

if TYPE_CHECKING:
    import polars as pl

LAYERS = {
    "embedding": "embedding",
    "layernorm": "norms",
    "qkv_proj": "qkv",
    "qk_norm": "qk_norm",
    "rotary_emb": "rope",
    "o_proj": "o_proj",
    "gate_up_proj": "gate_up",
    "act_fn": "activation",
    "down_proj": "down",
    "final_layernorm": "final_norm",
    "lm_head": "lm_head",
    "sampler": "sampling",
}
"""Layer of dense.csv and per_sequence.csv -> operator."""
NOTES = (
    "GPU times of a layer's kernels in eager mode, mean of 3 calls; attention writes the new keys and values, too",
    "norms: the mean of a layer's two, of which the first adds no residual here (one layer was profiled)",
    "moe, if any: router and experts of one rank, with the number of experts that get tokens forced",
)
NOTES_V0 = (
    "layers of a plain torch model: of them GEMMs only, its elementwise kernels are not the fused ones of an engine",
    "decode attention is left out: its batches get faster as their context grows (they read the same cache blocks)",
)


def read_llmservingsim(path: Path, gpu: str | None) -> Measurements:
    """The measurements of one GPU from every model and tp below `path`: a GPU's folder, or one that holds several."""
    folder, gpu_id = gpu_folder(path, gpu)
    found = Gathered(load_gpu(gpu_id))
    every = profiles(folder, found.problems)
    if not every and not found.problems:
        raise ServecastError(f"{folder}: no profile in it; expected folders <model>/tp<N> with dense.csv or layers.csv")
    for profile in every:
        config = model_config(profile, found.problems)
        model = sizes(profile, config, found.problems) if config else None
        if model is None:
            continue
        if profile.vllm:
            _layers(found, profile, model)
            _attention(found, profile, model)
            _moe(found, profile, model, config)
        else:
            _layers_v0(found, profile, model)
            for file in sorted(profile.folder.glob("attention.csv*")):
                read_attention(found, file, decode=False)
    skewed = sum(1 for profile in every if list(profile.folder.glob("skew.csv*")))
    if skewed:
        found.notes.append(f"skew.csv of {skewed} folders (decode batches of two lengths): no family describes them")
    versions = sorted({f"vLLM {profile.vllm}" for profile in every if profile.vllm})
    device = Device(
        gpu=gpu_id,
        device=one_of(sorted({profile.device for profile in every})),
        measured_by="KAIST CASYS, LLMServingSim's profiler",
        source=f"LLMServingSim, github.com/casys-kaist/LLMServingSim, {', '.join(sorted({p.model for p in every}))}",
        licence="MIT, (c) 2024 CASYS Lab at KAIST",
        software=one_of(versions) or "torch and flash-attn, versions not stated",
        taken=one_of(sorted({profile.taken for profile in every})),
        notes=NOTES if versions else NOTES_V0,
    )
    return found.measurements(device, folder)


def _rows(found: Gathered, profile: Profile, name: str, columns: dict[str, Kind]) -> pl.DataFrame | None:
    """A table of the profile, with the column `kernel`; None where the file is not there or of no use."""
    import polars as pl

    for file in sorted(profile.folder.glob(f"{name}.csv*")):
        rows = read_rows(file, columns, found.problems)
        kernel = f"vLLM {profile.vllm}" if profile.vllm else "torch"
        return None if rows is None else rows.with_columns(pl.lit(kernel).alias("kernel"))
    return None


def _layers(found: Gathered, profile: Profile, model: ModelSpec) -> None:
    operators = layer_shapes(model, profile.tp)
    shapes = {layer: operators[operator] for layer, operator in LAYERS.items()}
    for name, count in (("dense", "tokens"), ("per_sequence", "sequences")):
        rows = _rows(found, profile, name, {"layer": str, count: int, "time_us": float})
        _add(found, profile, rows, shapes, count, "time_us", "us")


def _layers_v0(found: Gathered, profile: Profile, model: ModelSpec) -> None:
    """Projections one by one; an expert is never sharded."""
    operators, hidden = layer_shapes(model, profile.tp), model.hidden
    kv, inner = model.kv_heads_per_rank(profile.tp) * model.head_dim, model.intermediate // profile.tp
    sizes = {
        "q_proj": (operators["o_proj"][1][1], hidden),
        "o_proj": operators["o_proj"][1],
        "down_proj": operators["down"][1],
        "lm_head": operators["lm_head"][1],
        **dict.fromkeys(("k_proj", "v_proj"), (kv, hidden)),
        **dict.fromkeys(("gate_proj", "up_proj"), (inner, hidden)),
        **dict.fromkeys(("expert.w1", "expert.w3"), (model.intermediate, hidden)),
        "expert.w2": (hidden, model.intermediate),
    }
    rows = _rows(found, profile, "layers", {"layer_name": str, "input": int, "latency(ns)": float})
    if rows is not None:
        rows = rows.rename({"layer_name": "layer"})
    _add(found, profile, rows, {layer: (layer, size) for layer, size in sizes.items()}, "input", "latency(ns)", "ns")


def _add(
    found: Gathered,
    profile: Profile,
    rows: pl.DataFrame | None,
    shapes: dict[str, Shape],
    count: str,
    time: str,
    unit: str,
) -> None:
    import polars as pl

    if rows is None:
        return
    others = sorted(set(rows["layer"].unique()) - set(shapes))
    what = f"{profile.model} tp{profile.tp}"
    rows = found.without(rows, pl.col("layer").is_in(others), what, f"{one_of(others)}: of no family")
    known = {(layer, profile.tp): shape for layer, shape in shapes.items()}
    add_layers(found, rows.with_columns(tp=pl.lit(profile.tp, pl.Int64)), known, count, time, unit)


def _attention(found: Gathered, profile: Profile, model: ModelSpec) -> None:
    import polars as pl

    columns: dict[str, Kind] = dict.fromkeys(("prefill_chunk", "kv_prefill", "n_decode", "kv_decode"), int)
    rows = _rows(found, profile, "attention", columns | {"time_us": float})
    if rows is None:
        return
    prefill, decode = pl.col("prefill_chunk") > 0, pl.col("n_decode") > 0
    what = f"{profile.model} tp{profile.tp} attention"
    rows = found.without(rows, prefill & decode, what, "a prompt chunk and decodes in one call")
    rows = rows.with_columns(
        kv_dtype=pl.lit("bf16"),
        heads=pl.lit(model.heads_per_rank(profile.tp), pl.Int64),
        kv_heads=pl.lit(model.kv_heads_per_rank(profile.tp), pl.Int64),
        head_dim=pl.lit(model.head_dim, pl.Int64),
        value_dim=pl.lit(model.head_dim, pl.Int64),
        window=pl.lit(0, pl.Int64),
    )
    chunks = rows.filter(prefill).with_columns(sequences=pl.lit(1, pl.Int64), q="prefill_chunk", context="kv_prefill")
    found.add("prefill_attention", chunks, "time_us", "us")
    found.add(
        "decode_attention",
        rows.filter(decode).rename({"n_decode": "sequences", "kv_decode": "context"}),
        "time_us",
        "us",
    )


def _moe(found: Gathered, profile: Profile, model: ModelSpec, config: dict[str, Any]) -> None:
    import polars as pl

    rows = _rows(found, profile, "moe", {"tokens": int, "activated_experts": int, "time_us": float})
    if rows is None:
        return
    experts, topk = config.get("num_experts") or config.get("num_local_experts"), config.get("num_experts_per_tok")
    if not isinstance(experts, int) or not isinstance(topk, int):
        found.problems.append(f"{profile.folder}: the config.json of {profile.model} does not say how many experts")
        return
    sizes = {"hidden": model.hidden, "inter": model.intermediate, "experts": experts, "topk": topk, "tp": 1, "ep": 1}
    rows = rows.with_columns(
        *(pl.lit(size, pl.Int64).alias(column) for column, size in sizes.items()),
        weights=pl.lit("bf16"),
        skew=pl.format("touched={}", "activated_experts"),
    )
    found.add("moe", rows, "time_us", "us")
