"""Speculative decoding: the fast engine equals the naive one, whatever is accepted, preempted, trimmed or cached."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from sim.drafts import Drafting
from sim.schedulers.vllm_v1 import VllmV1
from tests.examples import examples
from tests.sim.engine import LinearCost
from tests.sim.test_oracle import same, scenarios
from tests.sim.test_prefixcache import contents


@st.composite
def speculating(draw, caching=False):
    """A scenario, and how its engine drafts. There is room for whatever a request can hold."""
    policy, cost, _, block_size, asynchronous, requests, priority = draw(scenarios())
    tokens = draw(st.integers(1, 5))
    if draw(st.booleans()):
        slots = draw(st.integers(0, 2))
        budget = max(policy.max_num_batched_tokens, 1 + tokens + slots)
        policy = replace(policy, draft_slots=slots, pads_decodes=True, max_num_batched_tokens=budget)
    rates = sorted(
        draw(st.lists(st.sampled_from([0.0, 0.3, 0.7, 1.0]), min_size=tokens, max_size=tokens)), reverse=True
    )
    longest = max(prompt + output for _, prompt, output, _ in requests)
    capped = max(prompt + cap for _, prompt, _, cap in requests)
    drafting = Drafting(
        tokens,
        rates,
        draw(st.sampled_from([0, tokens])),
        draw(st.booleans()),
        capped + draw(st.sampled_from([0, 3, 10**6])),
        asynchronous,
        draw(st.integers(0, 99)),
        1.0 if asynchronous else draw(st.sampled_from([1.0, 1.0, 0.0, 0.5])),
    )
    most = min(longest + drafting.slack, drafting.max_model_len)
    num_blocks = 1 + -(-most // block_size) + draw(st.integers(0, 3) | st.integers(0, 60))
    more = {"drafting": drafting}
    if caching:
        prompts = [prompt for _, prompt, *_ in requests]
        rows = draw(st.lists(st.lists(st.integers(0, 1), max_size=13), min_size=len(prompts), max_size=len(prompts)))
        content = contents(prompts, rows, draw(st.sampled_from([1, 2, 3, 4, 8])), draw(st.booleans()))
        more |= {"content": content, "blank_first": draw(st.booleans()), "drops_last": draw(st.booleans())}
    return (policy, cost, num_blocks, block_size, asynchronous, requests, priority), more


@examples(800)
@given(speculating())
def test_open_loop_equals_the_oracle(case):
    scenario, more = case
    same(*scenario, **more)


def test_who_is_preempted_in_the_plan_that_dropped_its_drafts_has_them_again():
    policy = VllmV1(2, 2, True, 1, True, False, "priority")
    rows = [(0.0, 1, 1, 1), (0.0, 1, 5, 5), (0.5, 1, 3, 3), (0.5, 1, 1, 1)]
    drafting = Drafting(1, [0.0], 0, False, 6, False, 0)
    naive, _ = same(policy, LinearCost(kv=0.0, straight=False), 7, 1, False, rows, [0, 1, 0, 0], drafting=drafting)
    assert [step.drafts for step in naive.steps][-1] == 1


@examples(300)
@given(speculating(), st.integers(1, 6))
def test_closed_loop_equals_the_oracle(case, concurrency):
    scenario, more = case
    same(*scenario, concurrency=concurrency, **more)


@examples(600)
@given(speculating(caching=True))
def test_with_a_prefix_cache_it_equals_the_oracle(case):
    scenario, more = case
    same(*scenario, **more)


@examples(400)
@given(speculating(caching=True), st.data())
def test_sessions_and_clients_that_give_up_equal_the_oracle(case, data):
    scenario, more = case
    n = len(scenario[-2])
    some = st.sampled_from([0.0, 0.5, 1.0, 4.0]) | st.floats(0, 9)
    think_s = data.draw(st.none() | st.lists(some, min_size=n, max_size=n))
    patience = st.sampled_from([1.0, 2.5, 0.6875, inf, inf]) | st.floats(0.01, 60)
    patience_s = data.draw(st.none() | st.lists(patience, min_size=n, max_size=n))
    same(*scenario, think_s=think_s, patience_s=patience_s, **more)
