"""The naive engine that states the semantics: one step at a time, a loop over every request, nothing derived.

It follows the real engine's own structure: `depth` 1 plans a step when the previous one has ended, `depth` 2 keeps
two batches in flight (asynchronous scheduling), tokens in flight are placeholders. KV blocks have numbers, and what is
registered of them is looked up by comparing tokens.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass, field
from math import inf


class Blocks:
    """Physical blocks: the queue of free ones, who holds each, and what the registered ones hold, all before included.

    `caching` False: nothing is registered. `blank_first`: given back unregistered, they go to the front of the queue.
    """

    def __init__(self, num_blocks, size, caching, blank_first):
        self.size, self.caching, self.blank_first = size, caching, blank_first
        self.queue = deque(range(1, num_blocks))
        self.holders = [0] * num_blocks
        self.content = [None] * num_blocks
        self.order = []  # registered blocks, the first to be registered first

    @property
    def used(self):
        return len(self.holders) - 1 - len(self.queue)

    def find(self, r):
        """The blocks of the longest known beginning of what `r` has to compute, less its last token."""
        found = []
        while self.caching and (len(found) + 1) * self.size < r.prompt + r.out:
            content = tuple(r.tokens()[: (len(found) + 1) * self.size])
            block = next((b for b in self.order if self.content[b] == content), None)
            if block is None:
                break
            found.append(block)
        return found

    def hold(self, r, found):
        for b in found:
            if not self.holders[b]:
                self.queue.remove(b)
            self.holders[b] += 1
        r.blocks = list(found)

    def take(self, r):
        """As many new blocks as `r` needs for what is computed with this step."""
        while len(r.blocks) * self.size < r.computed:
            b = self.queue.popleft()
            if self.content[b] is not None:
                self.content[b] = None
                self.order.remove(b)
            self.holders[b] = 1
            r.blocks.append(b)

    def register(self, r, tokens):
        for i in range(tokens // self.size if self.caching else 0):
            if self.content[r.blocks[i]] is None:
                self.content[r.blocks[i]] = tuple(r.tokens()[: (i + 1) * self.size])
                self.order.append(r.blocks[i])

    def give_back(self, r):
        blank = []
        for b in reversed(r.blocks):
            self.holders[b] -= 1
            if not self.holders[b]:
                (blank if self.blank_first and self.content[b] is None else self.queue).append(b)
        self.queue.extendleft(reversed(blank))
        r.blocks = []


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
    begins: list[object] = field(default_factory=list)  # tokens that its prompt begins with; the others are its own
    blocks: list[int] = field(default_factory=list)
    cached: int | None = None  # tokens found when it was first admitted

    def tokens(self):
        """All that are known: what the prompt begins with, then its own."""
        return [*self.begins, *((self.id, i) for i in range(len(self.begins), self.prompt + self.out))]

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
    used: int  # blocks, once it was planned and what ended before it has been given back


class Oracle:
    def __init__(
        self, policy, cost, num_blocks, block_size, asynchronous, request_s=0.0, prompt_token_s=0.0,
        caching=False, blank_first=False,
    ):  # fmt: skip
        self.request_s, self.prompt_token_s, self.tokenised_s = request_s, prompt_token_s, 0.0
        self.policy, self.cost = policy, cost
        self.size, self.depth = block_size, 2 if asynchronous else 1
        self.kv = Blocks(num_blocks, block_size, caching, blank_first)
        self.waiting: deque[Naive] = deque()
        self.running: list[Naive] = []
        self.steps: list[NaiveStep] = []
        self.preemptions = 0

    @property
    def free(self):
        return len(self.kv.queue)

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
                self.kv.give_back(victim)
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
            found = self.kv.find(r)
            cached = len(found) * self.size
            n = min(r.prompt + r.out - cached, limit)
            if n > budget and not p.enable_chunked_prefill:
                break
            n = min(n, budget)
            idle = sum(not self.kv.holders[b] for b in found)  # they are free, but not for others
            last = r.prompt + r.out if p.scheduler_reserve_full_isl else cached + n
            if self.blocks(last) - len(found) + idle > self.free:
                break
            self.kv.hold(r, found)
            r.computed = cached
            r.cached = cached if r.cached is None else r.cached
            self.running.append(self.waiting.popleft())
            budget -= n
            batch.append(self.schedule(r, n))
        return batch

    def schedule(self, r, n):
        before = r.computed
        r.computed += n
        self.kv.take(r)
        self.kv.register(r, min(r.computed, r.prompt + r.out))
        yields = r.computed == r.prompt + r.out + r.placeholders
        decode, r.decoding = r.decoding, r.decoding or yields
        r.placeholders += yields
        return r, n, before, decode, yields, r.preemptions

    def leave(self, r):
        """A request that is over gives back its place and its blocks."""
        self.kv.give_back(r)
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
        used = deque()  # blocks, by batch in flight
        while True:
            self.arrive(arrivals, front, t)
            preempted = self.preemptions
            while True:
                if flight:
                    used[-1] = self.kv.used
                if len(flight) == self.depth or not (batch := self.plan()):
                    break
                flight.append(batch)
                used.append(self.kv.used)
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
            self.steps.append(NaiveStep(start, t, named, len(kv), sum(kv), used.popleft()))
            self.arrive(arrivals, front, t)
            gone = [r for r in (*self.running, *self.waiting) if r.gives_up_s < t]
            for r in sorted(gone, key=lambda r: (r.gives_up_s, r.arrival_s, r.id)):
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
                    self.kv.register(r, r.computed - r.placeholders)
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
