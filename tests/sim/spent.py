"""Where TTFT and TPOT were spent, stated anew: row by row, one request after the other."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from sim.samples import STRIDE
from sim.spent import Spent
from sim.steplog import FINISHED


def rows_of(table):
    """A table's rows, a dict each."""
    columns = {name: table[name].tolist() for name in table}
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


class Naive:
    """Of a log; `pool` and `group` (of engines that step together) of each replica."""

    def __init__(self, log, pool, group):
        self.steps = rows_of(log.steps.table())
        self.gaps = [gap for gap in rows_of(log.gaps.table()) if gap["id"] >= 0]
        self.transfers = {row["id"]: row for row in rows_of(log.transfers.table())}  # the last one of each
        self.pool = pool
        with_prompts = {(group[int(s["replica"])], s["end_s"]) for s in self.steps if s["prefill_tokens"]}
        took, steps = defaultdict(lambda: defaultdict(float)), defaultdict(lambda: defaultdict(float))
        for s in self.steps:
            s["prompts"] = (group[int(s["replica"])], s["end_s"]) in with_prompts
            if not s["prompts"]:
                took[pool[int(s["replica"])]][s["decodes"]] += s["end_s"] - s["start_s"]
                steps[pool[int(s["replica"])]][s["decodes"]] += s["steps"]
        self.alone = {p: {d: took[p][d] / steps[p][d] for d in took[p]} for p in took}

    def decoding_s(self, step):
        """What the decodes of a step take."""
        took, decodes = step["end_s"] - step["start_s"], step["decodes"]
        known = self.alone.get(self.pool[int(step["replica"])], {})
        if not step["prompts"]:
            return took
        if not decodes or not known:
            return 0.0
        below, above = [d for d in known if d <= decodes], [d for d in known if d >= decodes]
        low, high = max(below, default=min(known)), min(above, default=max(known))
        share = (decodes - low) / (high - low) if low < decodes < high else 0.0
        return min(took, known[low] + share * (known[high] - known[low] if high > low else 0.0))

    def within(self, replica, since, until):
        """(seconds of decodes, of prompts where the engine had some, of others', tokens of these) between two times."""
        decodes = prompts = others = tokens = 0.0
        for s in self.steps:
            if s["replica"] == replica and since <= s["start_s"] < until:
                decodes += self.decoding_s(s)
                rest = s["end_s"] - s["start_s"] - self.decoding_s(s)
                prompts, others = (prompts + rest, others) if s["prefill_tokens"] else (prompts, others + rest)
                tokens += s["prefill_tokens"]
        return decodes, prompts, others, tokens

    def ttft(self, r):
        """The parts of a finished request's TTFT."""
        move = self.transfers.get(r["id"])
        read = r["first_token_s"] if move is None else move["read_s"]
        replica = r["replica"] if move is None else move["prefill_replica"]
        decodes, prompts, others, tokens = self.within(replica, r["scheduled_s"], read)
        own = prompts * min(1.0, (r["prompt_tokens"] * r["samples"] - r["cached_tokens"]) / tokens)
        found = {
            "network": r["network_s"],
            "earlier_tries": r["retried_s"],
            "no_replica": r["sent_s"] - (r["arrival_s"] + r["retried_s"] + r["network_s"] / 2),
            "front_end": r["queued_s"] - r["sent_s"],
            "queue": r["scheduled_s"] - r["queued_s"],
            "prefill": own,
            "other_prompts": prompts - own + others,
            "other_decodes": decodes,
        }
        if move is not None and r["first_token_s"] > read:
            times = [read, max(move["reserved_s"], read), move["start_s"], move["end_s"], r["first_token_s"]]
            names = ("decode_queue", "link_queue", "transfer", "first_decode")
            found |= dict(zip(names, np.diff(times), strict=True))
            if move["reserved_s"] < read:
                before = max(move["reserved_s"] - r["queued_s"], 0.0)
                found |= {"queue": found["queue"] - before, "decode_queue": before}
        return found

    def tpot(self, r):
        """The parts of a finished request's TPOT."""
        samples, begin, left_out = r["samples"], r["first_token_s"], 0.0
        gaps = [g for g in self.gaps if g["id"] % STRIDE == r["id"] and g["since_s"] >= r["first_token_s"]]
        move = self.transfers.get(r["id"])
        early = move is not None and move["reserved_s"] >= move["read_s"] and r["first_token_s"] <= move["end_s"]
        if early:
            begin = next(g["end_s"] for g in gaps if g["since_s"] == r["first_token_s"])
            gaps = [g for g in gaps if g["since_s"] >= begin]
        decode, *others, _ = self.within(r["replica"], begin, r["finish_s"])
        prompts = sum(others)
        for g in gaps:
            lost, *others, _ = self.within(r["replica"], g["since_s"], g["end_s"])
            decode, prompts = decode - lost / samples, prompts - sum(others) / samples
            left_out += (g["end_s"] - g["since_s"]) / samples
        tokens = r["output_tokens"] / samples - 1
        parts = {
            "decode": decode,
            "other_prompts": prompts,
            "left_out": left_out,
            "handed_over": begin - r["first_token_s"],
        }
        return {name: part / tokens for name, part in parts.items()}


def check_spent(log, deployment, *, aligned=True):
    """The parts of every finished request, against this; that they add up, and how many requests there were.

    Not `aligned`: requests begin and go on in the midst of rows, and time lies between these; then that they add up.
    """
    table = log.requests.table()
    done = table.where(np.isin(table["outcome"], FINISHED))
    pool = [i for i, p in enumerate(deployment.pools) for _ in range(p.replicas)]
    group = [(i, n // p.ranks) for i, p in enumerate(deployment.pools) for n in range(p.replicas)]
    naive = Naive(log, pool, group)
    spent = Spent(done, log.steps.table(), log.transfers.table(), log.gaps.table(), deployment)
    several = done.where(done["output_tokens"] > done["samples"])
    ttft = done["first_token_s"] - done["arrival_s"] + done["network_s"] / 2
    tpot = (several["finish_s"] - several["first_token_s"]) / (several["output_tokens"] / several["samples"] - 1)
    for rows, parts_of, whole, state in ((done, spent.ttft, ttft, naive.ttft), (several, spent.tpot, tpot, naive.tpot)):
        parts = parts_of(rows, spent.handed(rows))
        assert np.allclose(sum(parts.values()), whole, rtol=1e-12, atol=1e-9)
        for i, r in enumerate(rows_of(rows)):
            expected = state(r)
            for name, part in parts.items():
                assert part[i] > -1e-9, (name, r)
                assert not aligned or abs(part[i] - expected.get(name, 0.0)) < 1e-6, (name, part[i], expected, r)
    return done.height
