"""Where TTFT and TPOT were spent: parts that add up, and equal a plain statement of what they are."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from calibrate.engine import FrontEndTime
from sim import steplog
from sim.changes import Changes, Event
from sim.cluster import Cluster, Pool
from sim.deployment import Classes, Deployment, PoolFacts
from sim.kvcache import KVCache
from sim.result import Result
from sim.routers import ROUTERS
from sim.schedulers import VllmV1
from sim.schedulers.vllm_v0 import VllmV0
from sim.source import OpenLoop, Requests
from tests.sim.engine import NO_TIME, LinearCost, simulate
from tests.sim.spent import check_spent
from tests.sim.test_handover import Wire, pools, workloads
from tests.sim.test_handover import run as run_split
from tests.sim.test_lives import LEAST, histories, simulated
from tests.sim.test_lockstep import Group
from tests.sim.test_lockstep import run as run_group
from tests.sim.test_oracle import clients, scenarios
from tests.sim.test_pipeline import Stages, shapes
from tests.sim.test_pipeline import simulate as run_pipeline
from tests.sim.test_sglang_split import run as run_sglang
from tests.sim.test_sglang_split import sides as sglang_sides

SHARED = [HealthCheck.function_scoped_fixture]


def deployed(*pools, ranks=1):
    """Pools of so many (replicas, role)."""
    return Deployment(
        tuple(
            PoolFacts(f"pool {i}", replicas, 1, 0, 100, 16, 1000, False, role, ranks)
            for i, (replicas, role) in enumerate(pools)
        )
    )


@pytest.fixture
def small_blocks():
    """Logs of several blocks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steplog, "BLOCK", 7)
        yield


@given(histories(), st.sampled_from(list(ROUTERS)), st.booleans())
@settings(max_examples=50, deadline=None)
def test_of_clusters_whose_replicas_come_and_go(history, router, closed):
    cluster, pools, _ = simulated(history, router, closed)
    deployment = deployed(*((pool.replicas, pool.role) for pool in pools), ranks=pools[0].ranks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steplog, "BLOCK", 7 if pools[0].ranks == 1 else steplog.BLOCK)
        check_spent(cluster.log, deployment)


@given(scenarios(), st.sampled_from([0.0, 0.25, 3.0]))
@settings(max_examples=50, deadline=None, suppress_health_check=SHARED)
@pytest.mark.usefixtures("small_blocks")
def test_of_an_engine_that_preempts_and_skips(scenario, request_s):
    policy, cost, blocks, block_size, asynchronous, rows, priority = scenario
    arrival, *counts = (np.array(column) for column in zip(*rows, strict=True))
    requests = Requests(*counts, priority=None if priority is None else np.array(priority))
    front_end = FrontEndTime(request_s, request_s / 50)
    _, log = simulate(policy, cost, blocks, block_size, asynchronous, OpenLoop(arrival, requests), front_end)
    assert check_spent(log, deployed((1, "unified"))) == len(rows)


@given(scenarios(), st.data())
@settings(max_examples=60, deadline=None)
def test_of_clients_that_are_far_away_and_try_again(scenario, data):
    policy, cost, blocks, block_size, asynchronous, rows, priority = scenario
    arrival, *counts = (np.array(column) for column in zip(*rows, strict=True))
    asked = {name: None if v is None else np.array(v) for name, v in data.draw(clients(len(rows))).items()}
    asked["first_token_s"] = asked.pop("first_s")
    requests = Requests(*counts, priority=None if priority is None else np.array(priority), **asked)
    _, log = simulate(policy, cost, blocks, block_size, asynchronous, OpenLoop(arrival, requests))
    check_spent(log, deployed((1, "unified")))


@given(st.integers(0, 1000), st.sampled_from([{}, {"preemption_mode": "swap", "swap_blocks": 1000}]))
@settings(max_examples=40, deadline=None)
def test_of_an_engine_that_pauses_for_prompts(seed, options):
    rng = np.random.default_rng(seed)
    n = 25
    output = rng.integers(1, 20, n)
    source = OpenLoop(np.cumsum(rng.exponential(2.0, n)), Requests(rng.integers(1, 60, n), output, output))
    _, log = simulate(VllmV0(100, 8, **options), LinearCost(), 25, 4, False, source)
    assert check_spent(log, deployed((1, "unified"))) == n


