"""vLLM V0's preemption by swapping: what goes to the host and comes back, when, what it costs, and when vLLM stops."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servecast.errors import ServecastError
from sim.schedulers.vllm_v0 import VllmV0
from sim.source import OpenLoop, Requests
from sim.steplog import CANCELLED
from tests.sim.engine import LinearCost, simulate
from tests.sim.oracle.vllm_v0 import OutOfSwapSpaceError
from tests.sim.test_oracle import same
from tests.sim.test_policies import scenarios, swapping

ONE_SECOND = LinearCost(base=1.0, token=0.0, decode=0.0, kv=0.0, attention=0.0, swap_block_s=0.125)


def run(arrival_s, prompt, output, blocks, policy, patience_s=None):
    """Blocks of 4 tokens; the requests' rows by id, and the steps."""
    columns = [np.array(prompt), np.array(output), np.array(output)]
    source = OpenLoop(np.array(arrival_s), Requests(*columns, patience_s))
    _, log = simulate(policy, ONE_SECOND, blocks + 1, 4, False, source)
    rows = log.requests.table()
    return rows.take(np.argsort(rows["id"])), log.steps.table()


@settings(max_examples=300, deadline=None)
@given(scenarios(swapping), st.integers(0, 6))
def test_vllm_stops_where_the_swap_space_is_too_small(scenario, swap_blocks):
    policy, cost, num_blocks, block_size, asynchronous, requests = scenario
    policy = replace(policy, swap_blocks=swap_blocks)
    try:
        same(policy, cost, num_blocks, block_size, asynchronous, requests)
    except OutOfSwapSpaceError:
        columns = [np.array([r[i] for r in requests]) for i in (1, 2, 3)]
        source = OpenLoop(np.array([float(r[0]) for r in requests]), Requests(*columns))
        with pytest.raises(ServecastError, match=r"lack of CPU swap space.*Raise engine\.swap_space, or set"):
            simulate(policy, cost, num_blocks, block_size, asynchronous, source)


SWAP = VllmV0(100, 8, watermark=0.0, preemption_mode="swap", swap_blocks=2)


def test_a_swapped_request_comes_back_before_anybody_is_admitted():
    """Two prompts of a block each in three blocks. The first finds another block for its second token, the second none,
    and goes to the host with one block. The third request would fit, and waits until the second decodes again."""
    rows, steps = run([0.0, 0.0, 1.5], [4, 4, 1], [4, 4, 1], 3, SWAP)
    assert rows["preemptions"].tolist() == [0, 1, 0]
    assert steps["end_s"].tolist() == [1.0, 2.125, 4.125, 5.25, 6.25, 7.25, 8.25]
    assert rows["finish_s"].tolist() == [4.125, 8.25, 6.25]
    assert steps["prefill_tokens"].tolist() == [8, 0, 0, 0, 1, 0, 0]  # nothing is computed again
    assert steps["waiting"].tolist() == [0, 1, 2, 1, 0, 0, 0]


def test_who_gives_up_while_swapped_out_never_comes_back():
    rows, steps = run([0.0, 0.0], [4, 4], [4, 4], 3, SWAP, np.array([inf, 2.5]))
    assert (rows["outcome"].tolist()[1], rows["output_tokens"].tolist()) == (CANCELLED, [4, 1])
    assert rows["finish_s"].tolist() == [4.125, 2.5]
    assert steps["end_s"].tolist()[-1] == 4.125
