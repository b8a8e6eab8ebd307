"""The tables of aiconfigurator -> rows of families: columns, words, units (milliseconds). It knows no folders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from calibrate.importers.gather import Gathered
from calibrate.rows import Kind
from servecast.errors import one_of

if TYPE_CHECKING:
    import polars as pl

DTYPES = {"bfloat16": "bf16", "int4_wo": "int4", "sq": "int8", "w4a16_mxfp4": "mxfp4", "w4a8_mxfp4_mxfp8": "mxfp4"} | {
    same: same for same in ("fp8", "fp8_block", "nvfp4")
}
LAUNCH_MS = 0.03  # no kernel of a small GEMM takes that long: it is the host
NCCL_BYTES = {"half": 2, "int8": 1}


@dataclass(frozen=True, slots=True)
class Table:
    """One file of a system: its area in the package, the engines whose kernels are taken (the first that it has), its
    columns, and what adds its rows."""

    area: str
    engines: tuple[str, ...]
    columns: dict[str, Kind]
    add: Callable[[Gathered, pl.DataFrame], None]


def _known(found: Gathered, rows: pl.DataFrame, column: str, words: dict[str, str], what: str) -> pl.DataFrame:
    """`rows` whose `column` is a known word, translated; others are counted and left out."""
    import polars as pl

    strange = sorted(set(rows[column].unique()) - set(words))
    rows = found.without(rows, pl.col(column).is_in(strange), what, f"{column} {one_of(strange)} is not known")
    return rows.with_columns(pl.col(column).replace_strict(words, return_dtype=pl.String))


def _gemm(found: Gathered, rows: pl.DataFrame) -> None:
    import polars as pl

    rows = _known(found, rows, "gemm_dtype", DTYPES, "gemm")
    rows = rows.rename({"gemm_dtype": "weights", "kernel_source": "kernel"})
    found.add("gemm", rows, "latency", "ms")
    eager = rows.filter((pl.col("weights") == "fp8_block") & (pl.col("latency") > 0))["latency"]
    if len(eager) and float(str(eager.min())) > LAUNCH_MS:
        floor = 1e3 * float(str(eager.min()))
        found.notes.append(f"fp8_block GEMMs: none took less than {floor:.0f} us, the host's time of a call")


def _attention(found: Gathered, rows: pl.DataFrame, family: str) -> None:
    import polars as pl

    rows = found.without(rows, pl.col("attn_dtype") != "bfloat16", family, "attention in another dtype than bf16")
    rows = found.without(rows, pl.col("beam_width") != 1, family, "beam search")
    rows = _known(found, rows, "kv_cache_dtype", DTYPES, family)
    names = {
        "kv_cache_dtype": "kv_dtype",
        "batch_size": "sequences",
        "isl": "q",
        "step": "context",
        "num_heads": "heads",
        "num_key_value_heads": "kv_heads",
        "window_size": "window",
        "kernel_source": "kernel",
    }
    rows = rows.rename(names).with_columns(pl.col("window").fill_null(0), value_dim="head_dim")
    found.add(family, rows, "latency", "ms")


def _latents(found: Gathered, rows: pl.DataFrame, family: str, **sizes: pl.Expr) -> None:
    """Attention kernels of MLA at the sizes of DeepSeek-V3, `num_heads` of them on the rank."""
    import polars as pl

    again = pl.col("tp_size") > pl.col("tp_size").min().over("num_heads")
    rows = found.without(rows, again, family, "the same number of heads of another model and tp: timed twice")
    rows = found.without(rows, pl.col("mla_dtype") != "bfloat16", family, "attention in another dtype than bf16")
    emulated = (pl.col("kernel_source") == "flash_attention") & (pl.col("kv_cache_dtype") == "fp8")
    rows = found.without(rows, emulated, family, "FlashAttention with an fp8 cache, which it converts: 9 times slower")
    rows = _known(found, rows, "kv_cache_dtype", DTYPES, family)
    names = {
        "kv_cache_dtype": "kv_dtype",
        "batch_size": "sequences",
        "isl": "q",
        "step": "context",
        "num_heads": "heads",
        "kernel_source": "kernel",
    }
    sizes["window"] = pl.lit(0)
    rows = rows.rename(names).with_columns(**{name: size.cast(pl.Int64) for name, size in sizes.items()})
    found.add(family, rows.with_columns(pl.concat_str("kernel", pl.lit(" (latents)"))), "latency", "ms")


def _latents_prefill(found: Gathered, rows: pl.DataFrame) -> None:
    import polars as pl

    _latents(found, rows, "prefill_attention", kv_heads=pl.col("heads"), head_dim=pl.lit(192), value_dim=pl.lit(128))


def _latents_decode(found: Gathered, rows: pl.DataFrame) -> None:
    import polars as pl

    _latents(found, rows, "decode_attention", kv_heads=pl.lit(1), head_dim=pl.lit(576), value_dim=pl.lit(512))


def _mla(found: Gathered, rows: pl.DataFrame, family: str) -> None:
    import polars as pl

    rows = found.without(rows, pl.col("tp_size") != 1, family, "tp_size above 1, where num_heads is not the rank's")
    for column in ("mla_dtype", "kv_cache_dtype", "gemm_type"):
        rows = _known(found, rows, column, DTYPES, family)
    names = {
        "gemm_type": "weights",
        "mla_dtype": "attn_dtype",
        "kv_cache_dtype": "kv_dtype",
        "batch_size": "sequences",
        "isl": "q",
        "step": "context",
        "num_heads": "heads",
        "kernel_source": "kernel",
    }
    rows = rows.rename(names)
    if family == "mla_decode_module":  # here `step` is the length with the new token, in attention without it
        rows = rows.with_columns(pl.col("context") - 1)
    found.add(family, rows, "latency", "ms")


def _moe(found: Gathered, rows: pl.DataFrame) -> None:
    names = {
        "moe_dtype": "weights",
        "num_tokens": "tokens",
        "hidden_size": "hidden",
        "inter_size": "inter",
        "num_experts": "experts",
        "moe_tp_size": "tp",
        "moe_ep_size": "ep",
        "distribution": "skew",
        "kernel_source": "kernel",
    }
    found.add("moe", _known(found, rows, "moe_dtype", DTYPES, "moe").rename(names), "latency", "ms")


def _allreduce(found: Gathered, rows: pl.DataFrame) -> None:
    import polars as pl

    rows = found.without(rows, pl.col("allreduce_dtype") != "bfloat16", "custom_allreduce", "not bf16")
    backends = {"vllm_graph": "custom_graph", "vllm_eager": "custom_eager"}
    rows = _known(found, rows, "backend", backends, "custom_allreduce").with_columns(
        (2 * pl.col("message_size")).alias("bytes"), op=pl.lit("all_reduce")
    )
    found.add("collective", rows.rename({"num_gpus": "gpus", "kernel_source": "kernel"}), "latency", "ms")


def add_fused(found: Gathered, rows: pl.DataFrame) -> None:
    """TensorRT-LLM's all-reduce as backend "fused"."""
    import polars as pl

    rows = found.without(rows, pl.col("allreduce_dtype") != "bfloat16", "custom_allreduce", "not bf16")
    rows = rows.with_columns(bytes=2 * pl.col("message_size"), op=pl.lit("all_reduce"), backend=pl.lit("fused"))
    found.add("collective", rows.rename({"num_gpus": "gpus", "kernel_source": "kernel"}), "latency", "ms")


