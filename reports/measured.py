"""A run that somebody measured on a real engine, whatever tool recorded it: requests, summary, and how far to trust it.

It knows the shape only: `reports/formats/` reads it from files. It knows nothing of simulations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import polars as pl

REQUEST_COLUMNS = ("sent_s", "input_tokens", "output_tokens", "ttft_s", "tpot_s", "e2e_s", "error", "itl_s")


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredRun:
    """One measured run. Times are seconds, except in `summary`; nothing in it is NaN or infinite.

    tool: who recorded it, a key of `reports.formats.FORMATS` or the name that the file gives. version: of the tool or
    of its form, as far as it could be told, else "". source: the file and, where it holds several runs, which one.
    model: as the file names it.

    requests: a row a request in the file's order, None where the file has aggregates only. `sent_s` from the first
    send; `input_tokens`, `output_tokens`; `ttft_s`, `tpot_s`, `e2e_s` as `sim.metrics` defines them (TPOT is computed
    from the other two); `error` is null where the request succeeded; `itl_s` lists the gaps between output chunks.
    Whatever is unknown is null.

    summary: figures under the keys of `sim.result.Result.summary`, milliseconds where the key says so, over the
    requests that succeeded: computed from `requests` where they are there, else as the file states them. A figure that
    the file neither states nor implies has no key.

    duration_s: what rates are divided by. completed, failed: requests. rate: requests per second, and concurrency: the
    most requests at a time, that the client was told; None where not stated or without limit.

    notes: how the tool's definitions differ from ours. doubts: what in the file is impossible or suspicious, each with
    the request or key and both values; empty for a file that is in order.
    """

    tool: str
    version: str
    source: str
    model: str | None
    requests: pl.DataFrame | None
    summary: Mapping[str, float]
    duration_s: float | None
    completed: int | None
    failed: int | None
    rate: float | None
    concurrency: float | None
    notes: tuple[str, ...]
    doubts: tuple[str, ...]
