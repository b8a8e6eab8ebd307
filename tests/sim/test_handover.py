"""Prefill on some replicas, decode on others: against times worked out by hand, and what must hold in every run."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servecast.errors import ServecastError
from sim.cluster import Cluster, Pool, Routing
from sim.handover import Split
from sim.kvcache import KVCache
from sim.prefixcache import PrefixCache
from sim.schedulers import VllmV1
from sim.source import OpenLoop, Requests
from sim.steplog import OUTCOMES
from tests.sim.engine import NO_TIME, LinearCost

COST = LinearCost(base=1.0, token=0.01, decode=0.1, kv=0.0, attention=0.0)


@dataclass(frozen=True)
class Wire:
    """Seconds: fixed, a token of the host's and of the links' time."""

    fixed_s: float = 0.5
    post: float = 0.0
    wire: float = 0.01

    def posting_s(self, tokens):
        return self.post * tokens

    def occupancy_s(self, tokens):
        return self.wire * tokens

    def moved_bytes(self, tokens):
        return 1000.0 * tokens


def pools(prefill=1, decode=1, blocks=100, asynchronous=False, seqs=64, cache=KVCache):
    def pool(replicas, role):
        scheduler = VllmV1(512, seqs)
        return Pool(replicas, scheduler, COST, blocks, 16, 1000, asynchronous, NO_TIME, cache, role=role)

    return [pool(prefill, "prefill"), pool(decode, "decode")]


def run(rows, of=None, wire=Wire(), patience_s=None, **split):
    """`rows` of (arrival, prompt, output)."""
    arrival, prompt, output = (np.array(column) for column in zip(*rows, strict=True))
    source = OpenLoop(arrival.astype(float), Requests(prompt, output, output, patience_s))
    routing = Routing(split=Split({(0, 1): wire}, **split))
    cluster = Cluster(source, of or pools(), routing)
    assert cluster.run()
    requests, moves = cluster.log.requests.table(), cluster.log.transfers.table()
    order = np.argsort(requests["id"])
    return cluster, {k: v[order] for k, v in requests.items()}, dict(moves.items())


def test_one_request_by_hand():
    """Reads 100 tokens in 1 + 1 s; moves them in 0.5 + 1 s; the last one again and 3 more take 1.01 and 1.1 s each."""
    _, requests, moves = run([(0.0, 100, 4)])
    assert moves["read_s"][0] == moves["reserved_s"][0] == 2.0
    assert moves["tokens"][0] == 100
    assert moves["start_s"][0] == 2.5
    assert moves["end_s"][0] == pytest.approx(3.5)
    assert requests["first_token_s"][0] == pytest.approx(3.5 + 1.01)
    assert requests["finish_s"][0] == pytest.approx(4.51 + 3 * 1.1)
    assert (requests["replica"][0], requests["output_tokens"][0], requests["scheduled_s"][0]) == (1, 4, 0.0)


def test_the_prefill_side_may_stream_the_first_token():
    cluster, requests, moves = run([(0.0, 100, 4), (100.0, 50, 1)], first_token="prefill")
    assert moves["tokens"][0] == 100
    assert requests["first_token_s"][0] == 2.0
    assert requests["finish_s"][0] == pytest.approx(2.0 + 0.5 + 1.0 + 1.01 + 2 * 1.1)
    assert len(moves["id"]) == 1, "one token needs no decode side"
    assert requests["finish_s"][1] == 101.5
    gaps = cluster.log.gaps.table()
    assert gaps["end_s"][0] - gaps["since_s"][0] == pytest.approx(0.5 + 1.0 + 1.01), (
        "from the first token to the second"
    )


def test_links_and_hosts_have_queues():
    """Two prompts are read in one step: the second waits for the link, or for the host that posts."""
    rows = [(0.0, 100, 2), (0.0, 100, 2)]
    _, _, moves = run(rows)
    assert list(moves["start_s"]) == pytest.approx([3.5, 4.5])
    _, _, moves = run(rows, of=pools(decode=2))
    assert list(moves["start_s"]) == pytest.approx([3.5, 4.5]), "one side's link is enough"
    _, _, moves = run(rows, of=pools(decode=2), wire=Wire(post=0.02, wire=0.0))
    assert list(moves["end_s"]) == pytest.approx([5.5, 5.5]), "each decode side posts its own"
    _, _, moves = run(rows, of=pools(decode=2), wire=Wire(post=0.02, wire=0.0), pull=False)
    assert list(moves["end_s"]) == pytest.approx([5.5, 7.5]), "the prefill side posts both"
    _, _, moves = run([(0.0, 100, 2)], wire=Wire(post=0.02, wire=0.01), posts_first=True)
    assert moves["end_s"][0] == pytest.approx(2.0 + 0.5 + 2.0 + 1.0)


def test_prompts_stay_on_the_prefill_side_until_they_are_moved():
    """Room for one prompt: the next one is read when the first has left."""
    wire = Wire(fixed_s=50.0)
    _, _, moves = run([(0.0, 100, 2), (0.0, 100, 2)], of=pools(blocks=12), wire=wire)
    assert moves["read_s"][1] == pytest.approx(moves["end_s"][0] + 2.0)
    _, requests, moves = run([(0.0, 100, 40), (0.0, 100, 2)], of=[pools()[0], pools(blocks=12)[1]])
    assert moves["reserved_s"][1] >= requests["finish_s"][0], "the decode side has no room for two"


def test_who_decodes_is_not_held_up_by_what_is_on_its_way():
    rows = [(0.0, 16, 200), (20.0, 400, 3)]
    _, requests, moves = run(rows, wire=Wire(fixed_s=60.0))
    assert moves["end_s"][1] - moves["reserved_s"][1] > 60
    alone, _, _ = run(rows[:1], wire=Wire(fixed_s=60.0))
    first = alone.log.requests.table()["finish_s"][0]
    assert requests["finish_s"][0] < first + 1.0, "the last token of the other's prompt in one of its steps, and 2 more"


def test_short_prompts_stay_on_the_decode_side():
    _, requests, moves = run([(0.0, 100, 4), (0.0, 20, 4)], local_tokens=20)
    assert list(moves["id"]) == [0]
    assert requests["first_token_s"][1] == pytest.approx(1.2)


def test_what_is_too_long_is_rejected_once_and_frees_what_it_held():
    small = pools(blocks=8)[1]
    cluster, requests, _ = run([(0.0, 200, 2), (0.0, 1000, 2)], of=[pools()[0], small])
    assert [OUTCOMES[int(o)] for o in requests["outcome"]] == ["over_kv_cache", "prompt_too_long"]
    assert all(f.replica.state.kv.free == f.replica.state.kv.usable for f in cluster.front_ends)


def test_what_was_found_need_not_be_moved():
    def cache(num_blocks, block_size):
        return PrefixCache(num_blocks, block_size, lambda i: [(0, 5)], False)

    _, _, moves = run([(0.0, 100, 4), (50.0, 100, 4)], of=pools(cache=cache))
    assert list(moves["tokens"]) == [100, 20]


@st.composite
def workloads(draw):
    n = draw(st.integers(1, 25))
    arrivals = np.cumsum(draw(st.lists(st.sampled_from([0.0, 0.3, 2.0, 9.0]), min_size=n, max_size=n)))
    prompt = draw(st.lists(st.integers(1, 150), min_size=n, max_size=n))
    output = draw(st.lists(st.integers(1, 60), min_size=n, max_size=n))
    return list(zip(arrivals.tolist(), prompt, output, strict=True))


@given(
    workloads(),
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(15, 60), st.booleans(), st.integers(1, 8)),
    st.sampled_from(["decode", "prefill"]),
    st.sampled_from([Wire(), Wire(0.0, 0.0, 0.0), Wire(2.0, 0.03, 0.02)]),
    st.sampled_from([None, 5.0, 40.0]),
    st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_invariants(rows, shape, first_token, wire, patience, caching):
    prefill, decode, blocks, asynchronous, seqs = shape
    cache = (lambda n, size: PrefixCache(n, size, lambda i: [(0, 2)], False)) if caching else KVCache
    patience_s = None if patience is None else np.full(len(rows), patience)
    of = pools(prefill, decode, blocks, asynchronous, seqs, cache)
    cluster, requests, moves = run(rows, of, wire, patience_s, first_token=first_token)
    assert list(requests["id"]) == list(range(len(rows)))
    done = np.array([OUTCOMES[int(o)] in ("length", "stop") for o in requests["outcome"]])
    output = np.array([row[2] for row in rows])
    assert (requests["output_tokens"][done] == output[done]).all()
    for front_end in cluster.front_ends:
        state = front_end.replica.state
        assert state.kv.free == state.kv.usable
        assert not any((state.running, state.waiting, state.pulling, front_end.in_flight))
    assert (moves["read_s"] <= moves["reserved_s"]).all()
    assert (moves["reserved_s"] <= moves["start_s"]).all()
    assert (moves["start_s"] <= moves["end_s"]).all()
    assert len(set(moves["id"].tolist())) == len(moves["id"])
    ended = dict(zip(moves["id"].astype(int).tolist(), moves["end_s"].tolist(), strict=True))
    for i in np.flatnonzero(done):
        if first_token == "decode":
            assert requests["first_token_s"][i] > ended[i]
        elif rows[i][2] > 1:
            assert requests["first_token_s"][i] < ended[i] or wire.wire == 0
    if patience is None:
        steps = cluster.log.steps.table()
        assert steps["output_tokens"].sum() == output[done].sum()


def locked(decode_blocks=12, **policy):
    """Of eleven blocks on the decode side L gets six; its KV takes long. H, of higher priority, wants nine; N is read,
    too, and for M the prefill side has no room beside them."""
    rows = [(0.0, 96, 2), (3.0, 144, 2), (6.0, 16, 2), (9.0, 128, 2)]
    scheduler = VllmV1(512, 64, scheduling_policy="priority", **policy)
    sizes = 18, decode_blocks
    of = [replace(pool, scheduler=scheduler, num_blocks=n) for pool, n in zip(pools(), sizes, strict=True)]
    arrival, prompt, output = (np.array(column) for column in zip(*rows, strict=True))
    requests = Requests(prompt, output, output, None, np.array([5, 0, 1, 2]))
    return Cluster(OpenLoop(arrival, requests), of, Routing(split=Split({(0, 1): Wire(fixed_s=20.0)})))


def test_both_sides_full_is_named():
    """By priority, before vLLM 0.32, who holds blocks waits behind who wants them: nothing moves, on either side."""
    with pytest.raises(ServecastError) as caught:
        locked(pulled_queue="fcfs").run()
    message = str(caught.value)
    for part in (
        "no progress, after 0 of 4 requests: prefill and decode wait for each other's KV blocks",
        "Replica 1 (decode): the first of 3 in its queue wants 9 blocks, 5 of 11 are free, and 6 are held by 1 request "
        "whose KV has come and whose turn has not",
        "replica 0 (prefill) keeps 10 of 17 blocks for 2 prompts that the decode side has no room for, 1 wait there, "
        "7 blocks are free",
        "take vLLM 0.32, where those whose KV has come go first, or scheduling_policy fcfs",
    ):
        assert part in message, message
    assert locked(pulled_queue="always").run()
    assert locked(decode_blocks=20, pulled_queue="fcfs").run()


def reads_alone(load, n=4000, seed=3):
    """Of prompts of 100 tokens when they arrive, the wait, TTFT, and the gap to the second token. One is read a step of
    2 s, they come `load` times as fast, and the decode side is never short of anything."""
    arrivals = np.cumsum(np.random.default_rng(seed).exponential(2.0 / load, n))
    of = pools(decode=4, blocks=3000)
    of[0] = replace(of[0], scheduler=VllmV1(100, 64))
    _, requests, _ = run([(t, 100, 2) for t in arrivals.tolist()], of, Wire(0.0, 0.0, 0.0))
    times = [requests[name] for name in ("arrival_s", "scheduled_s", "first_token_s", "finish_s")]
    return times[0], times[1] - times[0], times[2] - times[0], times[3] - times[2]


def test_one_prefill_replica_that_saturates_shows_in_the_tail_of_first_tokens():
    """The wait is that of a server of 2 s (Lindley's recursion), p99 of TTFT has its knee before a load of 1; beyond
    1 it grows with the run. Gaps between tokens stay what they were."""
    found = {load: reads_alone(load) for load in (0.3, 0.6, 0.8, 0.95, 1.2)}
    for arrivals, waits, *_ in found.values():
        wait, lindley = 0.0, [0.0]
        for gap in np.diff(arrivals):
            wait = max(0.0, wait + 2.0 - gap)
            lindley.append(wait)
        assert waits == pytest.approx(lindley, abs=1e-6)
    p99 = {load: np.percentile(ttft, 99) for load, (_, _, ttft, _) in found.items()}
    assert p99[0.6] < 2.5 * p99[0.3]
    assert p99[0.95] > 2 * p99[0.8]
    assert p99[1.2] > 5 * p99[0.95]
    assert np.percentile(reads_alone(1.2, 8000)[2], 99) > 1.7 * p99[1.2]
    gaps = [gap.mean() for _, _, _, gap in found.values()]
    assert max(gaps) < 1.35 * min(gaps)
