"""SGLang: `running_batch`, `last_batch` and `chunked_req` as its scheduler keeps them, and PrefillAdder's counters."""

from __future__ import annotations

from collections import deque

from sim.schedulers.sglang import CLIP, DECAY_STEPS, INITIAL, LEAST, LPM_QUEUE, RETRACT_STEPS
from tests.sim.oracle.engine import Oracle
from tests.sim.oracle.radix import Radix


class Sglang(Oracle):
    def __init__(self, policy, *args, **kwargs):
        super().__init__(policy, *args, **kwargs)
        self.tree = Radix(self.total + 1, self.size) if self.kv.caching else None
        self.kv = self.tree or self.kv
        self.batch_is_full = False
        self.decoding = []  # running_batch.reqs: those that finished stay until it is filtered
        self.last = None  # reqs of the last batch, if it held prompts
        self.chunked = None
        self.prompts, self.counter = False, 0  # what the last batch was; SchedulerRecvSkipper's counter
        self.initial = min(INITIAL * policy.schedule_conservativeness, 1.0)
        self.least = min(self.initial * LEAST, 1.0)
        self.start, self.decays = self.initial, 0

    def left(self, r):
        return r.prompt + r.out + r.placeholders - r.computed

    def in_order(self, batch, place):
        return batch

    @property
    def ratio(self):
        return max(self.start - self.decays * (self.initial - self.least) / DECAY_STEPS, min(self.start, self.least))

    def take(self, r):
        self.inbox.append(r)

    def received(self):
        """Who is received in this round of the event loop."""
        self.counter += 1000 if self.prompts else 1
        if self.counter < self.policy.scheduler_recv_interval:
            return []
        self.counter, found, self.inbox = 0, self.inbox, []
        return found

    def look(self):
        """The loop goes round until it receives."""
        self.counter = max(self.counter, self.policy.scheduler_recv_interval - 1)
        return bool(self.inbox)

    def plan(self):
        self.waiting.extend(self.received())
        batch = self.next_batch()
        self.prompts = any(not decode for _, _, _, decode, _, _ in batch)
        return batch

    def next_batch(self):
        if self.chunked is not None and self.chunked.done:
            self.chunked = None
        if self.chunked is not None:
            self.kv.keep(self.chunked, self.chunked.computed)
        if self.last is not None:
            alive = [r for r in self.last if not r.done and r is not self.chunked]
            if len(alive) < len(self.last):
                self.batch_is_full = False
            self.decoding += alive
            self.last = None
        batch = self.prefill()
        if not batch:
            batch = self.decode()
        return batch

    def prefill(self):
        p = self.policy
        if (self.batch_is_full or not self.waiting) and self.chunked is None:
            return []
        places = p.max_running_requests - len(self.decoding)
        if places <= 0 and self.chunked is not None:
            self.batch_is_full = True
            return []
        if p.schedule_policy == "lpm" and len(self.waiting) <= LPM_QUEUE and self.tree:
            self.waiting = deque(self.kv.longest_first(self.waiting))
        mixes = p.enable_mixed_chunk and p.chunked_prefill_size > 0
        mixed = len(self.decoding) if mixes else 0
        self.cur_rem = self.free * self.size - mixed
        self.rem_total = self.cur_rem - self.ratio * sum(min(r.cap - r.out, CLIP) for r in self.decoding if not r.done)
        self.rem_input = p.max_prefill_tokens - mixed
        self.rem_chunk = p.chunked_prefill_size - mixed if p.chunked_prefill_size > 0 else float("inf")
        batch, more = [], None
        if self.chunked is not None:
            r = self.chunked
            rem = min(self.rem_chunk, int(self.rem_total))
            n = min(self.left(r), rem if rem > 0 else self.rem_chunk)
            self.chunked = r if n < self.left(r) else None
            self.spend(n, min(r.cap, CLIP) if self.chunked is None else 0)
            batch.append(self.schedule(r, n))
        while self.waiting and more != "stop":
            if len(batch) >= places:
                self.batch_is_full = True
            if self.batch_is_full:
                break
            more = self.add_one(batch)
            if more == "no token":
                self.batch_is_full = True
        self.kv.allocate(self.blocks(sum(entry[1] for entry in batch)) + len(batch) * (self.size > 1))
        if batch:
            self.last = [entry[0] for entry in batch]
            if p.enable_mixed_chunk:
                self.decoding = [r for r in self.decoding if not r.done]
                self.last += self.decoding
                batch += [self.schedule(r, 1) for r in self.decoding]
                self.kv.allocate(len(self.decoding))
                self.decoding = []
        return batch

    def add_one(self, batch):
        r = self.waiting[0]
        found = self.kv.find(r)
        n = r.prompt + r.out - len(found) * self.size
        total = n + min(max(r.cap - r.out, 0), CLIP)
        locked = self.kv.idle(r, len(found)) * self.size
        if total >= self.rem_total:
            return "no token"
        if self.blocks(n) * self.size >= self.rem_input and batch:
            return "stop"
        if total >= self.rem_total - locked:
            return "no token"
        later = min(r.cap, CLIP)
        if self.blocks(n) * self.size > self.rem_chunk:
            n, later = self.rem_chunk // self.size * self.size, 0
            if n <= 0:
                return "stop"
            self.chunked = r
        self.rem_total -= locked
        self.cur_rem -= locked
        self.spend(n, later)
        batch.append(self.admit(n, found))
        if self.rem_total <= 0 or self.cur_rem <= 0:
            return "no token"
        return "stop" if self.rem_input <= 0 or self.rem_chunk <= 0 else None

    def spend(self, n, later):
        n = self.blocks(n) * self.size
        self.rem_total -= n + later
        self.cur_rem -= n
        self.rem_input -= n
        self.rem_chunk -= n

    def decode(self):
        before = len(self.decoding)
        self.decoding = [r for r in self.decoding if not r.done]
        if not self.decoding:
            self.batch_is_full = False
            if self.running:
                return []
            self.start, self.decays = self.initial, 0  # idle
            return self.prefill()
        self.kv.make_room(self.needed())
        if self.needed() > self.free:
            self.retract()
        else:
            self.decays += 1
        if len(self.decoding) < before:
            self.batch_is_full = False
        batch = [self.schedule(r, 1) for r in self.decoding]
        self.kv.allocate(len(batch))
        return batch

    def needed(self):
        return sum(self.blocks(r.computed + 1) - self.blocks(r.computed) for r in self.decoding)

    def retract(self):
        self.decoding = order = sorted(self.decoding, key=lambda r: (r.out, -r.prompt), reverse=True)
        first = True
        while len(order) > 1 and (first or self.needed() > self.free):
            first = False
            r = order.pop()
            self.running.remove(r)
            self.preempt(r)
            self.waiting.rotate(-1)
            self.kv.make_room(self.blocks(RETRACT_STEPS * len(order)))
            self.kv.make_room(self.needed())
        out, caps = sum(r.out for r in self.decoding), sum(r.cap for r in self.decoding)
        self.start, self.decays = min(1.0, (out + RETRACT_STEPS * len(self.decoding)) / (caps + 1)), 0
