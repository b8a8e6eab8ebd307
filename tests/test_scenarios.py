"""The figures that scenarios' headers state are those that their commands give: headers do not go stale silently."""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path

import pytest

import servecast

REPO = Path(__file__).parents[1]
CODE, KV, RAG = "scenarios/mix-code.yaml", "scenarios/kv-pressure.yaml", "scenarios/mix-rag.yaml"
BUDGET, QUICK, OWN = "scenarios/token-budget.yaml", "scenarios/quickstart.yaml", "docs/own-policy/scenario.yaml"
LOOP, AGENT, SUMMARY = "scenarios/closed-loop-benchmark.yaml", "scenarios/mix-agent.yaml", "scenarios/mix-summary.yaml"
CHAT, LEGAL, BATCH = "scenarios/mix-chat.yaml", "scenarios/mix-legal.yaml", "scenarios/mix-batch.yaml"
PRIORITY, FLEET, SPLIT = "scenarios/priority.yaml", "scenarios/mixed-fleet.yaml", "scenarios/split-serving.yaml"
SCALE, AZURE = "scenarios/autoscaling.yaml", "scenarios/azure-conversation.yaml"
APART, PREFIX, FP8 = "scenarios/split-70b.yaml", "scenarios/prefix-routing.yaml", "scenarios/fp8-or-second-gpu.yaml"
REASON, FP8_BOTH = "scenarios/reasoning.yaml", "engine.quantization=fp8 engine.kv_cache_dtype=fp8"
DRAFTS, PLAIN = "scenarios/speculative.yaml", "engine.speculative_config=null"
TIERS, STORE = "scenarios/kv-tiers.yaml", "cluster.kv_tiers.0.kind=remote cluster.kv_tiers.0.link="
FOUR = "engine.max_num_seqs=4 workload.sessions.arrivals.rate=0.12"
BEHIND = (
    'cluster.kv_tiers={"prefetch":PREFETCH,"tiers":[{"kind":"host","capacity":"32GiB"},'
    '{"kind":"remote","capacity":"1TiB","link":"rdma-200"}]}'
)
TIMEOUTS = "scenarios/timeouts.yaml"
SUBS, MORE = "scenarios/sub-agents.yaml", "workload.sessions.arrivals.rate=0.05"
LONG, FIVE = "scenarios/long-prompts.yaml", "scenarios/five-engines.yaml"
STEADY = 'workload.arrivals={"kind":"gamma","rate":5.53,"cv":1.09}'
WHOLE = 'cluster.pools=[{"gpu":"h100-sxm","tp":2,"replicas":4}] cluster.split=null'
BF16 = "model=qwen3-32b engine.kv_cache_dtype=auto"
SPIKES = 'workload.arrivals={"kind":"spikes","rate":8,"spike_rate":40,"every":"10min","length":"3min"}'
FIXED = "cluster.autoscale=null cluster.replicas="
RULE = "cluster.autoscale."
HOUR = 3600
CHUNKS = "workload.sessions.chunks=5"
TOKENS = "engine.max_num_batched_tokens="
FCFS = "engine.scheduling_policy=fcfs workload.classes.0.priority=0"
KV_TOKEN_BYTES = 131_072  # llama-3.1-8b in 16 bits

SPREAD, ALONE = "scenarios/expert-parallel.yaml", "cluster.dp=1 cluster.ep=false "
ROUTER = "cluster.router="
TOGETHER = 'cluster.pools=[{"gpu":"h100-sxm","replicas":4}] cluster.split=null'
READERS = "cluster.pools.0.replicas={} cluster.pools.1.replicas={}"

