"""Whether a cause can be: (yes or no, the numbers of the run that say so, as a clause). By the names of the causes."""

from __future__ import annotations

from reports.words import percent, quantity
from servecast.diagnosing.evidence import Evidence, host_share, share_of

There = tuple[bool, str]

LEAST = 0.1
"""The share of TTFT, TPOT or a step below which a part is not worth taking away."""
FULL = 0.9
"""The share of a limit from which it binds."""
BLIND = ("round-robin", "random", "weighted", "session-affinity")
"""Routers that do not look at loads."""
STATIC = "static"
BETWEEN = ("tpot", "itl", "e2e", "goodput")
"""Symptoms that the time between tokens makes."""


def capacity(e: Evidence) -> There:
    """Replicas that have more to do than they can."""
    if e.setup.scenario.cluster.pools[e.index].autoscale is not None:
        return False, "an autoscaler says how many replicas there are"
    said = f"replicas are busy {percent(e.steps.busy)} of the time, and the queue is {percent(e.waiting())} of TTFT"
    tokens = f", others' prompts {percent(e.spent('tpot', 'other_prompts'))} of TPOT"
    loaded = e.waiting() >= LEAST or bool(e.summary["saturated"]) or e.spent("tpot", "other_prompts") >= 2 * LEAST
    crowded = e.steps.busy >= FULL and e.steps.decodes >= 8
    return loaded or crowded, said + tokens


def traffic(e: Evidence) -> There:
    """Clients that send less than the GPUs could do."""
    if not e.metrics() & {"throughput", "gpu idle"}:
        return False, "neither throughput nor idle GPUs are the symptom"
    workload = e.setup.scenario.workload
    if workload.closed_loop is None and not (workload.arrivals and "rate" in workload.arrivals):
        return False, "the workload has neither clients nor a rate that could be raised"
    said = f"the queue is {percent(e.waiting())} of TTFT; a step decodes {quantity(e.steps.decodes)} sequences"
    return not e.summary["saturated"], said if not e.summary["saturated"] else "work piles up already"


def oversized(e: Evidence) -> There:
    """More GPUs than the traffic needs."""
    if "gpu idle" not in e.metrics():
        return False, "idle GPUs are not the symptom"
    return e.replicas > 1 and not e.summary["saturated"], f"{e.replicas} replicas"


def long_prompts(e: Evidence) -> There:
    """Prompts of others that hold up those who decode."""
    mean, slowest = (e.spent("tpot", "other_prompts", which) for which in ("mean", "slowest"))
    said = f"others' prompts are {percent(mean)} of TPOT, {percent(slowest)} of the slowest 1 %"
    if e.budget_option is None:
        return False, f"{e.engine.preset} has no token budget to change; {said}"
    return max(mean, slowest) >= LEAST, said


def mixed(e: Evidence) -> There:
    """Prefill and decode on the same GPUs."""
    if not e.alone:
        return False, "prefill and decode are apart, or pools differ"
    possible, said = long_prompts(e)
    if e.replicas < 2:
        return False, f"one replica cannot be split; {said}"
    part = e.setup.scenario.cluster.pools[0]
    if "pools" in e.cluster or part.dp * part.pp > 1 or part.autoscale or part.failures:
        return False, "the cluster is more than equal replicas in the short form"
    return possible and e.engine.engine in ("vllm", "sglang"), said


def chunks(e: Evidence) -> There:
    """A token budget so small that prompts take many steps."""
    said = f"a prompt takes {quantity(e.chunks)} steps of {e.budget:,} tokens on average"
    if e.budget_option is None:
        return False, f"{e.engine.preset} has no token budget to change"
    tokens = quantity(float(e.trace.prompt_tokens.mean()))
    waits = e.waiting() >= LEAST or bool(e.summary["saturated"])
    busy = waits and e.budget < 2048
    return e.chunks >= 1.2 or busy, f"{said}; prompts have {tokens} tokens"


def few_places(e: Evidence) -> There:
    """A limit of the batch that requests wait for."""
    option, most = e.option("max_num_seqs"), e.engine.max_num_seqs
    said = f"the fullest step has {e.steps.peak_batch:,} of {most:,} sequences; KV cache peak {percent(e.kv_peak)}"
    if option is None:
        return False, f"{e.engine.preset} has no such limit"
    return e.steps.peak_batch >= FULL * most and e.waiting() >= LEAST, f"{said}; queue {percent(e.waiting())} of TTFT"


