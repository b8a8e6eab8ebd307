"""TensorRT-LLM's policy equals its counterpart in the naive engine; what distinguishes it, by hand."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.schedulers.tensorrt_llm import TensorrtLlm
from tests.sim.engine import LinearCost
from tests.sim.test_oracle import same
from tests.sim.test_prefixcache import contents


@st.composite
def scenarios(draw):
    block_size = draw(st.sampled_from([1, 2, 3, 4, 16]))
    requests, arrival, longest = [], 0.0, 0
    for _ in range(draw(st.integers(1, 25))):
        arrival += draw(st.sampled_from([0.0, 0.0, 0.5, 0.625, 1.0, 3.25, 20.0]) | st.floats(0, 5))
        prompt, output = draw(st.integers(1, 12)), draw(st.integers(1, 12))
        requests.append((arrival, prompt, output, output + draw(st.sampled_from([0, 0, 5]))))
        longest = max(longest, prompt + requests[-1][3])
    size, chunked = draw(st.integers(1, 8)), draw(st.booleans())
    least = size + block_size if chunked else max(size, longest)
    policy = TensorrtLlm(
        size,
        draw(st.integers(least, least + 30)),
        chunked,
        draw(st.sampled_from(["GUARANTEED_NO_EVICT", "MAX_UTILIZATION"])),
        draw(st.sampled_from([0, 0, 1, 3, 20])),
        draw(st.sampled_from([0.3, 0.9, 1.0])),
    )
    num_blocks = 1 + -(-longest // block_size) + draw(st.integers(0, 3) | st.integers(0, 60))
    cost = LinearCost(
        kv=draw(st.sampled_from([0.0, 0.001, 0.0625])),
        floor=draw(st.sampled_from([0.0, 0.0, 1.0, 1.3])),
        straight=draw(st.booleans()),
        knee=draw(st.sampled_from([0.0, 30.0, 75.5])),
    )
    return policy, cost, num_blocks, block_size, draw(st.booleans()), requests


@settings(max_examples=200, deadline=None)
@given(scenarios())
def test_open_loops_equal_the_oracle(scenario):
    same(*scenario)


@settings(max_examples=100, deadline=None)
@given(scenarios(), st.integers(1, 6))
def test_closed_loops_equal_the_oracle(scenario, concurrency):
    same(*scenario, concurrency=concurrency)


@settings(max_examples=100, deadline=None)
@given(scenarios(), st.data())
def test_sessions_and_clients_that_give_up_equal_the_oracle(scenario, data):
    n = len(scenario[-1])
    some = st.sampled_from([0.0, 0.5, 1.0, 4.0]) | st.floats(0, 9)
    think_s = data.draw(st.none() | st.lists(some, min_size=n, max_size=n))
    patience = st.sampled_from([1.0, 2.5, 0.6875, inf, inf]) | st.floats(0.01, 60)
    patience_s = data.draw(st.none() | st.lists(patience, min_size=n, max_size=n))
    same(*scenario, think_s=think_s, patience_s=patience_s)


@settings(max_examples=150, deadline=None)
@given(scenarios(), st.data())
def test_prefix_caches_equal_the_oracle(scenario, data):
    prompts = [prompt for _, prompt, *_ in scenario[-1]]
    rows = st.lists(st.lists(st.integers(0, 1), max_size=13), min_size=len(prompts), max_size=len(prompts))
    content = contents(prompts, data.draw(rows), data.draw(st.sampled_from([1, 2, 3, 4, 8])), data.draw(st.booleans()))
    same(*scenario, content=content)


def run(policy, requests, num_blocks=100):
    """Steps of the naive and of the fast engine, which are the same: (chunks, decodes, seconds at the end)."""
    oracle, _ = same(policy, LinearCost(), num_blocks, 4, False, requests)
    return [([(i, n) for i, n, _ in s.chunks], s.decodes) for s in oracle.steps], oracle


def test_nobody_is_admitted_whom_the_blocks_could_not_carry_to_its_max_tokens() -> None:
    requests = [(0.0, 4, 4, 12), (0.0, 4, 4, 12)]  # 4 blocks each by max_tokens, 2 by what they need
    steps, oracle = run(TensorrtLlm(8, 64), requests, num_blocks=1 + 7)
    assert steps[:2] == [([(0, 4)], 0), ([], 1)]
    assert oracle.preemptions == 0
    steps, _ = run(TensorrtLlm(8, 64, capacity_scheduler_policy="MAX_UTILIZATION"), requests, num_blocks=1 + 7)
    assert steps[0] == ([(0, 4), (1, 4)], 0)


def test_max_utilization_pauses_the_newest() -> None:
    requests = [(0.0, 4, 8, 8), (0.0, 4, 8, 8)]
    _, oracle = run(TensorrtLlm(8, 64, capacity_scheduler_policy="MAX_UTILIZATION"), requests, num_blocks=1 + 4)
    assert oracle.preemptions > 0


def test_prompts_wait_for_the_budget_whole() -> None:
    requests = [(0.0, 6, 2, 2), (0.0, 6, 2, 2)]
    assert run(TensorrtLlm(8, 10), requests)[0][:2] == [([(0, 6)], 0), ([(1, 6)], 1)]
    assert run(TensorrtLlm(8, 10, True), requests)[0][:2] == [([(0, 6), (1, 4)], 0), ([(1, 2)], 1)]


@pytest.mark.parametrize(("steps", "ratio", "expected"), [(3, 0.9, 4), (0, 0.9, 1), (20, 0.1, 1)])
def test_prompts_wait_for_others_while_some_generate(steps: int, ratio: float, expected: int) -> None:
    """The second arrives during the first one's prompt; it is computed after `expected` more steps."""
    policy = TensorrtLlm(8, 64, batch_wait_timeout_iters=steps, batch_wait_max_tokens_ratio=ratio)
    found, _ = run(policy, [(0.0, 6, 20, 20), (0.1, 6, 2, 2)])
    assert [i for i, (chunks, _) in enumerate(found) if chunks] == [0, expected]
