"""Prefill here, decode there, naively: on top of the naive vLLM, engines that hear of transfers, and what lies between.

All that happens goes through one list of things to come, of which no two may come at once.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from itertools import count, cycle
from math import inf

from tests.sim.oracle.parts import Naive, NaiveStep
from tests.sim.oracle.vllm_v1 import VllmV1


class Part(Naive):
    """What one side sees of a client's request, which is `of` it."""

    of = side = turn = None
    pulls = there = kept = unmoved = False


class Side(VllmV1):
    """A replica. `flight`: of each step that is planned, its batch, what its worker says, what it pulls, when it was
    planned, and the blocks in use."""

    def __init__(self, desk, number, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.desk, self.number, self.flight = desk, number, deque()
        self.pulling, self.there, self.pulled, self.ended = [], [], [], []
        self.start_s, self.woken = 0.0, False

    @property
    def present(self):
        return super().present + len(self.pulling) + len(self.there)

    def next(self):
        rule, by_priority = self.policy.pulled_queue, self.policy.by_priority
        if not self.there or not self.waiting:
            return (self.there or self.waiting or [None])[0]
        mine, other = self.there[0], self.waiting[0]
        if by_priority and rule != "always":
            return min(mine, other, key=lambda r: r.rank)
        return other if rule == "never" and other.preemptions else mine

    def let_in(self, r, budget, limit):
        if r.there:
            if self.spare > self.free:
                return None
            self.there.remove(r)
            r.there = False
            self.running.append(r)
            return [self.schedule(r, 1)]
        if not r.pulls:
            return super().let_in(r, budget, limit)
        found, spare = self.kv.find(r), self.spare
        if self.policy.pulls_spare_prefills:
            spare += sum(self.kv.need(x, x.prompt + x.out) for x in self.running if not x.decoding)
        idle = self.kv.idle(r, len(found))
        if self.blocks(r.prompt) - len(found) + idle + spare > self.free:
            return None
        self.waiting.remove(r)
        self.kv.hold(r, len(found))
        r.pulls, r.found, r.reserved, r.turn = False, len(found) * self.size, r.prompt, next(self.desk.numbers)
        self.kv.take(r)
        r.reserved, r.computed = 0, r.prompt - 1
        self.pulling.append(r)
        self.pulled.append(r)
        return []

    def hear(self, said):
        """Transfers are over."""
        for r in said:
            if r.kept:
                r.kept = False
                self.kv.give_back(r)
                continue
            self.pulling.remove(r)
            if r.done:
                self.kv.give_back(r)
            else:
                r.there = True
                self.there.append(r)
                self.there.sort(key=lambda x: x.rank if self.policy.by_priority else x.turn)

    def leave(self, r):
        if r in self.there:
            self.there.remove(r)
            self.kv.give_back(r)
        else:
            super().leave(r)

    def go_on(self, t):
        """Nothing is computed at `t`: plan, and begin the next step if there is one."""
        in_vain = 0
        while in_vain < 4:
            self.post(t)
            while len(self.flight) < self.depth:
                if self.flight:
                    self.flight[-1][4] = self.kv.used
                before, self.pulled = self.preemptions, []
                batch, said, self.ended = self.plan(), self.ended, []
                self.flight.append([batch, said, self.pulled, t, self.kv.used])
                in_vain = 0 if batch or self.pulled or said or self.preemptions > before else in_vain + 1
                self.post(t)
                if not batch:
                    break
            batch, said, *_ = self.flight[0]
            if batch:
                chunks, kv = self.shape(batch)
                self.start_s = t
                for r, n, _, decode, *_ in batch:
                    r.read += 0 if decode or r.done else n
                self.desk.at(self.begins(t) + self.cost.step_s([c[1:] for c in chunks], len(kv), sum(kv)), self.end)
                return
            self.flight.popleft()
            self.hear(said)
        self.flight.clear()  # nothing is in these steps

    def begins(self, t):
        """When the step computes that begins at `t`."""
        return t

    @staticmethod
    def shape(batch):
        chunks = [(r.id, n, before) for r, n, before, decode, _, _ in batch if not decode]
        return chunks, [before for _, _, before, decode, _, _ in batch if decode]

    def post(self, t):
        """What is pulled with the step that is next begins to move."""
        if self.flight:
            for r in self.flight[0][2]:
                self.desk.pull(r, self.flight[0][3], t)
            self.flight[0][2] = []

    def end(self, t):
        """The step in progress ends."""
        batch, said, _, _, used = self.flight.popleft()
        chunks, kv = self.shape(batch)
        self.steps.append(NaiveStep(self.start_s, t, chunks, len(kv), sum(kv), (), used))
        gone = [r for r in (*self.running, *self.waiting, *self.there) if r.done]
        for r in sorted(gone, key=lambda r: r.cancelled_s or 0.0):
            self.leave(r)
        over = []
        for r, n, _, _, yields, preemptions in batch:
            r.in_flight -= n
            r.scheduled_s = self.start_s if r.scheduled_s is None else r.scheduled_s
            if not yields or r.done:
                continue
            r.out += 1
            r.token_s.append(t)
            if r.preemptions == preemptions:
                r.placeholders -= 1
                self.kv.register(r, r.computed - r.placeholders)
            if r.out == r.output:
                r.done = True
                if r.kept:  # perhaps preempted since: its blocks are gone
                    (self.running if r in self.running else self.waiting).remove(r)
                else:
                    self.leave(r)
                over.append(r)
        self.hear(said)
        self.go_on(t)
        for r in over:
            self.desk.over(r, t)

    def enter(self, r, t):
        r.side = self
        self.queue([r])
        self.wake(t)

    def transferred(self, r, t):
        self.ended.append(r)
        self.wake(t)

    def wake(self, t):
        """One that does nothing begins once all that comes at `t` is there."""
        if not self.flight and not self.woken:
            self.woken = True
            self.desk.at(t, self.begin)

    def begin(self, t):
        self.woken = False
        self.go_on(t)


class Split:
    """The whole: `wire` between sides of `sizes` replicas."""

    def __init__(self, split, wire, sizes, make):
        self.split, self.wire, self.numbers = split, wire, count()
        self.sides = [make(self, number) for number in range(sum(sizes))]
        self.prefill, self.decode = cycle(self.sides[: sizes[0]]), cycle(self.sides[sizes[0] :])
        self.coming, self.moves = [], []
        self.host_s, self.link_s = [0.0] * sum(sizes), [0.0] * sum(sizes)

    def at(self, t, call):
        heappush(self.coming, (t, next(self.numbers), call))

    def run(self, requests):
        for whole in requests:
            self.at(whole.arrival_s, lambda t, whole=whole: self.submit(whole, t))
            if whole.gives_up_s < inf:
                self.at(whole.gives_up_s, lambda t, whole=whole: self.give_up(whole, t))
        while self.coming:
            t, _, call = heappop(self.coming)
            call(t)

    def submit(self, whole, t):
        whole.reading, whole.answering = None, None
        if whole.prompt <= self.split.local_tokens:
            whole.answering = self.part(whole, t, whole.prompt, whole.output, whole.cap)
            next(self.decode).enter(whole.answering, t)
        else:
            whole.reading = self.part(whole, t, whole.prompt, 1, 1)
            whole.reading.kept = whole.output > 1 or self.split.first_token == "decode"
            next(self.prefill).enter(whole.reading, t)

    @staticmethod
    def part(whole, t, *lengths):
        part = Part(whole.id, t, *lengths)
        part.of, part.priority, part.begins = whole, whole.priority, whole.begins
        return part

    def over(self, part, t):
        whole = part.of
        if part is whole.reading and part.kept:
            early = self.split.first_token == "prefill"
            answering = self.part(whole, t, whole.prompt + early, whole.output - early, whole.cap - early)
            answering.pulls = answering.unmoved = True
            whole.answering = answering
            next(self.decode).enter(answering, t)
        else:
            whole.done = True

    def give_up(self, whole, t):
        if whole.done:
            return
        whole.done, whole.cancelled_s = True, t
        part = whole.answering or whole.reading
        part.done = True
        if part is whole.reading:
            part.kept = False
        if not part.side.flight and part not in part.side.pulling:
            part.side.leave(part)
        if part.unmoved:
            self.give_back(whole, t)

    def give_back(self, whole, t):
        whole.given_back = True
        whole.reading.side.transferred(whole.reading, t)

    def pull(self, part, planned_s, t):
        whole, to = part.of, part.side
        if getattr(whole, "given_back", False):
            to.transferred(part, t)
            return
        part.unmoved = False
        source, wire, tokens = whole.reading.side, self.wire, whole.prompt - part.found
        poster = to.number if self.split.pull else source.number
        begin = max(planned_s + wire.fixed_s, self.host_s[poster])
        posted = self.host_s[poster] = begin + wire.posting_s(tokens)
        ready = posted if self.split.posts_first else begin
        start = max(ready, self.link_s[source.number], self.link_s[to.number])
        moved = start + wire.occupancy_s(tokens)
        self.link_s[source.number] = self.link_s[to.number] = moved
        end = max(moved, posted)
        self.moves.append((whole.id, source.number, to.number, tokens, whole.reading.token_s[0], planned_s, start, end))
        if end > t:
            self.at(end, lambda now: self.moved(whole, part, now))
        else:
            self.moved(whole, part, t)

    def moved(self, whole, part, t):
        self.give_back(whole, t)
        part.side.transferred(part, t)
