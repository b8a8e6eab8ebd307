"""Orca's scheduler: requests join and leave between any two iterations, each with its KV reserved to the end.

Semantics as in algorithm 1 of the paper (Yu et al., OSDI 2022): first come, first served, at most `max_batch_size`
requests; a new one is admitted when its prompt and `max_tokens` fit beside what all others have reserved, so nobody is
ever preempted. Whole prompts share the step with decodes. Its pipelining of batches over stages is not modelled.
"""

from __future__ import annotations

from dataclasses import dataclass

from sim.batch import Batch
from sim.kvcache import ReservedToTheEnd
from sim.schedulers.policy import Scheduler
from sim.state import State


@dataclass(frozen=True, slots=True)
class Orca(Scheduler):
    """`max_batch_size`: sequences. There is no token budget."""

    max_batch_size: int

    cache = ReservedToTheEnd
    reserves = True

    def plan(self, state: State) -> Batch:
        """The next step's batch."""
        batch = Batch()
        batch.decodes, batch.kv_tokens = state.decodes.count, state.decodes.kv_tokens
        kv, waiting = state.kv, state.waiting
        while waiting and len(state.running) < self.max_batch_size:
            request = waiting[0]
            tokens = request.prompt_tokens + request.max_tokens
            if kv.blocks(tokens) > kv.free:
                break
            state.admit(batch, request.target, reserve=tokens)
        return batch

    def arrival_matters(self, state: State) -> bool:
        """It cannot while somebody ahead of it waits, nor while every place is taken."""
        return not state.waiting and len(state.running) < self.max_batch_size
