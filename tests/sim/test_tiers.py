"""KV tiers: whole runs equal the naive ones, chunk by chunk; and what tiers are for, and can do to a run."""

from __future__ import annotations

import random
from math import inf

import numpy as np
import pytest

from sim.cluster import Cluster, Pool, Routing
from sim.offload import Offload, TieredCache
from sim.schedulers import VllmV1
from sim.source import OpenLoop, Requests
from sim.steplog import CANCELLED
from sim.tiers import Tier, TierSpec
from tests.sim.engine import NO_TIME, LinearCost
from tests.sim.oracle.tiers import Chunks, Desk, Part, TierSide
from tests.sim.test_oracle import expand
from tests.sim.test_prefixcache import contents
from workloads.content import content_of


def specs(r, shared):
    """Random tiers, the nearest first."""
    found = []
    for i in range(r.randint(1, 3)):
        slow = r.choice([0.0, 0.001, 0.02, 0.3])
        read_s, write_s, link_s = (slow * r.random() if r.random() < 0.7 else 0.0 for _ in range(3))
        found.append(
            TierSpec(
                f"tier {i}", r.choice([1, 3, 10, 40, 1000]), r.choice([0.0, 0.01, 0.7]) * r.random(), read_s, write_s,
                link_s, shared and r.random() < 0.6,
            )
        )  # fmt: skip
    return tuple(found)


def case(seed, shared):
    """A random workload, whose prompts begin alike, and replicas with tiers: no two things happen at once."""
    r = random.Random(seed)
    rows, now = [], 0.0
    for _ in range(r.randint(1, 40)):
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
        specs(r, shared), chunk, r.choice([1e-5, 0.01]) * (r.random() + 0.1), r.choice([1e-5, 0.05]) * r.random(),
        r.choice(["async", "async", "sync"]), r.choice([1, 1, 1, 2, 3]),
    )  # fmt: skip
    prompts = [prompt for _, prompt, *_ in rows]
    ids = [[r.randint(0, 1) for _ in range(r.choice([0, 3, 12]))] for _ in rows]
    content = contents(prompts, ids, r.choice([1, 2, 4, 8]), r.random() < 0.5)
    patience = None if r.random() < 0.6 else [r.choice([inf, 3.0, 20.0]) * (0.5 + r.random()) for _ in rows]
    cost = LinearCost(base=0.1 + r.random() * 0.3, kv=0.001 * r.random())
    asynchronous = not shared and r.random() < 0.6
    return rows, policy, block_size, num_blocks, offload, content, patience, cost, asynchronous


def both(seed, replicas=1):
    """The same case in both engines, equal in all that they share. Returns the log and the naive one's desk."""
    rows, policy, size, num_blocks, offload, content, patience_s, cost, asynchronous = case(seed, replicas > 1)
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
    desk.run(naive)

    paths = content_of(prefix, columns[1], size).path
    shared = [Tier(spec) if spec.shared else None for spec in offload.tiers]

    def cache(blocks, block_size):
        tiers = [tier or Tier(spec) for tier, spec in zip(shared, offload.tiers, strict=True)]
        return TieredCache(blocks, block_size, paths, True, offload, tiers)

    pool = Pool(replicas, policy, cost, num_blocks, size, 10**9, asynchronous, NO_TIME, cache)
    patience = None if patience_s is None else np.array(patience_s)
    source = OpenLoop(columns[0].astype(float), Requests(*columns[1:4], patience, columns[4]))
    cluster = Cluster(source, [pool], Routing())
    assert cluster.run(), seed
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
    for i, one in enumerate(naive):
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
                expected = [len(tier.all), tier.stored, tier.dropped, tier.evicted]
                assert tiers[number, i] == [n * offload.chunk_tokens for n in expected], seed
    return log, desk


@pytest.mark.parametrize("first", range(0, 1200, 100))
def test_whole_runs_equal_the_naive_ones(first):
    loaded = 0
    for seed in range(first, first + 100):
        log, _ = both(seed)
        loaded += log.loads.table().height
    assert loaded > 100
