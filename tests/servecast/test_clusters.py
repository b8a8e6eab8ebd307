"""Several pools, from the scenario to the result: who serves what, prefill and decode apart, and what is refused."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import polars as pl
import pytest

from servecast.errors import ServecastError
from servecast.run import Result, simulate
from servecast.scenario import load_scenario
from servecast.setup import set_up
from servecast.yamlfile import dump_yaml

REPO = Path(__file__).parents[2]
SPLIT, FLEET = REPO / "scenarios" / "split-serving.yaml", REPO / "scenarios" / "mixed-fleet.yaml"
SMALL = "workload.num_requests=200"
MODELS = """
name: two models
model: llama-3.1-8b
engine: vllm-0.19
cluster:
  router: least-outstanding
  pools:
    - {gpu: h100-sxm}
    - {gpu: h100-sxm, model: qwen3-8b, engine: {max_num_seqs: 8}}
    - {gpu: a100-sxm, engine: {preset: sglang-0.5, max_running_requests: 16}}
workload:
  num_requests: 300
  arrivals: {kind: poisson, rate: 6}
  classes:
    - name: chat
      model: llama-3.1-8b
      lengths: {prompt: {kind: fixed, tokens: 500}, output: {kind: fixed, tokens: 50}}
    - name: code
      model: qwen3-8b
      lengths: {prompt: {kind: fixed, tokens: 900}, output: {kind: fixed, tokens: 80}}
