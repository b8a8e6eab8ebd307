"""SGLang's prefill and decode servers: whole runs equal the naive ones, and times worked out by hand."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servecast.errors import ServecastError
from sim.changes import Changes, Event
from sim.cluster import Cluster, Pool, Routing
from sim.handover import Split
from sim.kvcache import KVCache
from sim.radixcache import RadixCache
from sim.schedulers import SglangDecode, SglangPrefill
from sim.source import OpenLoop, Requests
from sim.steplog import FINISHED, OUTCOMES
from tests.sim import oracle, test_handover
from tests.sim.engine import NO_TIME, LinearCost
from tests.sim.oracle.sglang_split import Decode, Prefill, SglangSplit
from tests.sim.test_handover import Wire, workloads
from tests.sim.test_oracle import expand
from tests.sim.test_vllm_sources import shared
from workloads.content import content_of


def case(seed):
    """A random fleet of two pools, and its workload: no two things happen at once."""
    r = random.Random(seed)
    rows, now = [], 0.0
    for _ in range(r.randint(1, 40)):
        now += r.choice([1e-3, 0.3, 2.0, 9.0]) * r.random()
        output = r.choice([1, 2, r.randint(1, 30)])
        rows.append((now, r.randint(1, 60), output, output + r.choice([0, 0, 3])))
    size = r.choice([1, 1, 4, 16])
    overlap, caching = r.random() < 0.6, r.random() < 0.5
    policies = [
        {
            "max_running_requests": r.choice([1, 3, 7, 40]),
            "chunked_prefill_size": r.choice([-1, size * r.randint(1, 8), size * 20]),
            "max_prefill_tokens": r.choice([30, 200]),
            "schedule_policy": r.choice(["fcfs", "lpm"]) if caching else "fcfs",
            "disable_overlap_schedule": not overlap,
            "num_reserved_decode_tokens": r.choice([0, 3, 20]),
            "scheduler_recv_interval": r.choice([1, 1, 2, 3, 7]),
        }
        for _ in range(2)
    ]  # fmt: skip
    longest = max(prompt + cap for _, prompt, _, cap in rows)
    needed = [longest + size, longest + 21 + size]
    num_blocks = [2 + -(-n // size) + r.choice([0, 1, 5, 30, 1000]) for n in needed]
    wire = Wire(r.choice([0.01, 0.7]) * r.random() + 1e-4, r.choice([0.0, 0.003]), r.choice([1e-5, 0.02]))
    costs = [LinearCost(base=0.1 + r.random() * 0.3, kv=0.001 * r.random()) for _ in range(2)]
    sizes = (r.randint(1, 2), r.randint(1, 2))
    return rows, policies, size, num_blocks, wire, r.random() < 0.3, costs, sizes, overlap, caching


def compare(seed):
    """Both run the case, and all that they share is equal."""
    rows, policies, size, num_blocks, wire, posts_first, costs, sizes, overlap, caching = case(seed)
    columns = [np.array(c) for c in zip(*rows, strict=True)]
    begins, cache = [[] for _ in rows], KVCache
    if caching:
        prefix, begins = shared(seed, rows)
        paths = content_of(prefix, columns[1], 1).path

        def cache(num_blocks, block_size):
            return RadixCache(num_blocks, block_size, paths)

    policies = [kind(**options) for kind, options in zip((SglangPrefill, SglangDecode), policies, strict=True)]

    def make(desk, number):
        side = number >= sizes[0]
        args = policies[side], costs[side], num_blocks[side], size, overlap
        return (Decode if side else Prefill)(desk, number, *args, caching=caching and not side)

    naive = SglangSplit(wire, posts_first, sizes, make)
    wholes = [oracle.Naive(i, *row) for i, row in enumerate(rows)]
    for i, whole in enumerate(wholes):
        whole.begins = begins[i]
    stops = False
    try:
        naive.run(wholes)
    except MemoryError:
        stops = True
    pools = [
        Pool(n, policy, cost, blocks, size, 10**9, overlap, NO_TIME, kind, role=role)
        for n, policy, cost, blocks, role, kind in zip(
            sizes, policies, costs, num_blocks, ("prefill", "decode"), (cache, KVCache), strict=True
        )
    ]
    split = Split({(0, 1): wire}, pull=False, posts_first=posts_first, bootstraps=True)
    cluster = Cluster(OpenLoop(columns[0].astype(float), Requests(*columns[1:4])), pools, Routing(split=split))
    if stops:
        with pytest.raises(ServecastError, match="SGLang runs out of memory"):
            cluster.run()
        return 0
    assert cluster.run(), seed
    log = cluster.log
    moves = log.transfers.table()
    names = [name for name in moves if name != "bytes"]
    assert sorted(zip(*(moves[n].tolist() for n in names), strict=True)) == sorted(naive.moves), (seed, names)
    steps = log.steps.table()
    for number, side in enumerate(naive.sides):
        mine = steps.where(steps["replica"] == number)
        expected = [(s.end_s, s.decodes, s.kv_tokens, sum(n for _, n, _ in s.chunks)) for s in side.steps]
        actual = list(expand(mine))
        assert [a[1:] for a in actual] == [e[1:] for e in expected], (seed, number)
        assert all(a[0] in (None, e[0]) for a, e in zip(actual, expected, strict=True)), (seed, number)
        assert side.kv.free == side.total
        kv = cluster.front_ends[number].replica.state.kv
        assert kv.free == kv.usable
    got = log.requests.table()
    order = np.argsort(got["id"])
    for i, whole in enumerate(wholes):
        tokens = whole.answering.token_s
        row = {name: got[name][order][i] for name in ("first_token_s", "finish_s", "output_tokens", "preemptions")}
        expected = tokens[0], tokens[-1], whole.output, whole.answering.preemptions
        assert tuple(row.values()) == expected, (seed, i)
    return sum(whole.answering.preemptions for whole in wholes)


@pytest.mark.parametrize("seed", range(4))
def test_whole_runs_equal_the_oracle(seed):
    assert sum(compare(1000 * seed + i) for i in range(40)), "some are retracted"


WIRE = Wire()
COST = LinearCost(base=1.0, token=0.01, decode=0.1, kv=0.0, attention=0.0)


def sides(prefill=1, decode=1, blocks=(1000, 1000), overlap=False, size=1, **options):
    options = {"max_running_requests": 64, "chunked_prefill_size": 64, "max_prefill_tokens": 512,
               "num_reserved_decode_tokens": 0, "disable_overlap_schedule": not overlap} | options  # fmt: skip
    kinds = zip((prefill, decode), (SglangPrefill, SglangDecode), blocks, ("prefill", "decode"), strict=True)
    return [Pool(n, k(**options), COST, b, size, 1000, overlap, NO_TIME, role=role) for n, k, b, role in kinds]


def run(rows, of=None, wire=WIRE, patience_s=None, changes=None):
    """`rows` of (arrival, prompt, output)."""
    arrival, prompt, output = (np.array(column) for column in zip(*rows, strict=True))
    source = OpenLoop(arrival.astype(float), Requests(prompt, output, output, patience_s))
    routing = Routing(split=Split({(0, 1): wire}, pull=False, bootstraps=True))
    cluster = Cluster(source, of or sides(), routing, changes)
    assert cluster.run()
    requests, moves = cluster.log.requests.table(), cluster.log.transfers.table()
    order = np.argsort(requests["id"])
    return cluster, {k: v[order] for k, v in requests.items()}, dict(moves.items())


@pytest.mark.parametrize("overlap", [False, True])
def test_one_request_by_hand(overlap):
    """Reads 64 tokens until 1.64 s, which move until 2.28, and 36 until 3.0, which move until 3.36, and that is known
    at 3.86: the first token goes out, and three more take 1.1 s each. No token of the prompt is computed again."""
    cluster, requests, moves = run([(0.0, 100, 4)], sides(overlap=overlap))
    assert moves["reserved_s"][0] == 0.0
    assert moves["read_s"][0] == moves["start_s"][0] == pytest.approx(3.0)
    assert moves["end_s"][0] == requests["first_token_s"][0] == pytest.approx(3.86)
    assert requests["finish_s"][0] == pytest.approx(3.86 + 3 * 1.1)
    steps = cluster.log.steps.table()
    assert steps["prefill_tokens"].sum() == moves["tokens"][0] == 100
    assert steps["output_tokens"].sum() == requests["output_tokens"][0] == 4


def test_only_whole_pages_of_a_chunk_are_sent_before_the_last_one():
    """Chunks of 64 with pages of 48: 48 tokens at 1.64 s, and 52 at 3.0 s."""
    _, _, moves = run([(0.0, 100, 4)], sides(size=48, chunked_prefill_size=96), Wire(0.0, 0.0, 0.05))
    assert moves["read_s"][0] == pytest.approx(1.96 + 1.04)
    assert moves["start_s"][0] == pytest.approx(1.96 + 96 * 0.05)
    assert moves["end_s"][0] == pytest.approx(1.96 + 100 * 0.05)


def test_the_transfer_of_a_chunk_hides_behind_the_next_one():
    wire = Wire(0.0, 0.0, 0.01)
    whole = run([(0.0, 512, 2)], sides(chunked_prefill_size=512), wire)[2]
    pieces = run([(0.0, 512, 2)], sides(chunked_prefill_size=64), wire)[2]
    assert whole["end_s"][0] - whole["read_s"][0] == pytest.approx(5.12)
    assert pieces["end_s"][0] - pieces["read_s"][0] == pytest.approx(0.64)


def test_a_full_decode_side_keeps_prompts_from_being_read():
    """Room for one there: the second prompt is read once the first answer is over, and until then the prefill side
    holds nothing. vLLM's prefill side reads it at once, and holds it."""
    rows = [(0.0, 100, 40), (0.0, 100, 2)]
    cluster, requests, moves = run(rows, sides(blocks=(1000, 160)))
    assert moves["reserved_s"][1] == requests["finish_s"][0] > 40.0
    steps = cluster.log.steps.table()
    prefill = steps.where(steps["replica"] == 0)
    assert sorted(prefill["kv_blocks"]) == [64.0, 64.0, 100.0, 100.0]
    vllm = test_handover.pools()
    _, requests, moves = test_handover.run(rows, [vllm[0], test_handover.pools(blocks=12)[1]])
    assert moves["read_s"][1] == 3.0
    assert moves["reserved_s"][1] >= requests["finish_s"][0]


