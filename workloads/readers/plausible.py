"""Suspicions that a reader voices and never acts on: times in the wrong unit, arrivals on a grid."""

from __future__ import annotations

import numpy as np

from workloads.trace import Floats, Trace

SLOW_S = 50
FAST_PER_S = 1000
NOISE_S = 0.005


def too_slow(trace: Trace) -> list[str]:
    """A note when whole-numbered seconds imply less than one request in 50 s. Real traces can be so slow: it asks."""
    span = float(trace.arrival_s[-1])
    if len(trace) < 10 or span < SLOW_S * (len(trace) - 1) or np.any(trace.arrival_s % 1):
        return []
    rate = (len(trace) - 1) / span
    return [
        f"{rate:.2g} requests per second with whole-numbered times: if the file is in milliseconds, "
        "scale the rate by 1000 (read as seconds here)"
    ]


def too_fast(trace: Trace) -> list[str]:
    """A note when milliseconds imply more than 1,000 requests in a second."""
    span = float(trace.arrival_s[-1])
    if len(trace) < 10 or not 0 < span * FAST_PER_S < len(trace) - 1:
        return []
    rate = (len(trace) - 1) / span
    return [
        f"{rate:,.0f} requests per second: if the file is in seconds, scale the rate by 0.001 "
        "(read as milliseconds here)"
    ]


def on_a_grid(trace: Trace) -> list[str]:
    """A note when many requests share few arrival times."""
    if not (step := grid_s(trace.arrival_s)):
        return []
    distinct = np.unique(trace.arrival_s).size
    return [
        f"arrivals stand on a grid of {step:g} s ({distinct:,} distinct times for {len(trace):,} requests), so a "
        f"replay fires {len(trace) / distinct:.0f} at once; jitter of {step:g} s spreads them"
    ]


def grid_s(arrival_s: Floats) -> float:
    """The step in seconds, 1 or more, of a grid on which at least four requests a time stand; 0 where there is none."""
    times = np.unique(arrival_s)
    if times.size < 3 or arrival_s.size < 4 * times.size:
        return 0.0
    step = float(np.round(np.median(np.diff(times)), 2))
    if step < 1:
        return 0.0
    off = np.abs(times / step - np.round(times / step)) * step
    return step if np.mean(off <= NOISE_S) >= 0.99 else 0.0
