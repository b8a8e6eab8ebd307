"""Seconds of a batch as straight lines in all its KV tokens, for a simulator's loop. It knows no fit and no tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

SAME = 1e-6  # relative difference of slopes
TOLERANCE = 0.005  # knots are left out while no price changes by more


@dataclass(frozen=True, slots=True)
class KvLines:
    """`lines[n]` for n sequences: (upto, a, b) in increasing order: `a + b x kv_tokens` seconds for all KV tokens (in
    cache before the step, summed over the sequences) up to and including `upto`; the last one goes to infinity.
    Neighbours meet at `upto`, b is never negative, and no sequences take no time."""

    lines: list[list[tuple[float, float, float]]]

    def seconds(self, sequences: int, kv_tokens: float) -> float:
        """Seconds of one kernel; in a window kind `kv_tokens` counts at most `window` a sequence."""
        for upto, a, b in self.lines[sequences]:
            if kv_tokens <= upto:
                return a + b * kv_tokens
        raise AssertionError("the last line goes to infinity")

    def times(self, factor: float) -> KvLines:
        """Every price times `factor`."""
        return KvLines([[(upto, factor * a, factor * b) for upto, a, b in pieces] for pieces in self.lines])


def compile_lines(contexts: Floats, seconds: Floats, level: bool) -> KvLines:
    """`seconds[i, j]` of i + 1 sequences with `contexts[j]` cached tokens each, increasing from 0, as lines.

    Beyond the last context the last line goes on, or, where `level`, seconds stay.
    """
    batch = np.arange(1, len(seconds) + 1, dtype=np.float64)[:, None]
    rise = np.diff(seconds, axis=1) / (batch * np.diff(contexts))
    if level or len(contexts) == 1:
        rise = np.concatenate([rise, np.zeros_like(batch)], axis=1)
    starts = batch * contexts[: rise.shape[1]]
    base = seconds[:, : rise.shape[1]] - rise * starts
    upto = np.concatenate([starts[:, 1:], np.full_like(batch, np.inf)], axis=1)
    ends = np.ones_like(upto, bool)  # where the next line is another one, not the same in other digits
    ends[:, :-1] = np.abs(np.diff(rise, axis=1)) > SAME * rise[:, 1:]
    rows = zip(upto.tolist(), base.tolist(), rise.tolist(), ends.tolist(), strict=True)
    return KvLines([[(float("inf"), 0.0, 0.0)], *(_distinct(row) for row in rows)])


def few_knots(contexts: Floats, seconds: Floats) -> NDArray[np.int64]:
    """Which columns of `seconds[i, j]` at `contexts[j]` to keep so that lines between them are within TOLERANCE."""
    kept = list(range(len(contexts)))
    while len(kept) > 2:
        off = [_off(contexts, seconds, kept, i) for i in range(1, len(kept) - 1)]
        if min(off) > TOLERANCE:
            break
        del kept[1 + int(np.argmin(off))]
    return np.array(kept, np.int64)


def _off(contexts: Floats, seconds: Floats, kept: list[int], i: int) -> float:
    """The largest relative change of any column between the neighbours of `kept[i]` once it is left out."""
    low, high = kept[i - 1], kept[i + 1]
    inner = np.arange(low + 1, high)
    share = (contexts[inner] - contexts[low]) / (contexts[high] - contexts[low])
    line = seconds[:, [low]] * (1 - share) + seconds[:, [high]] * share
    return float(np.abs(line / seconds[:, inner] - 1).max())


def _distinct(row: tuple[list[float], list[float], list[float], list[bool]]) -> list[tuple[float, float, float]]:
    """The lines of one batch size; a run of equal ones as its last, which is exact up to rounding."""
    return [(upto, a, b) for upto, a, b, ends in zip(*row, strict=True) if ends]
