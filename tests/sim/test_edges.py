"""What is defined at the edges, and how much work the simulator may spend on a request."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from servecast.errors import ServecastError
from sim.batch import Batch
from sim.cluster import Cluster, Pool
from sim.schedulers.vllm_v1 import VllmV1
from sim.source import ClosedLoop, OpenLoop, Requests, Sessions
from sim.steplog import OUTCOMES, UNFINISHED
from tests.sim.engine import NO_TIME, LinearCost, simulate


def requests(rows):
    """An open loop of (arrival, prompt, output[, max_tokens]) rows."""
    columns = [
        [r[0] for r in rows],
        *([r[i] for r in rows] for i in (1, 2)),
        [r[3] if len(r) > 3 else r[2] for r in rows],
    ]
    arrays = [np.array(c, dtype=float if i == 0 else np.int64) for i, c in enumerate(columns)]
    return OpenLoop(arrays[0], Requests(*arrays[1:]))


def outcomes(log):
    rows = log.requests.table()
    order = np.argsort(rows["id"])
    return [OUTCOMES[int(i)] for i in rows["outcome"][order]]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_prompts_at_the_limit(asynchronous):
    """A prompt must leave room for a token, and prompt + max_tokens must fit, as at vLLM's front end."""
    source = requests(
        [(0, 99, 1), (0, 100, 1), (0, 101, 1), (0, 50, 50), (0, 50, 51), (0, 50, 10, 51), (0, 50, 10, 50)]
    )
    _, log = simulate(VllmV1(512, 8), LinearCost(), 100, 16, asynchronous, source, max_model_len=100)
    assert outcomes(log) == [
        "length", "prompt_too_long", "prompt_too_long", "length", "over_max_model_len", "over_max_model_len", "stop",
    ]  # fmt: skip


