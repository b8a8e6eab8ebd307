"""Prefix caching of layers with windows: the fast engine equals the naive one, block for block, whatever slides out of
windows while others look for it."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.schedulers.vllm_v1 import VllmV1
from sim.windows import Tables, Window
from tests.examples import examples
from tests.sim.engine import LinearCost
from tests.sim.test_oracle import same, scenarios
from tests.sim.test_prefixcache import contents
from tests.sim.test_windows import bound


@st.composite
def hybrids(draw):
    """A scenario of a model with windows, its block tables, and what its prompts begin with."""
    policy, cost, _, block_size, asynchronous, requests, priority = draw(scenarios())
    late = asynchronous and draw(st.booleans())
    in_flight = policy.max_num_batched_tokens * (1 + late)
    full = draw(st.integers(0, 2))
    windows = []
    for _ in range(draw(st.integers(1, 2)) if full else 1):
        chunked = full > 0 and draw(st.booleans())  # a model of nothing but chunks finds what nobody has computed
        size = draw(st.integers(1, 8)) * block_size if chunked else draw(st.integers(2, 24))
        tables = draw(st.integers(1, 3)) if full else 1
        windows.append(Window(size, chunked, tables, bound(size, chunked, block_size, in_flight)))
    admission = draw(st.sampled_from(["window", "prompt"])) if policy.scheduler_reserve_full_isl else "step"
    blank_first = draw(st.booleans())
    tables = Tables(full, tuple(windows), admission, late, blank_first and draw(st.booleans()))
    longest = max(prompt + output - 1 for _, prompt, output, _ in requests)
    num_blocks = 1 + tables.count * -(-longest // block_size) + draw(st.integers(0, 3) | st.integers(0, 60))
    slopes = tuple(draw(st.sampled_from([0.0, 0.001, 0.0625])) for _ in windows)
    prompts = [prompt for _, prompt, *_ in requests]
    rows = draw(st.lists(st.lists(st.integers(0, 1), max_size=13), min_size=len(prompts), max_size=len(prompts)))
    content = contents(prompts, rows, draw(st.sampled_from([1, 2, 3, 4, 8])), draw(st.booleans()))
    scenario = policy, replace(cost, windows=slopes), num_blocks, block_size, asynchronous, requests, priority
    return scenario, {"tables": tables, "content": content, "blank_first": blank_first}


@examples(600)
@given(hybrids())
def test_open_loop_equals_the_oracle(case):
    scenario, cache = case
    same(*scenario, **cache)


@examples(200)
@given(hybrids(), st.integers(1, 6))
def test_closed_loop_equals_the_oracle(case, concurrency):
    scenario, cache = case
    same(*scenario, concurrency=concurrency, **cache)


@examples(400)
@given(hybrids(), st.data())
def test_sessions_and_clients_that_give_up_equal_the_oracle(case, data):
    scenario, cache = case
    n = len(scenario[-2])
    some = st.sampled_from([0.0, 0.5, 1.0, 4.0]) | st.floats(0, 9)
    think_s = data.draw(st.none() | st.lists(some, min_size=n, max_size=n))
    patience = st.sampled_from([1.0, 2.5, 0.6875, inf, inf]) | st.floats(0.01, 60)
    patience_s = data.draw(st.none() | st.lists(patience, min_size=n, max_size=n))
    same(*scenario, think_s=think_s, patience_s=patience_s, **cache)


WINDOW = Tables(1, (Window(128, False, 2, 25),))
ENDS = replace(WINDOW, late=True, keeps_ends=True)
CHUNKS = Tables(1, (Window(256, True, 3, 32),))


@pytest.mark.parametrize("tables", [WINDOW, ENDS, CHUNKS], ids=["window", "ends", "chunks"])
@pytest.mark.parametrize("scarce", [False, True])
def test_long_runs_equal_the_oracle(tables, scarce):
    """Runs of hundreds of steps, with and without scarce blocks, and few of them; much is found again."""
    rng = np.random.default_rng(3)
    arrivals = np.cumsum(rng.exponential(40.0, 60))
    lengths = zip(arrivals, rng.integers(1, 400, 60), rng.integers(1, 600, 60), strict=True)
    requests = [(float(a), int(p), int(o), int(o)) for a, p, o in lengths]
    rows = [[0] * int(rng.integers(1, 400)) for _ in requests]
    cost = LinearCost(base=0.01, token=0.0003, decode=0.0007, kv=0.000013, floor=0.017, windows=(0.00002,))
    num_blocks = 260 if scarce else 5000
    oracle, log = same(
        VllmV1(256, 16), cost, num_blocks, 16, tables.late, requests, tables=tables, blank_first=tables.keeps_ends,
        content=contents([prompt for _, prompt, *_ in requests], rows, 16, False),
    )  # fmt: skip
    steps = log.steps.table()
    assert log.requests.table()["cached_tokens"].sum() > 2000
    assert (oracle.preemptions > 0) == scarce
    assert steps["steps"].max() > 100 or scarce
    # runs end where somebody passes what others hold, too
    assert scarce or len(steps["steps"]) < 6 * len(requests)


def finds(tables, *lengths):
    """What prompts of these lengths find that come one after the other, each beginning with all of the one before."""
    rows = [[0] * prompt for prompt in lengths]
    requests = [(100.0 * i, prompt, 1, 1) for i, prompt in enumerate(lengths)]
    cost = LinearCost(windows=(0.0,))
    content = contents(list(lengths), rows, 4, False)
    _, log = same(VllmV1(64, 4), cost, 999, 4, False, requests, content=content, blank_first=True, tables=tables)
    rows = log.requests.table()
    return rows["cached_tokens"][np.argsort(rows["id"])].tolist()


def test_what_is_found_again():
    """A window needs its own last tokens only; where ends are kept, those of prompts and of what two had in common."""
    dense, ends = (Tables(1, (Window(8, False, 1, 20),), keeps_ends=keeps) for keeps in (False, True))
    assert finds(dense, 41, 45, 25, 21) == [0, 40, 24, 20]
    assert finds(ends, 41, 45, 25, 25) == [0, 40, 0, 24]
    assert finds(replace(dense, full=0, windows=(Window(8, False, 1, 20),)), 41, 25) == [0, 24]
    assert finds(Tables(1, (Window(16, True, 1, 20),)), 41, 45, 33, 31) == [0, 40, 32, 28]