"""


def of(path: Path, *overrides: str) -> Result:
    return simulate(load_scenario(path, overrides))


@pytest.fixture(scope="module")
def split() -> Result:
    return of(SPLIT, SMALL)


def test_stages_of_a_split_add_up_to_the_first_token(split: Result) -> None:
    s = split.summary()
    handed = s["handed_over"]
    assert handed["requests"] == s["completed"] == s["pools"]["prefill"]["completed"] == 200
    stages = ("queue", "prefill", "decode_queue", "link_queue", "transfer", "first_decode")
    assert sum(handed[f"mean_{stage}_ms"] for stage in stages) == pytest.approx(s["mean_ttft_ms"])
    assert all(handed[f"mean_{stage}_ms"] > 0 for stage in stages)
    assert handed["tokens"] == s["total_input_tokens"]


def test_what_moves_is_saved_beside_the_rest(split: Result, tmp_path: Path) -> None:
    split.save(tmp_path)
    moved = pl.read_parquet(tmp_path / "transfers.parquet")
    assert moved.height == 200
    assert moved["bytes"].min() > 16 * 131_072  # type: ignore[operator]
    assert set(moved["prefill_replica"]) == {0, 1}
    assert set(moved["decode_replica"]) == {2, 3}
    assert "were handed over from prefill to decode" in (tmp_path / "report.html").read_text("utf-8")


def test_a_split_gives_steady_gaps_and_later_first_tokens(split: Result) -> None:
    both = of(SPLIT, SMALL, 'cluster.pools=[{"gpu":"h100-sxm","replicas":4}]', "cluster.split=null").summary()
    s = split.summary()
    assert s["p99_itl_ms"] < 0.25 * both["p99_itl_ms"]
    assert s["mean_ttft_ms"] > 1.5 * both["mean_ttft_ms"]


def test_connector_link_and_side_of_the_first_token_matter() -> None:
    def ttft(*overrides: str) -> float:
        return float(of(SPLIT, SMALL, *overrides).summary()["mean_ttft_ms"])

    nvlink, network = ttft(), ttft("cluster.split.link=rdma-400")
    assert network < nvlink, "posting descriptors costs more between GPUs of a node"
    assert ttft("cluster.split.link=rdma-400", "cluster.split.connector=mooncake") != network
    assert ttft("cluster.split.first_token=prefill") < 0.8 * nvlink
    local = of(SPLIT, SMALL, "cluster.split.local_tokens=3000").summary()
    assert 20 < local["handed_over"]["requests"] < 150


def test_what_is_sent_while_a_prompt_is_read_need_not_be_waited_for() -> None:
    """Layer by layer, only what the last layers leave is waited for, in a step that takes longer for it."""
    whole, layers = (of(SPLIT, SMALL, f"cluster.split.connector={name}") for name in ("nixl", "p2p-nccl"))
    later, sooner = (each.summary()["handed_over"] for each in (whole, layers))
    assert sooner["mean_transfer_ms"] + sooner["mean_link_queue_ms"] < 0.1 * (
        later["mean_transfer_ms"] + later["mean_link_queue_ms"]
    )
    assert sooner["bytes"] == later["bytes"]
    assert layers.summary()["mean_ttft_ms"] < whole.summary()["mean_ttft_ms"]


def test_models_share_a_fleet(tmp_path: Path) -> None:
    file = tmp_path / "two.yaml"
    file.write_text(MODELS)
    result = of(file)
    rows = result.requests.group_by("class").agg(pl.col("replica").unique().sort()).to_dicts()
    assert {row["class"]: row["replica"] for row in rows} == {"chat": [0, 2], "code": [1]}
    pools = result.manifest["pools"]
    assert [pool["model"] for pool in pools] == ["llama-3.1-8b", "qwen3-8b", "llama-3.1-8b"]
    assert [pool["name"] for pool in pools] == ["h100-sxm 1", "h100-sxm 2", "a100-sxm"]
    assert pools[1]["engine_options"]["max_num_seqs"]["value"] == 8
    assert pools[2]["engine"] == "sglang-0.5"
    assert sum(pool["completed"] for pool in result.summary()["pools"].values()) == 300


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("workload.classes.1.model=null", "workload.classes.1.model: missing; which of the models that are served"),
        ("workload.classes.0.model=qwen3-4b", "workload.classes.0.model: no pool serves qwen3-4b"),
        ("workload.classes.0.model=qwen-8b", "workload.classes.0.model: "),
        ("cluster.pools.1.gpu=l4", "cluster.pools.1.engine"),
    ],
)
def test_models_that_nobody_serves(tmp_path: Path, change: str, expected: str) -> None:
    file = tmp_path / "two.yaml"
    file.write_text(MODELS)
    with pytest.raises(ServecastError) as caught:
        set_up(load_scenario(file, [change]))
    assert any(expected in problem for problem in caught.value.problems), caught.value.problems


@pytest.mark.parametrize("path", [SPLIT, FLEET])
def test_resolved_pools_load_again_as_the_same(path: Path, tmp_path: Path) -> None:
    setup = set_up(load_scenario(path, [SMALL, "cluster.pools.1.tp=2"]))
    again = tmp_path / "again.yaml"
    again.write_text(dump_yaml(setup.resolved()))
    assert simulate(load_scenario(again)).summary() == simulate(setup).summary()


def test_what_can_handle_one_pool_says_so() -> None:
    with pytest.raises(ServecastError, match="works on a scenario with one pool"):
        _ = set_up(load_scenario(FLEET, [SMALL])).pool


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (["cluster.pools.1.role=prefill"], "cluster.pools.0.role: a prefill pool needs a decode pool"),
        (["cluster.pools.0.role=decode"], "cluster.pools.0.role: a decode pool needs a prefill pool"),
        (["cluster.pools.1.role=unified"], "is served by unified pools and by split ones"),
        (["cluster.pools.1.gpu=h200-sxm"], "cluster.split.link: missing; 4 GPUs of h100-sxm, h200-sxm"),
        (
            ["cluster.pools.1.replicas=8"],
            "cluster.split.link: missing; 10 GPUs of h100-sxm are not all joined by their own link (which joins 8)",
        ),
        (["cluster.split.link=rdma"], "cluster.split.link: "),
        (["cluster.split.connector=nxil"], "did you mean 'nixl'"),
        (
            ["cluster.split.connector=p2p-nccl", "engine.preset=vllm-0.32"],
            "vllm-0.32 has no p2p-nccl any more; take vllm-0",
        ),
        (
            ["cluster.split.connector=p2p-nccl", 'cluster.pools.0.failures={"mtbf":"1h","repair":"1min"}'],
            "p2p-nccl is not simulated where replicas come and go",
        ),
        (["cluster.split.connector=sglang-nixl"], "cluster.split.connector: "),
        (["cluster.split.local_tokens=-1"], "cluster.split.local_tokens"),
        (["cluster.split.router=session-affinity"], "cluster.split.router: session-affinity goes by sessions"),
        (["engine.preset=vllm-0.6"], "are simulated with vLLM's V1 scheduler and with SGLang's; vllm-0.6"),
        (
            ["engine.kv_cache_dtype=fp8", "cluster.pools.1.engine.kv_cache_dtype=auto"],
            "KV is fp8 on the prefill side, bf16 on the decode",
        ),
        (["model=gpt-oss-20b"], "not simulated for layers with windows"),
        (["workload.n=2"], "several samples of one prompt (n) are not simulated where prefill and decode are apart"),
    ],
)
def test_a_split_that_cannot_be(changes: list[str], expected: str) -> None:
    with pytest.raises(ServecastError) as caught:
        set_up(load_scenario(SPLIT, [SMALL, *changes]))
    assert any(expected in problem for problem in caught.value.problems), caught.value.problems


SGLANG = ('engine={"preset":"sglang-0.5"}', "cluster.split.link=rdma-400")


def test_sglang_reads_a_prompt_once_the_decode_side_has_its_blocks(tmp_path: Path) -> None:
    result = of(SPLIT, SMALL, *SGLANG)
    s = result.summary()
    handed = s["handed_over"]
    assert handed["requests"] == s["completed"] == 200
    stages = ("decode_queue", "queue", "prefill", "link_queue", "transfer", "first_decode")
    assert sum(handed[f"mean_{stage}_ms"] for stage in stages) == pytest.approx(s["mean_ttft_ms"])
    assert all(handed[f"mean_{stage}_ms"] > 0 for stage in stages)
    assert (result.transfers["reserved_s"] < result.transfers["read_s"]).all()
    options = [pool["engine_options"] for pool in result.manifest["pools"]]
    assert [o["disable_radix_cache"]["value"] for o in options] == [False, True], "as SGLang's decode servers do"
    assert result.steps["prefill_tokens"].sum() == s["total_input_tokens"], "no token is read twice"
    again = tmp_path / "again.yaml"
    again.write_text(dump_yaml(set_up(load_scenario(SPLIT, [SMALL, *SGLANG])).resolved()))
    assert simulate(load_scenario(again)).summary() == s


def test_a_small_decode_pool_delays_sglangs_prefill_and_fills_vllms() -> None:
    """The decode side has room for a few prompts at a time: SGLang's prefill side holds no more than these."""
    small = ("cluster.pools.1.replicas=1", "cluster.split.link=rdma-400")
    sglang = of(SPLIT, SMALL, *small, SGLANG[0], "cluster.pools.1.engine.max_total_tokens=40000").summary()
    vllm = of(SPLIT, SMALL, *small, "cluster.pools.1.engine.num_gpu_blocks_override=2500").summary()
    assert sglang["handed_over"]["mean_decode_queue_ms"] > 1000
    assert vllm["handed_over"]["mean_decode_queue_ms"] > 1000
    held = [s["pools"]["prefill"]["kv_peak_fraction"] for s in (sglang, vllm)]
    assert held[0] < 0.3 * held[1]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (["cluster.split.first_token=prefill"], "SGLang's decode side streams all tokens"),
        (["cluster.split.local_tokens=10"], "SGLang's decode side reads no prompts itself"),
        (["cluster.split.connector=nixl"], "nixl is vllm's, the prefill side's engine sglang-0.5"),
        (["cluster.split.link=null"], "there are some for rdma"),
        (
            ["cluster.pools.1.engine.preset=vllm-0.19"],
            "sglang-mooncake is sglang's, the decode side's engine vllm-0.19",
        ),
        (["workload.n=2"], "several samples of one prompt"),
        (["engine.disaggregation_mode=prefill"], "pools have a role, prefill or decode"),
    ],
)
def test_what_a_split_of_sglang_cannot_be(changes: list[str], expected: str) -> None:
    with pytest.raises(ServecastError) as caught:
        set_up(load_scenario(SPLIT, [SMALL, *SGLANG, *changes]))
    assert any(expected in problem for problem in caught.value.problems), caught.value.problems


