"""llama.cpp's slots: what generates, then prompts, slot by slot."""

from __future__ import annotations

from tests.sim.oracle.engine import Oracle


class LlamaCpp(Oracle):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.slots = dict.fromkeys(range(self.policy.n_parallel))
        self.released = list(reversed(self.slots))  # free slots, the longest unused first

    def plan(self):
        for i, r in self.slots.items():
            if r is not None and r.done:
                self.slots[i] = None
                self.released.append(i)
        for r in self.waiting:
            if r not in self.slots.values() and self.released:
                self.slots[self.released.pop(0)] = r
        batch = [self.schedule(r, 1) for r in self.slots.values() if r is not None and r.decoding]
        if batch and not self.policy.cont_batching:
            return batch
        for r in self.slots.values():
            n = self.policy.n_batch - sum(n for _, n, *_ in batch)
            if r is None or r.decoding or not n:
                continue
            if r in self.waiting:
                self.waiting.remove(r)
                self.waiting.appendleft(r)
                batch.append(self.admit(min(r.prompt, n)))
            else:
                batch.append(self.schedule(r, min(r.prompt - r.computed, n)))
        return batch