@given(st.integers(0, 1000), st.integers(1, 4), st.booleans())
@settings(max_examples=60, deadline=None)
def test_of_engines_that_step_together(seed, ranks, asynchronous):
    rng = np.random.default_rng(seed)
    n = 30
    rows = list(zip(np.cumsum(rng.exponential(1.0, n)), rng.integers(1, 60, n), rng.integers(1, 20, n), strict=True))
    log, _ = run_group(rows, ranks, Group(LinearCost()), VllmV1(32, 8), asynchronous=asynchronous)
    assert check_spent(log, deployed((ranks, "unified"), ranks=ranks)) == n


WIRES = st.sampled_from([Wire(), Wire(0.0, 0.003, 0.0), Wire(2.0, 0.03, 0.02)])


@given(workloads(), st.integers(1, 2), st.booleans(), st.sampled_from(["decode", "prefill"]), WIRES)
@settings(max_examples=80, deadline=None)
def test_of_prompts_that_are_sent_layer_by_layer(rows, replicas, asynchronous, first_token, wire):
    of = pools(replicas, replicas, 40, asynchronous, 4)
    cluster, *_ = run_split(rows, of, wire, first_token=first_token, layers=8, pull=False)
    sides = deployed((replicas, "prefill"), (replicas, "decode"))
    assert check_spent(cluster.log, sides, aligned=False) == len(rows)


def test_a_step_that_waits_until_its_layers_are_sent_by_hand():
    """See `test_pushed`: read in 2 s, sent 0.75 s after that, for which the step waits, and the last token again."""
    cluster, *_ = run_split([(0.0, 100, 4)], pools(), layers=4)
    facts = deployed((1, "prefill"), (1, "decode"))
    spent = Result(cluster.log, facts, {}, {}, open_loop=True, complete=True).summary()["spent"]
    expected = {"prefill": 2000.0, "transfer": 750.0, "first_decode": 1010.0}
    assert parts(spent["ttft_ms"]["mean"]) == pytest.approx(expected)


@given(workloads(), st.integers(1, 2), st.booleans(), WIRES)
@settings(max_examples=80, deadline=None)
def test_of_prompts_for_which_both_sides_have_blocks(rows, replicas, overlap, wire):
    cluster, *_ = run_sglang(rows, sglang_sides(replicas, replicas, overlap=overlap), wire)
    assert check_spent(cluster.log, deployed((replicas, "prefill"), (replicas, "decode"))) == len(rows)


@given(scenarios(), shapes, st.booleans())
@settings(max_examples=50, deadline=None)
def test_of_a_pipeline(scenario, shares, fills):
    """Its rows are what the pipeline needs for one batch more."""
    policy, cost, blocks, block_size, asynchronous, rows, _ = scenario
    kv = policy.cache(blocks, block_size)
    _, log = run_pipeline(policy, Stages(cost, shares), kv, asynchronous, fills or asynchronous, rows)
    assert check_spent(log, deployed((1, "unified")), aligned=False) == len(rows)


COST = LinearCost(base=1.0, token=0.01, decode=0.1, kv=0.0, attention=0.0)


def result(rows, changes=None, replicas=1, time=NO_TIME, classes=None):
    """Of (arrival, prompt, output) rows."""
    arrival, prompt, output = (np.array(column) for column in zip(*rows, strict=True))
    source = OpenLoop(arrival.astype(float), Requests(prompt, output, output))
    pool = Pool(replicas, VllmV1(512, 64), COST, 1000, 16, 10_000, False, time, KVCache)
    cluster = Cluster(source, [pool], LEAST, changes)
    assert cluster.run()
    facts = deployed((replicas, "unified"))
    return Result(cluster.log, facts, {}, {}, open_loop=True, complete=True, classes=classes)


