"""llama.cpp's server: a fixed number of slots, each with its own part of the context.

Semantics as in `update_slots` and `get_available_slot` of `tools/server/server.cpp` (of 2025): a request takes the free
slot that was used the longest ago, or waits for one; a batch of up to `n_batch` tokens has the next token of every slot
that generates, then prompt tokens, slot by slot in the order of the slots. Nobody is preempted. Prompts that a slot has
in common with the one before it (`cache_prompt`) are computed anew here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sim.batch import Batch
from sim.request import Request
from sim.schedulers.policy import Scheduler
from sim.state import State


@dataclass(slots=True)
class LlamaCpp(Scheduler):
    """`n_parallel` slots, `n_batch` tokens; without `cont_batching` prompts wait until no slot generates."""

    n_parallel: int
    n_batch: int
    cont_batching: bool = True

    _slots: list[Request | None] = field(default_factory=list, init=False)
    _used: list[int] = field(default_factory=list, init=False)  # when each slot was released, as a rank
    _releases: int = field(default=0, init=False)

    def plan(self, state: State) -> Batch:
        """The next step's batch."""
        batch, decodes = Batch(), state.decodes
        self._assign(state)
        demand = decodes.demand(decodes.step)
        state.kv.free -= demand
        batch.decodes, batch.kv_tokens = decodes.count, decodes.kv_tokens
        if decodes.count and not self.cont_batching:
            return batch
        budget = self.n_batch - decodes.count
        for request in self._slots:
            if request is None or request.decoding or not budget:
                continue
            tokens = min(request.target - request.computed, budget)
            budget -= tokens
            if request.ticket in state.running:
                state.prefill(batch, request, tokens)
            else:
                state.waiting.remove(request)
                state.waiting.appendleft(request)
                state.admit(batch, tokens)
        return batch

    def arrival_matters(self, state: State) -> bool:
        """It does where a slot is free."""
        return None in self._slots

    def _assign(self, state: State) -> None:
        """Slots for those who wait, the first come first."""
        slots = self._slots or [None] * self.n_parallel
        self._used = self._used or [0] * self.n_parallel
        for i, request in enumerate(slots):
            if request is not None and request.over:
                slots[i] = None
                self._releases += 1
                self._used[i] = self._releases
        for request in state.waiting:
            free = [i for i, other in enumerate(slots) if other is None]
            if request in slots:
                continue
            if not free:
                break
            slots[min(free, key=lambda i: (self._used[i], -i))] = request
        self._slots = slots
