"""vLLM V0: prompts first and alone; with chunked prefill, the running requests in order and then the queue."""

from __future__ import annotations

from tests.sim.oracle.engine import Oracle


class VllmV0(Oracle):
    def plan(self):
        p = self.policy
        if not p.enable_chunked_prefill:
            if batch := self.prompts(p.max_num_batched_tokens):
                return batch
            return self.append(p.max_num_batched_tokens, [])
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
                self.preempt(preempted[-1])
            if r not in self.running:
                break
            budget -= n
            batch.append(self.schedule(r, n))
        return batch