def test_two_requests_by_hand():
    """A: 100 tokens, read in 2 s, then steps of 1.1 s. B comes in the first of them: its 200 tokens take a step of
    3.1 s with A's token, which alone would have taken 1.1 s; then both decode in steps of 1.2 s."""
    spent = result([(0.0, 100, 4), (2.5, 200, 2)]).summary()["spent"]
    first, second = {"prefill": 2.0}, {"queue": 0.6, "prefill": 2.0, "other_decodes": 1.1}
    assert parts(spent["ttft_ms"]["mean"]) == pytest.approx({
        "prefill": 2000.0, "queue": 300.0, "other_decodes": 550.0
    })  # fmt: skip
    assert parts(spent["ttft_ms"]["slowest"]) == pytest.approx({k: 1e3 * v for k, v in second.items()})
    assert sum(first.values()) < sum(second.values())
    a, b = {"decode": (1.1 + 1.1 + 1.2) / 3, "other_prompts": 2.0 / 3}, {"decode": 1.2}
    assert parts(spent["tpot_ms"]["slowest"]) == pytest.approx({k: 1e3 * v for k, v in a.items()})
    assert parts(spent["tpot_ms"]["mean"]) == pytest.approx({
        "decode": 500 * (a["decode"] + b["decode"]), "other_prompts": 500 * a["other_prompts"]
    })  # fmt: skip


def test_prompts_in_one_step_share_its_time_by_tokens():
    spent = result([(0.0, 100, 1), (0.0, 300, 1)]).summary()["spent"]
    assert parts(spent["ttft_ms"]["mean"]) == pytest.approx({"prefill": 2500.0, "other_prompts": 2500.0})
    assert "tpot_ms" not in spent, "no request has two tokens"


@pytest.mark.parametrize("bootstraps", [False, True])
def test_the_waits_for_two_pools_are_those_of_the_stages(bootstraps):
    """Which of the two comes first differs."""
    rows = [(0.4 * i, 50 + i, 10) for i in range(30)]
    cluster, *_ = run_sglang(rows) if bootstraps else run_split(rows)
    facts = deployed((1, "prefill"), (1, "decode"))
    s = Result(cluster.log, facts, {}, {}, open_loop=True, complete=True).summary()
    waits = [s["pools"][f"pool {i}"]["mean_queue_ms"] for i in range(2)]
    assert waits == pytest.approx([s["handed_over"][f"mean_{stage}_ms"] for stage in ("queue", "decode_queue")])
    assert min(waits) >= 0
    mean = s["spent"]["ttft_ms"]["mean"]
    assert mean["queue"] + mean["decode_queue"] + mean["front_end"] == pytest.approx(sum(waits))


def test_what_was_lost_with_a_replica_and_the_front_end():
    """Lost at 1 s, again with a replica at 11; 0.5 s in its front end."""
    changes = Changes((1,), events=(Event(1.0, "fail", 0, 0, repair_s=10.0),), retries=1)
    spent = result([(0.0, 100, 1)], changes, time=FrontEndTime(0.5, 0.0)).summary()["spent"]
    assert parts(spent["ttft_ms"]["mean"]) == pytest.approx({"no_replica": 11e3, "front_end": 500.0, "prefill": 2e3})


def test_classes_add_up_to_all_and_each_has_its_own_slowest():
    rows = [(0.5 * i, 100 + 10 * (i % 7), 1 + i % 5) for i in range(300)]
    index = np.arange(300) % 2
    r = result(rows, classes=Classes(index, ("even", "odd"), {}))
    s = r.summary()
    for name, which in (("even", 0), ("odd", 1)):
        for metric in ("ttft", "tpot"):
            values = r.column(f"{metric}_s")[index == which]
            values = np.sort(values[~np.isnan(values)])
            slowest = values[-int(np.ceil(len(values) / 100)) :]
            spent = s["classes"][name]["spent"][f"{metric}_ms"]
            assert sum(spent["mean"].values()) == pytest.approx(1e3 * values.mean())
            assert sum(spent["slowest"].values()) == pytest.approx(1e3 * slowest.mean())
    assert sum(s["spent"]["ttft_ms"]["mean"].values()) == pytest.approx(s["mean_ttft_ms"])
    assert sum(s["spent"]["tpot_ms"]["mean"].values()) == pytest.approx(s["mean_tpot_ms"])


def parts(means):
    """Those that are not zero."""
    return {name: value for name, value in means.items() if value > 1e-6}


def test_no_steps_and_nobody_finished():
    changes = Changes((1,), events=(Event(1.0, "fail", 0, 0, repair_s=inf),), retries=0)
    assert result([(0.0, 1000, 1)], changes).summary()["spent"] == {}
