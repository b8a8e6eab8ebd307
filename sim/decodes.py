"""The decoding requests of one replica as aggregates, so that a decode step costs the same whatever the batch.

Every decoding request gains one KV token in every step, so it needs a new block in every `block_size`-th step: a
histogram of those phases gives the block demand of any step in O(1). All steps here are decode steps of the replica,
counted from 1: a step of the engine in which everybody pauses is none, and shifts nothing.
"""

from __future__ import annotations

from heapq import heappop, heappush

from sim.request import Request


class Decodes:
    """Counts over the decoding requests, as they stand before decode step `step`.

    `grows` False: none of them takes blocks. `count` requests, `kv_tokens` tokens in KV over all of them;
    `finishing[step]` the requests whose last token that step yields (prefills that yield their only token included);
    `next_finish` a step before which none does, or -1.
    """

    __slots__ = (
        "_finish_steps", "_grows", "block_size", "count", "finishing", "kv_tokens", "next_finish", "phases", "step",
    )  # fmt: skip

    def __init__(self, block_size: int, grows: bool = True) -> None:
        self._grows = grows
        self.block_size = block_size
        self.step = 1
        self.count = 0
        self.kv_tokens = 0
        self.phases = [0] * block_size  # phases[p]: requests that need a block in every step j with j % block_size == p
        self.finishing: dict[int, list[Request]] = {}
        self.next_finish = -1
        self._finish_steps: list[int] = []  # a heap; may hold steps whose requests are gone

    def advance(self, steps: int) -> None:
        """Every request has decoded `steps` tokens."""
        self.step += steps
        self.kv_tokens += steps * self.count

    def begin(self, request: Request, left: int) -> None:
        """`request`, which is about to join, has `left` more tokens to come."""
        self.will_finish(request, self.step + left - 1)

    def held_tokens(self, request: Request, step: int) -> int:
        """Tokens that a decoding request has in KV before `step`."""
        return step + request.kv_offset

    def left(self, request: Request, step: int) -> int:
        """Output tokens that a decoding request has to come in `step` and later."""
        return request.finish_step - step + 1

    def unsure(self, request: Request) -> bool:
        """Whether it was not known before its last step that it would end a request at its `max_tokens`."""
        return False

    def computes(self, step: int) -> int:
        """Tokens that all of them compute in `step`."""
        return self.count

    def load(self, request: Request) -> int:
        """Tokens that a decoding request computes in the next step."""
        return 1

    def need(self, request: Request, tokens: int) -> int:
        """Blocks of one table that a decoding request lacks to compute so many tokens in the next step."""
        return int((self.step + request.kv_offset) % self.block_size == 0)

    def trim(self, request: Request, tokens: int) -> None:
        """In the next step `request` computes no more than so many tokens."""
        raise NotImplementedError

    def land(self, request: Request) -> None:
        """Nothing of a decoding request is in flight any more when its next step is planned."""

    def will_finish(self, request: Request, step: int) -> None:
        """`request` yields its last token in `step`."""
        request.finish_step = step
        bucket = self.finishing.get(step)
        if bucket is None:
            self.finishing[step] = [request]
            heappush(self._finish_steps, step)
            if self.next_finish < 0 or step < self.next_finish:
                self.next_finish = step
        else:
            bucket.append(request)

    def finished(self, step: int) -> list[Request]:
        """Take the requests that finish in `step`, which is `next_finish`, in order of admission: the batch order."""
        steps = self._finish_steps
        heappop(steps)
        self.next_finish = steps[0] if steps else -1
        bucket = self.finishing.pop(step)
        if len(bucket) > 1:
            bucket.sort(key=_ticket)
        return bucket

    def join(self, request: Request, step: int) -> None:
        """`request`, with `computed` tokens in KV, decodes from `step` on."""
        request.decoding = True
        request.cohort = self
        request.kv_offset = offset = request.computed - step
        self.phases[-offset % self.block_size] += self._grows
        self.count += 1
        self.kv_tokens += request.computed

    def leave(self, request: Request, step: int, planned: bool = False) -> None:
        """`request` decodes no more from `step` on; its `computed` is true again. `planned`: one more step has been
        planned with it, in vain."""
        offset = request.kv_offset
        request.decoding = False
        request.computed = step + offset
        self.phases[-offset % self.block_size] -= self._grows
        self.count -= 1
        self.kv_tokens -= request.computed
        request.computed += planned

    def give_up(self, request: Request) -> None:
        """Forget when `request` would have finished (it was preempted)."""
        self.finishing[request.finish_step].remove(request)

    def skip(self, request: Request, step: int) -> None:
        """`request` is left out of `step`: everything it does comes one step later. See `left_out`."""
        self.leave(request, step)
        self.join(request, step + 1)
        if request.finish_step >= step:
            self.give_up(request)
            self.will_finish(request, request.finish_step + 1)

    def left_out(self, requests: list[Request]) -> None:
        """`requests` were left out of the last step that all others have decoded in."""
        self.kv_tokens -= sum(request.decoding for request in requests)

    def demand(self, step: int) -> int:
        """Blocks that the decodes of `step` need."""
        return self.phases[step % self.block_size]

    def demand_over(self, step: int, steps: int) -> int:
        """Blocks that the decodes of `steps` steps from `step` on need together."""
        size, phases = self.block_size, self.phases
        rounds, rest = divmod(steps, size)
        total = rounds * self.count * self._grows
        for j in range(step, step + rest):
            total += phases[j % size]
        return total

    def steps_within(self, step: int, blocks: int, limit: int, waiting: bool) -> int:
        """How many steps from `step` on, at most `limit`, need no more than `blocks` blocks together, and let none
        of the requests that are `waiting` come to fit."""
        size = self.block_size
        if not self._grows or (limit // size + 1) * self.count <= blocks:
            return limit
        steps = 0
        if self.count:
            rounds = blocks // self.count
            steps, blocks = rounds * size, blocks - rounds * self.count
        while steps < limit:
            blocks -= self.phases[(step + steps) % size]
            if blocks < 0:
                break
            steps += 1
        return min(steps, limit)


def _ticket(request: Request) -> int:
    return request.ticket
