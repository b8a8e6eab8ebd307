"""What a trace is like, in numbers: rates, burstiness, lengths, sessions, how much prompts share.

Percentiles are linear (numpy's default); CV is the standard deviation of the gaps between arrivals over their mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from workloads.chains import sessions
from workloads.prefix import Prefix
from workloads.readers.plausible import grid_s
from workloads.trace import Floats, Ints, Trace, Turns

BIN_S = 60.0
PERCENTILES = (50, 90, 99)
LRU_BLOCKS = (1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000)
LRU_TOUCHES = 16_000_000
"""Blocks that are touched at most, all cache sizes together: more take longer than a person waits (about 0.5 us each);
with fewer than that for all sizes, some sizes are left out."""


def describe(
    trace: Trace, *, lru_blocks: Sequence[int] = LRU_BLOCKS, max_model_len: int | None = None
) -> dict[str, Any]:
    """Plain numbers, ready for JSON: None where a number does not exist. Keys end in their unit.

    lru_blocks: cache sizes to simulate, in blocks; those that hold all blocks are left out. max_model_len: counts the
    requests whose prompt and output are longer than this many tokens together.
    """
    n, span_s = len(trace), float(trace.arrival_s[-1])
    total = trace.prompt_tokens + trace.output_tokens
    facts: dict[str, Any] = {
        "source": trace.source,
        "requests": n,
        "dropped": dict(trace.dropped),
        "notes": list(trace.notes),
        "span_s": span_s,
        "arrivals": arrivals(trace.arrival_s),
        "prompt_tokens": lengths(trace.prompt_tokens),
        "output_tokens": lengths(trace.output_tokens),
        "input_tokens_per_s": _ratio(float(trace.prompt_tokens.sum()), span_s),
        "output_tokens_per_s": _ratio(float(trace.output_tokens.sum()), span_s),
        "one_token_outputs": int(np.count_nonzero(trace.output_tokens == 1)),
        "capped_above_output": int(np.count_nonzero(trace.max_tokens > trace.output_tokens)),
        "longest_request_tokens": int(total.max()),
    }
    if max_model_len is not None:
        facts["max_model_len"] = max_model_len
        facts["over_max_model_len"] = int(np.count_nonzero(total > max_model_len))
    if trace.turns is not None:
        facts["sessions"] = session_facts(trace.turns)
    if trace.classes is not None:
        index, names = trace.classes
        facts["classes"] = {
            name: int(k) for name, k in zip(names, np.bincount(index, minlength=len(names)), strict=True)
        }
    if trace.patience_s is not None:
        facts["requests_with_patience"] = int(np.isfinite(trace.patience_s).sum())
    if trace.samples is not None:
        facts["requests_with_samples"] = int(np.count_nonzero(trace.samples > 1))
    if trace.prefix is not None:
        facts["prefix"] = prefix_facts(trace.prefix, trace.prompt_tokens, lru_blocks)
    return facts


def arrivals(arrival_s: Floats) -> dict[str, Any]:
    """Rates and burstiness of arrival times (float64[n], ascending)."""
    gaps = np.diff(arrival_s)
    span_s = float(arrival_s[-1] - arrival_s[0])
    bins, whole = (arrival_s // BIN_S).astype(np.int64), int(span_s // BIN_S)  # the last bin is not a whole one
    counts = np.unique(bins[bins < whole], return_counts=True)[1]
    return {
        "requests_per_s": _ratio(float(arrival_s.size), span_s),
        "gap_cv": _ratio(float(gaps.std()), float(gaps.mean())) if gaps.size else None,
        "longest_gap_s": float(gaps.max()) if gaps.size else None,
        "peak_over_mean_60s": _ratio(float(counts.max()), float(counts.sum()) / whole) if counts.size else None,
        "distinct_times": int(np.count_nonzero(gaps) + 1),
        "grid_s": grid_s(arrival_s) or None,
    }


def lengths(values: Ints | Floats) -> dict[str, float]:
    """Mean, percentiles, largest and sum of the values (n >= 1)."""
    marks = np.percentile(values, PERCENTILES)
    return {
        "mean": float(values.mean()),
        **{f"p{q}": float(mark) for q, mark in zip(PERCENTILES, marks, strict=True)},
        "max": values.max().item(),
        "sum": values.sum().item(),
    }


def session_facts(turns: Turns) -> dict[str, Any]:
    """How many sessions, their turns, and the think times between these."""
    first, _ = sessions(turns.previous)
    counts = np.bincount(first)
    counts = counts[counts > 0]
    thinks = turns.think_s[turns.previous >= 0]
    return {
        "count": int(counts.size),
        "of_one_turn": int(np.count_nonzero(counts == 1)),
        "turns": lengths(counts),
        "think_s": lengths(thinks) if thinks.size else None,
    }


def prefix_facts(prefix: Prefix, prompt_tokens: Ints, lru_blocks: Sequence[int] = LRU_BLOCKS) -> dict[str, Any]:
    """How much of the prompts earlier prompts had: shares of blocks and tokens, boundless and in LRU caches."""
    counts = np.diff(prefix.offsets)
    # np.unique hashes integers, which takes minutes for long runs of consecutive ids.
    distinct = int(np.count_nonzero(np.diff(np.sort(prefix.ids)))) + (prefix.ids.size > 0)
    known = prefix.known_blocks()
    facts: dict[str, Any] = {
        "block_tokens": prefix.block_tokens,
        "chained": prefix.chained,
        "blocks": int(prefix.ids.size),
        "distinct_blocks": distinct,
        "block_hit_rate": _ratio(float(known.sum()), float(counts.sum())),
        "token_hit_rate": float(hit_tokens(prefix, known, prompt_tokens).sum() / prompt_tokens.sum()),
        "requests_with_hits": int(np.count_nonzero(known)),
    }
    sizes = [size for size in lru_blocks if size < distinct]
    affordable = min(len(sizes), LRU_TOUCHES // max(1, int(prefix.ids.size)))
    picked = sorted({round(i) for i in np.linspace(0, len(sizes) - 1, affordable).tolist()})
    facts["lru"] = [
        {
            "blocks": sizes[i],
            "tokens": sizes[i] * prefix.block_tokens,
            "block_hit_rate": _ratio(float(prefix.known_blocks_lru(sizes[i]).sum()), float(counts.sum())),
        }
        for i in picked
    ]
    facts["lru_left_out"] = [size for i, size in enumerate(sizes) if i not in set(picked)]
    return facts


def hit_tokens(prefix: Prefix, known: Ints, prompt_tokens: Ints) -> Ints:
    """int64[n]: tokens in the known blocks; a last, partly filled block has only what its prompt has."""
    return np.minimum(known * prefix.block_tokens, prompt_tokens)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
