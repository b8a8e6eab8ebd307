"""What the step log says of batches, KV caches and memory, over all replicas or those of one pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from sim import metrics
from sim.deployment import Deployment, PoolFacts
from sim.metrics import Distribution, Floats
from sim.presence import Presence
from sim.steplog import FINISHED, Table

NAMES = ("batch_size_current", "kv_cache_memory_used", "gpu_memory_used")


def occupancy(deployment: Deployment, steps: Table, replica_s: float) -> dict[str, Any]:
    """Batch, KV and memory use of a replica or GPU: means over the `replica_s` seconds of all replicas together, peaks
    of one moment.

    `steps` are those of the deployment's replicas.
    """
    if not steps.height:
        empty = {f"{stat}_{name}": None for name in NAMES for stat in ("mean", "peak")}
        return empty | {"kv_peak_fraction": 0.0, "kv_mean_fraction": 0.0, "engine_steps": 0}
    share = (steps["end_s"] - steps["start_s"]) / replica_s
    batch = steps["prefill_requests"] + steps["decodes"]
    mean_batch, peak_batch = float(np.dot(share, batch)), int(batch.max())
    del batch  # columns of a long log are large
    kv = {}
    for name, value in (("fraction", _block_share), ("memory_used", _block_bytes)):
        each = _per_step(deployment, steps, value)
        kv["peak", name] = float((steps["kv_blocks_end"] * each).max())
        kv["mean", name] = float(np.dot(share, (steps["kv_blocks"] + steps["kv_blocks_end"]) / 2 * each))
    block, fixed = (_per_step(deployment, steps, value) for value in (_block_bytes, _fixed_bytes))
    return {
        "mean_batch_size_current": mean_batch,
        "peak_batch_size_current": peak_batch,
        "kv_peak_fraction": kv["peak", "fraction"],
        "kv_mean_fraction": kv["mean", "fraction"],
        "mean_kv_cache_memory_used": kv["mean", "memory_used"],
        "peak_kv_cache_memory_used": kv["peak", "memory_used"],
        "mean_gpu_memory_used": float(deployment.of(_fixed_bytes).mean()) + kv["mean", "memory_used"],
        "peak_gpu_memory_used": float((steps["kv_blocks_end"] * block + fixed).max()),
        "engine_steps": int(steps["steps"].sum()),
    }


STAGES = {
    "queue": ("arrival_s", "scheduled_s"),
    "prefill": ("scheduled_s", "read_s"),
    "decode_queue": ("read_s", "reserved_s"),
    "link_queue": ("reserved_s", "start_s"),
    "transfer": ("start_s", "end_s"),
    "first_decode": ("end_s", "first_token_s"),
}
"""Where the time of a request that is handed over goes until its first token, if the decode side streams that: waiting
for the prefill side and in it; waiting for a place and blocks on the decode side (and in its front end); for hosts and
links, with the transfer's latency; on the links; and until the step that yields the token has ended."""
BOOTSTRAPPED = {
    "decode_queue": ("arrival_s", "reserved_s"),
    "queue": ("reserved_s", "scheduled_s"),
    "prefill": ("scheduled_s", "read_s"),
    "link_queue": ("read_s", "start_s"),
    "transfer": ("start_s", "end_s"),
    "first_decode": ("end_s", "first_token_s"),
}
"""The same where the decode side has its blocks before the prompt is read, and KV is sent with every chunk: the last
two are of what the last chunk computed, and of the wait until the decode side has seen that."""


def handed_over(requests: Table, transfers: Table) -> dict[str, Any]:
    """What the hand-overs of a run took: of each of STAGES that lies before the first token, `*_ms`; and what moved."""
    transfers = _last(transfers)
    rows = requests.take(np.searchsorted(requests["id"], transfers["id"]))
    rows_and = {"arrival_s": metrics.arrived_s(rows)} | {name: rows[name] for name in ("scheduled_s", "first_token_s")}
    times = rows_and | {name: transfers[name] for name in ("read_s", "reserved_s", "start_s", "end_s")}
    early = bool((times["first_token_s"] < times["end_s"]).any())
    stages = BOOTSTRAPPED if bool((times["reserved_s"] < times["read_s"]).any()) else STAGES
    out: dict[str, Any] = {"requests": transfers.height}
    for stage, (since, until) in stages.items():
        if not (early and stage == "first_decode"):
            took = times[until] - times[since]
            out |= Distribution.of(took[~np.isnan(took)]).summary(f"{stage}_ms", 1e3)
    out["tokens"] = int(transfers["tokens"].sum())
    out["bytes"] = float(transfers["bytes"].sum())
    return out


def stage_shares(deployment: Deployment, stages: Table, steps: Table) -> dict[str, list[float]]:
    """Pool -> for each of its pipeline stages the share of the time in which a batch was under way that it computed:
    what is left is the bubble."""
    found = {}
    for pool, first in zip(deployment.pools, deployment.first, strict=False):
        of = stages.where((stages["replica"] >= first) & (stages["replica"] < first + pool.replicas))
        mine = steps.where((steps["replica"] >= first) & (steps["replica"] < first + pool.replicas))
        total = float((mine["end_s"] - mine["start_s"]).sum())
        if of.height and total:
            found[pool.name] = (np.bincount(of["stage"].astype(np.int64), of["busy_s"]) / total).tolist()
    return found


