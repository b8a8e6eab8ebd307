"""The observer inside vLLM's own scheduler code, and our scheduler against what it wrote: they agree on every step.

Needs the sources of `tests/sim/test_vllm_sources.py`; skips without.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.sim.test_vllm_sources import ROOT, VERSIONS, case

CASES = 80


@pytest.mark.skipif(not VERSIONS, reason="vLLM's sources not found (set SERVECAST_VLLM_SOURCES)")
@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_observed_is_reproduced(version):
    """In a process of its own, since vLLM's modules are replaced there."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.calibrate.observe.test_vllm_sources", version], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    steps, preemptions = map(int, done.stdout.split()[-2:])
    assert steps > 5000
    assert preemptions > 25  # the cases are tight enough to matter


def main(version):
    from calibrate.observe.observer import observed
    from calibrate.observe.read import read_steps
    from servecast.conformance.check import check_conformance
    from tests.sim.vllm_sources import Vllm

    class Watched(Vllm):
        """Schedulers that an Observer sits on."""

        def __init__(self, root):
            super().__init__(root)
            self.scheduler.Scheduler = observed(self.scheduler.Scheduler)
            self.asynchronous.AsyncScheduler = observed(self.asynchronous.AsyncScheduler)

        def build(self, policy, num_blocks, block_size, asynchronous, caching):
            it = super().build(policy, num_blocks, block_size, asynchronous, caching)
            it.kv_cache_manager.block_pool.get_num_free_blocks = lambda: it.kv_cache_manager.free_blocks
            it.kv_cache_config.num_blocks, it.block_size = num_blocks, block_size
            it.vllm_config.parallel_config.data_parallel_size = 1
            it.observe()
            self.it = it
            return it

    steps = preemptions = 0
    vllm = Watched(Path(ROOT or "") / version)
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(CASES):
            policy, cost, num_blocks, block_size, asynchronous, rows = case(seed, version)
            file = Path(folder) / f"{seed}.jsonl"
            os.environ["SERVECAST_OBSERVE"] = str(file)
            vllm.run(policy, cost, num_blocks, block_size, asynchronous, rows)
            assert vllm.it._record is not None, file.read_text().splitlines()[-1]
            vllm.it._record.end("shutdown")
            run = read_steps(file)
            assert run.notes == ()
            assert (run.facts["num_gpu_blocks"], run.facts["async_scheduling"]) == (num_blocks, asynchronous)
            assert run.most_in_flight == 0 or asynchronous
            found = check_conformance(run, policy, num_blocks, block_size)
            assert found.agreeing == found.steps, (seed, asynchronous, policy, block_size, found.text())
            assert found.finished == len(rows), seed
            steps += found.steps
            preemptions += found.preemptions
    print(f"vLLM {version}: steps, preemptions {steps} {preemptions}")


if __name__ == "__main__":
    main(sys.argv[1])