def many_places(e: Evidence) -> There:
    """Batches too large for the TPOT that is asked for."""
    said = f"the fullest step has {e.steps.peak_batch:,} sequences, the mean one {quantity(e.steps.decodes)}"
    if not e.metrics() & {*BETWEEN, "preemptions"}:
        return False, f"time between tokens is not the symptom; {said}"
    if e.option("max_num_seqs") is None:
        return False, f"{e.engine.preset} has no such limit"
    return e.steps.peak_batch >= 16, said


def kv_cache(e: Evidence) -> There:
    """A KV cache that is full."""
    said = f"KV cache peak {percent(e.kv_peak)}, {e.preemptions:,} preemptions"
    return e.preemptions > 0 or e.kv_peak >= 0.97, said


def lengths(e: Evidence) -> There:
    """max_model_len: requests over it, or memory reserved up to it."""
    option, most = e.option("max_model_len"), e.engine.max_model_len
    reasons = e.summary["rejected_reasons"]
    over = sum(reasons.get(name, 0) for name in ("prompt_too_long", "over_max_model_len"))
    if option is None:
        return False, f"{e.engine.preset} has no such option"
    if over:
        return most < e.pool.model.max_position, f"{over:,} requests are longer than {most:,} tokens"
    said = f"the longest request has {e.longest:,} of {most:,} tokens"
    unlimited = e.setup.scenario.workload.max_tokens == "unlimited" and e.pool.scheduler.reserves
    if not unlimited:
        return False, f"{said}; {e.engine.preset} reserves no memory for what a request might become"
    return most > 1.5 * e.longest, f"{said}, for which it reserves memory"


def no_prefix_cache(e: Evidence) -> There:
    """Prompts that begin alike, and no cache that knows."""
    if e.engine.enable_prefix_caching:
        return False, f"prefix caching is on, hit rate {percent(e.hit_rate)}"
    if e.shared is None:
        return False, "the workload does not say what prompts share"
    said = f"{percent(e.shared)} of the prompt tokens were in earlier prompts"
    return e.shared >= 0.05 and prefix_option(e) is not None, said


def prefix_option(e: Evidence) -> tuple[str, bool] | None:
    """(option, value) that turns the prefix cache on."""
    if "disable_radix_cache" in e.engine.options:
        return "disable_radix_cache", False
    option = e.option("enable_prefix_caching")
    return None if option is None else (option, True)


def prefix_routing(e: Evidence) -> There:
    """Prompts that begin alike, sent to different replicas."""
    router = e.setup.scenario.cluster.router["kind"]
    if not e.engine.enable_prefix_caching or e.shared is None:
        return False, "no prefix cache, or the workload does not say what prompts share"
    said = f"hit rate {percent(e.hit_rate)} of {percent(e.shared)} that one boundless cache would find"
    if e.replicas < 2 or not e.alone or router == "prefix-affinity":
        return False, f"{e.replicas} replica{'s' * (e.replicas > 1)} behind {router}; {said}"
    return e.shared >= 0.05 and e.hit_rate < FULL * e.shared, said


def no_graphs(e: Evidence) -> There:
    """Kernels launched one by one."""
    largest, batch = max(e.engine.graphs.decode, default=0), e.steps.decodes
    said = f"CUDA graphs for up to {largest:,} sequences, the mean step has {quantity(batch)}"
    if not largest:
        said = "no CUDA graphs are captured"
    host = f"; the host takes {percent(host_share(e.step))} of a step of decodes"
    return graphs_off(e) is not None or e.steps.peak_batch > largest > 0, said + host


def graphs_off(e: Evidence) -> dict[str, object] | None:
    """The options that turn graphs off, with the values that turn them on; None where none does."""
    options = e.engine.options
    found: dict[str, object] = {
        name: False for name in ("enforce_eager", "disable_cuda_graph") if options.get(name) is True
    }
    if options.get("cudagraph_mode") == "NONE":
        found["cudagraph_mode"] = None
    return found or None


