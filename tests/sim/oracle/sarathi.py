"""Sarathi-Serve: decodes, then prompts under way, then the queue."""

from __future__ import annotations

from tests.sim.oracle.engine import Oracle


class SarathiServe(Oracle):
    def plan(self):
        p, batch = self.policy, []
        for r in list(self.running):
            if r in self.running and r.decoding and self.left(r):
                while not self.free and r in self.running:
                    self.preempt(self.running.pop())
                if r in self.running:
                    batch.append(self.schedule(r, 1))
        budget = p.chunk_size - len(batch)
        for r in self.running:
            if not r.decoding and budget > 0:
                n = min(self.left(r), budget)
                budget -= n
                batch.append(self.schedule(r, n))
        while self.waiting and len(self.running) < p.max_num_seqs and budget > 0:
            prompt = self.waiting[0].prompt + self.waiting[0].out
            if self.free - self.blocks(prompt) < int(p.watermark * self.total):
                break
            n = min(prompt, budget)
            budget -= n
            batch.append(self.admit(n, reserve=prompt))
        return batch