def test_a_split_without_pools_is_refused() -> None:
    with pytest.raises(ServecastError, match=r"cluster\.split: there are no prefill and decode pools"):
        set_up(load_scenario(FLEET, [SMALL, "cluster.split.connector=nixl"]))


RANKS = ["model=qwen3-30b-a3b", "cluster.gpu=h100-sxm", "cluster.dp=4", "cluster.ep=true"]
QUICKSTART = REPO / "scenarios" / "quickstart.yaml"


def test_ranks_that_share_experts_step_together() -> None:
    busy = [SMALL, "workload.arrivals.rate=60", "cluster.router=least-outstanding"]
    result = of(QUICKSTART, *busy, *RANKS, "cluster.replicas=2")
    s = result.summary()
    assert (s["gpus"], s["completed"], result.deployment.replicas) == (8, 200, 8)
    assert result.manifest["pools"][0]["dp"] == 4
    steps = result.steps
    for first in (0, 4):
        group = steps.filter(pl.col("replica").is_between(first, first + 3)).sort("start_s", "replica")
        times = {(row["start_s"], row["end_s"]) for row in group.to_dicts()}
        ends = sorted(times)
        assert all(end <= start for (_, end), (start, _) in pairwise(ends)), "no two steps overlap"
    alone = of(QUICKSTART, *busy, *RANKS[:2], "cluster.replicas=8").summary()
    assert s["mean_tpot_ms"] < 0.9 * alone["mean_tpot_ms"], "each GPU reads a quarter of the experts"