def host(e: Evidence) -> There:
    """GPUs that wait for the host in every step."""
    share, option = host_share(e.step), async_option(e)
    said = f"the host takes {percent(share)} of a step of {quantity(e.steps.decodes)} decodes"
    synchronous = option is not None and not e.engine.async_scheduling
    return share >= LEAST or (synchronous and share >= LEAST / 2), said


def async_option(e: Evidence) -> tuple[str, bool] | None:
    """(option, value) that lets the host plan a step while the one before runs."""
    for name in ("disable_overlap_schedule", "disable_overlap_scheduler"):
        if name in e.engine.options:
            return name, False
    option = e.option("async_scheduling")
    return None if option is None else (option, True)


def batching(e: Evidence) -> There:
    """Batches that are padded, and run until their longest answer ends."""
    if e.engine.scheduler == STATIC:
        return True, f"{e.engine.preset} runs a batch until its longest answer ends"
    return False, f"{e.engine.preset} batches continuously, without padding"


def front_end(e: Evidence) -> There:
    """An API server that takes long."""
    share = max(e.spent("ttft", "front_end"), e.spent("ttft", "front_end", "slowest"))
    return share >= LEAST, f"the front end is {percent(share)} of TTFT"


def router(e: Evidence) -> There:
    """Replicas that get more than others."""
    kind = e.setup.scenario.cluster.router["kind"]
    said = f"the busiest replica is in steps {e.steps.imbalance:.2f} times as long as the mean one; router {kind}"
    if e.replicas < 2 or not e.alone:
        return False, "one replica" if e.replicas < 2 else "pools differ"
    return kind in BLIND or e.steps.imbalance >= 1.2, said


def weights(e: Evidence) -> There:
    """Decoding that reads more bytes than it must."""
    if e.step is None:
        return False, "no request decodes, or ranks and stages wait for each other, which is not looked at"
    if not e.metrics() & {*BETWEEN, "throughput"}:
        return False, "neither time between tokens nor throughput is the symptom"
    near = e.step.bandwidth_s / e.step.seconds
    share, bound = share_of(e.step, "weights") + share_of(e.step, "experts"), e.step.bound
    said = f"reading weights is {percent(share)} of a step of {quantity(e.steps.decodes)} decodes, bound by {bound}"
    if e.pool.model.quantized or e.engine.quantization:
        return False, "the weights are quantised already"
    return share >= 0.3 and near >= 0.3 and bound == "bandwidth", said


def link(e: Evidence) -> There:
    """GPUs of a replica that wait for what they send each other."""
    tp, where = e.pool.layout.tp, f"over {e.pool.gpu.link.name}"
    if tp == 1:
        return False, "a replica is one GPU"
    decodes, prompts = (share_of(step, "communication") for step in (e.step, e.reading))
    said = f"{tp} GPUs send each other {percent(decodes)} of a step of decodes, {percent(prompts)} of one with a prompt"
    return max(decodes, prompts) >= LEAST, f"{said}, {where}"


def starved(e: Evidence) -> There:
    """One class that waits for another."""
    classes = e.summary.get("classes", {})
    if len(classes) < 2:
        return False, "one class of requests"
    times = {name: found["p99_ttft_ms"] for name, found in classes.items() if found["p99_ttft_ms"] is not None}
    if len(times) < 2:
        return False, "one class finishes"
    worst, best = max(times, key=lambda name: times[name]), min(times, key=lambda name: times[name])
    said = f"p99 TTFT {quantity(times[worst])} ms of {worst}, {quantity(times[best])} ms of {best}"
    if "scheduling_policy" not in e.engine.options or e.setup.scenario.workload.classes is None:
        return False, f"{e.engine.preset} has no priorities; {said}"
    if e.waiting() < LEAST:
        return False, f"hardly anybody waits: the queue is {percent(e.waiting())} of TTFT"
    return True, said


def failing(e: Evidence) -> There:
    """Replicas that fail."""
    failed = int(e.summary.get("replica_failures", 0))
    return failed > 0, f"{failed} failure{'s' * (failed != 1)} of replicas"


def gateway(e: Evidence) -> There:
    """Requests that a gateway turns away."""
    reasons = e.summary["rejected_reasons"]
    away = sum(reasons.get(name, 0) for name in ("over_outstanding", "over_prompt_tokens"))
    return away > 0, f"the gateway turns {away:,} requests away"
