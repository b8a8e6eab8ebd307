"""Our policy `vllm-v0` against the scheduler and block manager of vLLM 0.6.6 itself, on random workloads.

Needs the sources: `pip download --no-deps vllm==0.6.6.post1`, unzip into a folder `0.6.6`, and set
`SERVECAST_VLLM_SOURCES` to the folder around it. Skips without.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from servecast.errors import ServecastError
from sim.schedulers.vllm_v0 import VllmV0
from sim.source import OpenLoop, Requests
from tests.sim.engine import LinearCost, simulate
from tests.sim.test_oracle import expand

SOURCES = Path(os.environ.get("SERVECAST_VLLM_SOURCES", ".")) / "0.6.6"
CASES = 250


@pytest.mark.skipif(not (SOURCES / "vllm").is_dir(), reason="vLLM 0.6.6's sources not found (SERVECAST_VLLM_SOURCES)")
@pytest.mark.parametrize("mode", ["recompute", "swap", "chunked"])
def test_equal_to_vllm_0_6(mode):
    """In a process of its own, since vLLM's modules are replaced there."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.sim.test_vllm_v0_sources", mode], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    preempting, stopped = (int(word) for word in done.stdout.split())
    assert preempting > 50  # the cases are tight enough to matter
    assert (stopped > 10) == (mode == "swap")


def case(r, mode):
    """A random policy, cost, pool and workload."""
    size, seqs, rows, now = r.choice([1, 2, 3, 4, 16]), r.randint(1, 8), [], 0.0
    for _ in range(r.randint(1, 25)):
        now += r.choice([0.0, 0.0, 0.5, 0.625, 1.0, 3.25, 5 * r.random()])
        output = r.randint(1, 12)
        rows.append((now, r.randint(1, 12), output, output))
    longest = max(prompt + output for _, prompt, output, _ in rows)
    chunked = mode == "chunked"
    tokens = seqs + r.randint(0, 30) if chunked else max(seqs, longest) + r.randint(0, 40)
    swaps = ("swap", r.choice([500, 500, r.randint(0, 12)])) if mode == "swap" else ("recompute", 0)
    blocks = -(-longest // size) + r.choice([0, 1, 2, 3, r.randint(0, 60)]) + (mode != "swap")
    cost = LinearCost(kv=r.choice([0.0, 0.001, 0.0625]))
    return VllmV0(tokens, seqs, chunked, 0.01, *swaps), cost, blocks, size, rows


def compare(engine, policy, cost, blocks, size, rows):
    """Whether anybody was preempted; None where both stop."""
    arrival_s, *columns = (np.array(column) for column in zip(*rows, strict=True))
    source = OpenLoop(arrival_s.astype(float), Requests(*columns))
    try:
        token_s, steps = engine.run(policy, cost, blocks, size, rows)
    except RuntimeError as error:
        if "lack of CPU swap space" not in str(error):
            raise
        with pytest.raises(ServecastError, match="lack of CPU swap space"):
            simulate(policy, cost, blocks + 1, size, False, source)
        return None
    _, log = simulate(policy, cost, blocks + 1, size, False, source)
    requests = log.requests.table()
    requests = requests.take(np.argsort(requests["id"]))
    for name, i in (("first_token_s", 0), ("finish_s", -1)):
        np.testing.assert_allclose(requests[name], [times[i] for times in token_s], rtol=1e-12)
    assert [step[1:] for step in expand(log.steps.table())] == steps
    return bool(requests["preemptions"].any())


if __name__ == "__main__":
    from tests.sim.vllm_v0_sources import VllmV0Engine

    vllm, chance = VllmV0Engine(SOURCES), random.Random(1)
    found = [compare(vllm, *case(chance, sys.argv[1])) for _ in range(CASES)]
    print(found.count(True), found.count(None))