def _nccl(found: Gathered, rows: pl.DataFrame) -> None:
    import polars as pl

    # the same bytes as int8 are slower to reduce, and engines send 16-bit activations
    rows = found.without(rows, pl.col("nccl_dtype") != "half", "nccl", "not 16-bit elements")
    rows = rows.with_columns((NCCL_BYTES["half"] * pl.col("message_size")).alias("bytes"), backend=pl.lit("nccl"))
    names = {"op_name": "op", "num_gpus": "gpus", "kernel_source": "kernel"}
    found.add("collective", rows.rename(names), "latency", "ms")


def add_quantize(found: Gathered, tables: dict[str, pl.DataFrame]) -> None:
    """Static quantisation as measured; dynamic as its sum with `computescale`, their difference (cut at 0)."""
    import polars as pl

    static, extra = tables.get("scale_matrix"), tables.get("computescale")
    if static is not None:
        static = _known(found, static, "quant_dtype", DTYPES, "scale_matrix").rename({"quant_dtype": "weights"})
        found.add(
            "quantize", static.with_columns(pl.lit("static").alias("op"), kernel="kernel_source"), "latency", "ms"
        )
    if static is None or extra is None:
        return
    why = "dynamic quantisation came out no dearer than static: the difference is noise"
    extra = found.without(extra, pl.col("latency") <= 0, "computescale", why)
    extra = _known(found, extra, "quant_dtype", DTYPES, "computescale").rename({"quant_dtype": "weights"})
    both = extra.join(static.select("weights", "m", "k", static="latency"), on=["weights", "m", "k"])
    both = both.with_columns(
        pl.col("latency") + pl.col("static"),
        pl.lit("dynamic").alias("op"),
        pl.col("kernel_source").str.split("_minus_").list.first().alias("kernel"),
    )
    found.add("quantize", both, "latency", "ms")


