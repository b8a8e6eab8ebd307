"""What places beyond the GPUs did for requests, from the log: what each gave and was given, and who waited how long."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from sim.deployment import Deployment
from sim.metrics import Distribution, Floats
from sim.steplog import Table

GIVEN = ("held", "stored", "dropped", "evicted", "prefetched")


def load_waits(loads: Table) -> tuple[Floats, Floats, Floats]:
    """(id of the request, since when, for how long) of each time that one waited for KV from tiers, by id: for what it
    loaded, from several tiers at once, or for what another one did."""
    ids, since, end = loads["id"], loads["since_s"], loads["end_s"]
    order = np.lexsort((since, ids))
    ids, since, end = ids[order], since[order], end[order]
    first = np.flatnonzero(np.append(True, (np.diff(ids) != 0) | (np.diff(since) != 0))[: len(ids)])
    until = np.maximum.reduceat(end, first) if len(first) else end
    return ids[first], since[first], until - since[first]


def tier_summary(rows: Table, loads: Table, tiers: Table, deployment: Deployment) -> dict[str, Any]:
    """Of each tier (those of one name together) its share of the prompt tokens of admitted requests, what it gave and
    was given, in tokens and bytes, and what it holds at the end; and how long the requests that waited for loads did.

    What preempted requests load again is in what a tier gave, and so in its share.
    """
    admitted = rows.where(~np.isnan(rows["scheduled_s"]))
    asked = float((admitted["prompt_tokens"] * admitted["samples"]).sum())
    token_bytes = deployment.of(lambda pool: pool.kv_bytes_per_token * pool.gpus)
    pool = np.repeat(np.arange(len(deployment.pools)), [pool.replicas for pool in deployment.pools])
    found: dict[str, dict[str, Any]] = {}
    for p, facts in enumerate(deployment.pools):
        for i, name in enumerate(facts.tiers):
            gave, did = _of(loads, pool, p, i), _of(tiers, pool, p, i)
            size = float(token_bytes[deployment.first[p]])
            figures = {"loaded_tokens": float(gave["tokens"].sum())}
            figures |= {f"{c}_tokens": float(did[c].sum()) for c in GIVEN}
            figures |= {f"{c}_bytes": figures[f"{c}_tokens"] * size for c in ("loaded", "stored")}
            mine = found.setdefault(name, dict.fromkeys(figures, 0))
            for key, value in figures.items():
                mine[key] += int(value)
    for mine in found.values():
        mine["hit_rate"] = mine["loaded_tokens"] / asked if asked else None
    ids, _, waited = load_waits(loads)
    who, which = np.unique(ids, return_inverse=True)
    per_request = np.bincount(which, waited, len(who)).astype(np.float64)
    return {
        "kv_tiers": found,
        "requests_that_loaded": len(who),
        **Distribution.of(per_request).summary("load_wait_ms", 1e3),
    }


def _of(rows: Table, pool: npt.NDArray[np.int64], p: int, tier: int) -> Table:
    """The rows of one tier of a pool."""
    return rows.where((pool[rows["replica"].astype(np.int64)] == p) & (rows["tier"] == tier))
