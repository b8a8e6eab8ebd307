"""Pipeline stages: against the naive queue of batches, and what a pipeline is worth."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.clock import Clock
from sim.kvcache import KVCache
from sim.pipeline import Pipeline
from sim.prefixcache import PrefixCache
from sim.schedulers import VllmV1
from sim.source import Desk, OpenLoop, Requests
from sim.state import State
from sim.steplog import CANCELLED, Log
from tests.examples import examples
from tests.sim.engine import LinearCost
from tests.sim.oracle.parts import Naive
from tests.sim.oracle.pipeline import Pipelined
from tests.sim.test_oracle import scenarios


@dataclass(frozen=True)
class Stages:
    """Each stage takes its share of what `cost` says."""

    cost: LinearCost
    shares: tuple[float, ...]
    send: float = 0.03125
    host: float = 0.0625

    @property
    def depth(self):
        return len(self.shares)

    @property
    def host_s(self):
        return [self.host * (1 + n / 64) for n in range(200)]

    def stages_s(self, chunks, decodes, kv_tokens):
        step_s = self.cost.step_s(chunks, decodes, kv_tokens)
        sends = [self.send * (decodes + len(chunks)) if i + 1 < self.depth else 0.0 for i in range(self.depth)]
        return [(share * step_s, send) for share, send in zip(self.shares, sends, strict=True)]


def simulate(policy, stages, kv, asynchronous, fills, rows, patience_s=None):
    """(the replica, its log) of (arrival, prompt, output, cap[, priority]) rows."""
    clock, log = Clock(), Log()
    columns = [np.array(column) for column in zip(*rows, strict=True)]
    source = OpenLoop(columns[0].astype(float), Requests(*columns[1:4], patience_s, *columns[4:]))
    replica = Pipeline(
        0, clock, State(kv, policy.by_priority), policy, stages, log, source.on_finish,
        max_model_len=10**9, asynchronous=asynchronous, fills=fills,
    )  # fmt: skip

    def submit(request):
        request.sent_s = request.queued_s = request.arrival_s  # there is no front end
        replica.submit(request)

    clock.process(source.start(clock, Desk(submit, lambda request: replica.cancel(request, clock.now))))
    clock.run()
    assert len(log.requests) == len(rows)
    assert kv.free == kv.usable
    assert not any((replica.state.running, replica.state.waiting, replica.state.prefilling, replica._left))
    assert len(replica._spare) == stages.depth
    for cohort in replica._spare:
        assert (cohort.count, cohort.kv_tokens, sum(cohort.phases), cohort.batch) == (0, 0, 0, None)
    return replica, log


def same(policy, cost, num_blocks, block_size, asynchronous, rows, shares, host=0.0625, patience_s=None):
    """The fast pipeline does what the naive one does. Returns both."""
    stages = Stages(cost, shares, host=host)
    caches = len(rows) % 2 == 1
    fills = asynchronous or len(rows) % 3 == 0
    naive = Pipelined(policy, cost, num_blocks, block_size, asynchronous, caching=caches, stages=stages, fills=fills)
    sent = [Naive(i, *row[:4], priority=row[4] if len(row) > 4 else 0) for i, row in enumerate(rows)]
    for r, s in zip(sent, patience_s if patience_s is not None else [inf] * len(rows), strict=True):
        r.patience_s = s
    naive.run(sent)
    kv = PrefixCache(num_blocks, block_size, None, False) if caches else policy.cache(num_blocks, block_size)
    replica, log = simulate(policy, stages, kv, asynchronous, fills, rows, patience_s)
    ours = log.requests.table()
    order = np.argsort(ours["id"])
    got = {c: ours[c][order].tolist() for c in ours}
    assert got["finish_s"] == [r.token_s[-1] if r.cancelled_s is None else r.cancelled_s for r in sent]
    assert got["output_tokens"] == [r.out for r in sent]
    assert [o == CANCELLED for o in got["outcome"]] == [r.cancelled_s is not None for r in sent]
    for r, scheduled_s, first_s, preemptions in zip(
        sent, *(got[c] for c in ("scheduled_s", "first_token_s", "preemptions")), strict=True
    ):
        assert first_s == r.token_s[0] if r.token_s else first_s != first_s
        if r.cancelled_s is None:
            assert (scheduled_s, preemptions) == (r.scheduled_s, r.preemptions)
    steps = log.steps.table()
    rows = zip(
        *(steps[c].tolist() for c in ("start_s", "end_s", "decodes", "kv_tokens", "prefill_tokens")), strict=True
    )
    assert list(rows) == [
        (s.start_s, s.end_s, s.decodes, s.kv_tokens, sum(n for n, _ in s.chunks)) for s in naive.steps
    ]
    assert (steps["start_s"][1:] >= steps["end_s"][:-1]).all()
    if patience_s is None:
        logged = log.gaps.table()
        gaps = Counter(b - a for r in sent for a, b in zip(r.token_s, r.token_s[1:], strict=False))
        took = logged["end_s"] - logged["since_s"]
        assert Counter(np.repeat(took, logged["tokens"].astype(int)).tolist()) == gaps
    return naive, replica


shapes = st.sampled_from([(1.0,), (0.5, 0.5), (0.25, 0.75), (0.5, 0.25, 0.25), (0.25,) * 4])


@examples(600)
@given(scenarios(), shapes, st.sampled_from([0.0, 0.0625, 1.0]))
def test_equals_the_oracle(scenario, shares, host):
    *setting, asynchronous, requests, priority = scenario
    rows = [(*row, p) for row, p in zip(requests, priority, strict=True)] if priority else requests
    same(*setting, asynchronous, rows, shares, host)


@examples(300)
@given(scenarios(), shapes, st.data())
def test_clients_that_give_up_equal_the_oracle(scenario, shares, data):
    *setting, asynchronous, requests, _ = scenario
    patience = st.sampled_from([1.0, 2.5, 0.6875, inf]) | st.floats(0.01, 60)
    patience_s = np.array(data.draw(st.lists(patience, min_size=len(requests), max_size=len(requests))))
    setting[0] = VllmV1(setting[0].max_num_batched_tokens, setting[0].max_num_seqs)
    same(*setting, asynchronous, requests, shares, patience_s=patience_s)


def busy(replica, log):
    """The share of the time in steps that the stages compute, on average."""
    steps = log.steps.table()
    return sum(replica.busy_s) / len(replica.busy_s) / float((steps["end_s"] - steps["start_s"]).sum())


@pytest.mark.parametrize("asynchronous", [False, True])
def test_prompts_that_fill_batches_fill_the_stages_and_one_cohort_leaves_a_bubble(asynchronous):
    """Requests that arrive together fit into one batch, and stay in one; those that do not are in as many as there are
    stages, and the pipeline is full."""
    stages = Stages(LinearCost(base=1.0, token=0.0), (0.25,) * 4, send=0.0, host=0.0)
    rows = [(0.0, 16, 200, 200)] * 8
    kv = KVCache(1000, 16)
    alone = busy(*simulate(VllmV1(8192, 256), stages, kv, asynchronous, asynchronous, rows))
    assert alone == pytest.approx(0.25, rel=0.02)
    full = busy(*simulate(VllmV1(32, 32), stages, KVCache(1000, 16), asynchronous, asynchronous, rows))
    assert full > 0.95


def test_the_log_says_how_long_each_stage_computed():
    stages = Stages(LinearCost(), (0.25, 0.75))
    replica, log = simulate(VllmV1(64, 8), stages, KVCache(100, 16), False, False, [(0.0, 10, 5, 5)] * 4)
    replica.record_stages()
    first, second = log.stages.table()["busy_s"]
    assert 3 * first == pytest.approx(second)
    steps = log.steps.table()
    assert second < (steps["end_s"] - steps["start_s"]).sum()
