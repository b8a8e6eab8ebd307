"""The naive engine that states the semantics: one step at a time, a loop over every request, nothing derived.

It follows the real engine's own structure: `depth` 1 plans a step when the previous one has ended, `depth` 2 keeps
two batches in flight (asynchronous scheduling), tokens in flight are placeholders.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass, field
from math import inf


@dataclass(eq=False)
class Naive:
    id: int
    arrival_s: float
    prompt: int
    output: int
    cap: int
    patience_s: float = inf
    priority: int = 0
    entered_s: float = 0.0
    computed: int = 0
    out: int = 0  # output tokens delivered
    placeholders: int = 0  # output tokens in flight
    preemptions: int = 0
    scheduled_s: float | None = None
    token_s: list[float] = field(default_factory=list)
    decoding: bool = False
    done: bool = False
    cancelled_s: float | None = None

    @property
    def rank(self):
        return self.priority, self.arrival_s, self.id

    @property
    def gives_up_s(self):
        return self.arrival_s + self.patience_s


@dataclass
class NaiveStep:
    start_s: float
    end_s: float
    chunks: list[tuple[int, int, int]]
    decodes: int
    kv_tokens: int


class Oracle:
    def __init__(self, policy, cost, num_blocks, block_size, asynchronous, request_s=0.0, prompt_token_s=0.0):
        self.request_s, self.prompt_token_s, self.tokenised_s = request_s, prompt_token_s, 0.0
        self.policy, self.cost = policy, cost
        self.free, self.size, self.depth = num_blocks - 1, block_size, 2 if asynchronous else 1
        self.waiting: deque[Naive] = deque()
        self.running: list[Naive] = []
        self.steps: list[NaiveStep] = []
        self.preemptions = 0

    def blocks(self, tokens):
        return -(-tokens // self.size)

    def queue(self, requests, front=False):
        for r in requests:
            if self.policy.by_priority:
                insort(self.waiting, r, key=lambda x: x.rank)
            elif front:
                self.waiting.appendleft(r)
            else:
                self.waiting.append(r)

    def plan(self):
        p, budget, batch, preempted = self.policy, self.policy.max_num_batched_tokens, [], False
        limit = p.long_prefill_token_threshold or budget
        if p.long_prefill_alone_exempt and len(self.running) + len(self.waiting) <= 1:
            limit = budget
        i = 0
        while i < len(self.running) and budget > 0:
            r = self.running[i]
            i += 1
            if r.out + r.placeholders >= r.cap:
                continue  # its last token is in flight
            n = min(r.prompt + r.out + r.placeholders - r.computed, limit, budget)
            need = self.blocks(r.computed + n) - self.blocks(r.computed)
            victim = None
            while need > self.free and victim is not r:
                victim = max(self.running, key=lambda x: x.rank) if p.by_priority else self.running[-1]
                at = self.running.index(victim)
                del self.running[at]
                entry = next((b for b in batch if b[0] is victim), None)
                if entry:  # it gives back what it had in this step
                    batch.remove(entry)
                    budget += entry[1]
                if at < i - 1 and (entry or not p.preemption_skips_one):
                    i -= 1
                self.queue([victim], front=True)
                self.free += self.blocks(victim.computed)
                victim.computed = victim.placeholders = 0
                victim.decoding = False
                victim.preemptions += 1
                self.preemptions += 1
                preempted = True
            if victim is r:
                break
            budget -= n
            batch.append(self.schedule(r, n))
        while self.waiting and not preempted and budget > 0 and len(self.running) < p.max_num_seqs:
            r = self.waiting[0]
            n = min(r.prompt + r.out, limit)
            if n > budget and not p.enable_chunked_prefill:
                break
            n = min(n, budget)
            if self.blocks(r.prompt + r.out if p.scheduler_reserve_full_isl else n) > self.free:
                break
            self.running.append(self.waiting.popleft())
            budget -= n
            batch.append(self.schedule(r, n))
        return batch

    def schedule(self, r, n):
        before = r.computed
        r.computed += n
        self.free -= self.blocks(r.computed) - self.blocks(before)
        yields = r.computed == r.prompt + r.out + r.placeholders
        decode, r.decoding = r.decoding, r.decoding or yields
        r.placeholders += yields
        return r, n, before, decode, yields, r.preemptions

    def leave(self, r):
        """A request that is over gives back its place and its blocks."""
        self.free += self.blocks(r.computed)
        (self.running if r in self.running else self.waiting).remove(r)

    def arrive(self, arrivals, front, t):
        """Who has arrived by `t` goes through the front end, one after the other, and then to the engine."""
        while arrivals and arrivals[0].arrival_s <= t:
            r = arrivals.popleft()
            self.tokenised_s = max(self.tokenised_s, r.arrival_s) + self.prompt_token_s * r.prompt
            r.entered_s = self.tokenised_s + self.request_s
            front.append(r)
        while front and front[0].entered_s <= t:
            r = front.popleft()
            if r.gives_up_s < r.entered_s:
                r.done, r.cancelled_s = True, r.gives_up_s
            else:
                self.queue([r])

    def run(self, requests, follow_up=lambda r, now: None):
        """`requests` in order of arrival; `follow_up(r, now)` is asked for one more whenever one is finished."""
        arrivals, front, fresh, flight, t, everyone = deque(requests), deque(), [], deque(), 0.0, list(requests)
        while True:
            self.arrive(arrivals, front, t)
            preempted = self.preemptions
            while len(flight) < self.depth and (batch := self.plan()):
                flight.append(batch)
            self.queue(fresh)
            if not flight:
                if fresh or self.preemptions > preempted:  # an empty plan that made room: the next one may use it
                    fresh = []
                    continue
                if not arrivals and not front:
                    return everyone
                t = front[0].entered_s if front else arrivals[0].arrival_s
                continue
            fresh = []
            batch = flight.popleft()
            chunks = [(n, before) for _, n, before, decode, _, _ in batch if not decode]
            kv = [before for _, _, before, decode, _, _ in batch if decode]
            start, t = t, t + self.cost.step_s(chunks, len(kv), sum(kv))
            named = [(r.id, n, before) for r, n, before, decode, _, _ in batch if not decode]
            self.steps.append(NaiveStep(start, t, named, len(kv), sum(kv)))
            self.arrive(arrivals, front, t)
            for r in [r for r in (*self.running, *self.waiting) if r.gives_up_s < t]:
                r.done, r.cancelled_s = True, r.gives_up_s
                self.leave(r)
            for r, _, _, _, yields, preemptions in batch:
                r.scheduled_s = start if r.scheduled_s is None else r.scheduled_s
                if not yields or r.done:
                    continue
                r.out += 1
                r.token_s.append(t)
                if r.preemptions == preemptions:
                    r.placeholders -= 1
                if r.out == r.output:
                    r.done = True
                    self.leave(r)
                    more = follow_up(r, t)
                    if more is not None:
                        everyone.append(more)
                        if more.arrival_s == t and not self.request_s:
                            fresh.append(more)
                        else:
                            insort(arrivals, more, key=lambda x: x.arrival_s)
