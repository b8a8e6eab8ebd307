"""Our admission of prompts against SGLang's own PrefillAdder, where its sources are at hand (no GPU, no torch).

Set SERVECAST_SGLANG_SOURCES to a folder with `0.5.9/sglang`, an unpacked wheel.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.kvcache import KVCache
from sim.request import Request
from sim.schedulers.sglang import Sglang
from sim.state import Batch, State

FILE = Path(os.environ.get("SERVECAST_SGLANG_SOURCES", "nowhere")) / "0.5.9/sglang/srt/managers/schedule_policy.py"


@pytest.fixture(scope="module")
def policy():
    """SGLang's module, with what it imports stubbed: only its arithmetic is run."""
    if not FILE.is_file():
        pytest.skip("SGLang's sources not found (set SERVECAST_SGLANG_SOURCES)")
    source = FILE.read_text("utf-8")
    names = [line.split()[1] for line in source.splitlines() if line.startswith(("from sglang", "import torch"))]
    before = {name: sys.modules.get(name) for name in names}

    class Stub(ModuleType):
        def __getattr__(self, name):
            if name.startswith("__"):
                raise AttributeError(name)
            return {"get_bool_env_var": lambda *_: False, "is_nsa_prefill_cp_in_seq_split": lambda: False}.get(
                name, type(name, (), {})
            )

    try:
        sys.modules.update({name: Stub(name) for name in names})
        module = ModuleType("schedule_policy")
        sys.modules["schedule_policy"] = module
        exec(compile(source, str(FILE), "exec"), module.__dict__)
    finally:
        del sys.modules["schedule_policy"]
        for name, old in before.items():
            if old is None:
                del sys.modules[name]
            else:
                sys.modules[name] = old
    return module


class Tree(SimpleNamespace):
    """A radix cache that has nothing."""

    disable = False

    def evictable_size(self):
        return 0

    def inc_lock_ref(self, node):
        return 0

    dec_lock_ref = inc_lock_ref

    def supports_mamba(self):
        return False

    supports_swa = is_tree_cache = supports_mamba


def theirs(module, ours, page, free, ratio, running, chunked, waiting):
    """What SGLang puts into a step of prompts (id, tokens), whether it closes the queue, and who is cut."""

    def req(id, prompt, cap, out, computed=0):
        made = SimpleNamespace(
            rid=id, origin_input_ids=[0] * prompt, output_ids=[0] * out, prefix_indices=[0] * computed,
            extend_input_len=prompt + out - computed, host_hit_length=0, fill_ids=[0] * (prompt + out), last_node=None,
            sampling_params=SimpleNamespace(max_new_tokens=cap, ignore_eos=False),
        )  # fmt: skip
        made.set_extend_input_len = lambda n: setattr(made, "extend_input_len", n)
        return made

    batch = SimpleNamespace(reqs=[req(i, *r) for i, r in enumerate(running)])
    adder = module.PrefillAdder(
        page, Tree(), SimpleNamespace(available_size=lambda: free), batch, ratio, ours.max_prefill_tokens,
        ours.chunked_prefill_size, len(running) if ours.enable_mixed_chunk else 0,
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
    ratio = draw(st.sampled_from([1.0, 0.5]) | st.floats(0.05, 1.0))
    return page, running, ours, chunked, waiting, ratio, draw(st.integers(1, 400))


@settings(max_examples=1500, deadline=None)
@given(states())
def test_a_step_of_prompts_is_sglangs(policy, case):
    page, running, ours, chunked, waiting, ratio, pages = case
    ours._ratio = ratio
    kv = KVCache(1, page)
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
    asked = [(prompt, cap, 0) for prompt, cap in waiting]
    assert (mine, ours._full, cut) == theirs(policy, ours, page, pages * page, ours.ratio, running, begun, asked)