def test_ranks_that_share_experts_fail_together() -> None:
    """The second group of four, under load; with a failure after the end all is as without it."""
    busy = [SMALL, "workload.arrivals.rate=60", "cluster.router=least-outstanding", *RANKS, "cluster.replicas=2"]
    result = of(QUICKSTART, *busy, 'cluster.events=[{"at":"2s","fail":1,"repair":"1s"}]')
    s = result.summary()
    assert result.replicas.filter(pl.col("change") == "failed")["replica"].to_list() == [4, 5, 6, 7]
    assert (s["replica_failures"], s["completed"], s["gpus"]) == (1, 200, 8)
    assert s["retries"] > 4
    assert s["gpu_seconds"] == pytest.approx(8 * s["duration"] - 4)
    plain, late = (of(QUICKSTART, *busy, *more) for more in ((), ('cluster.events=[{"at":"10000s","fail":1}]',)))
    assert plain.requests.equals(late.requests)
    assert plain.steps.equals(late.steps)


def test_how_experts_are_reached_matters() -> None:
    def tpot(*overrides: str) -> float:
        return float(of(QUICKSTART, SMALL, *RANKS, *overrides).summary()["mean_tpot_ms"])

    near = tpot()
    assert tpot("cluster.experts.all2all=deepep_low_latency") != near
    hot = [8.0] * 16 + [1.0] * 112
    assert tpot(f"cluster.experts.load={hot}", "workload.arrivals.rate=60") > tpot("workload.arrivals.rate=60")
    far = tpot("cluster.dp=16", "cluster.network=rdma-400")
    assert far != near


LATENT = ["model=deepseek-v3", "cluster.gpu=h200-sxm", "cluster.tp=8", "engine.max_model_len=32768"]
NEW = ["engine.preset=vllm-0.32"]
LONG = ["workload.lengths.prompt={kind: fixed, tokens: 4000}", "workload.arrivals.rate=2"]


def test_ranks_that_share_the_tokens_of_a_cache_hold_more_of_them() -> None:
    plain, shared = (of(QUICKSTART, SMALL, *LATENT, *LONG, f"cluster.dcp={n}") for n in (1, 8))
    facts = [result.manifest["pools"][0] for result in (plain, shared)]
    assert [f["dcp"] for f in facts] == [1, 8]
    assert facts[1]["memory"]["num_gpu_blocks"] == facts[0]["memory"]["num_gpu_blocks"]
    assert facts[1]["memory"]["block_size"] == 8 * facts[0]["memory"]["block_size"]
    one, eight = plain.summary(), shared.summary()
    assert (eight["gpus"], eight["completed"]) == (one["gpus"], one["completed"]) == (8, 200)
    assert 0 < eight["kv_mean_fraction"] < 0.25 * one["kv_mean_fraction"]


