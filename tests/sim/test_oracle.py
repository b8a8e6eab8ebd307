"""The fast engine equals the naive one: every token time, step, preemption and batch."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import pairwise
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibrate.engine import FrontEndTime
from servecast.errors import ServecastError
from sim.hybridcache import HybridCache
from sim.prefixcache import PrefixCache
from sim.radixcache import RadixCache
from sim.samples import shared_prompts
from sim.schedulers.vllm_v1 import VllmV1
from sim.source import ClosedLoop, OpenLoop, Requests, Sessions
from sim.steplog import CANCELLED, GAP_COLUMNS, HOLDS
from sim.streams import Streams
from sim.windows import ONE
from tests.examples import examples
from tests.sim.engine import LinearCost, simulate
from tests.sim.oracle import Naive, oracle
from workloads.content import content_of


def expand(steps):
    """(end, decodes, kv_tokens, prefill_tokens) of each engine step; no end inside a run."""
    for row in zip(
        *(steps[c].tolist() for c in ("end_s", "steps", "decodes", "kv_tokens", "prefill_tokens")), strict=True
    ):
        end, k, decodes, kv, prefill = row
        for i in range(int(k)):
            yield (end if i == k - 1 else None, decodes, kv + i * decodes, prefill)


def same(
    policy,
    cost,
    num_blocks,
    block_size,
    asynchronous,
    requests,
    priority=None,
    concurrency=None,
    think_s=None,
    patience_s=None,
    front_end=(0.0, 0.0),
    content=None,
    blank_first=False,
    tables=ONE,
    drafting=None,
    drops_last=False,
    first_s=None,
    retries=None,
    backoff_s=None,
    network_s=None,
    waits=None,
    hold_s=None,
):
    """Run both engines and compare everything that they share.

    `content`: a `Prefix`, and the tokens that it says each prompt begins with, for engines with a prefix cache.
    `concurrency` makes it a closed loop; `think_s`, per request, sessions in which request i follows request i - 3.
    `waits`, per request: instead of that, for which ones it waits, if for any; its `think_s` begins with the last.
    `first_s` and `patience_s`: when clients give up, after which they try again `retries` times, `backoff_s` later;
    `network_s`: their way to the gateway and back. `hold_s`: how long the KV of each stays for the next turn of its
    session. All per request.
    """
    columns = [np.array([r[i] for r in requests]) for i in (1, 2, 3)]
    n = len(requests)
    arrival_s = np.array([float(r[0]) for r in requests])
    naive = [Naive(i, *r) for i, r in enumerate(requests)]
    more = {"patience_s": patience_s, "priority": priority, "first_s": first_s, "retries": retries}
    more |= {"backoff_s": backoff_s, "network_s": network_s, "hold_s": hold_s}
    for name, values in more.items():
        for r, value in zip(naive, values or [], strict=False):
            setattr(r, name, value)
    asked = {key: None if values is None else np.array(values) for key, values in more.items()}
    asked["first_token_s"] = asked.pop("first_s")
    if hold_s is not None:
        asked["next_turn"] = np.where(np.arange(n) + 3 < n, np.arange(n) + 3, -1)
        for r, following in zip(naive, asked["next_turn"].tolist(), strict=True):
            r.next_id = following
    asked = Requests(*columns, **asked)
    for r in naive:
        travel(r, r.arrival_s)
    kv = None
    if content is not None:
        prefix, begins = content
        if retries is not None:
            begins = [
                [*tokens, *(((i, "prompt"), j) for j in range(len(tokens), r.prompt))] if r.retries else tokens
                for i, (tokens, r) in enumerate(zip(begins, naive, strict=True))
            ]
        if policy.prefix_tree:
            kv = RadixCache(num_blocks, block_size, known(prefix, columns[0], 1, retries))
        else:
            path = known(prefix, columns[0], block_size, retries)
            kv = cache(num_blocks, block_size, path, blank_first, tables, drops_last)
        for r, tokens in zip(naive, begins, strict=True):
            r.begins = tokens
    speculates = {} if drafting is None else {"drafting": drafting, "drops_last": drops_last}
    naive_engine = oracle(
        policy, cost, num_blocks, block_size, asynchronous, *front_end, content is not None, blank_first, tables,
        **speculates,
    )  # fmt: skip
    if concurrency is not None:
        source = ClosedLoop(concurrency, asked)
        for r in naive[:concurrency]:
            travel(r, 0.0)
        rest = iter(naive[concurrency:])
        first, follow_up = naive[:concurrency], lambda r, now: arriving(next(rest, None), r, now)
    elif waits is not None:
        edges = [(i, before) for i, others in enumerate(waits) for before in others[1:]]
        joins = tuple(np.array(side, dtype=np.int64) for side in (zip(*edges, strict=True) if edges else ([], [])))
        previous = np.array([others[0] if others else -1 for others in waits])
        source = Sessions(arrival_s, asked, previous, np.array(think_s), joins)
        first, heard = [r for r, others in zip(naive, waits, strict=True) if not others], {}

        def follow_up(r, now):
            heard[r.id] = now + r.network_s / 2
            ready = [i for i, others in enumerate(waits) if r.id in others and all(j in heard for j in others)]
            for i in ready:
                travel(naive[i], max(heard[j] for j in waits[i]) + think_s[i])
            return [naive[i] for i in ready]
    elif think_s is not None:
        previous = np.where(np.arange(n) < 3, -1, np.arange(n) - 3)
        source = Sessions(arrival_s, asked, previous, np.array(think_s))
        first = naive[:3]

        def follow_up(r, now):
            i = r.id + 3
            return arriving(naive[i], r, now, think_s[i]) if i < n else None
    else:
        source = OpenLoop(arrival_s, asked)
        first, follow_up = naive, lambda r, now: None
    fast = partial(
        simulate,
        policy, cost, num_blocks, block_size, asynchronous, source, FrontEndTime(*front_end), kv=kv, tables=tables,
        drafting=drafting,
    )  # fmt: skip
    try:
        sent = naive_engine.run(sorted(first, key=lambda r: r.arrival_s), follow_up)
    except IndexError:  # no block is left: where an engine stops, so does ours
        with pytest.raises(ServecastError, match="runs out of memory"):
            fast()
        return naive_engine, None
    replica, log = fast()
    rows, steps = log.requests.table(), log.steps.table()
    order = np.argsort(rows["id"])
    got = {c: rows[c][order].tolist() for c in rows}
    holds = log.holds.table()
    let_go = zip(holds["id"].tolist(), (HOLDS[int(why)] for why in holds["why"]), strict=True)
    assert sorted(let_go) == sorted(naive_engine.let_go)
    check_given_up([r for r in sent if r.cancelled_s is not None], log)
    sent = sorted((r for r in sent if not r.again), key=lambda r: r.id)
    assert source.unsent == n - len(sent)
    assert got["id"] == [r.id for r in sent]
    assert got["arrival_s"] == [r.since_s for r in sent]
    assert got["network_s"] == [r.network_s for r in sent]
    assert got["output_tokens"] == [r.out for r in sent]
    assert got["finish_s"] == [r.token_s[-1] if r.cancelled_s is None else r.cancelled_s for r in sent]
    assert [o == CANCELLED for o in got["outcome"]] == [r.cancelled_s is not None for r in sent]
    for r, scheduled_s, first_token_s, preemptions, cached in zip(
        sent, *(got[c] for c in ("scheduled_s", "first_token_s", "preemptions", "cached_tokens")), strict=True
    ):
        assert first_token_s == r.token_s[0] if r.token_s else first_token_s != first_token_s
        if r.cancelled_s is None:
            assert (scheduled_s, preemptions, cached) == (r.scheduled_s, r.preemptions, r.cached)
    expected = [(s.end_s, s.decodes, s.kv_tokens, sum(n for _, n, _ in s.chunks)) for s in naive_engine.steps]
    actual = list(expand(steps))
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        assert a[1:] == e[1:]
        assert a[0] is None or a[0] == e[0]
    first = np.cumsum(steps["steps"]).astype(int) - steps["steps"].astype(int)
    used = np.array([s.used for s in naive_engine.steps])
    if drafting is not None:
        assert [s.drafts for s in naive_engine.steps] == steps["draft_tokens"].tolist()
        if patience_s is None:
            assert [s.out for s in naive_engine.steps] == steps["output_tokens"].tolist()
    assert used[first].tolist() == steps["kv_blocks"].tolist()
    assert used[first + steps["steps"].astype(int) - 1].tolist() == steps["kv_blocks_end"].tolist()
    # Those of a plan that left nothing to compute go into the next row, if there is one.
    assert steps["preempted"].sum() + replica.lost_preemptions == naive_engine.preemptions
    if patience_s is None and first_s is None:
        check_gaps(sent, naive_engine, steps, log, drafting)
    return naive_engine, log


def cache(num_blocks, block_size, paths, blank_first, tables, drops_last=False):
    """The prefix cache of layers with these block tables."""
    if tables.windows:
        return HybridCache(num_blocks, block_size, paths, blank_first, tables)
    return PrefixCache(num_blocks, block_size, paths, blank_first, drops_last)


def known(prefix, prompts, block_size, retries):
    """What each prompt begins with; those that may be sent again have all of it in common with themselves."""
    path = content_of(prefix, prompts, block_size).path
    return path if retries is None else shared_prompts(path, prompts, np.array(retries) + 1, block_size)


def travel(r, sent_s):
    """Its client sends `r`."""
    r.since_s, r.arrival_s = sent_s, sent_s + r.network_s / 2


def arriving(request, over, now, think_s=0.0):
    """`request`, if there is one, is sent once its client has heard of `over`, which ended at `now`."""
    if request is not None:
        travel(request, now + over.network_s / 2 + think_s)
    return request


def check_given_up(naive, log):
    """Every try that was given up."""
    rows = log.given_up.table()
    columns = ("id", "arrival_s", "end_s", "again", "prompt_tokens", "output_tokens")
    got = sorted(zip(*(rows[c].tolist() for c in columns), strict=True))
    assert got == sorted((r.id, r.arrival_s, r.cancelled_s, r.again, r.read, r.out) for r in naive)
    late = sorted(zip(rows["id"].tolist(), rows["arrival_s"].tolist(), rows["late"].tolist(), strict=True))
    for r, (*_, said) in zip(sorted(naive, key=lambda r: (r.id, r.arrival_s)), late, strict=True):
        assert r.patience_s == r.first_s or said == (not r.token_s and r.first_s < r.patience_s)


def check_gaps(naive, engine, steps, log, drafting=None):
    """Token gaps: what the step log gives as step durations, and the long ones, are all the gaps there are."""
    ends = [s.end_s for s in engine.steps]
    position = {end: i for i, end in enumerate(ends)}
    plain, long = Counter(), []
    for r in naive:
        times = list(dict.fromkeys(r.token_s))  # tokens that come together are one delivery
        for a, b in pairwise(times):
            if position[b] == position[a] + 1:
                plain[position[b]] += 1
            else:
                long.append((r.id, a, b))
    weights = [int(g) for g, k in zip(steps["gaps"], steps["steps"], strict=True) for _ in range(int(k))]
    # A preemption that cost no step leaves a gap of one step: it is logged as a long one.
    logged = Counter()
    for id, since, end, tokens in zip(*(log.gaps.table()[c].tolist() for c in GAP_COLUMNS), strict=True):
        logged[int(id), since, end] += int(tokens)
    assert sum(weights) + logged.total() == sum(plain.values()) + len(long)
    assert all(w <= plain[i] for i, w in enumerate(weights))
    not_alone = Counter((-1, a, b) for _, a, b in (Counter(long) - logged).elements())
    assert not not_alone - logged, "what is not in the log by its request is one of all who waited"
    check_streams(naive, log, drafting)


def check_streams(naive, log, drafting):
    """Gaps between messages, and the times of tokens, against those of every token, whatever a message holds."""
    rows = log.requests.table()
    rows = rows.take(np.argsort(rows["id"]))
    assert rows["id"].tolist() == [r.id for r in naive]
    for each in (None, 1 + np.arange(len(naive)) % 4) if drafting is None else (None,):
        by_step = None if drafting is None else np.ones(len(naive), bool)
        streams = Streams(rows, log.steps.table(), log.gaps.table(), each, by_step)
        sent = (
            [list(dict.fromkeys(r.token_s)) for r in naive]
            if drafting
            else [
                r.token_s[:-1:k] + r.token_s[-1:]
                for r, k in zip(naive, np.ones(len(naive), int) if each is None else each, strict=True)
            ]
        )
        gaps = [np.diff(times) for times in sent]
        assert streams.counts().tolist() == [len(g) for g in gaps]
        longest = [g.max() if len(g) else np.nan for g in gaps]
        assert np.allclose(streams.longest_gaps(), longest, rtol=0, atol=1e-6, equal_nan=True)
        every = np.unique(np.concatenate([[0.0], *gaps]))
        apart = np.flatnonzero(np.diff(every) > 1e-5)
        for i in apart[:: max(1, len(apart) // 3)]:
            limit = (every[i] + every[i + 1]) / 2
            expected = [(g > limit).sum() if len(g) else np.nan for g in gaps]
            assert np.array_equal(streams.over(limit), expected, equal_nan=True), limit
        for share in (0.3, 0.7):
            number = np.array([1 + int(share * (r.out - 1)) for r in naive])
            seen = [
                next(t for t in times if t >= r.token_s[n - 1]) for r, times, n in zip(naive, sent, number, strict=True)
            ]
            message = None
            if drafting is not None:
                message = np.array([1 + times.index(t) for t, times in zip(seen, sent, strict=True)])
                steps = log.steps.table()
                all_in = (steps["draft_tokens"] == steps["decodes"] * drafting.tokens).all()
                for r, n, m in zip(naive, number.tolist(), message.tolist(), strict=True) if all_in else ():
                    assert m == 1 + drafting.steps(r.id, n - 1) or r.preemptions
            assert np.allclose(streams.token_s(number, message), seen, rtol=0, atol=1e-6)


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
        scheduling_policy=draw(st.sampled_from(["fcfs", "priority"])),
        preemption_skips_one=draw(st.booleans()),
        watermark=draw(st.sampled_from([0.0, 0.0, 0.05, 0.3, 0.9])),
    )
    lengths = st.integers(1, 12) if policy.enable_chunked_prefill else st.integers(1, 8)
    requests = []
    arrival = 0.0
    longest = 0
    for _ in range(draw(st.integers(1, 25))):
        arrival += draw(st.sampled_from([0.0, 0.0, 0.5, 0.625, 1.0, 3.25, 20.0]) | st.floats(0, 5))
        prompt, output = draw(lengths), draw(st.integers(1, 12))
        requests.append((arrival, prompt, output, output + draw(st.sampled_from([0, 0, 5]))))
        longest = max(longest, prompt + output - 1)
    num_blocks = 1 + -(-longest // block_size) + draw(st.integers(0, 3) | st.integers(0, 60))
    cost = LinearCost(
        kv=draw(st.sampled_from([0.0, 0.001, 0.0625])),
        floor=draw(st.sampled_from([0.0, 0.0, 1.0, 1.3])),
        straight=draw(st.booleans()),
        knee=draw(st.sampled_from([0.0, 30.0, 75.5])),
    )
    priority = [draw(st.integers(0, 3)) for _ in requests] if policy.by_priority else None
    return policy, cost, num_blocks, block_size, draw(st.booleans()), requests, priority


@examples(600)
@given(scenarios())
def test_open_loop_equals_the_oracle(scenario):
    same(*scenario)


@examples(300)
@given(scenarios(), st.integers(1, 6))
def test_closed_loop_equals_the_oracle(scenario, concurrency):
    same(*scenario, concurrency=concurrency)


@examples(300)
@given(scenarios(), st.data())
def test_sessions_and_clients_that_give_up_equal_the_oracle(scenario, data):
    n = len(scenario[-2])
    some = st.sampled_from([0.0, 0.5, 1.0, 4.0]) | st.floats(0, 9)
    think_s = data.draw(st.none() | st.lists(some, min_size=n, max_size=n))
    patience = st.sampled_from([1.0, 2.5, 0.6875, inf, inf]) | st.floats(0.01, 60)
    patience_s = data.draw(st.none() | st.lists(patience, min_size=n, max_size=n))
    same(*scenario, think_s=think_s, patience_s=patience_s)


@st.composite
def clients(draw, n):
    """How n clients are: impatient, persistent, far away."""
    limits = st.sampled_from([1.0, 2.5, 0.6875, inf, inf]) | st.floats(0.01, 60)
    lists = {"patience_s": limits, "first_s": limits, "network_s": st.sampled_from([0.0, 0.0, 0.2517, 1.0173])}
    found = {name: draw(st.none() | st.lists(each, min_size=n, max_size=n)) for name, each in lists.items()}
    if (found["patience_s"] or found["first_s"]) and draw(st.booleans()):
        found["retries"] = draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
        found["backoff_s"] = draw(st.lists(st.sampled_from([0.0, 0.5031, 2.0059]), min_size=n, max_size=n))
    return found


@examples(500)
@given(scenarios(), st.sampled_from([0.0, 0.0, 0.25]), st.data())
def test_clients_that_wait_retry_and_are_far_away_equal_the_oracle(scenario, request_s, data):
    n = len(scenario[-2])
    think_s = data.draw(st.none() | st.lists(st.sampled_from([0.0, 0.5, 4.0]), min_size=n, max_size=n))
    same(*scenario, think_s=think_s, front_end=(request_s, 0.0), **data.draw(clients(n)))


@examples(400)
@given(scenarios(), st.data())
def test_requests_that_wait_for_several_answers_equal_the_oracle(scenario, data):
    n = len(scenario[-2])
    think_s = data.draw(st.lists(st.sampled_from([0.0, 0.5031, 4.0077]) | st.floats(0, 9), min_size=n, max_size=n))
    waits = [data.draw(st.lists(st.integers(0, i - 1), max_size=3, unique=True)) if i else [] for i in range(n)]
    same(*scenario, think_s=think_s, waits=waits, **data.draw(clients(n)))


@examples(300)
@given(scenarios(), st.sampled_from([0.0, 0.25, 0.5, 3.0]), st.sampled_from([0.0, 0.0625, 0.5]), st.data())
def test_front_ends_equal_the_oracle(scenario, request_s, prompt_token_s, data):
    n = len(scenario[-2])
    if data.draw(st.booleans()) and request_s:
        same(*scenario, concurrency=data.draw(st.integers(1, 6)), front_end=(request_s, prompt_token_s))
        return
    patience = st.sampled_from([0.5, 1.0, 2.5, inf]) | st.floats(0.01, 60)
    patience_s = data.draw(st.none() | st.lists(patience, min_size=n, max_size=n))
    think_s = data.draw(st.none() | st.lists(st.sampled_from([0.5, 1.0, 4.0]), min_size=n, max_size=n))
    same(*scenario, think_s=think_s, patience_s=patience_s, front_end=(request_s, prompt_token_s))


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
    naive, log = same(VllmV1(256, 16), cost, num_blocks, 16, asynchronous, requests)
    assert (naive.preemptions > 0) == (num_blocks == 60)
    assert log.steps.table()["steps"].max() > 32 or num_blocks == 60
