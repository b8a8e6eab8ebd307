"""The naive engine that speculates, as vLLM V1 does: drafts are tokens to compute like others, and those that are wrong
are taken back when the step has ended."""

from __future__ import annotations

from tests.sim.oracle.vllm_v1 import VllmV1


class Speculative(VllmV1):
    def __init__(self, *args, drafting, drops_last=False, **kwargs):
        super().__init__(*args, **kwargs)
        self.drafting, self.registers = drafting, self.depth == 2
        self.admitting = False
        self.kv.drops_last, self.kv.most = drops_last, drafting.max_model_len

    def sure(self, r):
        """Whether the step in flight ends `r`, whatever is right of its drafts."""
        return r.placeholders > 0 and r.computed + 2 - r.placeholders >= r.prompt + r.cap

    def wanted(self, r):
        return r.prompt + r.out + r.placeholders + r.drafts - r.computed

    def reach(self, r, tokens):
        """Tokens that `r` needs blocks for to have `tokens` computed."""
        return min(tokens + self.drafting.lookahead, self.drafting.max_model_len)

    def reach_first(self, tokens):
        ahead = self.drafting.lookahead if self.drafting.at_admission else 0
        return min(tokens + ahead, self.drafting.max_model_len)

    def admit(self, n, found=(), reserve=0):
        first = len(found) * self.size + n
        self.admitting = True
        entry = super().admit(n, found, self.reach_first(first))
        self.admitting = False
        return entry

    def padding(self, r, cached):
        one = r.prompt + r.out - cached == 1
        room = cached + 1 + self.drafting.tokens + 1 <= self.drafting.max_model_len
        alike = (cached or self.before) and all(decode for _, _, _, decode, *_ in self.before)
        return self.drafting.tokens if self.policy.pads_decodes and one and room and alike else 0

    def preempt(self, r):
        super().preempt(r)
        r.drafts = 0

    def schedule(self, r, n):
        if not self.admitting:
            r.reserved = max(r.reserved, self.reach(r, r.computed + n))
        drafts = max(0, r.computed + n - (r.prompt + r.out + r.placeholders))
        r.drafts = 0
        placeholders = r.placeholders
        entry = super().schedule(r, n)
        yields = r.computed >= r.prompt + r.out + placeholders
        r.placeholders = placeholders + yields * (1 + drafts)
        r.decoding = r.decoding or yields
        if yields and self.depth == 2:
            r.drafts = self.drafting.tokens
        return *entry[:4], yields, entry[5]

    def in_kv(self, r, before):
        return r.landed

    def yielded(self, r, n, before, decode, runs):
        tokens = 1
        if decode:
            tokens = min(n, int(self.drafting.draws(r.id, r.output + 2)[1][r.verified]))
            r.verified += 1
            wrong = n - tokens
            r.landed += tokens
            if runs:
                r.computed -= wrong
                r.placeholders -= wrong
        elif runs:
            r.landed = r.prompt + r.out
            wrong = max(0, before + n - r.landed)
            r.computed -= wrong
            r.placeholders -= wrong
        if runs and self.depth == 1:
            r.drafts = int(self.drafting.draws(r.id, r.output + 2)[0][r.verified])
        return tokens
