"""Layers of published profiles -> the shapes that `operators.py` gives them. It knows no file format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from calibrate.importers.gather import Gathered
from calibrate.layout import Parallelism
from calibrate.model import ModelSpec
from calibrate.operators import step_operators

if TYPE_CHECKING:
    import polars as pl

Shape = tuple[str, tuple[int, ...]]
"""The op's name, and (n, k) of a GEMM or (elements,) of an elementwise kernel."""


def layer_shapes(model: ModelSpec, tp: int) -> dict[str, Shape]:
    """Operator name -> its shape on one of `tp` GPUs.

    Besides those of `step_operators` the kernels that it counts within others: "qk_norm" (the norm of queries and
    keys, without the rope), "norm" (one that adds no residual) and "add" (the residual alone).
    """
    plain = replace(model, qk_norm="")  # there "rope" moves the queries and keys once
    shapes: dict[str, Shape] = {op.name: (op.name, op.shape) for op in step_operators(plain, Parallelism(tp=tp))}
    return shapes | {
        "qk_norm": ("qk_norm", shapes["rope"][1]),
        "norm": ("norm", (2 * model.hidden,)),
        "add": ("add", (3 * model.hidden,)),
    }


def add_layers(
    found: Gathered, rows: pl.DataFrame, shapes: Mapping[tuple[str, int], Shape], count: str, time: str, unit: str
) -> None:
    """Times of 16-bit layers, one a row: columns `layer`, `tp`, `kernel`, `count` (the layer's rows) and `time`.

    `shapes` maps (layer, tp) to what it is; rows without a shape are the caller's to count.
    """
    import polars as pl

    sized = []
    for (layer, tp), (op, sizes) in shapes.items():
        n, k, elements = (*sizes, None) if len(sizes) == 2 else (None, None, *sizes)
        sized.append((layer, tp, op, n, k, elements))
    schema = {"layer": pl.String, "tp": pl.Int64, "op": pl.String} | dict.fromkeys(("n", "k", "elements"), pl.Int64)
    table = pl.DataFrame(sized, schema=schema, orient="row")
    known = rows.join(table, on=["layer", "tp"], how="inner", maintain_order="left")
    gemm = known.filter(pl.col("n").is_not_null())
    found.add("gemm", gemm.with_columns(pl.lit("bf16").alias("weights"), m=count), time, unit)
    found.add("elementwise", known.filter(pl.col("elements").is_not_null()).with_columns(rows=count), time, unit)
