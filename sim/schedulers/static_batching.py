"""Static batching: a batch is formed, padded and run until its longest answer is done; who comes meanwhile waits.

As plain Transformers and FasterTransformer do it (`GenerationMixin.generate` on a padded batch; the request-level
scheduling that Orca's paper, OSDI 2022, measures against): all prompts are padded to the longest, every sequence gets
contiguous KV for the longest prompt and the largest `max_tokens` of the batch, and goes on computing as padding once
its answer is complete. Tokens are given out as they are computed: a server that answers with the whole batch is later.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice

from sim.batch import Batch
from sim.kvcache import ReservedToTheEnd
from sim.request import Request
from sim.schedulers.policy import Scheduler
from sim.state import State


@dataclass(slots=True)
class StaticBatching(Scheduler):
    """`max_batch_size`: sequences of a batch; a smaller one is run when no more wait, or fit."""

    max_batch_size: int

    cache = ReservedToTheEnd
    reserves = True

    _members: list[Request] = field(default_factory=list, init=False)
    _ended: int = field(default=0, init=False)  # members whose place and blocks are kept for the others
    _blocks: int = field(default=0, init=False)  # of a member

    def plan(self, state: State) -> Batch:
        """The next step's batch."""
        batch, kv, decodes = Batch(), state.kv, state.decodes
        ended = sum(request.over for request in self._members)
        kv.free -= (ended - self._ended) * self._blocks
        self._ended = ended
        if ended == len(self._members):
            kv.free += ended * self._blocks
            self._ended = 0
            self._members = self._next(state)
            prompt, answer = _longest(self._members)
            self._blocks = kv.blocks(prompt + answer)
            for request in self._members:
                request.target = prompt
                state.admit(batch, prompt, reserve=prompt + answer)
            return batch
        batch.decodes = len(self._members)
        batch.padding = ended
        batch.kv_tokens = decodes.kv_tokens // decodes.count * batch.decodes  # all have equally many
        return batch

    def arrival_matters(self, state: State) -> bool:
        """Not before the batch is done."""
        return False

    def _next(self, state: State) -> list[Request]:
        """As many from the head of the queue as fit, each as long as the longest."""
        kv, chosen = state.kv, 0
        for n in range(1, min(self.max_batch_size, len(state.waiting)) + 1):
            if n * kv.blocks(sum(_longest(list(islice(state.waiting, n))))) > kv.free:
                break
            chosen = n
        return list(islice(state.waiting, chosen))


def _longest(requests: list[Request]) -> tuple[int, int]:
    """The longest prompt and the largest cap."""
    return max((r.prompt_tokens for r in requests), default=0), max((r.max_tokens for r in requests), default=0)
