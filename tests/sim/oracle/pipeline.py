"""The naive engine with pipeline stages: vLLM V1's queue of batches, planned when they are planned there.

`staggered`: the V2 model runner's asynchronous mode, with one batch more in the queue than there are stages, in which a
request decodes again as many plans later as there are stages; else a request is in one batch at a time.
"""

from __future__ import annotations

from collections import deque

from tests.sim.oracle.parts import NaiveStep
from tests.sim.oracle.vllm_v1 import VllmV1


class Clocks:
    """When batches are on the stages. `staggered`: see above."""

    def __init__(self, stages, staggered):
        self.stages, self.staggered = stages, staggered
        self.free, self.host_free = [0.0] * stages.depth, 0.0
        self.tokens_s = {}  # by request: when its last token is there

    def launch(self, planned_s, chunks, kv, decoding, yielding):
        """(begin, end) of a batch of these chunks, and of decodes over `kv` tokens each, of the requests `decoding`;
        `yielding` get a token."""
        host = self.stages.host_s[len(chunks) + len(kv)]
        ready = planned_s
        if self.staggered:
            ready = self.host_free = max(planned_s, self.host_free) + host
            ready = max([ready, *(self.tokens_s[r] for r in decoding)])
        begin = max(ready, self.free[0])
        for i, (busy_s, send_s) in enumerate(self.stages.stages_s(chunks, len(kv), sum(kv))):
            end = self.free[i] = max(ready, self.free[i]) + busy_s
            ready = end + send_s
        if not self.staggered:
            end = self.host_free = max(end, self.host_free) + host
        self.tokens_s.update(dict.fromkeys(yielding, end))
        return begin, end


class Pipelined(VllmV1):
    def __init__(self, *args, stages, fills, **kwargs):
        self.stages, self.fills = stages, fills
        super().__init__(*args, **kwargs)
        self.staggered = self.depth == 2
        self.number = 0  # of plans
        self.again = {}  # by request: the plan from which on it may decode again

    def plan(self):
        due = self.again.get if self.staggered else lambda id, _: 0
        self.may = {r for r in self.running if self.number >= due(r.id, 0) and (self.staggered or not r.placeholders)}
        return super().plan()

    def eligible(self, r):
        return r in self.may

    def preempt(self, r):
        super().preempt(r)
        self.again.pop(r.id, None)

    def schedule(self, r, n):
        entry = super().schedule(r, n)
        if entry[4]:
            self.again[r.id] = self.number + self.stages.depth
        return entry

    def run(self, requests):
        """`requests` in order of arrival."""
        arrivals, front, flight, t, back = deque(requests), deque(), deque(), 0.0, 0.0
        clocks = Clocks(self.stages, self.staggered)
        while True:
            self.arrive(arrivals, front, t)
            busy = any(batch for batch, *_ in flight)  # vLLM skips its turns when all whom a batch holds have given up
            if len(flight) < self.stages.depth + self.staggered and (self.running or self.waiting or busy):
                self.number += 1
                batch = self.plan()
                chunks = [(n, before) for _, n, before, decode, _, _ in batch if not decode]
                kv = [before for _, _, before, decode, _, _ in batch if decode]
                begin = end = t
                if batch:
                    decoding = [r.id for r, _, _, decode, _, _ in batch if decode]
                    yielding = [r.id for r, _, _, _, yields, _ in batch if yields]
                    begin, end = clocks.launch(t, chunks, kv, decoding, yielding)
                for r, *_ in batch:
                    r.scheduled_s = begin if r.scheduled_s is None else r.scheduled_s
                flight.append((batch, begin, end, chunks, kv, {r.id: i for i, r in enumerate(self.running)}))
                if len(flight) < self.stages.depth + self.staggered and (self.fills or (batch and flight[0][2] > t)):
                    continue
            if not flight:
                if not arrivals:
                    return
                t = arrivals[0].arrival_s
                continue
            batch, begin, end, chunks, kv, place = flight.popleft()
            if not batch:
                continue
            t = end
            self.arrive(arrivals, front, t)
            gone = [r for r in (*self.running, *self.waiting) if r.gives_up_s < t]
            for r in sorted(gone, key=lambda r: (r.gives_up_s, r.arrival_s, r.id)):
                r.done, r.cancelled_s = True, r.gives_up_s
                self.leave(r)
            self.steps.append(NaiveStep(max(begin, back), t, chunks, len(kv), sum(kv), (), 0))
            back = t
            for r, n, _, _, yields, preemptions in self.in_order(batch, place):
                r.in_flight -= n
                if not yields or r.done:
                    continue
                r.out += 1
                r.token_s.append(t)
                if r.preemptions == preemptions:
                    r.placeholders -= 1
                    self.kv.register(r, r.computed - r.placeholders)
                if r.out == r.output:
                    r.done = True
                    self.leave(r)