def _later(found: Gathered, rows: pl.DataFrame) -> None:
    """Nothing: `add_quantize` needs two tables."""


EVERYWHERE: dict[str, Kind] = {"kernel_source": str, "version": str, "device": str}
_ATTENTION: dict[str, Kind] = {
    **dict.fromkeys(("batch_size", "isl", "num_heads", "num_key_value_heads", "head_dim", "beam_width", "step"), int),
    **dict.fromkeys(("attn_dtype", "kv_cache_dtype"), str),
    "window_size": int,
    "latency": float,
}
_MLA: dict[str, Kind] = {
    **dict.fromkeys(("num_heads", "batch_size", "isl", "tp_size", "step"), int),
    **dict.fromkeys(("model", "mla_dtype", "kv_cache_dtype", "gemm_type"), str),
    "latency": float,
}
_LATENTS: dict[str, Kind] = {
    **dict.fromkeys(("num_heads", "batch_size", "isl", "tp_size", "step"), int),
    **dict.fromkeys(("mla_dtype", "kv_cache_dtype"), str),
    "latency": float,
}
_MOE: dict[str, Kind] = {
    **dict.fromkeys(
        ("num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size"), int
    ),
    **dict.fromkeys(("moe_dtype", "distribution"), str),
    "latency": float,
}
_ALLREDUCE: dict[str, Kind] = {
    "allreduce_dtype": str, "num_gpus": int, "message_size": int, "latency": float, "backend": str,
}  # fmt: skip
FUSED: dict[str, Kind] = {"allreduce_dtype": str, "num_gpus": int, "message_size": int, "latency": float}
_NCCL: dict[str, Kind] = {"op_name": str, "nccl_dtype": str, "num_gpus": int, "message_size": int, "latency": float}
_QUANTIZE: dict[str, Kind] = {"quant_dtype": str, "m": int, "k": int, "latency": float}

TABLES = {
    "gemm": Table("gemm", ("vLLM",), {"gemm_dtype": str, "m": int, "n": int, "k": int, "latency": float}, _gemm),
    "context_attention": Table(
        "attention", ("vLLM",), _ATTENTION, lambda found, rows: _attention(found, rows, "prefill_attention")
    ),
    "generation_attention": Table(
        "attention", ("vLLM",), _ATTENTION, lambda found, rows: _attention(found, rows, "decode_attention")
    ),
    # SGLang's prefill tables time the decode kernel; its decode kernels are those that vLLM runs
    "context_mla": Table("mla", ("TRTLLM",), _LATENTS, _latents_prefill),
    "generation_mla": Table("mla", ("SGLang", "TRTLLM"), _LATENTS, _latents_decode),
    "mla_context_module": Table("mla", ("vLLM",), _MLA, lambda found, rows: _mla(found, rows, "mla_prefill_module")),
    "mla_generation_module": Table("mla", ("vLLM",), _MLA, lambda found, rows: _mla(found, rows, "mla_decode_module")),
    "moe": Table("moe", ("vLLM",), _MOE, _moe),
    "scale_matrix": Table("quantize", ("vLLM",), _QUANTIZE, _later),
    "computescale": Table("quantize", ("vLLM",), _QUANTIZE, _later),
    "custom_allreduce": Table("comm", ("vLLM",), _ALLREDUCE, _allreduce),
    "nccl": Table("comm", ("NCCL",), _NCCL, _nccl),
}
"""Table (the file's name without _perf) -> how it is read."""