def test_who_is_retracted_keeps_what_was_computed():
    """Two that come to 60 tokens each in a pool of 100: one goes to the host and comes back, and computes nothing
    again; nobody new gets blocks before."""
    rows = [(0.0, 20, 40), (0.0, 21, 40), (30.0, 20, 5)]
    cluster, requests, moves = run(rows, sides(blocks=(1000, 101)))
    assert list(requests["preemptions"]) == [0.0, 1.0, 0.0]
    steps = cluster.log.steps.table()
    assert steps["prefill_tokens"].sum() == 61
    assert steps["output_tokens"].sum() == 85
    assert moves["reserved_s"][2] >= requests["finish_s"][0]


def test_a_prompt_of_which_the_prefill_side_has_a_beginning_moves_as_a_whole():
    prefill, decode = sides()
    cache = lambda blocks, size: RadixCache(blocks, size, lambda i: [(0, 64)])  # noqa: E731
    _, requests, moves = run([(0.0, 100, 2), (20.0, 100, 2)], [replace(prefill, cache=cache), decode])
    assert list(requests["cached_tokens"]) == [0.0, 64.0]
    assert list(moves["tokens"]) == [100.0, 100.0]


def test_what_one_side_turns_away_leaves_nothing_on_the_other():
    rows = [(0.0, 300, 2), (0.0, 100, 2), (0.0, 1000, 2)]
    for blocks in ((200, 1000), (1000, 200)):
        cluster, requests, _ = run(rows, sides(blocks=blocks))
        assert [OUTCOMES[int(o)] for o in requests["outcome"]] == ["over_kv_cache", "length", "prompt_too_long"]
        at_rest(cluster)


