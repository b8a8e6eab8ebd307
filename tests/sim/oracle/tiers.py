"""KV tiers, naively: on top of the naive vLLM that hears of transfers, chunks one by one in each tier."""

from __future__ import annotations

from collections import OrderedDict
from heapq import heappop, heappush
from itertools import count, cycle
from math import inf

from tests.sim.oracle.split import Part, Side


class Chunks:
    """A tier: name -> [when it can be read, until when it is, by whom till nobody knows when], the one to be lost next
    first."""

    def __init__(self, spec):
        self.spec, self.all = spec, OrderedDict()
        self.read_s = self.write_s = 0.0
        self.stored = self.dropped = self.evicted = self.fetched = 0

    def has(self, name, now):
        return name in self.all and self.all[name][0][0] <= now

    def touch(self, names, until_s=0.0, by=()):
        for name in reversed(names):
            if name in self.all:
                self.all.move_to_end(name)
                self.all[name][1] = max(self.all[name][1], until_s)
                self.all[name][2].update(by)

    def store(self, names, ready, now):
        need = len(names) - (self.spec.chunks - len(self.all))
        idle = [n for n, (at, until, by) in self.all.items() if at[0] <= now and until <= now and not by]
        if len(idle) < need:
            self.dropped += len(names)
            return False
        for name in idle[: max(0, need)]:
            del self.all[name]
            self.evicted += 1
        self.stored += len(names)
        for name in reversed(names):
            self.all[name] = [ready, 0.0, set()]
        return True


class Ahead(list):
    """When something can be read that comes before anybody asks for it."""


class Batch(list):
    """A step's entries."""


