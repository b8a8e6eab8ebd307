"""Which KV blocks of a trace's prompts hold the same: what prompts begin with, in blocks of an engine's own size.

It knows nothing of caches. A KV block can be shared if all of it lies in content blocks that are known, and that more
than one prompt begins with; nobody else would look for it. Whatever follows in a prompt is its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from workloads.prefix import Ints, Prefix, leading


@dataclass(frozen=True, slots=True, eq=False)
class Content:
    """The leading KV blocks of n prompts that others have too, in stretches that the same prompts have in common.

    offsets: int64[n + 1]: request i has the stretches offsets[i] to before offsets[i + 1]. contents: int64[stretches]:
    what a stretch and all before it hold; equal ones begin with the same block. ends: int64[stretches]: the KV block of
    the prompt before which it ends; those of one content begin alike, and may end apart.
    """

    offsets: Ints
    contents: Ints
    ends: Ints

    def path(self, request: int) -> list[tuple[int, int]]:
        """What the prompt begins with, as far as others have the same: (content, the KV block before which it ends)."""
        first, last = self.offsets[request : request + 2]
        return list(zip(self.contents[first:last].tolist(), self.ends[first:last].tolist(), strict=True))


def content_of(prefix: Prefix, prompt_tokens: Ints, block_tokens: int) -> Content:
    """The shared content of prompts of `prompt_tokens` tokens (int64[n]), for KV blocks of `block_tokens` tokens.

    A KV block is of the stretch in which it ends.
    """
    chains, prompts = _named(prefix)
    counts = np.diff(prefix.offsets)
    begins = np.append(True, prompts[1:] != prompts[:-1])[: chains.size]  # the same number: the same prompts
    begins[prefix.offsets[:-1][counts > 0]] = True
    where = np.flatnonzero(begins)
    row = np.searchsorted(prefix.offsets, where, side="right") - 1
    bounds = np.searchsorted(row, np.arange(len(prefix) + 1))
    start = np.append(where - prefix.offsets[row], 0)  # in content blocks of the prompt
    shared = leading(prompts[where] > 1, bounds)  # stretches
    blocks = np.where(shared < np.diff(bounds), start[bounds[:-1] + shared], counts) * prefix.block_tokens
    blocks = np.minimum(blocks, prompt_tokens) // block_tokens  # KV blocks that can be shared
    last = np.append(row[1:] != row[:-1], True)[: row.size]
    ends = np.minimum(np.where(last, blocks[row], start[1:] * prefix.block_tokens // block_tokens), blocks[row])
    before = np.append(0, ends[:-1])[: ends.size]
    kept = ends > np.where(np.append(True, last[:-1])[: row.size], 0, before)
    return Content(np.searchsorted(row[kept], np.arange(len(prefix) + 1)), chains[where[kept]], ends[kept])


def _named(prefix: Prefix) -> tuple[Ints, Ints]:
    """int64[blocks] each: what a content block and all before it hold, and how many prompts have that."""
    ids = prefix.ids if prefix.chained else _chains(prefix)
    if ids.size and ids.min() >= 0 and ids.max() <= 8 * ids.size:  # numbered already: no need to sort them
        return ids, np.bincount(ids)[ids]
    _, chains, counts = np.unique(ids, return_inverse=True, return_counts=True)
    return chains.astype(np.int64), counts[chains]


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
