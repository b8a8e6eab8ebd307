"""Orca: everybody who runs, and whoever fits with all the tokens that he may ask for."""

from __future__ import annotations

from tests.sim.oracle.engine import Oracle


class Orca(Oracle):
    def plan(self):
        batch = [self.schedule(r, 1) for r in self.running if self.left(r)]
        while self.waiting and len(self.running) < self.policy.max_batch_size:
            r = self.waiting[0]
            if self.blocks(r.prompt + r.cap) > self.free:
                break
            batch.append(self.admit(r.prompt, reserve=r.prompt + r.cap))
        return batch
