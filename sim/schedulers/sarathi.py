"""Sarathi-Serve's scheduler: decodes are never stalled; prompts come in chunks that fill the step up to a budget.

Semantics as in `sarathi_scheduler.py` (microsoft/sarathi-serve): all decoding requests first, and each must find a
free block; then the prompt that is under way; then the queue in order, while a whole prompt's blocks fit above the
watermark. Its schedule of changing chunk sizes is not modelled.
"""

from __future__ import annotations

from dataclasses import dataclass

from sim.batch import Batch
from sim.kvcache import KVCache, Reserved
from sim.schedulers.in_order import decode_in_order
from sim.schedulers.policy import Scheduler
from sim.state import State


@dataclass(frozen=True, slots=True)
class SarathiServe(Scheduler):
    """`chunk_size`: tokens of a step, its decodes included, that prompts may fill up. `watermark`: the share of all
    blocks that no admission may take."""

    chunk_size: int
    max_num_seqs: int
    watermark: float = 0.01

    cache = Reserved

    def plan(self, state: State) -> Batch:
        """The next step's batch."""
        batch = Batch()
        decode_in_order(state, batch)
        kv, waiting = state.kv, state.waiting
        budget = max(0, self.chunk_size - batch.decodes)
        for request in list(state.prefilling.values()):
            if budget:
                tokens = min(request.target - request.computed, budget)
                state.prefill(batch, request, tokens)
                budget -= tokens
        kept_free = self._kept_free(kv)
        while waiting and budget and len(state.running) < self.max_num_seqs:
            target = waiting[0].target
            if kv.free - kv.blocks(target) < kept_free:
                break
            tokens = min(target, budget)
            state.admit(batch, tokens, reserve=target)
            budget -= tokens
        return batch

    def arrival_matters(self, state: State) -> bool:
        """It cannot while somebody ahead of it waits, nor while every place or the whole budget is taken."""
        return not state.waiting and state.decodes.count < self.chunk_size and len(state.running) < self.max_num_seqs

    def room(self, kv: KVCache) -> int:
        """All but the watermark."""
        return kv.usable - self._kept_free(kv)

    def _kept_free(self, kv: KVCache) -> int:
        return int(self.watermark * kv.usable)
