"""How numbers and outcomes are said to people: units, the verdict, what is missing from a run, what a metric means.

It knows nothing of pages or terminals; every function returns plain text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sim.result import Result
from sim.steplog import HOLDS

GIB = 2**30
NONE = "–"
"""Stands where a number does not exist."""

METRICS = {"TTFT": "ttft_ms", "TPOT": "tpot_ms", "ITL": "itl_ms", "E2E": "e2el_ms"}
"""The latencies that people compare, and the end of their keys in `Result.summary()` (milliseconds)."""

SHOWN = {"TTFT": "ttft_ms", "TPOT": "tpot_ms", "ITL": "itl_ms", "longest gap": "longest_gap_ms", "E2E": "e2el_ms"}
"""Those of a run's own table."""


def shown(summary: Mapping[str, Any]) -> dict[str, str]:
    """Those of SHOWN, and, where requests reason, the time to the first token of their answers."""
    reasons = {"first answer token": "first_answer_ms"} if "p50_first_answer_ms" in summary else {}
    return {"TTFT": SHOWN["TTFT"], **reasons, **SHOWN}


DEFINITIONS = {
    "TTFT": "time to first token: from a request's arrival to its first output token; waiting in the queue counts",
    "TPOT": "time per output token after the first, averaged over each request; undefined, and left out, for requests "
    "with one output token",
    "ITL": "inter-token latency: the time between two consecutive tokens of a request, over all tokens of all requests "
    "(of messages, where the engine's stream_interval joins tokens)",
    "First answer token": "from a request's arrival to the first output token after its reasoning, whose share of the "
    "output the workload says",
    "Longest gap": "the longest time between two consecutive messages of each request (tokens, unless the engine's "
    "stream_interval joins them): how badly its stream stuttered",
    "E2E": "end-to-end latency: from a request's arrival to its last token",
    "Queue time": "from a request's arrival to the start of the first step that works on it",
    "Own prompt, others' prompts, decoding": "how the time of steps is divided: a step that holds prompts decodes for "
    "as long as steps without prompts took on average with as many sequences; the rest is the prompts', by their "
    "tokens",
    "Left out": "gaps between two tokens of a request in which it was preempted or the engine left it out of a step",
    "Slowest 1 %": "the requests with the longest TTFT, or TPOT, one at least: the mean over them",
    "Throughput": "finished requests, and their tokens, per second from time 0 to the last token",
    "Goodput": "finished requests that meet every limit of the SLO, per second",
    "KV cache": "the share of the KV cache blocks in use; bytes are per GPU",
    "Preemption": "a running request lost its KV cache to make room, and was computed again later",
    "Saturated": "requests arrive faster than the replicas serve them, so the queue, and every latency, grows with the "
    "length of the run",
    "p50, p90, p99": "the value that 50, 90 or 99 % of the values do not exceed (linear interpolation)",
}

REASONS = {
    "prompt_too_long": "the prompt leaves no room for an answer in the longest sequence that is served",
    "over_max_model_len": "prompt + max_tokens exceed the longest sequence that is served",
    "over_kv_cache": "the request can never fit into the KV cache",
    "over_step": "the prompt is longer than the engine takes in one step",
    "over_outstanding": "too many requests were not over yet (cluster.limits)",
    "over_prompt_tokens": "the prompt is longer than the gateway takes (cluster.limits)",
}

THRASH = 0.1
"""The share of the computed tokens that had been computed before, from which on it is called thrashing."""

MEMORY = {
    "visible_bytes": "memory that the driver reports",
    "budget_bytes": "the engine's share of it (gpu_memory_utilization)",
    "weight_bytes": "weights",
    "activation_bytes": "activations, peak",
    "cuda_graph_bytes": "CUDA graphs",
    "communication_bytes": "communication buffers",
    "non_torch_bytes": "CUDA context and workspaces",
    "kv_bytes": "KV cache",
    "kv_bytes_per_token": "KV cache per token",
    "block_size": "tokens per KV block",
    "num_gpu_blocks": "KV blocks",
    "kv_tokens": "tokens that the KV cache holds",
    "max_concurrency": "requests of max_model_len that the KV cache holds",
    "overridden": "set by num_gpu_blocks_override",
}
"""What the terms of a memory plan are called."""


