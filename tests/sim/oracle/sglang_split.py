"""SGLang's prefill and decode servers, naively: their event loops, queue by queue, as `disaggregation/` has them.

A loop goes round: receive, poll, plan, launch; then it waits for the result of the batch before the one launched
(overlap schedule), or for that of this one. Each round is an event; the GPU computes one batch after the other.
"""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import count, cycle

from sim.schedulers.sglang import CLIP
from tests.sim.oracle.parts import Naive, NaiveStep
from tests.sim.oracle.sglang import Sglang


class Part(Naive):
    """What one server sees of a client's request, which is `of` it."""

    of = None
    bootstrapped = transferred = received = False
    sent = 0


class Server(Sglang):
    """The loop. `result`: of the batch launched last, (batch, when it ends), until it is processed."""

    def __init__(self, desk, number, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.desk, self.number = desk, number
        self.overlap = self.depth == 2
        self.result, self.free_s, self.asleep, self.in_vain = None, 0.0, True, 0

    def wake(self, t):
        if self.asleep:
            self.asleep, self.in_vain = False, 0
            self.desk.at(t, self.round)

    def enter(self, r, t):
        r.side = self
        self.inbox.append(r)
        self.wake(t)

    def launch(self, batch, t):
        """(the batch, when it ends, its step)"""
        chunks = [(r.id, n, before) for r, n, before, decode, _, _ in batch if not decode]
        kv = [before for _, _, before, decode, _, _ in batch if decode]
        start = max(t, self.free_s)
        took = self.cost.step_s([c[1:] for c in chunks], len(kv), sum(kv)) + self.cost.swap_block_s * self.copied
        self.copied = 0
        self.free_s = start + took
        step = NaiveStep(start, self.free_s, chunks, len(kv), sum(kv), (), self.kv.used)
        self.steps.append(step)
        for r in (entry[0] for entry in batch):
            r.scheduled_s = start if r.scheduled_s is None else r.scheduled_s
        return batch, self.free_s

    def round(self, t):
        self.receive(t)
        batch = self.get_batch(t)
        prebuilt = batch and isinstance(batch[0], Part)
        self.prompts = prebuilt or (batch and not batch[0][3])  # no decodes
        launched = None if batch is None else (batch, t) if prebuilt else self.launch(batch, t)
        if not self.overlap:
            if prebuilt:
                self.after(batch, t, True)
            elif launched:
                self.desk.at(launched[1], lambda now: self.after(launched[0], now, True))
            else:
                self.after(None, t, False)
            return
        last, self.result = self.result, launched
        if last and last[1] <= t:
            self.after(last[0], t, True)
        elif last:
            self.desk.at(last[1], lambda now: self.after(last[0], now, True))
        else:
            self.after(None, t, launched is not None)

    def after(self, batch, t, busy):
        """A result is there, and the loop goes round."""
        if batch is not None:
            self.process(batch, t)
        self.look_back(t)
        self.in_vain = 0 if busy or self.news() else self.in_vain + 1
        if self.in_vain < 3:
            self.round(t)
        else:  # it would go round like this for ever
            self.asleep = True


class Prefill(Server):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.bootstrap, self.inflight = [], []

    def news(self):
        return bool(self.inbox) or any(r.bootstrapped for r in self.bootstrap)

    def receive(self, t):
        self.bootstrap += self.received()
        self.waiting.extend(r for r in self.bootstrap if r.bootstrapped)
        self.bootstrap = [r for r in self.bootstrap if not r.bootstrapped]

    def get_batch(self, t):
        self.batch_is_full = False
        if self.chunked is not None:
            self.kv.keep(self.chunked, self.chunked.computed)
        batch = self.prefill()
        self.last, self.decoding = None, []
        return batch or None

    @property
    def slots(self):
        return self.policy.max_running_requests - len(self.running) - len(self.inflight)

    def add_one(self, batch):
        if len(batch) >= self.slots_before:
            self.batch_is_full = True
            return "stop"
        return super().add_one(batch)

    def prefill(self):
        self.slots_before = self.slots
        return super().prefill()

    def process(self, batch, t):
        for r, n, before, _, yields, _ in batch:
            r.in_flight -= n
            if yields:
                r.out, r.placeholders = 1, 0
                r.token_s.append(t)
                self.kv.keep(r, before + n)
                self.running.remove(r)
                self.inflight.append(r)
            self.desk.send(r, before + n, self.size, t)

    def look_back(self, t):
        for r in [r for r in self.inflight if r.transferred]:
            self.inflight.remove(r)
            self.kv.give_back(r)


class Decode(Server):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        p = self.policy
        self.prealloc, self.transfer, self.retracted, self.fresh = [], [], [], []
        self.waiting = []
        self.slots = p.max_running_requests * (3 if p.max_running_requests <= 32 else 1)
        self.buffers = 2 * p.max_running_requests
        self.reserve = p.num_reserved_decode_tokens
        self.batch = []  # running_batch.reqs
        self.prebuilt = []  # last_batch.reqs, if that was prebuilt

    def news(self):
        return bool(self.inbox) or any(r.transferred for r in self.transfer)

    def receive(self, t):
        self.prealloc += self.received()
        self.resume()
        if self.retracted:
            return
        self.preallocate(t)
        done = [r for r in self.transfer if r.transferred]
        self.transfer = [r for r in self.transfer if not r.transferred]
        self.waiting += done
        for r in done:
            r.out = 1  # the prefill side has it

    def allocatable(self, retractable):
        alone = 0
        if retractable is not None and self.batch:
            alone = max(min(r.cap, CLIP) + r.prompt - retractable for r in self.batch)
        held = len(self.batch) + len(self.transfer) + len(self.waiting)
        return self.free * self.size - max(self.reserve * held, alone) - self.reserve * len(self.prebuilt)

    def resume(self):
        left = self.allocatable(None)
        while self.retracted and self.slots > 0:
            r = self.retracted[0]
            needed = r.prompt + r.out + r.placeholders + self.reserve
            if needed > left:
                break
            left -= needed
            self.slots -= 1
            self.waiting.append(self.retracted.pop(0))
            self.kv.hold(r, 0)
            r.computed = r.prompt + r.out + r.placeholders - 1
            self.kv.take(r)
            self.copied += self.blocks(r.computed)

    def preallocate(self, t):
        retractable = sum(r.prompt + r.out for r in self.batch)
        left = self.allocatable(retractable)
        while self.prealloc and self.slots > 0 and self.buffers > len(self.transfer):
            r = self.prealloc[0]
            if max(r.prompt + self.reserve, r.prompt + min(r.cap, CLIP) - retractable) > left:
                break
            left -= r.prompt + self.reserve
            self.slots -= 1
            self.transfer.append(self.prealloc.pop(0))
            self.kv.hold(r, 0)
            r.computed = r.prompt
            if self.blocks(r.prompt) > self.free:
                raise MemoryError
            self.kv.take(r)
            self.desk.preallocated(r, t)

    def get_batch(self, t):
        self.batch += [r for r in self.prebuilt if not r.done]
        self.prebuilt = []
        places = self.policy.max_running_requests - len(self.batch)
        joining, self.waiting = self.waiting[: max(places, 0)], self.waiting[max(places, 0) :]
        if joining:
            self.prebuilt = joining
            for r in joining:
                r.decoding = True
            return joining
        self.batch = [r for r in self.batch if not r.done]
        if not self.batch:
            return None
        if self.lacking() > self.free:
            self.retract_some()
        return [self.schedule(r, 1) for r in self.batch]

    def lacking(self):
        return sum(self.blocks(r.computed + 1) - self.blocks(r.computed) for r in self.batch)

    def retract_some(self):
        order = sorted(self.batch, key=lambda r: (r.out, -r.prompt), reverse=True)
        first = True
        while len(order) > 1 and (first or self.lacking() > self.free):
            first = False
            r = order.pop()
            self.batch.remove(r)
            self.retracted.append(r)
            self.copied += self.blocks(r.computed)
            self.kv.give_back(r)
            self.slots += 1
            r.preemptions += 1
        self.batch = order
        if self.lacking() > self.free:
            raise MemoryError

    def schedule(self, r, n):
        before = r.computed
        r.computed += n
        r.placeholders += 1
        self.kv.take(r)
        return r, n, before, True, True, r.preemptions

    def process(self, batch, t):
        if isinstance(batch[0], Part):
            for r in batch:
                if not r.token_s:
                    r.token_s.append(t)
                    self.check(r, t)
            return
        for r, *_ in batch:
            r.placeholders -= 1
            if r.done:
                continue
            r.out += 1
            r.token_s.append(t)
            self.check(r, t)

    def check(self, r, t):
        if r.out == r.output:
            r.done = True
            if r in self.retracted:
                self.retracted.remove(r)
            else:
                self.kv.give_back(r)
                self.slots += 1

    def look_back(self, t):
        pass


class SglangSplit:
    """The whole: `wire` between servers of `sizes` replicas. Requests take turns."""

    def __init__(self, wire, posts_first, sizes, make):
        self.wire, self.posts_first, self.numbers = wire, posts_first, count()
        self.sides = [make(self, number) for number in range(sum(sizes))]
        self.prefill, self.decode = cycle(self.sides[: sizes[0]]), cycle(self.sides[sizes[0] :])
        self.coming, self.moves = [], []
        self.host_s, self.link_s = [0.0] * sum(sizes), [0.0] * sum(sizes)

    def at(self, t, call):
        heappush(self.coming, (t, next(self.numbers), call))

    def run(self, requests):
        for whole in requests:
            self.at(whole.arrival_s, lambda t, whole=whole: self.submit(whole, t))
        while self.coming:
            t, _, call = heappop(self.coming)
            call(t)

    def submit(self, whole, t):
        whole.reading = self.part(whole, t, whole.prompt, 1, 1)
        whole.answering = self.part(whole, t, whole.prompt, whole.output, whole.cap)
        next(self.prefill).enter(whole.reading, t)
        next(self.decode).enter(whole.answering, t)

    @staticmethod
    def part(whole, t, *lengths):
        part = Part(whole.id, t, *lengths)
        part.of, part.begins = whole, whole.begins
        return part

    def preallocated(self, answering, t):
        whole = answering.of
        whole.reserved_s = t
        whole.reading.bootstrapped = True
        whole.reading.side.wake(t)

    def send(self, reading, tokens, size, t):
        whole, last = reading.of, tokens == reading.prompt
        piece = (tokens if last else tokens // size * size) - reading.sent
        if not piece:
            return
        reading.sent += piece
        source, to, wire = reading.side.number, whole.answering.side.number, self.wire
        begin = max(t, self.host_s[source])
        posted = self.host_s[source] = begin + wire.posting_s(piece)
        start = max(posted if self.posts_first else begin, self.link_s[source], self.link_s[to])
        moved = start + wire.occupancy_s(piece)
        self.link_s[source] = self.link_s[to] = moved
        if last:
            end = max(moved, posted) + wire.fixed_s
            self.moves.append((whole.id, source, to, tokens, t, whole.reserved_s, start, end))
            self.at(end, lambda now: self.moved(whole, now))

    @staticmethod
    def moved(whole, t):
        for part in (whole.reading, whole.answering):
            part.transferred = True
            part.side.wake(t)
