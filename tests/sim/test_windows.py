"""Windows: the fast engine equals the naive one, token for token and block for block, whatever slides out of them."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.schedulers.vllm_v1 import VllmV1
from sim.source import OpenLoop, Requests
from sim.steplog import OUTCOMES
from sim.windows import Tables, Window
from tests.sim.engine import LinearCost, simulate
from tests.sim.test_oracle import same, scenarios


def bound(size, chunked, block_size, in_flight):
    """vLLM's `max_admission_blocks_per_request`, for sequences of any length."""
    return -(-(size + in_flight) // block_size) if chunked else -(-(size - 1 + in_flight) // block_size) + 1


@st.composite
def windowed(draw):
    """A scenario of a model with windows, and its block tables; a pool in which every request fits."""
    policy, cost, _, block_size, asynchronous, requests, priority = draw(scenarios())
    kinds = draw(st.lists(st.tuples(st.integers(1, 24), st.booleans(), st.integers(0, 3)), min_size=1, max_size=2))
    late = asynchronous and draw(st.booleans())
    in_flight = policy.max_num_batched_tokens * (1 + asynchronous)
    windows = tuple(Window(size, chunked, n, bound(size, chunked, block_size, in_flight)) for size, chunked, n in kinds)
    full = draw(st.integers(0 if any(w.tables for w in windows) else 1, 2))
    admission = draw(st.sampled_from(["window", "prompt"])) if policy.scheduler_reserve_full_isl else "step"
    tables = Tables(full, windows, admission, late)
    longest = max(prompt + output - 1 for _, prompt, output, _ in requests)
    num_blocks = 1 + tables.count * -(-longest // block_size) + draw(st.integers(0, 3) | st.integers(0, 60))
    slopes = tuple(draw(st.sampled_from([0.0, 0.001, 0.0625])) for _ in windows)
    cost = replace(cost, windows=slopes)
    return (policy, cost, num_blocks, block_size, asynchronous, requests, priority), tables


@settings(max_examples=200, deadline=None)
@given(windowed())
def test_open_loop_equals_the_oracle(case):
    scenario, tables = case
    same(*scenario, tables=tables)


@settings(max_examples=100, deadline=None)
@given(windowed(), st.integers(1, 6))
def test_closed_loop_equals_the_oracle(case, concurrency):
    scenario, tables = case
    same(*scenario, concurrency=concurrency, tables=tables)


@settings(max_examples=150, deadline=None)
@given(windowed(), st.data())
def test_sessions_and_clients_that_give_up_equal_the_oracle(case, data):
    scenario, tables = case
    n = len(scenario[-2])
    some = st.sampled_from([0.0, 0.5, 1.0, 4.0]) | st.floats(0, 9)
    think_s = data.draw(st.none() | st.lists(some, min_size=n, max_size=n))
    patience = st.sampled_from([1.0, 2.5, 0.6875, inf, inf]) | st.floats(0.01, 60)
    patience_s = data.draw(st.none() | st.lists(patience, min_size=n, max_size=n))
    same(*scenario, think_s=think_s, patience_s=patience_s, tables=tables)


WINDOW = Tables(1, (Window(128, False, 2, 25),))
CHUNKS = Tables(1, (Window(256, True, 3, 32),))


@pytest.mark.parametrize("tables", [WINDOW, replace(WINDOW, late=True), CHUNKS], ids=["window", "late", "chunks"])
@pytest.mark.parametrize("scarce", [False, True])
def test_long_runs_equal_the_oracle(tables, scarce):
    """Runs of hundreds of steps, with and without scarce blocks, and few of them."""
    rng = np.random.default_rng(3)
    arrivals = np.cumsum(rng.exponential(40.0, 60))
    lengths = zip(arrivals, rng.integers(1, 400, 60), rng.integers(1, 600, 60), strict=True)
    requests = [(float(a), int(p), int(o), int(o)) for a, p, o in lengths]
    cost = LinearCost(base=0.01, token=0.0003, decode=0.0007, kv=0.000013, floor=0.017, windows=(0.00002,))
    num_blocks = 260 if scarce else 5000
    oracle, log = same(VllmV1(256, 16), cost, num_blocks, 16, tables.late, requests, tables=tables)
    steps = log.steps.table()
    assert (oracle.preemptions > 0) == scarce
    assert steps["steps"].max() > 100 or scarce
    assert scarce or len(steps["steps"]) < 4 * len(requests)


@pytest.mark.parametrize("admission", ["step", "window", "prompt"])
def test_a_prompt_longer_than_the_pool(admission):
    """It slides through, unless all of it is reserved when it is admitted: then it could never be."""
    tables = Tables(0, (Window(8, False, 1, bound(8, False, 4, 8)),), admission)
    policy = VllmV1(8, 4, scheduler_reserve_full_isl=admission != "step")
    source = OpenLoop(np.zeros(2), Requests(np.array([100, 5]), np.array([50, 50]), np.array([50, 50])))
    _, log = simulate(policy, LinearCost(windows=(0.001,)), 9, 4, False, source, tables=tables)
    rows, steps = log.requests.table(), log.steps.table()
    long = int(np.flatnonzero(rows["id"] == 0)[0])
    assert rows["outcome"][long] == (OUTCOMES.index("over_kv_cache") if admission == "prompt" else 0)
    assert rows["output_tokens"][1 - long] == 50
    assert max(steps["kv_blocks"].max(), steps["kv_blocks_end"].max()) <= 8
