"""SGLang's policy equals its counterpart in the naive engine; what distinguishes it, by hand."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.schedulers.sglang import Sglang
from tests.sim.engine import LinearCost
from tests.sim.test_oracle import same
from tests.sim.test_prefixcache import contents


@st.composite
def scenarios(draw):
    block_size = draw(st.sampled_from([1, 1, 2, 4, 16]))
    requests, arrival, longest = [], 0.0, 0
    for _ in range(draw(st.integers(1, 25))):
        arrival += draw(st.sampled_from([0.0, 0.0, 0.5, 0.625, 1.0, 3.25, 20.0]) | st.floats(0, 5))
        prompt, output = draw(st.integers(1, 12)), draw(st.integers(1, 12))
        requests.append((arrival, prompt, output, output + draw(st.sampled_from([0, 0, 5, 40]))))
        longest = max(longest, prompt + requests[-1][3])
    running, overlap = draw(st.integers(1, 8)), draw(st.booleans())
    mixed = draw(st.booleans())
    chunk = block_size * draw(st.integers(1, 12)) + running * mixed
    policy = Sglang(
        running,
        chunk if mixed or draw(st.booleans()) else 0,
        draw(st.integers(1, 40)) + running * mixed,
        draw(st.sampled_from(["fcfs", "lpm"])),
        draw(st.sampled_from([1.0, 0.1, 0.0001, 3.0])),
        mixed,
        not overlap,
        draw(st.sampled_from([1, 1, 2, 3, 7])),
    )
    num_blocks = 2 + -(-longest // block_size) + draw(st.integers(0, 3) | st.integers(0, 60))
    cost = LinearCost(
        kv=draw(st.sampled_from([0.0, 0.001, 0.0625])),
        floor=draw(st.sampled_from([0.0, 0.0, 1.0, 1.3])),
        straight=draw(st.booleans()),
        knee=draw(st.sampled_from([0.0, 30.0, 75.5])),
    )
    return policy, cost, num_blocks, block_size, overlap, requests


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
    """Steps: (chunks, decodes) of each; and the naive engine, which has been compared with the fast one."""
    oracle, _ = same(policy, LinearCost(), num_blocks, 1, not policy.disable_overlap_schedule, requests)
    return [([(i, n) for i, n, _ in s.chunks], s.decodes) for s in oracle.steps], oracle


def test_prompts_go_first_and_alone() -> None:
    policy = Sglang(8, 16, 64, disable_overlap_schedule=True)
    steps, _ = run(policy, [(0.0, 4, 5, 5), (0.1, 20, 2, 2)])
    assert steps[:4] == [([(0, 4)], 0), ([(1, 16)], 0), ([(1, 4)], 0), ([], 2)]
    steps, _ = run(
        Sglang(8, 16, 64, enable_mixed_chunk=True, disable_overlap_schedule=True), [(0, 4, 5, 5), (0.1, 20, 2, 2)]
    )
    assert steps[:3] == [([(0, 4)], 0), ([(1, 15)], 1), ([(1, 5)], 1)]


def test_the_queue_closes_until_the_batch_is_smaller() -> None:
    policy = Sglang(2, 16, 64, disable_overlap_schedule=True)
    steps, _ = run(policy, [(0.0, 4, 2, 2), (0.0, 4, 9, 9), (0.0, 4, 2, 2)])
    # The first ends with the second step; the one after it finds the batch smaller, the next looks at the queue.
    assert steps[:5] == [([(0, 4), (1, 4)], 0), ([], 2), ([], 1), ([(2, 4)], 0), ([], 2)]


def test_overlap_runs_one_step_more_than_needed() -> None:
    steps, _ = run(Sglang(8, 16, 64), [(0.0, 4, 3, 3)])
    assert [decodes for _, decodes in steps] == [0, 1, 1, 1]


@pytest.mark.parametrize(("conservativeness", "together"), [(1.0, False), (0.1, True)])
def test_admission_expects_a_share_of_max_tokens(conservativeness: float, together: bool) -> None:
    """20 tokens of KV: the second request needs 4 + 6, beside 4 held and a share of the first one's 15."""
    policy = Sglang(8, 16, 64, schedule_conservativeness=conservativeness, disable_overlap_schedule=True)
    steps, oracle = run(policy, [(0.0, 4, 3, 15), (0.1, 4, 6, 6)], num_blocks=1 + 20)
    assert (steps[1] == ([(1, 4)], 0)) == together
    assert oracle.preemptions == 0


def test_the_shortest_answer_is_retracted_to_the_end_of_the_queue() -> None:
    requests = [(0.0, 4, 12, 12), (0.1, 4, 12, 12), (0.2, 4, 3, 3)]
    policy = Sglang(2, 16, 64, schedule_conservativeness=0.0001, disable_overlap_schedule=True)
    _, oracle = run(policy, requests, num_blocks=1 + 22)
    assert oracle.preemptions == 1


def test_a_prompt_that_must_go_on_may_find_no_page() -> None:
    """The decoding request grows while the other's chunks are computed; SGLang then stops, and so does the run."""
    policy = Sglang(8, 4, 64, schedule_conservativeness=0.0001, enable_mixed_chunk=True, disable_overlap_schedule=True)
    _, log = same(policy, LinearCost(), 1 + 22, 1, False, [(0.0, 4, 12, 12), (0.1, 14, 2, 2)])
    assert log is None


@pytest.mark.parametrize(("interval", "decodes"), [(1, 1), (4, 4), (10, 10)])
def test_requests_are_received_every_so_many_decode_steps(interval, decodes):
    """The first request decodes from 0.75 s on; the second comes at once and is read after so many steps."""
    policy = Sglang(8, 64, 64, disable_overlap_schedule=True, scheduler_recv_interval=interval)
    steps, _ = run(policy, [(0.0, 4, 40, 40), (0.76, 4, 2, 2)])
    assert [i for i, (chunks, _) in enumerate(steps) if chunks] == [0, decodes + 1]


def test_requests_are_received_after_every_step_with_prompts():
    """Two that come while prompts are read are not kept waiting for the tenth decode."""
    policy = Sglang(8, 64, 64, disable_overlap_schedule=True, scheduler_recv_interval=10)
    steps, _ = run(policy, [(0.0, 4, 40, 40), (0.1, 4, 2, 2), (0.9, 4, 2, 2)])
    assert [chunks for chunks, _ in steps[:4]] == [[(0, 4)], [(1, 4)], [(2, 4)], []]
