"""The naive engine: one step at a time, a loop over every request, nothing derived. Which requests a step holds is a
policy's business: see `tests.sim.oracle`.

It follows the real engine's own structure: `depth` 1 plans a step when the previous one has ended, `depth` 2 keeps
two batches in flight (asynchronous scheduling), tokens in flight are placeholders.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from math import inf

from sim.windows import ONE
from tests.sim.oracle.parts import Blocks, Naive, NaiveStep


def hold_ends(r):
    """Until when the KV of `r`, which has ended, is held."""
    return r.token_s[-1] + r.hold_s


class Oracle:
    def __init__(
        self, policy, cost, num_blocks, block_size, asynchronous, request_s=0.0, prompt_token_s=0.0,
        caching=False, blank_first=False, tables=ONE,
    ):  # fmt: skip
        self.tables = tables
        self.request_s, self.prompt_token_s, self.tokenised_s = request_s, prompt_token_s, 0.0
        self.policy, self.cost = policy, cost
        self.size, self.depth = block_size, 2 if asynchronous else 1
        self.kv = Blocks(num_blocks, block_size, caching, blank_first, tables)
        self.inbox: list[Naive] = []  # who has arrived, in an engine that does not look at once
        self.waiting: deque[Naive] = deque()
        self.running: list[Naive] = []
        self.swapped: list[Naive] = []  # whose KV is in the memory of the host
        self.copied = 0  # blocks that go there or come back in the next step
        self.steps: list[NaiveStep] = []
        self.holds: list[Naive] = []  # whose KV stays, though they have ended
        self.let_go: list[tuple[int, str]] = []
        self.preemptions = 0

    def left(self, r):
        """Tokens of `r` that can be computed: one when it decodes, none while its last one is in flight."""
        if r.out + r.placeholders >= r.cap:
            return 0
        return r.prompt + r.out + r.placeholders - r.computed

    @property
    def total(self):
        return self.kv.total

    @property
    def free(self):
        return self.kv.free

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

    def take(self, r):
        """`r` arrives."""
        self.queue([r])

    def look(self):
        """There is nothing to do: whether somebody has come."""
        return False

    def plan(self):
        """The batch of the next step: entries as `schedule` gives them."""
        raise NotImplementedError

    def admit(self, n, found=(), reserve=0):
        """The head of the queue runs, with its first `n` tokens after those in the blocks `found`, and blocks for
        `reserve` tokens."""
        r = self.waiting.popleft()
        r.reserved = reserve
        self.kv.hold(r, len(found))
        r.computed = len(found) * self.size
        r.cached = r.computed if r.cached is None else r.cached
        self.running.append(r)
        entry = self.schedule(r, n)
        for held in [x for x in self.holds if x.next_id == r.id]:
            self.end_hold(held, "resumed")
        return entry

    def end_hold(self, r, why):
        """What was held of `r` stays no longer than a cache keeps it."""
        self.holds.remove(r)
        self.kv.give_back(r)
        self.let_go.append((r.id, why))

    def expire(self, t):
        """Let go what was to be held until `t`."""
        for r in sorted(self.holds, key=hold_ends):
            if hold_ends(r) <= t:
                self.end_hold(r, "expired")

    def preempt(self, r):
        """`r`, which no longer runs, gives its blocks back and waits again, to be recomputed."""
        self.queue([r], front=True)
        self.kv.preempt(r)
        r.computed = r.placeholders = 0
        r.decoding = False
        r.preemptions += 1
        self.preemptions += 1

    def schedule(self, r, n):
        before = r.computed
        r.computed += n
        r.in_flight += n
        self.kv.take(r)
        self.kv.register(r, min(r.computed, r.prompt + r.out))
        yields = r.computed == r.prompt + r.out + r.placeholders
        decode, r.decoding = r.decoding, r.decoding or yields
        r.placeholders += yields
        return r, n, before, decode, yields, r.preemptions

    registers = True
    """Whether what a step has computed is known to the cache when it ends (else when it was planned: the same, where a
    step yields one token)."""

    def in_kv(self, r, before):
        """Tokens of `r`, which decodes, in KV when its step begins, of which it was thought to have `before` then."""
        return before

    def yielded(self, r, n, before, decode, runs):
        """The step of `r`, which computed `n` tokens after `before`, is over: how many come of it. `runs`: it has not
        been preempted since."""
        return 1

    def leave(self, r):
        """A request that is over gives back its place and its blocks, unless these are held."""
        if r.hold_s is not None and r.next_id >= 0 and r.cancelled_s is None and r.tables:  # else it was preempted
            self.holds.append(r)
        else:
            self.kv.give_back(r)
        next(queue for queue in (self.running, self.waiting, self.swapped, self.inbox) if r in queue).remove(r)

    def in_order(self, batch, place):
        """The entries of a step as they end: in order of admission, `place`, when it was planned."""
        return sorted(batch, key=lambda entry: place.get(entry[0].id, -1))

    def arrive(self, arrivals, front, t):
        """Who has arrived by `t` goes through the front end, one after the other, and then to the engine."""
        while arrivals and arrivals[0].arrival_s <= t:
            r = arrivals.popleft()
            self.tokenised_s = max(self.tokenised_s, r.arrival_s) + self.prompt_token_s * r.prompt
            r.entered_s = self.tokenised_s + self.request_s
            front.append(r)
        while front and front[0].entered_s <= t:
            r = front.popleft()
            if not r.done:
                self.take(r)

    def pass_time(self, arrivals, front, t, everyone):
        """Whose time is over before `t` goes, one after the other, and comes again if its client tries again; those who
        arrive meanwhile are there before."""
        while True:
            here = [r for r in (*front, *self.running, *self.waiting, *self.swapped, *self.inbox) if not r.done]
            gone = min(
                (r for r in here if r.gives_up_s < t), key=lambda r: (r.gives_up_s, r.arrival_s, r.id), default=None
            )
            soon = min((r.arrival_s for r in list(arrivals)[:1]), default=inf)
            entry = min((r.entered_s for r in list(front)[:1]), default=inf)
            until = min(soon, entry)
            if until <= t and (gone is None or until <= gone.gives_up_s):
                self.arrive(arrivals, front, until)
                continue
            if gone is None:
                return
            gone.cancelled_s = gone.gives_up_s
            more = gone.next_try()
            gone.done = True
            if gone not in front:
                self.leave(gone)
            if more is not None:
                everyone.append(more)
                insort(arrivals, more, key=lambda x: x.arrival_s)

    def run(self, requests, follow_up=lambda r, now: None):
        """`requests` in order of arrival; `follow_up(r, now)` is asked for one more, or a list, when one is done."""
        arrivals, front, fresh, flight, t, everyone = deque(requests), deque(), [], deque(), 0.0, list(requests)
        used, places = deque(), deque()  # by batch in flight: blocks; who runs in which place
        while True:
            self.pass_time(arrivals, front, t, everyone)
            preempted = self.preemptions
            while True:
                if flight:
                    used[-1] = self.kv.used
                if len(flight) == self.depth:
                    break
                self.expire(t)
                if not (batch := self.plan()):
                    break
                flight.append(batch)
                used.append(self.kv.used)
                places.append({r.id: i for i, r in enumerate(self.running)})
            if not flight and self.look():
                continue
            if not flight and self.holds and self.waiting:
                if self.preemptions == preempted:
                    self.end_hold(min(self.holds, key=hold_ends), "given_up")
                continue
            for r in fresh:
                self.take(r)
            if not flight:
                if fresh or self.preemptions > preempted:  # an empty plan that made room: the next one may use it
                    fresh = []
                    continue
                if not arrivals and not front:
                    self.expire(inf)
                    return everyone
                t = front[0].entered_s if front else arrivals[0].arrival_s
                continue
            fresh = []
            batch = flight.popleft()
            in_vain = [0 if decode else max(0, before + n - r.prompt - r.out) for r, n, before, decode, _, _ in batch]
            named = [
                (r.id, n - drafts, before)
                for (r, n, before, decode, *_), drafts in zip(batch, in_vain, strict=True)
                if not decode
            ]
            for (r, n, _, decode, *_), drafts in zip(batch, in_vain, strict=True):
                r.read += 0 if decode or r.done else n - drafts
            kv = [self.in_kv(r, before) for r, _, before, decode, _, _ in batch if decode]
            drafts = sum(n - 1 for _, n, _, decode, _, _ in batch if decode) + sum(in_vain)
            seen = tuple(sum(c % w.size if w.chunked else min(c, w.size) for c in kv) for w in self.tables.windows)
            chunks, alike = [(n, before) for _, n, before in named], kv
            if sum(n > 0 for n in in_vain) == len(chunks):
                chunks, alike = [], kv + [before for _, before in chunks]
            step_s = self.cost.step_s(chunks, len(alike), sum(alike), seen, drafts)
            start, t = t, t + (step_s + self.cost.swap_block_s * self.copied if self.copied else step_s)
            self.copied = 0
            self.steps.append(NaiveStep(start, t, named, len(kv), sum(kv), seen, used.popleft(), drafts))
            self.pass_time(arrivals, front, t, everyone)
            for r, n, before, decode, yields, preemptions in self.in_order(batch, places.popleft()):
                r.in_flight -= n
                r.scheduled_s = start if r.scheduled_s is None else r.scheduled_s
                tokens = self.yielded(r, n, before, decode, r.preemptions == preemptions) if yields else 0
                if not yields or r.done:
                    continue
                tokens = min(tokens, r.output - r.out)
                r.out += tokens
                r.token_s += [t] * tokens
                self.steps[-1].out += tokens
                if r.preemptions == preemptions:
                    r.placeholders -= tokens
                    if self.registers:
                        self.kv.register(r, r.computed - r.placeholders)
                if not decode and r.preemptions == preemptions and r.out < r.output:
                    self.kv.keep(r, before + n)
                if r.out == r.output:
                    r.done = True
                    self.leave(r)
                    more = follow_up(r, t)
                    for one in more if isinstance(more, list) else [] if more is None else [more]:
                        everyone.append(one)
                        if one.arrival_s == t and not self.request_s:
                            fresh.append(one)
                        else:
                            insort(arrivals, one, key=lambda x: x.arrival_s)
