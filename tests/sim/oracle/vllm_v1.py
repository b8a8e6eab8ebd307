"""vLLM V1: the running requests in order, then the waiting ones, as long as the token budget lasts."""

from __future__ import annotations

from tests.sim.oracle.engine import Oracle


class VllmV1(Oracle):
    def plan(self):
        p, budget, batch, preempted = self.policy, self.policy.max_num_batched_tokens, [], False
        limit = p.long_prefill_token_threshold or budget
        if p.long_prefill_alone_exempt and self.present <= 1:
            limit = budget
        i, slots = 0, p.draft_slots
        while i < len(self.running) and budget > slots:
            r = self.running[i]
            i += 1
            if self.sure(r) or not self.eligible(r):
                continue  # its last token is in flight
            n = min(self.wanted(r), limit, budget - slots)
            self.kv.slide(r)
            victim = None
            while self.kv.need(r, self.reach(r, r.computed + n)) > self.free and victim is not r:
                among = [x for x in self.running if self.eligible(x)]
                victim = max(among, key=lambda x: x.rank) if p.by_priority else among[-1]
                at = self.running.index(victim)
                del self.running[at]
                entry = next((b for b in batch if b[0] is victim), None)
                if entry:  # it gives back what it had in this step
                    batch.remove(entry)
                    victim.in_flight -= entry[1]
                    budget += entry[1] + slots
                if at < i - 1 and (entry or not p.preemption_skips_one):
                    i -= 1
                self.preempt(victim)
                preempted = True
            if victim is r:
                break
            budget -= n + slots
            batch.append(self.schedule(r, n))
        self.before = list(batch)  # those who ran already
        while not preempted and budget > slots and len(self.running) < p.max_num_seqs and (r := self.next()):
            entries = self.let_in(r, budget - slots, limit)
            if entries is None:
                break
            budget -= sum(n + slots for _, n, *_ in entries)
            batch += entries
        return batch

    def sure(self, r):
        """Whether the step in flight ends `r`."""
        return r.out + r.placeholders >= r.cap

    def wanted(self, r):
        """Tokens of `r` that can be computed."""
        return r.prompt + r.out + r.placeholders - r.computed

    def reach(self, r, tokens):
        """Tokens that `r` needs blocks for to have `tokens` computed."""
        return tokens

    def reach_first(self, tokens):
        """The same, when it is admitted."""
        return tokens

    def padding(self, r, cached):
        """Drafts that nobody made which `r` computes with its first tokens after those `cached`."""
        return 0

    def eligible(self, r):
        """Whether `r` may be in the next batch."""
        return True

    @property
    def present(self):
        """Requests that are here."""
        return len(self.running) + len(self.waiting)

    def next(self):
        """Whose turn it is, if anybody waits."""
        return self.waiting[0] if self.waiting else None

    @property
    def spare(self):
        """Blocks that stay free when somebody is admitted beside others."""
        return int(self.policy.watermark * (self.total + 1)) if self.running else 0

    def let_in(self, r, budget, limit):
        """Admit `r`, the head of the queue: its entries in the batch, or None where it must wait."""
        p, found = self.policy, self.kv.find(r)
        cached = len(found) * self.size
        n = min(r.prompt + r.out - cached, limit)
        padding = self.padding(r, cached)
        if padding and 1 + padding > budget:
            return None
        n = 1 + padding if padding else n
        if n > budget and not p.enable_chunked_prefill:
            return None
        n = min(n, budget)
        first = self.reach_first(cached + n)
        last = r.prompt + r.out if p.scheduler_reserve_full_isl else first
        needed = max(self.reserved(last, len(found)), self.tables.count * (self.blocks(first) - len(found)))
        if needed + self.kv.idle(r, len(found)) + self.spare > self.free:
            return None
        return [self.admit(n, found)]

    def reserved(self, last, found):
        """The blocks that must be free to admit a sequence of `last` tokens, of which `found` blocks are known."""
        windows, blocks = self.tables.windows, self.blocks(last)
        if self.tables.admission == "window":
            most = [blocks] * self.tables.full + [min(blocks, w.most) for w in windows for _ in range(w.tables)]
            return sum(max(0, n - found) for n in most)
        return self.tables.count * (blocks - found)
