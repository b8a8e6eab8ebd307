"""DeepEP's tables of aiconfigurator -> rows of collectives: what a rank sends, how many ranks. It knows no folders.

A rank sends `num_token` tokens of `hidden_size` elements. For low latency each goes to all its `num_topk` experts, for
high throughput ("normal") once to every rank that has some of them (choices are drawn at random; over several nodes
from at most four of these). They are sent in fp8 with a scale of 4 bytes for 128 elements and come back in 16 bit
(DeepEP's tests, test_low_latency.py and test_intranode.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from calibrate.importers.gather import Gathered
from calibrate.rows import Kind
from calibrate.traffic import SCALED, places

if TYPE_CHECKING:
    import polars as pl

SMS = 20  # streaming multiprocessors that run it: vLLM's choice and DeepEP's default
FEWEST = 4  # experts a token; with fewer, time follows neither the bytes nor the tokens of the others
_SIZES: dict[str, Kind] = dict.fromkeys(("node_num", "hidden_size", "num_token", "num_topk", "num_experts"), int)
DEEPEP: dict[str, dict[str, Kind]] = {
    "ll": _SIZES | {"dispatch_avg_t_us": float, "combine_avg_t_us": float},
    "normal": _SIZES
    | {"dispatch_sms": int, "combine_sms": int}
    | {f"{way}_{part}_us": float for way in ("dispatch", "combine") for part in ("transmit", "notify")},
}
"""Mode -> columns of its table."""


def add_deepep(found: Gathered, rows: pl.DataFrame, mode: Literal["ll", "normal"] | str, gpus_per_node: int) -> None:
    """Both ways of one table, as collectives "dispatch" and "combine"."""
    import polars as pl

    few = pl.col("num_topk") < FEWEST
    rows = found.without(
        rows, few, f"deepep {mode}", f"fewer than {FEWEST} experts a token, whose times follow another law"
    )
    if mode == "normal":
        rows = rows.filter((pl.col("dispatch_sms") == SMS) & (pl.col("combine_sms") == SMS))
        backend = "deepep_high_throughput"
        times = {way: pl.col(f"{way}_transmit_us") + pl.col(f"{way}_notify_us") for way in ("dispatch", "combine")}
    else:
        backend, times = "deepep_low_latency", {way: pl.col(f"{way}_avg_t_us") for way in ("dispatch", "combine")}
    each = {"dispatch": 1.0 + 4 / SCALED, "combine": 2.0}
    gpus = [gpus_per_node * nodes for nodes in rows["node_num"]]
    copies = [
        places(ranks, topk) if mode == "normal" else float(topk)
        for ranks, topk in zip(gpus, rows["num_topk"], strict=True)
    ]
    rows = rows.with_columns(gpus=pl.Series(gpus, dtype=pl.Int64), copies=pl.Series(copies, dtype=pl.Float64))
    for way, seconds in times.items():
        size = pl.col("num_token") * pl.col("copies") * pl.col("hidden_size") * each[way]
        named = rows.with_columns(
            op=pl.lit(way), backend=pl.lit(backend), kernel="kernel_source", bytes=size.round().cast(pl.Int64),
            latency=seconds,
        )  # fmt: skip
        found.add("collective", named, "latency", "us")
