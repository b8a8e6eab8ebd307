"""What prompts begin with: content blocks, so that shared prefixes can be seen. Columns, not objects.

It knows nothing of caches in engines: the hit rates here are those of a cache that never forgets, or of a plain LRU.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from servecast.errors import ServecastError

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """The blocks of n prompts: request i has ids[offsets[i]:offsets[i + 1]], from its first token on.

    offsets: int64[n + 1], from 0, ascending. ids: int64[offsets[-1]]; equal ids are equal content. block_tokens: tokens
    of a block. chained: an id names its block and all before it (Mooncake, Bailian), so after a first unknown block no
    other can be known; otherwise ids name contents alone. A last, partly filled block counts where the source has one.
    """

    offsets: Ints
    ids: Ints
    block_tokens: int
    chained: bool = True

    def __post_init__(self) -> None:
        steps = np.diff(self.offsets)
        if self.block_tokens < 1 or self.offsets[0] != 0 or (steps < 0).any() or self.offsets[-1] != self.ids.size:
            raise ServecastError("prefix blocks: offsets do not describe the ids, or the block size is below 1")

    def __len__(self) -> int:
        return int(self.offsets.size) - 1

    def rows(self, index: Ints) -> Prefix:
        """The blocks of the requests `index` (int64[k]), in that order."""
        counts = np.diff(self.offsets)[index]
        offsets = np.concatenate([[0], np.cumsum(counts)])
        within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], counts)
        ids = self.ids[np.repeat(self.offsets[index], counts) + within]
        return Prefix(offsets, ids, self.block_tokens, self.chained)

    def known_blocks(self) -> Ints:
        """int64[n]: how many leading blocks of each prompt were in earlier prompts: the hits of a boundless cache."""
        first = np.unique(self.ids, return_index=True, return_inverse=True)
        owner = np.repeat(np.arange(len(self)), np.diff(self.offsets))
        known = owner[first[1]][first[2]] < owner  # the request in which each id first stood is an earlier one
        return leading(known, self.offsets)

    def known_blocks_lru(self, blocks: int) -> Ints:
        """int64[n]: the same for an LRU of `blocks` blocks: leading residents hit, then all are touched in order."""
        cache: OrderedDict[int, None] = OrderedDict()
        ids, known = self.ids.tolist(), np.zeros(len(self), dtype=np.int64)
        bounds = self.offsets.tolist()
        for i in range(len(self)):
            mine = ids[bounds[i] : bounds[i + 1]]
            hits = 0
            while hits < len(mine) and mine[hits] in cache:
                hits += 1
            known[i] = hits
            for block in mine:
                if block in cache:
                    cache.move_to_end(block)
                else:
                    cache[block] = None
                    if len(cache) > blocks:
                        cache.popitem(last=False)
        return known


def leading(flags: NDArray[np.bool_], offsets: Ints) -> Ints:
    """int64[n]: how many leading flags of each row are set."""
    position = np.arange(flags.size)
    miss = np.where(flags, flags.size, position)
    starts, ends = offsets[:-1], offsets[1:]
    rows = starts < ends
    first = np.full(starts.size, 0, dtype=np.int64)
    if rows.any():
        first[rows] = np.minimum(np.minimum.reduceat(miss, starts[rows]), ends[rows]) - starts[rows]
    return first
