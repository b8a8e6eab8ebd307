"""vLLM V1's scheduler: running requests first, then the queue in order, one token budget for both.

Semantics as in vLLM's `v1/core/sched/scheduler.py` and `kv_cache_manager.py` (0.10 to 0.32): chunked prefill; a
request is admitted only while the budget, `max_num_seqs` and the free blocks allow; with
`scheduler_reserve_full_isl` only if its whole sequence so far fits; when a running request finds no block, the newest
running request is preempted, to be recomputed, and nothing is admitted in that step.
"""

from __future__ import annotations

from dataclasses import dataclass

from sim.state import Batch, State


@dataclass(frozen=True, slots=True)
class VllmV1:
    """The options of vLLM's scheduler, by the names vLLM users type; tokens and sequences."""

    max_num_batched_tokens: int
    max_num_seqs: int
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    long_prefill_alone_exempt: bool = False
    scheduler_reserve_full_isl: bool = True

    def plan(self, state: State) -> Batch:
        """The next step's batch; takes its blocks."""
        batch = Batch()
        decodes, kv = state.decodes, state.kv
        budget = self.max_num_batched_tokens - decodes.count
        chunk_limit = self._chunk_limit(state) if self.long_prefill_token_threshold else self.max_num_batched_tokens
        demand = decodes.demand(state.step)
        if budget < 0 or demand > kv.free:
            budget = self._running_in_order(state, batch, chunk_limit)
        elif state.prefilling:
            chunks = self._chunks(state, budget, chunk_limit)
            if chunks is None or demand + self._blocks(state, chunks) > kv.free:
                budget = self._running_in_order(state, batch, chunk_limit)
            else:
                kv.free -= demand
                for ticket, tokens in chunks:
                    state.prefill(batch, state.running[ticket], tokens)
                    budget -= tokens
        else:
            kv.free -= demand
        batch.decodes = decodes.count - len(batch.skipped)
        batch.kv_tokens = decodes.kv_tokens
        if batch.skipped:
            batch.kv_tokens -= sum(r.kv_offset + state.step + 1 for r in batch.skipped)
        if state.waiting and not batch.preempted:
            self._admit(state, batch, budget, chunk_limit)
        return batch

    def arrival_matters(self, state: State) -> bool:
        """Whether one more request at the end of the queue could change the next plan of a decoding replica.

        First come, first served: it cannot while somebody ahead of it waits or every place is taken.
        """
        return not state.waiting and len(state.running) < self.max_num_seqs

    def _chunk_limit(self, state: State) -> int:
        """The most tokens of one prompt in this step; vLLM 0.32 exempts the only request there is."""
        if self.long_prefill_alone_exempt and len(state.running) + len(state.waiting) <= 1:
            return self.max_num_batched_tokens
        return self.long_prefill_token_threshold

    def _chunks(self, state: State, budget: int, chunk_limit: int) -> list[tuple[int, int]] | None:
        """(ticket, tokens) for the running prefills where it is sure without looking at every request; else None.

        It is when all of them fit into the budget, or when the only one is the newest, so that all decodes come first.
        """
        wanted = [(t, min(r.target - r.computed, chunk_limit)) for t, r in state.prefilling.items()]
        if sum(tokens for _, tokens in wanted) <= budget:
            return wanted
        ticket, tokens = wanted[0]
        if len(wanted) == 1 and ticket == next(reversed(state.running)):
            return [(ticket, min(tokens, budget))] if budget else []
        return None

    def _blocks(self, state: State, chunks: list[tuple[int, int]]) -> int:
        blocks, need = state.kv.blocks, 0
        for ticket, tokens in chunks:
            computed = state.prefilling[ticket].computed
            need += blocks(computed + tokens) - blocks(computed)
        return need

    def _running_in_order(self, state: State, batch: Batch, chunk_limit: int) -> int:
        """The running requests one by one, as vLLM does it: for the steps in which blocks or budget run short.

        Returns the budget that is left.
        """
        kv, step = state.kv, state.step
        size = kv.block_size
        budget = self.max_num_batched_tokens
        for request in list(state.running.values()):
            if request.ticket not in state.running:
                break  # preempted, like all that follow
            if request.decoding:
                if not budget:
                    batch.skipped.append(request)
                    continue
                tokens = 1
                need = 0 if (step + request.kv_offset) % size else 1
            elif request.computed < request.target and budget:
                tokens = min(request.target - request.computed, chunk_limit, budget)
                need = kv.blocks(request.computed + tokens) - kv.blocks(request.computed)
            else:
                continue
            while need > kv.free and state.preempt(batch) is not request:
                pass
            if request.ticket not in state.running:
                break
            budget -= tokens
            if request.decoding:
                kv.free -= need
            else:
                state.prefill(batch, request, tokens)
        for request in batch.skipped:
            state.decodes.skip(request, step)
        return budget

    def _admit(self, state: State, batch: Batch, budget: int, chunk_limit: int) -> None:
        waiting, running, kv = state.waiting, state.running, state.kv
        size = kv.block_size
        while waiting and budget > 0 and len(running) < self.max_num_seqs:
            target = waiting[0].target
            tokens = target if target < chunk_limit else chunk_limit
            if tokens > budget:
                if not self.enable_chunked_prefill:
                    break
                tokens = budget
            if (target if self.scheduler_reserve_full_isl else tokens) > kv.free * size:
                break
            state.admit(batch, tokens)
            budget -= tokens
