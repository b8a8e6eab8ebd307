"""Parts of a run's summary, each from the rows of its log. `sim.result` puts them together."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from sim import metrics
from sim.deployment import Deployment
from sim.metrics import Distribution, Floats
from sim.presence import Presence
from sim.steplog import CANCELLED, FAILED, FINISHED, HOLDS, UNFINISHED, Table


def class_summary(mine: Table, good: int | None, duration_s: float) -> dict[str, Any]:
    """Counts, latencies and goodput of the requests of one class, of which so many are `good`, under the keys of the
    whole."""
    outcome = mine["outcome"]
    over = int((outcome != UNFINISHED).sum())
    done = mine.where(np.isin(outcome, FINISHED))
    tpot = metrics.tpot_s(done)
    out: dict[str, Any] = {"submitted": mine.height, "completed": done.height}
    out |= Distribution.of(metrics.ttft_s(done)).summary("ttft_ms", 1e3)
    out |= Distribution.of(tpot[~np.isnan(tpot)]).summary("tpot_ms", 1e3)
    out |= Distribution.of(metrics.e2e_s(done)).summary("e2el_ms", 1e3)
    out["request_goodput"] = None if good is None or duration_s <= 0 else good / duration_s
    out["slo_attainment"] = None if good is None or not over else good / over
    return out


def over_limit(over: Floats, gaps: npt.NDArray[np.int64]) -> dict[str, Any]:
    """Of the `gaps` of some requests (how many each has; `over` their limit so many, NaN where that is not known), the
    share over their limit, and the share of these requests that have one; of those with two tokens at least."""
    known = ~np.isnan(over)
    total, some = float(gaps[known].sum()), int(known.sum())
    return {
        "gaps_over_slo_fraction": float(over[known].sum()) / total if total else None,
        "requests_with_gaps_over_slo_fraction": float((over[known] > 0).sum()) / some if some else None,
    }


def found_in_cache(rows: Table, deployment: Deployment) -> dict[str, Any]:
    """Prompt tokens that were found in the prefix cache or came from tiers behind it, of the requests that were
    admitted, and their share.

    Without tiers vLLM's counters `prefix_cache_hits` and `prefix_cache_queries` of requests that were not preempted,
    where one that waits is counted once, as from 0.32 on. Each sample of a prompt asks for all of it.
    """
    admitted = rows.where(~np.isnan(rows["scheduled_s"]))
    found = float(admitted["cached_tokens"].sum())
    asked = float((admitted["prompt_tokens"] * admitted["samples"]).sum())
    caching = any(pool.prefix_caching for pool in deployment.pools)
    share = found / asked if asked and caching else None
    return {"total_cached_tokens": int(found), "prefix_cache_hit_rate": share}


def recomputed(rows: Table, steps: Table, tries: Table, in_vain: int, preemptions: int) -> dict[str, Any]:
    """Tokens that were computed again after preemptions (and, if there were such, failures), and their share of all
    that were computed.

    What prompts took in all, less what of each admitted one was not found in the cache, and less what was computed for
    `tries` that were given up (until then, and `in_vain` after that). Fewer than there were only where the run stopped
    within a prompt, or of a try that was given up.
    """
    if not preemptions:
        return {"recomputed_tokens": 0, "recomputed_fraction": 0.0}
    prefill = float(steps["prefill_tokens"].sum())
    admitted = rows.where(~np.isnan(rows["scheduled_s"]) & (rows["outcome"] != CANCELLED))
    first = admitted["prompt_tokens"] * admitted["samples"] - admitted["cached_tokens"]
    again = max(prefill - float(first.sum()) - float(tries["prompt_tokens"].sum()) - in_vain, 0.0)
    computed = prefill + float(np.dot(steps["decodes"], steps["steps"]))
    return {"recomputed_tokens": int(again), "recomputed_fraction": again / computed if computed else 0.0}


def accepted_drafts(drafts: Table) -> dict[str, Any]:
    """What was drafted and how much of it was right, as vLLM counts it: `mean_acceptance_length` is the tokens that a
    sequence got of a step that it decoded in, the target's own among them."""
    sequences, drafted, accepted = (float(drafts[name].sum()) for name in drafts if name != "replica")
    return {
        "draft_tokens": int(drafted),
        "accepted_draft_tokens": int(accepted),
        "draft_acceptance_rate": accepted / drafted if drafted else None,
        "mean_acceptance_length": 1.0 + accepted / sequences if sequences else None,
    }


def given_up(tries: Table, in_vain: int, steps: Table) -> dict[str, Any]:
    """Tries that clients gave up, and the tokens that were computed for them in vain: of prompts (those that had
    been planned included) and of answers, also as a share of all."""
    late, again = tries["late"], tries["again"]
    vain = float((tries["prompt_tokens"] + tries["output_tokens"]).sum()) + in_vain
    computed = float((steps["prefill_tokens"] + steps["output_tokens"]).sum()) if tries.height else 0.0
    return {
        "timed_out_first_token": int(late.sum()),
        "timed_out_total": int(tries.height - late.sum()),
        "timeout_retries": int(again.sum()),
        "vain_tokens": int(vain),
        "vain_fraction": vain / computed if computed else 0.0,
    }


def held(holds: Table, steps: Table, deployment: Deployment) -> dict[str, Any]:
    """What became of KV that was held between turns, and the mean share of all KV blocks that it had, over the time to
    the end of the last step."""
    if not holds.height:
        return {}
    why, span_s = holds["why"], float(steps["end_s"].max(initial=0.0))
    blocks = deployment.of(lambda pool: pool.kv_blocks)
    lasted_s = np.minimum(holds["end_s"], span_s) - holds["start_s"]
    pinned = holds["blocks"] * np.maximum(lasted_s, 0.0) / blocks[holds["replica"].astype(np.int64)]
    out: dict[str, Any] = {f"holds_{name}": int((why == i).sum()) for i, name in enumerate(HOLDS)}
    return out | {"kv_pinned_fraction": float(pinned.sum()) / (span_s * deployment.replicas) if span_s else None}


def came_and_went(
    rows: Table, losses: Table, presence: Presence, deployment: Deployment, duration_s: float
) -> dict[str, Any]:
    """What became of replicas, and of requests with them: GPUs count while their replica exists."""
    d = deployment
    pools = [(pool.gpus, range(n, n + pool.replicas)) for pool, n in zip(d.pools, d.first, strict=False)]
    existed = presence.seconds(range(d.replicas), duration_s)
    failed = int((rows["outcome"] == FAILED).sum())
    return {
        "failed": failed,
        "retries": losses.height - failed,
        "lost_output_tokens": int(losses["output_tokens"].sum()),
        **presence.happened(d.leaders),
        "mean_replicas": existed / duration_s if duration_s else None,
        "peak_replicas": presence.most(range(d.replicas)),
        "gpus": sum(gpus * presence.most(numbers) for gpus, numbers in pools),
        "gpu_seconds": sum(gpus * presence.seconds(numbers, duration_s) for gpus, numbers in pools),
    }
