"""What a reader found in a file: facts of a run, and its requests as a table. It knows no format and judges nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import polars as pl


@dataclass(frozen=True, slots=True)
class Found:
    """One run of a file, its values checked one by one.

    requests: as `request_table` makes it; sampled: they are not all. stated: figures of the file under our keys, in our
    units; those of `tolerance` may differ by that share from what the requests give, as the tool defines them
    otherwise. fallback: figures that are of use only without requests. duration_s, failed: as stated. unit: of the
    file's times, for messages. doubts: the reader's own.
    """

    tool: str
    source: str
    version: str = ""
    model: str | None = None
    requests: pl.DataFrame | None = None
    sampled: bool = False
    stated: Mapping[str, float] = field(default_factory=dict)
    fallback: Mapping[str, float] = field(default_factory=dict)
    tolerance: Mapping[str, float] = field(default_factory=dict)
    duration_s: float | None = None
    failed: int | None = None
    rate: float | None = None
    concurrency: float | None = None
    unit: str = "milliseconds"
    notes: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()


def request_table(columns: Mapping[str, Sequence[Any]]) -> pl.DataFrame:
    """The requests of a run from equally long columns of checked values; those left out are null.

    label (how a message names the request), sent_s (any clock), input_tokens, output_tokens, ttft_s, e2e_s, said_tpot_s
    (as the file has it), error, itl_s, requested_least and requested_most (output tokens that were asked for). Adds
    tpot_s, and counts sent_s from the first send. What failed has no times of 0, which stand for none.
    """
    import polars as pl

    schema: dict[str, pl.DataType | type[pl.DataType]] = {
        "label": pl.String,
        **dict.fromkeys(("sent_s", "ttft_s", "e2e_s", "said_tpot_s"), pl.Float64),
        **dict.fromkeys(("input_tokens", "output_tokens", "requested_least", "requested_most"), pl.Int64),
        "error": pl.String,
        "itl_s": pl.List(pl.Float64),
    }
    absent = [None] * len(columns["label"])
    frame = pl.DataFrame([pl.Series(n, columns.get(n, absent), dtype=t, strict=False) for n, t in schema.items()])
    failed, several = pl.col("error").is_not_null(), pl.col("output_tokens") > 1
    timed = [pl.when(failed & (pl.col(n) <= 0)).then(None).otherwise(pl.col(n)).alias(n) for n in ("ttft_s", "e2e_s")]
    tpot = pl.coalesce((pl.col("e2e_s") - pl.col("ttft_s")) / (pl.col("output_tokens") - 1), "said_tpot_s")
    return frame.with_columns(timed).with_columns(
        pl.col("sent_s") - pl.col("sent_s").min(), tpot_s=pl.when(several & ~failed).then(tpot)
    )
