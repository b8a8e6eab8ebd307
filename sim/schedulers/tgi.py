"""TGI's router: prompts in a pass of their own, when enough of them wait or those who decode have had their share.

Semantics as in `backends/v3/src/backend.rs` and `queue.rs` of huggingface/text-generation-inference, without prefill
chunking: new requests are taken from the queue in order when at least `waiting_served_ratio` times the running batch
would join, or after `max_waiting_tokens` passes without any; what they may ask for must fit, in tokens beside what is
held, and in blocks. After each such pass comes one that decodes. Nobody is preempted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from sim.batch import Batch
from sim.kvcache import ReservedToTheEnd
from sim.schedulers.policy import Scheduler
from sim.state import State


@dataclass(slots=True)
class Tgi(Scheduler):
    """The options of TGI's launcher, by its names; `max_batch_total_tokens` is what the KV cache holds."""

    max_batch_prefill_tokens: int
    waiting_served_ratio: float = 0.3
    max_waiting_tokens: int = 20
    max_batch_size: int | None = None

    cache = ReservedToTheEnd
    reserves = True
    longest_prompt: int = field(init=False)

    _since: int = field(default=0, init=False)  # the decode step before which somebody joined last
    _joined: bool = field(default=False, init=False)  # in the last pass, to those who were decoding

    def __post_init__(self) -> None:
        self.longest_prompt = self.max_batch_prefill_tokens  # as max_input_tokens may be at most

    def plan(self, state: State) -> Batch:
        """The next pass."""
        batch, decodes = Batch(), state.decodes
        if not decodes.count:
            self._since, self._joined = decodes.step + 1, False  # this pass, which nobody sits out, counts as one
            self._join(state, batch, 0)
            return batch
        waited = 1 + decodes.step - self._since
        patient = waited < self.max_waiting_tokens
        if not self._joined:
            self._join(state, batch, int(decodes.count * self.waiting_served_ratio) if patient else 0)
            if batch.chunks:
                batch.paused = self._joined = True
                self._since = decodes.step
                return batch
        self._joined = False
        batch.decodes, batch.kv_tokens = decodes.count, decodes.kv_tokens
        if state.waiting and waited < self.max_waiting_tokens:
            batch.most_steps = self.max_waiting_tokens - waited
        return batch

    def arrival_matters(self, state: State) -> bool:
        """It can while those who wait are too few; not once the first of them does not fit."""
        return not state.waiting or 1 + state.decodes.step - self._since < self.max_waiting_tokens

    def _join(self, state: State, batch: Batch, least: int) -> None:
        """Take those who fit from the head of the queue, unless they are fewer than `least`."""
        kv, size = state.kv, state.kv.block_size
        most = inf if self.max_batch_size is None else self.max_batch_size - state.decodes.count
        prompts = -(-self.max_batch_prefill_tokens // size) * size
        total, blocks, chosen = kv.free * size, kv.free, 0
        for request in state.waiting:
            prompts -= request.prompt_tokens
            total -= request.prompt_tokens + request.max_tokens
            blocks -= kv.blocks(request.prompt_tokens + request.max_tokens - 1)
            if chosen >= most or min(prompts, total, blocks) < 0:
                break
            chosen += 1
        if chosen >= least:
            for _ in range(chosen):
                request = state.waiting[0]
                state.admit(batch, request.target, reserve=request.prompt_tokens + request.max_tokens - 1)
