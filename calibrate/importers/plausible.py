"""Are these seconds? Each point against the least time its FLOPs and bytes take on the GPU: wrong units show by 1000x.

Lower bounds only: it knows no kernel's efficiency, and what the tables do not say (caches, skew) makes a bound looser.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from calibrate.hardware import Gpu
from calibrate.kernels.heads import WIDEST
from calibrate.measurements import FAMILIES

if TYPE_CHECKING:
    import polars as pl

TOO_FAST = 3.0
"""Times faster than the datasheet allows before a point is impossible: clocks above the datasheet's and differences of
counting stay below. A few such rows are left out and counted."""
WRONG_UNIT = 30.0
"""Times faster from which the whole table is refused: kernels reach a thirtieth of the rates, caches give less."""
FEW = 0.05
"""Share of a table's rows that may be impossible before it is refused as a whole."""
TOO_SLOW = 1000.0
"""Times slower, for points whose bound is at least LARGE_S, so that no launch or host time explains it."""
LARGE_S = 20e-6
CACHE_BYTES = 256e6  # above every L2: repeated calls may find this much there, so it counts for nothing
BYTES = {"bf16": 2.0, "fp8": 1.0, "fp8_block": 1.0, "nvfp4": 0.5, "mxfp4": 0.5, "int8": 1.0, "int4": 0.5}
RATES = {"bf16": "bf16", "fp8": "fp8", "fp8_block": "fp8", "nvfp4": "fp4", "int8": "int8"}
"""weights -> the dtype whose rate bounds them; others, which may multiply in any, the GPU's fastest."""
MLA_KEY, MLA_VALUE, MLA_LATENT, MLA_HIDDEN = 192, 128, 576, 7168
"""Of DeepSeek-V3 and Kimi-K2: sizes of a head's key and value, cached elements and activations of a token."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The rows that may stand, a sentence for people about those that were left out, and the problems."""

    rows: pl.DataFrame
    notes: tuple[str, ...]
    problems: tuple[str, ...]


def judge(family: str, table: pl.DataFrame, gpu: Gpu, unit: str) -> Verdict:
    """What of a table's times the GPU can have taken.

    `table` has the family's columns, `seconds`, and `file` and `row`, where it stood in `unit` (s, ms, us, ns).
    """
    import polars as pl

    if family not in _BOUNDS:
        return Verdict(table, (), ())
    least, usual = _BOUNDS[family](gpu)
    judged = table.with_columns(least=least, usual=usual)
    fast = judged.filter(pl.col("seconds") * TOO_FAST < pl.col("least"))
    slow = judged.filter((pl.col("usual") >= LARGE_S) & (pl.col("seconds") > TOO_SLOW * pl.col("usual")))
    larger, smaller = {"us": "ms", "ms": "s"}.get(unit, "a larger unit"), {"s": "ms", "ms": "us", "us": "ns"}.get(unit)
    problems, notes, rows = [], [], table
    wrong = fast.filter(pl.col("seconds") * WRONG_UNIT < pl.col("least"))
    if len(wrong) or len(fast) > FEW * len(table):
        worst = wrong if len(wrong) else fast
        problems.append(f"{_said(family, worst, 'least', gpu, unit)}: are they in {larger}, or of another GPU?")
    elif len(fast):
        said = _said(family, fast.with_columns(pl.col("file").str.split("/").list.last()), "least", gpu, unit)
        notes.append(f"{said}: {len(fast)} of {len(table):,} rows left out")
        rows = judged.filter(pl.col("seconds") * TOO_FAST >= pl.col("least")).select(table.columns)
    if len(slow):
        other = f"in {smaller}" if smaller else "in a smaller unit"
        problems.append(f"{_said(family, slow, 'usual', gpu, unit)}: are they {other}, or of another GPU?")
    return Verdict(rows, tuple(notes), tuple(problems))


def _said(family: str, rows: pl.DataFrame, column: str, gpu: Gpu, unit: str) -> str:
    row = rows.row(0, named=True)
    bound, seconds = float(row[column]), float(row["seconds"])
    far, how = (bound / seconds, "faster") if bound > seconds else (seconds / bound, "slower")
    point = " ".join(f"{c}={row[c]}" for c in FAMILIES[family])
    more = f" (and {len(rows) - 1:,} more rows)" if len(rows) > 1 else ""
    return (
        f"{row['file']}, row {row['row']}{more}: {family} {point} took {seconds:.3g} s if the times are in {unit}, "
        f"{far:,.3g} times {how} than the {bound:.3g} s of its FLOPs and bytes at the datasheet rates of {gpu.id}"
    )


Bounds = tuple["pl.Expr", "pl.Expr"]
"""Seconds of a point: what it surely takes, and what it would take at the datasheet's rates, everything from memory."""


def _bounds(gpu: Gpu, flops: pl.Expr, rate: pl.Expr, moved: pl.Expr, more: pl.Expr | float = 0.0) -> Bounds:
    """`more`: bytes that are moved besides in the usual case."""
    import polars as pl

    computed, bandwidth = flops / rate, gpu.bandwidth_bytes_per_s
    # fewer bytes than the caches hold may never come from memory
    least = pl.max_horizontal(computed, (moved - CACHE_BYTES).clip(0) / bandwidth)
    return least, pl.max_horizontal(computed, (moved + more) / bandwidth)


