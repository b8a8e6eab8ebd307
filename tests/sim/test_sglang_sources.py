"""Our admission of prompts against SGLang's own PrefillAdder, our runs against those with its own RadixCache.

Needs the sources: see `tests.sim.sglang_sources`. Skips without.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sim import radixcache
from sim.batch import Batch
from sim.kvcache import KVCache
from sim.request import Request
from sim.schedulers.sglang import Sglang
from sim.state import State
from tests.sim.oracle import sglang as oracle_sglang
from tests.sim.sglang_sources import SRT, Sources, Tree
from tests.sim.test_oracle import same
from tests.sim.test_radixcache import crowded, scenarios


@pytest.fixture(scope="module")
def sources():
    if not SRT.is_dir():
        pytest.skip("SGLang's sources not found (set SERVECAST_SGLANG_SOURCES)")
    return Sources()


@settings(max_examples=400, deadline=None)
@given(scenarios(), st.sampled_from([0, 2, 32]), st.sampled_from([1, 3, 32]))
def test_runs_with_sglangs_own_radix_cache(sources, case, unknown, alike):
    with_their_tree(sources, *case, unknown, alike)


def test_crowded_runs_with_sglangs_own_radix_cache(sources):
    evicted = found = retracted = 0
    for seed in range(60):
        engine, log = with_their_tree(sources, *crowded(seed), 32, 32)
        evicted += engine.kv.evicted
        found += log.requests.table()["cached_tokens"].sum()
        retracted += engine.preemptions
    assert min(evicted, found) > 10_000
    assert retracted > 50  # the cases are tight enough to matter


def with_their_tree(sources, scenario, content, unknown, alike):
    """Our run equals that of the naive engine which has SGLang's tree, eviction and order of the queue."""
    sources.policy.IN_BATCH_PREFIX_CACHING_CHECK_THRESHOLD = unknown
    sources.policy.IN_BATCH_PREFIX_CACHING_DEPRIORITIZE_THRESHOLD = alike
    with (
        patch.multiple(radixcache, UNKNOWN=unknown, ALIKE=alike),
        patch.object(oracle_sglang, "Radix", partial(Tree, sources)),
    ):
        return same(*scenario, content=content)


class Found(KVCache):
    """A cache of which it is known what each request finds: pages, and how many of these nobody holds."""

    def __init__(self, pages, finds):
        super().__init__(1, pages)
        self.finds = finds

    def lookup(self, request):
        found, idle = self.finds[request.id]
        return found * self.block_size, idle

    def claim(self, request):
        self.free -= self.finds[request.id][1]


class Nodes(SimpleNamespace):
    """The same in SGLang's words. A node is the number of its tokens that can be evicted."""

    disable = False

    def evictable_size(self):
        return self.evictable

    def inc_lock_ref(self, node):
        self.evictable -= node

    def dec_lock_ref(self, node):
        self.evictable += node

    def supports_mamba(self):
        return False

    supports_swa = is_tree_cache = supports_mamba


def theirs(module, ours, page, free, ratio, running, chunked, waiting):
    """What SGLang puts into a step of prompts (id, tokens), whether it closes the queue, and who is cut."""

    def req(id, prompt, cap, out, computed=0, idle=0):
        made = SimpleNamespace(
            rid=id, origin_input_ids=[0] * prompt, output_ids=[0] * out, prefix_indices=[0] * computed,
            extend_input_len=prompt + out - computed, host_hit_length=0, fill_ids=[0] * (prompt + out), last_node=idle,
            sampling_params=SimpleNamespace(max_new_tokens=cap, ignore_eos=False),
        )  # fmt: skip
        made.set_extend_input_len = lambda n: setattr(made, "extend_input_len", n)
        return made

    batch = SimpleNamespace(reqs=[req(i, *r) for i, r in enumerate(running)])
    evictable = sum(r[-1] for r in waiting)
    adder = module.PrefillAdder(
        page, Nodes(evictable=evictable), SimpleNamespace(available_size=lambda: free - evictable), batch, ratio,
        ours.max_prefill_tokens, ours.chunked_prefill_size, len(running) if ours.enable_mixed_chunk else 0,
    )  # fmt: skip
    full, cut, places = False, None, ours.max_running_requests - len(running)
    if chunked:
        cut = adder.add_chunked_req(req(100, *chunked))
    for i, r in enumerate(waiting):  # as in `_get_new_batch_prefill_raw`
        full = full or len(adder.can_run_list) >= places
        if full:
            break
        found = adder.add_one_req(req(200 + i, *r), has_chunked_req=cut is not None, truncation_align_size=None)
        if found is not module.AddReqResult.CONTINUE:
            full = found is module.AddReqResult.NO_TOKEN
            break
    cut = adder.new_chunked_req or cut
    return [(r.rid, r.extend_input_len) for r in adder.can_run_list], full, cut and cut.rid


