"""Every step of a real vLLM is reproduced: given when requests reached its scheduler and when each step began, the same
chunks with offsets, decodes, KV tokens, running, waiting and free blocks (vLLM 0.32 on a CPU, recorded)."""

from __future__ import annotations

import csv
import json
from dataclasses import replace

import pytest

from sim.clock import Clock
from sim.kvcache import KVCache
from sim.replica import Replica
from sim.request import Request
from sim.schedulers.vllm_v1 import VllmV1
from sim.state import State
from sim.steplog import Log
from tests.reference import ROOT, reference

RUNS = [
    *(("ref", f"{trace}_r{k}") for trace in ("calib", "poisson2", "poisson4") for k in (1, 2, 3, 4)),
    *(("kv_pressure", run) for run in ("calib_r1", "heavy6_r1", "heavy6_r2")),
    *((f"flags/{flag}", "flags_r1") for flag in ("base", "kv72", "mnbt128", "seqs4")),
]


class RecordedTimes:
    """The seam at the step cost: steps begin when the recording says, so what they cost does not matter."""

    def decode_line(self, decodes, kv_tokens):
        return None

    def step_s(self, chunks, decodes, kv_tokens):
        return 0.0


def options(folder):
    config = json.loads(reference("reference", "vllm_cpu", *folder.split("/"), "summary.json").read_text())[
        "scheduler_config"
    ]
    policy = VllmV1(
        max_num_batched_tokens=config["max_num_batched_tokens"],
        max_num_seqs=config["max_num_seqs"],
        enable_chunked_prefill=config["enable_chunked_prefill"],
        long_prefill_token_threshold=config["long_prefill_token_threshold"],
        long_prefill_alone_exempt=True,
        scheduler_reserve_full_isl=config["scheduler_reserve_full_isl"],
    )
    return policy, config["num_gpu_blocks"], config["block_size"], config["max_model_len"]


def rows(folder, name):
    with reference("reference", "vllm_cpu", *folder.split("/"), name).open() as file:
        return list(csv.DictReader(file))


def arrivals(folder, run):
    requests = []
    for i, row in enumerate(rows(folder, f"requests_{run}.csv")):
        at = float(row["sent_s"]) + float(row["send_to_scheduler_ms"]) / 1e3
        requests.append(Request(i, at, int(row["input_tokens"]), int(row["output_tokens"]), int(row["output_tokens"])))
    return sorted(requests, key=lambda r: r.arrival_s)


def ours(batch, state):
    """Our batch in the words of the recording, which counts the last token of a recomputed sequence as a decode."""
    chunks = [(r, q, c) for r, q, c in batch.chunks if not (q == 1 and c >= r.prompt_tokens)]
    single = [c for r, q, c in batch.chunks if q == 1 and c >= r.prompt_tokens]
    return (
        " ".join(f"{q}@{c}" for _, q, c in chunks),
        batch.decodes + len(single),
        batch.kv_tokens + sum(single),
        len(state.running),
        len(state.waiting),
        state.kv.free,
    )


def replay(folder, run, policy, num_blocks, block_size, max_model_len):
    """(steps that agree, steps, preemptions, requests finished) of our scheduler driven by the recorded times."""
    state, log = State(KVCache(num_blocks, block_size)), Log()
    replica = Replica(
        0,
        Clock(),
        state,
        policy,
        RecordedTimes(),
        log,
        lambda r, t: None,
        max_model_len=max_model_len,
        asynchronous=False,
    )
    pending = arrivals(folder, run)
    agree, total, busy, preemptions = 0, 0, False, 0
    for row in rows(folder, f"steps_{run}.csv"):
        now = float(row["t_sched"])
        if busy:
            replica.finish_run()
        while pending and pending[0].arrival_s <= now:
            replica.submit(pending.pop(0))
        busy = replica.start_run(now)
        theirs = (row["chunks"], *(int(row[c]) for c in ("gen_reqs", "gen_kv", "running", "waiting", "free_blocks")))
        if busy:
            preemptions += len(replica.batch.preempted)
            agree += ours(replica.batch, state) == theirs
        else:
            agree += theirs == ("", 0, 0, 0, 0, num_blocks - 1)
        total += 1
    if busy:
        replica.finish_run()
    return agree, total, preemptions, len(log.requests)


@pytest.mark.parametrize(("folder", "run"), RUNS)
def test_every_recorded_step_is_reproduced(folder, run):
    agree, total, preemptions, finished = replay(folder, run, *options(folder))
    assert agree == total > 50
    assert finished == len(rows(folder, f"requests_{run}.csv"))
    summary = json.loads((ROOT / "reference" / "vllm_cpu" / folder / "summary.json").read_text())
    (recorded,) = [r["steps"]["preemptions"] for r in summary["runs"] if r["tag"] == run]
    assert preemptions == recorded


@pytest.mark.parametrize(
    ("folder", "run", "change"),
    [
        ("ref", "poisson4_r1", {"max_num_batched_tokens": 512}),
        ("ref", "calib_r1", {"max_num_seqs": 8}),
        ("ref", "poisson4_r1", {"long_prefill_token_threshold": 64}),
        ("ref", "poisson4_r1", {"block_size": 16}),
        ("kv_pressure", "heavy6_r1", {"num_blocks": 121}),
        ("kv_pressure", "heavy6_r1", {"scheduler_reserve_full_isl": False}),
        ("flags/kv72", "flags_r1", {"num_blocks": 73}),
    ],
)
def test_wrong_settings_do_not_reproduce_it(folder, run, change):
    policy, num_blocks, block_size, max_model_len = options(folder)
    num_blocks = change.pop("num_blocks", num_blocks)
    block_size = change.pop("block_size", block_size)
    agree, total, _, _ = replay(folder, run, replace(policy, **change), num_blocks, block_size, max_model_len)
    assert agree < 0.9 * total
