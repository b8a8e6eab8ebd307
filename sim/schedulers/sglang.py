"""SGLang's scheduler: prompts first, in steps of their own, while the decoding requests pause.

Semantics as in `managers/scheduler.py`, `schedule_policy.py` (PrefillAdder) and `schedule_batch.py` (SGLang 0.5.9): a
prompt is admitted if its tokens and its `max_tokens` fit beside what the running requests are expected to need still, a
share of theirs (the new-token ratio, which falls with every decode step); the first that does not fit closes the queue
until the decode batch has become smaller. When decoding requests find no room, those with the fewest tokens are
retracted, to the end of the queue, and the ratio is set anew. With `enable_mixed_chunk` decodes join prompts' steps,
after them. What a radix cache (`sim.radixcache`) keeps is its own business; it is told what each plan asks it for.

Requests are received (`scheduler_recv_skipper.py`) after a step with prompts, when idle, or once so many decode steps
have been launched since the last time (`sim.engine`).

Not modelled: the other rule for requests with `ignore_eos` and no radix cache; that a token in flight is lost with a
retraction; that who gives up is received like who arrives: he is dropped by the next plan.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

from servecast.errors import ServecastError
from sim.batch import Batch
from sim.request import Request
from sim.schedulers.policy import Scheduler
from sim.state import State

CLIP = 4096
"""Tokens beyond which a request's `max_tokens` is not believed (SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION)."""
INITIAL, LEAST, DECAY_STEPS = 0.7, 0.14, 600
"""The new-token ratio at first, the share of it to which it falls, and in how many steps (SGLANG_*NEW_TOKEN_RATIO*)."""
RETRACT_STEPS = 20
"""Decode steps for which a retraction wants to make room (SGLANG_RETRACT_DECODE_STEPS)."""
LPM_QUEUE = 128
"""Waiting requests from which `lpm` is `fcfs`."""


