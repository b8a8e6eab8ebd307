"""Several samples of one prompt: to the engine as many requests that arrive together, to the client one."""

from __future__ import annotations

from math import inf

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from calibrate.engine import FrontEndTime
from sim.prefixcache import PrefixCache
from sim.samples import PROMPTS, STRIDE, shared_prompts
from sim.schedulers.vllm_v1 import VllmV1
from sim.source import ClosedLoop, OpenLoop, Requests, Sessions
from sim.steplog import CANCELLED
from tests.sim.engine import LinearCost, simulate
from tests.sim.oracle import Naive, oracle
from tests.sim.test_oracle import expand, scenarios
from tests.sim.test_policies import scenarios as scenarios_of
from tests.sim.test_policies import vllm_v0


def same(scenario, samples, patience_s=None, request_s=0.0, caching=False):
    """Both engines: the fast one gets requests with samples, the naive one a request a sample with equal prompts."""
    policy, cost, num_blocks, size, asynchronous, requests, priority = scenario
    columns = [np.array([r[i] for r in requests]) for i in (1, 2, 3)]
    samples = np.array(samples)
    naive = []
    for i, request in enumerate(requests):
        for k in range(samples[i]):
            r = Naive(i + k * STRIDE, *request)
            r.begins = [(i, "prompt", j) for j in range(r.prompt)]
            r.priority = 0 if priority is None else priority[i]
            r.patience_s = inf if patience_s is None else patience_s[i]
            naive.append(r)
    engine = oracle(policy, cost, num_blocks, size, asynchronous, request_s, caching=caching)
    engine.run(naive)
    paths = shared_prompts(None, columns[0], samples, size)
    arrival_s = np.array([float(r[0]) for r in requests])
    patience, order = (None if x is None else np.array(x) for x in (patience_s, priority))
    source = OpenLoop(arrival_s, Requests(*columns, patience, order, samples))
    kv = PrefixCache(num_blocks, size, paths, False) if caching else None
    _, log = simulate(policy, cost, num_blocks, size, asynchronous, source, FrontEndTime(request_s, 0.0), kv=kv)
    rows, steps = log.requests.table(), log.steps.table()
    rows = rows.take(np.argsort(rows["id"]))
    assert rows["id"].tolist() == list(range(len(requests)))
    assert rows["samples"].tolist() == samples.tolist()
    for i in range(len(requests)):
        mine = [r for r in naive if r.id % STRIDE == i]
        row = {name: rows[name][i] for name in rows}
        assert row["output_tokens"] == sum(r.out for r in mine)
        assert (row["outcome"] == CANCELLED) == any(r.cancelled_s is not None for r in mine)
        assert row["finish_s"] == max(r.token_s[-1] if r.cancelled_s is None else r.cancelled_s for r in mine)
        first = min((r.token_s[0] for r in mine if r.token_s), default=None)
        assert row["first_token_s"] == first or first is None
        if row["outcome"] != CANCELLED:
            assert row["scheduled_s"] == min(r.scheduled_s for r in mine)
            assert row["preemptions"] == sum(r.preemptions for r in mine)
            assert row["cached_tokens"] == sum(r.cached for r in mine)
    expected = [(s.decodes, s.kv_tokens, sum(n for _, n, _ in s.chunks)) for s in engine.steps]
    actual = list(expand(steps))
    assert [a[1:] for a in actual] == expected
    assert all(end is None or end == s.end_s for (end, *_), s in zip(actual, engine.steps, strict=True))
    return log


several = st.lists(st.sampled_from([1, 1, 2, 3, 5]), min_size=25, max_size=25)


@settings(max_examples=300, deadline=None)
@given(scenarios(), several, st.booleans(), st.sampled_from([0.0, 0.25, 3.0]), st.data())
def test_samples_are_requests_that_share_what_the_cache_finds(scenario, samples, caching, request_s, data):
    n = len(scenario[-2])
    patience = st.sampled_from([1.0, 2.5, 0.6875, inf, inf]) | st.floats(0.01, 60)
    patience_s = data.draw(st.none() | st.lists(patience, min_size=n, max_size=n))
    same(scenario, samples[:n], patience_s, request_s, caching)


@settings(max_examples=100, deadline=None)
@given(scenarios_of(vllm_v0), several)
def test_samples_of_vllm_v0_share_nothing(scenario, samples):
    same((*scenario, None), samples[: len(scenario[-1])])


def test_samples_share_their_prompt_beyond_what_others_share():
    paths = shared_prompts([[(7, 2)], [(7, 2)], []].__getitem__, np.array([40, 64, 64]), np.array([2, 2, 1]), 16)
    assert paths(STRIDE) == [(7, 2)]
    assert paths(1) == paths(1 + STRIDE) == [(7, 2), (PROMPTS + 1, 4)]
    assert paths(2) == []


def test_a_prompt_is_computed_once_where_it_is_cached():
    """Three samples of 20 tokens in blocks of 4: the first computes all of them, the others the last block alone."""
    cost, policy = LinearCost(base=1.0, token=0.0, decode=0.0, kv=0.0, attention=0.0), VllmV1(64, 8)
    request = [(0.0, 20, 3, 3)]
    shared = same((policy, cost, 60, 4, False, request, None), [3], caching=True).steps.table()
    apart = same((policy, cost, 60, 4, False, request, None), [3]).steps.table()
    assert shared["prefill_tokens"].tolist()[0] == 20 + 4 + 4
    assert apart["prefill_tokens"].tolist()[0] == 60
    assert shared["kv_blocks"][0] == 5 + 1 + 1
    assert apart["kv_blocks"][0] == 3 * 5


def test_clients_wait_for_the_last_of_their_samples():
    """Two places for three samples: the third begins when the others are over, and only then the client goes on."""
    cost, policy = LinearCost(base=1.0, token=0.0, decode=0.0, kv=0.0, attention=0.0), VllmV1(64, 2)
    of_three = Requests(*(np.array([x, x]) for x in (4, 2, 2)), samples=np.array([3, 1]))
    for source in (
        ClosedLoop(1, of_three),
        Sessions(np.zeros(2), of_three, np.array([-1, 0]), np.zeros(2)),
    ):
        _, log = simulate(policy, cost, 60, 4, False, source)
        rows = log.requests.table()
        assert rows["finish_s"].tolist() == [4.0, 6.0]
        assert rows["arrival_s"].tolist() == [0.0, 4.0]
        assert rows["first_token_s"].tolist() == [1.0, 5.0]
        assert rows["output_tokens"].tolist() == [6, 2]


def test_who_gives_up_takes_all_samples_back_and_a_session_ends_once():
    cost, policy = LinearCost(base=1.0, token=0.0, decode=0.0, kv=0.0, attention=0.0), VllmV1(64, 2)
    columns = [np.array([x, x, x]) for x in (4, 2, 2)]
    requests = Requests(*columns, patience_s=np.array([2.5, inf, inf]), samples=np.array([3, 1, 1]))
    source = Sessions(np.zeros(3), requests, np.array([-1, 0, 1]), np.zeros(3))
    _, log = simulate(policy, cost, 60, 4, False, source)
    rows = log.requests.table()
    assert (rows["outcome"].tolist(), rows["output_tokens"].tolist()) == ([CANCELLED], [4])
    assert (source.total, source.unsent) == (1, 2)
