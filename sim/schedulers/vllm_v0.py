"""vLLM V0's scheduler: prompts first and alone, or with chunked prefill decodes first.

Semantics as in vLLM's `core/scheduler.py` and `core/block_manager.py` (0.6.6): without `enable_chunked_prefill` a step
holds prompts, whole, while any can be admitted, and only else decodes; with it all running requests go first, then the
queue, chunked to what is left of the budget. A request is admitted with blocks for its whole prompt, and only if the
watermark stays free. A running request must find a free block at its turn even where its last one has room; if not,
the newest is preempted, to be recomputed. With `preemption_mode` swap its KV goes to the host instead, and nobody is
admitted before it is back; vLLM stops when there is no room for it there.
"""

from __future__ import annotations

from dataclasses import dataclass

from servecast.errors import ServecastError
from sim.batch import Batch
from sim.kvcache import KVCache, Reserved
from sim.request import Request
from sim.schedulers.in_order import decode_in_order, preempt_for
from sim.schedulers.policy import Scheduler
from sim.state import State


@dataclass(frozen=True, slots=True)
class VllmV0(Scheduler):
    """The options of vLLM's scheduler, by the names vLLM users type; tokens and sequences. `watermark`: the share of
    all blocks that no admission may take (0.01, which no option changes). `swap_blocks`: blocks of the host's
    `swap_space`; swapping is not modelled with `enable_chunked_prefill`."""

    max_num_batched_tokens: int
    max_num_seqs: int
    enable_chunked_prefill: bool = False
    watermark: float = 0.01
    preemption_mode: str = "recompute"
    swap_blocks: int = 0

    cache = Reserved

    @property
    def swaps(self) -> bool:
        """Whether `preemption_mode` says so."""
        return self.preemption_mode == "swap"

    @property
    def mixes(self) -> bool:
        """See `Scheduler`."""
        return self.enable_chunked_prefill

    def plan(self, state: State) -> Batch:
        """The next step's batch."""
        batch = Batch()
        if not self.enable_chunked_prefill:
            if not state.swapped:
                self._admit(state, batch, self.max_num_batched_tokens)
            if batch.chunks:
                batch.paused = True
            elif self.swaps:
                decode_in_order(state, batch, self._swap_out)
                self._swap_in(state, batch)
            else:
                decode_in_order(state, batch)
            return batch
        decode_in_order(state, batch)
        budget = self.max_num_batched_tokens - batch.decodes
        for request in list(state.prefilling.values()):  # the only one, and the newest
            preempt_for(state, batch, request, 1 if request.target % state.kv.block_size else 0)
            if request.ticket in state.running:
                tokens = min(request.target - request.computed, budget)
                state.prefill(batch, request, tokens)
                budget -= tokens
        # Who was preempted joins the queue after the admissions only.
        held = [state.waiting.popleft() for request in batch.preempted if not request.over]
        self._admit(state, batch, budget)
        state.waiting.extendleft(reversed(held))
        return batch

    def arrival_matters(self, state: State) -> bool:
        """It cannot while somebody ahead of it waits, nor while every place is taken."""
        return not state.waiting and not state.swapped and len(state.running) < self.max_num_seqs

    def room(self, kv: KVCache) -> int:
        """All but the watermark: a longer prompt is dropped, as is a request that has become longer when preempted."""
        return kv.usable - self._kept_free(kv)

    def _kept_free(self, kv: KVCache) -> int:
        return int(self.watermark * kv.usable)

    def _admit(self, state: State, batch: Batch, budget: int) -> None:
        kv, waiting = state.kv, state.waiting
        kept_free = self._kept_free(kv)
        while waiting and budget and len(state.running) < self.max_num_seqs:
            target = waiting[0].target
            if kv.free - kv.blocks(target) < kept_free or (target > budget and not self.enable_chunked_prefill):
                break
            tokens = min(target, budget)
            state.admit(batch, tokens, reserve=target)
            budget -= tokens

    def _swap_out(self, state: State, batch: Batch, request: Request) -> None:
        """The KV of `request` goes to the host, if there is room for it, and for its next token too."""
        decodes, kv = state.decodes, state.kv
        needed = kv.blocks(decodes.step + request.kv_offset + 1)
        left = self.swap_blocks - sum(kv.blocks(other.computed) for other in state.swapped)
        if needed > left:
            raise ServecastError(
                f"vLLM 0.6 stops in step {state.step} for lack of CPU swap space: the request to be preempted needs "
                f"{needed:,} blocks there, of which {left:,} of {self.swap_blocks:,} are free. Raise "
                "engine.swap_space, or set engine.preemption_mode to recompute"
            )
        state.swap_out(batch, request)

    def _swap_in(self, state: State, batch: Batch) -> None:
        """Unless somebody has just been preempted, those whose KV fits above the watermark decode again."""
        kv, swapped, kept_free = state.kv, state.swapped, self._kept_free(state.kv)
        while swapped and not batch.preempted and len(state.running) < self.max_num_seqs:
            if kv.free - kv.blocks(swapped[0].computed + 1) < kept_free:
                break
            batch.kv_tokens += swapped[0].computed
            batch.decodes += 1
            state.swap_in(batch)
