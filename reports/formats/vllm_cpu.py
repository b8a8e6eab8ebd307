"""A CSV row a request, as a client writes it that notes when it sent what: `requests_*.csv` of our recorded CPU runs.

`sent_s` in seconds, `ttft_ms, tpot_ms, e2e_ms` in milliseconds from then; `output_tokens` were asked for,
`tokens_received` came. `error` may be missing or empty.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from reports.formats.content import ResultFile
from reports.formats.found import Found, request_table
from servecast.errors import one_of
from workloads.readers.columns import Numbers, Texts, read_columns, tokens
from workloads.trace import MAX_TIME_S, Floats

NEEDED = ("sent_s", "input_tokens", "output_tokens", "tokens_received", "ttft_ms", "tpot_ms", "e2e_ms")
NOTES = (
    "no gaps between tokens are recorded but for the longest; times are rounded to microseconds",
    "rates are over the time from the first send to the last token",
)


def lacks(file: ResultFile) -> list[str]:
    """What the file lacks to be of this format, in words; empty when it is."""
    return file.lacks(*NEEDED, table=True)


def read(file: ResultFile, problems: list[str]) -> list[Found]:
    """The one run of the file. Raises ServecastError with all mistakes, by column and row."""
    table = file.table
    if table is None:
        return []
    sent, error = _times("sent_s", 1.0), Texts("error", optional=True, gaps=True)
    ttft, tpot, e2e = (_times(name, 1e3) for name in ("ttft_ms", "tpot_ms", "e2e_ms"))
    prompt, asked, received = (tokens(name) for name in ("input_tokens", "output_tokens", "tokens_received"))
    kept = ~read_columns(table, [sent, prompt, asked, received, ttft, tpot, e2e, error])
    wanted = asked.values[kept].astype(np.int64)
    columns: dict[str, Any] = {
        "label": [f"row {table.first_row + i}" for i in np.flatnonzero(kept).tolist()],
        "sent_s": _known(sent.values[kept]),
        "input_tokens": prompt.values[kept].astype(np.int64),
        "output_tokens": received.values[kept].astype(np.int64),
        "ttft_s": _known(ttft.values[kept]),
        "e2e_s": _known(e2e.values[kept]),
        "said_tpot_s": _known(tpot.values[kept]),
        "error": [error.words[code] if code >= 0 else None for code in error.codes[kept].tolist()],
        "requested_least": wanted,
        "requested_most": wanted,
    }
    unused = [name for name in table.columns if name not in (*NEEDED, "error", "id")]
    notes = (*NOTES, *([f"columns not used: {one_of(unused)}"] if unused else []))
    return [Found("vllm_cpu", str(file.path), requests=request_table(columns), notes=notes)]


def _times(name: str, divisor: float) -> Numbers:
    """Negative ones are read, and doubted later; a request that failed has none."""
    rule = f"times must be numbers up to {MAX_TIME_S:g}, or nothing"
    return Numbers(name, rule, least=-MAX_TIME_S, most=MAX_TIME_S, divisor=divisor, gaps=True)


def _known(values: Floats) -> list[float | None]:
    return [None if np.isnan(value) else value for value in values.tolist()]