def test_blocks_of_a_shared_cache_are_found_again_as_wholes() -> None:
    """Blocks of 128 tokens, where those of 16 are found."""
    sessions = ["workload={mix: agent, num_sessions: 4, rate: 0.05}", *LATENT]
    found = [of(QUICKSTART, *sessions, f"cluster.dcp={n}").summary()["prefix_cache_hit_rate"] for n in (1, 8)]
    assert 0.5 < found[1] < found[0], "what is no whole block of all ranks is not found"


def test_ranks_of_a_step_read_prompts_sooner() -> None:
    few = [*LATENT, *NEW, *LONG, "workload.arrivals.rate=0.5", "workload.num_requests=40"]
    one, two = (of(QUICKSTART, *few, "cluster.tp=4", f"cluster.pcp={n}", "memory.weights=80GB") for n in (1, 2))
    assert (one.summary()["gpus"], two.summary()["gpus"]) == (4, 8)
    assert two.summary()["mean_ttft_ms"] < 0.8 * one.summary()["mean_ttft_ms"]
    assert two.manifest["pools"][0]["pcp"] == 2


def test_halves_of_steps_overlap_what_is_sent() -> None:
    group = [
        *LATENT[:2], "cluster.dp=16", "cluster.ep=true", "cluster.network=rdma-400", "engine.max_model_len=8192",
        "cluster.experts.all2all=deepep_low_latency", "workload.num_requests=4000", "workload.arrivals.rate=400",
        "cluster.router=least-outstanding",
    ]  # fmt: skip
    whole = of(QUICKSTART, *group).summary()
    halved = of(QUICKSTART, *group, "engine.enable_dbo=true").summary()
    assert halved["completed"] == whole["completed"] > 3900
    assert halved["mean_tpot_ms"] != whole["mean_tpot_ms"]
    never = ["engine.dbo_decode_token_threshold=100000", "engine.dbo_prefill_token_threshold=100000"]
    off = of(QUICKSTART, *group, "engine.enable_dbo=true", *never).summary()
    assert off["mean_tpot_ms"] == whole["mean_tpot_ms"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (["cluster.dcp=2"], "cluster.dcp: dcp 2 does not divide tp 1"),
        (["cluster.tp=2", "cluster.dcp=2"], "cluster.dcp: dcp 2: only 1 of 2 GPUs hold the same KV heads; at most 1"),
        ([*LATENT, "cluster.pcp=2"], "cluster.pcp: pcp 2: vllm-0.19 cannot run it (prefill context parallelism); set"),
        ([*LATENT, *NEW, "cluster.pcp=2"], "cluster.network: 16 GPUs (tp 8 x pp 1 x dp 1 x pcp 2) are more than the 8"),
        (
            [*LATENT, *NEW, "cluster.pcp=2", "cluster.dcp=2"],
            "cluster.pcp: pcp 2: with dcp vLLM runs models with sparse",
        ),
        ([*LATENT[:3], "engine.preset=sglang-0.5", "cluster.dcp=2"], "cluster.dcp: dcp 2: sglang-0.5 cannot run it"),
        (["engine.enable_dbo=true"], "engine.enable_dbo: halves of a step overlap what data parallel ranks send"),
        ([*RANKS, "engine.enable_dbo=true"], "engine.enable_dbo: only DeepEP's traffic overlaps; set cluster.ep, and"),
        (["cluster.dp=2"], "cluster.dp: llama-3.1-8b has no experts, and engines that share none step on their own"),
        ([*RANKS, "cluster.dp=16"], "cluster.network: 16 GPUs (tp 1 x pp 1 x dp 16) are more than the 8 h100-sxm"),
        ([*RANKS, "cluster.ep=false", "cluster.experts.all2all=deepep_auto"], "cluster.experts.all2all: "),
        ([*RANKS, "cluster.ep=false", "cluster.experts.redundant=8"], "cluster.experts.redundant: "),
        ([*RANKS, "cluster.experts.al2all=naive"], "did you mean 'all2all'"),
        ([*RANKS, "cluster.experts.load=skewed"], "none of balanced, uniform, power_law_<alpha>"),
        ([*RANKS, "cluster.experts.load=[0.5, 0.5]"], "cluster.experts.load: 2 shares; qwen3-30b-a3b has 128 experts"),
        ([*RANKS, "cluster.experts.load=[0]"], "cluster.experts.load: a list of shares has a number of 0 or more"),
        ([*RANKS, "cluster.dp=0"], "cluster.dp: 0 is not 1 or more"),
        (["cluster.ep=true"], "cluster.ep: "),
        ([*RANKS, "cluster.pp=2"], "cluster.pp: stages of engines that share experts (dp) are not modelled"),
    ],
)
def test_a_layout_that_cannot_be(changes: list[str], expected: str) -> None:
    with pytest.raises(ServecastError) as caught:
        set_up(load_scenario(QUICKSTART, [SMALL, *changes]))
    assert any(expected in problem for problem in caught.value.problems), caught.value.problems


