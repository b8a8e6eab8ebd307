"""What vLLM V0 and Sarathi-Serve share: decoding requests get a slot each, one by one, before anything else."""

from __future__ import annotations

from collections.abc import Callable

from sim.batch import Batch
from sim.request import Request
from sim.state import State

Preempt = Callable[[State, Batch, Request], None]


def decode_in_order(state: State, batch: Batch, preempt: Preempt = State.preempt) -> None:
    """Put all decoding requests into the batch, the first admitted first. Each must find a free block, whether it needs
    one or not; where none is left, the running request admitted last loses its KV."""
    decodes, kv = state.decodes, state.kv
    demand = decodes.demand(decodes.step)
    if decodes.count and demand >= kv.free:
        order = list(state.running.values())
        for request in order:
            if request.ticket in state.running and request.decoding:
                preempt_for(state, batch, request, 1, preempt)
                if request.ticket in state.running:
                    kv.free -= (decodes.step + request.kv_offset) % kv.block_size == 0
    else:
        kv.free -= demand
    batch.decodes = decodes.count
    batch.kv_tokens = decodes.kv_tokens
    batch.spare_blocks = 1


def preempt_for(state: State, batch: Batch, request: Request, blocks: int, preempt: Preempt = State.preempt) -> None:
    """Take the KV of the requests admitted last until `blocks` are free, in the end that of `request` itself."""
    while state.kv.free < blocks and request.ticket in state.running:
        preempt(state, batch, state.running[next(reversed(state.running))])
