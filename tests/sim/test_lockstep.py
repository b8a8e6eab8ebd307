"""Ranks that step together: against a naive group, and against engines on their own where there is one rank."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.clock import Clock
from sim.kvcache import KVCache
from sim.lockstep import Lockstep, Rank
from sim.schedulers import VllmV1
from sim.source import Desk, OpenLoop, Requests
from sim.state import State
from sim.steplog import Log
from tests.sim.engine import LinearCost, simulate
from tests.sim.oracle import oracle
from tests.sim.oracle.parts import Naive


@dataclass(frozen=True)
class Group:
    """Each rank takes what `cost` says and, together, a little more for every token of all ranks."""

    cost: LinearCost
    shared: float = 0.0625

    def step_s(self, steps):
        together = self.shared * sum(step.tokens or 1 for step in steps)
        return max(self.cost.step_s(s.chunks, s.decodes, s.kv_tokens) for s in steps) + together

    def decode_lines(self, decoding):
        together = self.shared * sum(decodes or 1 for decodes, _ in decoding)
        lines = [self.cost.decode_line(*each) for each in decoding]
        return [(a + together, b, floor + together, upto) for a, b, floor, upto in lines]


def run(rows, ranks, cost, policy, blocks=60, asynchronous=False, patience_s=None):
    """`rows` of (arrival, prompt, output); request i goes to rank i % ranks. (the log, the ranks)"""
    clock, log = Clock(), Log()
    group = Lockstep(clock, cost)
    arrival, prompt, output = (np.array(column) for column in zip(*rows, strict=True))
    source = OpenLoop(arrival.astype(float), Requests(prompt, output, output, patience_s))
    for i in range(ranks):
        state = State(KVCache(blocks, 4), policy.by_priority)
        Rank(group, i, clock, state, policy, log, source.on_finish, max_model_len=10**9, asynchronous=asynchronous)

    def submit(request):
        request.sent_s = request.queued_s = request.arrival_s  # there is no front end
        group.ranks[request.id % ranks].submit(request)

    def cancel(request):
        group.ranks[request.id % ranks].cancel(request, clock.now)

    clock.process(source.start(clock, Desk(submit, cancel)))
    clock.run()
    assert len(log.requests) == len(rows)
    return log, group.ranks


def naive(rows, ranks, cost, policy, blocks):
    """The same, synchronous, a step at a time: (start, end, tokens of each rank) of every step; finish times by id."""
    from calibrate.group_cost import RankStep

    engines = [oracle(policy, cost.cost, blocks, 4, False) for _ in range(ranks)]
    todo = [Naive(i, *row, row[2]) for i, row in enumerate(rows)]
    steps, finish, t = [], {}, 0.0
    while todo or any(e.waiting or e.running for e in engines):
        for r in [r for r in todo if r.arrival_s <= t]:
            todo.remove(r)
            engines[r.id % ranks].queue([r])
        batches = [e.plan() for e in engines]
        if not any(batches):
            t = min(r.arrival_s for r in todo)
            continue
        works = [
            RankStep(
                [(n, before) for _, n, before, decode, _, _ in batch if not decode],
                sum(entry[3] for entry in batch),
                sum(entry[2] for entry in batch if entry[3]),
            )
            for batch in batches
        ]
        start, t = t, t + cost.step_s(works)
        steps.append((start, t, [work.tokens for work in works]))
        for r in [r for r in todo if r.arrival_s <= t]:
            todo.remove(r)
            engines[r.id % ranks].queue([r])
        for engine, batch in zip(engines, batches, strict=True):
            place = {r.id: i for i, r in enumerate(engine.running)}
            for r, n, _, _, yields, _ in engine.in_order(batch, place):
                r.in_flight -= n
                if yields:
                    r.out += 1
                    r.placeholders -= 1
                    if r.out == r.output:
                        r.done = True
                        engine.leave(r)
                        finish[r.id] = t
    return steps, finish


def spread(log, ranks):
    """The log's steps one by one: (start, end) -> tokens of each rank."""
    table, found = log.steps.table(), {}
    for i in range(len(table["replica"])):
        row = {name: table[name][i] for name in table}
        n, first = int(row["steps"]), row["first_step_s"]
        rise = 0.0 if n == 1 else 2 * (row["end_s"] - row["start_s"] - n * first) / (n * (n - 1))
        end = row["start_s"]
        for j in range(n):
            start, end = end, end + first + rise * j
            tokens = found.setdefault(round(start, 6), [round(end, 6), [0] * ranks])
            assert tokens[0] == round(end, 6), "all ranks of a step end together"
            tokens[1][int(row["replica"])] = int(row["prefill_tokens"] + row["decodes"])
    return [(start, end, tokens) for start, (end, tokens) in sorted(found.items())]