def quantity(value: float | None) -> str:
    """About three digits, whole numbers in full, thousands separated; a dash where there is no number."""
    if value is None or not math.isfinite(value):
        return NONE
    if isinstance(value, int):
        return f"{value:,}"
    size = abs(value)
    if size == 0 or size >= 100:
        return f"{value:,.0f}"
    return f"{value:.2g}" if size < 0.1 else f"{value:.{1 if size >= 10 else 2}f}"


def requests(count: int) -> str:
    """`1 request`, `2,000 requests`."""
    return f"{count:,} request{'' if count == 1 else 's'}"


def size_text(size: float) -> str:
    """Bytes: `512 B`, `16 KiB`, `1 GiB`."""
    power = min(int(math.log2(max(size, 1))) // 10, 3)
    return f"{size / 1024**power:.4g} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def percent(fraction: float | None) -> str:
    """0.123 -> `12.3 %`."""
    return NONE if fraction is None else f"{100 * fraction:.1f} %"


def gib(size_bytes: float | None) -> str:
    """Bytes as GiB."""
    return NONE if size_bytes is None else f"{size_bytes / GIB:.2f} GiB"


def seconds(value: float) -> str:
    """A duration in the unit that suits it: `50 ms`, `1.2 s`, `3.4 min`, `2.5 h`."""
    scale, unit = clock(value) if value >= 1 else (1e3, "ms")
    return f"{value * scale:.3g} {unit}" if value * scale < 1000 else f"{value * scale:,.0f} {unit}"


def clock(duration_s: float) -> tuple[float, str]:
    """(factor from seconds, unit) for a time axis of that length."""
    return (1.0, "s") if duration_s <= 600 else (1 / 60, "min") if duration_s <= 18_000 else (1 / 3600, "h")


def latency_unit(largest_ms: float | None) -> tuple[float, str]:
    """(factor from milliseconds, unit) for values up to `largest_ms`: milliseconds, or seconds when large."""
    return (1e-3, "s") if largest_ms is not None and largest_ms >= 10_000 else (1.0, "ms")


def latency_row(summary: Mapping[str, Any], key: str) -> tuple[str, list[str]]:
    """(unit, [mean, p50, p90, p99]) of one latency, all in the same unit."""
    values = [summary[f"{stat}_{key}"] for stat in ("mean", "p50", "p90", "p99")]
    scale, unit = latency_unit(values[-1])
    return unit, [quantity(None if v is None else v * scale) for v in values]


def preemptions(summary: Mapping[str, Any]) -> tuple[str, str]:
    """How many there were, and what they cost."""
    again = summary["recomputed_fraction"]
    said = f"{percent(again)} of the tokens computed had been computed before" if again else ""
    return f"{summary['preemptions']:,}", said


def interval_rows(manifest: Mapping[str, Any]) -> tuple[str, list[tuple[str, list[str]]]]:
    """(what they are, [(latency or rate with its unit, [mean, p50, p90, p99 as "low to high"])]) of a run that was
    asked how sure it is; no rows else."""
    facts = manifest.get("intervals")
    if not facts:
        return "", []
    ends, rows = facts["intervals"], []
    for name, key in METRICS.items():
        found = [ends.get(f"{stat}_{key}") for stat in ("mean", "p50", "p90", "p99")]
        scale, unit = latency_unit(max((pair[1] for pair in found if pair), default=None))
        cells = [f"{quantity(p[0] * scale)} to {quantity(p[1] * scale)}" if p else NONE for p in found]
        rows.append((f"{name} ({unit})", cells))
    if rate := ends.get("output_throughput"):
        rows.append(("Output (tokens/s)", [f"{quantity(rate[0])} to {quantity(rate[1])}", NONE, NONE, NONE]))
    more = facts["saturated_draws"]
    said = (
        f"{100 * facts['level']:.0f} % intervals from {facts['draws']} draws of what may be wrong: kernels, clocks "
        "(they fall under load, so intervals lie rather high), host and front end"
        + (f"; in {more} of them work piles up" if more else "")
    )
    return said, rows


def slo(limits: Mapping[str, float]) -> str:
    """The limits in one line: `TTFT <= 1 s, TPOT <= 50 ms`."""
    names = {"gap": "gaps"}
    return ", ".join(f"{names.get(name, name.upper())} <= {seconds(limit)}" for name, limit in limits.items())


def gaps(summary: Mapping[str, Any]) -> str:
    """How many gaps are over the SLO's limit; empty where it has none."""
    if (share := summary.get("gaps_over_slo_fraction")) is None:
        return ""
    some = percent(summary["requests_with_gaps_over_slo_fraction"])
    return f"{percent(share)} over their limit, in {some} of requests"


def given_up(summary: Mapping[str, Any]) -> str:
    """What clients gave up, and what was computed for it; empty where nobody did."""
    late, total = summary["timed_out_first_token"], summary["timed_out_total"]
    if not late + total:
        return ""
    first = f" ({late:,} without a first token)" if late else ""
    again = f", {summary['timeout_retries']:,} sent again" if summary["timeout_retries"] else ""
    return f"{late + total:,} tries given up{first}{again}; {percent(summary['vain_fraction'])} of tokens in vain"


def held(summary: Mapping[str, Any]) -> str:
    """What became of KV that was held between turns; empty where none was."""
    if "kv_pinned_fraction" not in summary:
        return ""
    counts = ", ".join(f"{summary[f'holds_{why}']:,} {why.replace('_', ' ')}" for why in HOLDS)
    return f"{percent(summary['kv_pinned_fraction'])} of the KV cache on average ({counts})"


def title(result: Result) -> str:
    """The scenario's name."""
    return str(result.manifest.get("name") or "servecast run")


def setup(result: Result) -> str:
    """What ran, in one line: `llama-3.1-8b on 2 x h100-sxm (2 replicas), vllm-0.19`; pools that serve one model alike
    together."""
    places: dict[tuple[str, str], list[str]] = {}
    for facts, pool in zip(result.manifest.get("pools") or [], result.deployment.pools, strict=False):
        up_to = "up to " * (result.presence is not None)
        said = [f"{up_to}{facts['replicas']} replicas"] * (facts["replicas"] > 1)
        said += [pool.role] * (pool.role != "unified")
        said += [f"{key} {facts[key]}" for key in ("dp", "dcp", "pcp") if facts.get(key, 1) > 1] + ["ep"] * facts["ep"]
        where = f"{pool.replicas * pool.gpus} x {facts['gpu']}" + (f" ({', '.join(said)})" if said else "")
        places.setdefault((facts["model"], facts["engine"]), []).append(where)
    return "; ".join(f"{model} on {' + '.join(where)}, {engine}" for (model, engine), where in places.items())


def verdict(result: Result) -> tuple[str, str]:
    """(word, why): stable, saturated, not applicable or undecided."""
    judged = result.saturation
    if judged.saturated is None:
        word, _, why = judged.why.partition(": ")
        return word, why
    return ("saturated" if judged.saturated else "stable"), judged.why


def headline(word: str) -> str:
    """A verdict's word as the start of a sentence."""
    return word.capitalize() if word in ("stable", "saturated") else f"Saturation {word}"


def consequence(word: str) -> str:
    """What a verdict means for reading the latencies; empty where it means nothing."""
    if word == "saturated":
        return "Latencies grow with the length of such a run: read them as the state of an overloaded server."
    return "The run is too short to tell whether the latencies are steady." if word == "undecided" else ""


def notices(result: Result, summary: Mapping[str, Any]) -> list[str]:
    """What is missing from the numbers (stopped early, rejected requests, dropped rows), and work done in vain."""
    lines = []
    if not result.complete:
        lines.append(
            f"Partial run: stopped early with {requests(summary['completed'])} finished and {summary['unfinished']:,} "
            "still waiting or running. The numbers are those of the finished requests, so long ones are missing."
        )
    if summary["rejected"]:
        reasons = "; ".join(f"{n:,}: {REASONS.get(r, r)}" for r, n in summary["rejected_reasons"].items())
        lines.append(f"Rejected at arrival: {summary['rejected']:,} of {requests(summary['submitted'])} ({reasons}).")
    if summary.get("failed"):
        lines.append(
            f"Failed: {summary['failed']:,} of {requests(summary['submitted'])}, lost with their replica, and with "
            "those to which they were sent anew (cluster.retries)."
        )
    if summary["cancelled"]:
        lines.append(f"Given up by their clients: {summary['cancelled']:,} of {requests(summary['submitted'])}.")
    if summary["unsent"]:
        lines.append(
            f"Never sent: {requests(summary['unsent'])}, of sessions that ended with a turn rejected or given up."
        )
    if summary["recomputed_fraction"] >= THRASH:
        lines.append(
            f"Thrashing: {percent(summary['recomputed_fraction'])} of the tokens that were computed had been before, "
            f"and were lost to preemptions{' and failures' * bool(summary.get('retries'))}. More KV cache, or fewer "
            "requests at once, serves more."
        )
    dropped = (result.manifest.get("workload") or {}).get("dropped") or {}
    if total := sum(dropped.values()):
        reasons = "; ".join(f"{n:,}: {reason}" for reason, n in dropped.items() if n)
        lines.append(f"Dropped from the workload before the run: {requests(total)} ({reasons}).")
    return lines


def notes(result: Result) -> list[str]:
    """What was resolved or assumed on the way: about the workload, then about the engine."""
    workload = result.manifest.get("workload") or {}
    return [f"Note: {note}." for note in (*workload.get("notes", ()), *result.manifest.get("notes", ()))]


def pricing(result: Result) -> list[str]:
    """How the steps were priced and how far to trust that: a sentence for pools that were priced alike."""
    alike: dict[str, list[Mapping[str, Any]]] = {}
    pools = result.manifest.get("pools") or []
    for pool in pools:
        alike.setdefault(_priced(pool["cost"]), []).append(pool)
    found = []
    for said, these in alike.items():
        whose = "" if len(alike) == 1 else f"{', '.join(pool['name'] for pool in these)}: "
        lost = [(pool["name"], text) for pool in these for text in outside(pool["cost"])]
        more = [text if len(pools) == 1 else f"{text[:-1]} ({name})." for name, text in lost]
        found.append(" ".join([whose + said, *more]))
    return found


def _priced(cost: Mapping[str, Any]) -> str:
    kinds = {
        "datasheet": "a roofline from the GPU's datasheet with stated efficiencies",
        "profile": f"the kernel profile of {cost.get('gpu')}",
    }
    kind = str(cost.get("kind", "an unnamed cost model"))
    return f"Step times: {kinds.get(kind, kind)}. Accuracy: {cost.get('accuracy', 'not yet validated')}."


def outside(cost: Mapping[str, Any]) -> list[str]:
    """Which kernels were priced outside what was measured, and how much of the time of all steps they took."""
    shares = cost.get("outside") or {}
    if not shares:
        return []
    parts = [f"{name.replace('_', ' ')} {percent(share)}" for name, share in sorted(shares.items())]
    return [f"Outside what was measured, in shares of the step time: {', '.join(parts)}."]


CLASS_COLUMNS = ("finished", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99", "meet their SLO")


def class_row(summary: Mapping[str, Any]) -> tuple[str, ...]:
    """The figures of one request class, in the order of CLASS_COLUMNS; times in ms."""
    times = (summary[f"p{q}_{metric}_ms"] for metric in ("ttft", "tpot") for q in (50, 99))
    met = summary["slo_attainment"]
    return (
        f"{summary['completed']:,} of {summary['submitted']:,}",
        *(NONE if ms is None else f"{quantity(ms)} ms" for ms in times),
        NONE if met is None else percent(met),
    )
