"""KV tiers from the scenario to the result: what is said, what it means in seconds, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from servecast.run import Result, simulate
from servecast.scenario import load_scenario
from servecast.serve_lines import commands
from servecast.tiers import load_s, saved_s
from servecast.yamlfile import dump_yaml
from tests.servecast.helpers import problems, setup_of

SCENARIO = Path(__file__).parents[2] / "scenarios" / "kv-tiers.yaml"
SMALL = {"workload.num_sessions": 40, "engine.num_gpu_blocks_override": 8000, "engine.max_model_len": 65536}
TIERS = "cluster.kv_tiers"
DISK = {"kind": "disk", "capacity": "1TiB", "read": "6GB/s", "write": "3GB/s"}
HOST = {"kind": "host", "capacity": "64GiB"}
TOKEN_BYTES = 131_072  # llama-3.1-8b in 16 bits


def of(**changes: Any) -> Result:
    return simulate(load_scenario(SCENARIO, SMALL | {key.replace("__", "."): v for key, v in changes.items()}))


def wrong(tiers: Any, **changes: Any) -> list[str]:
    changes = {key.replace("__", "."): value for key, value in changes.items()}
    return problems(SCENARIO, {TIERS: tiers} | changes)


def test_what_was_found_and_what_it_took() -> None:
    s, without = of().summary(), of(cluster__kv_tiers=None).summary()
    tier = s["kv_tiers"]["host"]
    asked = s["total_input_tokens"]
    assert tier["hit_rate"] == pytest.approx(tier["loaded_tokens"] / asked)
    assert tier["loaded_bytes"] == tier["loaded_tokens"] * TOKEN_BYTES > 0
    assert tier["stored_bytes"] == tier["stored_tokens"] * TOKEN_BYTES
    assert s["prefix_cache_hit_rate"] > without["prefix_cache_hit_rate"] + 0.2
    assert s["mean_ttft_ms"] < without["mean_ttft_ms"]
    assert s["mean_load_wait_ms"] * s["requests_that_loaded"] == pytest.approx(
        s["spent"]["ttft_ms"]["mean"]["kv_load"] * s["completed"]
    )
    for summary in (s, without):
        assert sum(summary["spent"]["ttft_ms"]["mean"].values()) == pytest.approx(summary["mean_ttft_ms"])
    assert "kv_tiers" not in without
    assert "kv_load" not in without["spent"]["ttft_ms"]["mean"]


def test_where_steps_wait_their_parts_add_up_too() -> None:
    s = of(cluster__kv_tiers={"tiers": [HOST], "load": "sync", "chunk": 256}).summary()
    parts = s["spent"]["ttft_ms"]["mean"]
    assert sum(parts.values()) == pytest.approx(s["mean_ttft_ms"])
    assert parts["kv_load"] > 0
    assert s["kv_tiers"]["host"]["loaded_tokens"] > 0


def test_a_slower_tier_finds_as_much_and_costs_more() -> None:
    fast, slow = (
        of(cluster__kv_tiers=[HOST | {"read": rate, "write": rate}]).summary() for rate in ("50GB/s", "2GB/s")
    )
    assert slow["kv_tiers"]["host"]["hit_rate"] == pytest.approx(fast["kv_tiers"]["host"]["hit_rate"], rel=0.2)
    assert slow["mean_ttft_ms"] > 2 * fast["mean_ttft_ms"]


def test_what_replicas_share_is_found_by_all() -> None:
    hits = []
    for shared in (False, True):
        tier = {"kind": "remote", "capacity": "2TiB", "link": "rdma-400", "shared": shared}
        s = of(cluster__kv_tiers=[tier], cluster__replicas=2, cluster__router="round-robin").summary()
        hits.append(s["prefix_cache_hit_rate"])
    assert hits[1] > hits[0] + 0.1


def test_what_comes_while_requests_wait_is_loaded_from_the_host() -> None:
    tiers = [HOST | {"capacity": "4GiB"}, DISK]
    queued = {"engine__max_num_seqs": 2, "workload__sessions__arrivals__rate": 1}
    without, ahead = (
        of(cluster__kv_tiers={"tiers": tiers, "prefetch": prefetch}, **queued).summary() for prefetch in (False, True)
    )
    host, disk = ahead["kv_tiers"].values()
    assert disk["prefetched_tokens"] > 0
    assert host["prefetched_tokens"] == 0
    assert host["loaded_tokens"] > 2 * without["kv_tiers"]["host"]["loaded_tokens"]
    assert disk["loaded_tokens"] < without["kv_tiers"]["disk"]["loaded_tokens"] / 2
    assert ahead["mean_load_wait_ms"] < without["mean_load_wait_ms"]
    assert without["kv_tiers"]["disk"]["prefetched_tokens"] == 0


def test_what_is_fetched_ahead_needs_a_host_and_something_behind_it() -> None:
    for tiers, found in (([HOST], r"\['host'\]"), ([DISK], r"\['disk'\]"), ([DISK, DISK], r"\['disk', 'disk'\]")):
        (said,) = wrong({"tiers": tiers, "prefetch": True})
        assert re.search(f"kv_tiers.prefetch: .* found {found}, give it a host", said)


def test_the_engines_own_option_is_a_host_tier() -> None:
    ours = of(cluster__kv_tiers=[HOST])
    theirs = of(cluster__kv_tiers=None, engine__kv_offloading_size=64)
    assert ours.summary() == theirs.summary()
    setup = setup_of(SCENARIO, {TIERS: None, "engine.kv_offloading_size": 64})
    assert "--kv-offloading-size 64" in commands(setup)[0].text
    assert any("KV tiers (host)" in note for note in commands(setup_of(SCENARIO))[0].notes)


def test_seconds_are_bytes_over_rates() -> None:
    tiers = [HOST, DISK, {"kind": "remote", "capacity": "1TiB", "link": "ethernet-100", "latency": "2ms"}]
    offload = setup_of(SCENARIO, {TIERS: tiers, "cluster.tp": 2}).pool.offload
    assert offload is not None
    host, disk, remote = offload.tiers
    gpu_bytes = TOKEN_BYTES / 2
    assert load_s(offload, host, 1000) == pytest.approx(20e-6 + 1000 * gpu_bytes / 55.6e9)
    assert load_s(offload, disk, 1000) == pytest.approx(200e-6 + 1000 * TOKEN_BYTES / 6e9)
    assert load_s(offload, remote, 1000) == pytest.approx(2e-3 + 1000 * gpu_bytes / (12.5e9 / 8))
    assert disk.write_s == pytest.approx(TOKEN_BYTES / 3e9)
    assert host.chunks == 64 * 2**30 // (16 * TOKEN_BYTES)


def test_a_note_says_from_where_on_loading_is_worth_it() -> None:
    store = {"kind": "remote", "capacity": "1TiB", "link": "ethernet-100"}
    notes = {note.split(":")[0]: note for note in of(cluster__kv_tiers=[HOST, DISK, store]).manifest["notes"]}
    assert "computing is faster" not in notes["KV from host"]
    assert "even 65,520 tokens are computed faster" in notes["KV from remote"]
    worth = int(notes["KV from disk"].split("below ")[1].split(" tokens")[0].replace(",", ""))
    pool = setup_of(SCENARIO, SMALL | {TIERS: [HOST, DISK]}).pool
    offload = pool.offload
    assert offload is not None
    for tokens, faster in ((worth, True), (worth - offload.chunk_tokens, False)):
        saved = saved_s(pool.step_cost, tokens, pool.engine.max_num_batched_tokens)
        assert (load_s(offload, offload.tiers[1], tokens) < saved) is faster


def test_the_resolved_scenario_runs_the_same(tmp_path: Path) -> None:
    result = of(cluster__kv_tiers=[HOST, DISK | {"capacity": "1TB"}])
    file = tmp_path / "again.yaml"
    file.write_text(dump_yaml(result.manifest["scenario"]))
    assert simulate(load_scenario(file)).summary() == result.summary()


@pytest.mark.parametrize(
    ("tiers", "changes", "said"),
    [
        ([HOST | {"capacity": "1MiB"}], {}, "hold no chunk of 16 tokens"),
        ({"tiers": [HOST], "chunk": 100}, {}, "chunk: 100 tokens are no whole number of KV blocks, which have 16"),
        ([{"kind": "disk", "capacity": "1TiB"}], {}, "how fast a disk is must be said; for example read: 6GB/s"),
        ([{"kind": "remote", "capacity": "1TiB"}], {}, "link: rdma-100"),
        ([{"kind": "remote", "capacity": "1TiB", "read": "3GB/s"}], {}, "of a store's read and write one is missing"),
        ([DISK, HOST], {}, "they go from near to far"),
        ([HOST, HOST], {}, "one host at most"),
        ([HOST | {"link": "rdma-400"}], {}, "over the GPUs' own links"),
        ([DISK | {"link": "rdma-400"}], {}, "a disk is in the machine"),
        ([HOST | {"read": "25Gb/s"}], {}, "'25Gb/s' is not a rate such as 25GB/s"),
        ([], {}, "a list of 1 or more"),
        ({"tiers": [HOST], "write_policy": "write_back"}, {}, "write_back is not modelled"),
        ({"tiers": [HOST, DISK], "prefetch": "timeout"}, {}, "'timeout' is not true or false"),
        (HOST, {}, "cluster.kv_tiers: this is one tier; write it as a list"),
        ([HOST], {"engine__enable_prefix_caching": False}, "set enable_prefix_caching true"),
        ([HOST], {"engine": "vllm-0.19"}, "take vllm-0.24 or later, or load: sync"),
        ([HOST], {"engine__scheduling_policy": "priority"}, "take vllm-0.32, or scheduling_policy fcfs"),
        ([HOST], {"engine": "sglang-0.5"}, "sglang-0.5 plans with Sglang"),
        ([HOST], {"model": "gpt-oss-20b"}, "not simulated for layers with windows"),
        ([HOST], {"cluster__pp": 2}, "pipeline stages (pp 2)"),
        ([HOST], {"cluster__events": [{"at": "1s", "fail": 1}]}, "where replicas come and go"),
        ([HOST], {"workload__n": 2}, "several samples of one prompt (n)"),
        ([HOST], {"engine__kv_offloading_size": 64}, "the pool has kv_tiers too"),
        (None, {"engine__kv_offloading_size": 64, "engine__kv_offloading_backend": "lmcache"}, "write its tiers as"),
        (None, {"engine__kv_offloading_size": 0.0001}, "hold no chunk"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(tiers: Any, changes: dict[str, Any], said: str) -> None:
    found = wrong(tiers, **changes)
    assert any(said in problem for problem in found), found


def test_steps_that_wait_for_loads_do_so_in_older_versions_too() -> None:
    assert not wrong({"tiers": [HOST], "load": "sync", "chunk": 256}, engine="vllm-0.19")
