"""Prefix caching: the fast cache equals the naive one, block for block, whatever is shared, preempted or given up."""

from __future__ import annotations

from math import inf

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sim.test_oracle import same, scenarios
from workloads.prefix import Prefix


def contents(prompts, rows, block_tokens, chained):
    """A `Prefix` with the content ids `rows`, and the tokens that each prompt begins with."""
    names: dict[tuple[int, ...], int] = {}
    begins, ids = [], []
    for prompt, row in zip(prompts, rows, strict=True):
        row = row[: -(-prompt // block_tokens)]
        chains = [tuple(row[: i + 1]) for i in range(len(row))]
        tokens = [(chain, i) for chain in chains for i in range(block_tokens)]
        begins.append(tokens[:prompt])
        ids += [names.setdefault(chain, len(names)) for chain in chains] if chained else row
    offsets = np.cumsum([0, *(-(-len(tokens) // block_tokens) for tokens in begins)])
    return Prefix(offsets, np.array(ids, dtype=np.int64), block_tokens, chained), begins


@st.composite
def shared(draw):
    """A scenario, and what its prompts begin with."""
    scenario = draw(scenarios())
    prompts = [prompt for _, prompt, *_ in scenario[-2]]
    rows = draw(st.lists(st.lists(st.integers(0, 1), max_size=13), min_size=len(prompts), max_size=len(prompts)))
    content = contents(prompts, rows, draw(st.sampled_from([1, 2, 3, 4, 8])), draw(st.booleans()))
    return scenario, {"content": content, "blank_first": draw(st.booleans())}


@settings(max_examples=600, deadline=None)
@given(shared())
def test_open_loop_equals_the_oracle(case):
    scenario, cache = case
    same(*scenario, **cache)


@settings(max_examples=200, deadline=None)
@given(shared(), st.integers(1, 6))
def test_closed_loop_equals_the_oracle(case, concurrency):
    scenario, cache = case
    same(*scenario, concurrency=concurrency, **cache)


@settings(max_examples=400, deadline=None)
@given(shared(), st.data())
def test_sessions_and_clients_that_give_up_equal_the_oracle(case, data):
    scenario, cache = case
    n = len(scenario[-2])
    some = st.sampled_from([0.0, 0.5, 1.0, 4.0]) | st.floats(0, 9)
    think_s = data.draw(st.none() | st.lists(some, min_size=n, max_size=n))
    patience = st.sampled_from([1.0, 2.5, 0.6875, inf, inf]) | st.floats(0.01, 60)
    patience_s = data.draw(st.none() | st.lists(patience, min_size=n, max_size=n))
    same(*scenario, think_s=think_s, patience_s=patience_s, **cache)
