"""vLLM V0: prompts first and alone; with chunked prefill, the running requests in order and then the queue."""

from __future__ import annotations

from tests.sim.oracle.engine import Oracle


class OutOfSwapSpaceError(Exception):
    """vLLM stops."""


class VllmV0(Oracle):
    def plan(self):
        p = self.policy
        if not p.enable_chunked_prefill:
            if not self.swapped and (batch := self.prompts(p.max_num_batched_tokens)):
                return batch
            preempted = []
            batch = self.append(p.max_num_batched_tokens, preempted)
            return batch if preempted else batch + self.swap_in()
        preempted = []
        batch = self.append(p.max_num_batched_tokens, preempted)
        for r in preempted:
            self.waiting.remove(r)
        batch += self.prompts(p.max_num_batched_tokens - sum(n for _, n, *_ in batch))
        for r in preempted:
            self.waiting.appendleft(r)
        return batch

    def prompts(self, budget):
        """Who can be admitted: prompts in whole, or in chunks."""
        p, batch = self.policy, []
        while self.waiting and len(self.running) < p.max_num_seqs and budget > 0:
            r = self.waiting[0]
            n = r.prompt + r.out
            if self.free - self.blocks(n) < int(p.watermark * self.total):
                break
            if n > budget and not p.enable_chunked_prefill:
                break
            batch.append(self.admit(min(n, budget), reserve=n))
            budget -= batch[-1][1]
        return batch

    def append(self, budget, preempted):
        """A slot for everybody who runs; they touch a block, new or not, which must be there."""
        batch, i = [], 0
        while i < len(self.running):
            r = self.running[i]
            i += 1
            n = min(self.left(r), budget)
            if n == 0:
                continue
            touched = 0 if not r.decoding and (r.prompt + r.out) % self.size == 0 else 1
            while self.free < touched and r in self.running:
                preempted.append(self.running.pop())
                (self.swap_out if self.policy.preemption_mode == "swap" else self.preempt)(preempted[-1])
            if r not in self.running:
                break
            budget -= n
            batch.append(self.schedule(r, n))
        return batch

    def swap_out(self, r):
        """Its blocks go to the host, where there must be room for its next token, too."""
        there = sum(self.blocks(other.computed) for other in self.swapped)
        if there + r.computed // self.size + 1 > self.policy.swap_blocks:
            raise OutOfSwapSpaceError
        self.copied += len(r.tables[0])
        self.kv.give_back(r)
        self.swapped.append(r)
        r.preemptions += 1
        self.preemptions += 1

    def swap_in(self):
        """Who went first comes back first, if full blocks and the one of its next token leave the watermark free."""
        p, batch = self.policy, []
        while self.swapped and len(self.running) < p.max_num_seqs:
            r = self.swapped[0]
            if self.free - (r.computed // self.size + 1) < int(p.watermark * self.total):
                break
            self.copied += self.blocks(r.computed)
            self.running.append(self.swapped.pop(0))
            self.kv.hold(r, 0)
            batch.append(self.schedule(r, 1))
        return batch
