"""What vLLM's and sglang's benchmarks write alike: statistics under flat keys, and an array a column of the requests.

Arrays are in seconds and in the order of the requests, failed ones included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from reports.formats.fields import (
    COUNT,
    MOST,
    NUMBER,
    TEXT,
    Fields,
    clean,
    is_count,
    is_gaps,
    is_number,
    is_text,
    shown,
)
from reports.formats.figures import COUNTS, RATES
from reports.formats.found import request_table
from servecast.errors import one_of

if TYPE_CHECKING:
    import polars as pl

_Kind = tuple[Callable[[Any], bool], str]
_NUMBERS: _Kind = (is_number, NUMBER)
_GAPS: _Kind = (is_gaps, "a list of finite numbers (seconds) was expected")
ARRAYS: Mapping[str, _Kind] = {
    "input_lens": (is_count, COUNT),
    "output_lens": (is_count, COUNT),
    "ttfts": _NUMBERS,
    "itls": _GAPS,
    "errors": (is_text, TEXT),
}
"""What a detailed file always has; without `itls` one of ours, of gaps that are not known, which has `latencies`."""
MORE: Mapping[str, _Kind] = {"latencies": _NUMBERS, "start_times": _NUMBERS}
"""What newer ones have as well."""


def stated_of(run: Fields, names: Mapping[str, str], need: Collection[str]) -> dict[str, float]:
    """Our key -> the number under the tool's key (`names`: our key -> its key), as far as it states one."""
    found: dict[str, float | None] = {}
    for ours, theirs in names.items():
        if ours in COUNTS:
            found[ours] = run.count(theirs, need=theirs in need, most=int(MOST))
        else:
            found[ours] = run.number(theirs, need=theirs in need, least=0 if ours in RATES else -MOST)
    return {ours: value for ours, value in found.items() if value is not None}


def rate_of(run: Fields) -> tuple[float | None, list[str]]:
    """The request rate that the client was told, and a note where it is none."""
    value = run.found.get("request_rate")
    run.used.add("request_rate")
    if value is None or (is_number(value) and value > 0):
        return (None if value is None else float(value)), []
    if value == "trace":
        return None, ["requests were sent at the times of a trace"]
    if value == "inf" or (isinstance(value, float) and math.isinf(value)):
        return None, ["request_rate is inf: requests were sent at once, or as max_concurrency let them"]
    run.problem(f"request_rate is {shown(value)}; a number above 0, inf or trace was expected")
    return None, []


def has_details(run: Fields) -> bool:
    """Whether any of the arrays is there."""
    return any(run.found.get(name) is not None for name in ARRAYS)


def requests_of(run: Fields, option: str, asked: tuple[int, int] | None = None) -> pl.DataFrame | None:
    """The requests, as `request_table` gives them; None, and problems, where arrays lack, are wrong or unlike long.

    option: of the tool, that saves them all. asked: the output tokens requested, least and most. A request without
    token and without first token failed, whether it says why or not.
    """
    needed = [name for name in ARRAYS if name != "itls" or run.found.get("latencies") is None]
    if lacking := [name for name in needed if run.found.get(name) is None]:
        there = one_of(name for name in ARRAYS if name not in lacking)
        run.problem(f"{there} but no {one_of(lacking)}; save the run with {option}, or take all of them out")
    arrays = {name: run.array(name, good, rule) for name, (good, rule) in ({**ARRAYS, **MORE}).items()}
    if any(arrays[name] is None for name in needed):
        return None
    columns = {name: array for name, array in arrays.items() if array is not None}
    lengths = {name: len(array) for name, array in columns.items()}
    if len(set(lengths.values())) > 1:
        said = ", ".join(f"{name} {length:,}" for name, length in lengths.items())
        run.problem(f"arrays of different lengths ({said}); every array has one entry a request: was the file edited?")
        return None
    if not columns["errors"]:
        run.problem("the arrays hold no requests; repeat the run")
        return None
    return _table(columns, asked)


def _table(arrays: Mapping[str, list[Any]], asked: tuple[int, int] | None) -> pl.DataFrame:
    first, output = arrays["ttfts"], arrays["output_lens"]
    gaps = arrays.get("itls", [None] * len(first))
    errors = [
        clean(error) if error else ("no token, and no reason given" if not n and t <= 0 else None)
        for error, n, t in zip(arrays["errors"], output, first, strict=True)
    ]
    whole = arrays.get("latencies") or [t + sum(row) for t, row in zip(first, gaps, strict=True)]
    columns: dict[str, list[Any]] = {
        "label": [f"request {i}" for i in range(len(first))],
        "input_tokens": [int(n) for n in arrays["input_lens"]],
        "output_tokens": [int(n) for n in output],
        "ttft_s": first,
        "e2e_s": [None if error else e for error, e in zip(errors, whole, strict=True)],
        "error": errors,
        "itl_s": gaps,
    }
    if "start_times" in arrays:
        columns["sent_s"] = arrays["start_times"]
    if asked is not None:
        columns |= {
            name: [n] * len(first) for name, n in zip(("requested_least", "requested_most"), asked, strict=True)
        }
    return request_table(columns)
