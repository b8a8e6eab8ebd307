"""Which replica a request gets: every router against what it says of itself, in a simulation of several pools."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.cluster import Cluster, Pool, Routing
from sim.routers import Known
from sim.schedulers import VllmV1
from sim.source import OpenLoop, Requests
from tests.sim.engine import NO_TIME, LinearCost

COST = LinearCost(base=0.01, token=1e-4, decode=1e-4, kv=0.0, attention=0.0)


def pool(replicas, weight=1.0, serves=0, blocks=5000, factor=1.0):
    cost = LinearCost(base=0.01 * factor, token=1e-4 * factor, decode=1e-4 * factor, kv=0.0, attention=0.0)
    return Pool(replicas, VllmV1(512, 64), cost, blocks, 16, 1000, True, NO_TIME, weight=weight, serves=serves)


def rows(pools, routing, n=2000, rate=60.0, seed=0):
    """The log's requests by id, and their prompt lengths."""
    rng = np.random.default_rng(seed)
    prompt, output = rng.integers(1, 400, n), rng.integers(1, 60, n)
    source = OpenLoop(np.cumsum(rng.exponential(1 / rate, n)), Requests(prompt, output, output))
    cluster = Cluster(source, pools, routing)
    assert cluster.run()
    table = cluster.log.requests.table()
    order = np.argsort(table["id"])
    return {name: column[order] for name, column in table.items()}


def outstanding(table, i, weight):
    """What each replica has when request i arrives: of the requests before it that are not over, their weight."""
    there = (table["id"] < i) & (table["finish_s"] > table["arrival_s"][i])
    return Counter({int(r): weight[table["replica"] == r][there[table["replica"] == r]].sum() for r in range(5)})


@pytest.mark.parametrize("router", ["least-outstanding", "least-tokens"])
def test_the_least_loaded_gets_it(router):
    table = rows([pool(2), pool(3, factor=2.5)], Routing(router))
    weight = table["prompt_tokens"] if router == "least-tokens" else np.ones(len(table["id"]))
    for i in range(0, 2000, 7):
        loads = outstanding(table, i, weight)
        assert loads[int(table["replica"][i])] == min(loads.values()), i
    shares = np.bincount(table["replica"].astype(int))
    assert shares[:2].min() > 1.5 * shares[2:].max(), "the faster pool is done sooner, and gets more"


def test_of_equal_ones_it_is_that_which_waited_the_longest():
    table = rows([pool(5)], Routing("least-outstanding"), n=50, rate=0.1)
    assert (table["replica"] == np.arange(50) % 5).all()


def test_weights_are_kept_in_every_stretch():
    table = rows([pool(1, weight=3.0), pool(1), pool(2, weight=0.5)], Routing("weighted"))
    for first in range(0, 2000 - 10, 10):
        counts = np.bincount(table["replica"][first : first + 10].astype(int), minlength=4)
        assert (abs(counts - np.array([6, 2, 1, 1])) <= 1).all()


def test_draws_are_even_of_the_seed_and_no_others():
    one, again, other = (rows([pool(5)], Routing("random", seed=s))["replica"] for s in (1, 1, 2))
    assert (one == again).all()
    assert (one != other).any()
    assert np.bincount(one.astype(int)).min() > 340  # of 400; six standard deviations are 107


def test_two_choices_are_nearly_as_good_as_all():
    """Most requests at once on one replica: log log n instead of log n (Mitzenmacher 2001)."""

    def most(router):
        table = rows([pool(20)], Routing(router), n=6000, rate=400.0)
        events = [(t, r, 1) for t, r in zip(table["arrival_s"], table["replica"], strict=True)]
        events += [(t, r, -1) for t, r in zip(table["finish_s"], table["replica"], strict=True)]
        loads, top = Counter(), 0
        for _, replica, change in sorted(events):
            loads[replica] += change
            top = max(top, loads[replica])
        return top

    found = {router: most(router) for router in ("random", "power-of-two", "least-outstanding")}
    assert found["random"] > 1.3 * found["power-of-two"]
    assert found["power-of-two"] <= found["least-outstanding"] + 6


def test_the_emptiest_cache_gets_it():
    """A replica with a tenth of the memory gets far less than half of the requests."""
    table = rows([pool(1, blocks=4000), pool(1, blocks=401)], Routing("kv-utilisation"), n=3000, rate=60.0)
    assert 0.05 < (table["replica"] == 1).mean() < 0.3


