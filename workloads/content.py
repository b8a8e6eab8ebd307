"""Which KV blocks of a trace's prompts hold the same: what prompts begin with, in blocks of an engine's own size.

It knows nothing of caches. A KV block can be shared if all of it lies in content blocks that are known, and that more
than one prompt begins with; nobody else would look for it. Whatever follows in a prompt is its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workloads.prefix import Ints, Prefix, leading


@dataclass(frozen=True, slots=True, eq=False)
class Content:
    """The leading KV blocks of n prompts that others have too, in stretches that the same prompts have in common.

    offsets: int64[n + 1]: request i has the content blocks offsets[i] to before offsets[i + 1]. chains: int64[blocks]:
    what each and all before it hold. begins: bool[blocks]: a stretch begins with it. blocks: int64[n]: KV blocks of
    each prompt that can be shared. content_tokens, block_tokens: tokens of a content block and of a KV block.
    """

    offsets: Ints
    chains: Ints
    begins: NDArray[np.bool_]
    blocks: Ints
    content_tokens: int
    block_tokens: int

    def path(self, request: int) -> list[tuple[int, int]]:
        """What the prompt begins with, as far as others have the same: (content, the KV block before which it ends).

        A KV block is of the stretch in which it ends. Equal contents begin with the same block.
        """
        count = int(self.blocks[request])
        if not count:
            return []
        first, last = self.offsets[request : request + 2]
        where = np.flatnonzero(self.begins[first:last])
        ends = np.minimum(np.append(where[1:] * self.content_tokens // self.block_tokens, count), count)
        path: list[tuple[int, int]] = []
        for content, end in zip(self.chains[first + where].tolist(), ends.tolist(), strict=True):
            if end > (path[-1][1] if path else 0):
                path.append((content, end))
        return path


def content_of(prefix: Prefix, prompt_tokens: Ints, block_tokens: int) -> Content:
    """The shared content of prompts of `prompt_tokens` tokens (int64[n]), for KV blocks of `block_tokens` tokens."""
    ids = prefix.ids if prefix.chained else _chains(prefix)
    if ids.size and ids.min() >= 0 and ids.max() <= 8 * ids.size:  # numbered already: no need to sort them
        chains, counts = ids, np.bincount(ids)
    else:
        _, chains, counts = np.unique(ids, return_inverse=True, return_counts=True)
        chains = chains.astype(np.int64)
    prompts = counts[chains]  # that have it: the same ones as long as the number is the same
    begins = np.append(True, prompts[1:] != prompts[:-1])[: ids.size]
    begins[prefix.offsets[:-1][np.diff(prefix.offsets) > 0]] = True
    known = np.minimum(leading(prompts > 1, prefix.offsets) * prefix.block_tokens, prompt_tokens)
    return Content(prefix.offsets, chains, begins, known // block_tokens, prefix.block_tokens, block_tokens)


def _chains(prefix: Prefix) -> Ints:
    """int64[blocks]: an id of each content block and all before it, from ids that name contents alone."""
    counts = np.diff(prefix.offsets)
    chains = np.zeros(prefix.ids.size, dtype=np.int64)
    before = np.zeros(len(prefix), dtype=np.int64)
    rows, named = np.flatnonzero(counts), 0
    for position in range(int(counts.max(initial=0))):
        rows = rows[counts[rows] > position]
        at = prefix.offsets[rows] + position
        distinct, inverse = np.unique(np.stack([before[rows], prefix.ids[at]]), axis=1, return_inverse=True)
        chains[at] = before[rows] = named + inverse.ravel()
        named += distinct.shape[1]
    return chains
