"""KV tiers: whole runs equal the naive ones, chunk by chunk; and what tiers are for, and can do to a run."""

from __future__ import annotations

import random
from math import inf

import numpy as np
import pytest

from servecast.errors import ServecastError
from sim.cluster import Cluster, Pool, Routing
from sim.offload import Offload, TieredCache
from sim.prefixcache import PrefixCache
from sim.schedulers import VllmV1
from sim.source import OpenLoop, Requests
from sim.steplog import CANCELLED
from sim.tiers import Tier, TierSpec
from tests.sim.engine import NO_TIME, LinearCost
from tests.sim.oracle.tiers import Chunks, Desk, Part, TierSide
from tests.sim.test_oracle import check_given_up, expand, known
from tests.sim.test_prefixcache import contents


def specs(r, shared, prefetch):
    """Random tiers, the nearest first; with `prefetch` a small one before others."""
    found = []
    for i in range(r.randint(2, 3) if prefetch else r.randint(1, 3)):
        slow = r.choice([0.0, 0.001, 0.02, 0.3])
        read_s, write_s, link_s = (slow * r.random() if r.random() < 0.7 else 0.0 for _ in range(3))
        found.append(
            TierSpec(
                f"tier {i}", r.choice([3, 10, 25] if prefetch and not i else [1, 3, 10, 40, 1000]),
                r.choice([0.0, 0.01, 0.7]) * r.random(), read_s, write_s, link_s, shared and r.random() < 0.6,
            )
        )  # fmt: skip
    return tuple(found)


