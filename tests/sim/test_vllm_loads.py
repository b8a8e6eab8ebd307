"""Asynchronous loads of a part of a prompt against vLLM's own scheduler code, on random workloads.

Its scheduler and KV cache manager are real (`WAITING_FOR_REMOTE_KVS`, what it keeps free for prompts, what is computed
after the load); a connector of ours says how many tokens of each prompt come, and how long that takes. For the sources:
see `test_vllm_sources`.
"""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from sim.clock import ARRIVAL, Clock
from sim.kvcache import KVCache
from sim.offload import Loaded
from sim.replica import Replica
from sim.request import Request
from sim.state import State
from sim.steplog import Log
from tests.sim.test_vllm_sources import ROOT, VERSIONS, case, minor_of
from tests.sim.test_vllm_transfers import compare
from tests.sim.vllm_transfers import MOST_STEPS, Loads, run

CASES = 150
LATER = [version for version in VERSIONS if minor_of(version) >= 24]


@pytest.mark.skipif(not LATER, reason="vLLM's sources not found (set SERVECAST_VLLM_SOURCES)")
@pytest.mark.parametrize("version", LATER)
def test_loads_equal_vllms_own_scheduler(version):
    """In a process of its own, since vLLM's modules are replaced there."""
    done = subprocess.run([sys.executable, "-m", "tests.sim.test_vllm_loads", version], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    loads, preemptions = (int(word) for word in done.stdout.split()[-2:])
    assert loads > 400
    assert preemptions > 50  # the cases are tight enough to matter


class Known(KVCache):
    """Of each prompt the first `known` tokens are somewhere else, and come once."""

    __slots__ = ("begin_s", "begun", "known", "load_s", "now_s")

    loads = "async"
    sends = False

    def __init__(self, num_blocks, block_size, known, load_s):
        super().__init__(num_blocks, block_size)
        self.known, self.load_s, self.begun = known, load_s, set()
        self.now_s = self.begin_s = 0.0

    def beyond(self, request, found):
        return found if request.id in self.begun else max(found, self.known[request.id])

    def load(self, request, found, known):
        self.begun.add(request.id)
        return [Loaded(0, known - found, self.now_s + self.load_s[request.id])]

    def awaited(self, request, found, known):
        return None

    def arrived(self, request):
        pass

    admitted = planned = send = received = fetch_ahead = arrived


class Early(Replica):
    """Here loads begin when they are planned, and may be over when the step begins."""

    def _fetch(self, request, end_s):
        if end_s > self._clock.now:
            super()._fetch(request, end_s)
        else:
            self.transferred(request, self._clock.now)


def simulate(policy, cost, num_blocks, block_size, asynchronous, rows, known, load_s, until_s):
    """One replica of ours, till everything is done or to `until_s`: its log."""
    clock, log, kv = Clock(), Log(), Known(num_blocks, block_size, known, load_s)
    state = State(kv, policy.by_priority, pulled_first=policy.pulled_first)
    replica = Early(0, clock, state, policy, cost, log, lambda *_: None, max_model_len=10**9, asynchronous=asynchronous)
    for i, (arrival, prompt, output, cap, priority) in enumerate(rows):
        request = Request(i, arrival, prompt, output, cap, priority)
        clock.call_at(arrival, lambda _, request=request: replica.submit(request), ARRIVAL)
    clock.run(until_s)
    if not (state.waiting or state.running or state.pulling):
        assert (kv.free, state.loading) == (kv.usable, {})
    return log


def main(version, seeds):
    from tests.sim.vllm_sources import Vllm

    vllm, minor, loads, preemptions = Vllm(Path(ROOT or "") / version), minor_of(version), 0, 0
    for seed in seeds:
        policy, *setting, rows = case(seed, version)
        policy = replace(policy, pulled_queue="always" if minor >= 32 else "fcfs", pulls_spare_prefills=True)
        r, size = random.Random(seed), setting[2]
        known = [r.choice([0, r.randint(0, row[1] // size)]) * size for row in rows]
        usual = r.choice([0.01, 0.6, 3.0, 20.0])
        load_s = [r.choice([usual, usual * r.random() + 1e-3, 0.5]) for _ in rows]
        theirs, steps = run(vllm, policy, *setting, rows, None, None, connector=Loads(known, load_s))
        until_s = steps[-1][0] if len(steps) > MOST_STEPS else None
        log = simulate(policy, *setting, rows, known, load_s, until_s)
        compare(seed, theirs, steps, log)
        loads += log.loads.table().height
        preemptions += sum(request.preempted for request in theirs)
    print(f"vLLM {version}: loads, preemptions {loads} {preemptions}")


if __name__ == "__main__":
    main(sys.argv[1], [int(seed) for seed in sys.argv[2:]] or range(CASES))
