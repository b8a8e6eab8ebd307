"""Static batching: nobody joins or leaves before all are done, and all are as long as the longest."""

from __future__ import annotations

from tests.sim.oracle.engine import Oracle


class StaticBatching(Oracle):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.members = []

    def leave(self, r):
        """It keeps its blocks."""
        if r in self.members:
            self.running.remove(r)
        else:
            super().leave(r)

    def plan(self):
        if not all(r.done for r in self.members):
            return [self.schedule(r, 1) for r in self.members]
        for r in self.members:
            self.kv.give_back(r)
        self.members = []
        for r in self.waiting:
            more = [*self.members, r]
            prompt, cap = max(m.prompt for m in more), max(m.cap for m in more)
            if len(more) > self.policy.max_batch_size or len(more) * self.blocks(prompt + cap) > self.free:
                break
            self.members = more
        batch = []
        if self.members:
            prompt, cap = max(m.prompt for m in self.members), max(m.cap for m in self.members)
            for r in self.members:
                r.prompt = prompt  # padded
                batch.append(self.admit(prompt, reserve=prompt + cap))
        return batch
