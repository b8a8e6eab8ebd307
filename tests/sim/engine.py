"""One simulated replica for tests, with a cost whose shape is a real one's, and the invariants of every run."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np

from calibrate.engine import FrontEndTime
from sim.clock import Clock
from sim.frontend import FrontEnd
from sim.prefixcache import PrefixCache
from sim.radixcache import RadixCache
from sim.replica import Replica
from sim.schedulers.static_batching import StaticBatching
from sim.source import Desk
from sim.state import State
from sim.steplog import CANCELLED, FINISHED, Log
from sim.windows import ONE, WindowCache


@dataclass(frozen=True)
class LinearCost:
    """Seconds linear in everything; `straight` False hides the decode line, so that every step is asked for."""

    base: float = 0.5
    token: float = 0.0625
    decode: float = 0.125
    kv: float = 0.001
    attention: float = 0.0001
    floor: float = 0.0
    straight: bool = True
    knee: float = 0.0  # KV tokens at which one line ends and an equal one begins
    windows: tuple[float, ...] = ()  # seconds a token that the layers of each window read
    swap_block_s: float = 0.03125
    draft: float = 0.03125

    def decode_line(self, decodes, kv_tokens):
        if not self.straight:
            return None
        upto = inf if kv_tokens > self.knee else self.knee
        return self.base + self.decode * decodes, self.kv, self.floor, upto

    def window_lines(self, decodes, seen):
        return [
            (0.25 * decodes, each, 0.0, inf if tokens > self.knee else self.knee)
            for each, tokens in zip(self.windows, seen, strict=True)
        ]

    def verified_s(self, decodes, kv_tokens, drafts):
        return np.maximum(self.floor, self.base + self.decode * decodes + self.draft * drafts + self.kv * kv_tokens)

    def step_s(self, chunks, decodes, kv_tokens, seen=(), drafts=0):
        a = self.base + self.decode * decodes + self.draft * drafts
        if chunks:
            a += sum(self.token * q + self.attention * q * (context + q) for q, context in chunks)
        a += self.kv * kv_tokens
        for each, tokens in zip(self.windows, seen, strict=True):
            a += 0.25 * decodes + each * tokens
        return max(self.floor, a)


NO_TIME = FrontEndTime(0.0, 0.0)


def simulate(
    policy, cost, num_blocks, block_size, asynchronous, source, front_end=NO_TIME, max_model_len=10**9, kv=None,
    tables=ONE, drafting=None,
):  # fmt: skip
    """Run `source` on one replica; (the replica, its log). The invariants have been checked."""
    clock, log = Clock(), Log()
    if kv is None:
        windows = WindowCache(num_blocks, block_size, tables) if tables.windows else None
        kv = windows or policy.cache(num_blocks, block_size)
    state = State(kv, policy.by_priority, tables, policy.pulled_first, drafting)

    def on_finish(request, now):
        if request.of is None:
            source.on_finish(request, now)
        else:
            request.of.ended(request, now, source.on_finish)

    replica = Replica(
        0, clock, state, policy, cost, log, on_finish, max_model_len=max_model_len, asynchronous=asynchronous
    )
    front = FrontEnd(clock, replica, log, source.on_finish, front_end)
    clock.process(source.start(clock, Desk(front.submit, lambda request: front.cancel(request, clock.now))))
    clock.run()
    assert len(log.requests) == source.total
    check_invariants(log, policy, num_blocks, bool(tables.windows))
    assert kv.free == kv.usable
    if isinstance(kv, PrefixCache):
        check_cache(kv)
    if isinstance(kv, RadixCache):
        check_tree(kv)
    assert (state.decodes.count, state.decodes.kv_tokens, sum(state.decodes.phases)) == (0, 0, 0)
    if drafting is not None:
        assert not state.decodes._lanes[:, state.decodes.step - state.decodes._first :].any()
    assert not any((state.running, state.waiting, state.swapped, state.prefilling, front.in_flight))
    if state.windows is not None:
        state.windows.advance(0)
        assert not any((*state.windows.seen, *state.windows.growing, *state.windows._slides))
        assert state.windows.next_crossing < 0
    return replica, log


def check_cache(kv):
    """At rest: every block is in the queue, none is held, and each registered one is known exactly once."""
    kv.settle()
    assert sum(run.end - run.start for run in kv._queue) == kv._queued == kv.usable
    assert all(run.start < run.end and not run.holders for run in kv._queue)
    known = [run for runs in kv._runs.values() for run in runs]
    assert sorted(map(id, known)) == sorted(id(run) for run in kv._queue if run.content is not None)
    assert all(run.content == content for content, runs in kv._runs.items() for run in runs)


def check_tree(kv):
    """At rest: nobody locks anything, pages are in the tree or available, and every leaf may be evicted."""
    nodes = _below(kv._root)
    assert not any(node.locks for node in nodes)
    assert sum(node.end - node.parent.end for node in nodes) == kv._evictable == kv.usable - kv._available
    assert all(node.parts[-1][1] == node.end > node.parent.end and node.queued >= (not node.children) for node in nodes)
    assert len(kv._leaves) == sum(node.queued for node in nodes)


def _below(node):
    return [each for child in node.children.values() for each in (child, *_below(child))]


def check_invariants(log, policy, num_blocks, windows=False):
    """Causality, a monotone clock, budgets, and conservation of tokens and blocks."""
    requests, steps = log.requests.table(), log.steps.table()
    done = np.isin(requests["outcome"], FINISHED)
    times = [requests[c][done] for c in ("arrival_s", "scheduled_s", "first_token_s", "finish_s")]
    assert (times[0] <= times[1]).all()
    assert (times[1] < times[2]).all()
    assert (times[2] <= times[3]).all()
    one = requests["samples"][done] == 1
    assert ((times[2] == times[3]) == (requests["output_tokens"][done] == 1))[one].all()
    assert (steps["start_s"][1:] >= steps["end_s"][:-1]).all()
    assert (steps["end_s"] > steps["start_s"]).all()
    assert (steps["step"][1:] == (steps["step"] + steps["steps"])[:-1]).all()
    computed = steps["prefill_tokens"] + steps["decodes"] + steps["draft_tokens"]
    assert (computed <= getattr(policy, "max_num_batched_tokens", np.inf)).all()
    assert (steps["running"] <= getattr(policy, "max_num_seqs", np.inf)).all()
    assert (steps["prefill_tokens"] + steps["decodes"] > 0).all()
    assert np.isfinite(steps["end_s"]).all()
    assert windows or (steps["kv_blocks"] <= steps["kv_blocks_end"]).all()
    assert (steps["kv_blocks"] <= num_blocks - 1).all()
    assert (steps["kv_blocks_end"] <= num_blocks - 1).all()
    served = requests["outcome"] <= CANCELLED
    tries = log.given_up.table()
    again = tries["again"] > 0
    in_vain = (
        steps["output_tokens"].sum() - requests["output_tokens"][served].sum() - tries["output_tokens"][again].sum()
    )
    # At most one token, and its drafts, a sample whose client had just given up.
    most = 1 + (steps["draft_tokens"] / np.maximum(steps["decodes"], 1)).max(initial=0)
    assert 0 <= in_vain <= most * (requests["samples"][served & ~done].sum() + again.sum())
    if isinstance(getattr(policy, "_policy", policy), StaticBatching):
        return
    first = requests["prompt_tokens"] * requests["samples"] - requests["cached_tokens"]
    given_up = tries["prompt_tokens"].sum() + log.in_vain
    recomputed = steps["prefill_tokens"].sum() - first[done].sum() - given_up
    preempted = steps["preempted"].any()
    assert recomputed >= 0 or preempted  # what was lost may have been found
    assert preempted or recomputed == 0
