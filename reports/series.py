"""From millions of log rows to the few hundred points that a figure shows: time bins, and points of a CDF.

Vectorised over blocks of rows; a bin's value is the exact mean over its time, taking what a row of several steps yields
as spread evenly over the row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from sim.metrics import Distribution, Floats
from sim.result import Result

BINS = 240
CDF_POINTS = 500
COLUMNS = (
    "replica", "start_s", "end_s", "steps", "prefill_requests", "prefill_tokens", "decodes", "kv_tokens",
    "output_tokens", "running", "kv_blocks", "kv_blocks_end", "preempted", "draft_tokens",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Series:
    """Means per time bin [BINS] over the replicas that exist; `edges_s` [BINS + 1]. All zeros where nothing ran."""

    edges_s: Floats
    running: Floats  # requests, all replicas together
    waiting: Floats  # for their first step; all zeros for some of the replicas
    kv: Floats  # share of the KV blocks in use, mean over replicas
    kv_peak: Floats  # share in use at the bin's fullest moment, in the fullest replica
    prefill_tokens_per_s: Floats  # prompt tokens computed; a preempted request's are computed again
    output_tokens_per_s: Floats
    prefill_share: Floats  # share of the time in steps that hold prompt tokens
    decode_share: Floats  # share of the time in steps that only decode
    compute: Floats  # share of the GPUs' peak FLOP/s that the model's FLOPs need (MFU), mean over replicas
    bandwidth: Floats  # share of their peak memory bandwidth that its bytes need
    preempted: Floats  # preemptions in the bin, not a mean

    @property
    def middles_s(self) -> Floats:
        """The middle of each bin."""
        return (self.edges_s[1:] + self.edges_s[:-1]) / 2


def over_time(result: Result, replicas: range | None = None) -> Series:
    """The step log, and the queue, in BINS equal bins from time 0 to the end of the last step: of all or `replicas`."""
    blocks = 1 / result.deployment.of(lambda pool: pool.kv_blocks)
    chosen = range(result.deployment.replicas) if replicas is None else replicas
    last = max(float(block["end_s"].max(initial=0.0)) for block in result.step_blocks())
    edges = np.linspace(0.0, last if last > 0 else 1.0, BINS + 1)
    sums = {f: np.zeros(BINS) for f in Series.__slots__ if f != "edges_s"}
    peaks = [pool.peaks for pool in result.deployment.pools for _ in range(pool.replicas)]
    for block in result.step_blocks():
        columns = {name: block[name] for name in COLUMNS}
        order = np.argsort(columns["replica"], kind="stable")
        starts = np.searchsorted(columns["replica"], np.arange(chosen.start, chosen.stop + 1), sorter=order)
        for replica, (begin, end) in zip(chosen, pairwise(starts), strict=True):
            if begin < end:
                rows = {name: column[order[begin:end]] for name, column in columns.items()}
                if (at := peaks[replica]) is not None:
                    rows["compute_s"], rows["bandwidth_s"] = at.seconds(rows)
                _add(sums, edges, rows, blocks[replica], len(chosen))
    if result.presence is not None:
        there = integrate_steps(edges, *result.presence.counts(chosen)) / edges[1]
        for name in ("kv", "prefill_share", "decode_share", "compute", "bandwidth"):
            sums[name] *= len(chosen) / np.where(there > 0, there, np.inf)
    if replicas is None:
        sums["waiting"] += integrate_steps(edges, *result.queue) / edges[1]
    return Series(edges, **sums)


def _add(sums: Mapping[str, Floats], edges: Floats, rows: Mapping[str, Floats], block: float, replicas: int) -> None:
    """Add some rows of one of the replicas, in order of time; `block` is the share of its KV cache that a block is."""
    start, end, width = rows["start_s"], rows["end_s"], edges[1]
    kv, kv_end = rows["kv_blocks"] * block, rows["kv_blocks_end"] * block
    with np.errstate(divide="ignore"):
        per_second = np.where(end > start, 1 / (end - start), 0.0)
    prefill = (rows["prefill_tokens"] > 0).astype(float)
    used = [name for name in ("compute", "bandwidth") if f"{name}_s" in rows]
    for name, first, final, scale in (
        ("running", rows["running"], None, 1.0),
        ("kv", kv, kv_end, 1 / replicas),
        ("prefill_tokens_per_s", rows["prefill_tokens"] * per_second, None, 1.0),
        ("output_tokens_per_s", rows["output_tokens"] * per_second, None, 1.0),
        ("prefill_share", prefill, None, 1 / replicas),
        ("decode_share", 1 - prefill, None, 1 / replicas),
        *((name, rows[f"{name}_s"] * per_second, None, 1 / replicas) for name in used),
    ):
        sums[name] += integrate(edges, start, end, first, first if final is None else final) * (scale / width)
    hit = np.flatnonzero(rows["preempted"])
    np.add.at(sums["preempted"], bins_of(edges, start[hit]), rows["preempted"][hit])
    peak = sums["kv_peak"]
    np.maximum.at(peak, bins_of(edges, end), kv_end)
    # Blocks only grow within a row, so a bin that ends inside a row is fullest there, or at an earlier row's end.
    row = np.maximum(np.searchsorted(start, edges[1:], side="left") - 1, 0)
    inside = (start[row] < edges[1:]) & (edges[1:] < end[row])
    grown = (kv_end - kv)[row] * (edges[1:] - start[row]) * per_second[row]
    np.maximum(peak, np.where(inside, kv[row] + grown, 0.0), out=peak)


def integrate(edges: Floats, start: Floats, end: Floats, first: Floats, final: Floats) -> Floats:
    """Integral over each bin [len(edges) - 1] of what changes straight from `first` to `final` over [start, end].

    The rows must be in order of time and not overlap, as those of one replica do.
    """
    length = end - start
    before = np.concatenate([[0.0], np.cumsum(length * (first + final) / 2)])
    row = np.searchsorted(start, edges, side="right") - 1
    begun, row = row >= 0, np.maximum(row, 0)
    inside = np.clip(edges - start[row], 0.0, length[row])
    slope = np.divide((final - first)[row], length[row], out=np.zeros(len(edges)), where=length[row] > 0)
    return np.diff(np.where(begun, before[row] + first[row] * inside + slope * inside**2 / 2, 0.0))


def integrate_steps(edges: Floats, times: Floats, values: Floats) -> Floats:
    """Integral over each bin [len(edges) - 1] of the step function that takes `values[i]` from `times[i]` on."""
    here = np.isfinite(times)
    times, values = np.concatenate([[0.0], times[here]]), np.concatenate([[0.0], values[here]])
    before = np.concatenate([[0.0], np.cumsum(values[:-1] * np.diff(times))])
    row = np.searchsorted(times, edges, side="right") - 1
    return np.diff(before[row] + values[row] * (edges - times[row]))


def thinned(times: Floats, edges: Floats) -> np.typing.NDArray[np.intp]:
    """Which points of a step function a figure shows: all up to BINS of them; of more, the last one in each bin."""
    here = np.flatnonzero(times <= edges[-1])
    if len(here) <= BINS:
        return here
    return np.unique(np.maximum(np.searchsorted(times[here], edges, side="right") - 1, 0))


def bins_of(edges: Floats, times: Floats) -> np.typing.NDArray[np.intp]:
    """The bin that each time falls into; a time on an edge belongs to the bin that ends there."""
    return np.clip(np.searchsorted(edges, times, side="left") - 1, 0, len(edges) - 2)


def cdf(distribution: Distribution) -> tuple[Floats, Floats]:
    """(values, percent of the weight at or below each): all points, or about CDF_POINTS, denser in the upper tail.

    The curve starts at 0 % at the smallest value.
    """
    values, share = distribution.values, distribution.cumulative / max(distribution.count, 1)
    if len(values) > CDF_POINTS:
        wanted = np.concatenate(
            [np.linspace(0, 0.98, CDF_POINTS // 2), 1 - np.geomspace(0.02, 1e-6, CDF_POINTS // 2 - 1)]
        )
        picked = np.unique(np.append(np.searchsorted(share, wanted), len(values) - 1))
        values, share = values[picked], share[picked]
    return np.append(values[:1], values), 100 * np.append(np.zeros(min(1, len(share))), share)
