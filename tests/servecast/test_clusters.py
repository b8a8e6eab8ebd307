"""Several pools, from the scenario to the result: who serves what, prefill and decode apart, and what is refused."""

from __future__ import annotations

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
        (["cluster.pools.1.replicas=8"], "cluster.split.link: missing; 10 GPUs of h100-sxm are not in one node (of 8)"),
        (["cluster.split.link=rdma"], "cluster.split.link: "),
        (["cluster.split.connector=nxil"], "did you mean 'nixl'"),
        (["cluster.split.connector=p2p-nccl"], "sends layers while it reads, which is not simulated yet"),
        (["cluster.split.connector=sglang-nixl"], "cluster.split.connector: "),
        (["cluster.split.local_tokens=-1"], "cluster.split.local_tokens"),
        (["cluster.split.router=session-affinity"], "cluster.split.router: session-affinity goes by sessions"),
        (["engine.preset=vllm-0.6"], "are simulated with vLLM's V1 scheduler; vllm-0.6 plans with VllmV0"),
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


def test_how_experts_are_reached_matters() -> None:
    def tpot(*overrides: str) -> float:
        return float(of(QUICKSTART, SMALL, *RANKS, *overrides).summary()["mean_tpot_ms"])

    near = tpot()
    assert tpot("cluster.experts.all2all=deepep_low_latency") != near
    far = tpot("cluster.dp=16", "cluster.network=rdma-400")
    assert far != near


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (["cluster.dp=2"], "cluster.dp: llama-3.1-8b has no experts, and engines that share none step on their own"),
        ([*RANKS, "cluster.dp=16"], "cluster.network: 16 GPUs (tp 1 x pp 1 x dp 16) are more than the 8 h100-sxm"),
        ([*RANKS, "cluster.ep=false", "cluster.experts.all2all=deepep_auto"], "cluster.experts.all2all: "),
        ([*RANKS, "cluster.ep=false", "cluster.experts.redundant=8"], "cluster.experts.redundant: "),
        ([*RANKS, "cluster.experts.al2all=naive"], "did you mean 'all2all'"),
        ([*RANKS, "cluster.dp=0"], "cluster.dp: 0 is not 1 or more"),
        (["cluster.ep=true"], "cluster.ep: "),
        (["cluster.pp=2"], "pipeline parallelism is not modelled yet"),
    ],
)
def test_a_layout_that_cannot_be(changes: list[str], expected: str) -> None:
    with pytest.raises(ServecastError) as caught:
        set_up(load_scenario(QUICKSTART, [SMALL, *changes]))
    assert any(expected in problem for problem in caught.value.problems), caught.value.problems