def test_a_request_larger_than_the_pool_is_rejected_and_the_rest_runs():
    source = requests([(0, 33, 1), (0, 32, 1), (0, 30, 3), (0, 30, 4), (1, 5, 5)])
    _, log = simulate(VllmV1(64, 8), LinearCost(), 3, 16, False, source)
    assert outcomes(log) == ["over_kv_cache", "length", "length", "over_kv_cache", "length"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_one_token_outputs_finish_with_their_prompt(asynchronous):
    _, log = simulate(VllmV1(64, 8), LinearCost(), 100, 16, asynchronous, requests([(0, 10, 1), (0, 20, 1), (5, 3, 1)]))
    rows = log.requests.table()
    assert (rows["first_token_s"] == rows["finish_s"]).all()
    assert log.steps.table()["decodes"].sum() == 0


def test_equal_arrival_times_share_the_first_step_in_order():
    _, log = simulate(VllmV1(64, 8), LinearCost(), 100, 16, False, requests([(2.5, 8, 4)] * 5))
    steps = log.steps.table()
    assert steps["start_s"][0] == 2.5
    assert steps["prefill_requests"][0] == 5
    assert (log.requests.table()["id"] == np.arange(5)).all()


def test_an_arrival_at_a_step_end_is_seen_by_a_synchronous_plan_and_one_step_later_by_an_asynchronous_one():
    scheduled = []
    for asynchronous in (False, True):
        cost = LinearCost(base=1.0, token=0.0, decode=0.0, kv=0.0, attention=0.0)
        _, log = simulate(VllmV1(64, 8), cost, 100, 16, asynchronous, requests([(0, 8, 20), (3.0, 8, 4), (5.5, 8, 4)]))
        scheduled.append(log.requests.table()["scheduled_s"][np.argsort(log.requests.table()["id"])].tolist())
    assert scheduled == [[0.0, 3.0, 6.0], [0.0, 4.0, 7.0]]


def test_a_stop_that_nobody_foresaw_costs_an_asynchronous_engine_one_more_step():
    """A request that ends before its cap is decoded once more: the next plan was made before its stop was seen."""
    decoded = {}
    for cap in (5, 9):
        _, log = simulate(VllmV1(64, 8), LinearCost(), 100, 16, True, requests([(0, 8, 5, cap), (0, 8, 9)]))
        steps = log.steps.table()
        decoded[cap] = (steps["decodes"] * steps["steps"]).sum()
        assert steps["output_tokens"].sum() == 14
    assert decoded == {5: 12, 9: 13}


def test_a_client_whose_requests_are_all_rejected_comes_to_an_end():
    n = 5000
    long = np.full(n, 200)
    _, log = simulate(
        VllmV1(64, 8), LinearCost(), 100, 16, False, ClosedLoop(4, Requests(long, long, long)), max_model_len=100
    )
    assert set(outcomes(log)) == {"prompt_too_long"}


class PlansNothing(VllmV1):
    """A policy that never admits anybody."""

    def plan(self, state):
        return Batch()


def test_work_that_nobody_starts_is_an_error_that_shows_the_state():
    pool = Pool(1, PlansNothing(64, 8), LinearCost(), 100, 16, 1000, False, NO_TIME)
    cluster = Cluster(requests([(0, 8, 4), (1, 8, 4)]), [pool])
    with pytest.raises(ServecastError, match=r"after 0 of 2 requests .*replica 0: 2 waiting, 0 running, 99 of 99"):
        cluster.run()


def test_a_run_can_be_stopped_and_what_is_done_counts():
    rng = np.random.default_rng(0)
    n = 30_000
    lengths = rng.integers(1, 50, n)
    source = OpenLoop(np.cumsum(rng.exponential(0.1, n)), Requests(lengths, lengths, lengths))
    cost = LinearCost(base=0.01, token=1e-4, decode=1e-4, kv=0.0, attention=0.0)
    cluster = Cluster(source, [Pool(2, VllmV1(512, 64), cost, 5000, 16, 1000, True, NO_TIME)])
    assert not cluster.run(lambda done, now: done < 5000)
    rows = cluster.log.requests.table()
    unfinished = rows["outcome"] == UNFINISHED
    assert 5000 <= (~unfinished).sum() < len(rows["id"]) < n
    assert unfinished.sum() > 0
    assert (rows["output_tokens"] <= lengths[rows["id"].astype(int)]).all()
    assert sorted(rows["id"].astype(int)) == list(range(len(rows["id"])))


def test_replicas_share_requests_in_turn_and_the_log_keeps_them_apart():
    rng = np.random.default_rng(0)
    n = 3000
    lengths = rng.integers(1, 50, n)
    cost = LinearCost(base=0.01, token=1e-4, decode=1e-4, kv=0.0, attention=0.0)
    pool = Pool(3, VllmV1(512, 64), cost, 5000, 16, 1000, True, NO_TIME)
    cluster = Cluster(OpenLoop(np.cumsum(rng.exponential(0.02, n)), Requests(lengths, lengths, lengths)), [pool])
    assert cluster.run()
    rows = cluster.log.requests.table()
    assert (rows["replica"] == rows["id"] % 3).all()
    steps = cluster.log.steps.table()
    for replica in range(3):
        mine = steps["replica"] == replica
        assert (steps["start_s"][mine][1:] >= steps["end_s"][mine][:-1]).all()


@pytest.mark.parametrize(("rate", "rows_per_request", "steps_per_row"), [(1, 3.1, 40), (12, 2.6, 3), (30, 1.7, 1)])
def test_work_per_request_is_bounded(rate, rows_per_request, steps_per_row):
    """Step-log rows, and with them plans and events, a request: what the quiet runs are for. Counts, not times."""
    rng = np.random.default_rng(1)
    n = 3000
    source = OpenLoop(np.cumsum(rng.exponential(1 / rate, n)), Requests(*[rng.integers(100, 900, n)] * 3))
    cost = LinearCost(base=0.006, token=2e-5, decode=1e-5, kv=4e-8, attention=0.0)
    _, log = simulate(VllmV1(8192, 256), cost, 27_000, 16, True, source)
    assert len(log.steps) / n < rows_per_request
    assert log.steps.table()["steps"].mean() > steps_per_row


def test_a_client_that_gives_up_frees_its_place_and_its_blocks_and_ends_its_session():
    """Of two sessions of two turns, the first loses patience in its first turn; the other one can then be admitted."""
    lengths = Requests(
        np.array([30, 30, 5, 5]), np.array([20, 5, 5, 5]), np.array([20, 5, 5, 5]), np.array([4.0, 99, 99, 99])
    )
    source = Sessions(np.zeros(4), lengths, np.array([-1, -1, 0, 1]), np.array([0.0, 0.0, 1.0, 2.0]))
    _, log = simulate(VllmV1(64, 1), LinearCost(), 5, 16, False, source)
    rows = log.requests.table()
    assert source.unsent == 1
    assert rows["id"].tolist() == [0, 1, 3]
    assert outcomes(log) == ["cancelled", "length", "length"]
    assert rows["finish_s"][0] == 4.0
    assert 0 < rows["output_tokens"][0] < 20
    assert rows["scheduled_s"][1] > 4.0
    assert rows["arrival_s"][2] == rows["finish_s"][1] + 2.0


def test_a_session_ends_with_the_turn_that_is_too_long_and_the_others_go_on():
    """The second turn of three of the first session leaves no room for a token; the third is never sent."""
    lengths = Requests(*(np.array(column) for column in ([30, 30, 100, 60, 5], [5] * 5, [5] * 5)))
    source = Sessions(np.zeros(5), lengths, np.array([-1, -1, 0, 1, 2]), np.zeros(5))
    _, log = simulate(VllmV1(64, 8), LinearCost(), 100, 16, False, source, max_model_len=100)
    assert outcomes(log) == ["length", "length", "prompt_too_long", "length"]
    assert (source.total, source.unsent) == (4, 1)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_of_equal_priorities_the_first_to_arrive_goes_first_and_a_preempted_one_before_the_later(asynchronous):
    """Two run in the three blocks, and the one that came last goes when the other needs the third. Two more of their
    priority, sent at one time, follow it in the order in which they were sent."""
    columns = [np.array([15, 15, 4, 4]), np.array([12, 12, 4, 4]), np.array([12, 12, 4, 4])]
    source = OpenLoop(np.array([0.0, 0.0, 1.0, 1.0]), Requests(*columns, priority=np.array([3, 3, 3, 3])))
    _, log = simulate(VllmV1(64, 2, scheduling_policy="priority"), LinearCost(), 4, 16, asynchronous, source)
    rows = log.requests.table()
    order = np.argsort(rows["id"])
    assert rows["preemptions"][order].tolist() == [0, 1, 0, 0]
    assert [n for n in log.steps.table()["prefill_tokens"].tolist() if n] == [15 + 15, 17 + 4, 4]
    assert np.diff(rows["scheduled_s"][order][2:]) > 0


def test_impatient_clients_of_a_closed_loop_go_on():
    n = 300
    rng = np.random.default_rng(3)
    prompts, outputs = rng.integers(1, 60, (2, n))
    source = ClosedLoop(6, Requests(prompts, outputs, outputs, rng.uniform(1, 120, n)), rng.uniform(0, 2, n))
    _, log = simulate(VllmV1(64, 8), LinearCost(), 100, 16, True, source)
    counts = Counter(outcomes(log))
    assert counts["cancelled"] > 20
    assert counts["length"] > 20
    assert counts.total() == n