QUICK = REPO / "scenarios" / "quickstart.yaml"
WORKLOAD = """
workload:
  num_requests: 100
  arrivals: {kind: poisson, rate: 6}
  lengths: {prompt: {kind: fixed, tokens: 500}, output: {kind: fixed, tokens: 50}}
"""
FAILING = (
    "workload.num_requests=400", "cluster.replicas=2", "cluster.retries=1",
    'cluster.failures={"mtbf":"20s","repair":"10s"}', 'cluster.events=[{"at":"5s","fail":1,"repair":"4s"}]',
)  # fmt: skip


def test_failures_are_in_the_result_and_add_up(tmp_path: Path) -> None:
    result = of(QUICK, *FAILING)
    s = result.summary()
    assert s["submitted"] == 400 == s["completed"] + s["failed"]
    assert s["replica_failures"] >= 3
    assert s["retries"] > 0
    assert s["failed"] == result.requests.filter(pl.col("status") == "failed").height
    assert s["gpus"] == 2
    log = result.replicas
    there = 0.0
    for number in (0, 1):  # up at 0, failed, up, failed, ...
        times = [row["time_s"] for row in log.to_dicts() if row["replica"] == number]
        ends = [min(t, s["duration"]) for t in (*times, s["duration"])]
        there += sum(b - a for a, b in list(pairwise(ends))[::2])
    assert set(log["change"]) == {"up", "failed"}
    assert s["gpu_seconds"] == pytest.approx(there)
    result.save(tmp_path)
    assert pl.read_parquet(tmp_path / "replicas.parquet").equals(log)
    page = (tmp_path / "report.html").read_text("utf-8")
    assert f"{s['retries']} requests sent anew" in page
    assert "dotted: all that exist" in page
    assert set(of(QUICK, "workload.num_requests=20").summary()) < set(s)


def test_what_never_happens_changes_nothing() -> None:
    """With a failure after the end, every request and step is as without it."""
    events = 'cluster.events=[{"at":"10000s","fail":0}]'
    for path, name in ((FLEET, "new"), (SPLIT, "prefill")):
        plain, with_it = (of(path, SMALL, *more) for more in ((), (events.replace("}", f',"pool":"{name}"}}'),)))
        assert plain.requests.equals(with_it.requests)
        assert plain.steps.equals(with_it.steps)


def test_limits_are_counted_with_their_reasons() -> None:
    s = of(QUICK, SMALL, "cluster.limits.outstanding=20", "cluster.limits.prompt_tokens=2000").summary()
    assert set(s["rejected_reasons"]) == {"over_outstanding", "over_prompt_tokens"}
    assert sum(s["rejected_reasons"].values()) == s["rejected"] == s["submitted"] - s["completed"]
    assert s["max_concurrent_requests"] <= 20
    s = of(QUICK, SMALL, *RANKS, "cluster.limits.outstanding_per_replica=2").summary()
    assert s["max_concurrent_requests"] == 8, "for each of the four engines"


def test_a_cold_start_that_nobody_gave_is_said_to_be_an_estimate() -> None:
    rule = 'cluster.autoscale={"min":1,"max":2,"target":20}'
    [note] = [n for n in of(QUICK, SMALL, rule).manifest["notes"] if "takes" in n]
    assert "106 s from its start until it serves, which is an estimate" in note
    assert not [n for n in of(QUICK, SMALL, rule, "cluster.cold_start=30s").manifest["notes"] if "takes" in n]