STATED = [  # scenario, --set options, the summary's key, what the header says of {it}, the header's unit in the key's
    (LOOP, "", "request_throughput", "{5.4} requests", 1),
    (LOOP, "", "output_throughput", "{4,970} output tokens", 1),
    (LOOP, "", "mean_tpot_ms", "TPOT of {12.4} ms", 1),
    (LOOP, "workload.closed_loop.concurrency=1", "mean_tpot_ms", "{6.6} ms a token", 1),
    (LOOP, "workload.closed_loop.concurrency=256", "mean_tpot_ms", "{27} ms", 1),
    (LOOP, "workload.closed_loop.concurrency=256", "output_throughput", "{53} times the tokens", "alone"),
    (KV, "", "peak_kv_cache_memory_used", "about {42,700} tokens", KV_TOKEN_BYTES),
    (KV, "workload.arrivals.rate=1.25", "mean_ttft_ms", "TTFT is {0.28} s", 1e3),
    (KV, "workload.arrivals.rate=1.25", "preemptions", "{34} preemptions", 1),
    (KV, "", "preemptions", "there are {149}", 1),
    (KV, "", "mean_ttft_ms", "TTFT is {1.48} s", 1e3),
    (KV, "", "p99_ttft_ms", "p99 {14} s", 1e3),
    (KV, "workload.arrivals.rate=2", "saturated", "at 2 work piles up", True),
    (KV, "engine.preset=vllm-0.15", "preemptions", "{222} preemptions", 1),
    (KV, "engine.preset=vllm-0.15", "mean_ttft_ms", "and {2.4} s", 1e3),
    (AGENT, "", "mean_ttft_ms", "{0.20} s to the first token", 1e3),
    (AGENT, "", "prefix_cache_hit_rate", "{94} % of the prompt tokens", 0.01),
    (AGENT, "engine.enable_prefix_caching=false", "mean_ttft_ms", "without prefix caching {3.5} s", 1e3),
    (AGENT, "cluster.replicas=2", "mean_ttft_ms", "worse, {0.26} s", 1e3),
    (BATCH, "", "duration", "{221} s on an H100", 1),
    (BATCH, "cluster.gpu=l40s", "duration", "{894} s on an L40S", 1),
    (CHAT, "", "mean_tpot_ms", "TPOT is {16.5} ms", 1),
    (CHAT, "", "kv_peak_fraction", "at most {61} % full", 0.01),
    (CHAT, "workload.rate=8", "kv_peak_fraction", "at 8 it fills up", 1),
    (CHAT, "workload.rate=8", "saturated", "work piles up", True),
    (CODE, "", "kv_peak_fraction", "fill up to {86} %", 0.01),
    (CODE, "", "mean_batch_size_current", "only {43} of them", 1),
    (CODE, "workload.rate=1", "mean_ttft_ms", "mean {220} s", 1e3),
    (CODE, "workload.rate=1 cluster.gpu=h200-sxm", "mean_ttft_ms", "TTFT is {0.35} s", 1e3),
    (CODE, "workload.rate=1 cluster.gpu=h200-sxm", "saturated", "Saturated there too", True),
    (CODE, "workload.rate=1 cluster.replicas=2", "mean_ttft_ms", "at {0.10} s", 1e3),
    (CODE, "workload.rate=1 cluster.replicas=2", "saturated", "Two H100s carry it", False),
    (FLEET, "", "slo_attainment", "{98} % meet the SLO", 0.01),
    (FLEET, f"{ROUTER}round-robin", "slo_attainment", "{34} % meet it", 0.01),
    (FLEET, f"{ROUTER}round-robin", "saturated", "work piles up", True),
    (FLEET, f"{ROUTER}weighted cluster.pools.0.weight=3", "slo_attainment", "{90} % meet it", 0.01),
    (FLEET, f"{ROUTER}power-of-two", "slo_attainment", "two random choices {88} %", 0.01),
    (FLEET, f"{ROUTER}kv-utilisation", "slo_attainment", "in use {99.9} %", 0.01),
    (FLEET, f"{ROUTER}kv-utilisation", "p99_ttft_ms", "p99 {0.77} s", 1e3),
    (SPLIT, "", "slo_attainment", "meet it for all requests", 1.0),
    (SPLIT, "", "mean_tpot_ms", "TPOT is {11.8} ms", 1),
    (SPLIT, "", "p99_tpot_ms", "(p99 {14.1} ms)", 1),
    (SPLIT, "", "mean_ttft_ms", "is TTFT, {0.46} s instead", 1e3),
    (SPLIT, TOGETHER, "slo_attainment", "meet it for {62} %", 0.01),
    (SPLIT, TOGETHER, "mean_tpot_ms", "TPOT is {15.6} ms", 1),
    (SPLIT, TOGETHER, "p99_tpot_ms", "(p99 {29} ms)", 1),
    (SPLIT, TOGETHER, "p99_itl_ms", "one gap in a hundred {179} ms", 1),
    (SPLIT, TOGETHER, "mean_ttft_ms", "instead of {0.16} s", 1e3),
    (SPLIT, "engine.block_size=64", "mean_ttft_ms", "save 0.09 s of TTFT", 370),
    (SPLIT, READERS.format(1, 3), "saturated", "prompts pile up", True),
    (SPLIT, READERS.format(3, 1), "saturated", "with three and one, answers do", True),
    (SPREAD, "", "kv_peak_fraction", "at most {30} % full", 0.01),
    (SPREAD, "", "mean_tpot_ms", "TPOT is {29} ms", 1),
    (SPREAD, "", "mean_ttft_ms", "instead of {0.10} s", 1e3),
    (SPREAD, f"{ALONE}cluster.tp=4", "mean_tpot_ms", "faster here, {23} ms", 1),
    (SPREAD, f"{ALONE}cluster.replicas=4", "kv_peak_fraction", "each fill their KV cache", 1.0),
    (SPREAD, f"{ALONE}cluster.replicas=4", "mean_ttft_ms", "TTFT is {0.30} s", 1e3),
    (SPREAD, f"{ALONE}cluster.replicas=4", "p99_ttft_ms", "its p99 {1.9} s", 1e3),
    (SPREAD, "cluster.experts.all2all=deepep_auto", "mean_tpot_ms", "no faster than gathering", 30.6),
    (SCALE, "", "slo_attainment", "All requests meet the SLO", 1.0),
    (SCALE, "", "gpu_seconds", "with {0.86} GPU-hours", HOUR),
    (SCALE, "", "replica_starts", "instead of {5},", 1),
    (SCALE, f"{FIXED}3", "gpu_seconds", "all the time take {0.99}:", HOUR),
    (SCALE, f"{FIXED}3", "slo_attainment", "All requests meet the SLO", 1.0),
    (SCALE, f"{RULE}down_after=5min", "gpu_seconds", "it takes {1.12}.", HOUR),
    (SCALE, f"{RULE}down_after=0s {RULE}tolerance=0 {RULE}every=5s", "replica_starts", "flaps: {29} starts", 1),
    (SCALE, SPIKES, "slo_attainment", "{60} % meet the SLO with", 0.01),
    (SCALE, SPIKES, "gpu_seconds", "{1.12} GPU-hours, where", HOUR),
    (SCALE, f"{SPIKES} {FIXED}2", "gpu_seconds", "need {0.87} and", HOUR),
    (SCALE, f"{SPIKES} {FIXED}2", "slo_attainment", "meet it for all", 1.0),
    (SCALE, f"{SPIKES} cluster.limits.outstanding_per_replica=80", "p99_ttft_ms", "TTFT p99 at {0.20} s", 1e3),
    (SCALE, f"{SPIKES} cluster.limits.outstanding_per_replica=80", "rejected", "turns {5,165} of 24,000 away", 1),
    (TIERS, "", "mean_input_tokens_per_request", "{20,400} tokens", 1),
    (TIERS, "", "mean_ttft_ms", "TTFT is {0.19} s", 1e3),
    (TIERS, "", "p99_ttft_ms", "(p99 {0.75} s", 1e3),
    (TIERS, "cluster.kv_tiers=null", "mean_ttft_ms", "not {0.95} s", 1e3),
    (TIERS, "cluster.kv_tiers=null", "p99_ttft_ms", "not {6.5} s)", 1e3),
    (TIERS, "workload.sessions.arrivals.rate=0.16", "mean_ttft_ms", "a second: {0.26} s", 1e3),
    (TIERS, "workload.sessions.arrivals.rate=0.16 cluster.kv_tiers=null", "mean_ttft_ms", "not {5.8} s", 1e3),
    (TIERS, "cluster.kv_tiers.0.capacity=32GiB", "mean_ttft_ms", "TTFT is {0.94} s", 1e3),
    (TIERS, f"{STORE}ethernet-100", "mean_ttft_ms", "TTFT is {3.2} s", 1e3),
    (TIERS, f"{STORE}ethernet-100", "prefix_cache_hit_rate", "finds as much", 0.871),
    (TIERS, f"{STORE}rdma-400", "mean_ttft_ms", "it is {0.19} s", 1e3),
    (TIERS, f"{FOUR} {BEHIND.replace('PREFETCH', 'true')}", "p99_ttft_ms", "wait {13.5} s", 1e3),
    (TIERS, f"{FOUR} {BEHIND.replace('PREFETCH', 'false')}", "p99_ttft_ms", "not {15.9} s. Where", 1e3),
    (LEGAL, "", "mean_ttft_ms", "TTFT is {0.31} s", 1e3),
    (LEGAL, "workload.rate=2", "saturated", "two a second are too many", True),
    (RAG, "", "mean_ttft_ms", "{0.83} s to the first token", 1e3),
    (RAG, "", "prefix_cache_hit_rate", "{7} % of the prompt tokens", 0.01),
    (RAG, CHUNKS, "mean_ttft_ms", "it is {0.15} s", 1e3),
    (RAG, CHUNKS, "prefix_cache_hit_rate", "({23} % found)", 0.01),
    (RAG, f"{CHUNKS} workload.sessions.arrivals.rate=2", "mean_ttft_ms", "still {0.18} s", 1e3),
    (SUMMARY, "", "mean_ttft_ms", "waits {2.9} s", 1e3),
    (SUMMARY, "", "p99_ttft_ms", "{11} s at p99", 1e3),
    (SUMMARY, "cluster.replicas=4", "mean_ttft_ms", "down to {2.3}", 1e3),
    (SUMMARY, "cluster.replicas=4", "p99_ttft_ms", "and {7.8} s", 1e3),
    (DRAFTS, "", "mean_tpot_ms", "comes every {6.7} ms", 1),
    (DRAFTS, PLAIN, "mean_tpot_ms", "in place of {16.5}.", 1),
    (DRAFTS, "workload.arrivals.rate=8", "mean_tpot_ms", "it is still {19.9} in", 1),
    (DRAFTS, "workload.arrivals.rate=8", "slo_attainment", "{87} % of the requests meet", 0.01),
    (DRAFTS, f"workload.arrivals.rate=8 {PLAIN}", "mean_tpot_ms", "still 19.9 in place of {34.9}", 1),
    (DRAFTS, f"workload.arrivals.rate=8 {PLAIN}", "slo_attainment", "in place of {2} %", 0.01),
    (DRAFTS, "workload.arrivals.rate=10", "mean_tpot_ms", "it does harm: {68} ms", 1),
    (DRAFTS, "workload.arrivals.rate=10", "saturated", "and work piles up", True),
    (DRAFTS, f"workload.arrivals.rate=10 {PLAIN}", "mean_tpot_ms", "in place of {54},", 1),
    (PRIORITY, FCFS, "classes.chat.p50_ttft_ms", "TTFT p50 {10.2} s", 1e3),
    (PRIORITY, FCFS, "classes.chat.slo_attainment", "{5} % within a second", 0.01),
    (PRIORITY, FCFS, "classes.jobs.p50_ttft_ms", "from {10.0} to", 1e3),
    (PRIORITY, "", "classes.chat.p50_ttft_ms", "chat has {0.60} s", 1e3),
    (PRIORITY, "", "classes.chat.slo_attainment", "and {74} %", 0.01),
    (PRIORITY, "", "classes.jobs.p50_ttft_ms", "to {12.5} s", 1e3),
    (QUICK, "", "p99_ttft_ms", "TTFT p99 {0.18} s", 1e3),
    (QUICK, "", "p99_tpot_ms", "TPOT p99 {12.5} ms", 1),
    (QUICK, "", "kv_peak_fraction", "at most {11.4} % full", 0.01),
    (QUICK, "workload.arrivals.rate=24", "saturated", "At 24 requests a second work piles up", True),
    (QUICK, "cluster.gpu=l40s", "saturated", "One L40S cannot serve 8 a second", True),
    (QUICK, "cluster.gpu=l40s cluster.replicas=2", "saturated", "Two can", False),
    (QUICK, "cluster.gpu=l40s cluster.replicas=2", "slo_attainment", "{42} % of the requests miss", "missed"),
    (BUDGET, "", "p99_itl_ms", "falls from {201} to", 1),
    (BUDGET, "", "p99_ttft_ms", "rises from {1.21} to", 1e3),
    (BUDGET, f"{TOKENS}2048", "p99_itl_ms", "to {65} ms", 1),
    (BUDGET, f"{TOKENS}2048", "p99_ttft_ms", "to {1.25} s", 1e3),
    (BUDGET, f"{TOKENS}1024", "p99_itl_ms", "to {39} ms", 1),
    (BUDGET, f"{TOKENS}1024", "p99_ttft_ms", "TTFT p99 to {1.39} s", 1e3),
    (BUDGET, f"{TOKENS}16384", "p99_ttft_ms", "first tokens: {1.21} s", 1e3),
    (AZURE, "", "p99_ttft_ms", "TTFT p99 is {0.55} s", 1e3),
    (AZURE, "cluster.replicas=1", "p99_ttft_ms", "with one {1.22} s", 1e3),
    (AZURE, f"cluster.replicas=1 {STEADY}", "p99_ttft_ms", "seem to do, at {0.78} s", 1e3),
    (APART, "", "slo_attainment", "All requests meet the SLO", 1.0),
    (APART, "", "mean_tpot_ms", "TPOT is {22.3} ms", 1),
    (APART, "", "mean_ttft_ms", "instead of {1.05} s", 1e3),
    (APART, WHOLE, "slo_attainment", "for {27} %: TPOT", 0.01),
    (APART, WHOLE, "mean_tpot_ms", "TPOT is {37.5} ms", 1),
    (APART, READERS.format(2, 2), "slo_attainment", "meet it for {46} %", 0.01),
    (APART, READERS.format(1, 3), "saturated", "prompts pile up", True),
    (APART, "engine.block_size=16", "mean_ttft_ms", "TTFT is {1.85} s", 1e3),
    (PREFIX, f"{ROUTER}round-robin", "prefix_cache_hit_rate", "In turn, {16} %", 0.01),
    (PREFIX, f"{ROUTER}round-robin", "mean_ttft_ms", "TTFT is {0.56} s", 1e3),
    (PREFIX, "", "prefix_cache_hit_rate", "unfinished requests {19} %", 0.01),
    (PREFIX, "", "mean_ttft_ms", "and {0.54} s", 1e3),
    (PREFIX, f"{ROUTER}prefix-affinity", "prefix_cache_hit_rate", "before, {77} %", 0.01),
    (PREFIX, f"{ROUTER}prefix-affinity", "mean_ttft_ms", "and {0.19} s", 1e3),
    (FP8, "", "mean_tpot_ms", "TPOT of {25.9} instead", 1),
    (FP8, f"{BF16} cluster.tp=2", "mean_tpot_ms", "instead of {19.9} ms", 1),
    (FP8, BF16, "mean_batch_size_current", "room for {13} requests", 1),
    (FP8, BF16, "saturated", "work piles up", True),
    (FP8, "workload.arrivals.rate=4", "slo_attainment", "{6} % meet the SLO", 0.01),
    (FP8, f"workload.arrivals.rate=4 {BF16} cluster.tp=2", "slo_attainment", "on two GPUs {90} %", 0.01),
    (LONG, "", "p99_longest_gap_ms", "stops for {1.08} s", 1e3),
    (LONG, "", "p99_itl_ms", "ITL p99 is {14} ms", 1),
    (LONG, "", "classes.document.mean_ttft_ms", "own TTFT is {1.18} s", 1e3),
    (LONG, f"{TOKENS}2048", "p99_longest_gap_ms", "that stop is {93} ms", 1),
    (LONG, f"{TOKENS}2048", "p99_itl_ms", "ITL p99 {22} ms", 1),
    (LONG, f"{TOKENS}2048", "classes.document.mean_ttft_ms", "and {1.21} s in chunks", 1e3),
    (FIVE, "", "output_throughput", "give {146} tokens", 1),
    (FIVE, "", "mean_tpot_ms", "{40} ms a token", 1),
    (FIVE, "engine.torch_compile=true", "output_throughput", "it is {371};", 1),
    (FIVE, "engine.torch_compile=true", "mean_tpot_ms", "takes {14.5} ms", 1),
    (FIVE, 'engine={"preset":"vllm-0.19"}', "output_throughput", "gives {1,004} at", 1),
    (FIVE, 'engine={"preset":"vllm-0.19"}', "mean_tpot_ms", "the same {14.8} ms", 1),
    (FIVE, 'engine={"preset":"tgi-3"}', "output_throughput", "TGI ({934})", 1),
    (FIVE, 'engine={"preset":"llama.cpp","parallel":16}', "output_throughput", "llama.cpp ({957})", 1),
    (REASON, "", "mean_ttft_ms", "comes after {0.05} s", 1e3),
    (REASON, "", "mean_first_answer_ms", "answer after {25.3} s", 1e3),
    (REASON, "", "p99_first_answer_ms", "(p99 {80} s)", 1e3),
    (REASON, f"{FP8_BOTH}", "mean_first_answer_ms", "make it {14.3} s", 1e3),
    (REASON, "cluster.replicas=2", "mean_first_answer_ms", "instead, {18.3} s", 1e3),
    (SUBS, "", "prefix_cache_hit_rate", "read: {94} %", 0.01),
    (SUBS, "", "mean_ttft_ms", "comes after {0.38} s", 1e3),
    (SUBS, "engine.enable_prefix_caching=false", "mean_ttft_ms", "cache it is {108} s", 1e3),
    (SUBS, "cluster.replicas=2", "prefix_cache_hit_rate", "twice ({90} %", 0.01),
    (SUBS, "cluster.replicas=2", "mean_ttft_ms", "%, {0.25} s)", 1e3),
    (SUBS, "cluster.replicas=2 cluster.router=session-affinity", "mean_ttft_ms", "they do not ({0.20} s)", 1e3),
    (SUBS, "workload.hold_kv=30s", "kv_pinned_fraction", "pins {20} % of the cache", 0.01),
    (SUBS, "workload.hold_kv=30s", "mean_ttft_ms", "nothing, {0.38} s", 1e3),
    (SUBS, MORE, "mean_ttft_ms", "s, not {30.3}", 1e3),
    (SUBS, f"{MORE} workload.hold_kv=30s", "mean_ttft_ms", "who run: {33.2} s", 1e3),
    (TIMEOUTS, "", "timeout_retries", "{3,520} tries", 1),
    (TIMEOUTS, "", "vain_fraction", "{70} % of the tokens", 0.01),
    (TIMEOUTS, "", "slo_attainment", "and {34} % of the requests", 0.01),
    (TIMEOUTS, "workload.timeout.retries=0 workload.timeout.backoff=null", "slo_attainment", "were {67} %", 0.01),
    (TIMEOUTS, "cluster.limits.outstanding=100", "slo_attainment", "short: {69} %", 0.01),
    (TIMEOUTS, "cluster.replicas=2", "slo_attainment", "H100: {89} %", 0.01),
    (OWN, "", "slo_attainment", "{93} % instead", 0.01),
    (OWN, "engine.scheduler=null", "slo_attainment", "of {88} %", 0.01),
    (OWN, "", "p90_ttft_ms", "TTFT p90 {0.78} instead", 1e3),
    (OWN, "engine.scheduler=null", "p90_ttft_ms", "of {1.11} s", 1e3),
    (OWN, "", "p99_ttft_ms", "p99 {2.7} instead", 1e3),
    (OWN, "engine.scheduler=null", "p99_ttft_ms", "of {2.4} s", 1e3),
]


