"""The simulator obeys queueing theory."""

from __future__ import annotations

import numpy as np
import pytest

from sim import metrics
from sim.schedulers.vllm_v1 import VllmV1
from sim.source import ClosedLoop, OpenLoop, Requests
from tests.sim.engine import LinearCost, simulate


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_batch_of_one_is_an_m_d_1_queue(load, asynchronous):
    """One request at a time, each exactly one step of S seconds: the mean wait is load x S / (2 (1 - load))."""
    n, service_s = 60_000, 2.0
    arrivals = np.cumsum(np.random.default_rng(5).exponential(service_s / load, n))
    ones = np.ones(n, dtype=np.int64)
    cost = LinearCost(base=service_s - 0.0625, attention=0.0, kv=0.0)
    _, log = simulate(VllmV1(1, 1), cost, 10, 1, asynchronous, OpenLoop(arrivals, Requests(ones, ones, ones)))
    rows = log.requests.table()
    wait = (rows["scheduled_s"] - rows["arrival_s"]).mean()
    expected = load * service_s / (2 * (1 - load))
    assert wait == pytest.approx(expected, rel=0.05)


def run(rate, n=4000, seed=2):
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / rate, n))
    prompts, outputs = rng.integers(1, 200, n), rng.integers(1, 100, n)
    cost = LinearCost(base=0.01, token=1e-4, decode=1e-4, kv=1e-7, attention=0)
    return simulate(VllmV1(512, 32), cost, 4000, 16, True, OpenLoop(arrivals, Requests(prompts, outputs, outputs)))[1]


@pytest.mark.parametrize("rate", [2, 12, 40])
def test_littles_law(rate):
    """Mean requests in the system = arrival rate x mean time in it, over the whole run."""
    rows = run(rate).requests.table()
    end = rows["finish_s"].max()
    mean = metrics.time_average(*metrics.in_system(rows, "finish_s"), 0.0, end)
    assert mean == pytest.approx(len(rows["id"]) / end * metrics.e2e_s(rows).mean(), rel=1e-9)


def test_throughput_follows_the_rate_until_it_saturates():
    verdicts, served = [], []
    for rate in (4, 16, 24, 40, 60):
        rows = run(rate).requests.table()
        served.append(len(rows["id"]) / rows["finish_s"].max())
        verdicts.append(
            metrics.saturation(dict(rows) | {"left_queue_s": rows["scheduled_s"], "left_s": rows["finish_s"]}).saturated
        )
    assert verdicts == [False, False, False, True, True]
    assert served[:3] == pytest.approx([4, 16, 24], rel=0.05)
    assert served[3] == pytest.approx(served[4], rel=0.05)


def test_a_closed_loop_keeps_its_concurrency():
    n = 500
    lengths = np.random.default_rng(1).integers(1, 60, (2, n))
    cost = LinearCost(base=0.01, token=1e-4, decode=1e-4, kv=1e-7, attention=0)
    _, log = simulate(
        VllmV1(512, 64), cost, 4000, 16, False, ClosedLoop(16, Requests(lengths[0], lengths[1], lengths[1]))
    )
    rows = log.requests.table()
    times, count = metrics.in_system(rows, "finish_s")
    assert count.max() == 16
    last_arrival = rows["arrival_s"].max()
    assert metrics.time_average(times, count, 0.0, last_arrival) == pytest.approx(16, abs=1e-6)