def _last(transfers: Table) -> Table:
    """Of each request that was handed over the last time: some are read again after a failure."""
    last = len(transfers["id"]) - 1 - np.unique(transfers["id"][::-1], return_index=True)[1]
    return transfers if len(last) == transfers.height else transfers.take(np.sort(last))


def _waits(replicas: range, requests: Table, done: Table, transfers: Table) -> Floats:
    """How long requests waited for some replicas, of which `done` are those that finished there."""

    def mine(side: str) -> Table:
        return transfers.where((transfers[side] >= replicas.start) & (transfers[side] < replicas.stop))

    waits = [metrics.queue_s(done.where(~np.isin(done["id"], transfers["id"])))]
    for side in ("prefill_replica", "decode_replica"):
        moved = mine(side)
        rows = requests.take(np.searchsorted(requests["id"], moved["id"]))
        first, arrived_s = (
            moved["reserved_s"] < moved["read_s"],
            metrics.arrived_s(rows),
        )  # the decode side reserves first
        if side == "prefill_replica":
            waits.append(rows["scheduled_s"] - np.where(first, moved["reserved_s"], arrived_s))
        else:
            waits.append(moved["reserved_s"] - np.where(first, arrived_s, moved["read_s"]))
    found = np.concatenate(waits)
    return found[~np.isnan(found)]


def pool_summaries(
    deployment: Deployment, requests: Table, steps: Table, transfers: Table, duration_s: float,
    presence: Presence | None,
) -> dict[str, Any]:  # fmt: skip
    """Pool -> its requests, latencies and use, under the keys of the whole run; those of a prefill pool are what it
    read, and their latencies where they were answered.

    `queue_ms`: how long they waited for the pool: for its first step, and for blocks of a decode pool; one of the two
    from their arrival on, the other once they had the first.
    `busy_fraction`: the share of the time to the end of the last step that replicas spend in steps, and
    `prefill_fraction` in steps that hold prompt tokens; `imbalance`: the busiest replica's time in steps over the mean.
    Where replicas come and go (`presence`) they count while they exist: `replicas` is then their mean number, `gpus`
    the most at one time, and `imbalance` is of the shares of the time that each existed.
    """
    span_s, found = float(steps["end_s"].max(initial=0.0)), {}
    moved = _last(transfers)
    for pool, first in zip(deployment.pools, deployment.first, strict=False):
        mine = steps.where((steps["replica"] >= first) & (steps["replica"] < first + pool.replicas))
        rows = requests.where((requests["replica"] >= first) & (requests["replica"] < first + pool.replicas))
        done = rows.where(np.isin(rows["outcome"], FINISHED))
        tpot = metrics.tpot_s(done)
        at = mine["replica"].astype(np.int64) - first
        busy: Floats = np.bincount(at, mine["end_s"] - mine["start_s"], minlength=pool.replicas).astype(np.float64)
        busy_s = float(busy.sum())
        from_here = (transfers["prefill_replica"] >= first) & (transfers["prefill_replica"] < first + pool.replicas)
        read = int(from_here.sum())
        reading = mine.where(mine["prefill_tokens"] > 0)
        total, replicas, most = span_s * pool.replicas, float(pool.replicas), pool.replicas
        if presence is not None:
            numbers = range(first, first + pool.replicas)
            total, most = presence.seconds(numbers, span_s), presence.most(numbers)
            replicas = presence.seconds(numbers, duration_s) / duration_s if duration_s else 0.0
            existed = presence.each(numbers, span_s)
            busy = busy[existed > 0] / existed[existed > 0]
        out: dict[str, Any] = {
            "role": pool.role,
            "replicas": pool.replicas if presence is None else replicas,
            "gpus": most * pool.gpus,
            "gpu_seconds": replicas * pool.gpus * duration_s,
            "submitted": rows.height + read,
            "completed": done.height + read,
            "preemptions": int(rows["preemptions"].sum()),
        }
        out |= Distribution.of(metrics.ttft_s(done)).summary("ttft_ms", 1e3)
        out |= Distribution.of(tpot[~np.isnan(tpot)]).summary("tpot_ms", 1e3)
        out |= Distribution.of(metrics.e2e_s(done)).summary("e2el_ms", 1e3)
        out |= Distribution.of(_waits(range(first, first + pool.replicas), requests, done, moved)).summary(
            "queue_ms", 1e3
        )
        out["output_throughput"] = float(done["output_tokens"].sum()) / duration_s if duration_s > 0 else None
        out["busy_fraction"] = busy_s / total if total else None
        out["prefill_fraction"] = float((reading["end_s"] - reading["start_s"]).sum()) / total if total else None
        out["imbalance"] = float(busy.max() / busy.mean()) if busy.any() else None
        out |= occupancy(Deployment((pool,)), mine, total)
        found[pool.name] = out
    return found


def _per_step(deployment: Deployment, steps: Table, value: Callable[[PoolFacts], float]) -> Floats | float:
    """A fact of the pool of each row's replica; one number where there is one pool, since a long log is large."""
    if len(deployment.pools) == 1:
        return value(deployment.pools[0])
    return deployment.of(value)[steps["replica"].astype(np.int64)]


def _block_share(pool: PoolFacts) -> float:
    return 1 / pool.kv_blocks


def _block_bytes(pool: PoolFacts) -> float:
    return pool.block_bytes


def _fixed_bytes(pool: PoolFacts) -> float:
    return pool.fixed_memory_bytes
