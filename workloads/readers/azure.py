"""Azure LLM inference traces of 2023, 2024 and 2025: `TIMESTAMP,ContextTokens,GeneratedTokens`, multimodal `NumImages`.

2023 writes naive stamps with 7 decimals; 2024 a UTC offset, 6 decimals, and none on whole seconds; the multimodal file
ends them with Z: each row is read by itself. Times are exact to the microsecond. Images are counted, not modelled:
ContextTokens is taken as the whole prompt. Source: github.com/Azure/AzurePublicDataset (cite Splitwise, ISCA'24).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from workloads.readers.clean import Requests, to_trace
from workloads.readers.columns import Numbers, read_columns, tokens
from workloads.readers.files import TraceFile, missing
from workloads.readers.options import ReadOptions
from workloads.trace import MAX_TIME_S, Trace

if TYPE_CHECKING:
    import polars as pl

OPTIONS: tuple[str, ...] = ()


def lacks(file: TraceFile) -> list[str]:
    """What the header lacks to be of this format, in words; empty when it is."""
    return missing(file, "TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read(file: TraceFile, options: ReadOptions) -> Trace:
    """The trace of an opened file. Raises ServecastError by column and row."""
    rule = "times must be dates with a time in UTC, like 2023-11-16 18:17:03.9799600 or 2024-05-10 00:00:00+00:00"
    stamps = Numbers("TIMESTAMP", rule, least=-MAX_TIME_S, most=MAX_TIME_S, convert=_Seconds())
    prompt, output = tokens("ContextTokens"), tokens("GeneratedTokens")
    images = tokens("NumImages", optional=True)
    blank = read_columns(file, [stamps, prompt, output, images])
    notes: tuple[str, ...] = ()
    if images.seen and (some := images.values[images.values > 0]).size:
        notes = (f"{some.sum():,.0f} images in {some.size:,} requests are not modelled; ContextTokens is the prompt",)
    return to_trace(file, blank, Requests(stamps.values, prompt, output, notes=notes))


class _Seconds:
    """Seconds from the first stamp of the file: a float64 of seconds since 1970 would round microseconds away."""

    def __init__(self) -> None:
        self.first: int | None = None

    def __call__(self, stamps: pl.Series) -> pl.Series:
        import polars as pl

        text = stamps.cast(pl.String).str.strip_chars()
        utc = text.str.replace(r"(Z|\+00:00)$", "").str.replace("T", " ", literal=True)
        micros = utc.str.to_datetime("%Y-%m-%d %H:%M:%S%.f", time_unit="us", strict=False).dt.epoch("us")
        if self.first is None and micros.count():
            self.first = micros.drop_nulls()[0]
        return (micros - (self.first or 0)) / 1e6
