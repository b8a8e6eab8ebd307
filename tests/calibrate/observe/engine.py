"""An engine core around the fake vLLM: sync or with two batches in flight, arrivals and aborts between its steps."""

from __future__ import annotations

import importlib.util
import random
import sys
from collections import deque
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

from sim.schedulers.vllm_v1 import VllmV1

OBSERVER = Path(__file__).parents[3] / "calibrate" / "observe" / "observer.py"


@contextmanager
def fake_vllm():
    """`import vllm` finds the fake one."""

    def forget():
        for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
            del sys.modules[name]

    forget()
    sys.path.insert(0, str(Path(__file__).parent / "fake"))
    try:
        yield
    finally:
        sys.path.pop(0)
        forget()


def observer(path=OBSERVER):
    """The observer as vLLM imports it: a file of its own."""
    spec = importlib.util.spec_from_file_location("observer", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def config(policy, num_blocks, block_size, asynchronous, **parallel):
    """(vllm_config, kv_cache_config)."""
    return SimpleNamespace(
        policy=policy,
        scheduler_config=SimpleNamespace(
            max_num_seqs=policy.max_num_seqs,
            max_num_batched_tokens=policy.max_num_batched_tokens,
            async_scheduling=asynchronous,
            enable_chunked_prefill=policy.enable_chunked_prefill,
            long_prefill_token_threshold=policy.long_prefill_token_threshold,
        ),
        model_config=SimpleNamespace(
            model="meta-llama/Llama-3.1-8B-Instruct", dtype="torch.bfloat16", quantization=None
        ),
        cache_config=SimpleNamespace(block_size=block_size, cache_dtype="auto", enable_prefix_caching=False),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1, **parallel),
        speculative_config=None,
    ), SimpleNamespace(num_blocks=num_blocks, kv_cache_groups=[None])


def case(seed):
    """(policy, num_blocks, block_size, asynchronous, requests as (tick, prompt, output, cap, priority, abort tick))."""
    r = random.Random(seed)
    block_size, budget = r.choice([1, 3, 16]), r.choice([2, r.randint(1, 40), r.randint(1, 200)])
    prompts, outputs = r.choice([3, 12, 60]), r.choice([2, 12, 40])
    policy = VllmV1(
        budget,
        min(r.randint(1, 12), budget),
        r.random() < 0.6 or budget < prompts + outputs + 1,
        r.choice([0, 0, 5, 30]),
        r.random() < 0.5,
        r.random() < 0.5,
        "priority" if r.random() < 0.3 else "fcfs",
    )
    rows, tick = [], 0
    for _ in range(r.randint(1, 40)):
        tick += r.choice([0, 0, 1, 3, 30])
        output, abort = r.randint(1, outputs), tick + r.randint(0, 40) if r.random() < 0.2 else None
        rows.append((tick, r.randint(1, prompts), output, output + r.choice([0, 0, 1, 5]), r.randint(0, 2), abort))
    longest = max(prompt + cap for _, prompt, _, cap, *_ in rows)
    return policy, 1 + -(-longest // block_size) + r.choice([0, 2, 1000]), block_size, r.random() < 0.5, rows


def serve(scheduler, rows, asynchronous):
    """Run the engine until all of `rows` are done; the requests."""
    from vllm.v1.core.sched.scheduler import Request

    everyone = [Request(i, tick + i * 1e-6, *rest[:3], priority=rest[3]) for i, (tick, *rest) in enumerate(rows)]
    arrivals, flight, tick = deque(everyone), deque(), 0
    while arrivals or flight or scheduler.requests or scheduler.finished_req_ids:
        while arrivals and rows[arrivals[0].id][0] <= tick:
            scheduler.add_request(arrivals.popleft())
        for request in everyone:
            if rows[request.id][5] == tick and request not in arrivals:
                scheduler.finish_requests(request.request_id)
        tick += 1
        if scheduler.requests or scheduler.finished_req_ids:
            flight.append(scheduler.schedule())
            if asynchronous and len(flight) < 2 and flight[-1].batch:
                continue
        if flight:
            scheduler.update_from_output(flight.popleft(), None)
    return everyone
