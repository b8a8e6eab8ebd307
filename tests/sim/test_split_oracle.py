"""Whole runs of split serving equal the naive one: every step, time and transfer."""

from __future__ import annotations

import random
from math import inf

import numpy as np
import pytest

from sim.cluster import Cluster, Pool, Routing
from sim.handover import Split
from sim.kvcache import KVCache
from sim.prefixcache import PrefixCache
from sim.schedulers import VllmV1
from sim.source import OpenLoop, Requests
from sim.steplog import CANCELLED
from tests.sim import oracle
from tests.sim.engine import NO_TIME, LinearCost
from tests.sim.oracle.split import Side
from tests.sim.oracle.split import Split as NaiveSplit
from tests.sim.test_handover import Wire
from tests.sim.test_oracle import expand
from tests.sim.test_vllm_sources import shared
from workloads.content import content_of


def case(seed):
    """A random fleet of two pools, and its workload: no two things happen at once."""
    r = random.Random(seed)
    rows, now = [], 0.0
    for _ in range(r.randint(1, 40)):
        now += r.choice([1e-3, 0.3, 2.0, 9.0]) * r.random()
        output = r.choice([1, 2, r.randint(1, 30)])
        rows.append((now, r.randint(1, 60), output, output + r.choice([0, 0, 3]), r.randint(0, 3)))
    budget = r.choice([7, 40, 200])
    rule = r.choice(["always", "always", "fcfs", "never"])
    policy = VllmV1(
        max_num_batched_tokens=budget,
        max_num_seqs=r.choice([1, 3, 7]),
        long_prefill_token_threshold=r.choice([0, 0, 5]),
        long_prefill_alone_exempt=r.random() < 0.5,
        scheduler_reserve_full_isl=r.random() < 0.5,
        scheduling_policy=r.choice(["fcfs", "priority"]),
        preemption_skips_one=r.random() < 0.5,
        watermark=r.choice([0.0, 0.0, 0.1]),
        pulled_queue=rule,
        pulls_spare_prefills=r.random() < 0.5,
    )
    block_size = r.choice([1, 3, 16])
    longest = max(prompt + output for _, prompt, output, *_ in rows)
    tight = r.choice([0, 1, 5, 30]) if rule == "always" else 4000  # with the others, requests may wait for ever
    patience_s = None if r.random() < 0.5 else [r.choice([inf, 3.0, 20.0, 60.0]) * (0.5 + r.random()) for _ in rows]
    wire = Wire(r.choice([0.01, 0.7]) * r.random() + 1e-4, r.choice([0.0, 0.003]), r.choice([1e-5, 0.02]))
    split = {"first_token": r.choice(["decode", "prefill"]), "pull": r.random() < 0.7, "posts_first": r.random() < 0.3,
             "local_tokens": r.choice([0, 0, 20])}  # fmt: skip
    costs = [LinearCost(base=0.1 + r.random() * 0.3, kv=0.001 * r.random()) for _ in range(2)]
    sizes = (r.randint(1, 2), r.randint(1, 2))
    num_blocks = 3 + -(-longest // block_size) + tight
    return (
        rows,
        policy,
        block_size,
        num_blocks,
        patience_s,
        wire,
        split,
        costs,
        sizes,
        r.random() < 0.6,
        r.random() < 0.5,
    )


def compare(seed):
    """Both run the case, and all that they share is equal."""
    rows, policy, size, num_blocks, patience_s, wire, split, costs, sizes, asynchronous, caching = case(seed)
    columns = [np.array(c) for c in zip(*rows, strict=True)]
    begins = [[] for _ in rows]
    cache = KVCache
    if caching:
        prefix, begins = shared(seed, rows)
        paths = content_of(prefix, columns[1], size).path

        def cache(num_blocks, block_size):
            return PrefixCache(num_blocks, block_size, paths, True)

    split = Split({(0, 1): wire}, **split)

    def make(desk, number):
        cost = costs[number >= sizes[0]]
        return Side(desk, number, policy, cost, num_blocks, size, asynchronous, caching=caching, blank_first=True)

    naive = NaiveSplit(split, wire, sizes, make)
    wholes = [oracle.Naive(i, *row[:4]) for i, row in enumerate(rows)]
    for i, whole in enumerate(wholes):
        whole.priority, whole.begins = rows[i][4], begins[i]
        whole.patience_s = inf if patience_s is None else patience_s[i]
    naive.run(wholes)
    pools = [
        Pool(n, policy, cost, num_blocks, size, 10**9, asynchronous, NO_TIME, cache, role=role)
        for n, cost, role in zip(sizes, costs, ("prefill", "decode"), strict=True)
    ]
    patience = None if patience_s is None else np.array(patience_s)
    source = OpenLoop(columns[0].astype(float), Requests(*columns[1:4], patience, columns[4]))
    cluster = Cluster(source, pools, Routing(split=split))
    assert cluster.run(), seed
    log = cluster.log
    moves = log.transfers.table()
    names = [name for name in moves if name != "bytes"]
    assert sorted(zip(*(moves[n].tolist() for n in names), strict=True)) == sorted(naive.moves), (seed, names)
    steps = log.steps.table()
    for number, side in enumerate(naive.sides):
        mine = steps.where(steps["replica"] == number)
        expected = [(s.end_s, s.decodes, s.kv_tokens, sum(n for _, n, _ in s.chunks)) for s in side.steps]
        actual = list(expand(mine))
        assert [a[1:] for a in actual] == [e[1:] for e in expected], (seed, number)
        assert all(a[0] in (None, e[0]) for a, e in zip(actual, expected, strict=True)), (seed, number)
        first = np.cumsum(mine["steps"]).astype(int) - mine["steps"].astype(int)
        used = np.array([s.used for s in side.steps])
        if len(used):
            assert used[first].tolist() == mine["kv_blocks"].tolist(), (seed, number)
    got = log.requests.table()
    order = np.argsort(got["id"])
    for i, whole in enumerate(wholes):
        row = {name: got[name][order][i] for name in ("id", "outcome", "first_token_s", "finish_s", "output_tokens")}
        tokens = [] if whole.answering is None else whole.answering.token_s
        if whole.reading is not None and (split.first_token == "prefill"):
            tokens = whole.reading.token_s + tokens
        assert row["id"] == i
        assert (row["outcome"] == CANCELLED) == (whole.cancelled_s is not None), (seed, i)
        assert row["output_tokens"] == len(tokens), (seed, i)
        assert row["finish_s"] == (tokens[-1] if whole.cancelled_s is None else whole.cancelled_s), (seed, i)
        assert row["first_token_s"] == tokens[0] if tokens else row["first_token_s"] != row["first_token_s"], (seed, i)


@pytest.mark.parametrize("seed", range(4))
def test_whole_runs_equal_the_oracle(seed):
    for i in range(100):
        compare(1000 * seed + i)
