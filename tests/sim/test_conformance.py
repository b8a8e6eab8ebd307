"""Every step of a real vLLM is reproduced: given when requests reached its scheduler and when each step began, the same
chunks with offsets, decodes, KV tokens, running, waiting and free blocks (vLLM 0.32 on a CPU, recorded)."""

from __future__ import annotations

import json
from dataclasses import replace

import polars as pl
import pytest

from calibrate.observe.read import read_steps
from servecast.conformance.check import check_conformance
from sim.kvcache import KVCache
from sim.prefixcache import PrefixCache
from sim.schedulers.vllm_v1 import VllmV1
from tests.reference import reference

RUNS = [
    *(("ref", f"{trace}_r{k}") for trace in ("calib", "poisson2", "poisson4") for k in (1, 2, 3, 4)),
    *(("kv_pressure", run) for run in ("calib_r1", "heavy6_r1", "heavy6_r2")),
    *((f"flags/{flag}", "flags_r1") for flag in ("base", "kv72", "mnbt128", "seqs4")),
]


def folder_of(folder):
    return reference("reference", "vllm_cpu", *folder.split("/"))


def options(folder):
    """The policy, blocks and block size that the recorded engine had."""
    config = json.loads((folder_of(folder) / "summary.json").read_text())["scheduler_config"]
    policy = VllmV1(
        max_num_batched_tokens=config["max_num_batched_tokens"],
        max_num_seqs=config["max_num_seqs"],
        enable_chunked_prefill=config["enable_chunked_prefill"],
        long_prefill_token_threshold=config["long_prefill_token_threshold"],
        long_prefill_alone_exempt=True,
        scheduler_reserve_full_isl=config["scheduler_reserve_full_isl"],
    )
    return policy, config["num_gpu_blocks"], config["block_size"]


def recorded(folder, run):
    return read_steps(folder_of(folder) / f"steps_{run}.csv")


@pytest.mark.parametrize(("folder", "run"), RUNS)
def test_every_recorded_step_is_reproduced(folder, run):
    steps = recorded(folder, run)
    found = check_conformance(steps, *options(folder))
    assert found.agreeing == found.compared == found.steps == len(steps.steps) > 50
    assert found.differences == ()
    assert found.finished == len(steps.requests) > 0
    summary = json.loads((folder_of(folder) / "summary.json").read_text())
    (preemptions,) = [r["steps"]["preemptions"] for r in summary["runs"] if r["tag"] == run]
    assert found.preemptions == preemptions


def twice(first, second):
    """Two records of one engine, the second directly after the first."""
    n, m = len(first.steps), len(first.requests)
    steps = second.steps.with_columns(
        pl.col("step", "updates") + n, pl.col("chunk_request").list.eval(pl.element() + m)
    )  # fmt: skip
    requests = second.requests.with_columns(pl.col("request") + m, pl.col("plan", "end_plan") + n)
    return replace(first, steps=pl.concat([first.steps, steps]), requests=pl.concat([first.requests, requests]))


def test_every_recorded_step_with_prefix_caching_is_reproduced():
    """The same prompts twice: the first pass shares nothing, the second finds all but the end of every prompt."""
    policy, num_blocks, block_size = options("flags/prefix")
    first, second = (recorded("flags/prefix", f"flags_{run}") for run in ("r1", "r2"))
    run, n = twice(first, second), len(first.requests)
    full = (first.requests["prompt_tokens"] // block_size).to_list()

    def path(request):
        return [(request % n, full[request % n])]

    caches = []

    def cache(*size):
        caches.append(PrefixCache(*size, path, blank_first=True))
        return caches[-1]

    found = check_conformance(run, policy, num_blocks, block_size, cache)
    assert found.differences == ()
    assert found.agreeing == found.compared == found.steps == len(first.steps) + len(second.steps) > 200
    assert found.finished == 2 * n
    assert caches[0].free == caches[0].usable
    nothing = check_conformance(run, policy, num_blocks, block_size, KVCache)
    assert nothing.compared == len(first.steps) + 1  # the first of the second pass differs, and no more is compared
    assert nothing.agreeing == len(first.steps)


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
    policy, num_blocks, block_size = options(folder)
    num_blocks = change.pop("num_blocks", num_blocks)
    block_size = change.pop("block_size", block_size)
    found = check_conformance(recorded(folder, run), replace(policy, **change), num_blocks, block_size)
    assert found.agreeing < 0.9 * found.steps
    assert found.differences