def _f(column: str) -> pl.Expr:
    import polars as pl

    return pl.col(column).cast(pl.Float64)  # products of sizes overflow 64-bit integers


def _of_weights(values: Mapping[str, float], default: float) -> pl.Expr:
    import polars as pl

    return pl.col("weights").replace_strict(values, default=default, return_dtype=pl.Float64)


def _rate(gpu: Gpu) -> pl.Expr:
    fastest = max(gpu.flops.values())
    return _of_weights({weights: gpu.flops.get(dtype, fastest) for weights, dtype in RATES.items()}, fastest)


def _attention_rate(gpu: Gpu) -> pl.Expr:
    import polars as pl

    return pl.lit(max(gpu.flops.get("fp8", 0.0), gpu.flops["bf16"]))


def _kv_bytes() -> pl.Expr:
    import polars as pl

    return pl.when(pl.col("kv_dtype") == "fp8").then(1.0).otherwise(2.0)


def _gemm(gpu: Gpu) -> Bounds:
    m, n, k = _f("m"), _f("n"), _f("k")
    return _bounds(gpu, 2 * m * n * k, _rate(gpu), n * k * _of_weights(BYTES, 0.5) + 2 * m * n)


def _attention(gpu: Gpu, q: pl.Expr) -> Bounds:
    import polars as pl

    context, window = _f("context"), _f("window")
    whole = window == 0
    # keys that a query meets, on average; with a window at least half of what the last one meets
    seen = pl.when(whole).then(context + (q + 1) / 2).otherwise(pl.min_horizontal(context + q, window) / 2)
    kept = pl.when(whole).then(context + q).otherwise(pl.min_horizontal(context, window) + q)
    elements = _f("head_dim") + _f("value_dim")
    stored = pl.when(pl.col("head_dim") > WIDEST).then(_f("head_dim")).otherwise(elements)
    flops = 2 * _f("sequences") * q * _f("heads") * elements * seen
    moved = _f("sequences") * kept * _f("kv_heads") * stored * _kv_bytes()
    return _bounds(gpu, flops, _attention_rate(gpu), moved)


def _mla(gpu: Gpu, q: pl.Expr) -> Bounds:
    tokens = _f("sequences") * q
    pairs = tokens * (_f("context") + (q + 1) / 2)
    moved = _f("sequences") * (_f("context") + q) * MLA_LATENT * _kv_bytes()
    more = 12 * 2 * MLA_HIDDEN * tokens  # activations pass through a dozen kernels
    return _bounds(gpu, 2 * pairs * _f("heads") * (MLA_KEY + MLA_VALUE), _attention_rate(gpu), moved, more)


def _moe(gpu: Gpu) -> Bounds:
    import polars as pl

    # surely: an even share of the tokens, two matrices an expert (most have three), one expert's weights
    rows, inner, size = _f("tokens") * _f("topk") / _f("ep"), _f("inter") / _f("tp"), _of_weights(BYTES, 0.5)
    one = 2 * _f("hidden") * inner * size
    touched = pl.min_horizontal(_f("experts") / _f("ep"), rows)
    # usually: the weights of every expert that can be touched, each token's activations once an expert, in and out
    more = one * touched + 2 * rows * (2 * _f("hidden") + 3 * inner)
    return _bounds(gpu, 2 * rows * 2 * _f("hidden") * inner, _rate(gpu), one, more)


def _moves(gpu: Gpu, moved: pl.Expr) -> Bounds:
    import polars as pl

    return _bounds(gpu, pl.lit(0.0), pl.lit(1.0), moved)


def _collective(gpu: Gpu) -> Bounds:
    # every rank receives at least what it lacks: all of the buffer but its own share
    seconds = _f("bytes") * (_f("gpus") - 1) / _f("gpus") / gpu.link.bandwidth_bytes_per_s
    return seconds, seconds


def _step(gpu: Gpu) -> Bounds:
    import polars as pl

    # a name such as llama2-70b tells the parameters where nothing else does
    params = pl.col("model").str.extract(r"(\d+(?:\.\d+)?)[bB]\b").cast(pl.Float64).fill_null(0.0) * 1e9 / _f("tp")
    tokens = _f("sequences") * _f("q") + _f("decodes")
    return _bounds(gpu, 2 * params * tokens, pl.lit(max(gpu.flops.values())), params / 2, 1.5 * params)


def _one() -> pl.Expr:
    import polars as pl

    return pl.lit(1.0)


_BOUNDS = {
    "gemm": _gemm,
    "prefill_attention": lambda gpu: _attention(gpu, _f("q")),
    "decode_attention": lambda gpu: _attention(gpu, _one()),
    "mla_prefill_module": lambda gpu: _mla(gpu, _f("q")),
    "mla_decode_module": lambda gpu: _mla(gpu, _one()),
    "moe": _moe,
    "elementwise": lambda gpu: _moves(gpu, 2 * _f("rows") * _f("elements")),
    "quantize": lambda gpu: _moves(gpu, 3 * _f("m") * _f("k")),
    "collective": _collective,
    "step": _step,
}