@st.composite
def workloads(draw, most=24):
    n = draw(st.integers(1, most))
    gaps = draw(st.lists(st.sampled_from([0.0, 0.25, 2.0, 9.0, 40.0]), min_size=n, max_size=n))
    prompt = draw(st.lists(st.integers(1, 40), min_size=n, max_size=n))
    output = draw(st.lists(st.integers(1, 50), min_size=n, max_size=n))
    return list(zip(np.cumsum(gaps).tolist(), prompt, output, strict=True))


costs = st.sampled_from([
    LinearCost(), LinearCost(kv=0.03125, decode=0.5), LinearCost(kv=0.25, decode=0.03125, floor=2.0),
    LinearCost(kv=0.0, floor=3.0), LinearCost(kv=0.125, knee=40.0),
])  # fmt: skip
policies = st.sampled_from([VllmV1(512, 8), VllmV1(16, 4), VllmV1(64, 2, scheduler_reserve_full_isl=False)])


@given(workloads(), st.integers(1, 5), costs, policies, st.integers(26, 80))
@settings(max_examples=200, deadline=None)
def test_a_group_is_the_naive_one(rows, ranks, cost, policy, blocks):
    log, _ = run(rows, ranks, Group(cost), policy, blocks)
    steps, finish = naive(rows, ranks, Group(cost), policy, blocks)
    table = log.requests.table()
    got = dict(zip(table["id"].astype(int).tolist(), table["finish_s"].tolist(), strict=True))
    assert got == pytest.approx(finish)
    ours = spread(log, ranks)
    assert [tokens for *_, tokens in ours] == [tokens for *_, tokens in steps]
    assert [end for _, end, _ in ours] == pytest.approx([end for _, end, _ in steps], abs=2e-6)


@given(workloads(), costs, policies, st.integers(26, 80), st.booleans(), st.sampled_from([None, 3.0, 30.0]))
@settings(max_examples=150, deadline=None)
def test_a_group_of_one_is_an_engine_on_its_own(rows, cost, policy, blocks, asynchronous, patience):
    patience_s = None if patience is None else np.full(len(rows), patience)
    log, _ = run(rows, 1, Group(cost, shared=0.0), policy, blocks, asynchronous, patience_s)
    arrival, prompt, output = (np.array(column) for column in zip(*rows, strict=True))
    source = OpenLoop(arrival.astype(float), Requests(prompt, output, output, patience_s))
    _, alone = simulate(policy, cost, blocks, 4, asynchronous, source)
    for column in ("first_token_s", "finish_s", "output_tokens", "preemptions", "outcome"):
        here, there = log.requests.table(), alone.requests.table()
        assert here[column][np.argsort(here["id"])] == pytest.approx(
            there[column][np.argsort(there["id"])], nan_ok=True
        ), column


@given(workloads(40), st.integers(2, 5), costs, policies, st.booleans(), st.sampled_from([None, 3.0, 30.0]))
@settings(max_examples=100, deadline=None)
def test_invariants(rows, ranks, cost, policy, asynchronous, patience):
    patience_s = None if patience is None else np.full(len(rows), patience)
    log, members = run(rows, ranks, Group(cost), policy, 60, asynchronous, patience_s)
    for rank in members:
        assert rank.state.kv.free == rank.state.kv.usable
        assert rank.in_flight == 0
        assert rank.batch is None
    steps = spread(log, ranks)
    assert all(end <= start + 1e-6 for (_, end, _), (start, _, _) in pairwise(steps))


def test_the_slowest_rank_says_how_long_a_step_takes():
    """Rank 1's long answers slow rank 0 down, until they end."""
    cost = LinearCost(base=1.0, token=0.0, decode=0.0, kv=0.125, attention=0.0)
    rows = [(0.0, 1, 21), (0.0, 40, 11)]
    log, _ = run(rows, 2, Group(cost, shared=0.0), VllmV1(512, 8))
    table = log.requests.table()
    finish = dict(zip(table["id"].astype(int).tolist(), table["finish_s"].tolist(), strict=True))
    together = sum(1 + 0.125 * (40 + i) for i in range(10))
    assert finish[1] == pytest.approx(1.0 + together)
    assert finish[0] == pytest.approx(1.0 + together + sum(1 + 0.125 * (1 + i) for i in range(10, 20)))


def test_runs_are_long_where_nothing_happens():
    cost = LinearCost(base=1.0, token=0.0, decode=0.0, kv=0.125, attention=0.0)
    log, _ = run([(0.0, 1, 200), (0.0, 8, 200)], 2, Group(cost, shared=0.0), VllmV1(512, 8), blocks=200)
    assert len(log.steps) <= 6, "two prompts, and a run of each rank"


def test_an_endless_line():
    assert Group(LinearCost()).decode_lines([(1, 5)])[0][3] == inf
