"""TensorRT-LLM: the capacity scheduler picks who fits, the micro batch scheduler what of them goes into the step."""

from __future__ import annotations

from tests.sim.oracle.engine import Oracle


class TensorrtLlm(Oracle):
    waited = 0

    def plan(self):
        active = [*self.running, *self.waiting]  # the order in which they came
        if self.policy.capacity_scheduler_policy == "MAX_UTILIZATION":
            fitting = self.max_utilization(active)
        else:
            fitting = self.guaranteed_no_evict(active)
        generating, prompts = self.micro_batch(fitting)
        if prompts and generating and self.policy.batch_wait_timeout_iters and self.waits(generating, prompts):
            prompts = []
        batch = [self.schedule(r, 1) for r in generating]
        for r, n in prompts:
            if r in self.running:
                batch.append(self.schedule(r, n))
            else:
                found = self.kv.find(r)
                batch.append(self.admit(min(n, r.prompt + r.out - len(found) * self.size), found))
                r.promised = r.prompt + r.cap
        return batch

    def guaranteed_no_evict(self, active):
        fitting = [r for r in active if r in self.running and r.decoding]
        available = self.free - sum(self.blocks(r.promised) - len(r.tables[0]) for r in self.running)
        for r in active:
            if r.decoding:
                continue
            needed = 0 if r in self.running else self.blocks(r.prompt + r.cap)
            if needed > available or (r not in self.running and self.places(fitting) == 0):
                break
            available -= needed
            fitting.append(r)
        return fitting

    def places(self, fitting):
        return self.policy.max_batch_size - len(self.running) - sum(r not in self.running for r in fitting)

    def max_utilization(self, active):
        fitting, needed, i, end = [], 0, 0, len(active)
        while i < end:
            r = active[i]
            need = self.one_step(r, active[:end])
            room = r in self.running or self.places(fitting) > 0
            if room and needed + need <= self.free:
                fitting.append(r)
                needed += need
                i += 1
                continue
            started = [k for k in range(i, end) if active[k] in self.running]
            if not started:
                break
            end = started[-1]
            self.running.remove(active[end])
            self.preempt(active[end])
            fitting, needed, i = [], 0, 0  # what a begun prompt may take depends on how many generate
        return fitting

    def one_step(self, r, active):
        """Blocks that the next step of `r` needs."""
        if r.decoding:
            n = min(1, self.left(r))
        elif r in self.running:
            n = self.chunk(r, self.policy.max_num_tokens - sum(x.decoding and self.left(x) > 0 for x in active))
        else:
            return self.blocks(r.prompt + r.out)
        return self.blocks(r.computed + n) - self.blocks(r.computed)

    def chunk(self, r, budget):
        n = r.prompt + r.out - r.computed
        return n if n <= budget else budget // self.size * self.size

    def micro_batch(self, fitting):
        """Who generates, and the prompts with their tokens."""
        budget = self.policy.max_num_tokens
        generating = [r for r in fitting if r.decoding and self.left(r)]
        budget -= len(generating)
        prompts = []
        for r in fitting:
            if r.decoding or (r in self.running and not self.left(r)):
                continue
            n = r.prompt + r.out - r.computed
            if self.policy.enable_chunked_prefill:
                n = self.chunk(r, budget)
            if not n or n > budget:
                break
            prompts.append((r, n))
            budget -= n
            if n < r.prompt + r.out - r.computed:
                break
        return generating, prompts

    def waits(self, generating, prompts):
        tokens = len(generating) + sum(n for _, n in prompts)
        ratio, most = self.policy.batch_wait_max_tokens_ratio, self.policy.batch_wait_timeout_iters
        if self.waited >= most or tokens >= ratio * self.policy.max_num_tokens:
            self.waited = 0
            return False
        self.waited += 1
        return True
