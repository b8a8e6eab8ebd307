"""Each side of split serving against vLLM's own scheduler code with a connector, on random workloads.

The decode side: requests whose prompts come from elsewhere, after a time that the test chooses, among others. The
prefill side: requests of one token whose blocks are kept for a time. For the sources: see `test_vllm_sources`.
"""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sim.clock import ARRIVAL, Clock
from sim.kvcache import KVCache
from sim.prefixcache import PrefixCache
from sim.replica import Replica
from sim.request import Request
from sim.state import State
from sim.steplog import Log
from tests.sim.engine import check_cache
from tests.sim.test_oracle import expand
from tests.sim.test_vllm_sources import ROOT, VERSIONS, case, minor_of, shared
from tests.sim.vllm_transfers import MOST_STEPS, run
from workloads.content import content_of

CASES = 100


@pytest.mark.skipif(not VERSIONS, reason="vLLM's sources not found (set SERVECAST_VLLM_SOURCES)")
@pytest.mark.parametrize("version", VERSIONS)
def test_both_sides_equal_vllms_own_scheduler(version):
    """In a process of its own, since vLLM's modules are replaced there."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.sim.test_vllm_transfers", version], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    preemptions, pulls, kept = (int(word) for word in done.stdout.split()[-3:])
    assert preemptions > 100  # the cases are tight enough to matter
    assert min(pulls, kept) > 500


def transfers(seed, rows, side):
    """How long each request's prompt is on its way, and how long its blocks are kept."""
    r = random.Random(seed)
    usual = r.choice([0.01, 0.6, 3.0, 20.0])
    taken = [r.choice([usual, usual * r.random() + 1e-3, 0.5, 1.0]) for _ in rows]
    nobody = [None] * len(rows)
    if side == "prefill":
        return nobody, taken
    local = r.choice([0.0, 0.0, 0.3])
    return [None if r.random() < local else s for s in taken], nobody


def simulate(policy, cost, num_blocks, block_size, asynchronous, rows, pull_s, keep_s, kv, until_s):
    """One replica of ours, till everything is done or to `until_s`: its log."""
    clock, log = Clock(), Log()
    state = State(kv or KVCache(num_blocks, block_size), policy.by_priority, pulled_first=policy.pulled_first)

    def later(time, request):
        if time > clock.now:
            clock.call_at(time, lambda _: replica.transferred(request, clock.now), ARRIVAL)
        else:
            replica.transferred(request, clock.now)

    def on_finish(request, now):
        if request.kept:
            later(now + keep_s[request.id], request)

    replica = Replica(
        0, clock, state, policy, cost, log, on_finish, max_model_len=10**9, asynchronous=asynchronous,
        on_pull=lambda request, found, now: later(now + pull_s[request.id], request),
    )  # fmt: skip
    for i, (arrival, prompt, output, cap, priority) in enumerate(rows):
        request = Request(i, arrival, prompt, output, cap, priority)
        request.pulls, request.kept = pull_s[i] is not None, keep_s[i] is not None
        clock.call_at(arrival, lambda _, request=request: replica.submit(request), ARRIVAL)
    clock.run(until_s)
    assert until_s or not (state.running or state.pulling or state.prefilling)
    if not (state.waiting or state.running or state.pulling):
        assert state.kv.free == state.kv.usable
        if kv is not None:
            check_cache(kv)
    return log


def compare(seed, theirs, steps, log):
    """Requests and steps are the same. Returns whether requests wait for ever, in both."""
    ours = log.requests.table()
    order = np.argsort(ours["id"])
    mine = list(expand(log.steps.table()))
    if len(steps) > MOST_STEPS:
        n = min(len(mine), len(steps))
        assert n > len(steps) - 50, seed  # a run that is under way is not in the log
        assert [m[1:] for m in mine[:n]] == [s[1:4] for s in steps[:n]], seed
        assert all(m[0] in (None, s[0]) for m, s in zip(mine, steps[:n], strict=False)), seed
        return True
    assert [m[1:] for m in mine] == [s[1:4] for s in steps], seed
    assert all(m[0] in (None, s[0]) for m, s in zip(mine, steps, strict=True)), seed
    everyone, theirs = len(theirs), [r for r in theirs if r.token_s and r.is_finished()]
    assert ours["id"][order].tolist() == [r.id for r in theirs], seed
    assert ours["scheduled_s"][order].tolist() == [r.scheduled_s for r in theirs], seed
    assert ours["first_token_s"][order].tolist() == [r.token_s[0] for r in theirs], seed
    assert ours["finish_s"][order].tolist() == [r.token_s[-1] for r in theirs], seed
    assert ours["preemptions"][order].tolist() == [r.preempted for r in theirs], seed
    rows = log.steps.table()
    last = np.cumsum(rows["steps"]).astype(int) - 1
    used = np.array([s[4] for s in steps])
    assert rows["kv_blocks_end"].tolist() == used[last].tolist(), seed
    assert rows["kv_blocks"].tolist() == used[last + 1 - rows["steps"].astype(int)].tolist(), seed
    return len(theirs) < everyone


def main(version, seeds):
    from tests.sim.vllm_sources import Vllm

    vllm, minor = Vllm(Path(ROOT or "") / version), minor_of(version)
    preemptions = pulls = kept = stuck = 0
    for seed in seeds:
        policy, *setting, rows = case(seed, version)
        queue = "always" if minor >= 32 else "fcfs" if minor >= 19 else "never"
        policy = replace(policy, pulled_queue=queue, pulls_spare_prefills=minor >= 24)
        for side in ("decode", "prefill"):
            if side == "prefill":
                rows = [(arrival, prompt, 1, 1, priority) for arrival, prompt, _, _, priority in rows]
            pull_s, keep_s = transfers(seed, rows, side)
            prefix, begins = shared(seed, rows)
            paths = content_of(prefix, np.array([row[1] for row in rows]), setting[2]).path
            cache = PrefixCache(setting[1], setting[2], paths, minor >= 24)
            for kv, same in ((None, None), (cache, begins)):
                theirs, steps = run(vllm, policy, *setting, rows, pull_s, keep_s, same)
                until_s = steps[-1][0] if len(steps) > MOST_STEPS else None
                log = simulate(policy, *setting, rows, pull_s, keep_s, kv, until_s)
                stuck += compare((seed, side, same is not None), theirs, steps, log)
                preemptions += sum(r.preempted for r in theirs)
            pulls += sum(s is not None for s in pull_s)
            kept += sum(s is not None for s in keep_s)
    print(f"vLLM {version}: stuck, preemptions, pulls, kept {stuck} {preemptions} {pulls} {kept}")


if __name__ == "__main__":
    main(sys.argv[1], [int(seed) for seed in sys.argv[2:]] or range(CASES))
