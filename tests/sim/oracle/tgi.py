"""TGI's batching task: a prefill pass when enough requests wait, then always one that decodes."""

from __future__ import annotations

from tests.sim.oracle.engine import Oracle


class Tgi(Oracle):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.waiting_tokens, self.concatenated = 1, False

    def plan(self):
        p = self.policy
        if not self.running:
            self.waiting_tokens, self.concatenated = 1, False
            return self.next_batch(None, p.max_batch_size)
        if not self.concatenated:
            least = int(len(self.running) * p.waiting_served_ratio)
            if self.waiting_tokens >= p.max_waiting_tokens:
                least = None
            batch = self.next_batch(least, p.max_batch_size and p.max_batch_size - len(self.running))
            if batch:
                self.waiting_tokens, self.concatenated = 1, True
                return batch
        self.waiting_tokens += 1
        self.concatenated = False
        return [self.schedule(r, 1) for r in self.running]

    def next_batch(self, least, most):
        if least is not None and len(self.waiting) < least:
            return []
        budget = self.blocks(self.policy.max_batch_prefill_tokens) * self.size
        chosen, total, free = [], self.free * self.size, self.free
        for r in self.waiting:
            need = self.blocks(r.prompt + r.cap - 1)
            if sum(c.prompt for c in chosen) + r.prompt > budget or need > free or len(chosen) == most:
                break
            if sum(c.prompt + c.cap for c in chosen) + r.prompt + r.cap > total:
                break
            chosen.append(r)
            free -= need
        if least is not None and len(chosen) < least:
            return []
        return [self.admit(r.prompt, reserve=r.prompt + r.cap - 1) for r in chosen]