@st.composite
def states(draw):
    page = draw(st.sampled_from([1, 1, 4, 16]))
    mixed = draw(st.booleans())
    more = st.integers(1, 20) | st.integers(1, 5000)
    running = draw(st.lists(st.tuples(st.integers(1, 40), more, st.integers(0, 30)), max_size=6))
    running = [(prompt, cap + out, out) for prompt, cap, out in running]
    chunk = page * draw(st.integers(1, 20)) + (len(running) if mixed else 0)
    ours = Sglang(
        len(running) + draw(st.integers(1, 6)), chunk, draw(st.integers(1, 200)) + 6, enable_mixed_chunk=mixed
    )
    chunked = draw(st.none() | st.tuples(st.integers(page + 1, 90), st.integers(1, 50)))
    waiting = draw(
        st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=0 if chunked else 1, max_size=8)
    )
    finds = []
    for prompt, _ in waiting:
        found = draw(st.integers(0, (prompt - 1) // page))
        finds.append((found, draw(st.integers(0, found))))
    ratio = draw(st.sampled_from([1.0, 0.5]) | st.floats(0.05, 1.0))
    return page, running, ours, chunked, waiting, finds, ratio, draw(st.integers(1, 400))


@settings(max_examples=1500, deadline=None)
@example((1, [], Sglang(8, 100, 20), None, [(10, 5), (30, 10)], [(0, 0), (15, 15)], 1.0, 45))
@given(states())
def test_a_step_of_prompts_is_sglangs(sources, case):
    page, running, ours, chunked, waiting, finds, ratio, pages = case
    ours._ratio = ratio
    kv = Found(page, {200 + i: found for i, found in enumerate(finds)})
    state = State(kv)
    for i, (prompt, cap, out) in enumerate(running):
        request = Request(i, 0.0, prompt, cap, cap)
        request.ticket, request.computed, request.emitted = i, prompt + out - 1, out
        state.running[i] = request
        state.decodes.will_finish(request, state.decodes.step + cap - out - 1)
        state.decodes.join(request, state.decodes.step)
    state.tickets = ours._held = len(running)
    if chunked:
        prompt, cap = chunked
        request = Request(100, 0.0, prompt, cap, cap)
        request.ticket, request.computed = 50, page
        state.running[50] = state.prefilling[50] = request
        state.tickets = 51
    for i, (prompt, cap) in enumerate(waiting):
        state.enqueue(Request(200 + i, 0.0, prompt, cap, cap))
    kv.free = pages
    batch = Batch()
    ours._prefill(state, batch)
    mine = [(request.id, tokens) for request, tokens, _ in batch.chunks]
    cut = next((request.id for request in state.prefilling.values()), None)
    begun = chunked and (*chunked, 0, page)
    asked = [(*who, 0, found * page, idle * page) for who, (found, idle) in zip(waiting, finds, strict=True)]
    assert (mine, ours._full, cut) == theirs(
        sources.policy, ours, page, pages * page, ours.ratio, running, begun, asked
    )
