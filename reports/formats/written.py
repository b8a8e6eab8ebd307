"""What vLLM's and sglang's files have alike, to be written: statistics, peaks by the second, arrays of the requests.

Arrays are in seconds, statistics in milliseconds; both tools write 0 where there is no value to take them of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from reports.formats.seen import Floats, Seen


def statistics(name: str, values: Floats, percentiles: Sequence[int]) -> dict[str, float]:
    """`mean_`, `median_`, `std_` (of the population) and the percentiles (interpolated) of values in seconds, as ms."""
    ms = 1e3 * (values if len(values) else np.zeros(1))
    found = {f"mean_{name}_ms": np.mean(ms), f"median_{name}_ms": np.median(ms), f"std_{name}_ms": np.std(ms)}
    found |= {f"p{q}_{name}_ms": np.percentile(ms, q) for q in percentiles}
    return {key: float(value) for key, value in found.items()}


def gap_statistics(seen: Seen, percentiles: Sequence[int]) -> dict[str, float]:
    """Statistics of ITL; where not all gaps are known, those that the summary has (over all tokens there were)."""
    if seen.gaps_known:
        return statistics("itl", seen.all_gaps, percentiles)
    keys = [f"{stat}_itl_ms" for stat in ("mean", "median", "std", *(f"p{q}" for q in percentiles))]
    return {key: seen.run.summary[key] for key in keys if seen.run.summary.get(key) is not None}


def peaks(seen: Seen) -> dict[str, float]:
    """The most output tokens in a second, where their times are known, and the most requests that one second saw;
    seconds are counted from the first send of a request that succeeded."""
    done = seen.done
    sent, first, end = (x[done] for x in (seen.sent_s, seen.ttft_s, seen.e2e_s))
    start = sent.min()
    begins, ends = (sent - start).astype(np.int64), (sent + end - start).astype(np.int64)
    change = np.bincount(begins, minlength=int(ends.max()) + 2).astype(np.int64)
    np.subtract.at(change, ends + 1, 1)
    found: dict[str, float] = {}
    if seen.gaps_known:
        gaps = [gaps for gaps, ok in zip(seen.gaps, done, strict=True) if ok and gaps is not None]
        times = [at + np.cumsum([ttft, *rest]) for at, ttft, rest in zip(sent - start, first, gaps, strict=True)]
        found["max_output_tokens_per_s"] = float(np.bincount(np.concatenate(times).astype(np.int64)).max())
    return found | {"max_concurrent_requests": int(np.cumsum(change).max())}


def arrays(seen: Seen) -> dict[str, list[Any]]:
    """An array a column of the requests; `itls` only where all gaps are known. What failed has no output, and 0 for a
    time that does not exist."""
    found: dict[str, list[Any]] = {
        "input_lens": seen.input.tolist(),
        "output_lens": seen.output.tolist(),
        "ttfts": np.nan_to_num(seen.ttft_s, nan=0.0).tolist(),
        "errors": [error or "" for error in seen.errors],
    }
    if seen.gaps_known:
        found["itls"] = [[] if gaps is None else gaps.tolist() for gaps in seen.gaps]
    return found


def totals(seen: Seen) -> tuple[int, int, int]:
    """Requests that succeeded, their input and their output tokens."""
    done = seen.done
    return int(done.sum()), int(seen.input[done].sum()), int(seen.output[done].sum())