@cache
def header(path: str) -> str:
    """The comment at a scenario's top, as one line."""
    text = (REPO / path).read_text(encoding="utf-8")
    return " ".join(line.lstrip("# ") for line in re.match(r"(#.*\n)+", text)[0].splitlines())


@cache
def summary(path: str, options: str) -> dict:
    return servecast.simulate(servecast.load_scenario(REPO / path, options.split())).summary()


@pytest.mark.parametrize(("path", "options", "key", "said", "unit"), STATED)
def test_a_header_states_what_its_command_gives(path, options, key, said, unit):
    assert said.replace("{", "").replace("}", "") in header(path)
    found = summary(path, options)
    for part in key.split("."):
        found = found[part]
    if isinstance(unit, bool):
        assert found is unit
        return
    if unit == "missed":
        found, unit = 1 - found, 0.01
    if unit == "alone":
        unit = summary(path, "workload.closed_loop.concurrency=1")[key]
    number = re.search(r"{(.*)}", said)
    text = number[1].replace(",", "") if number else "1"
    half_a_digit = 0.5 * 10.0 ** -len(text.partition(".")[2])
    assert found / unit == pytest.approx(float(text), rel=0.02, abs=half_a_digit if number else 0)


@pytest.mark.parametrize("path", sorted({row[0] for row in STATED}))
def test_every_command_of_a_header_is_held_to_a_figure(path):
    text = (REPO / path).read_text(encoding="utf-8")
    lines = re.findall(rf"^# +servecast run {path}(.*)$", text, flags=re.M)
    shown = {" ".join(word for word in shlex.split(line) if word not in ("--set", "--json")) for line in lines}
    assert shown == {row[1] for row in STATED if row[0] == path}


def test_every_scenario_is_here():
    assert {f"scenarios/{p.name}" for p in (REPO / "scenarios").glob("*.yaml")} < {row[0] for row in STATED}
