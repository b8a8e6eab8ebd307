"""What drafts are worth by how many decode at once: they are nearly free while a step waits for memory, and cost their
whole work once it waits for arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from calibrate.speculative_cost import SpeculativeCost


@dataclass(frozen=True, slots=True)
class DraftWorth:
    """Steps of sequences with `context` tokens each, which yield `length` tokens a sequence with drafts: sequences ->
    (seconds without drafts, seconds with them). `turns`: the fewest sequences from which on drafts make tokens come
    later with any number up to `most`; None where they never do."""

    length: float
    context: int
    most: int
    by_batch: Mapping[int, tuple[float, float]]
    turns: int | None

    def speedup(self, batch: int) -> float:
        """How many times as fast tokens come with drafts; `batch` is one of `by_batch`."""
        plain_s, drafted_s = self.by_batch[batch]
        return plain_s * self.length / drafted_s


def worth(cost: SpeculativeCost, length: float, proposes: float, context: int, most: int) -> DraftWorth:
    """Of steps of 1 to `most` sequences, in `proposes` of which there are drafts."""
    batches = np.arange(1, most + 1)
    steps = {int(n): _steps(cost, int(n), proposes, context) for n in batches}
    slower = [n for n in steps if steps[n][0] * length < steps[n][1]]
    faster = [n for n in steps if steps[n][0] * length >= steps[n][1]]
    last = max(faster, default=0)
    shown = sorted({*(2**i for i in range(most.bit_length()) if 2**i <= most), most})
    return DraftWorth(length, context, most, {n: steps[n] for n in shown}, last + 1 if slower and last < most else None)


def _steps(cost: SpeculativeCost, n: int, proposes: float, context: int) -> tuple[float, float]:
    kv = n * context
    return cost.plain.step_s((), n, kv), cost.step_s((), n, kv, drafts=round(n * cost.tokens * proposes))
