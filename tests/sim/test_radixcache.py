"""SGLang's radix cache: the fast one equals the naive one, page for page; what distinguishes it, by hand."""

from __future__ import annotations

from math import inf
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim import radixcache
from sim.radixcache import RadixCache
from sim.request import Request
from sim.schedulers.sglang import Sglang
from tests.examples import examples
from tests.reference import reference
from tests.sim.engine import LinearCost
from tests.sim.test_oracle import same
from tests.sim.test_prefixcache import contents
from workloads.content import content_of
from workloads.readers import read_trace


@st.composite
def scenarios(draw):
    """Prompts of which most begin alike, in pools that hold a few of them."""
    block_size = draw(st.sampled_from([1, 1, 2, 4]))
    requests, arrival, longest = [], 0.0, 0
    for _ in range(draw(st.integers(2, 25))):
        arrival += draw(st.sampled_from([0.0, 0.0, 0.5, 1.0, 3.25]) | st.floats(0, 5))
        prompt, output = draw(st.integers(1, 30)), draw(st.integers(1, 12))
        requests.append((arrival, prompt, output, output + draw(st.sampled_from([0, 0, 5]))))
        longest = max(longest, prompt + requests[-1][3])
    running, mixed = draw(st.integers(1, 8)), draw(st.booleans())
    overlap = draw(st.booleans())
    chunk = block_size * draw(st.integers(1, 12)) + running * mixed
    policy = Sglang(
        running,
        chunk if mixed or draw(st.booleans()) else 0,
        draw(st.integers(1, 60)) + running * mixed,
        draw(st.sampled_from(["fcfs", "lpm"])),
        draw(st.sampled_from([1.0, 0.1, 0.0001])),
        mixed,
        not overlap,
    )
    num_blocks = 2 + -(-longest // block_size) + draw(st.integers(0, 3) | st.integers(0, 40))
    rows = draw(
        st.lists(st.lists(st.sampled_from([0, 0, 1]), max_size=31), min_size=len(requests), max_size=len(requests))
    )
    content = contents([p for _, p, *_ in requests], rows, draw(st.sampled_from([1, 2, 3, 8])), draw(st.booleans()))
    cost = LinearCost(kv=draw(st.sampled_from([0.0, 0.0625])), straight=draw(st.booleans()))
    return (policy, cost, num_blocks, block_size, overlap, requests), content


@examples(400)
@given(scenarios(), st.sampled_from([0, 2, 32]), st.sampled_from([1, 3, 32]))
def test_open_loops_equal_the_oracle(case, unknown, alike):
    scenario, content = case
    with patch.multiple(radixcache, UNKNOWN=unknown, ALIKE=alike):
        same(*scenario, content=content)


@pytest.mark.parametrize("seed", range(60))
def test_crowded_runs_equal_the_oracle(seed):
    scenario, content = crowded(seed)
    same(*scenario, content=content)


def crowded(seed):
    """Many requests in a pool of a few, so that leaves are evicted and requests retracted all the time."""
    rng = np.random.default_rng(seed)
    n, mixed, overlap, size = 80, bool(seed % 2), bool(seed // 2 % 2), int(rng.choice([1, 2, 4]))
    prompts, outputs = rng.integers(1, 40, n), rng.integers(1, 25, n)
    caps = outputs + rng.choice([0, 0, 5], n)
    arrivals = np.cumsum(rng.choice([0.0, 0.5, 2.0, 9.0], n, p=[0.5, 0.2, 0.2, 0.1]))
    requests = list(zip(arrivals.tolist(), prompts.tolist(), outputs.tolist(), caps.tolist(), strict=True))
    rows = [rng.choice([0, 0, 0, 1], rng.integers(0, 20)).tolist() for _ in range(n)]
    content = contents(prompts.tolist(), rows, int(rng.choice([1, 2, 3])), True)
    running = int(rng.integers(2, 9))
    chunk = size * int(rng.integers(2, 12)) + running
    policy = Sglang(
        running, chunk // size * size, 100, str(rng.choice(["fcfs", "lpm"])), float(rng.choice([1.0, 0.1, 0.0001])),
        mixed, not overlap,
    )  # fmt: skip
    blocks = 2 + -(-int((prompts + caps).max()) // size) + int(rng.integers(0, 60 // size))
    return (policy, LinearCost(kv=0.001), blocks, size, overlap, requests), content


@examples(200)
@given(scenarios(), st.integers(1, 6))
def test_closed_loops_equal_the_oracle(case, concurrency):
    scenario, content = case
    same(*scenario, content=content, concurrency=concurrency)


@examples(200)
@given(scenarios(), st.data())
def test_sessions_and_clients_that_give_up_equal_the_oracle(case, data):
    scenario, content = case
    n = len(scenario[-1])
    some = st.sampled_from([0.0, 0.5, 1.0, 4.0]) | st.floats(0, 9)
    think_s = data.draw(st.none() | st.lists(some, min_size=n, max_size=n))
    patience = st.sampled_from([1.0, 2.5, 0.6875, inf, inf]) | st.floats(0.01, 60)
    patience_s = data.draw(st.none() | st.lists(patience, min_size=n, max_size=n))
    same(*scenario, content=content, think_s=think_s, patience_s=patience_s)


def serve(kv, id, tokens):
    """A request of `tokens` prompt tokens comes, is computed and leaves, alone; what it has found."""
    request = Request(id, 0.0, tokens, 1, 1)
    found, _ = kv.lookup(request)
    kv.claim(request)
    request.computed = tokens
    kv.grow(request, found, tokens)
    kv.make_room(kv.blocks(tokens - found) + (kv.block_size > 1))
    kv.release(request, tokens, tokens, False)
    return found


def test_leaves_go_whole_and_the_longest_unused_first() -> None:
    paths = [[(0, 4)], [(0, 4), (1, 6)], [(2, 4)], [(0, 4)], []]
    kv = RadixCache(1 + 16, 1, paths.__getitem__)
    assert [serve(kv, i, n) for i, n in enumerate([5, 7, 5])] == [0, 4, 0]
    # 4 pages that 0 and 1 begin with, 1 of 0's own, 3 of 1's, 5 of 2's: 3 are left. 3 finds 4 and needs 1.
    assert serve(kv, 3, 5) == 4
    assert sorted(node.end - node.parent.end for node in below(kv)) == [1, 1, 3, 4, 5]
    # 2 are left. 4 asks for 3: the leaf of 0 goes (1), then that of 1 (3, more than is needed).
    assert serve(kv, 4, 3) == 0
    assert sorted(node.end - node.parent.end for node in below(kv)) == [1, 3, 4, 5]


def below(kv):
    """All nodes but the root."""
    found, todo = [], list(kv._root.children.values())
    while todo:
        found.append(node := todo.pop())
        todo += node.children.values()
    return found


def test_a_prompt_is_found_when_its_step_has_ended() -> None:
    """Two prompts that begin alike are computed in one step, the third after it."""
    policy = Sglang(8, 128, 128, disable_overlap_schedule=True)
    content = contents([1, 40, 40, 40], [[], [0], [0], [0]], 32, True)
    requests = [(0.0, 1, 1, 1), (0.1, 40, 3, 3), (0.1, 40, 3, 3), (9.0, 40, 3, 3)]
    engine, log = same(policy, LinearCost(), 200, 1, False, requests, content=content)
    assert [id for id, *_ in engine.steps[1].chunks] == [1, 2]
    assert sorted_by_id(log, "cached_tokens") == [0, 0, 0, 32]


def sorted_by_id(log, column):
    rows = log.requests.table()
    return rows[column][np.argsort(rows["id"])].tolist()


@pytest.mark.parametrize(
    ("policy", "order", "found"),
    [("fcfs", [0, 1, 2, 3, 4], [0, 0, 0, 32, 0]), ("lpm", [0, 3, 1, 4, 2], [0, 0, 32, 32, 0])],
)
def test_lpm_lets_go_first_who_finds_most_and_puts_off_who_may_find_more(policy, order, found) -> None:
    """3 begins with 32 tokens of 0, 2 with 32 of 1, which nobody has computed; there are three places."""
    scheduler = Sglang(3, 200, 200, policy, disable_overlap_schedule=True)
    content = contents([40] * 5, [[0], [1], [1], [0], []], 32, True)
    requests = [(0.0, 40, 1, 1), *((0.1, 40, 1, 1) for _ in range(4))]
    engine, log = same(scheduler, LinearCost(), 500, 1, False, requests, content=content)
    assert [id for step in engine.steps for id, *_ in step.chunks] == order
    assert sorted_by_id(log, "cached_tokens") == found


@pytest.mark.parametrize(("waiting", "next_one"), [(128, 128), (129, 1)])
def test_lpm_is_fcfs_over_128_waiting(waiting: int, next_one: int) -> None:
    """The last one finds most."""
    scheduler = Sglang(1, 64, 64, "lpm", disable_overlap_schedule=True)
    content = contents([8] * (waiting + 1), [[0], *[[]] * (waiting - 1), [0]], 4, True)
    requests = [(0.0, 8, 1, 1), *((0.1, 8, 1, 1) for _ in range(waiting))]
    engine, _ = same(scheduler, LinearCost(), 5000, 1, False, requests, content=content)
    assert engine.steps[1].chunks[0][0] == next_one


def test_a_retracted_request_finds_its_prompt_and_not_its_answer() -> None:
    scheduler = Sglang(2, 64, 64, schedule_conservativeness=0.0001, disable_overlap_schedule=True)
    content = contents([6, 6], [[], []], 4, True)
    engine, _ = same(scheduler, LinearCost(), 1 + 60, 1, False, [(0.0, 6, 40, 40), (0.1, 6, 40, 40)], content=content)
    assert engine.preemptions == 1
    again = [chunk for step in engine.steps[2:] for chunk in step.chunks]
    assert again == [(1, again[0][1], 6)]
    assert again[0][1] > 20


def test_a_retraction_sorts_the_batch() -> None:
    """1 and 2 begin together, 3 later, which is retracted; the shorter prompt then is ahead, and heard of first."""
    scheduler = Sglang(8, 64, 64, schedule_conservativeness=0.0001, disable_overlap_schedule=True)
    requests = [(0.0, 1, 1, 1), (0.1, 8, 20, 20), (0.1, 4, 20, 20), *((0.0, 4, 20, 20) for _ in range(3))]
    content = contents([1, 8, 4, 4, 4, 4], [[]] * 6, 4, True)
    think_s = [0.0, 0.0, 0.0, 6.0, 0.0, 0.0]  # 3 follows 0, 4 follows 1, 5 follows 2
    engine, _ = same(scheduler, LinearCost(), 1 + 56, 1, False, requests, content=content, think_s=think_s)
    assert engine.preemptions == 1
    assert [id for step in engine.steps for id, *_ in step.chunks] == [0, 1, 2, 3, 3, 5, 4]


def test_who_decodes_evicts_before_anybody_is_retracted() -> None:
    """3 would have found the page of 0, which was not enough for 1 and 2."""
    scheduler = Sglang(2, 64, 64, schedule_conservativeness=0.0001, disable_overlap_schedule=True)
    requests = [(0.0, 1, 1, 1), (1.0, 6, 40, 40), (1.1, 6, 40, 40), (9.0, 2, 1, 1)]
    content = contents([1, 6, 6, 2], [[0], [], [], [0]], 1, True)
    engine, log = same(scheduler, LinearCost(), 1 + 61, 1, False, requests, content=content)
    assert engine.preemptions == 1
    assert sorted_by_id(log, "cached_tokens") == [0, 0, 0, 0]


@pytest.mark.parametrize("page", [1, 64])
def test_a_boundless_tree_finds_what_earlier_prompts_began_with(page: int) -> None:
    """Mooncake's conversations, one by one, find the closed form to the token."""
    trace = read_trace(reference("traces", "mooncake", "conversation_trace.jsonl.gz"))
    prompts = trace.prompt_tokens
    kv = RadixCache(10**9, page, content_of(trace.prefix, prompts, 1).path)
    found = [serve(kv, id, tokens) for id, tokens in enumerate(prompts.tolist())]
    known = np.minimum(trace.prefix.known_blocks() * 512, prompts - 1)
    assert found == (known // page * page).tolist()
