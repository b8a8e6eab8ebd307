"""MLC-LLM's actions: prefill, if anything can be prefilled, and else decode."""

from __future__ import annotations

from tests.sim.oracle.engine import Oracle


class MlcLlm(Oracle):
    def plan(self):
        running = [r for r in self.running if r.decoding]
        batch = self.prefill(running) if len(running) <= self.free else []
        if batch:
            hybrid = self.policy.prefill_mode == "hybrid"
            return batch + [self.schedule(r, 1) for r in running if hybrid]
        while sum(r.decoding for r in self.running) > self.free:
            self.preempt(self.running.pop())
        return [self.schedule(r, 1) for r in self.running if r.decoding]

    def prefill(self, running):
        p, batch = self.policy, []
        available, held = self.free, sum(r.computed for r in self.running)
        length = pages = len(running)
        for r in [*(r for r in self.running if not r.decoding), *self.waiting]:
            n = left = r.prompt + r.out - r.computed

            def can(n, length, pages):
                sequences = len(running) + len(batch) + 1
                return (
                    sequences <= min(p.max_num_sequence, p.prefill_chunk_size)
                    and length <= p.prefill_chunk_size
                    and pages + sequences <= available
                    and held + length + 8 * sequences <= self.total * self.size
                )

            if not can(n, length + n, pages + self.blocks(n)):
                if p.prefill_chunk_size - length >= n or p.prefill_chunk_size == length:
                    break
                n = p.prefill_chunk_size - length
                if not can(n, length + n, pages + self.blocks(n)):
                    break
            length += n
            pages += self.blocks(n)
            batch.append(self.schedule(r, n) if r in self.running else self.admit(n))
            if n < left:
                break
        return batch
