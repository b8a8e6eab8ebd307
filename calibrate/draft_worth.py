"""What drafts are worth by how many decode at once: they are nearly free while a step waits for memory, and cost their
whole work once it waits for arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from calibrate.speculative_cost import SpeculativeCost


@dataclass(frozen=True, slots=True)
class DraftWorth:
    """Steps of sequences with `context` tokens each, which yield `length` tokens a sequence with drafts where the token
    budget lets all in: sequences -> (seconds without drafts; seconds with them, tokens a sequence with them). `turns`:
    the fewest sequences from which on drafts make tokens come later with any number up to `most`; None where they never
    do."""

    length: float
    context: int
    most: int
    by_batch: Mapping[int, tuple[float, float, float]]
    turns: int | None

    def tpot_s(self, batch: int) -> float:
        """Seconds a token of each sequence with drafts; `batch` is one of `by_batch`."""
        _, drafted_s, length = self.by_batch[batch]
        return drafted_s / length

    def speedup(self, batch: int) -> float:
        """How many times as fast tokens come with drafts; `batch` is one of `by_batch`."""
        return self.by_batch[batch][0] / self.tpot_s(batch)


def worth(cost: SpeculativeCost, length: float, proposes: float, context: int, most: int) -> DraftWorth:
    """Of steps of 1 to `most` sequences, in `proposes` of which there are drafts."""
    steps = {
        n: (cost.plain.step_s((), n, n * context), *drafted(cost, n, n * context, length, proposes))
        for n in range(1, most + 1)
    }
    slower = [n for n, (plain_s, drafted_s, tokens) in steps.items() if plain_s * tokens < drafted_s]
    faster = steps.keys() - set(slower)
    last = max(faster, default=0)
    shown = sorted({*(2**i for i in range(most.bit_length()) if 2**i <= most), most})
    return DraftWorth(length, context, most, {n: steps[n] for n in shown}, last + 1 if slower and last < most else None)


def drafted(cost: SpeculativeCost, n: int, kv_tokens: int, length: float, proposes: float) -> tuple[float, float]:
    """Seconds of a step of `n` sequences that have drafts in `proposes` of steps, and the tokens it yields of each on
    average: `length` of those that it computes. Whom the token budget does not reach waits."""
    alone = 1 + cost.slots
    computed = max(1, min(n, int(cost.budget / (alone + cost.tokens * proposes))))
    drafts = min(round(computed * cost.tokens * proposes), cost.budget - computed * alone)
    return cost.step_s((), computed, kv_tokens * computed // n, drafts=drafts), length * computed / n
