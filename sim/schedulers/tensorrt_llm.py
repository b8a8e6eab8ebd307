"""TensorRT-LLM's scheduler: capacity first (which requests fit the KV cache), then the micro batch (which tokens).

Semantics as in TensorRT-LLM 1.0 (`cpp/tensorrt_llm/batch_manager/capacityScheduler.cpp`, `microBatchScheduler.cpp`,
`_torch/pyexecutor/py_executor.py`): all generating requests go into every step, then prompts as they came, whole unless
`enable_chunked_prefill`. GUARANTEED_NO_EVICT admits a request only if all that run could come to their `max_tokens`;
MAX_UTILIZATION only asks for the blocks of its prompt, and when a generating request finds no block the newest is
paused, to be recomputed, and nothing is admitted in that step.

Not modelled: a prompt that waits a step for a block which another one is computing; the blocks of a chunked prompt,
which the engine takes with its first chunk and we with each; a prompt shorter than a block that passes a cut one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from sim.batch import Batch
from sim.request import NEVER
from sim.schedulers.policy import Scheduler
from sim.state import State


@dataclass(slots=True)
class TensorrtLlm(Scheduler):
    """The options of TensorRT-LLM's schedulers, by its names.

    `batch_wait_*`: while others generate, prompts wait up to so many steps for more of them, unless the step has this
    share of `max_num_tokens` with those that are there.
    """

    max_batch_size: int
    max_num_tokens: int
    enable_chunked_prefill: bool = False
    capacity_scheduler_policy: Literal["GUARANTEED_NO_EVICT", "MAX_UTILIZATION"] = "GUARANTEED_NO_EVICT"
    batch_wait_timeout_iters: int = 0
    batch_wait_max_tokens_ratio: float = 0.0
    _waited: int = 0  # steps without prompts that could have been there
    _last: int = -1  # the last step that a prompt had to wait for, while some wait

    reserves: bool = field(init=False)
    longest_prompt: int = field(init=False, default=NEVER)

    def __post_init__(self) -> None:
        self.reserves = self.capacity_scheduler_policy == "GUARANTEED_NO_EVICT"
        if not self.enable_chunked_prefill:
            self.longest_prompt = self.max_num_tokens

    def plan(self, state: State) -> Batch:
        """The next step's batch; takes its blocks."""
        batch = Batch()
        decodes, kv = state.decodes, state.kv
        while True:
            chunk = self._next_chunk(state)
            demand = decodes.demand(decodes.step)
            if demand + self._blocks(state, chunk) <= kv.free:
                break
            state.preempt(batch, state.running[next(reversed(state.running))])
        kv.free -= demand
        batch.decodes, batch.kv_tokens = decodes.count, decodes.kv_tokens
        budget = self.max_num_tokens - decodes.count
        heads = [] if batch.preempted or not state.waiting else self._fitting(state, budget, chunk)
        if self.batch_wait_timeout_iters and self._waits(state, batch, chunk, heads):
            return batch
        for request in state.prefilling.values() if chunk else ():
            state.prefill(batch, request, chunk)
            break
        for tokens in heads:
            head = state.waiting[0]
            found, _ = kv.lookup(head)
            state.admit(batch, min(tokens, head.target - found), found, head.prompt_tokens + head.max_tokens)
        return batch

    def arrival_matters(self, state: State) -> bool:
        """It cannot while somebody ahead of it waits for room, nor while every place is taken."""
        return len(state.running) < self.max_batch_size and (self._last >= 0 or not state.waiting)

    def _next_chunk(self, state: State) -> int:
        """Tokens of the one prompt that is begun and not complete."""
        for request in state.prefilling.values():
            return self._chunk(request.target - request.computed, self.max_num_tokens - state.decodes.count, state)
        return 0

    def _chunk(self, tokens: int, budget: int, state: State) -> int:
        """As much of `tokens` as the budget allows, in whole blocks."""
        size = state.kv.block_size
        return tokens if tokens <= budget else budget // size * size

    def _blocks(self, state: State, chunk: int) -> int:
        """What the chunk of the prompt that is begun needs."""
        for request in state.prefilling.values():
            return state.kv.blocks(request.computed + chunk) - state.kv.blocks(request.computed)
        return 0

    def _fitting(self, state: State, budget: int, chunk: int) -> list[int]:
        """Tokens of the first step of each request at the head of the queue that fits now."""
        kv, heads = state.kv, []
        for request in state.prefilling.values():
            if request.computed + chunk < request.target:
                return []  # the budget has cut it
        budget -= chunk
        if self.reserves:
            free = kv.usable + kv.shared - sum(kv.blocks(r.reserved_tokens) for r in state.running.values())
        else:
            free = kv.free - self._blocks(state, chunk)
        places = self.max_batch_size - len(state.running)
        for request in state.waiting:
            free -= kv.blocks(request.prompt_tokens + request.max_tokens if self.reserves else request.target)
            tokens = request.target
            if self.enable_chunked_prefill:
                tokens = self._chunk(tokens, budget, state)
            if not places or free < 0 or not tokens or tokens > budget:
                break
            heads.append(tokens)
            budget -= tokens
            places -= 1
            if tokens < request.target:
                break
        return heads

    def _waits(self, state: State, batch: Batch, chunk: int, heads: list[int]) -> bool:
        """Whether the prompts of this step wait for more (`_waiting_requests` of py_executor.py)."""
        if self._last >= 0:
            self._waited += state.step - self._last
        self._last = -1
        if not (chunk or heads) or not batch.decodes:
            return False
        tokens = batch.decodes + chunk + sum(heads)
        if (
            self._waited >= self.batch_wait_timeout_iters
            or tokens >= self.batch_wait_max_tokens_ratio * self.max_num_tokens
        ):
            self._waited = 0
            return False
        self._last = state.step
        # Unless reserved, the blocks that decoding takes may be what a prompt needs to be counted as waiting.
        batch.most_steps = self.batch_wait_timeout_iters - self._waited if self.reserves else 1
        return True