def test_the_example_of_the_documentation_is_one(tmp_path: Path) -> None:
    text = (REPO / "docs" / "clusters.md").read_text("utf-8").partition("## Replicas that fail")[2]
    file = tmp_path / "example.yaml"
    head = MODELS.partition("cluster:")[0]
    file.write_text(head + re.findall(r"^```yaml\n(.*?)^```$", text, flags=re.M | re.S)[0] + WORKLOAD)
    setup = set_up(load_scenario(file))
    assert setup.changes is not None
    assert (setup.changes.initially, [pool.replicas for pool in setup.pools]) == ((4, 2), [6, 6])
    assert setup.changes.retries == 2


RULE = '{"min":3,"max":2,"metric":"slo","target":2}'


@pytest.mark.parametrize(
    ("path", "changes", "expected"),
    [
        (QUICK, ["cluster.replicas=0"], "cluster.replicas: 0 is not 1 or more"),
        (QUICK, [f"cluster.autoscale={RULE}"], "cluster.autoscale.min: 3 is more than max, 2"),
        (QUICK, [f"cluster.autoscale={RULE}"], "cluster.autoscale.target: 2 is no share"),
        (QUICK, [f"cluster.autoscale={RULE}"], "cluster.autoscale.window: missing"),
        (QUICK, ['cluster.autoscale={"min":2,"max":3,"target":9}'], "cluster.replicas: 1 at the start are not from"),
        (QUICK, ['cluster.autoscale={"min":1,"max":3,"target":9}', "engine=sglang-0.5"], "cluster.cold_start: missing"),
        (QUICK, ['cluster.events=[{"at":"1s","start":2}]', "engine=sglang-0.5"], "cluster.cold_start: missing"),
        (QUICK, ['cluster.events=[{"at":"-1s","fail":0}]'], "cluster.events.0.at: '-1s' is negative"),
        (QUICK, ['cluster.events=[{"at":"1s","fail":0,"drain":0}]'], "cluster.events.0: one of fail, drain and start"),
        (QUICK, ['cluster.events=[{"at":"1s","drain":0,"repair":"1s"}]'], "cluster.events.0.repair: only what fails"),
        (QUICK, ['cluster.events=[{"at":"1s","fail":1}]'], "cluster.events.0.fail: there is no replica 1"),
        (QUICK, ["cluster.retries=2"], "cluster.retries: nothing fails here"),
        (QUICK, ["cluster.limits={}"], "cluster.limits: empty"),
        (
            QUICK,
            [*RANKS, "cluster.replicas=2", 'cluster.events=[{"at":"1s","fail":2}]'],
            "cluster.events.0.fail: there is no replica 2; the pool has 0 to 1",
        ),
        (QUICK, ['cluster.failures={"mtbf":"0s"}'], "cluster.failures.mtbf: '0s' is not 1 or more"),
        (FLEET, ['cluster.events=[{"at":"1s","fail":0}]'], "cluster.events.0.pool: missing; there are new, old"),
        (
            FLEET,
            ['cluster.events=[{"at":"1s","fail":0,"pool":"odl"}]'],
            "cluster.events.0.pool: there is no pool 'odl'",
        ),
        (
            FLEET,
            [
                'cluster.pools.0.autoscale={"min":1,"max":3,"target":9}',
                'cluster.events=[{"at":"1s","drain":0,"pool":"new"}]',
            ],
            "cluster.events.0.drain: how many the pool has, its autoscaler says",
        ),
        (
            SPLIT,
            [
                'cluster.pools.1.autoscale={"min":1,"max":3,"metric":"slo","target":0.9,"window":"1min"}',
                "slo.tpot=null",
            ],
            "cluster.pools.1.autoscale.metric: slo needs a tpot",
        ),
    ],
)
def test_changes_that_cannot_be(path: Path, changes: list[str], expected: str) -> None:
    with pytest.raises(ServecastError) as caught:
        set_up(load_scenario(path, changes))
    assert any(expected in problem for problem in caught.value.problems), caught.value.problems


def test_a_scenario_with_all_of_it_loads_again_as_the_same(tmp_path: Path) -> None:
    setup = set_up(load_scenario(QUICK, [*FAILING, "cluster.limits.outstanding=90", "cluster.cold_start=9s"]))
    again = tmp_path / "again.yaml"
    again.write_text(dump_yaml(setup.resolved()))
    assert simulate(load_scenario(again)).summary() == simulate(setup).summary()
