"""Sessions as chains of turns: from session ids to what follows what, and back. It knows nothing of files."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from workloads.trace import Floats, Ints


def follow(keys: Ints) -> Ints:
    """int64[n]: the position before of the same key, -1 where there is none or the key is negative."""
    order = np.argsort(keys, kind="stable")
    same = (keys[order[1:]] == keys[order[:-1]]) & (keys[order[1:]] >= 0)
    previous = np.full(keys.size, -1, dtype=np.int64)
    previous[order[1:][same]] = order[:-1][same]
    return previous


def sessions(previous: Ints) -> tuple[Ints, Ints]:
    """(int64[n] the position of each request's first turn, int64[n] how many turns came before it)."""
    at = np.arange(previous.size)
    first, depth = np.where(previous < 0, at, previous), (previous >= 0).astype(np.int64)
    while (further := previous[first] >= 0).any():  # each round doubles the distance looked back
        depth = np.where(further, depth + depth[first], depth)
        first = first[first]
    return first, depth


def hand_on(think_s: Floats, keys: Ints, kept: NDArray[np.bool_]) -> Floats:
    """Think times in which each row that is not kept has added its own to the next of the same key.

    A client that thought, sent a turn which the trace cannot use, and thought again, thought for the sum.
    """
    handed = think_s.copy()
    order = np.argsort(keys, kind="stable")
    for i in np.flatnonzero(~kept[order[:-1]]):
        row, after = order[i], order[i + 1]
        if keys[row] == keys[after] and keys[row] >= 0:
            handed[after] += handed[row]
    return handed