class TierSide(Side):
    """A replica with `tiers`."""

    def __init__(self, desk, number, offload, tiers, *args, **kwargs):
        super().__init__(desk, number, *args, **kwargs)
        self.offload, self.tiers, self.chunk = offload, tiers, offload.chunk_tokens
        self.link_s, self.gpu_read_s, self.gpu_write_s = [[0.0, 0.0] for _ in tiers], 0.0, 0.0
        self.pending, self.asked, self.awaiting, self.loads = [], {}, {}, []
        self.t, self.planning, self.stall, self.received = 0.0, None, [], []
        register = self.kv.register

        def remember(r, tokens):
            register(r, tokens)
            r.registered = max(getattr(r, "registered", 0), tokens)

        self.kv.register = remember

    def names(self, r, first, last):
        blocks = self.chunk // self.size
        return [r.name((i + 1) * blocks - 1, self.size) for i in range(first, last)]

    # Planning.

    def plan(self):
        self.planning = batch = Batch()
        batch[:] = super().plan()
        for r, n, before, decode, *_ in batch:
            if not decode:
                self.offer(r, before + n)
        self.pending = [(batch if tag == [] else tag, *rest) for tag, *rest in self.pending]  # of plans of nothing
        self.planning = None
        return batch

    def let_in(self, r, budget, limit):
        p, target = self.policy, r.prompt + r.out
        if r.there:
            n = min(target - r.computed, limit)
            if n > budget and not p.enable_chunked_prefill:
                return None
            n = min(n, budget)
            last = target if p.scheduler_reserve_full_isl else r.computed + n
            if self.kv.need(r, last) + self.spare > self.free:
                return None
            self.there.remove(r)
            r.there = False
            self.running.append(r)
            return [self.schedule(r, n)]
        found = self.kv.find(r)
        gpu, free = len(found) * self.size, self.free - self.kv.idle(r, len(found)) - self.spare
        known = self.beyond(r, gpu)
        if known == gpu or self.offload.loads == "sync":
            return self.let_in_now(r, found, known, budget, limit, free)
        mine = set(self.names(r, gpu // self.chunk, known // self.chunk))
        for other in self.pulling:
            if mine & set(getattr(other, "comes", ())):
                return self.wait_for(r, other)
        if p.scheduler_reserve_full_isl and self.blocks(target) - len(found) > free:
            return None
        rest = [x for x in (*self.running, *self.pulling, *self.there) if not x.decoding and x.tables]
        if self.blocks(known) - len(found) > free - sum(self.kv.need(x, x.prompt + x.out) for x in rest):
            return None
        self.waiting.remove(r)
        self.kv.hold(r, len(found))
        r.reserved, r.turn, r.waited = known, next(self.desk.numbers), False
        self.kv.take(r)
        r.reserved, r.computed, r.known = 0, min(known, target - 1), known
        self.began(r, gpu, known)
        r.cached = r.computed if r.cached is None else r.cached
        self.pulling.append(r)
        return []

    def let_in_now(self, r, found, known, budget, limit, free):
        p, target, gpu = self.policy, r.prompt + r.out, len(found) * self.size
        base = min(known, target - 1)
        n = min(target - base, limit)
        if n > budget and not p.enable_chunked_prefill:
            return None
        n = min(n, budget)
        last = target if p.scheduler_reserve_full_isl else base + n
        if self.blocks(last) - len(found) > free:
            return None
        self.waiting.remove(r)
        self.kv.hold(r, len(found))
        r.computed, r.waited = base, False
        r.cached = base if r.cached is None else r.cached
        self.began(r, gpu, known)
        self.running.append(r)
        return [self.schedule(r, n)]

    def wait_for(self, r, other):
        self.waiting.remove(r)
        if not getattr(r, "waited", False):
            r.waited, r.turn = True, next(self.desk.numbers)
        r.awaits = other
        self.pulling.append(r)
        self.pulled.append((r, None, other.ready))
        return []

    def queue(self, requests, front=False):
        for r in requests:
            if front and not self.policy.by_priority:
                place = next((i for i, x in enumerate(self.waiting) if not getattr(x, "waited", False)), None)
                self.waiting.insert(len(self.waiting) if place is None else place, r)
            else:
                super().queue([r])

    def preempt(self, r):
        self.offer(r, r.registered)
        super().preempt(r)
        r.registered = 0

    def leave(self, r):
        if r in self.running:
            self.offer(r, r.registered)
        super().leave(r)

    def enter(self, r, t):
        self.received.append(r)
        super().enter(r, t)

    # Loads.

    def fetch(self, r):
        """What only farther tiers have of `r` begins to come to the nearest."""
        near, far = self.tiers[0], self.tiers[1:]
        gpu = len(self.kv.find(r)) * self.size
        first, last = gpu // self.chunk, self.beyond(r, gpu) // self.chunk
        lacks = [name for name in self.names(r, first, last) if name not in near.all]
        ready = Ahead([inf])
        if not lacks or not near.store(lacks, ready, self.t):
            return
        over = self.t
        for i, tier in enumerate(far, 1):
            mine = [name for name in lacks if tier.has(name, self.t)]
            lacks = [name for name in lacks if name not in mine]
            tier.fetched += len(mine)
            if mine:
                over = max(over, max([self.t, *self.gives(i, self.t, len(mine) * self.chunk)]) + tier.spec.latency_s)
        ready[0] = over
        for tier in self.tiers:
            tier.touch(self.names(r, 0, last), over)

    def gives(self, i, t, tokens):
        """When so many tokens of a tier, read from `t` on, have taken its own wires."""
        tier, ends = self.tiers[i], []
        if tier.spec.read_s:
            tier.read_s = max(t, tier.read_s) + tokens * tier.spec.read_s
            ends.append(tier.read_s)
        if tier.spec.link_s:
            self.link_s[i][0] = max(t, self.link_s[i][0]) + tokens * tier.spec.link_s
            ends.append(self.link_s[i][0])
        return ends

    def beyond(self, r, gpu):
        i, stop = gpu // self.chunk, (r.prompt + r.out) // self.chunk
        if stop * self.chunk - gpu < self.chunk:
            return gpu
        while i < stop and any(tier.has(self.names(r, i, i + 1)[0], self.t) for tier in self.tiers):
            i += 1
        return i * self.chunk if i * self.chunk - gpu >= self.chunk else gpu

    def began(self, r, gpu, known):
        """It gets blocks: what tiers have of it was used."""
        whole = self.names(r, 0, (r.prompt + r.out) // self.chunk)
        for tier in self.tiers:
            tier.touch(whole)
        if self.offload.store_after > 1 and not r.preemptions:
            for name in whole:
                self.asked[name] = self.asked.get(name, 0) + 1
        if known == gpu:
            return
        first, last = gpu // self.chunk, known // self.chunk
        r.stored, pieces, promoted, r.ahead = last, [0] * len(self.tiers), [], [0, 0.0]
        for i in range(first, last):
            name = self.names(r, i, i + 1)[0]
            tokens = self.chunk - (gpu % self.chunk if i == first else 0)
            at = self.tiers[0].all.get(name, [()])[0]
            if isinstance(at, Ahead) and at[0] > self.t:
                r.ahead = [r.ahead[0] + tokens, max(r.ahead[1], at[0])]
                continue
            of = next(k for k, tier in enumerate(self.tiers) if tier.has(name, self.t))
            pieces[of] += tokens
            promoted += [name] if of else []
        for tier in self.tiers:
            tier.touch(whole, by=[id(r)])  # until it is known when the load is over
        r.ready = [inf]
        promoted = [name for name in promoted if name not in self.tiers[0].all]
        if promoted and self.tiers[0].store(promoted, r.ready, self.t):
            self.tiers[0].touch(whole, by=[id(r)])
        r.comes, r.whole = self.names(r, first, last), whole
        self.pulled.append((r, pieces, whole))

    def post(self, t):
        if self.flight:
            for r, pieces, more in self.flight[0][2]:
                if pieces is None:
                    self.loads.append((r.id, self.number, -1, 0, t, more[0]))
                else:
                    self.move(r, pieces, more, t)
            self.flight[0][2] = []

    def move(self, r, pieces, whole, t):
        over = t
        for i, (tier, tokens) in enumerate(zip(self.tiers, pieces, strict=True)):
            ready = t
            if not i:
                tokens, ready = tokens + r.ahead[0], max(t, r.ahead[1])
            if tokens:
                ends = self.gives(i, t, tokens)
                self.gpu_read_s = max(t, self.gpu_read_s) + tokens * self.offload.read_s
                end = max(*ends, self.gpu_read_s, ready) + tier.spec.latency_s
                self.loads.append((r.id, self.number, i, tokens, t, end))
                over = max(over, end)
        r.ready[0] = over
        for tier in self.tiers:
            for name in whole:
                if name in tier.all and id(r) in tier.all[name][2]:
                    tier.all[name][2].remove(id(r))
                    tier.all[name][1] = max(over, tier.all[name][1])
        if self.offload.loads == "sync":
            self.stall.append(over)
        else:
            self.desk.at(over, lambda now: self.transferred(r, now))

    def hear(self, said):
        for r in said:
            self.pulling.remove(r)
            r.comes = ()
            if r.done:
                self.kv.give_back(r)
            else:
                self.kv.register(r, r.known)
                r.there = True
                self.there.append(r)
                self.there.sort(key=lambda x: x.rank if self.policy.by_priority else x.turn)
            for other in [x for x in self.pulling if getattr(x, "awaits", None) is r]:
                self.pulling.remove(other)
                other.awaits = None
                if other.done:
                    continue
                if self.policy.by_priority:
                    self.queue([other])
                else:
                    ahead = [x for x in self.waiting if getattr(x, "waited", False) and x.turn < other.turn]
                    self.waiting.insert(len(ahead), other)

    # Stores.

    def offer(self, r, tokens):
        upto, first = tokens // self.chunk, getattr(r, "stored", 0)
        if upto <= first:
            return
        names = self.names(r, first, upto)
        r.stored = upto
        if self.offload.store_after > 1:
            names = [name for name in names if self.asked.get(name, 0) >= self.offload.store_after]
        stores, whole = [], self.names(r, 0, upto)
        for i, tier in enumerate(self.tiers):
            lacks, ready = [name for name in names if name not in tier.all], [inf]
            if lacks and tier.store(lacks, ready, self.t):
                stores.append((i, lacks, ready))
        for i, *_ in stores:
            self.tiers[i].touch(whole)
        if stores:
            self.pending.append((self.planning, len({n for _, lacks, _ in stores for n in lacks}), stores))

    def send(self, t, ended=None):
        """What was offered leaves the GPU, but for what a step computes that is not over."""
        while self.pending and (self.pending[0][0] is None or self.pending[0][0] is ended):
            _, leaving, stores = self.pending.pop(0)
            self.gpu_write_s = max(t, self.gpu_write_s) + leaving * self.chunk * self.offload.write_s
            for i, names, ready in stores:
                tier, tokens, ends = self.tiers[i], len(names) * self.chunk, [self.gpu_write_s]
                if tier.spec.write_s:
                    tier.write_s = max(self.gpu_write_s, tier.write_s) + tokens * tier.spec.write_s
                    ends.append(tier.write_s)
                if tier.spec.link_s:
                    self.link_s[i][1] = max(self.gpu_write_s, self.link_s[i][1]) + tokens * tier.spec.link_s
                    ends.append(self.link_s[i][1])
                ready[0] = max(ends) + tier.spec.latency_s

    # Time.

    def go_on(self, t):
        self.t = t
        self.post(t)
        received, self.received = self.received, []
        for r in received:
            if self.offload.prefetch and not r.done:
                self.fetch(r)
        super().go_on(t)
        if not self.flight:
            self.pending = [(None, *rest) for _, *rest in self.pending]
            self.send(t)

    def begins(self, t):
        """When the step computes that begins at `t`: once all is there that it loads."""
        start, self.stall = max([t, *self.stall]), []
        return start

    def end(self, t):
        self.t = t
        self.send(t, self.flight[0][0])
        super().end(t)


class Desk:
    """Deals requests out to sides in turn."""

    def __init__(self, replicas, make):
        self.numbers = count()
        self.sides = [make(self, number) for number in range(replicas)]
        self.turn, self.coming = cycle(self.sides), []

    def at(self, t, call):
        heappush(self.coming, (t, next(self.numbers), call))

    def run(self, requests):
        self.sent = []
        for r in requests:
            self.send(r)
        while self.coming:
            t, _, call = heappop(self.coming)
            call(t)

    def send(self, r):
        self.sent.append(r)
        self.at(r.arrival_s, lambda t: next(self.turn).enter(r, t))
        if r.gives_up_s < inf:
            self.at(r.gives_up_s, lambda t: self.give_up(r, t))

    def give_up(self, r, t):
        if r.done:
            return
        r.done, r.cancelled_s = True, t
        if (again := r.next_try()) is not None:
            self.send(again)
        if not r.side.flight and r not in r.side.pulling:
            r.side.leave(r)

    def over(self, r, t):
        pass


__all__ = ["Chunks", "Desk", "Part", "TierSide"]
