"""KV tiers as people see them: what each found, and who waited for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from reports.words import percent, quantity


def found(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(tier, what it found and was given) of each, where there are any."""
    for name, tier in summary.get("kv_tiers", {}).items():
        share = "no prompt tokens" if tier["hit_rate"] is None else f"{percent(tier['hit_rate'])} of prompt tokens"
        moved = [f"{quantity(tier[f'{way}_bytes'] / 1e9)} GB {way}" for way in ("loaded", "stored")]
        moved += [f"{quantity(tier['prefetched_tokens'])} tokens prefetched"] * bool(tier["prefetched_tokens"])
        lost = [f"{quantity(tier['dropped_tokens'])} tokens found no room"] * bool(tier["dropped_tokens"])
        yield name, "; ".join([share, ", ".join([*moved, *lost])])


def waited(summary: Mapping[str, Any]) -> str:
    """How many requests waited for KV from tiers, and how long; empty where none did."""
    if not summary.get("requests_that_loaded"):
        return ""
    mean, p99 = (quantity(summary[f"{stat}_load_wait_ms"]) for stat in ("mean", "p99"))
    return f"{summary['requests_that_loaded']:,} requests waited for them, {mean} ms on average, p99 {p99} ms"
