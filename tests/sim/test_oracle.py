"""The fast engine equals the naive one: every token time, step, preemption and batch."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.schedulers.vllm_v1 import VllmV1
from sim.source import ClosedLoop, OpenLoop
from tests.sim.engine import LinearCost, simulate
from tests.sim.oracle import Naive, Oracle


def expand(steps):
    """One (start, end, decodes, kv_tokens, prefill_tokens, gaps) per engine step."""
    for row in zip(
        *(steps[c].tolist() for c in ("end_s", "steps", "decodes", "kv_tokens", "prefill_tokens")), strict=True
    ):
        end, k, decodes, kv, prefill = row
        for i in range(int(k)):
            yield (end if i == k - 1 else None, decodes, kv + i * decodes, prefill)


def same(policy, cost, num_blocks, block_size, asynchronous, requests, concurrency=None):
    """Run both engines and compare everything that they share."""
    prompts = np.array([r[1] for r in requests])
    outputs = np.array([r[2] for r in requests])
    caps = np.array([r[3] for r in requests])
    naive = [Naive(i, *r) for i, r in enumerate(requests)]
    oracle = Oracle(policy, cost, num_blocks, block_size, asynchronous)
    if concurrency is None:
        source = OpenLoop(np.array([float(r[0]) for r in requests]), prompts, outputs, caps)
        oracle.run(naive)
    else:
        source = ClosedLoop(concurrency, prompts, outputs, caps)
        for r in naive[:concurrency]:
            r.arrival_s = 0.0
        rest = iter(naive[concurrency:])

        def more(now):
            r = next(rest, None)
            if r is not None:
                r.arrival_s = now
            return r

        oracle.run(naive[:concurrency], more)
    _, log = simulate(policy, cost, num_blocks, block_size, asynchronous, source)
    rows, steps = log.requests.table(), log.steps.table()
    order = np.argsort(rows["id"])
    got = {c: rows[c][order].tolist() for c in rows}
    assert got["id"] == [r.id for r in naive]
    assert got["arrival_s"] == [r.arrival_s for r in naive]
    assert got["scheduled_s"] == [r.scheduled_s for r in naive]
    assert got["first_token_s"] == [r.token_s[0] for r in naive]
    assert got["finish_s"] == [r.token_s[-1] for r in naive]
    assert got["preemptions"] == [r.preemptions for r in naive]
    expected = [(s.end_s, s.decodes, s.kv_tokens, sum(n for _, n, _ in s.chunks)) for s in oracle.steps]
    actual = list(expand(steps))
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        assert a[1:] == e[1:]
        assert a[0] is None or a[0] == e[0]
    lost = (
        oracle.preemptions - steps["preempted"].sum()
    )  # by a plan that left nothing to compute, so that it has no row
    assert lost == 0 or (asynchronous and 0 < lost < 3)
    check_gaps(naive, oracle, steps, log)
    return oracle, log


def check_gaps(naive, oracle, steps, log):
    """Token gaps: what the step log gives as step durations, and the long ones, are all the gaps there are."""
    ends = [s.end_s for s in oracle.steps]
    position = {end: i for i, end in enumerate(ends)}
    plain, long = Counter(), []
    for r in naive:
        for a, b in zip(r.token_s, r.token_s[1:], strict=False):
            if position[b] == position[a] + 1:
                plain[position[b]] += 1
            else:
                long.append(b - a)
    weights = [int(g) for g, k in zip(steps["gaps"], steps["steps"], strict=True) for _ in range(int(k))]
    # A preemption that cost no step leaves a gap of one step: it is logged as a long one.
    assert sum(weights) + len(log.gaps) == sum(plain.values()) + len(long)
    assert all(w <= plain[i] for i, w in enumerate(weights))
    assert not Counter(long) - Counter(log.gaps.tolist())


@st.composite
def scenarios(draw):
    block_size = draw(st.sampled_from([1, 2, 3, 4, 16]))
    budget = draw(st.integers(1, 40))
    policy = VllmV1(
        max_num_batched_tokens=budget,
        max_num_seqs=draw(st.integers(1, min(8, budget) if draw(st.booleans()) else 8)),
        enable_chunked_prefill=draw(st.booleans()) or budget < 24,
        long_prefill_token_threshold=draw(st.sampled_from([0, 0, 1, 3, 7])),
        long_prefill_alone_exempt=draw(st.booleans()),
        scheduler_reserve_full_isl=draw(st.booleans()),
    )
    lengths = st.integers(1, 12) if policy.enable_chunked_prefill else st.integers(1, 8)
    requests = []
    arrival = 0.0
    longest = 0
    for _ in range(draw(st.integers(1, 25))):
        arrival += draw(st.sampled_from([0.0, 0.0, 0.5, 0.625, 1.0, 3.25, 20.0]) | st.floats(0, 5))
        prompt, output = draw(lengths), draw(st.integers(1, 12))
        requests.append((arrival, prompt, output, output + draw(st.sampled_from([0, 0, 5]))))
        longest = max(longest, prompt + output)
    num_blocks = 1 + -(-longest // block_size) + draw(st.integers(0, 3) | st.integers(0, 60))
    cost = LinearCost(
        kv=draw(st.sampled_from([0.0, 0.001, 0.0625])),
        floor=draw(st.sampled_from([0.0, 0.0, 1.0, 1.3])),
        straight=draw(st.booleans()),
    )
    return policy, cost, num_blocks, block_size, draw(st.booleans()), requests


@settings(max_examples=600, deadline=None)
@given(scenarios())
def test_open_loop_equals_the_oracle(scenario):
    same(*scenario)


@settings(max_examples=300, deadline=None)
@given(scenarios(), st.integers(1, 6))
def test_closed_loop_equals_the_oracle(scenario, concurrency):
    same(*scenario, concurrency=concurrency)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("num_blocks", [60, 400, 5000])
def test_long_runs_equal_the_oracle(asynchronous, num_blocks):
    """Runs of hundreds of steps, summed by numpy, with and without scarce blocks."""
    rng = np.random.default_rng(3)
    arrivals = np.cumsum(rng.exponential(40.0, 60))
    requests = [
        (float(a), int(p), int(o), int(o))
        for a, p, o in zip(arrivals, rng.integers(1, 200, 60), rng.integers(1, 600, 60), strict=True)
    ]
    cost = LinearCost(base=0.01, token=0.0003, decode=0.0007, kv=0.000013, floor=0.017)
    oracle, log = same(VllmV1(256, 16), cost, num_blocks, 16, asynchronous, requests)
    assert (oracle.preemptions > 0) == (num_blocks == 60)
    assert log.steps.table()["steps"].max() > 32 or num_blocks == 60
