"""vLLM V1's scheduler: running requests first, then the queue in order, one token budget for both.

Semantics as in vLLM's `v1/core/sched/scheduler.py` and `kv_cache_manager.py` (0.10 to 0.32): chunked prefill; a
request is admitted only while the budget, `max_num_seqs` and the free blocks allow; with
`scheduler_reserve_full_isl` only if its whole sequence so far fits; beside others only if the `watermark`'s share of
all blocks stays free (from 0.24); when a running request finds no block, the newest
running request (by priority: the one of the greatest number, of these the last to arrive) is preempted, to be
recomputed, and nothing is admitted in that step. A request whose prompt's KV comes from elsewhere gets the blocks for
it when its turn comes, and a place once it has come (`WAITING_FOR_REMOTE_KVS`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sim.batch import Batch
from sim.loading import known_to, load_or_wait
from sim.schedulers.policy import Scheduler
from sim.state import State, rank


@dataclass(frozen=True, slots=True)
class VllmV1(Scheduler):
    """The options of vLLM's scheduler, by the names vLLM users type; tokens, sequences, and a share of all blocks.

    Rules of a version: `long_prefill_alone_exempt`, and `preemption_skips_one`: by priority, when a running request
    with nothing to compute is preempted for a later one, the one after that is left out of the step (before 0.32).
    Of requests whose KV comes from elsewhere: `pulled_queue`, whether those that hold blocks wait in a queue of their
    own, which goes first (from 0.19, by priority from 0.32; else they come after the preempted, or by priority); and
    `pulls_spare_prefills`: they get blocks only beside those that running prompts still need (from 0.24). Of drafts,
    both from 0.32: `draft_slots`, tokens of a step that the draft model takes for every sequence in it besides; and
    `pads_decodes`: who has one token of its prompt to compute computes as many drafts as the others, in vain.
    """

    max_num_batched_tokens: int
    max_num_seqs: int
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    long_prefill_alone_exempt: bool = False
    scheduler_reserve_full_isl: bool = True
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    preemption_skips_one: bool = False
    watermark: float = 0.0
    pulled_queue: Literal["never", "fcfs", "always"] = "always"
    pulls_spare_prefills: bool = True
    draft_slots: int = 0
    pads_decodes: bool = False

    remedy = "take vLLM 0.32, where those whose KV has come go first, or scheduling_policy fcfs"

    @property
    def by_priority(self) -> bool:
        """The queue goes by priority."""
        return self.scheduling_policy == "priority"

    @property
    def pulled_first(self) -> bool:
        """Who holds blocks has a queue of his own."""
        return self.pulled_queue == "always" or (self.pulled_queue == "fcfs" and not self.by_priority)

    def plan(self, state: State) -> Batch:
        """The next step's batch; takes its blocks."""
        batch = Batch()
        decodes, kv = state.decodes, state.kv
        budget = self.max_num_batched_tokens - decodes.computes(decodes.step) - self.draft_slots * decodes.count
        chunk_limit = self._chunk_limit(state) if self.long_prefill_token_threshold else self.max_num_batched_tokens
        demand = decodes.demand(decodes.step)
        windows = state.windows
        trims = state.drafting is not None and chunk_limit <= state.drafting.tokens
        if budget < 0 or demand > kv.free or trims:
            budget = self._running_in_order(state, batch, chunk_limit)
            windows = None
        elif state.prefilling:
            chunks = self._chunks(state, budget, chunk_limit)
            if chunks is None or demand + self._blocks(state, chunks) > kv.free:
                budget = self._running_in_order(state, batch, chunk_limit)
                windows = None
            else:
                kv.free -= demand
                for ticket, tokens in chunks:
                    state.prefill(batch, state.running[ticket], tokens)
                    budget -= tokens + self.draft_slots
        else:
            kv.free -= demand
        if windows is not None:
            kv.slide_all(windows)
        batch.decodes = decodes.count - len(batch.skipped)
        batch.kv_tokens = decodes.kv_tokens
        if batch.skipped:
            batch.kv_tokens -= sum(decodes.held_tokens(r, decodes.step + 1) for r in batch.skipped)
        if state.drafting is not None and batch.decodes:
            batch.drafts = decodes.computes(decodes.step) - batch.decodes
            least = self.long_prefill_token_threshold or self.max_num_batched_tokens
            room = self.max_num_batched_tokens / decodes.count - self.draft_slots
            if min(least, room) < 1 + state.drafting.tokens:
                batch.most_steps = 1  # a later step may have more drafts than are let in
            if (state.waiting or state.prefilling) and state.drafting.proposes < 1.0:
                batch.most_steps = 1  # or fewer, and room for who waits
        if state.windows is not None:
            batch.seen = state.windows.seen_without(batch.skipped)
        if state.waiting and not batch.preempted:
            self._admit(state, batch, budget, chunk_limit)
        return batch

    def arrival_matters(self, state: State) -> bool:
        """Whether one more request at the end of the queue could change the next plan of a decoding replica.

        First come, first served, it cannot while somebody ahead of it waits; nor ever while every place is taken.
        """
        return len(state.running) < self.max_num_seqs and (state.by_priority or not state.waiting)

    def _chunk_limit(self, state: State) -> int:
        """The most tokens of one prompt in this step; vLLM 0.32 exempts the only request there is."""
        if self.long_prefill_alone_exempt and len(state.running) + len(state.waiting) + len(state.pulling) <= 1:
            return self.max_num_batched_tokens
        return self.long_prefill_token_threshold

    def _chunks(self, state: State, budget: int, chunk_limit: int) -> list[tuple[int, int]] | None:
        """(ticket, tokens) for the running prefills where it is sure without looking at every request; else None.

        It is when all of them fit into the budget, or when the only one is the newest, so that all decodes come first.
        """
        wanted = [(t, min(r.target - r.computed, chunk_limit)) for t, r in state.prefilling.items()]
        room = budget - self.draft_slots * len(wanted)
        if sum(tokens for _, tokens in wanted) <= room:
            return wanted
        ticket, tokens = wanted[0]
        if len(wanted) == 1 and ticket == next(reversed(state.running)):
            return [(ticket, min(tokens, room))] if room > 0 else []
        return None

    def _blocks(self, state: State, chunks: list[tuple[int, int]]) -> int:
        needed, blocks = state.kv.needed, 0
        for ticket, tokens in chunks:
            request = state.prefilling[ticket]
            blocks += needed(*state.reach(request, request.computed + tokens))
        return blocks

    def _running_in_order(self, state: State, batch: Batch, chunk_limit: int) -> int:
        """The running requests one by one, as vLLM does it: for the steps in which blocks or budget run short.

        Returns the budget that is left.
        """
        kv, decodes = state.kv, state.decodes
        step = decodes.step
        budget = self.max_num_batched_tokens
        slides = None if state.windows is None else state.windows.slides
        if slides is not None:
            slides.begin_in_order()
        order = [request for request in state.running.values() if not state.in_flight(request)]
        planned: dict[int, int] = {}  # ticket -> tokens
        i, slots = 0, self.draft_slots
        while i < len(order) and budget > slots:
            request = order[i]
            i += 1
            if request.decoding:
                tokens = min(decodes.load(request), chunk_limit, budget - slots)
                need = decodes.need(request, tokens) * kv.tables
            elif request.computed < request.target:
                tokens = min(request.target - request.computed, chunk_limit, budget - slots)
                need = kv.needed(*state.reach(request, request.computed + tokens))
            else:
                continue
            if state.windows is not None:
                state.slide(request)
            victim = None
            while need > kv.free and victim is not request:
                victim = max(order, key=rank) if state.by_priority else order[-1]
                at = order.index(victim)
                del order[at]
                given_back = planned.pop(victim.ticket, 0)  # what this very plan had given it
                budget += given_back + (slots if given_back else 0)
                if at < i - 1 and (given_back or not self.preemption_skips_one):
                    i -= 1
                if given_back and not victim.decoding:
                    batch.chunks = [chunk for chunk in batch.chunks if chunk[0] is not victim]
                state.preempt(batch, victim, given_back > 0)
            if victim is request:
                break
            planned[request.ticket] = tokens
            budget -= tokens + slots
            if request.decoding:
                kv.free -= need
                if tokens < decodes.load(request):
                    decodes.trim(request, tokens)
            else:
                state.prefill(batch, request, tokens)
        batch.skipped = [request for request in order if request.decoding and request.ticket not in planned]
        if planned:
            for request in batch.skipped:
                decodes.skip(request, step)
        if slides is not None:
            slides.end_in_order(bool(planned))
        return budget

    def _admit(self, state: State, batch: Batch, budget: int, chunk_limit: int) -> None:
        waiting, running, kv = state.waiting, state.running, state.kv
        watermark = int(self.watermark * (kv.usable + 1))
        pads = self.pads_decodes and state.drafting is not None and not batch.chunks
        while waiting and budget > self.draft_slots and len(running) < self.max_num_seqs:
            target = waiting[0].target
            spare = watermark if running else 0
            if waiting[0].there:
                tokens = min(target - waiting[0].computed, chunk_limit)
                if tokens > budget and not self.enable_chunked_prefill:
                    break
                tokens = min(tokens, budget)
                last = target if self.scheduler_reserve_full_isl else waiting[0].computed + tokens
                if kv.needed(waiting[0].arriving, max(last, waiting[0].arriving)) + spare > kv.free:
                    break
                state.resume(batch, tokens)
                budget -= tokens
                continue
            found, idle = kv.lookup(waiting[0])
            tokens = target - found
            if waiting[0].pulls:
                if self.pulls_spare_prefills:
                    spare += sum(kv.needed(r.computed, r.target) for r in state.prefilling.values())
                if kv.reserved(found, target, target) > kv.free - idle - spare:
                    break
                if waiting[0].brought:
                    state.take(batch, found)
                    budget -= 1
                else:
                    state.pull(batch, found)
                continue
            known = known_to(state, found) if kv.loads else found
            if known > found and kv.loads == "async":
                whole = self.scheduler_reserve_full_isl
                if not load_or_wait(state, batch, found, known, kv.free - idle - spare, whole):
                    break
                continue
            tokens, room, padding = target - min(known, target - 1), budget - self.draft_slots, 0
            if pads and tokens == 1 and (found or batch.decodes):
                padding = self._padding(state, found)
                if 1 + padding > room:
                    batch.most_steps = 1  # once less is found of it, it may get in without
                    break
            if tokens > chunk_limit:
                tokens = chunk_limit
            if tokens > room:
                if not self.enable_chunked_prefill:
                    break
                tokens = room
            first = min(known, target - 1) + tokens + padding
            if state.drafting is not None:
                first += state.drafting.ahead(first)
            free = kv.free - idle - spare
            if kv.reserved(found, first, max(target, first) if self.scheduler_reserve_full_isl else first) > free:
                batch.untouched_blocks = kv.untouched()
                if padding or (kv.loads and not self.scheduler_reserve_full_isl):
                    batch.most_steps = 1  # once more can be loaded, or less is found, it may need less
                break
            state.admit(batch, tokens, found, known=known, padding=padding)
            batch.drafts += padding
            budget -= tokens + padding + self.draft_slots

    def _padding(self, state: State, found: int) -> int:
        """Drafts that nobody made for a sequence that has one token to compute after `found`, where all of them have
        room."""
        assert state.drafting is not None
        drafts = state.drafting.tokens
        return drafts if found + 1 + drafts + 1 <= state.drafting.max_model_len else 0