@dataclass(slots=True)
class Sglang(Scheduler):
    """The options of SGLang's scheduler, by its names; `chunked_prefill_size` below 1: whole prompts."""

    max_running_requests: int
    chunked_prefill_size: int
    max_prefill_tokens: int
    schedule_policy: Literal["fcfs", "lpm"] = "fcfs"
    schedule_conservativeness: float = 1.0
    enable_mixed_chunk: bool = False
    disable_overlap_schedule: bool = False
    scheduler_recv_interval: int = 1
    num_reserved_decode_tokens: int = 512  # where prefill and decode are apart (`sim.schedulers.sglang_split`)
    _full: bool = False  # the queue is closed
    _held: int = 0  # decoding requests as the engine counts them: finished ones too, until the next decode step
    _last: Batch | None = None  # the last step
    _decoded: int | None = None  # the decode step of the last plan, if it was nothing else
    _ratio: float = -1.0  # the new-token ratio when it was last set
    _decays: int = 0  # decode steps since

    prefix_tree = True
    reserves = True  # what could not come to its max_tokens is cut when it arrives
    overruns = True
    more_room = "raise schedule_conservativeness, or lower max_running_requests or chunked_prefill_size"

    def plan(self, state: State) -> Batch:
        """The next step's batch; takes its blocks."""
        batch = Batch()
        decodes, kv = state.decodes, state.kv
        if self._decoded is not None:
            self._decays += decodes.step - self._decoded
        for request in state.prefilling.values():
            kv.keep(request, request.computed)
        self._merge(state, self._last)
        if state.prefilling or (state.waiting and not self._full):
            self._prefill(state, batch)
        if not batch.chunks:
            self._decode(state, batch)
        if batch.chunks:
            self._decoded = None
            if self.mixes:
                self._held = decodes.count
                state.place_first([request for request, _, _ in batch.chunks if request.computed == request.target])
            if self.mixes and decodes.count:
                kv.free -= decodes.demand(decodes.step)
                kv.make_room(decodes.count)
                batch.decodes, batch.kv_tokens = decodes.count, decodes.kv_tokens
            else:
                batch.paused = True
        self._check_room(state)
        self._last = None if batch.empty else batch
        return batch

    def arrival_matters(self, state: State) -> bool:
        """It cannot while the queue is closed, nor while somebody is ahead of it."""
        return not self._full and (self.schedule_policy == "lpm" or not state.waiting)

    def _check_room(self, state: State) -> None:
        if state.kv.free < 0:
            raise ServecastError(
                f"SGLang runs out of memory and stops: step {state.step} takes {-state.kv.free} KV pages more than are "
                f"left. Its admission expected shorter answers: {self.more_room}"
            )

    @property
    def mixes(self) -> bool:
        """Whether those that decode are in the steps that read prompts."""
        return self.enable_mixed_chunk and self.chunked_prefill_size > 0

    @property
    def ratio(self) -> float:
        """The share of their `max_tokens` that running requests are expected to need still."""
        initial = min(INITIAL * self.schedule_conservativeness, 1.0)
        least = min(initial * LEAST, 1.0)
        start = initial if self._ratio < 0 else self._ratio
        return max(start - self._decays * (initial - least) / DECAY_STEPS, min(start, least))

    def _merge(self, state: State, last: Batch | None) -> None:
        """The prompts of the last step join the decoding requests; if some do not, the queue opens."""
        if last is None or not last.chunks:
            return
        alive = sum(request.decoding for request, _, _ in last.chunks)
        before = self._held + alive
        self._held = state.decodes.count if self.mixes else before
        if alive < len(last.chunks) or self._held < before:
            self._full = False

    def _seen(self, state: State, request: Request) -> int:
        """Output tokens of a decoding request that the scheduler has seen; with overlap the last may be in flight."""
        out = request.output_tokens - (request.finish_step - state.decodes.step + 1)
        if self.disable_overlap_schedule or self._last is None:
            return out
        return out - (self._last.decodes > 0 or any(request is each for each, _, _ in self._last.chunks))

    def _places(self, state: State) -> int:
        """How many prompts a step can hold."""
        return self.max_running_requests - self._held

    def _prefill(self, state: State, batch: Batch) -> None:
        kv, size = state.kv, state.kv.block_size
        places = self._places(state)
        if self._held >= self.max_running_requests and state.prefilling:
            self._full = True
            return
        if self.schedule_policy == "lpm" and len(state.waiting) <= LPM_QUEUE:
            state.waiting = deque(kv.longest_first(state.waiting))
        mixed = self._held if self.mixes else 0
        expected = sum(
            min(request.max_tokens - self._seen(state, request), CLIP)
            for request in state.running.values()
            if request.decoding
        )
        now = kv.free * size - mixed
        total = now - self.ratio * expected
        whole = self.max_prefill_tokens - mixed
        chunk = self.chunked_prefill_size - mixed if self.chunked_prefill_size > 0 else 2**62
        for request in list(state.prefilling.values()):
            left = request.target - request.computed
            most = min(chunk, int(total))
            tokens = min(left, most if most > 0 else chunk)
            state.prefill(batch, request, tokens)
            paged = kv.blocks(tokens) * size
            now, whole, chunk = now - paged, whole - paged, chunk - paged
            total -= paged + (min(request.max_tokens, CLIP) if tokens == left else 0)
        while state.waiting and not self._full:
            if len(batch.chunks) >= places:
                self._full = True
                break
            request = state.waiting[0]
            found, idle = kv.lookup(request)
            tokens, locked = request.target - found, idle * size
            paged = kv.blocks(tokens) * size
            needed = tokens + min(max(request.max_tokens - request.emitted, 0), CLIP)
            if needed < total and paged >= whole and batch.chunks:
                break
            if needed >= total - locked:
                self._full = True
                break
            later = min(request.max_tokens, CLIP)
            if paged > chunk:
                tokens = paged = chunk // size * size
                later = 0
                if tokens <= 0:
                    break
            state.admit(batch, tokens, found)
            now, whole, chunk = now - locked - paged, whole - paged, chunk - paged
            total -= locked + paged + later
            if total <= 0 or now <= 0:
                self._full = True
            elif whole <= 0 or chunk <= 0:
                break
        pages = len(batch.chunks) if size > 1 else 0  # each may begin one
        kv.make_room(kv.blocks(sum(tokens for _, tokens, _ in batch.chunks)) + pages)

    def _decode(self, state: State, batch: Batch) -> None:
        decodes, kv = state.decodes, state.kv
        before, self._decoded = self._held, None
        self._held = decodes.count
        if not decodes.count:
            self._full = False
            if not state.running:
                self._ratio, self._decays = -1.0, 0  # idle
                if state.waiting:
                    self._prefill(state, batch)
            return
        if decodes.demand(decodes.step) > kv.free:
            self._retract(state, batch)
        else:
            self._decoded = decodes.step
        self._held = decodes.count
        if self._held < before:
            self._full = False
        if state.waiting and not self._full:
            batch.most_steps = 1  # who waits is looked at again
        kv.decode(decodes, decodes.step, 1)
        batch.decodes, batch.kv_tokens = decodes.count, decodes.kv_tokens

    def _by_output(self, state: State) -> list[Request]:
        """Those that decode, who is to be retracted first last."""
        order = [request for request in state.running.values() if request.decoding]
        return sorted(order, key=lambda request: (-self._seen(state, request), request.prompt_tokens, request.ticket))

    def _retract(self, state: State, batch: Batch) -> None:
        """Take the KV of those with the fewest output tokens, of these the longest prompts, until the others fit."""
        decodes, kv = state.decodes, state.kv
        order = self._by_output(state)
        kv.make_room(decodes.demand(decodes.step))
        while len(order) > 1 and (not batch.preempted or decodes.demand(decodes.step) > kv.free):
            request = order.pop()
            state.preempt(batch, request)
            if not request.over:
                state.waiting.rotate(-1)  # to the end of the queue
            kv.make_room(kv.blocks(len(order) * RETRACT_STEPS))
            kv.make_room(decodes.demand(decodes.step))
        if batch.preempted:
            state.place_first(order)
        out = sum(self._seen(state, request) for request in order)
        caps = sum(request.max_tokens for request in order)
        self._ratio, self._decays = min(1.0, (out + RETRACT_STEPS * len(order)) / (caps + 1)), 0