def at_rest(cluster):
    """Everything is free, and nobody waits."""
    for front_end in cluster.front_ends:
        state = front_end.replica.state
        assert state.kv.free == state.kv.usable
        assert (state.kept, state.decodes.count, front_end.in_flight, len(front_end.requests)) == (0, 0, 0, 0)


@given(
    workloads(),
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(230, 500), st.booleans(), st.sampled_from([1, 5, 40])),
    st.sampled_from([Wire(), Wire(0.0, 0.0, 0.0), Wire(2.0, 0.03, 0.02)]),
    st.sampled_from([None, 5.0, 40.0]),
    st.lists(st.tuples(st.floats(0.1, 100.0), st.integers(0, 1), st.sampled_from([1.0, 30.0])), max_size=3),
)
@settings(max_examples=60, deadline=None)
def test_invariants(rows, shape, wire, patience, failures):
    """Whatever is given up or lost, nothing is left, and what is finished has all of its tokens, after its transfer."""
    prefill, decode, blocks, overlap, most = shape
    patience_s = None if patience is None else np.full(len(rows), patience)
    events = tuple(Event(at, "fail", pool, 0, repair_s=repair) for at, pool, repair in sorted(failures))
    changes = Changes((prefill, decode), (0.0, 0.0), events, retries=50) if events else None
    of = sides(prefill, decode, (blocks, blocks), overlap, max_running_requests=most, num_reserved_decode_tokens=60)
    cluster, requests, moves = run(rows, of, wire, patience_s, changes)
    assert list(requests["id"]) == list(range(len(rows)))
    done = np.isin(requests["outcome"], FINISHED)
    assert (requests["output_tokens"][done] == np.array([row[2] for row in rows])[done]).all()
    at_rest(cluster)
    assert (moves["reserved_s"] <= moves["read_s"]).all()
    assert (moves["read_s"] <= moves["start_s"]).all()
    ended = dict(zip(moves["id"].astype(int).tolist(), moves["end_s"].tolist(), strict=True))  # the last of each
    for i in np.flatnonzero(done):
        assert requests["scheduled_s"][i] <= ended[i] <= requests["first_token_s"][i] <= requests["finish_s"][i]
    if patience is None:
        assert done.all()
        if changes is None:
            assert cluster.log.steps.table()["output_tokens"].sum() == requests["output_tokens"].sum()


def test_a_prompt_that_does_not_fit_with_what_is_reserved_is_named():
    """SGLang would wait for ever, and so would those behind."""
    expected = r"wants 160 blocks, 159 of 159 are free.*lower num_reserved_decode_tokens"
    with pytest.raises(ServecastError, match=expected):
        run([(0.0, 100, 2), (1.0, 10, 2)], sides(blocks=(1000, 160), num_reserved_decode_tokens=60))
