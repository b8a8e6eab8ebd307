"""MLC-LLM's engine: prompts first, alone or with everybody's next token in the same step.

Semantics as in `cpp/serve/engine_actions/batch_prefill_base.cc`, `new_request_prefill.cc` and `batch_decode.cc`
(mlc-ai/mlc-llm) without its prefix cache: the queue in order, up to `prefill_chunk_size` tokens less one for everybody
who decodes, the last prompt chunked, while pages are left for everybody's next token and eight more tokens each fit.
Decoding needs a page for each request, whether it is needed or not; where they are fewer, the newest is preempted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sim.batch import Batch
from sim.kvcache import KVCache
from sim.schedulers.policy import Scheduler
from sim.state import State

AHEAD = 8
"""Tokens of each request that must still fit when one is admitted."""


@dataclass(frozen=True, slots=True)
class MlcLlm(Scheduler):
    """The options of MLC's `EngineConfig`, by its names; `max_total_sequence_length` is what the KV cache holds."""

    max_num_sequence: int
    prefill_chunk_size: int
    prefill_mode: Literal["hybrid", "chunked"] = "hybrid"

    @property
    def mixes(self) -> bool:
        """See `Scheduler`."""
        return self.prefill_mode == "hybrid"

    def plan(self, state: State) -> Batch:
        """The next step's batch."""
        batch, decodes, kv = Batch(), state.decodes, state.kv
        if decodes.count <= kv.free:
            self._prompts(state, batch)
            if batch.chunks and (self.prefill_mode == "chunked" or not decodes.count):
                batch.paused = True
                return batch
        while decodes.count > kv.free:
            state.preempt(batch, state.running[next(reversed(state.running))])
        kv.free -= decodes.demand(decodes.step)
        batch.decodes, batch.kv_tokens = decodes.count, decodes.kv_tokens
        batch.spare_blocks = decodes.count
        return batch

    def arrival_matters(self, state: State) -> bool:
        """It cannot while somebody ahead of it waits, nor while every place is taken."""
        return not state.waiting and len(state.running) < self.max_num_sequence

    def room(self, kv: KVCache) -> int:
        """What can be admitted alone: a longer request would be preempted and wait for ever."""
        return min(kv.usable - 1, (kv.usable * kv.block_size - AHEAD) // kv.block_size)

    def _prompts(self, state: State, batch: Batch) -> None:
        """What is left of a prompt under way, then the queue, until one does not fit or is cut to the budget."""
        decodes, kv = state.decodes, state.kv
        sequences, length, pages = decodes.count, decodes.count, decodes.count
        free = kv.free
        held = decodes.kv_tokens + sum(request.computed for request in state.prefilling.values())
        for request in [*state.prefilling.values(), *state.waiting]:
            left = request.target - request.computed
            tokens = min(left, self.prefill_chunk_size - length)
            sequences, length, pages = sequences + 1, length + tokens, pages + kv.blocks(tokens)
            if (
                tokens <= 0
                or sequences > min(self.max_num_sequence, self.prefill_chunk_size)
                or pages + sequences > free
                or held + length + AHEAD * sequences > kv.usable * kv.block_size
            ):
                break
            if request.ticket in state.running:
                state.prefill(batch, request, tokens)
            else:
                state.admit(batch, tokens)
            if tokens < left:
                break
