"""Every other policy equals its counterpart in the naive engine, too: each time, step, preemption and block."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.schedulers.audit import Audited
from sim.schedulers.llama_cpp import LlamaCpp
from sim.schedulers.mlc import MlcLlm
from sim.schedulers.orca import Orca
from sim.schedulers.sarathi import SarathiServe
from sim.schedulers.static_batching import StaticBatching
from sim.schedulers.tgi import Tgi
from sim.schedulers.vllm_v0 import VllmV0
from sim.source import OpenLoop, Requests
from tests.examples import examples
from tests.sim.engine import LinearCost, simulate
from tests.sim.test_oracle import same


def vllm_v0(draw, longest):
    seqs = draw(st.integers(1, 8))
    chunked = draw(st.booleans())
    tokens = seqs + draw(st.integers(0, 30)) if chunked else draw(st.integers(max(seqs, longest), longest + 40))
    return VllmV0(tokens, seqs, chunked, draw(st.sampled_from([0.01, 0.0, 0.1])))


def swapping(draw, longest):
    seqs = draw(st.integers(1, 8))
    tokens = draw(st.integers(max(seqs, longest), longest + 40))
    return VllmV0(tokens, seqs, False, draw(st.sampled_from([0.01, 0.0, 0.1])), "swap", 10**6)


def sarathi(draw, longest):
    return SarathiServe(draw(st.integers(1, 40)), draw(st.integers(1, 8)), draw(st.sampled_from([0.01, 0.0, 0.1])))


def orca(draw, longest):
    return Orca(draw(st.integers(1, 8)))


def static(draw, longest):
    return StaticBatching(draw(st.integers(1, 8)))


def llama_cpp(draw, longest):
    slots = draw(st.integers(1, 6))
    return LlamaCpp(slots, slots + draw(st.integers(0, 30)), draw(st.booleans()))


def tgi(draw, longest):
    ratios, most = st.sampled_from([0.0, 0.3, 0.7, 1.2]), st.none() | st.integers(1, 8)
    return Tgi(draw(st.integers(12, 40)), draw(ratios), draw(st.integers(1, 12)), draw(most))


def mlc(draw, longest):
    return MlcLlm(draw(st.integers(1, 8)), draw(st.integers(1, 40)), draw(st.sampled_from(["hybrid", "chunked"])))


@st.composite
def scenarios(draw, make):
    """Requests of up to 12 tokens in and out, in pools that hold any of them and hardly more."""
    block_size = draw(st.sampled_from([1, 2, 3, 4, 16]))
    requests = []
    arrival = 0.0
    longest = 0
    for _ in range(draw(st.integers(1, 25))):
        arrival += draw(st.sampled_from([0.0, 0.0, 0.5, 0.625, 1.0, 3.25, 20.0]) | st.floats(0, 5))
        prompt, output = draw(st.integers(1, 12)), draw(st.integers(1, 12))
        requests.append((arrival, prompt, output, output + draw(st.sampled_from([0, 0, 5]))))
        longest = max(longest, prompt + requests[-1][3])
    policy = make(draw, longest)
    blocks = -(-longest // block_size) + draw(st.integers(0, 3) | st.integers(0, 60))
    cost = LinearCost(
        kv=draw(st.sampled_from([0.0, 0.001, 0.0625])),
        floor=draw(st.sampled_from([0.0, 0.0, 1.0, 1.3])),
        straight=draw(st.booleans()),
        knee=draw(st.sampled_from([0.0, 30.0, 75.5])),
    )
    num_blocks = blocks + 1 + int(0.12 * blocks)  # with what a policy keeps free
    if isinstance(policy, MlcLlm):
        num_blocks += 1 + -(-8 // block_size)
    if isinstance(policy, LlamaCpp):
        num_blocks *= policy.n_parallel  # every slot holds the longest request
    swaps = getattr(policy, "preemption_mode", "") == "swap"
    # vLLM V0 never is. If it were, without a free block beside its own a request would lose its token for ever.
    asynchronous = draw(st.booleans()) and not (swaps or getattr(policy, "enable_chunked_prefill", True))
    # In chunks it needs one beside those of the whole prompt; the watermark of pools that are not tiny leaves it.
    num_blocks += asynchronous or (isinstance(policy, VllmV0) and not swaps)
    return policy, cost, num_blocks, block_size, asynchronous, requests


POLICIES = pytest.mark.parametrize("make", [vllm_v0, swapping, sarathi, orca, static, llama_cpp, tgi, mlc])


@POLICIES
@examples(300)
@given(data=st.data())
def test_open_loops_equal_the_oracle(make, data):
    same(*data.draw(scenarios(make)))


@POLICIES
@examples(100)
@given(data=st.data())
def test_closed_loops_equal_the_oracle(make, data):
    same(*data.draw(scenarios(make)), concurrency=data.draw(st.integers(1, 6)))


@POLICIES
@examples(100)
@given(data=st.data())
def test_sessions_and_clients_that_give_up_equal_the_oracle(make, data):
    scenario = data.draw(scenarios(make))
    n = len(scenario[-1])
    some = st.sampled_from([0.0, 0.5, 1.0, 4.0]) | st.floats(0, 9)
    think_s = data.draw(st.none() | st.lists(some, min_size=n, max_size=n))
    patience = st.sampled_from([1.0, 2.5, 0.6875, inf, inf]) | st.floats(0.01, 60)
    patience_s = data.draw(st.none() | st.lists(patience, min_size=n, max_size=n))
    same(*scenario, think_s=think_s, patience_s=patience_s)


@POLICIES
@examples(60)
@given(data=st.data())
def test_no_policy_of_ours_makes_a_plan_that_the_audit_objects_to(make, data):
    policy, cost, num_blocks, block_size, asynchronous, requests = data.draw(scenarios(make))
    columns = [np.array([r[i] for r in requests]) for i in (1, 2, 3)]
    source = OpenLoop(np.array([float(r[0]) for r in requests]), Requests(*columns))
    simulate(Audited(policy, "ours", 10**6, 10**6), cost, num_blocks, block_size, asynchronous, source)


def test_tgi_counts_its_patience_from_the_first_pass():
    """A batch that was formed while nobody decoded is one pass old when it decodes first."""
    requests = [(0.0, 1, 2, 2)] * 2 + [(0.0, 1, 1, 1)] * 12 + [(0.0, 1, 1, 6)]
    same(Tgi(12, 1.2, 2, None), LinearCost(kv=0.0), 8, 1, False, requests)
