"""Pools of replicas side by side, what becomes of them, and where hand-overs between them take time: in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from reports.words import NONE, latency_row, latency_unit, percent, quantity, requests

POOL_COLUMNS = ("GPUs", "finished", "TTFT p50", "TTFT p99", "TPOT p50", "busy", "KV peak")
"""Of the short table, which fits a terminal."""


def pool_row(summary: Mapping[str, Any]) -> tuple[str, ...]:
    """The figures of one pool, in the order of POOL_COLUMNS: times in ms, the share of time that its replicas spend in
    steps, and of the KV cache that the fullest used."""
    times = (summary[key] for key in ("p50_ttft_ms", "p99_ttft_ms", "p50_tpot_ms"))
    return (
        f"{summary['gpus']:,}",
        f"{summary['completed']:,}",
        *(NONE if ms is None else f"{quantity(ms)} ms" for ms in times),
        percent(summary["busy_fraction"]),
        percent(summary["kv_peak_fraction"]),
    )


def pool_facts(pools: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """(what it is, the pools' figures): what a pool is and costs, how long requests waited for it, how much it does,
    and the latencies of those that it answered."""
    of = list(pools.values())

    def each(name: str, said: Callable[[Mapping[str, Any]], str]) -> tuple[str, list[str]]:
        return name, [said(s) for s in of]

    def times(name: str, key: str, *stats: str) -> list[tuple[str, list[str]]]:
        found = []
        for stat in stats:
            if any(values := [s[f"{stat}_{key}"] for s in of]):
                scale, unit = latency_unit(max(value for value in values if value is not None))
                cells = [quantity(None if value is None else value * scale) for value in values]
                found.append((f"{name}, {stat} ({unit})", cells))
        return found

    role = [each("role", lambda s: s["role"])] if len({s["role"] for s in of}) > 1 else []
    changed = any(s["replicas"] != int(s["replicas"]) for s in of)
    return [
        *role,
        each(f"{'mean ' * changed}replicas", lambda s: quantity(s["replicas"])),
        each(f"{'most ' * changed}GPUs", lambda s: f"{s['gpus']:,}"),
        each("GPU-hours", lambda s: quantity(s["gpu_seconds"] / 3600)),
        each("requests", lambda s: f"{s['completed']:,} of {s['submitted']:,}"),
        *times("wait for the pool", "queue_ms", "mean", "p99"),
        each("busy: share of the time in steps", lambda s: percent(s["busy_fraction"])),
        each("share of the time in steps with prompts", lambda s: percent(s["prefill_fraction"])),
        each("busiest replica over the mean", lambda s: NONE if s["imbalance"] is None else f"{s['imbalance']:.2f}"),
        each("requests a step and replica, mean", lambda s: quantity(s["mean_batch_size_current"])),
        each("KV cache, mean", lambda s: percent(s["kv_mean_fraction"])),
        each("KV cache, peak", lambda s: percent(s["kv_peak_fraction"])),
        each("preemptions", lambda s: f"{s['preemptions']:,}"),
        *times("TTFT", "ttft_ms", "p50", "p99"),
        *times("TPOT", "tpot_ms", "p50", "p99"),
        each("output (tokens/s)", lambda s: quantity(s["output_throughput"])),
    ]


def came_and_went(summary: Mapping[str, Any]) -> list[str]:
    """What became of replicas, where something did."""
    if "peak_replicas" not in summary:
        return []
    names = (("failure", "replica_failures"), ("start", "replica_starts"), ("drain", "replica_drains"))
    done = [f"{summary[key]:,} {name}{'' if summary[key] == 1 else 's'}" for name, key in names if summary[key]]
    again = [f"{requests(summary['retries'])} sent anew"] * bool(summary["retries"])
    there = f"mean {quantity(summary['mean_replicas'])}, peak {summary['peak_replicas']:,}"
    hours = f"{quantity(summary['gpu_seconds'] / 3600)} GPU-hours"
    return ["; ".join([", ".join([there, *done, *again]), hours])]


def pipelines(summary: Mapping[str, Any]) -> list[str]:
    """How busy the stages of pipelines are, and the bubble between them."""
    said = []
    for pool, shares in summary.get("stages", {}).items():
        bubble = 1 - sum(shares) / len(shares)
        busy = ", ".join(percent(share) for share in shares)
        where = f"{pool}: " if len(summary["stages"]) > 1 else ""
        said.append(f"{where}busy {busy} of the time in steps; bubble {percent(bubble)}")
    return said


STAGES = {
    "queue": "waiting for the prefill side",
    "prefill": "prefill",
    "decode_queue": "waiting for the decode side",
    "link_queue": "waiting for hosts and links",
    "transfer": "KV on the links",
    "first_decode": "first token of the decode side",
}
"""Where the time until the first token goes where prefill and decode are apart, and the end of each one's keys."""


def stage_rows(summary: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """(stage with its unit, [mean, p50, p90, p99]) of the requests that were handed over."""
    rows = []
    for stage, name in STAGES.items():
        if f"mean_{stage}_ms" in summary:
            unit, values = latency_row(summary, f"{stage}_ms")
            rows.append((f"{name} ({unit})", values))
    return rows


def handed_over(summary: Mapping[str, Any]) -> str:
    """How many requests were handed over, and what moved."""
    moved = f"{quantity(summary['bytes'] / summary['requests'] / 1e6)} MB each"
    return f"{requests(summary['requests'])} were handed over from prefill to decode, {moved}; until the first token:"