def test_sessions_stay_where_they_began():
    session = np.random.default_rng(3).integers(0, 200, 2000)
    known = Known(session=session.tolist().__getitem__)
    table = rows([pool(5)], Routing("session-affinity", known=known))
    homes = {s: set(table["replica"][session == s]) for s in set(session.tolist())}
    assert all(len(home) == 1 for home in homes.values())
    assert len(set.union(*homes.values())) == 5


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=40), st.integers(2, 4))
@settings(max_examples=60)
def test_prefixes_go_where_most_of_them_went(prompts, replicas):
    """Against a search through all prompts before, with loads far from the thresholds."""
    numbers: dict[tuple[int, ...], int] = {}
    paths = []
    for prompt in prompts:
        chain = [tuple(prompt[: i + 1]) for i in range(len(prompt))]
        paths.append([(numbers.setdefault(c, len(numbers)), i + 1) for i, c in enumerate(chain)])
    n = len(prompts)
    lengths = np.array([16 * len(prompt) for prompt in prompts])
    source = OpenLoop(np.arange(n) * 100.0, Requests(lengths, np.ones(n, int), np.ones(n, int)))
    routing = Routing("prefix-affinity", {"cache_threshold": 0.5}, known=Known(paths.__getitem__, 16))
    cluster = Cluster(source, [pool(replicas)], routing)
    assert cluster.run()
    table = cluster.log.requests.table()
    went = dict(zip(table["id"].astype(int).tolist(), table["replica"].astype(int).tolist(), strict=True))
    for i, prompt in enumerate(prompts):
        shared = Counter()
        for j in range(i):
            same = 0
            while same < min(len(prompt), len(prompts[j])) and prompt[same] == prompts[j][same]:
                same += 1
            shared[went[j]] = max(shared[went[j]], same)
        most = max(shared.values(), default=0)
        if most > 0.5 * len(prompt):
            assert shared[went[i]] == most


def test_prefixes_yield_to_loads_that_are_far_apart():
    n = 400
    lengths, ones = np.full(n, 64), np.full(n, 50)
    routing = Routing("prefix-affinity", {"balance_abs_threshold": 8}, known=Known(lambda i: [(0, 4)], 16))
    cluster = Cluster(OpenLoop(np.arange(n) * 0.002, Requests(lengths, ones, ones)), [pool(4)], routing)
    assert cluster.run()
    replicas = cluster.log.requests.table()["replica"].astype(int)
    counts = np.bincount(replicas, minlength=4)
    assert counts.min() > 0, "all of one prefix, and yet more than one replica"
    assert counts.max() < n


def test_what_is_known_of_loads_may_be_old():
    """With loads that are seen once in a while, all requests between two looks go to the same replica, in turn of who
    was least loaded then: herds. Fresh ones spread them."""

    def longest_run(stale_s):
        replica = rows([pool(5)], Routing("least-outstanding", stale_s=stale_s), rate=200.0)["replica"]
        ends = np.flatnonzero(np.append(np.diff(replica) != 0, True))
        return np.diff(np.append(-1, ends)).max()

    def spread(stale_s):
        table = rows([pool(5)], Routing("least-outstanding", stale_s=stale_s), rate=200.0)
        return (table["finish_s"] - table["arrival_s"]).mean()

    assert longest_run(0.0) < 6
    assert spread(5.0) > 1.05 * spread(0.0)


def test_a_model_is_asked_of_the_pools_that_serve_it():
    asks = np.random.default_rng(0).integers(0, 2, 2000)
    routing = Routing("least-outstanding", asks=asks)
    table = rows([pool(2), pool(1, serves=1), pool(1), pool(1, serves=1)], routing)
    assert set(table["replica"][asks == 0]) == {0, 1, 3}
    assert set(table["replica"][asks == 1]) == {2, 4}


@pytest.mark.parametrize("router", ["round-robin", "least-outstanding"])
def test_replicas_do_not_disturb_each_other(router):
    """Rows of the step log a request, at the same load a replica: one replica's events end no other's quiet runs."""

    def rows_per_request(replicas):
        n = 300 * replicas
        rng = np.random.default_rng(5)
        prompt, output = rng.integers(1, 200, n), rng.integers(20, 200, n)
        arrivals = np.cumsum(rng.exponential(0.25 / replicas, n))
        cluster = Cluster(OpenLoop(arrivals, Requests(prompt, output, output)), [pool(replicas)], Routing(router))
        assert cluster.run()
        return len(cluster.log.steps) / n

    assert rows_per_request(16) < 1.1 * rows_per_request(1)