def case(seed, shared, prefetch):
    """A random workload, whose prompts begin alike, and replicas with tiers: no two things happen at once."""
    r = random.Random(seed)
    rows, now = [], 0.0
    for _ in range(r.randint(1, 40) + 40 * prefetch):
        now += r.choice([1e-3, 0.3, 2.0, 9.0]) * r.random()
        output = r.choice([1, 2, r.randint(1, 30)])
        rows.append((now, r.randint(1, 60), output, output + r.choice([0, 0, 3]), r.randint(0, 3)))
    block_size = r.choice([1, 3, 4])
    chunk = block_size * r.choice([1, 1, 2, 3])
    policy = VllmV1(
        max_num_batched_tokens=r.choice([7, 40, 200]),
        max_num_seqs=r.choice([1, 3, 7]),
        long_prefill_token_threshold=r.choice([0, 0, 5]),
        long_prefill_alone_exempt=r.random() < 0.5,
        scheduler_reserve_full_isl=r.random() < 0.7,
        scheduling_policy=r.choice(["fcfs", "fcfs", "priority"]),
        preemption_skips_one=r.random() < 0.5,
        watermark=r.choice([0.0, 0.0, 0.1]),
    )
    longest = max(prompt + output for _, prompt, output, *_ in rows)
    num_blocks = 3 + -(-longest // block_size) + r.choice([0, 1, 5, 30])
    offload = Offload(
        specs(r, shared, prefetch), chunk, r.choice([1e-5, 0.01]) * (r.random() + 0.1),
        r.choice([1e-5, 0.05]) * r.random(), r.choice(["async", "async", "sync"]), r.choice([1, 1, 1, 2, 3]), prefetch,
    )  # fmt: skip
    prompts = [prompt for _, prompt, *_ in rows]
    ids = [[r.randint(0, 1) for _ in range(r.choice([0, 3, 12]))] for _ in rows]
    ids = [each[:1] * len(each) if prefetch else each for each in ids]
    content = contents(prompts, ids, r.choice([1, 2, 4, 8]), r.random() < 0.5)
    patience = None if r.random() < 0.6 else [r.choice([inf, 3.0, 20.0]) * (0.5 + r.random()) for _ in rows]
    cost = LinearCost(base=0.1 + r.random() * 0.3, kv=0.001 * r.random())
    asynchronous = not shared and r.random() < 0.6
    again = None
    if patience is not None and r.random() < 0.5:
        again = [(r.randint(0, 2), r.choice([1e-3, 0.3, 5.0]) * (0.5 + r.random())) for _ in rows]
    return rows, policy, block_size, num_blocks, offload, content, patience, again, cost, asynchronous


def both(seed, replicas=1, prefetch=False):
    """The same case in both engines, equal in all that they share. Returns the log and the naive one's desk; None
    where both come to a stop, as vLLM does."""
    rows, policy, size, num_blocks, offload, content, patience_s, again, cost, asynchronous = case(
        seed, replicas > 1, prefetch
    )
    prefix, begins = content
    columns = [np.array(c) for c in zip(*rows, strict=True)]
    common = [Chunks(spec) if spec.shared else None for spec in offload.tiers]

    def side(desk, number):
        tiers = [tier or Chunks(spec) for tier, spec in zip(common, offload.tiers, strict=True)]
        return TierSide(
            desk, number, offload, tiers, policy, cost, num_blocks, size, asynchronous, caching=True, blank_first=True
        )

    desk = Desk(replicas, side)
    naive = [Part(i, *row[:4]) for i, row in enumerate(rows)]
    for i, one in enumerate(naive):
        one.priority, one.begins = rows[i][4], begins[i]
        one.patience_s = inf if patience_s is None else patience_s[i]
        if again is not None:  # then all of its prompt is what it begins with, as its other tries do
            one.retries, one.backoff_s = again[i]
            one.begins = one.tokens() if one.retries else one.begins
    desk.run(naive)

    retries, backoff_s = (None, None) if again is None else map(np.array, zip(*again, strict=True))
    paths = known(prefix, columns[1], size, retries)
    shared = [Tier(spec) if spec.shared else None for spec in offload.tiers]

    def cache(blocks, block_size):
        tiers = [tier or Tier(spec) for tier, spec in zip(shared, offload.tiers, strict=True)]
        return TieredCache(blocks, block_size, paths, True, offload, tiers)

    pool = Pool(replicas, policy, cost, num_blocks, size, 10**9, asynchronous, NO_TIME, cache)
    patience = None if patience_s is None else np.array(patience_s)
    source = OpenLoop(
        columns[0].astype(float), Requests(*columns[1:4], patience, columns[4], retries=retries, backoff_s=backoff_s)
    )
    cluster = Cluster(source, [pool], Routing())
    if not all(one.done for one in desk.sent):  # by now nobody can load, and nobody runs who could be preempted
        with pytest.raises(ServecastError, match="plans nothing while work waits"):
            cluster.run()
        return None
    assert cluster.run(), seed
    nothing_left(cluster)
    log = cluster.log
    steps, requests = log.steps.table(), log.requests.table()
    for number, one in enumerate(desk.sides):
        mine = {name: steps[name][steps["replica"] == number] for name in steps}
        actual, expected = list(expand(mine)), [(s.end_s, s.decodes, s.kv_tokens, s.chunks) for s in one.steps]
        assert len(actual) == len(expected), seed
        for a, (end, decodes, kv, chunks) in zip(actual, expected, strict=True):
            assert a[0] is None or a[0] == end, seed
            assert a[1:] == (decodes, kv, sum(n for _, n, _ in chunks)), seed
    order = np.argsort(requests["id"])
    got = {name: requests[name][order].tolist() for name in requests}
    check_given_up([one for one in desk.sent if one.cancelled_s is not None], log)
    for i, one in enumerate(sorted((one for one in desk.sent if not one.again), key=lambda one: one.id)):
        first = one.token_s[0] if one.token_s else None
        assert got["first_token_s"][i] == first or first is None, seed
        assert got["finish_s"][i] == (one.token_s[-1] if one.cancelled_s is None else one.cancelled_s), seed
        assert (got["outcome"][i] == CANCELLED) == (one.cancelled_s is not None), seed
        assert one.cancelled_s is not None or got["cached_tokens"][i] == one.cached, seed
    loads = log.loads.table()
    assert sorted(zip(*(loads[name].tolist() for name in loads), strict=True)) == sorted(
        row for one in desk.sides for row in one.loads
    ), seed
    tiers = {(int(n), int(i)): row for n, i, *row in zip(*map(log.tiers.table().get, log.tiers.columns), strict=True)}
    for number, one in enumerate(desk.sides):
        for i, tier in enumerate(one.tiers):
            if (number, i) in tiers:
                expected = [len(tier.all), tier.stored, tier.dropped, tier.evicted, tier.fetched]
                assert tiers[number, i] == [n * offload.chunk_tokens for n in expected], seed
    return log, desk


def nothing_left(cluster):
    """Nobody loads, waits or has blocks once all is over."""
    for front_end in cluster.front_ends:
        state = front_end.replica.state
        assert not any((state.waiting, state.running, state.pulling, state.loading, state.awaiting))
        assert state.kv.free == state.kv.usable


@pytest.mark.parametrize("first", range(0, 1200, 100))
def test_whole_runs_equal_the_naive_ones(first):
    loaded = 0
    for seed in range(first, first + 100):
        log, _ = both(seed)
        loaded += log.loads.table().height
    assert loaded > 100


@pytest.mark.parametrize("first", range(0, 300, 100))
def test_with_what_is_fetched_ahead_they_do_too(first):
    runs = [both(seed, prefetch=True) for seed in range(first, first + 100)]
    logs = [run[0] for run in runs if run is not None]
    assert len(logs) > 98
    assert sum(log.tiers.table()["prefetched"].sum() for log in logs) > 1000
    assert sum(log.loads.table().height for log in logs) > 800


@pytest.mark.parametrize("replicas", [2, 3])
def test_replicas_that_share_tiers_equal_the_naive_ones(replicas):
    loaded = sum(both(seed, replicas)[0].loads.table().height for seed in range(300))
    assert loaded > 50


def run(rows, paths, offload, *, policy=None, cost=None, num_blocks=97, asynchronous=False, **asked):
    """(arrival, prompt, output) each, on one replica with blocks of 16; `offload` None: without tiers. The cluster."""

    def cache(blocks, size):
        if offload is None:
            return PrefixCache(blocks, size, paths, True)
        return TieredCache(blocks, size, paths, True, offload, [Tier(spec) for spec in offload.tiers])

    arrival_s, prompts, outputs = (np.array(c) for c in zip(*rows, strict=True))
    policy = policy or VllmV1(max_num_batched_tokens=2048, max_num_seqs=64)
    pool = Pool(1, policy, cost or COST, num_blocks, 16, 10**6, asynchronous, NO_TIME, cache)
    cluster = Cluster(
        OpenLoop(arrival_s.astype(float), Requests(prompts, outputs, outputs, **asked)), [pool], Routing()
    )
    assert cluster.run()
    return cluster


COST = LinearCost(base=0.01, token=1e-4, decode=1e-4, kv=0.0, attention=0.0)


def host(chunks=1000, read_s=1e-6, **more):
    """One tier, whose chunks are KV blocks of 16."""
    return Offload((TierSpec("host", chunks, 0.0),), 16, read_s, 1e-6, **more)


SHARED = 960
"""Tokens that the first and the last of three prompts begin with; the one between takes the GPU's blocks."""


def three(offload, **more):
    """TTFT of the last one, and the cluster."""
    rows = [(0.0, SHARED + 16, 2), (5.0, 1520, 2), (10.0, SHARED + 16, 2)]
    cluster = run(rows, lambda id: [] if id == 1 else [(0, SHARED // 16)], offload, **more)
    requests = cluster.log.requests.table()
    return float(requests["first_token_s"][2] - requests["arrival_s"][2]), cluster


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_the_gpu_lost_costs_what_loading_takes(asynchronous):
    """By hand: 976 tokens are 107.6 ms to compute; with 960 on the way for 0.5, 20 or 800 ms, 16 are."""
    without, _ = three(None, asynchronous=asynchronous)
    assert without == pytest.approx(0.01 + 976e-4)
    for loads in ("async", "sync"):
        for read_s in (0.5e-6, 2e-5, 8e-4):
            took, cluster = three(host(read_s=read_s, loads=loads), asynchronous=asynchronous)
            assert took == pytest.approx(SHARED * read_s + 0.01 + 16e-4)
            assert cluster.log.requests.table()["cached_tokens"].tolist() == [0, 0, SHARED]
            assert cluster.log.loads.table()["tokens"].tolist() == [SHARED]


def test_what_has_no_room_is_not_found():
    took, cluster = three(host(chunks=30))
    assert took == pytest.approx(0.01 + 976e-4)
    assert not cluster.log.loads.table().height
    assert cluster.log.tiers.table()["dropped"].sum() > 0


def test_it_is_not_read_before_it_is_written():
    """Writing takes a minute; the third request comes after 10 s."""
    slow = Offload((TierSpec("disk", 1000, 0.0, read_s=1e-6, write_s=60 / 960),), 16, 1e-6, 1e-6)
    took, cluster = three(slow)
    assert took == pytest.approx(0.01 + 976e-4)
    assert not cluster.log.loads.table().height


def test_who_wants_what_is_being_loaded_waits_for_it_and_loads_nothing():
    rows = [(0.0, SHARED + 16, 2), (5.0, 1520, 2), (10.0, SHARED + 16, 2), (10.001, SHARED + 16, 2), (10.002, 32, 2)]
    cluster = run(rows, lambda id: [] if id in (1, 4) else [(0, SHARED // 16)], host(read_s=1e-3))
    loads, requests = cluster.log.loads.table(), cluster.log.requests.table()
    assert sorted(zip(loads["id"], loads["tier"], loads["tokens"], strict=True)) == [(2, 0, SHARED), (3, -1, 0)]
    first = dict(zip(requests["id"], requests["first_token_s"], strict=True))
    assert first[4] < 10.1 < 10.9 < first[2] <= first[3] < 11.1, "others go on meanwhile"
    assert requests["cached_tokens"].sum() == 2 * SHARED


@pytest.mark.parametrize("asynchronous", [False, True])
def test_who_tries_again_while_the_try_that_was_given_up_still_loads(asynchronous):
    """Loading takes 0.96 s: the third request gives up after 0.2, and is sent again 5 ms later, twice; so does the
    fourth, which waits for what the third loads."""
    rows = [(0.0, SHARED + 16, 2), (5.0, 1520, 2), (10.0, SHARED + 16, 2), (10.001, SHARED + 16, 2)]
    asked = {
        "patience_s": np.array([inf, inf, 0.2, 0.21]), "retries": np.array([0, 0, 2, 2]), "backoff_s": np.full(4, 5e-3)
    }  # fmt: skip
    cluster = run(
        rows, lambda id: [] if id == 1 else [(0, SHARED // 16)], host(read_s=1e-3), asynchronous=asynchronous, **asked
    )
    given_up = cluster.log.given_up.table()
    assert sorted(given_up["id"].tolist()) == [2, 2, 2, 3, 3, 3]
    nothing_left(cluster)


def test_the_step_waits_for_what_it_loads_and_all_who_are_in_it():
    rows = [(0.0, SHARED + 16, 2), (5.0, 1520, 2), (9.9, 32, 200), (10.0, SHARED + 16, 2)]
    paths = lambda id: [(0, SHARED // 16)] if id in (0, 3) else []  # noqa: E731
    waits = []
    for loads in ("async", "sync"):
        steps = run(rows, paths, host(read_s=1e-3, loads=loads)).log.steps.table()
        waits.append(float((steps["end_s"] - steps["start_s"])[steps["steps"] == 1].max()))
    assert waits[0] < 0.2
    assert waits[1] > 0.96


def test_only_what_is_asked_for_often_enough_is_stored():
    _, cluster = three(host(store_after=2))
    assert cluster.log.tiers.table()["stored"].sum() == SHARED  # by the third request, the second that asks for it
    assert not cluster.log.loads.table().height


@pytest.mark.parametrize("loads", ["async", "sync"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_many_long_prefixes_in_a_small_cache_come_to_an_end(loads, asynchronous):
    """5,000 requests, of which 71 % begin with one of 3 stretches of 16K tokens, 2,204 blocks on the GPU (two such
    prompts) and as many again in the host's memory, which holds two of them."""
    r = random.Random(7)
    rows, prefixes, now = [], {}, 0.0
    for id in range(5000):
        now += r.expovariate(1.5)
        if r.random() < 0.71:
            prefixes[id] = r.randrange(3)
        rows.append((now, 16384 * (id in prefixes) + r.randint(1, 2000), r.randint(1, 300)))
    paths = lambda id: [(prefixes[id], 1024)] if id in prefixes else []  # noqa: E731
    policy = VllmV1(max_num_batched_tokens=2048, max_num_seqs=256)
    cost = LinearCost(base=0.005, token=3e-5, decode=1e-5, kv=1e-8, attention=0.0)
    offload = host(chunks=2048, read_s=1.3e-6, loads=loads)
    log = run(rows, paths, offload, policy=policy, cost=cost, num_blocks=2205, asynchronous=asynchronous).log
    requests = log.requests.table()
    assert requests.height == 5000
    assert (requests["finish_s"] > 0).all()
    assert log.loads.table()["tokens"].sum() > 50 * 16384
